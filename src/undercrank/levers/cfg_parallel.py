"""cfg_parallel: the two guidance branches of a step are computed at once, on two devices.

Does: puts a copy of the denoiser on a second device, filled from the first one's memory, and drives it from one
thread. The branch that a pipeline computes first goes to the copy, the other one stays; they meet before the second
one's answer is returned. Pipelines that compute both branches in one call have that call split in two halves.

Promises: EXACT where a pipeline calls the denoiser once for each branch, in eager code, on two devices of one kind.
ROUNDING where a call is split (half as many rows may be summed in another order), on unlike devices and in compiled
code.

Costs: the denoiser's weights a second time, on the second device. The first run of each kind (shapes, steps, lengths
of texts, levers) computes one branch after the other, since two threads must never compile at once. Before each run the
weights of both are summed up and compared.

Measured: see `docs/levers/cfg_parallel.md`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from undercrank import families
from undercrank.records import BadInput, Case, Device, Lever, LeverRefused, Needs, Promise, Trace
from undercrank.undo import appended, swap_class

if TYPE_CHECKING:
    from undercrank.rig import Rig

NAMED = frozenset(
    {
        "WanPipeline",
        "WanImageToVideoPipeline",
        "WanVACEPipeline",
        "WanAnimatePipeline",
        "LucyEditPipeline",
        "SkyReelsV2Pipeline",
        "SkyReelsV2ImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingPipeline",
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        "HunyuanVideo15Pipeline",
        "HunyuanVideo15ImageToVideoPipeline",
    }
)
"Pipeline classes that call the denoiser once for each branch and name it in `cache_context`."

BY_TEXT = frozenset({"WanVideoToVideoPipeline", "ChronoEditPipeline", "Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline"})
"The same without a name: the branch is known by its text, the same tensor in every step."

BATCHED = frozenset(
    {
        "CogVideoXPipeline",
        "CogVideoXImageToVideoPipeline",
        "CogVideoXVideoToVideoPipeline",
        "CogVideoXFunControlPipeline",
        "LTXPipeline",
        "LTXImageToVideoPipeline",
        "LTXConditionPipeline",
        "LTX2Pipeline",
        "LTX2ImageToVideoPipeline",
        "MochiPipeline",
        "AllegroPipeline",
        "LattePipeline",
        "SanaVideoPipeline",
        "SanaImageToVideoPipeline",
    }
)
"Pipeline classes that compute both branches in one call."

AT_ONCE = "it works on the first branch's answer before it asks for the second one"
EMBEDDED = "its guidance is an input of the denoiser: there is one branch"
WHY_NOT = {
    "Cosmos2_5_PredictBasePipeline": AT_ONCE,
    "MotifVideoPipeline": AT_ONCE,
    "HunyuanVideoPipeline": EMBEDDED,
    "HunyuanVideoImageToVideoPipeline": EMBEDDED,
    "HunyuanVideoFramepackPipeline": EMBEDDED,
    "AnyFlowPipeline": "it is distilled to one branch",
}

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class CfgParallel(Lever):
    name = "cfg_parallel"
    summary = "the two guidance branches of a step are computed at once, on two devices"
    needs = Needs(conflicts=frozenset({"offload", "context_parallel", "cuda_graph"}), rivals=frozenset({"compile"}))
    only_measured = True
    only_identical = True

    device: str = "best"
    "Of the replica: a torch name, or best: the second device with the most free memory, one like the first if it fits."

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        word = wishes.get("cfg_parallel", "on")
        kind, _, index = word.partition(":")
        if word != "on" and (kind not in ("cpu", "cuda", "xpu", "mps") or (index and not index.isdigit())):
            raise BadInput(
                f"cfg_parallel={word}: choose auto, off, on or a device such as cuda:1", field="cfg_parallel"
            )
        return cls(device="best" if word == "on" else word)

    def promises(self, case: Case) -> Promise:
        second = second_device(case, self.device)
        is_alike = second is not None and (second.name, second.capability) == (case.device.name, case.device.capability)
        is_exact = is_alike and case.family.pipeline in NAMED | BY_TEXT and "compile" not in case.engaged
        return Promise.EXACT if is_exact else Promise.ROUNDING

    def lacks(self, case: Case) -> str | None:
        pipeline = case.family.pipeline
        if pipeline not in NAMED | BY_TEXT | BATCHED:
            reason = WHY_NOT.get(pipeline, "how it computes its guidance branches is not known")
            return f"not for {pipeline}: {reason}"
        if "step_cache" in case.engaged and pipeline not in NAMED:
            return f"with step_cache, {pipeline} does not say which branch a forward is: turn that off"
        second = second_device(case, self.device)
        if second is None:
            have = ", ".join(device.torch_name for device in case.machine.devices)
            return f"needs a second device, and this machine has {have}"
        needed = bytes_needed(case)
        if second.torch_name != case.device.torch_name and needed > second.free_bytes:
            return no_room(second.torch_name, second.free_bytes, needed)
        return None

    def doubt(self, case: Case) -> str | None:
        if case.guidance_scale <= 1:
            return "guidance is off: there is one branch"
        if case.device.kind == "cpu":
            return "both branches would share the cores of one CPU"
        second = second_device(case, self.device)
        if second is None or (second.name, second.capability) != (case.device.name, case.device.capability):
            return "the second device is of another kind: the film would not be the same bit for bit"
        if "compile" in case.engaged:
            return "compiled code of two devices differs by rounding"
        return None

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _two_branches(rig, self.device)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        seen, complaints = rig.counters, []
        if lost := [what for what in seen if what.startswith(LOST)]:
            return [f"the replica was lost ({lost[0].removeprefix(LOST)}): {ALONE}"]
        if seen.get("cfg_parallel.differs"):
            return [f"the denoiser was given layers (a LoRA?) that its replica has not: {ALONE}"]
        if not seen.get("cfg_parallel.routed"):
            complaints.append("no step had two branches to share out: no effect")
        if late := seen.get("cfg_parallel.late"):
            complaints.append(f"in {late} steps the second branch never came, and the first one was waited for")
        return complaints


LOST = "cfg_parallel.lost: "
"A counter's name begins so; the reason follows."
ALONE = "this clip was made on one device"

# --------------------------------------------------------------------------- which device, and is there room?


def second_device(case: Case, wish: str) -> Device | None:
    """The device of that name, or the second one with the most free bytes, one like the first before others."""
    devices = case.machine.devices
    if wish != "best":
        return next((device for device in devices if wish in (device.torch_name, device.kind)), None)
    others = [d for d in devices if d.kind == case.device.kind and d.torch_name != case.device.torch_name]
    needed = bytes_needed(case)

    def rank(device: Device) -> tuple[bool, bool, int]:
        is_alike = (device.name, device.capability) == (case.device.name, case.device.capability)
        return device.free_bytes >= needed, is_alike, device.free_bytes

    return max(others, key=rank, default=None)


def bytes_needed(case: Case) -> int:
    """Weights of every denoiser, and the working memory of one forward (inputs, MLP and attention of a block)."""
    family, value = case.family, VALUE_BYTES[case.dtype]
    tokens = families.tokens(family, case.width, case.height, case.num_frames)
    return value * (family.transformer_params + 12 * family.transformer_width * tokens)


def no_room(name: str, free_bytes: int, needed_bytes: int) -> str:
    return (
        f"second device has {free_bytes / 2**30:.1f} GiB free, replica needs {needed_bytes / 2**30:.1f} GiB ({name}): "
        "free it, or leave it out with cfg_parallel=off"
    )


# --------------------------------------------------------------------------- on and off


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What making the replicas took."""

    device: str
    fill_s: float
    fill_bytes: int
    router: Any
    "`levers.branches.Router`"


