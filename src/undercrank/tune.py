"""`undercrank tune MODEL`: what each lever gains and costs on this machine, in a stated time, and the plan to take.

Every setting that the levers call worth comparing is filmed alone beside the stock run, those first that gained most
elsewhere; then the best of several levers together. Each becomes a row of the user's ledger as soon as it is measured,
and is not measured again. A measurement is begun only where one like it would end in time.

The stock film is made anew before and after each setting. What a setting gains is the smaller of the two ratios, and
nothing where they disagree: a machine that has other work for a while makes no lever look fast.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from undercrank import families
from undercrank.beside import beside
from undercrank.engine import Engine
from undercrank.fidelity import films_of, refuse_overlap
from undercrank.ledger import HERE, append
from undercrank.levers import ORDER, group_of, lever_of_knob
from undercrank.metrics import METRICS, QUICK, metric_named, shown
from undercrank.planner import BOUNDS, NOISE, doubts
from undercrank.prompts import SET_UP_SEED, prompts_for, set_up_prompt
from undercrank.quality import EQUAL_DB
from undercrank.records import (
    BadInput,
    Cancelled,
    Fidelity,
    Lever,
    LeverRefused,
    Measurement,
    NotFound,
    OutOfMemory,
    Record,
    Request,
    RunFailed,
)
from undercrank.rounding import Tell, floor_of_kernels, floors_in_words, medians
from undercrank.sweep import Point, Studio, Wishes, as_row, front, in_words, off_but, with_wishes
from undercrank.takes import take

DEFAULT_SECONDS = 900.0
MORE = 1.15
"A measurement may take so much longer than the last one like it."
RING_S = 0.1
"Between two cancels once the time is up."
FILMS = 2
"Prompts unless given; each is filmed with each seed."


@dataclass(frozen=True, kw_only=True)
class Goal(Record):
    """What is looked for: the fastest within a distance, or the nearest at a speed."""

    metric: str = "st_lpips_alex"
    budget: float | None = None
    "The furthest that a film may be from the stock one, by the metric."
    speed: float | None = None
    "How many times faster than the stock run."

    @classmethod
    def of(cls, metric: str | None, budget: float | None, speed: float | None, word: Fidelity) -> Goal:
        """Without a budget or a speed: what the fidelity word allows. Raises BadInput."""
        metric = metric or "st_lpips_alex"
        if metric not in METRICS:
            raise BadInput(f"no metric {metric!r}: choose {', '.join(METRICS)}", field="metric")
        if budget is not None and speed is not None:
            raise BadInput("give a budget or a target speed-up, not both", field="budget")
        if speed is not None and not 1 < speed <= 1000:
            raise BadInput(f"target speed-up {speed:g}: a number above 1 is needed, such as 2", field="target_speedup")
        if budget is not None and not 0 <= budget < float("inf"):
            raise BadInput(f"budget {budget:g}: a distance of 0 or more is needed, such as 0.05", field="budget")
        if budget is None and speed is None:
            budget = BOUNDS.get(word, {}).get(metric)
            if budget is None:
                raise BadInput(
                    f"say how far: fidelity {word.value} has no bound in {metric}; give --budget or --target-speedup",
                    field="budget",
                )
        return cls(metric=metric, budget=budget, speed=speed)

    def allows(self, distance: float | None) -> bool:
        """Is a film at this distance near enough?"""
        if self.budget is None:
            return True
        return distance is not None and not METRICS[self.metric].further(distance, self.budget)

    def best(self, tried: Sequence[Tried]) -> Tried | None:
        """The fastest inside the budget, or the nearest that is fast enough; None: there is none."""
        if self.speed is None:
            inside = [each for each in tried if self.allows(each.value(self.metric))]
            return max(inside, key=lambda each: each.speed, default=None)
        fast = [each for each in tried if each.speed >= self.speed and each.value(self.metric) is not None]
        metric, best = METRICS[self.metric], None
        for each in sorted(fast, key=lambda each: -each.speed):
            if best is None or metric.further(best.distances[self.metric], each.distances[self.metric]):
                best = each
        return best


@dataclass(frozen=True, kw_only=True)
class Tried(Record):
    """One setting beside the stock run. speed: the stock loop's seconds over its own."""

    label: str
    wishes: Wishes
    speed: float
    distances: dict[str, float]
    step_ms: float | None = None
    peak_bytes: int | None = None
    row: str = ""
    "Id of its row in the ledger."
    was_known: bool = False
    "Measured by an earlier run of `tune`."
    took_s: float = 0.0
    complaints: tuple[str, ...] = ()

    def value(self, metric: str) -> float | None:
        return self.distances.get(metric)


