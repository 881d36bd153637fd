"""Which steps to skip, found by looking at what comes out: gaps are measured, paths are tried, the best is kept.

1. Each gap alone: what does skipping these steps, and no others, do to the finished latents? (LeMiCa, arXiv 2511.00090,
   weighs gaps so.) Runs of one gap each, many in a batch.
2. Candidates of each budget: the paths of least harm by these errors, with more or fewer of the first steps kept, and
   all that MagCache's rule gives at as many computed steps.
3. Candidates are tried whole, on the same films. The best is moved by a step here and there while that helps.

Every number is a relative error of finished latents against every step computed, and the films are among none that a
lever is judged by. It takes about (gaps a step) x (steps) / 2 runs a film for the first part, and as many again for the
rest; nothing is read from the device while a batch runs but at its end.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from undercrank import schedules
from undercrank.levers.programs import checkpoint, phases, scheduler_title
from undercrank.levers.stacks import unfit
from undercrank.levers.trials import Kept, Trial, keeping, trying
from undercrank.paths import Path
from undercrank.records import LeverRefused
from undercrank.rig import Rig
from undercrank.schedules import Gap, Rule, Schedule

KEPT = (0.0, 0.1, 0.2)
"Shares of the steps, from the first on, that candidates leave alone: an early skip may give another film altogether."
MAX_SKIPS = 4
"Most steps in a row that are skipped."
MOST_MOVES = 4
"Rounds of moving steps."
SEARCH_SEED = 9101
"The seed of the first film of a search; the next ones count on. None that a person is likely to type."

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Films:
    """What is filmed for a search, and how."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    "One for each prompt."
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    rows: int = 64
    "Most trials in a batch."


class Tries:
    """Films that were made with every step computed, and the same ones under schedules beside them."""

    def __init__(self, rig: Rig, films: Films) -> None:
        if reason := _unfit(rig):
            raise LeverRefused(f"no path can be searched for: {reason}")
        self._rig, self._films, self._kept = rig, films, Kept()
        self.forwards = 2 * films.num_inference_steps * len(films.prompts)
        with keeping(rig, self._kept):
            self._final = self._latents(range(len(films.prompts)))
        self._known: dict[tuple[Schedule, int], float] = {}

    def errors(
        self, plans: Iterable[Schedule], films: Sequence[int] | None = None
    ) -> dict[Schedule, tuple[float, ...]]:
        """Of each schedule, the relative error of the finished latents in each film."""
        plans = tuple(dict.fromkeys(plans))
        films = range(len(self._films.prompts)) if films is None else films
        open_ = [(plan, film) for plan in plans for film in films if (plan, film) not in self._known]
        for start in range(0, len(open_), self._films.rows):
            part = open_[start : start + self._films.rows]
            self._known |= dict(zip(part, self._run(part), strict=True))
        return {plan: tuple(self._known[plan, film] for film in films) for plan in plans}

    def _run(self, part: Sequence[tuple[Schedule, int]]) -> list[float]:
        trials = [Trial(film=film, schedule=plan) for plan, film in part]
        with trying(self._rig, self._kept, trials) as cache:
            made = self._latents([trial.film for trial in trials])
        self.forwards += cache.calls
        whole = self._final[[trial.film for trial in trials]]
        return ((made - whole).flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)).tolist()

    def _latents(self, rows: Sequence[int]) -> torch.Tensor:
        """Finished latents, one film a row, in float32."""
        rig = self._rig
        with ExitStack() as stack:
            stack.enter_context(rig.call())
            stack.enter_context(torch.no_grad())
            made = rig.pipe(**self._arguments(rows)).frames
        assert isinstance(made, torch.Tensor)
        return made.float()

    def _arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        family, films = self._rig.family, self._films
        wanted = {
            "prompt": [films.prompts[row] for row in rows],
            "negative_prompt": [family.negative_prompt or ""] * len(rows),
            "generator": [torch.Generator().manual_seed(films.seeds[row]) for row in rows],
            "num_inference_steps": films.num_inference_steps,
            "guidance_scale": films.guidance_scale,
            "height": films.height,
            "width": films.width,
            "num_frames": films.num_frames,
            "max_sequence_length": family.max_sequence_length,
            "output_type": "latent",
        }
        takes = inspect.signature(type(self._rig.pipe).__call__).parameters
        return {name: value for name, value in wanted.items() if name in takes and value is not None}


def _unfit(rig: Rig) -> str | None:
    if "two_experts" in rig.family.traits or len(rig.primaries) > 1:
        return f"{rig.family.title} has two experts, and a path is of one"
    if rig.family.branches == "batched":
        return f"{rig.family.title} computes both branches of guidance in one forward"
    return unfit(rig)


# --------------------------------------------------------------------------- the search


