"""offload: weights wait on the host, and come to the device when they are needed.

Does: loads the weights onto the host and lets diffusers move them: `model` brings each component whole and takes it
away when the next one is called; `group` brings the denoiser block by block, the next one while one computes, the VAE
whole for each decode, and the other components layer by layer.

Promises: EXACT. The same weights meet the same inputs on the same device.

Costs: time for the copies, in every step under `group`, three times a clip under `model`; host memory for all weights,
pinned under `group`. On by itself only where the plan says that the resident form does not fit.

Measured: see `docs/levers/offload.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from undercrank import memory
from undercrank.levers.formats import FORMATS
from undercrank.records import BadInput, Case, Lever, LeverRefused, LoadSpec, Needs, Trace
from undercrank.rig import FLEETING, registries, steadied
from undercrank.undo import kept, swap_attr

if TYPE_CHECKING:
    from undercrank.rig import Rig

MODES = ("model", "group")
"Those that move less first."

GROUP_SHARE = 10
"Under `group` a component is counted as a tenth: two blocks of thirty or more, and what lies beside the blocks."

ON_MODULES = ("forward", "_diffusers_hook", "_hf_hook", "_old_forward")
ON_PIPELINE = ("_all_hooks", "_offload_gpu_id", "_offload_device")
"What diffusers and accelerate leave on what they hook, also after their hooks are gone."


@dataclass(frozen=True, kw_only=True)
class Offload(Lever):
    name = "offload"
    summary = "weights wait on the host until they are needed"
    off_words = ("off", "none")
    needs = Needs(conflicts=frozenset({"cuda_graph"}))

    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in ("auto", *MODES):
            raise BadInput(f"offload={self.mode}: choose auto, none, {', '.join(MODES)}", field="offload")

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        return cls(mode=wishes.get("offload", "auto"))

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        return tuple((("offload", mode),) for mode in MODES)

    @property
    def setting(self) -> str:
        return self.mode

    @property
    def conflicts(self) -> frozenset[str]:
        """Blocks that come one by one run under hooks, which compiled code cannot pass; a whole denoiser's do not."""
        return self.needs.conflicts | ({"compile"} if self.mode == "group" else set())

    def choices(self, case: Case) -> tuple[Self, ...]:
        return tuple(replace(self, mode=mode) for mode in MODES) if self.mode == "auto" else (self,)

    def lacks(self, case: Case) -> str | None:
        if self.mode == "model" and case.device.kind == "cpu":
            return "offload=model moves weights to an accelerator, and the CPU is none: leave it out"
        return None

    def doubt(self, case: Case) -> str | None:
        if case.device.kind == "cpu":
            return "the weights are where they are used already"
        if not case.weights:
            return "the number of parameters of this model is not known"
        free = case.device.free_bytes
        if memory.peak(case) <= free:
            return "everything fits on the device"
        if memory.peak(memory.under(case, self)) > free:
            return f"does not fit with offload={self.mode} either"
        return None

    def holds(self, case: Case) -> Mapping[str, int]:
        """In a stage: of what computes in it. A VAE is small, and comes whole. A CPU is the host: nothing is gained."""
        if case.device.kind == "cpu":
            return case.weights
        if self.mode == "group":
            whole = {"vae"} if case.stage == "decode" else set()
            return {name: count if name in whole else count // GROUP_SHARE for name, count in case.weights.items()}
        if case.stage:
            needed = memory.ROLE_OF_STAGE[case.stage]
            experts = 2 if "two_experts" in case.family.traits and needed == "transformer" else 1
            return {name: count // experts if name == needed else 0 for name, count in case.weights.items()}
        largest = max(case.weights.values(), default=0)
        return {name: count if count == largest else 0 for name, count in case.weights.items()}

    def configure(self, load: LoadSpec) -> LoadSpec:
        packed = [f"{role}={word}" for role, word in load.formats if FORMATS[role, word].needs_torchao]
        if packed and self.mode == "group":
            raise LeverRefused(
                f"offload=group was not tried with {', '.join(packed)}: choose offload=model, int8 or fp8"
            )
        return replace(load, resident=False)

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _by_group(rig) if self.mode == "group" else _by_model(rig)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        if all(any(map(_is_hooked, denoiser.modules())) for denoiser in rig.denoisers):
            return []
        return ["the denoiser has no hook that moves it: no effect"]


@contextmanager
def _by_model(rig: Rig) -> Iterator[None]:
    """On: a component is whole on the device while it is called. Off: on the host."""
    with _as_found(rig):
        rig.pipe.enable_model_cpu_offload(device=rig.device)
        try:
            yield
        finally:
            rig.pipe.remove_all_hooks()
            for part in _parts(rig):
                part.to("cpu")


@contextmanager
def _by_group(rig: Rig) -> Iterator[None]:
    """On: blocks come to the device one by one, a VAE whole while it is called. Off: all are on the host."""
    with _as_found(rig), ExitStack() as stack:
        for part in _parts(rig):
            if _is_vae(part):
                stack.enter_context(_whole_while_called(part, rig.device))
            else:
                stack.callback(_unhook, part)
                _hook(part, rig.device, is_denoiser=part in rig.denoisers)
                stack.enter_context(steadied(part))
        yield


def _is_vae(part: Any) -> bool:
    return hasattr(part, "encode") and hasattr(part, "decode")


@contextmanager
def _whole_while_called(vae: Any, device: str) -> Iterator[None]:
    """`encode` and `decode` find their weights on the device. Layer by layer a decoder would send for them again for
    each chunk of a film, and one that goes its own way through its layers would not send for them at all."""

    def moved(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def on_device(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            with sent(vae, device):
                return call(tensor.to(device), *args, **kwargs)

        return on_device

    with ExitStack() as stack:
        for name in ("encode", "decode"):
            stack.enter_context(swap_attr(vae, name, moved(getattr(vae, name))))
        if device.startswith("cuda"):
            for tensor in (*vae.parameters(), *vae.buffers()):
                tensor.data = tensor.data.pin_memory()
        yield


@contextmanager
def sent(part: Any, device: str) -> Iterator[None]:
    """Copies of the weights on the device; those on the host stay where they are, and are the weights again after."""
    tensors = [*part.parameters(), *part.buffers()]
    on_host = [tensor.data for tensor in tensors]
    try:
        for tensor, values in zip(tensors, on_host, strict=True):
            tensor.data = values.to(device, non_blocking=True)
        yield
    finally:
        for tensor, values in zip(tensors, on_host, strict=True):
            tensor.data = values


@contextmanager
def _as_found(rig: Rig) -> Iterator[None]:
    """What hooks leave behind on modules and on the pipeline is taken back."""
    with ExitStack() as stack:
        stack.enter_context(kept(rig.pipe, *ON_PIPELINE))
        for part in _parts(rig):
            for module in part.modules():
                stack.enter_context(kept(module, *ON_MODULES))
        yield


def _parts(rig: Rig) -> list[Any]:
    return [part for part in rig.pipe.components.values() if hasattr(part, "named_modules")]


def _is_hooked(module: Any) -> bool:
    registry = vars(module).get("_diffusers_hook")
    return hasattr(module, "_hf_hook") or (registry is not None and registry.get_hook("group_offloading") is not None)


def _hook(part: Any, device: str, *, is_denoiser: bool) -> None:
    """Blocks of the denoiser, one at a time, by a stream of their own where there is one; others by their layers.

    A component that diffusers does not move by groups is small: it goes to the device as it is.
    """
    import torch
    from diffusers.hooks import apply_group_offloading

    if not getattr(part, "_supports_group_offloading", True):
        part.to(device)
        return
    how = {"offload_type": "block_level", "num_blocks_per_group": 1} if is_denoiser else {"offload_type": "leaf_level"}
    apply_group_offloading(
        part,
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        use_stream=device.startswith("cuda"),
        **how,
    )


def _unhook(part: Any) -> None:
    for registry in registries(part):
        for name in ("group_offloading", *FLEETING):
            registry.remove_hook(name, recurse=False)
    part.to("cpu")
