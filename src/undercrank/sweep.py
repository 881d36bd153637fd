"""Many settings of a lever on the same films: speed against distance, beside the floor and beside simply fewer steps.

The rival of anything that skips work is the run with fewer steps that takes as long. It is filmed here for each
setting's own time, so that every setting is judged against what the same seconds would have bought without it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from undercrank import families
from undercrank.bench import row_of
from undercrank.engine import Engine
from undercrank.fidelity import films_of, refuse_overlap
from undercrank.levers import ORDER, lever_of_knob
from undercrank.metrics import GATES, METRICS
from undercrank.prompts import SET_UP_SEED, prompts_for, set_up_prompt
from undercrank.records import (
    BadInput,
    Distance,
    FidelityReport,
    LeverRefused,
    Measurement,
    Record,
    Report,
    Request,
    Trace,
)
from undercrank.rounding import Floor, Tell, beside, measure_floors, stock
from undercrank.takes import Take, compare_takes, spread, take, together

MOST_DRIFT = 0.1
"Of the seconds of one film, from the beginning of a sweep to its end."

Wishes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Sample(Record):
    """One film of one setting beside its reference."""

    point: str
    prompt: str
    seed: int
    loop_s: float
    calls: int
    "Forwards that computed their blocks."
    identical: bool
    distances: dict[str, float]
    frames_hash: str | None


@dataclass(frozen=True, kw_only=True)
class Point(Record):
    """One setting over all films. `speed` and `fewer_calls` are ratios to the reference, above 1: less of it."""

    label: str
    kind: str
    "reference, setting, or steps: the plain run with fewer steps"
    wishes: Wishes
    steps: int
    loop_s: float
    "Median over the films."
    loop_range_s: tuple[float, float]
    speed: float
    "Median over the films of the reference's seconds over this one's."
    calls: float
    fewer_calls: float
    distances: tuple[Distance, ...] = ()
    rival: str = ""
    "The label of the plain run of fewest steps that takes as long or longer."
    complaints: tuple[str, ...] = ()

    def value(self, metric: str) -> float | None:
        return next((each.value for each in self.distances if each.metric == metric), None)


@dataclass(frozen=True, kw_only=True)
class Sweep(Record):
    """A whole sweep, as `results.jsonl` holds it in its first line."""

    title: str
    family: str
    machine: str
    device: str
    versions: dict[str, str]
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    dtype: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    set_up: str
    "Prompt and seed of the runs that set a lever up and warm it up; none of the films."
    points: tuple[Point, ...]
    floors: tuple[Floor, ...]
    drift: float
    "Seconds of the first film's reference at the end over those at the beginning."
    notes: tuple[str, ...] = ()

    @property
    def is_steady(self) -> bool:
        """Do its seconds mean something? Not on a machine that had other work at one end of the sweep."""
        return abs(self.drift - 1) <= MOST_DRIFT

    @property
    def settings(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.kind == "setting")

    @property
    def plain(self) -> tuple[Point, ...]:
        """Fewer steps, from many to few."""
        return tuple(sorted((p for p in self.points if p.kind == "steps"), key=lambda p: -p.steps))

    def named(self, label: str) -> Point | None:
        return next((point for point in self.points if point.label == label), None)


@dataclass(kw_only=True)
class Reel:
    """The sweep, its samples, and some frames of the first film of each point for the report, F H W 3."""

    sweep: Sweep
    samples: list[Sample] = field(default_factory=list)
    stills: dict[str, np.ndarray] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    "The record of the first film of each point."


def sweep(
    engine: Engine,
    request: Request,
    grid: Sequence[Wishes],
    *,
    prompts: Sequence[str] = (),
    seeds: Sequence[int] = (1,),
    names: Sequence[str] | None = None,
    tell: Tell = lambda words: None,
) -> Reel:
    """Film every setting of the grid, then fewer steps in as much time, then the floors.

    request: its wishes are on in every run, also in the reference; all other levers are off but for the grid's.
    Raises BadInput for an empty grid, and the errors of `Engine.generate`.
    """
    if not grid:
        raise BadInput("nothing to sweep: name a lever, or a knob with values", field="sweep")
    base = engine.plan(off_but(replace(request, seed=1), request.wishes)).request
    family = families.family(engine.plan(base).load.family)
    films = films_of(base, tuple(prompts) or prompts_for(family, 3), seeds)
    set_up = replace(base, prompt=set_up_prompt(family), seed=SET_UP_SEED)
    refuse_overlap(films, set_up)
    known = engine.ledger.is_calibrated(family.id, str(base.dtype))
    notes = ("calibrated on this machine before, on films that are not recorded",) if known else ()
    studio = Studio(engine, films, set_up, names, tell)

    grid, refused = _possible(engine, base, grid)
    reference = studio.reference()
    settings = [studio.film(in_words(wishes), "setting", with_wishes(base, wishes)) for wishes in grid]
    plain = [studio.film(f"{n} steps", "steps", replace(base, num_inference_steps=n)) for n in rivals(settings, base)]
    floors = measure_floors(engine, studio.references, names=names, device=studio.device, tell=tell)
    points = [reference, *settings, *plain]
    plan = studio.references[0].report.plan
    machine = studio.references[0].report.machine
    assert base.width and base.height and base.num_frames and base.num_inference_steps
    found = Sweep(
        title=", ".join(dict.fromkeys(knob for wishes in grid for knob, _ in wishes)),
        family=plan.load.family,
        machine=machine.name,
        device=machine.device(plan.load.device).name,
        versions=machine.packages,
        width=base.width,
        height=base.height,
        num_frames=base.num_frames,
        num_inference_steps=base.num_inference_steps,
        guidance_scale=float(base.guidance_scale or 0),
        dtype=plan.load.dtype,
        prompts=tuple(dict.fromkeys(film.prompt for film in films)),
        seeds=tuple(dict.fromkeys(int(film.seed or 0) for film in films)),
        set_up=f"{set_up.prompt}, seed {set_up.seed}",
        points=tuple(
            replace(
                point, distances=beside(point.distances, floors), rival=rival_of(point, plain, base.num_inference_steps)
            )
            for point in points
        ),
        floors=floors,
        drift=studio.drift(),
        notes=(*(f"on in every run: {knob}={value}" for knob, value in request.wishes), *notes, *refused),
    )
    return Reel(sweep=found, samples=studio.samples, stills=studio.stills, reports=studio.reports)


def _possible(engine: Engine, base: Request, grid: Sequence[Wishes]) -> tuple[list[Wishes], list[str]]:
    """The settings that this machine and model take, and in words those that they refuse. Raises where none is left."""
    possible, refused = [], []
    for wishes in grid:
        try:
            engine.plan(with_wishes(base, wishes))
            possible.append(wishes)
        except LeverRefused as error:
            refused.append(f"left out: {in_words(wishes)}: {error}")
    if not possible:
        raise LeverRefused("; ".join(refused))
    return possible, refused


class Studio:
    """Films points against the references that it keeps."""

    def __init__(
        self, engine: Engine, films: Sequence[Request], set_up: Request, names: Sequence[str] | None, tell: Tell
    ) -> None:
        self.samples: list[Sample] = []
        self.stills: dict[str, np.ndarray] = {}
        self.reports: dict[str, Report] = {}
        self.references: list[Take] = []
        self.device = "cpu"
        self._engine, self._films, self._set_up, self._names, self._tell = engine, films, set_up, names, tell

    def reference(self) -> Point:
        base = self._films[0]
        label = f"reference, {base.num_inference_steps} steps"
        self._warm_up(base)
        assert self._engine.rig is not None
        self.device = self._engine.rig.device
        for number, film in enumerate(self._films, start=1):
            self._tell(f"{label}: film {number} of {len(self._films)}")
            self.references.append(take(self._engine, film))
        return self._point(label, "reference", base, self.references, [])

    def film(self, label: str, kind: str, setting: Request) -> Point:
        """All films with the wishes and steps of this setting."""
        self._warm_up(setting)
        takes, reports = [], []
        for number, film in enumerate(self._films, start=1):
            self._tell(f"{label}: film {number} of {len(self._films)}")
            asked = replace(film, wishes=setting.wishes, num_inference_steps=setting.num_inference_steps)
            other = take(self._engine, asked)
            takes.append(other)
            reports.append(compare_takes(self.references[number - 1], other, names=self._names, device=self.device))
        return self._point(label, kind, setting, takes, reports)

    def drift(self) -> float:
        """How much slower or faster the machine has become since the beginning."""
        self._warm_up(self._films[0])
        return take(self._engine, self._films[0]).loop_s / self.references[0].loop_s

    def _warm_up(self, setting: Request) -> None:
        """Kernels are chosen, code is compiled and a lever measures what it needs, on a film that is none of ours."""
        steps = setting.num_inference_steps
        self._engine.generate(replace(self._set_up, wishes=setting.wishes, num_inference_steps=steps))

    def _point(
        self, label: str, kind: str, setting: Request, takes: list[Take], reports: list[FidelityReport]
    ) -> Point:
        self.stills[label], self.reports[label] = _stills(takes[0]), takes[0].report
        for index, each in enumerate(takes):
            self.samples.append(_sample(label, each, reports[index] if reports else None))
        loops = [each.loop_s for each in takes]
        calls = statistics.median(computed_calls(each.report.trace) for each in takes)
        whole = statistics.median(computed_calls(each.report.trace) for each in self.references)
        complaints = (f"{r.lever}: {text}" for each in takes for r in each.report.receipts for text in r.complaints)
        return Point(
            label=label,
            kind=kind,
            wishes=setting.wishes,
            steps=int(setting.num_inference_steps or 0),
            loop_s=statistics.median(loops),
            loop_range_s=(min(loops), max(loops)),
            speed=statistics.median(a.loop_s / b.loop_s for a, b in zip(self.references, takes, strict=True)),
            calls=calls,
            fewer_calls=whole / calls,
            distances=together(reports),
            complaints=tuple(dict.fromkeys(complaints)),
        )


def computed_calls(trace: Trace) -> int:
    """Forwards that computed their blocks: all calls of the denoiser, but for those that a lever skipped."""
    if trace.schedules:
        return sum(run.count("1") for run in trace.schedules.values())
    return sum(trace.calls.values())


def _sample(label: str, film: Take, report: FidelityReport | None) -> Sample:
    return Sample(
        point=label,
        prompt=film.request.prompt,
        seed=int(film.request.seed or 0),
        loop_s=film.loop_s,
        calls=computed_calls(film.report.trace),
        identical=report is None or report.identical,
        distances={d.metric: d.value for d in report.distances if d.value is not None} if report else {},
        frames_hash=film.report.frames_hash,
    )


def _stills(film: Take, count: int = 4) -> np.ndarray:
    """A few frames over the film, in uint8."""
    at = np.linspace(0, len(film.frames_FCHW) - 1, min(count, len(film.frames_FCHW))).round().astype(int)
    return film.frames_FCHW[list(at)].permute(0, 2, 3, 1).numpy()


def as_row(point: Point, report: Report, *, lever: str | None, gain: float | None, **measured: Any) -> Measurement:
    """The ledger row of a setting over all films: what it took, and how far it moved them."""
    low, high = point.loop_range_s
    return row_of(
        report,
        lever=lever,
        step_ms=point.loop_s / point.steps * 1000,
        spread_ms=(high - low) / 2 / point.steps * 1000,
        peak_bytes=report.trace.peak_bytes,
        gain=gain,
        distances={d.metric: d.value for d in point.distances if d.value is not None},
        ranges={d.metric: both for d in point.distances if (both := spread(d)) is not None},
        **measured,
    )


# --------------------------------------------------------------------------- what is swept


def grid_of(words: Iterable[str], steps: int) -> tuple[Wishes, ...]:
    """ "step_cache" -> the settings that the lever itself calls worth comparing; "KNOB=V1,V2" -> each value;
    several -> every combination. Raises BadInput for what is no lever, no knob or no value."""
    axes: list[Sequence[Wishes]] = []
    for word in words:
        name, sign, values = word.partition("=")
        axes.append(_values(name.strip(), values) if sign else _own_grid(name.strip(), steps))
    if not axes:
        return ()
    return tuple(tuple(pair for wishes in combination for pair in wishes) for combination in itertools.product(*axes))


def _values(knob: str, values: str) -> list[Wishes]:
    if lever_of_knob(knob) is None:
        raise BadInput(f"no lever has a knob {knob!r}: see undercrank levers", field="sweep")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not found:
        raise BadInput(f"{knob}: give values with commas, as {knob}=on,off", field="sweep")
    return [((knob, value),) for value in found]


def _own_grid(name: str, steps: int) -> Sequence[Wishes]:
    lever = next((cls for cls in ORDER if cls.name == name), None)
    if lever is None:
        have = ", ".join(cls.name for cls in ORDER)
        raise BadInput(f"no lever {name!r}: this version has {have}; or give KNOB=VALUE,VALUE", field="sweep")
    return lever.grid(steps)


def off_but(request: Request, wishes: Wishes) -> Request:
    """Every lever off, except those that the wishes name."""
    named = {lever_of_knob(knob) for knob, _ in wishes}
    others = [wish for wish in stock(request).wishes if lever_of_knob(wish[0]) not in named]
    return replace(request, wishes=(*wishes, *others))


def with_wishes(base: Request, wishes: Wishes) -> Request:
    """The base with these wishes in place of what it says of the same levers."""
    named = {lever_of_knob(knob) for knob, _ in wishes}
    kept = [wish for wish in base.wishes if lever_of_knob(wish[0]) not in named]
    return replace(base, wishes=(*kept, *wishes))


def in_words(wishes: Wishes) -> str:
    return ", ".join(f"{knob}={value}" for knob, value in wishes)


# --------------------------------------------------------------------------- the rival: fewer steps


def rivals(settings: Sequence[Point], base: Request) -> list[int]:
    """Numbers of steps whose plain run takes as long as each setting; many first."""
    full = int(base.num_inference_steps or 0)
    return sorted({count for point in settings if (count := equal_steps(point, full)) < full}, reverse=True)


def equal_steps(point: Point, full: int) -> int:
    """Plain steps that take as long as this setting or longer: by its seconds or its calls, whichever grants more."""
    return math.ceil(
        full / max(1.0, min(point.speed, point.fewer_calls if point.fewer_calls != 1 else math.inf)) - 1e-9
    )


def rival_of(point: Point, plain: Sequence[Point], full: int) -> str:
    """The plain run of fewest steps that takes as long as this setting or longer."""
    if point.kind != "setting":
        return ""
    fair = [each for each in plain if each.steps >= equal_steps(point, full)]
    return min(fair, key=lambda each: each.steps).label if fair else ""


def beats_rival(point: Point, found: Sweep, metric: str) -> bool | None:
    """Is the setting nearer to the reference than its rival? None where one of them has no such distance."""
    rival = found.named(point.rival)
    own, other = point.value(metric), rival.value(metric) if rival else None
    return None if own is None or other is None else METRICS[metric].further(other, own)


class Placed(Protocol):
    """What has a place between speed and distance."""

    @property
    def speed(self) -> float: ...

    def value(self, metric: str) -> float | None: ...


P = TypeVar("P", bound=Placed)


def front(points: Sequence[P], metric: str, axis: str = "speed") -> list[P]:
    """The settings that no other one beats in speed (or `fewer_calls`) and distance both, slow to fast."""
    known = [point for point in points if point.value(metric) is not None]
    best: list[P] = []
    for point in sorted(known, key=lambda p: -float(getattr(p, axis))):
        value = point.value(metric)
        assert value is not None
        if not best or METRICS[metric].further(float(best[-1].value(metric) or 0), value):
            best.append(point)
    return best[::-1]


def axes(found: Sweep) -> list[str]:
    """What is saved: time; before it calls of the denoiser where a setting saves some, which no busy machine moves."""
    return ["fewer_calls", "speed"] if any(point.fewer_calls > 1 for point in found.settings) else ["speed"]


def gates(found: Sweep) -> list[str]:
    """The gates that were computed."""
    return [name for name in GATES if any(point.value(name) is not None for point in found.points)]
