"""host_sync: the denoising loop never waits for the device.

Does: the scheduler's `timesteps` and `sigmas` become two-sided tensors whose host reads are answered by a host
twin, read once before the loop; what UniPC derives from the schedule alone, its small linear systems among it, is
computed once before the loop by the same operations on the same device. Masks that a model reads back are two-sided
from the text encoder on. What the loop uploads (noise of a host generator, a frame rate, a table of frequencies) goes
from pinned memory, and nobody waits for it.

Promises: EXACT. Values used on the device still come from the device; latents are `torch.equal` to stock.

Costs: one read of the schedule per generation (about 11 us on an L40S, by the authors of the CogVideoX study), and of
the masks; for UniPC, one rehearsal of the scheduler on two elements per new schedule. The first three steps are watched
for uploads, and all of them where there are some: about 2 us for each torch function outside the denoiser's blocks. A
step's own host work: 0.17 to 0.23 ms more (2-core CPU; CogVideoX, HunyuanVideo-1.5, LTX), UniPC none (0.83 ms against
stock's 0.87 ms), since its scalars are known.

Measured: stalls in the loop as CUDA itself counts them, one H200, 20 steps, tiny random weights: CogVideoX with
DDIM and dynamic guidance 79 without and 0 with the lever; Wan with UniPC 132 and 0; flipbook, 25 steps, 167 and 0;
latents equal each time. The same on a logical device that needs no GPU (`tests/levers/test_host_sync.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from undercrank.records import Case, Lever, Promise, Trace
from undercrank.undo import appended, put_back, subclass, swap_attr, swap_class, swap_item

if TYPE_CHECKING:
    from undercrank.rig import Rig

SCHEDULE = ("timesteps", "sigmas")
"The attributes of a scheduler that pipelines and schedulers read back in the loop."

SETTLED = frozenset(
    {
        "FlowMatchEulerDiscreteScheduler",
        "FlowMatchLCMScheduler",
        "DPMSolverMultistepScheduler",
        "DPMSolverSinglestepScheduler",
        "DEISMultistepScheduler",
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "EDMEulerScheduler",
        "EDMDPMSolverMultistepScheduler",
        "HeunDiscreteScheduler",
    }
)
"Schedulers whose step, once it knows its index, asks the device for nothing: plain sigmas serve there, and faster."

BY_NUMBER = frozenset({"DDIMScheduler", "CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"})
"Schedulers that use a timestep to look things up in tables on the host, and for nothing else: a number serves."

KNOWN = "_undercrank_known"
"Where a UniPC under the lever keeps its schedule's coefficients, from `set_timesteps` to the end of the run."

LEFT: tuple[tuple[str, int, str], ...] = tuple(
    ("diffusers/pipelines/cosmos/pipeline_cosmos_video2world.py", line, why)
    for line, why in (
        (723, "compares with a tensor that the pipeline makes on the device, out of its own argument augment_sigma"),
        (743, "asks for the same comparison a second time, where there is guidance"),
    )
)
"Lines that still wait with the lever on: file, line, and why. Printed by `undercrank audit --all`."

PROVEN = frozenset(
    {
        "WanPipeline",
        "WanImageToVideoPipeline",
        "WanVACEPipeline",
        "WanVideoToVideoPipeline",
        "WanAnimatePipeline",
        "CogVideoXPipeline",
        "CogVideoXImageToVideoPipeline",
        "CogVideoXVideoToVideoPipeline",
        "CogVideoXFunControlPipeline",
        "ConsisIDPipeline",
        "SkyReelsV2Pipeline",
        "SkyReelsV2ImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingPipeline",
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        "HunyuanVideoPipeline",
        "HunyuanVideoImageToVideoPipeline",
        "HunyuanSkyreelsImageToVideoPipeline",
        "HunyuanVideo15Pipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        "LTXPipeline",
        "LTXImageToVideoPipeline",
        "LTXConditionPipeline",
        "LTX2Pipeline",
        "LTX2ImageToVideoPipeline",
        "MochiPipeline",
        "Cosmos2_5_PredictBasePipeline",
        "Kandinsky5T2VPipeline",
        "Kandinsky5I2VPipeline",
        "AllegroPipeline",
        "LattePipeline",
        "MotifVideoPipeline",
        "SanaVideoPipeline",
        "ChronoEditPipeline",
        "AnyFlowPipeline",
        "EasyAnimatePipeline",
        "StableVideoDiffusionPipeline",
        "AnimateDiffPipeline",
        "AnimateDiffVideoToVideoPipeline",
        "PIAPipeline",
        "TextToVideoSDPipeline",
        "SanaImageToVideoPipeline",
        "LucyEditPipeline",
        "LTX2ConditionPipeline",
        "HunyuanVideoFramepackPipeline",
        "CosmosTextToWorldPipeline",
        "CosmosVideoToWorldPipeline",
    }
)
"Pipeline classes whose latents are compared, `torch.equal`, with the lever on and off by the tests."


@dataclass(frozen=True, kw_only=True)
class HostSync(Lever):
    name = "host_sync"
    summary = "the denoising loop never waits for the device"

    def promises(self, case: Case) -> Promise:
        """ROUNDING where no test has compared the latents yet: then it cannot be called exact."""
        return Promise.EXACT if case.family.pipeline in PROVEN else Promise.ROUNDING

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
    from undercrank.levers import gate, uploads  # need torch

    watch = uploads.Watch(rig.device)
    with ExitStack() as stack:
        stack.callback(_scrub, rig)
        stack.callback(watch.stop)
        stack.enter_context(swap_class(rig.scheduler, _mirroring(type(rig.scheduler), rig)))
        stack.enter_context(appended(rig.at_end, lambda error: _scrub(rig)))
        stack.enter_context(gate.gated(rig, watch))
        stack.enter_context(gate.twins_of_masks(rig))
        stack.enter_context(appended(rig.at_start, lambda total: _mirror_guidance(rig)))
        stack.enter_context(appended(rig.at_start, watch.start))
        stack.enter_context(appended(rig.at_step, watch.step))
        stack.enter_context(appended(rig.at_end, watch.stop))
        yield


def _mirror_guidance(rig: Rig) -> None:
    """A scale for each frame is a tensor: `do_classifier_free_guidance` asks for its largest, twice a step in SVD."""
    from undercrank.levers.mirror import Mirror, mirror

    scale = vars(rig.pipe).get("_guidance_scale")
    if _is_plain_tensor(scale, Mirror):
        put_back(rig.pipe, "_guidance_scale", mirror(scale, rig.device))


def _mirroring(cls: Any, rig: Rig) -> type:
    """A subclass of the scheduler's class; deep copies of the scheduler keep it, and so the mirrors."""
    from undercrank.levers import unipc  # needs torch
    from undercrank.levers.mirror import Mirror, mirror, plain

    def may_read() -> bool:
        return rig.called and not rig.running

    schedules = unipc.Schedules(rig.device)
    knows_unipc = unipc.is_unipc(cls)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        # A schedule written by the pipeline after `set_timesteps` is mirrored too. Inside `set_timesteps`, which
        # works on its own half-made values, only the last value is: else each assignment would cost a copy.
        if name in SCHEDULE and rig.called and not self.__dict__.get("_setting") and _is_plain_tensor(value, Mirror):
            value = mirror(value, rig.device, may_read)
            rig.count("host_sync.mirrored")
        object.__setattr__(self, name, value)

    @functools.wraps(cls.set_timesteps)  # pipelines inspect its signature
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        with swap_item(self.__dict__, "_setting", True):  # which nests: a second block may lie over this one
            result = cls.set_timesteps(self, *args, **kwargs)
        for name in SCHEDULE:
            if name in self.__dict__:
                setattr(self, name, self.__dict__[name])
        if knows_unipc and rig.called:
            self.__dict__[KNOWN] = schedules.of(self)
        return result

    is_stock = cls.__module__.startswith("diffusers.")
    settles = is_stock and cls.__name__ in SETTLED

    @functools.wraps(cls.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """With its coefficients known, UniPC reads sigmas as host scalars only, and so do the settled ones."""
        if _known_of(self) is None and not (settles and self.step_index is not None):
            return cls.step(self, *args, **kwargs)
        with swap_attr(self, "sigmas", plain(self.sigmas)):
            return cls.step(self, *args, **kwargs)

    @functools.wraps(cls.step)
    def step_by_number(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.step(self, *map(_number, args), **{name: _number(value) for name, value in kwargs.items()})

    body: dict[str, Any] = {"_known": True, "__setattr__": __setattr__, "set_timesteps": set_timesteps}
    if is_stock and cls.__name__ in BY_NUMBER:
        body["step"] = step_by_number
    if knows_unipc or settles:
        body["step"] = step
    if knows_unipc:
        body |= unipc.overrides(_known_of, rig.device, lambda: rig.count("host_sync.missed"))
    return subclass(cls, **body)


def _number(value: Any) -> Any:
    """The whole number of a two-sided timestep; anything else as it is."""
    from undercrank.levers.mirror import Mirror

    is_timestep = isinstance(value, Mirror) and value.dim() == 0 and not value.is_floating_point()
    return int(value) if is_timestep else value


def _known_of(scheduler: Any) -> Any:
    return scheduler.__dict__.get(KNOWN)


def _is_plain_tensor(value: Any, mirror_class: type) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and not isinstance(value, mirror_class)


def _scrub(rig: Rig) -> None:
    """Replace every mirror that the run left in an attribute or a container by the tensor stock would have left.

    UniPC keeps timesteps in a list; after an exception the pipeline and its guider hold the current one too.
    """
    from undercrank.levers.mirror import Mirror, plain

    vars(rig.scheduler).pop(KNOWN, None)
    for owner in (rig.scheduler, rig.pipe, getattr(rig.pipe, "guider", None)):
        for name, value in list(vars(owner).items()) if owner is not None else ():
            if isinstance(value, Mirror):
                put_back(owner, name, plain(value))
            elif isinstance(value, list):
                value[:] = [plain(item) for item in value]
            elif isinstance(value, dict):
                for key in [key for key, item in value.items() if isinstance(item, Mirror)]:
                    value[key] = plain(value[key])
