"""`undercrank calibrate MODEL`: one run that computes every step and measures the checkpoint for step_cache.

The first whole run under step_cache does the same as it goes. This is for those who want it over with, or with a
prompt and a size of their own. With `--search` it goes on to find a path for each preset, which takes many runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path as File

from undercrank import families, paths, ratios, screen
from undercrank.engine import Engine
from undercrank.oneshot import OnCancellable
from undercrank.paths import Path
from undercrank.prompts import SET_UP_SEED, searched_on, set_up_prompt
from undercrank.ratios import Curve
from undercrank.records import BadInput, Family, Plan, Record, Request, RunFailed
from undercrank.rounding import stock
from undercrank.schedules import PRESETS, budget_of, magcache, nearest
from undercrank.searching import SEARCH_SEED, Films, Tell, search
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
    family = _family_of(engine, plan)
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
    request: Request,
    *,
    search_films: int = 0,
    allow_pickle: bool,
    local_files_only: bool,
    as_json: bool,
    on_cancellable: OnCancellable,
) -> None:
    """Measure and print: what each preset would compute, beside the rounding of one forward; or what was found.

    search_films: how many films to search paths on; 0: none.
    """
    with (
        Engine(allow_pickle=allow_pickle, local_files_only=local_files_only) as engine,
        on_cancellable(engine.cancel),
    ):
        if search_films:
            _show_paths(find_paths(engine, request, films=search_films, tell=_quietly(as_json)), as_json)
            return
        found = calibrate(engine, request)
    if as_json:
        screen.print_json({"event": "done", "calibration": found.to_dict()})
        return
    screen.put(f"{found.family}: {found.num_inference_steps} steps, seed {found.seed}, {found.prompt!r}")
    rows = [(curve.denoiser, curve.branch, *_in_words(curve)) for curve in found.curves]
    screen.table(("denoiser", "branch", *PRESETS, "rounding of one forward"), rows)
    screen.put(f"kept in {File(found.file)}")


def find_paths(
    engine: Engine, request: Request, *, films: int, rows: int = 8, tell: Tell = lambda words: None
) -> tuple[Path, ...]:
    """Measure as `calibrate` does, then search a path for each preset and keep it. Raises LeverRefused too, and
    BadInput before anything is filmed.

    films: how many prompts of the model's domain to search on, where the request names none of its own.
    rows: most trials in a batch; memory is what limits it.
    """
    plan = engine.plan(stock(replace(request, prompt="x")))
    prompts = (request.prompt,) if request.prompt else _searched_on(_family_of(engine, plan), films)
    resolved = plan.request
    assert resolved.width and resolved.height and resolved.num_frames and resolved.num_inference_steps
    steps = resolved.num_inference_steps
    budgets = tuple(dict.fromkeys(budget_of(preset, steps) for preset in PRESETS))
    if min(budgets) >= steps:
        raise BadInput(f"{steps} steps: too few to skip any of them; search with more", field="num_inference_steps")
    found = calibrate(engine, request)
    rig = engine.rig
    assert rig is not None
    engine.move_to(plan)  # nothing may skip in the runs of a search
    cast = Films(
        prompts=prompts,
        seeds=tuple(range(SEARCH_SEED, SEARCH_SEED + len(prompts))),
        width=resolved.width,
        height=resolved.height,
        num_frames=resolved.num_frames,
        num_inference_steps=steps,
        guidance_scale=float(resolved.guidance_scale or rig.family.guidance_scale),
        rows=rows,
    )
    numbers = nearest(found.curves[0].ratios, steps)
    kept = search(rig, cast, budgets, rule=lambda rule: magcache(numbers, rule), tell=tell)
    paths.append(kept)
    return kept


def _family_of(engine: Engine, plan: Plan) -> Family:
    return engine.rig.family if engine.rig and engine.live else families.family(plan.load.family)


def _searched_on(family: Family, films: int) -> tuple[str, ...]:
    prompts = searched_on(family, films)
    if len(prompts) < films:
        raise BadInput(f"{films} films to search on: for {family.title} at most {len(prompts)}", field="search_films")
    return prompts


def _quietly(as_json: bool) -> Tell:
    return (lambda words: None) if as_json else screen.put


def _show_paths(found: tuple[Path, ...], as_json: bool) -> None:
    if as_json:
        screen.print_json({"event": "done", "paths": [path.to_dict() for path in found]})
        return
    rows = [
        (f"{path.budget} of {path.steps}", path.schedule, f"{path.error:.4f}",
         "none" if path.rule_error is None else f"{path.rule_error:.4f}")
        for path in found
    ]  # fmt: skip
    screen.table(("computed", "path", "error of finished latents", "by MagCache's rule"), rows)
    screen.put(f"{found[0].forwards} forwards, {found[0].films} films; kept in {paths.own_file()}")


def _in_words(curve: Curve) -> tuple[str, ...]:
    """Steps that MagCache's rule would compute under each preset, of all, and the floor."""
    counts = [f"{sum(magcache(curve.ratios, rule))} of {curve.steps}" for rule in PRESETS.values()]
    return (*counts, "unknown" if curve.floor is None else f"{curve.floor:.1e}")
