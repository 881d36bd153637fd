"""Train flipbook's transformer and text encoder together, by flow matching in the autoencoder's latents.

    python train_dit.py --out build/flipbook --seconds 490                       # from nothing, flat learning rate
    python train_dit.py --out build/flipbook --seconds 165 --clips 16384 --seed 1 --last   # resumes, decays, more sizes
    python train_dit.py --out build/flipbook --pilot 20 --clips 8192             # compare optimisers, keep nothing
    python train_dit.py --out /tmp/try --small --seconds 20                      # a rehearsal on a CPU

Needs ``vae.safetensors`` and ``latents.json``; writes ``transformer.safetensors``, ``text_encoder.safetensors`` (both
averaged over time, half precision), ``tokenizer.json`` and ``transformer.json``.  Every call draws new clips from its
seed, so a resumed training goes on with clips it has not seen.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import models
import world
from optim import Average, Clock, MuonAdamW, schedule


@dataclass(frozen=True)
class Settings:
    seconds: float = 490
    clips: int = 24576
    batch: int = 256
    rate: float = 8e-4
    muon_gain: float = 2.5  # the best of the three that --pilot tries
    muon: bool = True
    decay_from: float = 1.0  # 1: flat to the end, for a later call to go on from
    empty_captions: float = 0.1
    captions_per_clip: int = 4
    # WanPipeline pads text with unmasked zeros, so the model has to meet every length it may be called with.
    text_lengths: tuple[int, ...] = (64, 64, 64, 64, 64, 64, 128, 226, 512, 512)
    other_sizes: tuple[tuple[int, int, int], ...] = ()  # frames, height, width
    other_share: float = 0.0
    side: int = world.SIDE
    seed: int = 0


LAST_SIZES = ((17, 128, 128), (33, 96, 160), (33, 160, 96))


@dataclass(frozen=True)
class Data:
    """Normalised latents by size, with token ids [captions, length]; the last caption is the empty one."""

    latents: dict[tuple[int, int, int], torch.Tensor]
    ids: torch.Tensor
    mask: torch.Tensor


# ------------------------------------------------------------------------------------------------------------- data


def prepare(settings: Settings, sizes: models.Sizes, out: Path, device: str) -> Data:
    vae = models.load_weights(models.build_vae(sizes), out / "vae.safetensors").to(device).eval()
    statistics = json.loads((out / "latents.json").read_text())
    scenes = world.sample_scenes(settings.clips, 1000 + settings.seed)
    square = (world.FRAMES, settings.side, settings.side)
    latents = {square: encode(vae, scenes, statistics, settings.side, settings.side, device)}
    for frames, height, width in settings.other_sizes:
        few = scenes[slice(0, settings.clips // 4)]
        if (height, width) == square[1:]:  # the autoencoder is causal: a shorter clip's latents begin a longer one's
            latents[frames, height, width] = latents[square][:, :, : 1 + (frames - 1) // 4]
        else:
            latents[frames, height, width] = encode(vae, few, statistics, height, width, device)
    ids, mask = tokenise(load_tokenizer(out), scenes, settings)
    return Data(latents, ids.to(device), mask.to(device))


@torch.no_grad()
def encode(vae, scenes: world.Scenes, statistics: dict, height: int, width: int, device: str) -> torch.Tensor:
    mean = torch.tensor(statistics["mean"], device=device)[:, None, None, None]
    deviation = torch.tensor(statistics["std"], device=device)[:, None, None, None]
    parts = []
    for start in range(0, len(scenes), 64):
        frames = world.render(scenes[slice(start, start + 64)].to(device), height, width)
        with torch.autocast(frames.device.type, torch.bfloat16):
            parts.append(((models.encode_clip(vae, frames)[0] - mean) / deviation).bfloat16())
    return torch.cat(parts)


def load_tokenizer(out: Path):
    """The tokenizer is made once and kept as a file: every later stage uses the very same one."""
    path = out / "tokenizer.json"
    if not path.exists():
        path.write_text(models.build_tokenizer().backend_tokenizer.to_str())
    return models.wrap_tokenizer(Tokenizer.from_file(str(path)))


def tokenise(tokenizer, scenes: world.Scenes, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    texts = []
    for repeat in range(settings.captions_per_clip):
        texts += world.captions(scenes, 7919 * settings.seed + repeat)
    encoded = tokenizer(texts + [""], padding=True, return_tensors="pt")
    return encoded.input_ids, encoded.attention_mask


def draw(data: Data, size: tuple[int, int, int], settings: Settings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch of clean latents with the ids and mask of one of their captions, or of the empty caption."""
    latents, device = data.latents[size], data.ids.device
    clip = torch.randint(len(latents), (settings.batch,), device=device)
    which = torch.randint(settings.captions_per_clip, (settings.batch,), device=device)
    empty = torch.rand(settings.batch, device=device) < settings.empty_captions
    row = torch.where(empty, len(data.ids) - 1, which * settings.clips + clip)
    return latents[clip].float(), data.ids[row], data.mask[row]


