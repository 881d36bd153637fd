"""`undercrank verify MODEL`: each lever that is on, held to its promise on this machine, at this shape.

Every film is made twice from one seed, with all levers off and with one lever on. EXACT means that all latents of all
steps and all frames are equal; ROUNDING, that no gate's median lies beyond the furthest film that rounding alone moved;
LOSSY, that its distance is stated. What is found becomes a row of the ledger, *measured here*.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from undercrank import families
from undercrank.bench import row_of
from undercrank.engine import Engine
from undercrank.levers import ORDER
from undercrank.metrics import GATES, METRICS, metric_named, shown
from undercrank.prompts import SET_UP_SEED, prompts_for, set_up_prompt
from undercrank.records import (
    BadInput,
    Distance,
    Family,
    FidelityReport,
    Lever,
    Measurement,
    Plan,
    Promise,
    Record,
    Request,
)
from undercrank.rounding import (
    Floor,
    Tell,
    beside,
    floors_in_words,
    furthest,
    measure_floors,
    medians,
    off,
    stock,
)
from undercrank.takes import Take, compare_takes, spread, take, together

FEW_STEPS = 6
"For levers that promise bits or rounding: what they do, they do in every step."
HELD = ("one_forward", *GATES)
"What ROUNDING is held to: inside one forward, where nothing has grown yet, and at the end, by both gates."


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """One lever beside its promise."""

    lever: str
    promise: Promise
    kept: bool | None
    "None: it could not be judged, and `words` says why."
    words: str
    gain: float | None = None
    "Seconds of the loop without over with; median over the films, one order only: `bench` times in both."
    distances: tuple[Distance, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study(Record):
    """Runs of so many steps: verdicts, the floor that they stand beside, and their rows for the ledger."""

    steps: int
    verdicts: tuple[Verdict, ...]
    floors: tuple[Floor, ...]
    rows: tuple[Measurement, ...]


@dataclass(frozen=True, kw_only=True)
class Verification(Record):
    """All of `undercrank verify`: what was judged, and on what."""

    family: str
    dtype: str
    device: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    studies: tuple[Study, ...]

    @property
    def broken(self) -> tuple[Verdict, ...]:
        return tuple(verdict for study in self.studies for verdict in study.verdicts if verdict.kept is False)


def verify(
    engine: Engine,
    request: Request,
    *,
    prompts: Sequence[str] = (),
    seeds: Sequence[int] = (1, 2),
    steps: int = FEW_STEPS,
    names: Sequence[str] | None = None,
    tell: Tell = lambda words: None,
) -> Verification:
    """Judge each lever that a plan of this request engages. Raises the errors of `Engine.generate`, BadInput.

    prompts: the model's own when empty. steps: of the runs for EXACT and ROUNDING; LOSSY runs take the request's.
    """
    plan = engine.plan(replace(request, seed=1))
    if not plan.levers:
        raise BadInput(f"no lever is on in this plan, so there is nothing to verify: {_why_none(plan)}", field="lever")
    family = _family_of(engine, plan)
    films = films_of(plan.request, tuple(prompts) or prompts_for(family, 2), tuple(seeds))
    set_up = replace(plan.request, prompt=set_up_prompt(family), seed=SET_UP_SEED)
    refuse_overlap(films, set_up)
    session = _Session(engine=engine, request=request, plan=plan, films=films, set_up=set_up, names=names, tell=tell)
    studies = tuple(session.study(levers, count) for count, levers in _by_steps(plan, steps).items())
    return Verification(
        family=plan.load.family,
        dtype=plan.load.dtype,
        device=plan.load.device,
        prompts=tuple(dict.fromkeys(film.prompt for film in films)),
        seeds=tuple(dict.fromkeys(int(film.seed or 0) for film in films)),
        studies=studies,
    )


def _by_steps(plan: Plan, few: int) -> dict[int, list[Lever]]:
    """LOSSY levers want the whole run; the others show in a few steps what they do."""
    full = plan.request.num_inference_steps or few
    groups: dict[int, list[Lever]] = {}
    for lever in plan.levers:
        lossy = _promise_of(lever, plan) is Promise.LOSSY
        groups.setdefault(full if lossy else min(few, full), []).append(lever)
    return groups


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What all films of a verification have in common."""

    engine: Engine
    request: Request
    "As it was asked, with its wishes."
    plan: Plan
    films: Sequence[Request]
    set_up: Request
    names: Sequence[str] | None
    tell: Tell

    def study(self, levers: Sequence[Lever], steps: int) -> Study:
        """These levers, one at a time, in runs of so many steps, beside the floor of those runs."""
        self.engine.generate(stock(replace(self.set_up, num_inference_steps=steps)))  # kernels are chosen here
        references = self._takes("no lever", stock(self.request).wishes, steps)
        tried = [self._alone(lever, steps) for lever in levers]
        device = _device(self.engine)
        reports = [
            [compare_takes(x, y, names=self.names, device=device) for x, y in zip(references, takes, strict=True)]
            if takes
            else []
            for takes, _ in tried
        ]
        floors = measure_floors(self.engine, references, names=self.names, device=device, tell=self.tell)
        verdicts, rows = [], []
        for lever, (takes, why), compared in zip(levers, tried, reports, strict=True):
            verdict = judge(lever.name, _promise_of(lever, self.plan), references, takes, compared, floors, why)
            verdicts.append(verdict)
            rows += [as_row(verdict, takes, floors, self.set_up)] if takes else []
        return Study(steps=steps, verdicts=tuple(verdicts), floors=floors, rows=tuple(rows))

    def _alone(self, lever: Lever, steps: int) -> tuple[list[Take], str]:
        """The films with this lever and no other; or why it is off when it is alone."""
        wishes = only(lever.name, self.request).wishes
        warm_up = replace(self.set_up, wishes=wishes, num_inference_steps=steps)
        if why := _why_off(lever, self.engine.plan(warm_up)):
            return [], why
        if why := _why_off(lever, self.engine.generate(warm_up).report.plan):  # it refused on the pipeline itself
            return [], why
        return self._takes(lever.name, wishes, steps), ""

    def _takes(self, name: str, wishes: tuple[tuple[str, str], ...], steps: int) -> list[Take]:
        takes = []
        for number, film in enumerate(self.films, start=1):
            self.tell(f"{name}: film {number} of {len(self.films)}, {steps} steps")
            takes.append(take(self.engine, replace(film, wishes=wishes, num_inference_steps=steps)))
        return takes