@dataclass(frozen=True, kw_only=True)
class Tuning(Record):
    """All of `undercrank tune`."""

    family: str
    machine: str
    device: str
    dtype: str
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    goal: Goal
    tried: tuple[Tried, ...]
    front: tuple[str, ...]
    "Labels, slow to fast."
    chosen: str
    "Label; empty: nothing that was measured meets the goal."
    wishes: Wishes
    "Of what was chosen."
    left_out: tuple[str, ...]
    "Settings that were not measured, each with its reason."
    ended: str
    "complete, time, cancelled"
    seconds: float


STOCK = "stock"


def tune(
    engine: Engine,
    request: Request,
    goal: Goal,
    *,
    seconds: float = DEFAULT_SECONDS,
    prompts: Sequence[str] = (),
    seeds: Sequence[int] = (1,),
    again: bool = False,
    keep: Callable[[Measurement], None] = append,
    tell: Tell = lambda words: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Measure until all is known or the time is up; the levers that the request names are on in every run.

    seconds: from now to the return, loading included; a run that would go beyond them is stopped within one step.
    again: measure also what the ledger knows. keep: is given each row as soon as it is measured.
    Raises BadInput, and the errors of `Engine.generate` where not even the stock run can be made.
    """
    if not seconds > 0:
        raise BadInput(f"seconds {seconds:g}: a time above 0 is needed, such as 900", field="seconds")
    walk = _Walk(engine, request, goal, prompts, seeds, tell=tell, keep=keep, clock=clock, until=clock() + seconds)
    begun, ended = clock(), "complete"
    try:
        with walk.alarm():
            walk.recall(again)
            walk.alone()
            walk.together()
    except (Cancelled, KeyboardInterrupt):
        ended = "time" if walk.time_is_up else "cancelled"
    if ended == "complete" and walk.was_short:
        ended = "time"
    return walk.told(ended, clock() - begun)


@dataclass(kw_only=True)
class _Candidate:
    """A setting that may be measured, and the lever that it is of; None: several."""

    wishes: Wishes
    lever: type[Lever] | None
    setting: str = ""
    "As rows name it."

    @property
    def label(self) -> str:
        return in_words(self.wishes)


class _Walk:
    """One tuning as it goes."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        goal: Goal,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        tell: Tell,
        keep: Callable[[Measurement], None],
        clock: Callable[[], float],
        until: float,
    ) -> None:
        self.goal = goal
        self.tried: list[Tried] = []
        self.left_out: list[str] = []
        self.time_is_up = self.was_short = False
        self._engine, self._tell, self._keep, self._clock, self._until = engine, tell, keep, clock, until
        self._always = request.wishes
        self.base = engine.plan(off_but(replace(request, seed=1), request.wishes)).request
        plan = engine.plan(self.base)
        self._family, self._load = families.family(plan.load.family), plan.load
        self._films = films_of(self.base, tuple(prompts) or prompts_for(self._family, FILMS), seeds)
        self._set_up = replace(self.base, prompt=set_up_prompt(self._family), seed=SET_UP_SEED)
        refuse_overlap(self._films, self._set_up)
        self._studio: Studio | None = None
        self._floor: dict[str, float] = {}
        self._floor_of = ""
        self._costs: list[tuple[str, float]] = []
        "Seconds that each measurement took, by lever."
        self._stock_s: list[float] = []
        "Seconds of the first stock film's loop, each time that it was made."
        self._known: dict[tuple[str | None, str], Measurement] = {}

    # ----------------------------------------------------------------------- in time

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """When the time is up, the run under way is stopped as a cancel stops it, and any that begins after it."""
        left = max(0.0, self._until - self._clock())

        def ring(over: threading.Event) -> None:
            is_over = over.wait(min(left, threading.TIMEOUT_MAX))
            while not is_over:
                self.time_is_up = True
                self._engine.cancel("the time is up")  # which is forgotten when the next run begins
                is_over = over.wait(RING_S)

        with beside(ring, name="alarm"):
            yield

    def _is_time_for(self, lever: str) -> bool:
        """By what the last measurement of this lever took, else by the dearest one."""
        own = [seconds for name, seconds in self._costs if name == lever]
        cost = own[-1] if own else max((seconds for _, seconds in self._costs), default=0.0)
        left = self._until - self._clock()
        return not self.time_is_up and left > 0 and cost * MORE <= left

    # ----------------------------------------------------------------------- what is known already

    def recall(self, again: bool) -> None:
        """Rows of this machine, these versions and these films; the newest of each setting."""
        if again:
            return
        for row in self._engine.ledger.rows:
            if self._is_of_these_films(row):
                self._known[row.lever, row.setting] = row

    def _is_of_these_films(self, row: Measurement) -> bool:
        request, machine = self.base, self._engine.machine
        return (
            row.source == HERE
            and row.note.startswith(self._mark)
            and (row.family, row.machine, row.dtype) == (self._load.family, machine.name, self._load.dtype)
            and row.device == machine.device(self._load.device).name
            and row.versions == machine.packages
            and (row.width, row.height, row.num_frames) == (request.width, request.height, request.num_frames)
            and row.num_inference_steps == request.num_inference_steps
            and (row.prompts, row.seeds) == (self._prompts, self._seeds)
            and row.gain is not None
        )

    @property
    def _mark(self) -> str:
        """How the note of a row begins: what no column says, and what makes it another measurement."""
        always = f", with {in_words(self._always)}" if self._always else ""
        return f"tune, guidance {self.base.guidance_scale:g}{always}: "

    @property
    def _metrics(self) -> tuple[str, ...]:
        """Those of frames that are quick to take, and the goal's."""
        return tuple(name for name in METRICS if METRICS[name].of == "frames" and name in (*QUICK, self.goal.metric))

    @property
    def _prompts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(film.prompt for film in self._films))

    @property
    def _seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(int(film.seed or 0) for film in self._films))

    # ----------------------------------------------------------------------- the walk

    def alone(self) -> None:
        """Each setting of each lever by itself, those first that gained most wherever they were measured."""
        for candidate in self._candidates():
            assert candidate.lever is not None
            self._try(candidate, candidate.lever.name)

    def together(self) -> None:
        """The best setting of each lever joined to the best of all, as long as it brings the goal nearer."""
        best = self._groups()
        joined = best[0] if best else None
        for each in best[1:]:
            assert joined is not None
            wishes = (*joined.wishes, *each.wishes)
            found = self._try(_Candidate(wishes=wishes, lever=None, setting=in_words(wishes)), "together")
            if found is not None and found.speed > joined.speed and self.goal.allows(found.value(self.goal.metric)):
                joined = found

    def _groups(self) -> list[Tried]:
        """Of each group of knobs the setting that is fastest within the goal; the fastest first, or the nearest where a
        speed is the goal."""
        fit = [t for t in self.tried if t.speed > 1 + NOISE and self.goal.allows(t.value(self.goal.metric))]
        groups: dict[str, Tried] = {}
        for each in sorted(fit, key=lambda each: -each.speed):
            groups.setdefault(group_of(each.wishes[0][0]), each)
        found = list(groups.values())
        if self.goal.speed is not None:
            metric = METRICS[self.goal.metric]
            found.sort(key=lambda t: t.distances.get(metric.name, 0.0) * (1 if metric.closer == "lower" else -1))
        return found

    def _candidates(self) -> list[_Candidate]:
        found = []
        for lever in sorted(ORDER, key=lambda lever: -self._promising(lever)):
            if any(lever_of_knob(knob) is lever for knob, _ in self._always):
                continue  # on in every run
            for wishes in lever.grid(int(self.base.num_inference_steps or 0)):
                candidate = _Candidate(wishes=wishes, lever=lever)
                if reason := self._why_not(candidate):
                    self.left_out.append(f"{candidate.label}: {reason.removeprefix(f'{candidate.label}: ')}")
                else:
                    found.append(candidate)
        return found

    def _promising(self, lever: type[Lever]) -> float:
        """The largest gain that a row shows for this model; else for any."""
        rows = [row for row in self._engine.ledger.rows if row.lever == lever.name and row.gain is not None]
        own = [row for row in rows if row.family == self._family.id]
        return max((row.gain or 0.0 for row in own or rows), default=1.0)

    def _why_not(self, candidate: _Candidate) -> str | None:
        """What speaks against a setting before anything is run; None: nothing."""
        try:
            plan = self._engine.plan(with_wishes(self.base, candidate.wishes))
        except (LeverRefused, BadInput) as error:
            return str(error)
        lever = next((each for each in plan.levers if type(each) is candidate.lever), None)
        if lever is None:
            return "it has no effect here"
        candidate.setting = lever.setting
        return doubts(plan, self._family, self._engine.machine).get(lever.name)

    def _try(self, candidate: _Candidate, lever: str) -> Tried | None:
        """Measure a setting, or remember it. None: it could not be measured, and `left_out` says why."""
        name = candidate.lever.name if candidate.lever else None
        if row := self._known.get((name, candidate.setting)):
            return self._add(_tried(row, candidate, was_known=True))
        if not (self._is_time_for(lever) and (studio := self._ready()) and self._is_time_for(lever)):
            self.was_short = True
            self.left_out.append(f"{candidate.label}: no time was left for it")
            return None
        begun = self._clock()
        try:
            point = studio.film(candidate.label, "setting", with_wishes(self.base, candidate.wishes))
            ratios = self._ratios(point)
        except (LeverRefused, OutOfMemory, RunFailed) as error:
            self.left_out.append(f"{candidate.label}: {error}")
            return None
        self._costs.append((lever, self._clock() - begun))
        row = self._row(point, candidate, ratios)
        self._keep(row)
        self._refuse_blindness(point)
        found = replace(_tried(row, candidate), took_s=round(self._costs[-1][1], 2), complaints=point.complaints)
        self._tell(f"{candidate.label}: {found.speed:.2f}x, {self._in_words(found)}")
        return self._add(found)

    def _ratios(self, point: Point) -> tuple[float, float]:
        """Seconds of the stock loop before and after the setting's films over theirs."""
        stock = self._films[0]
        steps = stock.num_inference_steps if self._always else 1  # a lever may need all of them
        self._engine.generate(replace(stock, num_inference_steps=steps))  # after a reload the first run is a slow one
        self._stock_s.append(take(self._engine, stock).loop_s)
        loops = (
            [sample.loop_s for sample in self._studio.samples if sample.point == point.label] if self._studio else []
        )
        return self._stock_s[-2] / loops[0], self._stock_s[-1] / loops[-1]

    def _refuse_blindness(self, point: Point) -> None:
        """Without the distance that the goal speaks of there is nothing to look for."""
        distance = next((each for each in point.distances if each.metric == self.goal.metric), None)
        if distance is None or distance.value is None:
            why = distance.note if distance else "these films have no such distance"
            raise NotFound(
                f"{metric_named(self.goal.metric).title} cannot be had here: {why}; or name another --metric"
            )

    def _add(self, found: Tried) -> Tried:
        self.tried.append(found)
        return found

    def _ready(self) -> Studio:
        """The stock films that all others stand beside, made when the first of them is needed; then their floor."""
        if self._studio is None:
            begun = self._clock()
            studio = Studio(self._engine, self._films, self._set_up, self._metrics, self._tell)
            studio.reference()
            self._costs.append((STOCK, self._clock() - begun))
            self._studio = studio
            self._stock_s.append(studio.references[0].loop_s)
            self._measure_floor(studio)
        return self._studio

    def _measure_floor(self, studio: Studio) -> None:
        """The ledger's where it has one for these runs; else that of another exact kernel, where there is time."""
        plan = studio.references[0].report.plan
        if known := self._engine.ledger.floor_for(plan):
            self._floor, self._floor_of = dict(known.floor), known.floor_of
        elif self._is_time_for(STOCK):
            floor = floor_of_kernels(self._engine, studio.references, self._metrics, studio.device, self._tell)
            self._floor = medians((floor,), str(self.base.dtype))
            self._floor_of = floors_in_words((floor,), str(self.base.dtype))

    def _row(self, point: Point, candidate: _Candidate, ratios: tuple[float, float]) -> Measurement:
        assert self._studio is not None
        row = as_row(
            point,
            self._studio.reports[point.label],
            lever=candidate.lever.name if candidate.lever else None,
            gain=agreed(*ratios),
            n=len(self._films),
            floor=self._floor,
            note=f"{self._mark}{point.label}; stock before it over it {ratios[0]:.3f}, stock after it {ratios[1]:.3f}",
            prompts=self._prompts,
            seeds=self._seeds,
            floor_of=self._floor_of,
            calibrated_on=(f"{self._set_up.prompt}, seed {self._set_up.seed}",),
        )
        return row if candidate.lever else replace(row, setting=candidate.setting)

    # ----------------------------------------------------------------------- what is told

    def told(self, ended: str, seconds: float) -> Tuning:
        request, machine = self.base, self._engine.machine
        stock = Tried(label=STOCK, wishes=self._always, speed=1.0, distances=_nothing(self.goal.metric))
        chosen = self.goal.best([stock, *self.tried])
        assert request.width and request.height and request.num_frames and request.num_inference_steps
        return Tuning(
            family=self._family.id,
            machine=machine.name,
            device=machine.device(self._load.device).name,
            dtype=self._load.dtype,
            width=request.width,
            height=request.height,
            num_frames=request.num_frames,
            num_inference_steps=request.num_inference_steps,
            prompts=self._prompts,
            seeds=self._seeds,
            goal=self.goal,
            tried=tuple(self.tried),
            front=tuple(each.label for each in front([stock, *self.tried], self.goal.metric)),
            chosen=chosen.label if chosen else "",
            wishes=chosen.wishes if chosen else (),
            left_out=tuple(self.left_out),
            ended=ended,
            seconds=round(seconds, 1),
        )

    def _in_words(self, found: Tried) -> str:
        value, metric = found.value(self.goal.metric), metric_named(self.goal.metric)
        return f"{metric.title} {shown(value)}"


def agreed(before: float, after: float) -> float:
    """The ratio that claims less; 1 where one says faster and the other slower."""
    return min(max(1.0, min(before, after)), max(before, after))


def _tried(row: Measurement, candidate: _Candidate, *, was_known: bool = False) -> Tried:
    return Tried(
        label=candidate.label,
        wishes=candidate.wishes,
        speed=float(row.gain or 0.0),
        distances=dict(row.distances),
        step_ms=row.step_ms,
        peak_bytes=row.peak_bytes,
        row=row.id,
        was_known=was_known,
    )


def _nothing(metric: str) -> dict[str, float]:
    """How far a film is from itself."""
    return {metric: 0.0 if METRICS[metric].closer == "lower" else {"psnr_db": EQUAL_DB, "vmaf": 100.0}.get(metric, 1.0)}