# --------------------------------------------------------------------------------------------------------- training


def train(settings: Settings, sizes: models.Sizes, data: Data, out: Path) -> dict[str, float]:
    """Train, from the weights in ``out`` if there are any, and return the report."""
    models.seed_everything(settings.seed)
    device = data.ids.device
    transformer, text_encoder = load_networks(sizes, out, device)
    if device.type == "cuda":
        for block in transformer.blocks:
            block.compile()
    optimiser = build_optimiser(transformer, text_encoder, settings)
    average = Average([*transformer.parameters(), *text_encoder.parameters()])
    rng, clock, begun, smooth = random.Random(settings.seed), Clock(settings.seconds), time.time(), None
    while clock.progress < 1:
        size, length = choose_size(data, settings, rng), rng.choice(settings.text_lengths)
        latents, ids, mask = draw(data, size, settings)
        with eager_unless(size == (world.FRAMES, settings.side, settings.side)):
            loss = flow_loss(transformer, text_encoder, latents, ids, mask, length)
            loss.backward()
        optimiser.step(settings.rate * schedule(clock, warm_up=100, decay_from=settings.decay_from))
        average.update()
        clock.tick()
        smooth = loss.detach() if smooth is None else torch.lerp(smooth, loss.detach(), 0.02)
        if clock.iteration == 3:
            clock.restart()
            print(f"compiled in {time.time() - begun:.0f} s", flush=True)
        if clock.time_to_report():
            print(f"dit {clock.iteration} {clock.elapsed:.0f}s loss {smooth.item():.4f}", flush=True)
    average.swap()
    report = {"iterations": clock.iteration, "seconds": clock.elapsed, "loss": smooth.item()}
    report["check_loss"] = check_loss(transformer, text_encoder, data, settings)
    print(report, flush=True)
    return report | {"networks": (transformer, text_encoder)}


def load_networks(sizes: models.Sizes, out: Path, device):
    transformer, text_encoder = models.build_transformer(sizes), models.build_text_encoder(sizes)
    if (out / "transformer.safetensors").exists():
        models.load_weights(transformer, out / "transformer.safetensors")
        models.load_weights(text_encoder, out / "text_encoder.safetensors")
        print("resumed", out / "transformer.safetensors", flush=True)
    return transformer.to(device).train(), text_encoder.to(device).train()


def build_optimiser(transformer, text_encoder, settings: Settings) -> MuonAdamW:
    """Muon for the matrices inside blocks, AdamW for embeddings, the first and last layers and all vectors."""
    inside = [(n, w) for net, key in ((transformer, "blocks."), (text_encoder, "encoder.block."))
              for n, w in net.named_parameters() if n.startswith(key)]  # fmt: skip
    matrices = [w for n, w in inside if w.ndim == 2 and "relative_attention_bias" not in n] if settings.muon else []
    taken = {id(w) for w in matrices}
    everything = {id(w): w for net in (transformer, text_encoder) for w in net.parameters()}
    others = [w for key, w in everything.items() if key not in taken]
    return MuonAdamW(matrices, others, muon_gain=settings.muon_gain)


def choose_size(data: Data, settings: Settings, rng: random.Random) -> tuple[int, int, int]:
    if settings.other_sizes and rng.random() < settings.other_share:
        return rng.choice(settings.other_sizes)
    return next(iter(data.latents))


def eager_unless(compiled: bool):
    """The rare sizes run uncompiled: a second compilation would cost more than it saves."""
    return nullcontext() if compiled else torch.compiler.set_stance("force_eager")


