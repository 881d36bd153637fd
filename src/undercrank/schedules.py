"""Which steps are computed and which are skipped: pure functions from numbers to tuples of booleans, before the loop.

A schedule holds one boolean a step: True computes the block stack, False adds the residual of the newest computed
step instead. MagCache's rule (Ma et al., arXiv 2506.09045) looks at ratios: by how much the residual's length changes
from step to step. The searched path looks at drifts: how far the residual itself moves, seen from the stack's output,
and spends a given number of computed steps where that keeps the largest error of a gap small (the idea of LeMiCa,
arXiv 2511.00090). Floor 1: no torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from undercrank.records import BadInput

Schedule = tuple[bool, ...]
Gap = tuple[int, int]
"Two computed steps; those between them are skipped."

MAX_THRESHOLD = 10.0
"Errors accumulate as fractions of one: beyond this nothing would ever be computed."


def check_threshold(threshold: float) -> None:
    if not 0 <= threshold <= MAX_THRESHOLD:  # NaN fails it too
        raise BadInput(
            f"threshold {threshold:g}: must be from 0 (skips nothing) to {MAX_THRESHOLD:g}, for instance 0.06 or 0.12",
            field="transformer_cache_threshold",
        )


def check_retention(retention: float) -> None:
    if not 0 <= retention <= 1:
        raise BadInput(
            f"retention {retention:g}: must be from 0 to 1 (computes every step), for instance 0.2 or 0.3",
            field="transformer_cache_retention",
        )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """MagCache's settings."""

    threshold: float
    "Accumulated error up to which steps are skipped."
    max_skip_steps: int
    "Most steps skipped in a row."
    retention: float
    "Share of the steps, from the first on, that is always computed."

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_retention(self.retention)
        if self.max_skip_steps < 0:
            raise BadInput(f"max_skip_steps {self.max_skip_steps}: must be 0 or more", field="max_skip_steps")


PRESETS: dict[str, Rule] = {
    "quality": Rule(threshold=0.06, max_skip_steps=2, retention=0.3),
    "balanced": Rule(threshold=0.12, max_skip_steps=3, retention=0.2),
    "fast": Rule(threshold=0.24, max_skip_steps=3, retention=0.2),
}
"From the most careful to the boldest."

SHARES: dict[str, float] = {"quality": 0.6, "balanced": 0.45, "fast": 0.4}
"Of the steps, how many each preset computes where a path was searched for."


def budget_of(preset: str, steps: int) -> int:
    """Computed steps of a preset's searched path: never more than its share, and the first and the last step."""
    return max(2, int(SHARES[preset] * steps + 1e-9))


# --------------------------------------------------------------------------- schedules


def magcache(ratios: Sequence[float], rule: Rule) -> Schedule:
    """MagCache's rule over one ratio a step; step for step what diffusers' own MagCache decides.

    Ratio t is the mean over tokens of |residual of t| / |residual of t-1|. diffusers keeps its sums in float32, so
    this does too: a sum that ends right at the threshold must fall on the same side.
    """
    check_ratios(ratios)
    kept = int(rule.retention * len(ratios) + 0.5)
    threshold = _float32(rule.threshold)
    schedule = []
    product, error, skipped = 1.0, 0.0, 0
    for step, ratio in enumerate(ratios):
        if step >= kept:
            product = _float32(product * _float32(ratio))
            skipped += 1
            error = _float32(error + abs(_float32(1.0 - product)))
        computes = step < kept or step == 0 or error > threshold or skipped > rule.max_skip_steps
        schedule.append(computes)
        if computes:
            product, error, skipped = 1.0, 0.0, 0
    return tuple(schedule)


def everything(steps: int) -> Schedule:
    """Compute every step."""
    return (True,) * steps


def mask(text: str, steps: int, starts: Sequence[int] = (0,)) -> Schedule:
    """An explicit schedule: a 1 for each computed step, a 0 for each skipped one; commas and spaces may divide them.

    starts: steps at which a denoiser begins; each must be computed, since there is nothing yet to reuse.
    """
    digits = text.replace(",", "").replace(" ", "")
    if not digits or set(digits) - {"0", "1"}:
        raise BadInput(
            f"mask {text[:60]!r}: a 1 for each computed step and a 0 for each skipped one, for instance 11101101",
            field="transformer_cache_mask",
        )
    if len(digits) != steps:
        raise BadInput(
            f"mask of {len(digits)} steps for a run of {steps}: give one digit for each step",
            field="transformer_cache_mask",
        )
    for start in starts:
        if digits[start] == "0":
            raise BadInput(
                f"mask {digits[:60]}: step {start + 1} must be computed, there is nothing to reuse before it",
                field="transformer_cache_mask",
            )
    return tuple(digit == "1" for digit in digits)


