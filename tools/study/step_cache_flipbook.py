"""Which schedule keeps flipbook's films nearest for as many calls: presets, resamplings, searched paths, fewer steps.

Every setting films the same prompts and seeds as the reference (every step computed, same number of steps), in batches.
The checkpoint is measured on another prompt and seed. One row a film goes to OUT/results.jsonl, one a setting to
OUT/settings.jsonl; a table of medians is printed. On a GPU all films of a step count are one batch:

    python tools/study/step_cache_flipbook.py --out study --prompts 12 --seeds 3 --device cuda
    python tools/study/step_cache_flipbook.py --out rehearsal --prompts 2 --seeds 1 --device cpu --steps 20 --frames 9
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from undercrank import families, ratios, schedules
from undercrank.levers.caches import Scheduled
from undercrank.levers.programs import Phase, Programs
from undercrank.levers.stacks import stacked
from undercrank.load import load
from undercrank.planner import load_spec
from undercrank.prompts import SET_UP_SEED, prompts_for, set_up_prompt
from undercrank.quality import compare_frames
from undercrank.ratios import Curve
from undercrank.rig import Rig
from undercrank.schedules import PRESETS, Rule, Schedule
from undercrank.undo import appended

CALIBRATED_STEPS = 50
METRICS = ("psnr_db", "st_lpips_alex")

Plans = dict[str, Schedule]
"A schedule for each branch."


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    kind: str
    "preset, search, equal (the rule at the calls of a search), steps, floor"
    steps: int
    schedules: Plans = field(default_factory=dict)
    "Empty: every step is computed."
    low: bool = False
    "The denoiser in bfloat16."

    @property
    def calls(self) -> int:
        return sum(map(sum, self.schedules.values())) if self.schedules else 2 * self.steps


# --------------------------------------------------------------------------- filming


class Studio:
    """flipbook on a device, with films of a list of (prompt, seed)."""

    def __init__(self, rig: Rig, films: Sequence[tuple[str, int]], args: argparse.Namespace) -> None:
        self.rig, self.films, self.args = rig, films, args

    def shoot(self, films: Sequence[tuple[str, int]], steps: int, make: Any) -> tuple[torch.Tensor, float]:
        """Frames, films x F 3 H W in uint8 on the CPU, and the seconds that all of them took."""
        begun, made = time.perf_counter(), []
        for start in range(0, len(films), self.args.batch):
            made.append(self._batch(films[start : start + self.args.batch], steps, make))
        return torch.cat(made), time.perf_counter() - begun

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
        return (frames.float().cpu() * 255).round().clamp(0, 255).to(torch.uint8)

    def film(self, setting: Setting) -> tuple[torch.Tensor, float]:
        def make(phase: Phase, curve: Curve | None) -> Schedule:
            assert curve is not None, "measure flipbook first"
            return setting.schedules[curve.branch]

        if not setting.low:
            return self.shoot(self.films, setting.steps, make if setting.schedules else None)
        self.rig.pipe.transformer.to(torch.bfloat16)
        try:
            return self.shoot(self.films, setting.steps, None)
        finally:
            self.rig.pipe.transformer.load_state_dict(self.exact, assign=True)

    def measure(self, steps: int) -> dict[str, Curve]:
        """Curves by branch, of a prompt and a seed that are among no films."""
        film = (set_up_prompt(self.rig.family), SET_UP_SEED)
        assert film not in self.films
        before = len(ratios.read_curves())
        self.shoot([film], steps, lambda phase, curve: None)
        return {curve.branch: curve for curve in ratios.read_curves()[before:]}

    def keep_exact(self) -> None:
        self.exact = {name: value.clone() for name, value in self.rig.pipe.transformer.state_dict().items()}


# --------------------------------------------------------------------------- settings


def levels_of(rig: Rig, steps: int) -> tuple[float, ...]:
    rig.scheduler.set_timesteps(steps)
    return tuple(float(t) / 1000 for t in rig.scheduler.timesteps)


def read_anew(curve: Curve, levels: Sequence[float], how: str) -> tuple[float, ...]:
    if how == "nearest":
        return schedules.nearest(curve.ratios, len(levels))
    if how == "index":
        return schedules.by_index(curve.ratios, len(levels))
    return schedules.by_sigma(curve.ratios, curve.levels, levels)


def drifts_at(curve: Curve, levels: Sequence[float]) -> tuple[float, ...]:
    return schedules.drifts_anew(curve.drifts, [-x for x in curve.levels], [-x for x in levels])


def weights_of(levels: Sequence[float], power: int | None) -> list[float]:
    """How much an error in each step weighs: alike, or by the step's length in sigma, times a power of sigma."""
    lengths = [early - late for early, late in pairwise((*levels, 0.0))]
    return [1.0 if power is None else length * level**power for length, level in zip(lengths, levels, strict=True)]


def rule_with(ratios_: Sequence[float], count: int) -> Schedule | None:
    """MagCache's rule at a threshold that computes exactly so many steps, other settings those of `balanced`."""
    for retention in (0.2, 0.3, 0.1):
        for most in (3, 2, 4, 6):
            for thousandth in range(0, 2000, 2):
                rule = Rule(threshold=thousandth / 1000, max_skip_steps=most, retention=retention)
                found = schedules.magcache(ratios_, rule)
                if sum(found) == count:
                    return found
    return None