def _why_off(lever: Lever, plan: Plan) -> str | None:
    if any(each.name == lever.name for each in plan.levers):
        return None
    reason = next(decision.reason for decision in plan.decisions if decision.lever == lever.name)
    return f"off when it is the only one: {reason}"


def films_of(request: Request, prompts: Sequence[str], seeds: Sequence[int]) -> list[Request]:
    """Every prompt with every seed."""
    if not prompts or not seeds:
        raise BadInput("give at least one prompt and one seed", field="seeds" if prompts else "prompt")
    return [replace(request, prompt=prompt, seed=seed) for prompt in prompts for seed in seeds]


def refuse_overlap(films: Sequence[Request], set_up: Request) -> None:
    """A lever is not judged by a film that it was set up with."""
    for film in films:
        if film.prompt == set_up.prompt or film.seed == set_up.seed:
            raise BadInput(
                f"levers are set up with {set_up.prompt!r}, seed {set_up.seed}: judge them by other prompts and seeds",
                field="seeds" if film.seed == set_up.seed else "prompt",
            )


def only(lever: str, request: Request) -> Request:
    """The request with this one lever as it was asked for, and every other one off."""
    own = next(cls for cls in ORDER if cls.name == lever)
    knobs = own.knobs or (own.name,)
    wishes = tuple((knob, value) for knob, value in request.wishes if knob in knobs)
    others = tuple(wish for cls in ORDER if cls is not own for wish in off(cls))
    return replace(request, wishes=(*wishes, *others))


# --------------------------------------------------------------------------- judged