def searched(
    drifts: Sequence[float],
    weights: Sequence[float],
    budget: int,
    *,
    max_skip_steps: int | None = None,
    starts: Sequence[int] = (0,),
) -> Schedule:
    """`lightest` on errors that are reckoned from drifts: exactly `budget` computed steps, the largest error smallest.

    drifts: how far the residual moves from step t-1 to t, in parts of the stack's output; ratio-free, one a step.
    weights: how much an error at step t weighs, for instance the length of the step in sigma.
    starts: steps at which a denoiser begins. They, the first and the last step are always computed.
    max_skip_steps: most in a row; None: no limit but what the budget needs.
    """
    steps = len(drifts)
    fixed = sorted({0, steps - 1, *starts})
    limit = steps if max_skip_steps is None else max_skip_steps
    _check_budget(budget, steps, len(fixed), fewest(steps, limit, starts))
    reached = list(accumulate(drifts))
    errors = {
        (i, j): sum((reached[k] - reached[i]) * weights[k] for k in range(i + 1, j))
        for i, j in gaps(steps, limit, starts)
    }
    return lightest(errors, steps, budget, starts=starts)


def lightest(
    errors: Mapping[Gap, float], steps: int, budget: int, *, starts: Sequence[int] = (0,), by: str = "worst"
) -> Schedule:
    """The schedule of exactly `budget` computed steps that skips in the least harmful of these gaps.

    errors: of each gap that may be left, by its two computed steps.
    by: "worst", the largest error is smallest, and of those the sum (LeMiCa's order); or "sum", the sum alone.
    """
    edges = {(step, step + 1): 0.0 for step in range(steps - 1)}
    fixed = sorted({0, steps - 1, *starts})
    edges |= {(i, j): error for (i, j), error in errors.items() if not any(i < step < j for step in fixed)}
    longest = max((j - i for i, j in edges), default=1) - 1
    _check_budget(budget, steps, len(fixed), fewest(steps, longest, starts))
    if by == "worst":
        largest = _cheapest(edges, steps, budget, max)[0]
        edges = {edge: error for edge, error in edges.items() if error <= largest}
    computed = set(_cheapest(edges, steps, budget, lambda a, b: a + b)[1])
    return tuple(step in computed for step in range(steps))


def gaps(steps: int, max_skip_steps: int, starts: Sequence[int] = (0,)) -> tuple[Gap, ...]:
    """Every pair of computed steps between which steps may be skipped, no more than so many and none of `starts`."""
    fixed = sorted({0, steps - 1, *starts})
    return tuple(
        (i, j)
        for i in range(steps - 2)
        for j in range(i + 2, min(next(f for f in fixed if f > i), i + max_skip_steps + 1) + 1)
    )


def around(gap: Gap, steps: int) -> Schedule:
    """Every step but those inside the gap."""
    return tuple(not gap[0] < step < gap[1] for step in range(steps))


def moved(schedule: Schedule, *, kept: int = 1) -> tuple[Schedule, ...]:
    """The schedules in which one computed step is a step earlier or later; the first `kept` and the last one stay."""
    found = []
    for step in range(max(1, kept), len(schedule) - 1):
        for other in (step - 1, step + 1):
            if schedule[step] and not schedule[other] and other >= kept:
                found.append(tuple(schedule[{step: other, other: step}.get(i, i)] for i in range(len(schedule))))
    return tuple(dict.fromkeys(found))


def merged(schedule: Schedule, others: Sequence[Schedule]) -> Schedule:
    """The schedule with the step that each of the others moves moved too, where no earlier one has been there."""
    steps = list(schedule)
    for other in others:
        left, taken = (
            next(step for step, computed in enumerate(other) if computed is after and schedule[step] is not after)
            for after in (False, True)
        )
        if steps[left] and not steps[taken]:
            steps[left], steps[taken] = False, True
    return tuple(steps)