def settings_for(steps: int, curves: dict[str, Curve], own: dict[str, Curve], levels: Sequence[float]) -> list[Setting]:
    found = [Setting(name="bfloat16", kind="floor", steps=steps, low=True)]
    budgets: set[int] = set()
    for preset, rule in PRESETS.items():
        for how in ("nearest", "index", "sigma"):
            plans = {b: schedules.magcache(read_anew(c, levels, how), rule) for b, c in curves.items()}
            found.append(Setting(name=f"{preset} {how}", kind="preset", steps=steps, schedules=plans))
            if how == "nearest":
                budgets.add(sum(map(sum, plans.values())) // 2)
        plans = {b: schedules.magcache(c.ratios, rule) for b, c in own.items()}
        found.append(Setting(name=f"{preset} measured at {steps}", kind="preset", steps=steps, schedules=plans))
    for budget in sorted(budgets):
        found += searches(steps, budget, curves, levels)
    rivals = sorted({(setting.calls + 1) // 2 for setting in found if setting.kind in ("preset", "search")})
    found += [Setting(name=f"{count} steps", kind="steps", steps=count) for count in rivals if 2 <= count < steps]
    return found


def searches(steps: int, budget: int, curves: dict[str, Curve], levels: Sequence[float]) -> list[Setting]:
    """Searched paths of so many steps for each branch, and MagCache's rule at as many."""
    found = []
    for power, kept in itertools.product((None, 0, 1, 2, 3), (0.0, 0.2)):
        starts = range(max(1, min(int(kept * steps + 0.5), budget - 1)))
        weights = weights_of(levels, power)
        plans = {b: schedules.searched(drifts_at(c, levels), weights, budget, starts=starts) for b, c in curves.items()}
        weighing = "alike" if power is None else f"sigma^{power}"
        found.append(
            Setting(name=f"search {budget}: {weighing}, keeps {kept}", kind="search", steps=steps, schedules=plans)
        )
    rule = {b: rule_with(read_anew(c, levels, "nearest"), budget) for b, c in curves.items()}
    if None not in rule.values():
        equal = {branch: plan for branch, plan in rule.items() if plan is not None}
        found.append(Setting(name=f"rule at {budget}", kind="equal", steps=steps, schedules=equal))
    return found


# --------------------------------------------------------------------------- the study


def study(studio: Studio, args: argparse.Namespace, out: Path) -> None:
    curves = studio.measure(CALIBRATED_STEPS)
    with (out / "results.jsonl").open("w") as results, (out / "settings.jsonl").open("w") as told:
        for steps in args.steps:
            own = curves if steps == CALIBRATED_STEPS else studio.measure(steps)
            reference, seconds = studio.film(Setting(name="all", kind="reference", steps=steps))
            print(f"\n{steps} steps: {len(studio.films)} films in {seconds:.1f} s", flush=True)
            settings = settings_for(steps, curves, own, levels_of(studio.rig, steps))
            for setting in (each for each in settings if re.search(args.only, each.name)):
                frames, seconds = studio.film(setting)
                rows = [
                    row(setting, steps, film, a, b, seconds / len(studio.films), args)
                    for film, a, b in zip(studio.films, reference, frames, strict=True)
                ]
                results.writelines(json.dumps(each) + "\n" for each in rows)
                results.flush()
                plans = {branch: "".join("01"[c] for c in plan) for branch, plan in setting.schedules.items()}
                summary = {"of": steps, "name": setting.name, "kind": setting.kind, "calls": setting.calls,
                           "films": len(rows), "schedules": plans, **medians(rows)}  # fmt: skip
                told.write(json.dumps(summary) + "\n")
                told.flush()
                print(line(summary, steps), flush=True)


def row(
    setting: Setting, of: int, film: tuple[str, int], a: torch.Tensor, b: torch.Tensor, seconds: float, args: Any
) -> dict[str, Any]:
    report = compare_frames(a, b, names=args.metrics, device=args.device)
    return {
        "setting": setting.name, "kind": setting.kind, "of": of, "steps": setting.steps, "calls": setting.calls,
        "prompt": film[0], "seed": film[1], "seconds": round(seconds, 4),
        **{distance.metric: distance.value for distance in report.distances},
    }  # fmt: skip


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for name in METRICS:
        values = sorted(each[name] for each in rows if each.get(name) is not None)
        if values:
            found[name] = statistics.median(values)
            found[f"{name} from"], found[f"{name} to"] = values[0], values[-1]
    return found


def line(summary: dict[str, Any], steps: int) -> str:
    fewer = 2 * steps / summary["calls"]
    figures = "  ".join(f"{name} {summary[name]:.4g}" for name in METRICS if name in summary)
    return f"  {summary['name']:52s} calls {summary['calls']:3d}/{2 * steps}  {fewer:.2f}x  {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 30, 50])
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=36)
    parser.add_argument("--only", default="", help="settings whose name this pattern is found in")
    parser.add_argument("--metrics", nargs="+", default=list(METRICS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["UNDERCRANK_CALIBRATIONS"] = str(args.out / "curves.jsonl")
    (args.out / "curves.jsonl").unlink(missing_ok=True)
    family = families.family("flipbook")
    films = [(prompt, seed) for seed in range(1, args.seeds + 1) for prompt in prompts_for(family, args.prompts)]
    spec = load_spec(family)
    with load(replace(spec, dtype="float32", device=args.device), family) as loaded, loaded.rig.seams():
        studio = Studio(loaded.rig, films, args)
        studio.keep_exact()
        study(studio, args, args.out)


if __name__ == "__main__":
    main()
