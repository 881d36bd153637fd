"""Which schedule keeps flipbook's films nearest for as many calls: presets, resamplings, searched paths, fewer steps.

First paths are searched for on films apart (or taken from --paths). Then every setting films the same prompts and seeds
as the reference (every step computed, same number of steps), all films of a setting in one call of the pipeline. Rows
are written as they come: one a film to OUT/results.jsonl, one a setting to OUT/settings.jsonl, what was found to
OUT/paths.jsonl. What matters most is filmed first, so that a run that --seconds cuts short still says the main thing:

    python tools/study/step_cache_flipbook.py --out study --device cuda --seconds 180

ST-LPIPS takes the weights of the package stlpips-pytorch: without it a folder stlpips_pytorch on PYTHONPATH serves,
with an empty __init__.py and weights/vST0.0/alex_shift_tolerant.pth. A trial on a CPU:

    python tools/study/step_cache_flipbook.py --out small --prompts 3 --seeds 1 --steps 20 --frames 9 --search-films 2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from undercrank import families, paths, ratios, schedules, searching
from undercrank.levers import step_cache
from undercrank.levers.caches import Scheduled
from undercrank.levers.programs import Phase, Programs, checkpoint, phases
from undercrank.levers.stacks import stacked
from undercrank.load import load
from undercrank.planner import load_spec
from undercrank.prompts import SET_UP_SEED, prompts_for, searched_on, set_up_prompt
from undercrank.quality import EQUAL_DB, compare_frames
from undercrank.ratios import Curve
from undercrank.rig import Rig
from undercrank.schedules import PRESETS, Rule, Schedule
from undercrank.undo import appended

CALIBRATED_STEPS = 50
METRICS = ("psnr_db", "ssim", "st_lpips_alex")

Plans = dict[str, Schedule]
"A schedule for each branch."


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    kind: str
    """floor; preset (MagCache's rule); path (searched); gaps (by gaps alone, not tried); drifts (no look at films);
    equal (MagCache's rule at the calls of a path); steps (fewer steps)"""
    of: int
    "Steps of the reference."
    preset: str = ""
    "Whose calls it spends."
    steps: int
    plans: Plans = field(default_factory=dict)
    "Empty: every step is computed."
    how: str = ""
    "Of a floor: bfloat16, or math (attention by plain products)."
    extra: bool = False
    "Filmed after everything that is not."

    @property
    def calls(self) -> int:
        return sum(map(sum, self.plans.values())) if self.plans else 2 * self.steps


# --------------------------------------------------------------------------- filming


class Studio:
    """flipbook on a device, with films of a list of (prompt, seed)."""

    def __init__(self, rig: Rig, films: Sequence[tuple[str, int]], args: argparse.Namespace) -> None:
        self.rig, self.films, self.args = rig, films, args
        tensors = (*rig.pipe.transformer.parameters(), *rig.pipe.transformer.buffers())
        self._checkpoint = checkpoint(rig.pipe.transformer)
        self._exact = [(tensor, tensor.data) for tensor in tensors]  # also buffers that no state dict holds

    def shoot(self, films: Sequence[tuple[str, int]], steps: int, make: Any) -> torch.Tensor:
        """Frames, films x F 3 H W in uint8 on the CPU."""
        starts = range(0, len(films), self.args.batch)
        return torch.cat([self._batch(films[start : start + self.args.batch], steps, make) for start in starts])

    def _batch(self, films: Sequence[tuple[str, int]], steps: int, make: Any) -> torch.Tensor:
        rig, args = self.rig, self.args
        with ExitStack() as stack:
            if make is not None:
                programs = Programs(rig, make)
                cache, beside = Scheduled(rig, programs), Scheduled(rig, programs)
                stack.enter_context(appended(rig.at_start, programs.start))
                stack.enter_context(appended(rig.at_end, programs.finish))
                stack.enter_context(stacked(rig, cache, beside))
            stack.enter_context(rig.call())
            stack.enter_context(torch.no_grad())
            frames = rig.pipe(
                prompt=[prompt for prompt, _ in films],
                negative_prompt="",
                generator=[torch.Generator().manual_seed(seed) for _, seed in films],
                num_inference_steps=steps,
                guidance_scale=rig.family.guidance_scale,
                height=args.size,
                width=args.size,
                num_frames=args.frames,
                max_sequence_length=rig.family.max_sequence_length,
                output_type="pt",
            ).frames
        assert {key: run for key, run in rig.executed.items()} == rig.planned
        return (frames.float() * 255).round().clamp(0, 255).to(torch.uint8).cpu()

    def film(self, setting: Setting) -> torch.Tensor:
        def make(phase: Phase, curve: Curve | None) -> Schedule:
            assert curve is not None, "measure flipbook first: the curve also names the branch"
            return setting.plans[curve.branch]

        with self._floor(setting.how):
            return self.shoot(self.films, setting.steps, make if setting.plans else None)

    @contextmanager
    def _floor(self, how: str) -> Iterator[None]:
        transformer = self.rig.pipe.transformer
        if how == "math":
            with sdpa_kernel(SDPBackend.MATH):
                yield
        elif how == "bfloat16":
            kept = [(module, dict(module._buffers)) for module in transformer.modules()]
            transformer.to(torch.bfloat16)
            try:
                yield
            finally:
                for tensor, data in self._exact:
                    tensor.data = data
                for module, buffers in kept:
                    module._buffers.update(buffers)
                assert checkpoint(transformer) == self._checkpoint, "the denoiser is not what it was"
        else:
            yield

    def measure(self, steps: int) -> dict[str, Curve]:
        """Curves by branch, of a prompt and a seed that are among no films."""
        film = (set_up_prompt(self.rig.family), SET_UP_SEED)
        assert film not in self.films
        before = len(ratios.read_curves())
        self.shoot([film], steps, lambda phase, curve: None)
        return {curve.branch: curve for curve in ratios.read_curves()[before:]}

    def levels(self, steps: int) -> tuple[float, ...]:
        self.rig.scheduler.set_timesteps(steps)
        return phases(self.rig, steps)["transformer"].levels


# --------------------------------------------------------------------------- paths


def found_paths(studio: Studio, steps: int, curves: dict[str, Curve], args: argparse.Namespace) -> list[paths.Path]:
    """Those of a file, or a search; the films of a search are none of the study's."""
    if args.paths:
        return [paths.Path.from_json(line) for line in args.paths.read_text().splitlines()]
    family = studio.rig.family
    prompts = searched_on(family, args.search_films)
    assert not set(prompts) & {prompt for prompt, _ in studio.films}
    films = searching.Films(
        prompts=prompts, seeds=tuple(range(searching.SEARCH_SEED, searching.SEARCH_SEED + len(prompts))),
        width=args.size, height=args.size, num_frames=args.frames, num_inference_steps=steps,
        guidance_scale=family.guidance_scale, rows=args.rows,
    )  # fmt: skip
    budgets = dict.fromkeys(schedules.budget_of(preset, steps) for preset in PRESETS)
    numbers = schedules.nearest(curves["cond"].ratios, steps)
    begun = time.perf_counter()
    with coarse_products(args.device):
        found = searching.search(
            studio.rig, films, tuple(budgets), rule=lambda rule: schedules.magcache(numbers, rule), moves=args.moves,
            tell=say,
        )  # fmt: skip
    say(f"searched {steps} steps in {time.perf_counter() - begun:.1f} s")
    found = tuple(replace(each, source="searched") for each in found)
    with (args.out / "paths.jsonl").open("a") as file:
        file.writelines(each.to_json() + "\n" for each in found)
    return list(found)


@contextmanager
def coarse_products(device: str) -> Iterator[None]:
    """A search on a GPU may multiply in TF32: its errors lie far below those that are compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.startswith("cuda") else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --------------------------------------------------------------------------- settings


def settings_for(
    of: int, curves: dict[str, Curve], levels: tuple[float, ...], known: Iterable[paths.Path]
) -> list[Setting]:
    """Everything that is filmed beside the reference of so many steps."""
    found = [Setting(name=how, kind="floor", of=of, steps=of, how=how) for how in ("bfloat16", "math")]
    read = {
        how: {branch: read_anew(curve, levels, how) for branch, curve in curves.items()}
        for how in ("nearest", "index", "sigma")
    }
    for preset, rule in PRESETS.items():
        for how, by_branch in read.items():
            plans = {branch: schedules.magcache(numbers, rule) for branch, numbers in by_branch.items()}
            found.append(
                Setting(name=f"{preset} {how}", kind="preset", of=of, preset=preset, steps=of, plans=plans,
                        extra=how != "nearest")
            )  # fmt: skip
    for preset in PRESETS:
        budget = schedules.budget_of(preset, of)
        path = next((each for each in known if (each.steps, each.budget) == (of, budget)), None)
        if path:
            found.append(
                Setting(name=f"path {budget}", kind="path", of=of, preset=preset, steps=of,
                        plans=dict.fromkeys(curves, path.computes))
            )  # fmt: skip
        found += rivals(of, preset, budget, read["nearest"])
        found.append(drifts(of, preset, budget, curves, levels))
    counts = sorted({(each.calls + 1) // 2 for each in found if each.kind in ("preset", "path") and not each.extra})
    found += [Setting(name=f"{n} steps", kind="steps", of=of, steps=n) for n in counts if n < of]
    return found


def read_anew(curve: Curve, levels: Sequence[float], how: str) -> tuple[float, ...]:
    if how == "nearest":
        return schedules.nearest(curve.ratios, len(levels))
    if how == "index":
        return schedules.by_index(curve.ratios, len(levels))
    return schedules.by_sigma(curve.ratios, curve.levels, levels)


def drifts(of: int, preset: str, budget: int, curves: dict[str, Curve], levels: tuple[float, ...]) -> Setting:
    """The search that looks at no film: on how far residuals move."""
    lever, phase = step_cache.StepCache(cache="magcache", budget=budget), Phase(denoiser="transformer", first=0,
                                                                                levels=levels, total=of)  # fmt: skip
    plans = {branch: lever.schedule(phase, curve) or () for branch, curve in curves.items()}
    return Setting(name=f"drifts {budget}", kind="drifts", of=of, preset=preset, steps=of, plans=plans, extra=True)


def rivals(of: int, preset: str, budget: int, read: dict[str, tuple[float, ...]]) -> list[Setting]:
    """MagCache's rule at as many calls, at several of its settings: first the preset's own but for the threshold.

    The report takes whichever of them did best on the very films that it reports: more than fair to the rule.
    """
    own, found = PRESETS[preset], []
    for retention, most in dict.fromkeys([(own.retention, own.max_skip_steps), (0.2, 3), (0.3, 3), (0.2, 4), (0.1, 3),
                                          (0.2, 2), (0.3, 4)]):  # fmt: skip
        plans = rule_with(read, budget, retention, most)
        if plans and plans not in found:
            found.append(plans)
    return [
        Setting(name=f"rule {budget} {'abcdefg'[i]}", kind="equal", of=of, preset=preset, steps=of, plans=plans,
                extra=i > 1)
        for i, plans in enumerate(found[:4])
    ]  # fmt: skip


def rule_with(read: dict[str, tuple[float, ...]], budget: int, retention: float, most: int) -> Plans | None:
    """At the threshold whose calls are nearest to, and not above, those of the budget; None: none is near."""
    best: Plans | None = None
    for threshold in (n / 200 for n in range(1, 201)):
        rule = Rule(threshold=threshold, max_skip_steps=most, retention=retention)
        plans = {branch: schedules.magcache(numbers, rule) for branch, numbers in read.items()}
        calls = sum(map(sum, plans.values()))
        if calls <= 2 * budget and (best is None or calls > sum(map(sum, best.values()))):
            best = plans
    return best if best and sum(map(sum, best.values())) > 2 * budget - len(read) else None


# --------------------------------------------------------------------------- the study


class Rows:
    """Where rows go as they come. What was filmed once is not filmed again under another name."""

    def __init__(self, studio: Studio, args: argparse.Namespace, until: float) -> None:
        self.studio, self.args, self.until = studio, args, until
        self._references: dict[int, torch.Tensor] = {}
        self._done: dict[tuple[Any, ...], tuple[list[dict[str, float]], float]] = {}
        self.whole_s: dict[int, list[float]] = {}
        "Seconds of each filming of a reference: before the settings and after them."

    @property
    def out_of_time(self) -> bool:
        return time.perf_counter() > self.until

    def film(self, setting: Setting) -> None:
        key = (setting.of, setting.steps, setting.how, tuple(sorted(setting.plans.items())))
        if key not in self._done:
            if self.out_of_time:
                say(f"out of time before {setting.name} of {setting.of} steps")
                return
            if setting.of not in self._references:
                self.reference(setting.of)
            begun = time.perf_counter()
            frames = self.studio.film(setting)
            filmed = time.perf_counter()
            self._done[key] = distances(self._references[setting.of], frames, self.args), filmed - begun
            say(f"filmed in {filmed - begun:.2f} s, compared in {time.perf_counter() - filmed:.2f} s")
        made, seconds = self._done[key]
        rows = [
            {"setting": setting.name, "of": setting.of, "prompt": prompt, "seed": seed, **each}
            for (prompt, seed), each in zip(self.studio.films, made, strict=True)
        ]
        told = summary(setting, rows) | {"seconds": seconds, "reference_seconds": self.whole_s[setting.of]}
        self._write("results.jsonl", rows)
        self._write("settings.jsonl", [told])
        say(line(told))

    def reference(self, of: int) -> None:
        """Every step computed; a second time it must come out the same."""
        begun = time.perf_counter()
        frames = self.studio.film(Setting(name="all", kind="reference", of=of, steps=of))
        self.whole_s.setdefault(of, []).append(time.perf_counter() - begun)
        alike = torch.equal(frames, self._references.setdefault(of, frames))
        say(f"reference of {of} steps in {self.whole_s[of][-1]:.2f} s{'' if alike else ': NOT AS BEFORE'}")

    def write_seconds(self) -> None:
        (self.args.out / "seconds.json").write_text(json.dumps(self.whole_s) + "\n")

    def _write(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        with (self.args.out / name).open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in rows)


def study(studio: Studio, args: argparse.Namespace, until: float) -> None:
    """What matters most first, number of steps by number of steps; then the rest."""
    for name in ("results.jsonl", "settings.jsonl", "paths.jsonl"):
        (args.out / name).unlink(missing_ok=True)
    curves, rows = studio.measure(CALIBRATED_STEPS), Rows(studio, args, until)
    planned: list[Setting] = []
    for of in args.steps:
        if rows.out_of_time:
            say(f"out of time before {of} steps")
            continue
        planned += settings_for(of, curves, studio.levels(of), found_paths(studio, of, curves, args))
        for setting in planned:
            if setting.of == of and not setting.extra:
                rows.film(setting)
        if not rows.out_of_time:
            rows.reference(of)
            rows.write_seconds()
    for of in args.search_only:
        if not rows.out_of_time and not args.paths:
            found_paths(studio, of, curves, args)
    for setting in planned:
        if setting.extra:
            rows.film(setting)


def distances(a: torch.Tensor, b: torch.Tensor, args: argparse.Namespace) -> list[dict[str, float]]:
    """Of each film, from the frames of all films at once."""
    count, frames = a.shape[0], a.shape[1]
    report = compare_frames(a.flatten(0, 1), b.flatten(0, 1), names=args.metrics, device=args.device)
    found: list[dict[str, float]] = [{} for _ in range(count)]
    for distance in report.distances:
        for film in range(count if distance.curve else 0):
            curve = distance.curve[film * frames : (film + 1) * frames]
            found[film][distance.metric] = round(of_film(distance.metric, curve), 6)
    return found


def of_film(metric: str, curve: Sequence[float]) -> float:
    """The mean over frames; PSNR of their mean square."""
    if metric != "psnr_db":
        return statistics.fmean(curve)
    mean = statistics.fmean(0.0 if value == EQUAL_DB else 10 ** (-value / 10) for value in curve)
    return EQUAL_DB if mean == 0 else -10 * math.log10(mean)


def summary(setting: Setting, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    plans = {branch: searching.digits(plan) for branch, plan in setting.plans.items()}
    found: dict[str, Any] = {
        "of": setting.of, "name": setting.name, "kind": setting.kind, "preset": setting.preset, "calls": setting.calls,
        "films": len(rows), "schedules": plans,
    }  # fmt: skip
    for name in METRICS:
        values = sorted(each[name] for each in rows if name in each)
        if values:
            found[name] = statistics.median(values)
            found[f"{name} range"] = [values[0], values[-1]]
    return found


def line(found: dict[str, Any]) -> str:
    figures = "  ".join(f"{name} {found[name]:.4g}" for name in METRICS if name in found)
    calls = f"{found['calls']:3d} calls, {2 * found['of'] / found['calls']:.2f}x"
    return f"  {found['of']:3d} {found['name']:20s} {calls}  {figures}"


def say(words: str) -> None:
    print(words, flush=True)


def about(studio: Studio, args: argparse.Namespace) -> dict[str, Any]:
    """What was filmed, on what: the first thing that the report says."""
    import diffusers

    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "CPU"
    return {
        "device": device, "torch": torch.__version__, "diffusers": diffusers.__version__, "size": args.size,
        "frames": args.frames, "guidance_scale": studio.rig.family.guidance_scale, "dtype": "float32",
        "prompts": list(dict.fromkeys(prompt for prompt, _ in studio.films)),
        "seeds": list(dict.fromkeys(seed for _, seed in studio.films)),
        "curve_of": [set_up_prompt(studio.rig.family), SET_UP_SEED, CALIBRATED_STEPS],
    }  # fmt: skip


def main() -> None:
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="film nothing more after so long")
    parser.add_argument("--steps", type=int, nargs="+", default=[30, 20, 50])
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=36, help="films in a call")
    parser.add_argument("--metrics", nargs="+", default=list(METRICS))
    parser.add_argument("--paths", type=Path, help="paths found before, in place of a search")
    parser.add_argument("--search-films", type=int, default=8)
    parser.add_argument(
        "--search-only", type=int, nargs="*", default=[25], help="numbers of steps to find paths for only"
    )
    parser.add_argument("--rows", type=int, default=512, help="trials in a batch of the search")
    parser.add_argument("--moves", type=int, default=searching.MOST_MOVES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["UNDERCRANK_CALIBRATIONS"] = str(args.out / "curves.jsonl")
    (args.out / "curves.jsonl").unlink(missing_ok=True)
    family = families.family("flipbook")
    films = [(prompt, seed) for seed in range(1, args.seeds + 1) for prompt in prompts_for(family, args.prompts)]
    with load(replace(load_spec(family), dtype="float32", device=args.device), family) as loaded, loaded.rig.seams():
        loaded.rig.pipe.set_progress_bar_config(disable=True)
        studio = Studio(loaded.rig, films, args)
        if importlib.util.find_spec("stlpips_pytorch") is None:
            say("NO ST-LPIPS WILL BE COMPUTED: the package stlpips-pytorch is not here, see --help")
        (args.out / "about.json").write_text(json.dumps(about(studio, args), indent=1) + "\n")
        study(studio, args, begun + args.seconds)
    say(f"in all {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
