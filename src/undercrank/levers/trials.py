"""Many schedules in one batch: each row of a run is a trial, one of a few films under a schedule of its own.

What a gap in a schedule does to the finished latents can only be seen at the end of a run. Here one run sees it for
many gaps at once. First the films are made as they are, and what each forward returned is kept: a latent for each step
and branch. Then a batch of trials is made. A row that has skipped nothing yet, and does not in the next step, is given
what was kept; it costs nothing. The other rows run the blocks, or add their residual, as their schedule says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from undercrank.levers.programs import Branches
from undercrank.levers.stacks import Part, Stack, stacked
from undercrank.rig import Rig
from undercrank.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One row of a batch."""

    film: int
    "Which of the films whose forwards were kept."
    schedule: Schedule
    "Of all steps and for every branch; the first step is computed."

    def works_from(self) -> int:
        """The first step whose forward must be computed: the one before the first skip, for its residual."""
        return self.schedule.index(False) - 1 if False in self.schedule else len(self.schedule)


class Kept:
    """What each forward of some films returned, by denoiser, branch and step: films in rows."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[str, str, int], tuple[torch.Tensor, ...]] = {}


class Keeping:
    """Runs everything and keeps what comes out."""

    def __init__(self, rig: Rig, kept: Kept) -> None:
        self._rig, self._kept, self._branches = rig, kept, Branches(rig)

    def forward(self, part: Part, call: dict[str, Any], run: Callable[[], Any]) -> Any:
        output = run()
        key = (part.name, self._branches.name(call.get("encoder_hidden_states")), self._rig.step_index)
        self._kept.outputs[key] = _tensors(output)
        return output

    def blocks(self, part: Part, stack: Stack) -> Iterator[Any]:
        return iter(stack.real)


class Trying:
    """Gives each row of the batch what its trial says."""

    def __init__(self, rig: Rig, kept: Kept, trials: Sequence[Trial]) -> None:
        self._rig, self._kept, self._branches = rig, kept, Branches(rig)
        self._computes = torch.tensor([trial.schedule for trial in trials])
        self._from = torch.tensor([trial.works_from() for trial in trials])
        self._films = torch.tensor([trial.film for trial in trials], device=rig.device)
        self._held: dict[tuple[str, str], list[torch.Tensor | None]] = {}
        self._key = ("", "")
        self._rows = torch.tensor([])
        self._skips = False
        self._inputs: list[Any] = []
        self.calls = 0
        "Rows whose blocks ran, over all forwards."

    def forward(self, part: Part, call: dict[str, Any], run: Callable[[], Any]) -> Any:
        step, branch = self._rig.step_index, self._branches.name(call.get("encoder_hidden_states"))
        self._key = (part.name, branch)
        whole = tuple(kept[self._films] for kept in self._kept.outputs[part.name, branch, step])
        works = self._from <= step
        for skips in (False, True):
            rows = (works & (self._computes[:, step] != skips)).nonzero().flatten().to(self._rig.device)
            if len(rows) == 0:
                continue
            self._skips, self._rows = skips, rows
            self.calls += 0 if skips else len(rows)
            for into, made in zip(whole, _tensors(part.of(_rows_of(call, rows, len(self._films)))), strict=True):
                into[rows] = made
        return whole

    def blocks(self, part: Part, stack: Stack) -> Iterator[Any]:
        if self._skips:
            return iter((partial(self._skip, part),) if part.is_first(stack) else ())
        blocks = stack.real
        if part.is_first(stack):
            blocks[0] = partial(self._head, part, blocks[0])
        if part.is_last(stack):
            blocks[-1] = partial(self._tail, blocks[-1])
        return iter(blocks)

    def _head(self, part: Part, block: Any, *args: Any, **kwargs: Any) -> Any:
        self._inputs = part.given(args, kwargs)
        return block(*args, **kwargs)

    def _tail(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        output = block(*args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        held = self._held.setdefault(self._key, [None] * len(outputs))
        for place, (out, given) in enumerate(zip(outputs, self._inputs, strict=False)):
            if out is None or given is None or out.shape != given.shape:
                continue
            into = held[place]
            held[place] = into = out.new_zeros((len(self._films), *out.shape[1:])) if into is None else into
            into[self._rows] = out - given
        self._inputs = []
        return output

    def _skip(self, part: Part, *args: Any, **kwargs: Any) -> Any:
        streams = zip(part.given(args, kwargs), self._held[self._key], strict=False)
        made = tuple(given if held is None else given + held[self._rows] for given, held in streams)
        return made if len(self._held[self._key]) > 1 else made[0]


def _tensors(output: Any) -> tuple[torch.Tensor, ...]:
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def _rows_of(call: dict[str, Any], rows: torch.Tensor, of: int) -> dict[str, Any]:
    """The arguments of a forward, each batch among them cut to these rows."""
    return {
        name: value[rows] if isinstance(value, torch.Tensor) and value.ndim and len(value) == of else value
        for name, value in call.items()
    }


@contextmanager
def keeping(rig: Rig, kept: Kept) -> Iterator[None]:
    """On: what the forwards of a run return is kept."""
    with stacked(rig, *[Keeping(rig, kept)] * 2):
        yield


@contextmanager
def trying(rig: Rig, kept: Kept, trials: Sequence[Trial]) -> Iterator[Trying]:
    """On: a run of one row a trial is those trials."""
    cache = Trying(rig, kept, trials)
    with stacked(rig, cache, cache):
        yield cache
