"""host_sync: the denoising loop never waits for the device.

Does: the scheduler's `timesteps` and `sigmas` become two-sided tensors whose host reads are answered by a host
twin, read once before the loop; UniPC's small linear systems, which depend on the schedule alone, are solved
once before the loop by the same kernel on the same device, and the loop is given those answers.

Promises: EXACT. Values used on the device still come from the device; latents are `torch.equal` to stock.

Costs: one read of the schedule per generation (about 11 us on an L40S, by the authors of the CogVideoX study);
for UniPC, one rehearsal of the scheduler on a single element per new schedule, and host time in each step: on a
toy model whose steps are shorter than the host's work the lever loses (flipbook on one H200: 0.76x), and `auto`
leaves it off where a ledger row says so.

Measured: stalls in the loop as CUDA itself counts them, one H200, 20 steps, tiny random weights: CogVideoX with
DDIM and dynamic guidance 79 without and 0 with the lever; Wan with UniPC 132 and 0; flipbook, 25 steps, 167 and 0;
latents equal each time. The same on a logical device that needs no GPU (`tests/levers/test_host_sync.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from undercrank.records import Case, Lever, Promise, Trace
from undercrank.undo import appended, put_back, swap_class

if TYPE_CHECKING:
    from undercrank.rig import Rig

SCHEDULE = ("timesteps", "sigmas")
"The attributes of a scheduler that pipelines and schedulers read back in the loop."

PROVEN = frozenset(
    [
        "WanPipeline",
        "WanImageToVideoPipeline",
        "CogVideoXPipeline",
        "CogVideoXImageToVideoPipeline",
        "CogVideoXVideoToVideoPipeline",
        "CogVideoXFunControlPipeline",
    ]
)
"Pipeline classes whose latents are compared, `torch.equal`, with the lever on and off by the tests."


@dataclass(frozen=True, kw_only=True)
class HostSync(Lever):
    name = "host_sync"
    summary = "the denoising loop never waits for the device"

    def promises(self, case: Case) -> Promise:
        return Promise.EXACT

    def doubt(self, case: Case) -> str | None:
        if case.family.pipeline not in PROVEN:
            return f"not proven on {case.family.pipeline} yet"
        if case.device.kind == "cpu":
            return "the run is on the CPU: there is no device to wait for"
        return None

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _mirrored_schedule(rig)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        complaints = []
        if not rig.counters.get("host_sync.mirrored"):
            complaints.append("the scheduler's schedule was never mirrored: no effect")
        if missed := rig.counters.get("host_sync.missed"):
            complaints.append(f"{missed} linear systems were solved in the loop: the rehearsal had not met them")
        return complaints


@contextmanager
def _mirrored_schedule(rig: Rig) -> Iterator[None]:
    """On: the scheduler is a subclass that mirrors its schedule. Off: its own class, no mirror left anywhere."""
    from undercrank.levers.rehearsal import Rehearsal  # needs torch

    rehearsal = Rehearsal(rig)
    subclass = _mirroring(type(rig.scheduler), rig, rehearsal)
    with ExitStack() as stack:
        stack.callback(_scrub, rig)
        stack.enter_context(swap_class(rig.scheduler, subclass))
        # Before the first step, when the pipeline has set the schedule and the index it begins at.
        stack.enter_context(appended(rig.at_start, lambda total: rehearsal.prepare(rig.scheduler)))
        stack.enter_context(appended(rig.at_end, lambda error: _scrub(rig)))
        yield


def _mirroring(cls: type, rig: Rig, rehearsal: Any) -> type:
    """A subclass of the scheduler's class; deep copies of the scheduler keep it, and so the mirrors."""
    from undercrank.levers.mirror import Mirror, mirror

    def __setattr__(self: Any, name: str, value: Any) -> None:
        # A schedule written by the pipeline after `set_timesteps` is mirrored too. Inside `set_timesteps`, which
        # works on its own half-made values, only the last value is: else each assignment would cost a copy.
        if name in SCHEDULE and rig.called and not self.__dict__.get("_setting") and _is_plain_tensor(value, Mirror):
            value = mirror(value, rig.device)
            rig.count("host_sync.mirrored")
        object.__setattr__(self, name, value)

    @functools.wraps(cls.set_timesteps)  # type: ignore[attr-defined]  # pipelines inspect its signature
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_setting"] = True
        try:
            result = cls.set_timesteps(self, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            del self.__dict__["_setting"]
        for name in SCHEDULE:
            if name in self.__dict__:
                setattr(self, name, self.__dict__[name])
        return result

    @functools.wraps(cls.step)  # type: ignore[attr-defined]
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rehearsal.answering(self):
            return cls.step(self, *args, **kwargs)  # type: ignore[attr-defined]

    body: dict[str, Callable[..., Any] | str] = {
        "__setattr__": __setattr__,
        "set_timesteps": set_timesteps,
        "step": step,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (cls,), body)


def _is_plain_tensor(value: Any, mirror_class: type) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and not isinstance(value, mirror_class)


def _scrub(rig: Rig) -> None:
    """Replace every mirror that the run left in an attribute or a container by the tensor stock would have left.

    UniPC keeps timesteps in a list; after an exception the pipeline and its guider hold the current one too.
    """
    from undercrank.levers.mirror import Mirror, plain

    for owner in (rig.scheduler, rig.pipe, getattr(rig.pipe, "guider", None)):
        for name, value in list(vars(owner).items()) if owner is not None else ():
            if isinstance(value, Mirror):
                put_back(owner, name, plain(value))
            elif isinstance(value, list):
                value[:] = [plain(item) for item in value]
            elif isinstance(value, dict):
                for key in [key for key, item in value.items() if isinstance(item, Mirror)]:
                    value[key] = plain(value[key])