@contextmanager
def _two_branches(rig: Rig, wish: str) -> Iterator[Filled]:
    """On: each denoiser has a replica, and shares its branches with it. Off: no replica, no thread."""
    from undercrank.levers import branches  # needs torch

    home, there = _devices(rig, wish)
    pipeline = type(rig.pipe).__name__
    with ExitStack() as stack:
        stack.callback(_free_memory, there)
        router = branches.Router(rig, branches.Road(home, there), named=pipeline in NAMED, batched=pipeline in BATCHED)
        stack.callback(router.close)
        filled = _fill(rig, router)
        for pair in router.pairs:
            stack.enter_context(rig.with_replica(pair.replica))
            stack.enter_context(swap_class(pair.primary, branches.routed(type(pair.primary), pair)))
        stack.enter_context(swap_class(rig.scheduler, branches.netted(type(rig.scheduler), router)))
        stack.enter_context(appended(rig.at_start, router.begin_run))
        stack.enter_context(appended(rig.at_end, router.end_run))
        yield filled


def _devices(rig: Rig, wish: str) -> tuple[Any, Any]:
    """Home and the replica's device, as they are now: a plan may be older. Raises LeverRefused."""
    import torch

    home = next(rig.primaries[0].parameters()).device
    if wish != "best":
        there = torch.device(wish)
        return home, torch.device("cuda", 0) if wish == "cuda" else there
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if home.type == "cuda"]
    others = [device for device in others if device != home]
    if not others:
        raise LeverRefused(f"cfg_parallel: needs a second device of kind {home.type}: name one, or leave it out")

    def rank(device: Any) -> tuple[bool, int]:
        is_alike = torch.cuda.get_device_name(device) == torch.cuda.get_device_name(home)
        return is_alike, torch.cuda.mem_get_info(device)[0]

    return home, max(others, key=rank)


def _fill(rig: Rig, router: Any) -> Filled:
    """Copy every denoiser before any other lever touches it. Raises LeverRefused where that cannot be done."""
    import torch

    from undercrank.levers import branches, replica

    home, there = router.road.here, router.road.there
    for denoiser in rig.primaries:
        replica.refuse_patched(denoiser, home)
    needed = sum(replica.bytes_of(denoiser) for denoiser in rig.primaries)
    free = torch.cuda.mem_get_info(there)[0] if there.type == "cuda" else needed
    if needed > free:
        raise LeverRefused(f"cfg_parallel: {no_room(str(there), free, needed)}")
    begun = time.perf_counter()
    shortage = None
    try:
        with router.road.work():
            for index, denoiser in enumerate(rig.primaries):
                twin = replica.copied(denoiser, home, there, rig.check_cancelled)
                router.pairs.append(branches.Pair(router, denoiser, twin, index))
                if replica.sums(twin) != replica.sums(denoiser):
                    raise LeverRefused("cfg_parallel: the replica's weights are not those of the denoiser")
    except torch.OutOfMemoryError as error:
        shortage = str(error).splitlines()[0][:200]
    if shortage is not None:  # out of the handler, whose traceback would keep half a replica
        raise LeverRefused(f"cfg_parallel: {no_room(str(there), free, needed)}: {shortage}")
    return Filled(device=str(there), fill_s=time.perf_counter() - begun, fill_bytes=needed, router=router)


def _free_memory(device: Any) -> None:
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
