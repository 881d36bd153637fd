"""A network that says what a clip shows.  It learns from renders alone and never sees a generated clip.

    python judge.py --out build/flipbook                 # about 60 s on one H200
    python judge.py --out /tmp/try --small --seconds 20  # a rehearsal on a CPU

Writes ``judge.safetensors`` and ``judge.json`` (its accuracy on fresh renders).  Training renders are blurred, made
noisy, dimmed, shrunk and mixed with their neighbours in time, so that the judge forgives what a lossy decoder does and
still has to see the thing itself.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import models
import world
from optim import Average, Clock, MuonAdamW, schedule

FRAME_STEP = 4  # the judge looks at every fourth frame: 9 of 33


@dataclass(frozen=True)
class Settings:
    seconds: float = 55
    batch: int = 96
    rate: float = 1e-3
    pool: int = 65536
    seed: int = 100


class Judge(nn.Module):
    """Convolutions on each frame, then one head per attribute over what all frames showed."""

    def __init__(self, width: int = 32, frames: int = 1 + (world.FRAMES - 1) // FRAME_STEP):
        super().__init__()
        channels = [5, width, 2 * width, 4 * width, 4 * width, 4 * width]
        strides = [2, 2, 2, 2, 1]
        layers = []
        for before, after, stride in zip(channels[:-1], channels[1:], strides, strict=True):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
        self.frame_layers = nn.Sequential(*layers)
        self.place = nn.Sequential(nn.Conv2d(channels[-1], width, 1), nn.Flatten(), nn.LazyLinear(4 * width), nn.SiLU())
        self.look = nn.Sequential(nn.Linear(4 * channels[-1], 8 * width), nn.SiLU())
        self.course = nn.Sequential(nn.Linear(frames * 4 * width, 8 * width), nn.SiLU())
        self.heads = nn.ModuleDict({name: nn.Linear(16 * width, len(v)) for name, v in world.ATTRIBUTES.items()})

    def forward(self, frames_BCTHW: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scores of each attribute's values for every FRAME_STEP-th frame of square clips of 128 pixels."""
        batch, _, frames = frames_BCTHW.shape[:3]
        images = with_coordinates(frames_BCTHW.transpose(1, 2).flatten(0, 1))
        seen = self.frame_layers(images.contiguous(memory_format=torch.channels_last))
        pooled = torch.cat([seen.mean((2, 3)), seen.amax((2, 3))], dim=1).unflatten(0, (batch, frames))
        look = self.look(torch.cat([pooled.mean(1), pooled.amax(1)], dim=1))
        course = self.course(self.place(seen).unflatten(0, (batch, frames)).flatten(1))
        summary = torch.cat([look, course], dim=1)
        return {name: head(summary) for name, head in self.heads.items()}


def build_judge(width: int = 32) -> Judge:
    judge = Judge(width)
    judge(torch.zeros(1, 3, 9, world.SIDE, world.SIDE))  # settles the size of the lazy layer
    return judge


def with_coordinates(images_NCHW: torch.Tensor) -> torch.Tensor:
    count, _, height, width = images_NCHW.shape
    x = torch.linspace(-1, 1, width, device=images_NCHW.device, dtype=images_NCHW.dtype).expand(count, 1, height, width)
    y = torch.linspace(-1, 1, height, device=images_NCHW.device, dtype=images_NCHW.dtype)[:, None]
    return torch.cat([images_NCHW, x, y.expand(count, 1, height, width)], dim=1)


