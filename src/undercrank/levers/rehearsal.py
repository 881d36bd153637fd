"""Answers to the questions that a scheduler asks in the loop and that depend on its schedule alone.

UniPC solves a 1x1 to 3x3 linear system a step (`torch.linalg.solve`, which waits for the device to check for
singularity). Its matrix is made from the sigmas, so a rehearsal on one element, before the loop, on the same
device, meets the same systems in the same order and records the solutions; the loop is then given those.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from undercrank.levers.mirror import plain

if TYPE_CHECKING:
    from undercrank.rig import Rig

Solutions = dict[int, list[torch.Tensor]]
"Per step index, in the order asked."

KEPT_SCHEDULES = 8


class Rehearsal:
    """Solutions for the schedules met so far; the schedule of the run under way is current."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._known: OrderedDict[tuple[Any, ...], Solutions] = OrderedDict()
        self._current: Solutions = {}

    def prepare(self, scheduler: Any) -> None:
        """Before the loop: rehearse this schedule unless it is known."""
        if not hasattr(scheduler, "multistep_uni_c_bh_update"):
            self._current = {}
            return
        key = _schedule_key(scheduler)
        if key not in self._known:
            self._known[key] = _rehearse(scheduler, self._rig.device)
            if len(self._known) > KEPT_SCHEDULES:
                self._known.popitem(last=False)
        self._current = self._known[key]

    def answering(self, scheduler: Any) -> Any:
        """Around one `scheduler.step`: serve what the rehearsal recorded for its step index."""
        if not self._current:
            return nullcontext()
        index = scheduler.step_index if scheduler.step_index is not None else scheduler.begin_index or 0
        return _Answering(self._rig, list(self._current.get(index, ())))


class _Answering(TorchFunctionMode):
    def __init__(self, rig: Rig, answers: list[torch.Tensor]) -> None:
        super().__init__()
        self.rig, self.answers = rig, answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.linalg.solve:
            return func(*args, **(kwargs or {}))
        if self.answers and self.answers[0].shape == args[1].shape:
            return self.answers.pop(0)
        self.rig.count("host_sync.missed")
        return func(*args, **(kwargs or {}))


class _Recording(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.solutions: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.linalg.solve:
            self.solutions.append(result)
        return result


def _rehearse(scheduler: Any, device: str) -> Solutions:
    """Run a plain copy of the scheduler over the schedule with one element; its latents are thrown away."""
    twin = _plain_copy(scheduler)
    begin = twin.begin_index or 0
    solutions: Solutions = {}
    sample = torch.zeros((1, 1), device=device)
    for index in range(begin, len(twin.timesteps)):
        with _Recording() as recording:
            sample = twin.step(torch.zeros_like(sample), twin.timesteps[index], sample, return_dict=False)[0]
        solutions[index] = recording.solutions
    return solutions


def _plain_copy(scheduler: Any) -> Any:
    """The scheduler of its own class, with plain tensors: what stock would run."""
    twin = copy.copy(scheduler)
    twin.__class__ = type(scheduler).__mro__[1]
    for name, value in list(vars(twin).items()):
        if isinstance(value, list):
            value = [plain(item) for item in value]
        object.__setattr__(twin, name, plain(value))
    return twin


def _schedule_key(scheduler: Any) -> tuple[Any, ...]:
    schedule = tuple(scheduler.timesteps.tolist()), tuple(scheduler.sigmas.tolist())
    config = sorted((key, repr(value)) for key, value in dict(scheduler.config).items())
    return scheduler.begin_index, schedule, tuple(config)