def search(
    rig: Rig,
    films: Films,
    budgets: Sequence[int],
    *,
    rule: Callable[[Rule], Schedule],
    measured_on: int = 4,
    moves: int = MOST_MOVES,
    tell: Tell = lambda words: None,
) -> tuple[Path, ...]:
    """The best path found for each budget. Raises LeverRefused where the model cannot be searched.

    rule: MagCache's schedule at these steps under its settings: rivals, and candidates.
    moves: most rounds of moving a step.
    measured_on: how many of the films measure the gaps; all of them try the candidates.
    """
    steps, tries = films.num_inference_steps, Tries(rig, films)
    errors = measure_gaps(tries, steps, range(min(measured_on, len(films.prompts))))
    tell(f"{steps} steps: measured {len(errors)} gaps, {tries.forwards} forwards")
    found, every = [], schedules_of_rule(rule)
    for budget in budgets:
        rivals = [plan for plan in every if sum(plan) == budget]
        tried = tries.errors([*candidates(errors, steps, budget), *rivals])
        best, error = improve(tries, min(tried, key=lambda plan: typical(tried[plan])), moves)
        rule_error = min((typical(tried[plan]) for plan in rivals), default=None)
        tell(f"  {budget}: {digits(best)}  error {error:.4f}, rule {rule_error or math.nan:.4f}")
        found.append((budget, best, error, rule_error))
    module, levels = rig.primaries[0], phases(rig, steps)["transformer"].levels
    return tuple(
        Path(
            source="searched here",
            checkpoint=checkpoint(module),
            family=rig.family.id,
            dtype=str(module.dtype).removeprefix("torch."),
            scheduler=scheduler_title(rig.scheduler),
            denoiser="transformer",
            steps=steps,
            levels=levels,
            budget=budget,
            schedule=digits(best),
            error=error,
            rule_error=rule_error,
            films=len(films.prompts),
            prompts=films.prompts,
            seeds=films.seeds,
            width=films.width,
            height=films.height,
            num_frames=films.num_frames,
            guidance_scale=films.guidance_scale,
            forwards=tries.forwards,
        )
        for budget, best, error, rule_error in found
    )


def measure_gaps(tries: Tries, steps: int, films: Sequence[int]) -> dict[Gap, float]:
    """Of each gap alone, the typical error that it leaves in the finished latents."""
    every = {gap: schedules.around(gap, steps) for gap in schedules.gaps(steps, MAX_SKIPS)}
    found = tries.errors(every.values(), films)
    return {gap: typical(found[plan]) for gap, plan in every.items()}


def candidates(errors: Mapping[Gap, float], steps: int, budget: int) -> tuple[Schedule, ...]:
    """Paths of least harm: by the largest gap and by the sum, with more or fewer first steps kept."""
    squares = {gap: error * error for gap, error in errors.items()}
    found = []
    for share, (weights, by) in itertools.product(KEPT, ((errors, "worst"), (errors, "sum"), (squares, "sum"))):
        kept = max(1, min(round(share * steps), budget - 2))
        if schedules.fewest(steps, MAX_SKIPS, range(kept)) <= budget:
            found.append(schedules.lightest(weights, steps, budget, starts=range(kept), by=by))
    return tuple(dict.fromkeys(found))


def improve(tries: Tries, plan: Schedule, moves: int = MOST_MOVES) -> tuple[Schedule, float]:
    """The plan, with steps moved to where the error is smaller: in each round the best move, or all that help."""
    error = typical(tries.errors([plan])[plan])
    for _ in range(moves):
        tried = {other: typical(errors) for other, errors in tries.errors(schedules.moved(plan)).items()}
        better = sorted((other for other in tried if tried[other] < error), key=lambda other: tried[other])
        if not better:
            break
        together = schedules.merged(plan, better)
        tried[together] = typical(tries.errors([together])[together])
        plan = min(better[0], together, key=lambda other: tried[other])
        error = tried[plan]
    return plan, error


def schedules_of_rule(rule: Callable[[Rule], Schedule]) -> tuple[Schedule, ...]:
    """Everything that MagCache's rule gives over a grid of its settings."""
    grid = itertools.product((n / 100 for n in range(1, 101)), (1, 2, 3, 4), (0.1, 0.15, 0.2, 0.25, 0.3))
    return tuple(dict.fromkeys(rule(Rule(threshold=t, max_skip_steps=most, retention=kept)) for t, most, kept in grid))


def typical(errors: Sequence[float]) -> float:
    """Geometric mean: a film that goes its own way counts, but does not decide alone."""
    return math.exp(sum(math.log(max(error, 1e-12)) for error in errors) / len(errors))


def digits(plan: Schedule) -> str:
    return "".join("01"[computed] for computed in plan)
