"""step_cache: steps in which little changes add the change of an earlier step instead of computing it.

Does: what the denoiser's blocks add to their input (the residual) changes slowly in the middle of a run. A skipped step
adds the residual of the newest computed one. Which steps are skipped is decided before the loop, for each branch of
guidance and each expert, by MagCache's rule, by a search for a given number of computed steps, or by a mask; nothing
is read from the device. First Block Cache and EasyCache, which decide by looking at data, are there too. What the rules
need to know of a checkpoint is measured in its first whole run, which computes every step, and kept.

Promises: LOSSY; EXACT where it skips nothing, as in a run that measures.

Costs: one residual for each branch is held in memory. First Block Cache waits for the device once in each forward,
EasyCache once in each step. A run that measures computes two norms more in each step.

Measured: see `docs/levers/step_cache.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

from undercrank import schedules
from undercrank.ratios import Curve
from undercrank.records import BadInput, Case, Fidelity, Lever, LeverRefused, Promise, Trace
from undercrank.schedules import PRESETS, Rule, Schedule
from undercrank.undo import appended

if TYPE_CHECKING:
    from undercrank.levers.programs import Phase
    from undercrank.rig import Rig

CACHES = ("magcache", "searched", "fbcache", "easycache", "mask", "measure")
LOOKS_AT_DATA = ("fbcache", "easycache")

FIRST_BLOCK = {"quality": 0.05, "balanced": 0.08, "fast": 0.12}
"Thresholds of First Block Cache; the first is diffusers' default."
EASY = {"quality": 0.025, "balanced": 0.05, "fast": 0.1}
"Thresholds of EasyCache: its authors' for HunyuanVideo, for Wan, and for twice the speed."
EASY_RETENTION = 0.2
"EasyCache's authors compute 10 of Wan's 50 steps before the first decision."

MIN_STEPS = 12
"With fewer steps each one matters: `auto` computes them all."

PROVEN = frozenset(
    {
        "WanPipeline",
        "WanImageToVideoPipeline",
        "SkyReelsV2Pipeline",
        "HunyuanVideoPipeline",
        "HunyuanVideo15Pipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        "CogVideoXPipeline",
        "CogVideoXImageToVideoPipeline",
        "LTXPipeline",
        "LTXImageToVideoPipeline",
        "LTX2Pipeline",
        "LTX2ImageToVideoPipeline",
        "MochiPipeline",
    }
)
"Pipeline classes that name their branches and whose skipped steps the tests hold to diffusers' own MagCache."


@dataclass(frozen=True, kw_only=True)
class StepCache(Lever):
    name = "step_cache"
    knobs = (
        "transformer_cache",
        "transformer_cache_quality",
        "transformer_cache_threshold",
        "transformer_cache_budget",
        "transformer_cache_retention",
        "transformer_cache_mask",
    )
    summary = "steps in which little changes reuse the change of an earlier one"

    cache: str = "auto"
    "auto, magcache, searched, fbcache, easycache, mask, measure"
    quality: str = "auto"
    "auto, quality, balanced, fast"
    threshold: float | None = None
    retention: float | None = None
    budget: int | None = None
    "Computed steps; their places are searched for."
    mask: str = ""
    by_path: bool = False
    "Of `auto`: takes the preset's searched path, and the rule where the weights turn out to be others."

    SETTINGS: ClassVar[dict[str, str]] = {"on": "magcache"}

    def __post_init__(self) -> None:
        _check_word("transformer_cache", self.cache, ("auto", *CACHES))
        _check_word("transformer_cache_quality", self.quality, ("auto", *PRESETS))
        if self.threshold is not None:
            schedules.check_threshold(self.threshold)
        if self.retention is not None:
            schedules.check_retention(self.retention)
        if self.budget is not None and (isinstance(self.budget, bool) or self.budget < 1):
            raise BadInput(f"budget {self.budget}: a number of steps is needed", field="transformer_cache_budget")
        self._check_together()

    def _check_together(self) -> None:
        if bool(self.mask) is not (self.cache == "mask"):
            raise BadInput(
                "transformer_cache=mask and transformer_cache_mask=1101... go together", field="transformer_cache_mask"
            )
        if self.budget is not None and (
            self.cache not in ("auto", "magcache", "searched") or self.threshold is not None
        ):
            raise BadInput(
                "a budget says how many steps are computed: leave the threshold, the mask and other caches out",
                field="transformer_cache_budget",
            )
        if self.retention is not None and self.cache in ("mask", "fbcache", "searched"):
            raise BadInput(
                "masks, searched paths and First Block Cache know no retention: leave it out",
                field="transformer_cache_retention",
            )
        if self.threshold is not None and self.cache in ("mask", "searched"):
            raise BadInput(
                "masks and searched paths know no threshold: leave it out", field="transformer_cache_threshold"
            )

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        """Any setting by name is explicit: it alone means MagCache, or the mask that it is."""
        if not wishes:
            return cls()
        mask = wishes.get("transformer_cache_mask", "")
        cache = wishes.get("transformer_cache", "mask" if mask else "magcache")
        return cls(
            cache=cls.SETTINGS.get(cache, cache),
            quality=wishes.get("transformer_cache_quality", "auto"),
            threshold=_number(wishes, "transformer_cache_threshold"),
            retention=_number(wishes, "transformer_cache_retention"),
            budget=_whole(wishes, "transformer_cache_budget"),
            mask=mask,
        )

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Each preset, paths of as many computed steps, and the two rules that look at data."""
        budgets = [schedules.budget_of(preset, steps) for preset in PRESETS]
        settings = [
            *(("transformer_cache_quality", preset) for preset in PRESETS),
            *(("transformer_cache_budget", str(budget)) for budget in dict.fromkeys(budgets)),
            *(("transformer_cache", cache) for cache in LOOKS_AT_DATA),
        ]
        return tuple((setting,) for setting in settings)

    # ----------------------------------------------------------------------- what it would do

    def choices(self, case: Case) -> tuple[Self, ...]:
        """The family's preset, no bolder than the fidelity word, and every more careful one after it; or to measure.
        Of each preset the searched path first, where one is known."""
        if self.quality != "auto":
            return (self,)
        order = list(PRESETS)
        word = case.fidelity.value if case.fidelity.value in order else order[0]
        boldest = min(order.index(case.family.transformer_cache_quality), order.index(word))
        bold_to_careful = tuple(replace(self, quality=quality) for quality in reversed(order[: boldest + 1]))
        if self.cache != "auto":
            return bold_to_careful[:1]
        by_path = tuple(replace(each, by_path=True) for each in bold_to_careful if each.is_searched(case))
        if self._measures(case):
            return (*by_path, replace(self, cache="measure"))
        rank = order.index
        return tuple(sorted((*by_path, *bold_to_careful), key=lambda each: (-rank(each.quality), not each.by_path)))

    def path_budget(self, steps: int) -> int | None:
        """Computed steps of the path that is meant; None: none is."""
        if self.budget is not None:
            return self.budget if self.retention is None else None
        return schedules.budget_of(self.preset, steps)

    def is_searched(self, case: Case) -> bool:
        return self.path_budget(case.num_inference_steps) in case.searched_budgets

    @property
    def preset(self) -> str:
        """The preset that holds where none was named."""
        return "quality" if self.quality == "auto" else self.quality

    @property
    def setting(self) -> str:
        if self.cache == "mask":
            return f"mask={self.mask}"
        if self.cache == "measure":
            return "measure"
        if self.budget is not None:
            return f"budget={self.budget}"
        own = {"threshold": self.threshold, "retention": self.retention}
        words = [] if self.cache in ("auto", "magcache") else [self.cache]
        words += ["searched"] if self.by_path else []
        words += [self.quality, *(f"{name}={value:g}" for name, value in own.items() if value is not None)]
        return " ".join(words)

    def check(self, case: Case) -> None:
        if "video_input" in case.family.traits:
            return  # the length of the loop is a matter of the call's strength
        if self.cache == "mask":
            schedules.mask(self.mask, case.num_inference_steps)
        if self.budget is not None and not 2 <= self.budget <= case.num_inference_steps:
            raise BadInput(
                f"budget {self.budget}: of {case.num_inference_steps} steps, 2 to {case.num_inference_steps} can be "
                "the computed ones",
                field="transformer_cache_budget",
            )

    def promises(self, case: Case) -> Promise:
        return Promise.EXACT if self.skips_nothing(case.num_inference_steps) else Promise.LOSSY

    def _measures(self, case: Case) -> bool:
        """By itself, a run that measures is of use only where the word lets the next one skip."""
        return not case.is_calibrated and case.fidelity not in (Fidelity.EXACT, Fidelity.FAITHFUL)

    def vouch(self, case: Case) -> str | None:
        if self.cache == "measure":
            return "nothing is known of these weights: computes every step and measures it, for the next run"
        if self.quality != "quality":
            return None
        if self.by_path:
            return "searched on films of its own, distance on others not measured"
        return "calibrated here, distance not measured" if case.is_calibrated else None

    def skips_nothing(self, steps: int) -> bool:
        """By its settings, whatever the checkpoint."""
        if self.cache == "mask":
            return "0" not in self.mask
        return (
            self.cache == "measure"
            or self.threshold == 0
            or self.retention == 1
            or (self.budget is not None and self.budget >= steps)
        )

    def lacks(self, case: Case) -> str | None:
        if self.cache == "searched" and not self.is_searched(case):
            return (
                f"no path of {self.path_budget(case.num_inference_steps)} computed steps of "
                f"{case.num_inference_steps} was searched for {case.family.title}: undercrank calibrate --search "
                "finds one"
            )
        is_apart = case.family.branches != "batched" and case.family.branch_names
        if "cfg_parallel" in case.engaged and not is_apart:
            return f"with cfg_parallel, {case.family.title} does not say which branch a forward is: turn that off"
        return None

    def doubt(self, case: Case) -> str | None:
        if case.num_inference_steps < MIN_STEPS:
            return f"{case.num_inference_steps} steps are few: each of fewer than {MIN_STEPS} matters"
        if "distilled" in case.family.traits:
            return f"{case.family.title} is distilled to few steps: each of them matters"
        if case.family.pipeline not in PROVEN:
            return f"{case.family.pipeline} is not proven with skipped steps"
        return None

    @property
    def rule(self) -> Rule:
        """MagCache's settings: the preset's, each of which an explicit one replaces."""
        rule = PRESETS[self.preset]
        threshold = rule.threshold if self.threshold is None else self.threshold
        return replace(
            rule, threshold=threshold, retention=rule.retention if self.retention is None else self.retention
        )

    # ----------------------------------------------------------------------- doing it

    def schedule(self, phase: Phase, curve: Curve | None) -> Schedule | None:
        """Which steps of a phase are computed; None: nobody knows before this checkpoint is measured."""
        if self.cache == "mask":
            return schedules.mask(self.mask, phase.total)[phase.first : phase.first + phase.steps]
        if self.cache == "measure":
            return None
        if self.skips_nothing(phase.total) or (self.cache == "auto" and phase.total < MIN_STEPS):
            return schedules.everything(phase.steps)
        if (path := self._path(phase)) is not None:
            return path
        if curve is None:
            return None
        if self.budget is None:
            return schedules.magcache(schedules.nearest(curve.ratios, phase.steps), self.rule)
        return _searched(self.budget, SEARCH_RETENTION if self.retention is None else self.retention, phase, curve)

    def _path(self, phase: Phase) -> Schedule | None:
        is_meant = self.by_path or self.cache == "searched" or self.budget is not None
        budget = self.path_budget(phase.total) if is_meant else None
        return None if budget is None else phase.paths.get(budget)

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _skipping(rig, self)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        if reason := _unfit(rig):
            return [f"does nothing here: {reason}"]
        if not rig.executed:
            return ["no forward passed through the stack of blocks: no effect"]
        complaints = []
        for key, planned in rig.planned.items():
            if planned != (executed := rig.executed.get(key, [])):
                complaints.append(f"{key}: planned {_digits(planned)}, executed {_digits(executed)}")
        if rig.counters.get("step_cache.unnamed"):
            complaints.append("the branches of guidance could not be told apart: everything was computed")
        elif self._should_skip(rig) and all(all(run) for run in rig.executed.values()):
            complaints.append(f"skipped none of {rig.total_steps} steps")
        return complaints

    def _should_skip(self, rig: Rig) -> bool:
        is_short = self.cache == "auto" and rig.total_steps < MIN_STEPS
        return not (rig.counters.get("step_cache.measuring") or is_short or self.skips_nothing(rig.total_steps))


