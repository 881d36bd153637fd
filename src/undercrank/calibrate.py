"""`undercrank calibrate MODEL`: one run that computes every step and measures the checkpoint for step_cache.

The first whole run under step_cache does the same as it goes. This is for those who want it over with, or with a
prompt and a size of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from undercrank import families, ratios, screen
from undercrank.engine import Engine
from undercrank.oneshot import OnCancellable
from undercrank.prompts import SET_UP_SEED, set_up_prompt
from undercrank.ratios import Curve
from undercrank.records import Record, Request, RunFailed
from undercrank.schedules import PRESETS, magcache
from undercrank.settings import settings


@dataclass(frozen=True, kw_only=True)
class Calibration(Record):
    """What one run told: a curve for each branch of each denoiser, and of which film."""

    family: str
    prompt: str
    seed: int
    num_inference_steps: int
    file: str
    curves: tuple[Curve, ...]


def calibrate(engine: Engine, request: Request) -> Calibration:
    """Film once, computing every step, and keep what was measured. Raises the errors of `Engine.generate`.

    prompt and seed: those that set levers up, if none are given: they are among no films that levers are judged by.
    """
    plan = engine.plan(replace(request, prompt=request.prompt or "x", seed=SET_UP_SEED))
    family = engine.rig.family if engine.rig and engine.live else families.family(plan.load.family)
    asked = replace(
        request,
        prompt=request.prompt or set_up_prompt(family),
        seed=SET_UP_SEED if request.seed is None else request.seed,
        wishes=(*(wish for wish in request.wishes if wish[0] != "transformer_cache"), ("transformer_cache", "measure")),
    )
    before = len(ratios.read_curves())
    clip = engine.generate(asked)
    found = ratios.read_curves()[before:]
    if not found:
        said = "; ".join(note for note in clip.report.notes if note.startswith("step_cache"))
        raise RunFailed(f"nothing was measured of {family.title}: {said or 'no whole curve'}")
    resolved = clip.report.request
    return Calibration(
        family=family.id,
        prompt=resolved.prompt,
        seed=int(resolved.seed or 0),
        num_inference_steps=int(resolved.num_inference_steps or 0),
        file=str(settings().calibrations),
        curves=found,
    )


def run_calibrate(
    request: Request, *, allow_pickle: bool, local_files_only: bool, as_json: bool, on_cancellable: OnCancellable
) -> None:
    """Measure and print: what each preset would compute, beside the rounding of one forward."""
    with (
        Engine(allow_pickle=allow_pickle, local_files_only=local_files_only) as engine,
        on_cancellable(engine.cancel),
    ):
        found = calibrate(engine, request)
    if as_json:
        screen.print_json({"event": "done", "calibration": found.to_dict()})
        return
    screen.put(f"{found.family}: {found.num_inference_steps} steps, seed {found.seed}, {found.prompt!r}")
    rows = [(curve.denoiser, curve.branch, *_in_words(curve)) for curve in found.curves]
    screen.table(("denoiser", "branch", *PRESETS, "rounding of one forward"), rows)
    screen.put(f"kept in {Path(found.file)}")


def _in_words(curve: Curve) -> tuple[str, ...]:
    """Steps that MagCache's rule would compute under each preset, of all, and the floor."""
    counts = [f"{sum(magcache(curve.ratios, rule))} of {curve.steps}" for rule in PRESETS.values()]
    return (*counts, "unknown" if curve.floor is None else f"{curve.floor:.1e}")
