"""Measure flipbook: what its autoencoder keeps, and whether its clips show what their captions say.

    python evaluate.py --model src/undercrank/flipbook --judge build/flipbook/judge.safetensors --out build/evaluation
    python evaluate.py --report build/evaluation/evaluation.json --document docs/flipbook.md

The first call generates and judges about 900 clips (a minute on one H200, hours on a CPU: use ``--few`` there) and
writes ``evaluation.json`` and two sheets of unselected clips.  The second writes the tables into the document, between
its two marker comments, and ends with status 1 if a gate fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

import judge as judging
import models
import world
from train_vae import psnr


@dataclass(frozen=True)
class Counts:
    """How many clips each question gets."""

    vae: int = 128
    judge: int = 1024
    rebuilt: int = 256
    captions: int = 192
    sweep: int = 96
    prompts: int = 8
    seeds: int = 8
    batch: int = 64
    sheet: int = 24
    held_out_sheet: int = 20
    steps: int = 25


FEW = Counts(vae=2, judge=8, rebuilt=2, captions=2, sweep=2, prompts=2, seeds=2, batch=2, steps=4)

GATES = {
    "seen": {"colour": 0.95, "background": 0.95, "shape": 0.90, "motion": 0.85},
    "held_out": {"colour": 0.75, "background": 0.75, "shape": 0.75, "motion": 0.75},
    "renders": dict.fromkeys(world.JUDGED, 0.97),
}
VAE_DECIBELS, VAE_GAIN, VAE_DRIFT = 30.0, 12.0, 1.5
SEED_SHARE = 0.5
GUIDANCE, OTHER_GUIDANCE = 5.0, (1.0, 3.0, 7.0)


# ------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Bench:
    pipeline: DiffusionPipeline
    judge: judging.Judge
    counts: Counts
    device: torch.device

    def scenes(self, count: int, seed: int, split: str) -> world.Scenes:
        return world.sample_scenes(count, seed, split).to(self.device)


def measure(bench: Bench, out: Path) -> dict:
    results: dict = {"autoencoder": measure_autoencoder(bench)}
    say(results)
    results["judge"] = measure_judge(bench)
    say(results["judge"])
    results["captions"] = measure_captions(bench, out)
    say(results["captions"])
    results["settings"] = measure_settings(bench)
    say(results["settings"])
    results["seeds"] = measure_seeds(bench)
    say(results["seeds"])
    machine = {"torch": torch.__version__, "device": device_name(bench.device)}
    results["made_with"] = machine | {"steps": bench.counts.steps}
    return results


@torch.no_grad()
def measure_autoencoder(bench: Bench) -> dict:
    scenes = bench.scenes(bench.counts.vae, 31, "held_out")
    clip, frame, baseline = [], [], []
    for start in range(0, len(scenes), 16):
        frames = world.render(scenes[slice(start, start + 16)])
        rebuilt = rebuild(bench.pipeline.vae, frames)
        clip.append(psnr(rebuilt, frames))
        frame.append(psnr(rebuilt, frames, dims=(1, 3, 4)))
        baseline.append(psnr(frames.mean((2, 3, 4), keepdim=True).expand_as(frames), frames))
    clip, frame, baseline = torch.cat(clip), torch.cat(frame), torch.cat(baseline)
    return {
        "n": len(clip), "psnr": float(clip.mean()), "half_width": 1.96 * float(clip.std()) / math.sqrt(len(clip)),
        "worst": float(clip.min()), "baseline": float(baseline.mean()),
        "first_9": float(frame[:, :9].mean()), "last_9": float(frame[:, -9:].mean()),
    }  # fmt: skip


@torch.no_grad()
def rebuild(vae, frames_BCTHW: torch.Tensor) -> torch.Tensor:
    """Through the shipped model's own encode and decode, not through training's faster ones."""
    return vae.decode(vae.encode(frames_BCTHW).latent_dist.mode(), return_dict=False)[0]


def measure_judge(bench: Bench) -> dict:
    """The judge on fresh renders, and on renders that went through the autoencoder: the most a model here can get."""
    results = {}
    scenes = bench.scenes(bench.counts.judge, 41, "any")
    results["renders"] = tally([judging.grade(bench.judge, world.render(part), part) for part in split(scenes)])
    for name in ("seen", "held_out"):
        scenes = bench.scenes(bench.counts.rebuilt, 42, name)
        parts = [(part, rebuild(bench.pipeline.vae, world.render(part))) for part in split(scenes, 16)]
        results[f"rebuilt_{name}"] = tally([judging.grade(bench.judge, frames, part) for part, frames in parts])
    return results


def measure_captions(bench: Bench, out: Path) -> dict:
    """The gates: complete captions of both splits, one clip each, none left out."""
    results = {}
    for name, seed, rows in (("seen", 51, bench.counts.sheet), ("held_out", 52, bench.counts.held_out_sheet)):
        scenes = bench.scenes(bench.counts.captions, seed, name)
        prompts = world.captions(scenes, seed, world.complete)
        clips = generate(bench, prompts)
        results[name] = tally([judging.grade(bench.judge, clips, scenes)])
        results[f"{name}_shuffled"] = tally([judging.grade(bench.judge, clips, scenes[torch.arange(len(scenes)) - 1])])
        results[f"{name}_per_motion"] = per_value(judging.grade(bench.judge, clips, scenes)["motion"], scenes, "motion")
        results[f"{name}_per_shape"] = per_value(judging.grade(bench.judge, clips, scenes)["shape"], scenes, "shape")
        draw_sheet(clips[:rows], prompts[:rows]).save(out / f"{name}.webp", quality=88, method=6)
    return results


def measure_settings(bench: Bench) -> dict:
    """Other guidance and other text padding, on one set of captions and seeds."""
    scenes = bench.scenes(bench.counts.sweep, 61, "any")
    prompts = world.captions(scenes, 61, world.complete)
    usual = generate(bench, prompts)
    results = {f"guidance {GUIDANCE:g}": tally([judging.grade(bench.judge, usual, scenes)])}
    for guidance in OTHER_GUIDANCE:
        clips = generate(bench, prompts, guidance_scale=guidance)
        results[f"guidance {guidance:g}"] = tally([judging.grade(bench.judge, clips, scenes)])
    padded = generate(bench, prompts, max_sequence_length=512)
    results["text length 512"] = tally([judging.grade(bench.judge, padded, scenes)])
    results["text length 512"]["psnr_to_64"] = float(psnr(padded, usual).mean())
    return dict(sorted(results.items()))


def measure_seeds(bench: Bench) -> dict:
    """Root mean square distance between clips (pixels in [0, 1]) of one caption under different seeds."""
    scenes = bench.scenes(bench.counts.prompts, 71, "seen")
    prompts = [prompt for prompt in world.captions(scenes, 71, world.complete) for _ in range(bench.counts.seeds)]
    clips = generate(bench, prompts).unflatten(0, (len(scenes), bench.counts.seeds)) / 2
    within = torch.stack([pairwise_distances(group) for group in clips])
    between = pairwise_distances(clips[:, 0])
    renders = torch.stack([pairwise_distances(world.render(again(scenes[[i] * bench.counts.seeds], 72 + i)) / 2)
                           for i in range(len(scenes))])  # fmt: skip
    return {
        "prompts": len(scenes), "seeds": bench.counts.seeds, "same_caption_mean": float(within.mean()),
        "same_caption_least": float(within.min()), "other_caption_mean": float(between.mean()),
        "renders_same_caption_mean": float(renders.mean()),
    }  # fmt: skip


def again(scenes: world.Scenes, seed: int) -> world.Scenes:
    """The same attributes with new positions, sizes and patterns."""
    fresh = world.sample_scenes(len(scenes), seed).to(scenes.codes["shape"].device)
    return world.Scenes(scenes.codes, fresh.jitters)


def pairwise_distances(clips: torch.Tensor) -> torch.Tensor:
    flat = clips.flatten(1).cpu()
    first, second = torch.triu_indices(len(flat), len(flat), offset=1)
    return (flat[first] - flat[second]).pow(2).mean(1).sqrt()


@torch.no_grad()
def generate(bench: Bench, prompts: list[str], first_seed: int = 0, **changes) -> torch.Tensor:
    """One clip for each prompt, in [-1, 1]; clip i has seed ``first_seed + i`` whatever the batch size."""
    call = {"guidance_scale": GUIDANCE, "max_sequence_length": models.TEXT_LENGTH} | changes
    parts = []
    for start in range(0, len(prompts), bench.counts.batch):
        some = prompts[start : start + bench.counts.batch]
        generators = [torch.Generator().manual_seed(first_seed + start + i) for i in range(len(some))]
        frames_BTCHW = bench.pipeline(
            prompt=some, negative_prompt="", height=world.SIDE, width=world.SIDE, num_frames=world.FRAMES,
            num_inference_steps=bench.counts.steps, generator=generators, output_type="pt", **call,
        ).frames  # fmt: skip
        parts.append(frames_BTCHW.transpose(1, 2).float() * 2 - 1)
    return torch.cat(parts)


def split(scenes: world.Scenes, size: int = 64) -> list[world.Scenes]:
    return [scenes[slice(start, start + size)] for start in range(0, len(scenes), size)]


def tally(grades: list[dict[str, torch.Tensor]]) -> dict:
    """Share of right answers for each judged attribute, and for all four at once, with Wilson's interval."""
    right = {name: torch.cat([grade[name] for grade in grades]) for name in world.JUDGED}
    right["all four"] = torch.stack(list(right.values())).all(0)
    count = len(right["all four"])
    return {"n": count} | {name: share(int(correct.sum()), count) for name, correct in right.items()}


