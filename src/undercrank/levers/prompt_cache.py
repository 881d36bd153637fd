"""prompt_cache: a prompt is read once, and its reader can wait on the host.

Does: keeps what the pipeline's `encode_prompt` returned for the newest prompts, and returns copies of it when the same
call comes again: same texts, same lengths, same device and dtype, and text encoders whose weights are the very same. A
change of a weight, an adapter or an encoder is another key. `host` keeps the text encoders on the host besides, and
sends them to the device for each prompt that is new.

Promises: EXACT. A copy of the same values.

Costs: some megabytes of the device for each prompt that is kept, 16 at most; under `host` one copy of the encoders to
the device for each new prompt, and pinned memory on the host.

Measured: see `docs/levers/prompt_cache.md`.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from undercrank import families, memory
from undercrank.levers.offload import sent
from undercrank.records import BadInput, Case, Lever, Trace
from undercrank.rig import DENOISERS
from undercrank.tensors import version_of
from undercrank.undo import swap_attr

if TYPE_CHECKING:
    from undercrank.rig import Rig

MODES = ("keep", "host")

MOST_PROMPTS = 16
"Kept for each pipeline; the one that was asked for longest ago goes first."

NOT_READERS = (*DENOISERS, "vae", "audio_vae", "vocoder", "image_encoder", "scheduler", "connectors")
"Components that `encode_prompt` does not use. LTX-2 calls its connectors itself, after it."

READ_THROUGH_US = "undercrank_encode_prompt"
"Name of the function that takes the place of the pipeline's own."


@dataclass(frozen=True, kw_only=True)
class PromptCache(Lever):
    name = "prompt_cache"
    summary = "a prompt is read once"

    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in ("auto", *MODES):
            raise BadInput(f"prompt_cache={self.mode}: choose auto, off, {', '.join(MODES)}", field="prompt_cache")

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        mode = wishes.get("prompt_cache", "auto")
        return cls(mode="keep" if mode == "on" else mode)

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        return tuple((("prompt_cache", mode),) for mode in MODES)

    @property
    def setting(self) -> str:
        return self.mode

    def choices(self, case: Case) -> tuple[Self, ...]:
        """The host first: it is for devices on which its absence would not fit, and declines elsewhere."""
        return tuple(replace(self, mode=mode) for mode in reversed(MODES)) if self.mode == "auto" else (self,)

    def doubt(self, case: Case) -> str | None:
        if case.device.kind == "cpu":
            return "on a CPU reading the prompt is the smallest part of a run, and its reader is on the host already"
        if not families.of_pipeline(case.family.pipeline):
            return f"how {case.family.pipeline} reads a prompt is not known here"
        if self.mode != "host":
            return None
        if case.scheduler is not None:
            return "where the encoders of a pipeline that came loaded lie is its owner's matter"
        if memory.peak(case) <= case.device.free_bytes:
            return "everything fits on the device"
        if memory.peak(memory.under(case, self)) > case.device.free_bytes:
            return "does not fit with the text encoders on the host either"
        return None

    def holds(self, case: Case) -> Mapping[str, int]:
        if self.mode != "host" or case.stage in ("", "text") or case.device.kind == "cpu":
            return case.weights
        return {**case.weights, "text_encoder": 0} if "text_encoder" in case.weights else case.weights

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _kept(rig, at_home=self.mode == "host")

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        if getattr(vars(rig.pipe).get("encode_prompt"), "__name__", "") == READ_THROUGH_US:
            return []
        return ["the pipeline has no encode_prompt that could be remembered: no effect"]


_kept_prompts: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, Any]] = weakref.WeakKeyDictionary()
"What was read lives as long as its pipeline, not as long as the lever is on: a key is of the weights that read it."


@contextmanager
def _kept(rig: Rig, *, at_home: bool) -> Iterator[None]:
    """On: `encode_prompt` looks among the prompts that it has read. Off: as it was, the encoders on the device."""
    pipe = rig.pipe
    if not hasattr(pipe, "encode_prompt"):
        yield
        return
    read = pipe.encode_prompt

    @functools.wraps(read)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        return _remembered(rig, _at_device(rig, read) if at_home else read, read, args, kwargs)

    encode_prompt.__name__ = READ_THROUGH_US
    with ExitStack() as stack:
        if at_home:
            stack.enter_context(_on_host(rig))
        stack.enter_context(swap_attr(pipe, "encode_prompt", encode_prompt))
        yield


def _remembered(rig: Rig, read: Callable[..., Any], own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    key = _key(rig, own, args, kwargs)
    if key is None:
        rig.count("prompt_cache.not_kept")
        return read(*args, **kwargs)
    prompts = _kept_prompts.setdefault(rig.pipe, OrderedDict())
    if key in prompts:
        rig.count("prompt_cache.found")
        prompts.move_to_end(key)
        return _copy(prompts[key])
    rig.count("prompt_cache.read")
    found = read(*args, **kwargs)
    prompts[key] = _copy(found)
    if len(prompts) > MOST_PROMPTS:
        prompts.popitem(last=False)
    return found


# --------------------------------------------------------------------------- the key


def _key(rig: Rig, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """All that decides what `encode_prompt` returns; None: something is given that cannot be compared, as a tensor."""
    import torch

    if torch.is_grad_enabled() or any(reader.training for reader in _readers(rig)):
        return None
    bound = inspect.signature(own).bind(*args, **kwargs)
    bound.apply_defaults()
    given = _plain(bound.arguments)
    if given is None:
        return None
    settings = {name: value for name, value in vars(rig.pipe).items() if not name.startswith("_")}
    plain = tuple(sorted((name, value) for name, value in settings.items() if type(value) in (str, int, float, bool)))
    tools = tuple(id(part) for name, part in rig.pipe.components.items() if name.startswith(("tokenizer", "processor")))
    return given, plain, tools, tuple(_state(reader) for reader in _readers(rig))


def _plain(value: Any) -> Hashable | None:
    """A value as something that can be a key, None for what cannot; an argument that is None is the word."""
    if isinstance(value, Mapping):
        items = [(str(name), _plain(each)) for name, each in value.items()]
        return None if any(each is None for _, each in items) else tuple(items)
    if isinstance(value, list | tuple):
        each_of = [_plain(each) for each in value]
        return None if any(each is None for each in each_of) else (type(value).__name__, *each_of)
    if value is None or isinstance(value, str | int | float | bool):
        return type(value).__name__, value
    return str(value) if type(value).__module__ == "torch" and type(value).__name__ in ("device", "dtype") else None


def _readers(rig: Rig) -> list[Any]:
    parts = rig.pipe.components.items()
    return [part for name, part in parts if name not in NOT_READERS and hasattr(part, "named_parameters")]


def _state(reader: Any) -> Hashable:
    """Which weights these are: the tensors, their versions, a sample of their values, the adapters that are on, and the
    hooks that somebody has registered.

    Versions do not tell of what is written through `.data`, as adapters do when they are merged into weights; that
    changes nearly every value. Weights that are sent to the device and back are the same ones.
    """
    tensors = (*reader.parameters(), *reader.buffers())
    weights = tuple((id(tensor), version_of(tensor), str(tensor.dtype)) for tensor in tensors)
    adapters = tuple(
        tuple(str(getattr(module, name, "")) for name in ("scaling", "active_adapters", "disable_adapters"))
        for module in reader.modules()
        if isinstance(getattr(module, "scaling", None), dict)
    )
    hooks = tuple((tuple(module._forward_pre_hooks), tuple(module._forward_hooks)) for module in reader.modules())
    return id(reader), weights, _sample(tensors), adapters, hooks


SAMPLED = 16
"Values of each tensor."


def _sample(tensors: tuple[Any, ...]) -> bytes:
    """Bytes of some values of each plain tensor; one copy from the device for all of them."""
    import torch

    plain = [tensor.detach() for tensor in tensors if type(tensor.data) is torch.Tensor and tensor.is_contiguous()]
    flat = [tensor.view(-1)[:: max(1, tensor.numel() // SAMPLED)][:SAMPLED] for tensor in plain if tensor.numel()]
    return torch.cat([some.contiguous().view(torch.uint8) for some in flat]).cpu().numpy().tobytes() if flat else b""


def _copy(value: Any) -> Any:
    """Tensors anew, in whatever they come."""
    if hasattr(value, "detach"):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copy(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(each) for each in value)
    return value


# --------------------------------------------------------------------------- at home


def _at_device(rig: Rig, read: Callable[..., Any]) -> Callable[..., Any]:
    def on_device(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for reader in _readers(rig):
                stack.enter_context(sent(reader, rig.device))
            return read(*args, **kwargs)

    return on_device


@contextmanager
def _on_host(rig: Rig) -> Iterator[None]:
    """On: the encoders' values lie on the host. Off: where they were."""
    tensors = [tensor for reader in _readers(rig) for tensor in (*reader.parameters(), *reader.buffers())]
    where = [tensor.device for tensor in tensors]
    try:
        for tensor in tensors:
            values = tensor.data.cpu()
            tensor.data = values.pin_memory() if rig.device.startswith("cuda") else values
        yield
    finally:
        for tensor, device in zip(tensors, where, strict=True):
            tensor.data = tensor.data.to(device)