def judge(
    lever: str,
    promise: Promise,
    references: Sequence[Take],
    takes: Sequence[Take],
    reports: Sequence[FidelityReport],
    floors: Sequence[Floor],
    why_not: str = "",
) -> Verdict:
    """The films of one lever against its promise."""
    if not takes:
        return Verdict(lever=lever, promise=promise, kept=None, words=why_not)
    distances = beside(together(reports), floors)
    kept, words = grade(
        promise, distances, all(report.identical for report in reports), floors, str(takes[0].request.dtype)
    )
    complaints = [text for each in takes for r in each.report.receipts if r.lever == lever for text in r.complaints]
    if complaints:
        kept, words = False, f"it says itself that it did not take effect: {complaints[0]}"
    return Verdict(
        lever=lever,
        promise=promise,
        kept=kept,
        words=words,
        gain=statistics.median(x.loop_s / y.loop_s for x, y in zip(references, takes, strict=True)),
        distances=distances,
    )


def grade(
    promise: Promise, distances: Sequence[Distance], identical: bool, floors: Sequence[Floor], dtype: str
) -> tuple[bool | None, str]:
    """(kept, in words). EXACT by bits; ROUNDING by `HELD` against the furthest film of the floor; LOSSY is stated."""
    if identical:
        return True, "bit-identical in every step and frame"
    values = {distance.metric: distance.value for distance in distances if distance.value is not None}
    if promise is Promise.EXACT:
        return False, f"not bit-identical: {_stated(values)}"
    beyond, held = [], []
    for name in HELD:
        limit = furthest(name, floors, dtype)
        if limit is None or name not in values:
            continue
        held.append(name)
        if METRICS[name].further(values[name], limit):
            beyond.append(f"{metric_named(name).title} {shown(values[name])} is beyond {shown(limit)}")
    if promise is Promise.LOSSY:
        place = "" if not held else ", outside the rounding floor" if beyond else ", inside the rounding floor"
        return True, f"{_stated(values)}{place}"
    if not held:
        return None, f"{_stated(values)}; no rounding floor to hold it to"
    if beyond:
        return False, f"outside the rounding floor: {'; '.join(beyond)}"
    return True, f"inside the rounding floor: {_stated(values)}"


def _stated(values: dict[str, float]) -> str:
    named = [f"{metric_named(n).title} {shown(values[n])} {metric_named(n).unit}" for n in HELD if n in values]
    return ", ".join(named)


def as_row(verdict: Verdict, takes: Sequence[Take], floors: Sequence[Floor], set_up: Request) -> Measurement:
    """The ledger row of a verdict: medians over the films, the floor of the run's dtype beside them."""
    report, dtype = takes[0].report, str(takes[0].request.dtype)
    step_ms = [statistics.median(each.report.trace.step_ms) for each in takes]
    return row_of(
        report,
        lever=verdict.lever,
        n=len(takes),
        step_ms=statistics.median(step_ms),
        spread_ms=(max(step_ms) - min(step_ms)) / 2,
        peak_bytes=report.trace.peak_bytes,
        gain=verdict.gain if verdict.promise is Promise.LOSSY else None,  # a few steps time nothing: see `bench`
        distances={d.metric: d.value for d in verdict.distances if d.value is not None},
        floor=medians(floors, dtype),
        note=f"verify, {verdict.promise.value}: {verdict.words}",
        prompts=tuple(dict.fromkeys(each.request.prompt for each in takes)),
        seeds=tuple(dict.fromkeys(int(each.request.seed or 0) for each in takes)),
        ranges={d.metric: found for d in verdict.distances if (found := spread(d)) is not None},
        floor_of=floors_in_words(floors, dtype),
        calibrated_on=(f"{set_up.prompt}, seed {set_up.seed}",),
    )


def _promise_of(lever: Lever, plan: Plan) -> Promise:
    return next(decision.promise for decision in plan.decisions if decision.lever == lever.name)


def _why_none(plan: Plan) -> str:
    return "; ".join(f"{decision.lever}: {decision.reason}" for decision in plan.decisions)


def _family_of(engine: Engine, plan: Plan) -> Family:
    return engine.rig.family if engine.rig is not None and engine.live else families.family(plan.load.family)


def _device(engine: Engine) -> str:
    assert engine.rig is not None
    return engine.rig.device