def fewest(steps: int, max_skip_steps: int, starts: Sequence[int] = (0,)) -> int:
    """The smallest budget that skips no more than so many steps in a row."""
    fixed = sorted({0, steps - 1, *starts})
    return 1 + sum(math.ceil((b - a) / (max_skip_steps + 1)) for a, b in pairwise(fixed))


def _check_budget(budget: int, steps: int, fixed: int, least: int) -> None:
    least = max(least, fixed)
    if not least <= budget <= steps:
        raise BadInput(
            f"budget {budget}: of {steps} steps, {least} to {steps} can be the computed ones",
            field="transformer_cache_budget",
        )


def _cheapest(
    edges: Mapping[Gap, float], steps: int, budget: int, join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The cost and the computed steps of the cheapest path from the first step to the last with `budget` nodes."""
    into: dict[int, list[tuple[int, float]]] = {}
    for (i, j), error in edges.items():
        into.setdefault(j, []).append((i, error))
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(budget - 1):
        before, now = best[-1], {}
        for j, reaching in into.items():
            costs = [(join(before[i][0], error), i) for i, error in reaching if i in before]
            if costs:
                now[j] = min(costs)
        best.append(now)
    node, path = steps - 1, []
    for level in reversed(best):
        path.append(node)
        node = level[node][1]
    return best[-1][steps - 1][0], tuple(reversed(path))


# --------------------------------------------------------------------------- numbers for another number of steps


def check_ratios(ratios: Sequence[float]) -> None:
    if len(ratios) < 1 or not all(math.isfinite(ratio) and 0 < ratio < 1e6 for ratio in ratios):
        raise BadInput(f"{len(ratios)} ratios: one finite number above 0 is needed for each step", field="ratios")


def nearest(ratios: Sequence[float], steps: int) -> tuple[float, ...]:
    """The ratio of the nearest calibrated step, as MagCache's authors and diffusers do it.

    A ratio says how much changes in one calibrated step: over fewer, longer steps this understates the change.
    """
    check_ratios(ratios)
    if steps == 1:
        return (ratios[-1],)
    scale = _float32((len(ratios) - 1) / (steps - 1))
    return tuple(ratios[round(_float32(step * scale))] for step in range(steps))


def by_index(ratios: Sequence[float], steps: int) -> tuple[float, ...]:
    """Ratios of longer or shorter steps: the running product, as a function of the step's place, read anew."""
    return _read_anew(ratios, _even(len(ratios)), _even(steps))


def by_sigma(ratios: Sequence[float], sigmas: Sequence[float], at_sigmas: Sequence[float]) -> tuple[float, ...]:
    """The same as a function of sigma, the noise level at the start of each step (falling): follows a shift too."""
    return _read_anew(ratios, [-sigma for sigma in sigmas], [-sigma for sigma in at_sigmas])


def _read_anew(ratios: Sequence[float], places: Sequence[float], at: Sequence[float]) -> tuple[float, ...]:
    check_ratios(ratios)
    logs = tuple(accumulate([0.0, *(math.log(ratio) for ratio in ratios[1:])]))
    return (1.0, *(math.exp(late - early) for early, late in pairwise(interpolated(places, logs, at))))


def drifts_anew(drifts: Sequence[float], places: Sequence[float], at: Sequence[float]) -> tuple[float, ...]:
    """Drifts add up: their running sum, read at other places (index or falling sigma, negated)."""
    reached = tuple(accumulate([0.0, *drifts[1:]]))
    return (0.0, *(late - early for early, late in pairwise(interpolated(places, reached, at))))


def _even(count: int) -> list[float]:
    """Places of so many steps, evenly from 0 to 1."""
    return [index / max(1, count - 1) for index in range(count)]


def interpolated(places: Sequence[float], values: Sequence[float], at: Sequence[float]) -> tuple[float, ...]:
    """Linear interpolation of (place, value) pairs, places rising; beyond the ends the end values."""
    return tuple(_between(places, values, place) for place in at)


def _between(places: Sequence[float], values: Sequence[float], place: float) -> float:
    for (a, b), (low, high) in zip(pairwise(places), pairwise(values), strict=True):
        if a <= place <= b:
            return low + (high - low) * (place - a) / (b - a) if b > a else high
    return values[0] if place < places[0] else values[-1]


def _float32(value: float) -> float:
    """Rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