EARLY = 2
"""An error counts by the length of its step in sigma, times sigma to this power: what goes wrong early decides more of
the film. Found on flipbook: see `docs/levers/step_cache.md`."""


SEARCH_RETENTION = 0.2
"Share of the steps that a search leaves alone at the start, where a skip may give another film altogether."


def _searched(budget: int, retention: float, phase: Phase, curve: Curve) -> Schedule:
    """The phase's share of the budget, spent where the gaps' errors are smallest."""
    if phase.steps < 2:
        return schedules.everything(phase.steps)
    share = min(phase.steps, max(2, round(budget * phase.steps / phase.total)))
    kept = min(int(retention * phase.steps + 0.5), share - 1)  # a small budget may be all that there is to keep
    places, at = [-level for level in curve.levels], [-level for level in phase.levels]
    lengths = [early - late for early, late in pairwise(phase.levels)]
    weights = [length * level**EARLY for length, level in zip([*lengths, lengths[-1]], phase.levels, strict=True)]
    drifts = schedules.drifts_anew(curve.drifts, places, at)
    return schedules.searched(drifts, weights, share, starts=range(max(1, kept)))


@contextmanager
def _skipping(rig: Rig, lever: StepCache) -> Iterator[None]:
    """On: the denoisers' stacks of blocks are run, measured or skipped. Off: they are lists of blocks."""
    from undercrank.levers.programs import Programs
    from undercrank.levers.stacks import stacked

    if reason := _unfit(rig):
        if lever.cache != "auto":
            raise LeverRefused(f"{lever.knobs[0]}={lever.cache}: {reason}; leave it out with transformer_cache=off")
        yield
        return
    if rig.replicas and lever.cache == "easycache":
        raise LeverRefused(
            "transformer_cache=easycache: the first branch decides for the second, and with cfg_parallel they are "
            "computed at once: choose magcache, fbcache or a mask"
        )
    programs = Programs(rig, lever.schedule)
    cache, beside = _cache(rig, lever, programs), _cache(rig, lever, programs)

    def start(total: int) -> None:
        cache.forget()
        beside.forget()
        programs.start(total)
        if lever.cache == "mask":
            schedules.mask(lever.mask, total, programs.starts)
        if lever.path_budget(total) not in programs.budgets and (lever.cache == "searched" or total >= MIN_STEPS):
            _no_path(rig, lever, total)

    def end(error: BaseException | None) -> None:
        rig.count("step_cache.bytes", cache.residuals.held_bytes + beside.residuals.held_bytes)
        cache.forget()
        beside.forget()
        programs.finish(error)

    with ExitStack() as stack:
        stack.enter_context(appended(rig.at_start, start))
        stack.enter_context(appended(rig.at_end, end))
        stack.enter_context(stacked(rig, cache, beside))
        yield