def flow_loss(transformer, text_encoder, latents, ids, mask, length: int, sigma=None, noise=None) -> torch.Tensor:
    """Mean squared error of the velocity ``noise - latents`` at a random point between the two."""
    sigma = draw_sigmas(len(latents), latents.device) if sigma is None else sigma
    noise = torch.randn_like(latents) if noise is None else noise
    mixed = torch.lerp(latents, noise, sigma[:, None, None, None, None])
    with torch.autocast(latents.device.type, torch.bfloat16):
        text = embed(text_encoder, ids, mask, length)
        velocity = transformer(mixed, 1000 * sigma, text, return_dict=False)[0]
    return (velocity.float() - (noise - latents)).pow(2).mean()


def draw_sigmas(count: int, device, shift: float = 3.0) -> torch.Tensor:
    """Noise levels: logit-normal, then shifted towards noise as the scheduler shifts its steps."""
    sigma = torch.sigmoid(1.2 * torch.randn(count, device=device))
    return shift * sigma / (1 + (shift - 1) * sigma)


def embed(text_encoder, ids, mask, length: int) -> torch.Tensor:
    """As WanPipeline does it: encode, cut after the last token, pad with zeros to ``length``."""
    states = text_encoder(ids, mask).last_hidden_state * mask[..., None]
    return F.pad(states, (0, 0, 0, length - states.shape[1]))


@torch.no_grad()
def check_loss(transformer, text_encoder, data: Data, settings: Settings) -> float:
    """The loss at evenly spread noise levels with fixed noise, to compare trainings with each other."""
    generator = torch.Generator(data.ids.device).manual_seed(1234)
    size = next(iter(data.latents))
    latents = data.latents[size][: settings.batch].float()
    sigma = torch.linspace(0.02, 0.98, len(latents), device=latents.device)
    noise = torch.randn(latents.shape, generator=generator, device=latents.device)
    ids, mask = data.ids[: len(latents)], data.mask[: len(latents)]
    return float(flow_loss(transformer, text_encoder, latents, ids, mask, models.TEXT_LENGTH, sigma, noise))


def pilot(settings: Settings, sizes: models.Sizes, data: Data, out: Path) -> None:
    """Train briefly with several optimisers from one beginning and print their losses."""
    settings = replace(settings, text_lengths=(models.TEXT_LENGTH,), decay_from=0.0)
    for name, trial in {
        "AdamW": replace(settings, muon=False),
        "Muon": replace(settings, muon=True, muon_gain=1.0),
        "Muon x 2.5": replace(settings, muon=True, muon_gain=2.5),
    }.items():
        report = train(trial, sizes, data, out / "nowhere")
        print(f"pilot {name}: {report['iterations']} iterations, check loss {report['check_loss']:.4f}", flush=True)


def save(report: dict, out: Path) -> None:
    transformer, text_encoder = report.pop("networks")
    models.save_weights(transformer, out / "transformer.safetensors")
    models.save_weights(text_encoder, out / "text_encoder.safetensors")
    earlier = json.loads((out / "transformer.json").read_text()) if (out / "transformer.json").exists() else []
    (out / "transformer.json").write_text(json.dumps([*earlier, report], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=Settings.seconds)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--clips", type=int, default=Settings.clips)
    parser.add_argument("--muon-gain", type=float, default=Settings.muon_gain)
    parser.add_argument("--last", action="store_true", help="let the learning rate fall to zero and mix in other sizes")
    parser.add_argument("--pilot", type=float, metavar="SECONDS", help="compare optimisers and keep nothing")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to rehearse the script on a CPU")
    args = parser.parse_args()
    settings = Settings(args.seconds, clips=args.clips, seed=args.seed, muon_gain=args.muon_gain)
    sizes = models.SMALL if args.small else models.Sizes()
    if args.last:
        settings = replace(settings, decay_from=0.0, other_sizes=LAST_SIZES, other_share=0.12)
    if args.small:
        settings = replace(settings, clips=64, batch=4, side=32)
        settings = replace(settings, other_sizes=((17, 32, 32), (33, 32, 48)) if args.last else ())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun = time.time()
    data = prepare(settings, sizes, args.out, device)
    print(f"{len(data.ids)} captions, latents {[tuple(v.shape) for v in data.latents.values()]}, "
          f"{time.time() - begun:.0f} s", flush=True)  # fmt: skip
    if args.pilot:
        pilot(replace(settings, seconds=args.pilot), sizes, data, args.out)
    else:
        save(train(settings, sizes, data, args.out), args.out)


if __name__ == "__main__":
    main()
