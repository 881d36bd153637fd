"""Train flipbook's autoencoder from nothing: single frames first, then whole clips.

    python train_vae.py --out build/flipbook                                            # about 350 s on one H200
    python train_vae.py --out /tmp/try --small --image-seconds 10 --clip-seconds 10     # a rehearsal on a CPU

Writes ``vae.safetensors`` (half precision), ``latents.json`` (mean and deviation of the latents) and ``vae.json``.
A clip here is always all of 33 frames: an autoencoder that has seen only short ones drifts in colour later on.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import models
import world
from optim import Average, Clock, MuonAdamW, schedule


@dataclass(frozen=True)
class Settings:
    image_seconds: float = 65
    clip_seconds: float = 270  # about 70 of them go into compiling
    image_batch: int = 256
    clip_batch: int = 32
    image_rate: float = 1e-3
    clip_rate: float = 6e-4
    latent_noise: float = 0.15  # the decoder must forgive a transformer's small mistakes
    kl_weight: float = 2e-5
    side: int = world.SIDE
    pool: int = 65536
    seed: int = 0


def train(settings: Settings, sizes: models.Sizes, out: Path, device: str) -> None:
    models.seed_everything(settings.seed)
    vae = models.build_vae(sizes).to(device)
    if (out / "vae.safetensors").exists():
        models.load_weights(vae, out / "vae.safetensors")
        print("resumed", out / "vae.safetensors", flush=True)
    pool = world.sample_scenes(settings.pool, settings.seed + 1).to(device)
    held_out = world.sample_scenes(32, settings.seed + 2, "held_out").to(device)
    check = world.render(held_out, settings.side, settings.side)
    baseline = psnr(check.mean((2, 3, 4), keepdim=True).expand_as(check), check)
    print(f"mean-colour baseline {baseline.mean():.2f} dB", flush=True)
    if settings.image_seconds > 0:
        train_stage(vae, pool, check, settings, clips=False)
        models.save_weights(vae, out / "vae.safetensors")
    if settings.clip_seconds > 0:
        train_stage(vae, pool, check, settings, clips=True)
    report = measure(vae, check) | {"baseline": float(baseline.mean())}
    print(report, flush=True)
    models.save_weights(vae, out / "vae.safetensors")
    (out / "latents.json").write_text(json.dumps(latent_statistics(vae, pool, settings), indent=1))
    (out / "vae.json").write_text(json.dumps(report, indent=1))


def train_stage(vae, pool: world.Scenes, check, settings: Settings, clips: bool) -> None:
    name, seconds = ("clips", settings.clip_seconds) if clips else ("images", settings.image_seconds)
    batch, rate = (settings.clip_batch, settings.clip_rate) if clips else (settings.image_batch, settings.image_rate)
    optimiser = build_optimiser(vae)
    average = Average(vae.parameters(), decay=0.995)
    on_gpu = check.is_cuda
    step = torch.compile(reconstruction_loss, dynamic=False) if on_gpu and clips else reconstruction_loss
    clock = Clock(seconds)
    begun = time.time()
    while clock.progress < 1:
        frames = draw(pool, batch, settings.side, clips)
        sharpness = 1.0 if clips else min(1.0, 2 * clock.progress)
        with torch.autocast(frames.device.type, torch.bfloat16):
            loss, error, kl = step(vae, frames, settings.latent_noise, settings.kl_weight, sharpness)
        loss.backward()
        optimiser.step(rate * schedule(clock, warm_up=50, decay_from=0.4 if clips else 0.8))
        average.update()
        clock.tick()
        if clock.iteration == 1 and step is not reconstruction_loss:
            print(f"compiled in {time.time() - begun:.0f} s", flush=True)
        if clock.time_to_report():
            decibel = 10 * torch.log10(4 / error).item()
            sizes = f"loss {loss.item():.4f} psnr {decibel:.2f} kl {kl.item():.2f}"
            print(f"{name} {clock.iteration} {clock.elapsed:.0f}s {sizes}", flush=True)
    average.swap()
    print(f"{name}: {clock.iteration} iterations,", measure(vae, check), flush=True)


def build_optimiser(vae) -> MuonAdamW:
    """Muon for the convolutions inside blocks, AdamW for the first and last ones and everything that is no matrix."""
    ends = ("conv_in.", "conv_out.", "quant_conv.")
    matrices, others = [], []
    for name, weight in vae.named_parameters():
        inner = weight.ndim >= 4 and "gamma" not in name and not any(end in name for end in ends)
        (matrices if inner else others).append(weight)
    return MuonAdamW(matrices, others, weight_decay=0.0)


def draw(pool: world.Scenes, batch: int, side: int, clips: bool) -> torch.Tensor:
    device = pool.codes["shape"].device
    scenes = pool[torch.randint(len(pool), (batch,), device=device)]
    times = None if clips else torch.rand(batch, 1, device=device)
    return world.render(scenes, side, side, times)


def reconstruction_loss(vae, frames_BCTHW, latent_noise: float, kl_weight: float, sharpness):
    mean, log_variance = models.encode_clip(vae, frames_BCTHW)
    log_variance = log_variance.clamp(-12, 4)
    spread = mean.detach().std((0, 2, 3, 4), keepdim=True) * latent_noise
    level = torch.rand(len(mean), 1, 1, 1, 1, device=mean.device)
    deviation = (log_variance.exp() + (level * spread) ** 2).sqrt()
    rebuilt_BCTHW = models.decode_clip(vae, mean + torch.randn_like(mean) * deviation)
    difference = rebuilt_BCTHW - frames_BCTHW
    squared = difference.pow(2).mean()
    kl = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance).mean()
    edges = difference.diff(dim=-1).abs().mean() + difference.diff(dim=-2).abs().mean()
    if frames_BCTHW.shape[2] > 1:
        edges = edges + difference.diff(dim=2).abs().mean()
    sharp = 0.5 * difference.abs().mean() + 0.2 * edges
    return 2 * squared + kl_weight * kl + sharpness * sharp, squared.detach(), kl.detach()


@torch.no_grad()
def reconstruct(vae, frames_BCTHW: torch.Tensor, batch: int = 8) -> torch.Tensor:
    parts = []
    for part in frames_BCTHW.split(batch):
        with torch.autocast(part.device.type, torch.bfloat16):
            parts.append(models.decode_clip(vae, models.encode_clip(vae, part)[0]).clamp(-1, 1))
    return torch.cat(parts)


def psnr(a_BCTHW: torch.Tensor, b_BCTHW: torch.Tensor, dims=(1, 2, 3, 4)) -> torch.Tensor:
    """Decibels of each clip, for pixels in [-1, 1]."""
    return 10 * torch.log10(4 / (a_BCTHW - b_BCTHW).pow(2).mean(dims).clamp_min(1e-9))


def measure(vae, frames_BCTHW: torch.Tensor) -> dict[str, float]:
    per_frame = psnr(reconstruct(vae, frames_BCTHW), frames_BCTHW, dims=(1, 3, 4)).mean(0)
    clip = psnr(reconstruct(vae, frames_BCTHW), frames_BCTHW).mean()
    return {"psnr": float(clip), "first_9": float(per_frame[:9].mean()), "last_9": float(per_frame[-9:].mean())}


@torch.no_grad()
def latent_statistics(vae, pool: world.Scenes, settings: Settings, count: int = 1024) -> dict[str, list[float]]:
    latents = []
    for start in range(0, min(count, len(pool)), 64):
        frames = world.render(pool[slice(start, start + 64)], settings.side, settings.side)
        with torch.autocast(frames.device.type, torch.bfloat16):
            latents.append(models.encode_clip(vae, frames)[0])
    latents = torch.cat(latents)
    return {"mean": latents.mean((0, 2, 3, 4)).tolist(), "std": latents.std((0, 2, 3, 4)).tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--image-seconds", type=float, default=Settings.image_seconds)
    parser.add_argument("--clip-seconds", type=float, default=Settings.clip_seconds)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to rehearse the script on a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(image_seconds=args.image_seconds, clip_seconds=args.clip_seconds)
    if args.small:
        settings = Settings(args.image_seconds, args.clip_seconds, image_batch=8, clip_batch=2, side=32, pool=256)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train(settings, models.SMALL if args.small else models.Sizes(), args.out, device)


if __name__ == "__main__":
    main()