def train(settings: Settings, out: Path, device: str) -> None:
    models.seed_everything(settings.seed)
    judge = build_judge().to(device)
    pool = world.sample_scenes(settings.pool, settings.seed, "any").to(device)  # it must know held-out pairs too
    inner = {n for n, w in judge.named_parameters() if w.ndim >= 2 and "heads" not in n and "frame_layers.0" not in n}
    matrices = [w for n, w in judge.named_parameters() if n in inner]
    others = [w for n, w in judge.named_parameters() if n not in inner]
    optimiser, clock, average = MuonAdamW(matrices, others), Clock(settings.seconds), Average(judge.parameters(), 0.99)
    while clock.progress < 1:
        scenes = pool[torch.randint(len(pool), (settings.batch,), device=device)]
        frames = spoil(watched_frames(scenes))
        with torch.autocast(frames.device.type, torch.bfloat16):
            scores = judge(frames)
        losses = [F.cross_entropy(score.float(), scenes.codes[name]) for name, score in scores.items()]
        torch.stack(losses).sum().backward()
        optimiser.step(settings.rate * schedule(clock, warm_up=50, decay_from=0.3))
        average.update()
        clock.tick()
        if clock.time_to_report():
            shown = {name: f"{loss.item():.3f}" for name, loss in zip(scores, losses, strict=True)}
            print(f"judge {clock.iteration} {clock.elapsed:.0f}s {shown}", flush=True)
    average.swap()
    judge.eval()
    fresh = world.sample_scenes(2048 if device == "cuda" else 64, settings.seed + 1, "any").to(device)
    accuracy = {"iterations": clock.iteration} | grade_renders(judge, fresh)
    print(accuracy, flush=True)
    models.save_weights(judge, out / "judge.safetensors")
    (out / "judge.json").write_text(json.dumps(accuracy, indent=1))


def watched_frames(scenes: world.Scenes) -> torch.Tensor:
    times = world.clip_times(world.FRAMES, scenes.codes["shape"].device)[::FRAME_STEP]
    return world.render(scenes, times_BT=times.expand(len(scenes), -1))


@torch.no_grad()
def spoil(frames_BCTHW: torch.Tensor) -> torch.Tensor:
    """Damage clips at random, as a lossy decoder might: never so much that a person could not tell what they show."""
    batch, device = len(frames_BCTHW), frames_BCTHW.device

    def amount(most: float) -> torch.Tensor:
        """Zero for about half of the clips, up to ``most`` for the others."""
        return (torch.rand(batch, 1, 1, 1, 1, device=device) * 2 - 1).clamp(min=0) * most

    neighbours = frames_BCTHW.roll(1, dims=2)
    neighbours[:, :, 0] = frames_BCTHW[:, :, 0]
    frames_BCTHW = torch.lerp(frames_BCTHW, neighbours, amount(0.25))
    blurred = F.avg_pool3d(frames_BCTHW, (1, 5, 5), 1, (0, 2, 2), count_include_pad=False)
    frames_BCTHW = torch.lerp(frames_BCTHW, blurred, amount(1.0))
    coarse = F.interpolate(F.avg_pool3d(frames_BCTHW, (1, 2, 2)), scale_factor=(1, 2, 2), mode="nearest")
    frames_BCTHW = torch.lerp(frames_BCTHW, coarse, amount(1.0))
    contrast, brightness = 1 + amount(0.2) - amount(0.2), amount(0.12) - amount(0.12)
    grain = torch.randn_like(frames_BCTHW) * amount(0.12)
    return (frames_BCTHW * contrast + brightness + grain).clamp(-1, 1)


@torch.no_grad()
def opinions(judge: Judge, frames_BCTHW: torch.Tensor, batch: int = 64) -> dict[str, torch.Tensor]:
    """What the judge takes whole clips (33 frames) to show: one code per attribute and clip."""
    answers = [judge(part) for part in frames_BCTHW[:, :, ::FRAME_STEP].split(batch)]
    return {name: torch.cat([answer[name].argmax(1) for answer in answers]) for name in world.ATTRIBUTES}


def grade(judge: Judge, frames_BCTHW: torch.Tensor, scenes: world.Scenes) -> dict[str, torch.Tensor]:
    """For each attribute, whether the judge saw what the scene says: booleans of shape [B]."""
    seen = opinions(judge, frames_BCTHW)
    return {name: seen[name] == scenes.codes[name] for name in world.ATTRIBUTES}


def grade_renders(judge: Judge, scenes: world.Scenes, batch: int = 64) -> dict[str, float]:
    right = {name: 0 for name in world.ATTRIBUTES}
    for start in range(0, len(scenes), batch):
        part = scenes[slice(start, start + batch)]
        for name, correct in grade(judge, world.render(part), part).items():
            right[name] += int(correct.sum())
    return {name: count / len(scenes) for name, count in right.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=Settings.seconds)
    parser.add_argument("--small", action="store_true", help="small batches, to rehearse the script on a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(seconds=args.seconds)
    if args.small:
        settings = Settings(args.seconds, batch=4, pool=256)
    train(settings, args.out, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