def _no_path(rig: Rig, lever: StepCache, total: int) -> None:
    """The weights in memory are not those that the paths are of: an adapter, another format."""
    if lever.cache == "searched":
        raise LeverRefused(
            f"no path of {lever.path_budget(total)} computed steps of {total} was searched for these weights: "
            "undercrank calibrate --search finds one, and transformer_cache=magcache needs none"
        )
    if lever.by_path:
        rig.remark("step_cache", "the searched paths are of other weights than these: by MagCache's rule")


def _cache(rig: Rig, lever: StepCache, programs: Any) -> Any:
    from undercrank.levers.caches import Easy, FirstBlock, Scheduled

    quality = lever.preset
    if lever.cache == "fbcache":
        return FirstBlock(rig, programs, FIRST_BLOCK[quality] if lever.threshold is None else lever.threshold)
    if lever.cache == "easycache":
        threshold = EASY[quality] if lever.threshold is None else lever.threshold
        return Easy(rig, programs, threshold, EASY_RETENTION if lever.retention is None else lever.retention)
    return Scheduled(rig, programs)


def _unfit(rig: Rig) -> str | None:
    from undercrank.levers.stacks import unfit

    return unfit(rig)


def _digits(run: list[bool]) -> str:
    return "".join("01"[computed] for computed in run) or "nothing"


def _check_word(knob: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise BadInput(f"{knob}={word}: choose {', '.join(known)}, off", field=knob)


def _number(wishes: Mapping[str, str], knob: str) -> float | None:
    if knob not in wishes:
        return None
    try:
        value = float(wishes[knob])
    except ValueError as error:
        raise BadInput(f"{knob}={wishes[knob][:40]}: a number is needed, for instance 0.1", field=knob) from error
    if not math.isfinite(value):
        raise BadInput(f"{knob}={value}: a finite number is needed, for instance 0.1", field=knob)
    return value


def _whole(wishes: Mapping[str, str], knob: str) -> int | None:
    value = _number(wishes, knob)
    if value is not None and value != int(value):
        raise BadInput(f"{knob}={value:g}: a whole number of steps is needed, for instance 18", field=knob)
    return None if value is None else int(value)