def per_value(correct: torch.Tensor, scenes: world.Scenes, name: str) -> dict:
    code = scenes.codes[name]
    groups = {value: correct[code == i] for i, value in enumerate(world.ATTRIBUTES[name])}
    return {value: [int(group.sum()), len(group)] for value, group in groups.items() if len(group)}


def share(right: int, count: int, z: float = 1.96) -> list[float]:
    """Share, and the 95 % interval of Wilson (1927)."""
    p = right / count
    centre = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return [p, max(0.0, centre - half), min(1.0, centre + half)]


def draw_sheet(clips_BCTHW: torch.Tensor, prompts: list[str], columns: int = 2, frames: int = 6, side: int = 96):
    """Each clip as a row of frames under its prompt."""
    rows = math.ceil(len(prompts) / columns)
    line, gap = 14, 6
    sheet = Image.new("RGB", (columns * (frames * side + gap) - gap, rows * (side + line + gap)), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (clip, prompt) in enumerate(zip(clips_BCTHW.cpu(), prompts, strict=True)):
        left, top = (i // rows) * (frames * side + gap), (i % rows) * (side + line + gap)
        pen.text((left + 2, top + 1), prompt, fill="black")
        for k in range(frames):
            pixels = (clip[:, round(k * (clip.shape[1] - 1) / (frames - 1))] + 1) * 127.5
            image = Image.fromarray(pixels.round().clamp(0, 255).byte().permute(1, 2, 0).numpy())
            sheet.paste(image.resize((side, side), Image.LANCZOS), (left + k * side, top + line))
    return sheet


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def say(results) -> None:
    print(json.dumps(results), flush=True)


# -------------------------------------------------------------------------------------------------------- reporting


def report(results: dict) -> tuple[str, bool]:
    """The tables for the document, and whether every gate is met."""
    gates = gate_rows(results)
    passed = all(row[-1] == "yes" for row in gates)
    captions, judge = results["captions"], results["judge"]
    texts = [
        "### Gates",
        table(["What", "Measured", "n", "Gate", "Met"], gates),
        "### All scores by the judge",
        table(["Clips", "n", *world.JUDGED, "all four"], [
            score_row("fresh renders", judge["renders"]),
            score_row("renders through the autoencoder, seen pairs", judge["rebuilt_seen"]),
            score_row("renders through the autoencoder, held-out pairs", judge["rebuilt_held_out"]),
            score_row("**generated, seen pairs**", captions["seen"]),
            score_row("**generated, held-out pairs**", captions["held_out"]),
            score_row("generated, captions shuffled (chance), seen pairs", captions["seen_shuffled"]),
            score_row("generated, captions shuffled (chance), held-out pairs", captions["held_out_shuffled"]),
            *[score_row(f"generated, both kinds, {name}", score) for name, score in results["settings"].items()],
        ]),
        "### Right answers by motion and by shape",
        table(["Split", "Motion", "Shape"], [
            [name, fractions(captions[f"{key}_per_motion"]), fractions(captions[f"{key}_per_shape"])]
            for name, key in (("seen", "seen"), ("held-out", "held_out"))
        ]),
        "### Seeds",
        seed_sentence(results["seeds"]),
        f"Text padded to 512 instead of 64 tokens changes a clip by "
        f"{results['settings']['text length 512']['psnr_to_64']:.1f} dB (PSNR between the two).",
    ]  # fmt: skip
    return "\n\n".join(texts) + "\n", passed


def gate_rows(results: dict) -> list[list[str]]:
    vae = results["autoencoder"]
    gain, drift = vae["psnr"] - vae["baseline"], vae["first_9"] - vae["last_9"]
    interval = f"{vae['psnr']:.2f} ± {vae['half_width']:.2f} dB (worst clip {vae['worst']:.2f})"
    rows = [
        ["autoencoder, whole held-out clips", interval, vae["n"], f"≥ {VAE_DECIBELS:g} dB",
         yes(vae["psnr"] >= VAE_DECIBELS)],
        ["… over a clip's mean colour", f"+{gain:.2f} dB (mean colour: {vae['baseline']:.2f} dB)", vae["n"],
         f"≥ +{VAE_GAIN:g} dB", yes(gain >= VAE_GAIN)],
        ["… first 9 frames against last 9", f"{vae['first_9']:.2f} and {vae['last_9']:.2f} dB", vae["n"],
         f"within {VAE_DRIFT:g} dB", yes(abs(drift) <= VAE_DRIFT)],
    ]  # fmt: skip
    for title, scores, gates in (
        ("judge on fresh renders", results["judge"]["renders"], GATES["renders"]),
        ("generated, seen pairs", results["captions"]["seen"], GATES["seen"]),
        ("generated, held-out pairs", results["captions"]["held_out"], GATES["held_out"]),
    ):
        for name, least in gates.items():
            met = yes(scores[name][0] >= least)
            rows.append([f"{title}: {name}", percent(scores[name]), scores["n"], f"≥ {100 * least:g} %", met])
    return [*rows, seed_row(results["seeds"])]


def seed_row(seeds: dict) -> list:
    """Seeds must differ at least half as much as renders of one caption do, and no two may be alike."""
    apart = seeds["same_caption_mean"] >= SEED_SHARE * seeds["renders_same_caption_mean"]
    unlike = seeds["same_caption_least"] > 0.01
    gate = f"≥ {SEED_SHARE * seeds['renders_same_caption_mean']:.3f}, half of what renders differ by; no two alike"
    measured = f"{seeds['same_caption_mean']:.3f} (closest two: {seeds['same_caption_least']:.3f})"
    return ["seeds of one caption differ", measured, seeds["prompts"] * seeds["seeds"], gate, yes(apart and unlike)]


def score_row(title: str, scores: dict) -> list[str]:
    return [title, scores["n"], *[percent(scores[name]) for name in (*world.JUDGED, "all four")]]


def percent(score: list[float]) -> str:
    middle, low, high = (100 * value for value in score)
    return f"{middle:.1f} % ({low:.1f} to {high:.1f})"


def fractions(groups: dict) -> str:
    return ", ".join(f"{name} {right}/{count}" for name, (right, count) in groups.items())


def seed_sentence(seeds: dict) -> str:
    return (
        f"{seeds['prompts']} captions with {seeds['seeds']} seeds each, root mean square distance of pixels in [0, 1]: "
        f"{seeds['same_caption_mean']:.3f} between seeds of one caption, "
        f"{seeds['other_caption_mean']:.3f} between captions. Renders of one caption differ by "
        f"{seeds['renders_same_caption_mean']:.3f}."
    )


def yes(met: bool) -> str:
    return "yes" if met else "**no**"


def table(head: list, rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_into(document: Path, text: str) -> None:
    begin, end = "<!-- evaluation: begin -->", "<!-- evaluation: end -->"
    before, rest = document.read_text().split(begin)
    after = rest.split(end)[1]
    document.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--few", action="store_true", help="a handful of clips, to try the script on a CPU")
    parser.add_argument("--report", type=Path, help="make the tables from this evaluation.json")
    parser.add_argument("--document", type=Path, help="write the tables into this file, else print them")
    args = parser.parse_args()
    if args.report:
        text, passed = report(json.loads(args.report.read_text()))
        write_into(args.document, text) if args.document else print(text)
        sys.exit(0 if passed else 1)
    run_measurements(args.model, args.judge, args.out, FEW if args.few else Counts())


def run_measurements(model: Path, judge: Path, out: Path, counts: Counts) -> None:
    begun = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = DiffusionPipeline.from_pretrained(model).to(device)
    pipeline.set_progress_bar_config(disable=True)
    network = models.load_weights(judging.build_judge(), judge).to(device).eval()
    out.mkdir(parents=True, exist_ok=True)
    results = measure(Bench(pipeline, network, counts, device), out)
    results["made_with"]["seconds"] = round(time.time() - begun)
    (out / "evaluation.json").write_text(json.dumps(results, indent=1))
    text, passed = report(results)
    print(f"{text}\nall gates met: {passed}", flush=True)


if __name__ == "__main__":
    main()
