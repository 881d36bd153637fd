"""Where a pipeline calls its denoiser: what goes in there is plain, but for the masks that a model reads back.

Imported inside host_sync's `engage` only, since it needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from undercrank.levers import mochi
from undercrank.levers.mirror import Mirror, mask, sent
from undercrank.levers.uploads import Watch, is_on_host
from undercrank.undo import appended, subclass, swap_attr, swap_class, swap_item

if TYPE_CHECKING:
    from undercrank.rig import Rig

ENCODED: dict[str, dict[str, tuple[int, ...]]] = {
    # transformer_hunyuan_video15.py:743-763 selects tokens by these masks, :701 asks whether there is a picture
    "HunyuanVideo15Pipeline": {"encode_prompt": (1, 3)},
    "HunyuanVideo15ImageToVideoPipeline": {"encode_prompt": (1, 3), "encode_image": (0,)},
    # transformer_hunyuan_video_framepack.py:332 cuts the text to the valid tokens
    "HunyuanVideoFramepackPipeline": {"encode_prompt": (2,)},
    # attention_processor.py:1068 looks up the valid tokens of each prompt in each block
    "MochiPipeline": {"encode_prompt": (1, 3)},
}
"Masks that a model reads back in its forward: pipeline, its method that makes them, which of its results."

READERS = frozenset({"HunyuanVideo15Transformer3DModel", "HunyuanVideoFramepackTransformer3DModel"})
"The models that are given them as they are; any other gets plain tensors, Mochi's attention the positions besides."

PROMPT_BOUND = READERS | {"MochiTransformer3DModel"}
"Models whose forward selects tokens by the prompt's masks: one graph captured of it serves one set of masks only."

ZEROS = {"HunyuanVideo15Pipeline": ("image_embeds",)}
"Arguments that a pipeline makes of zeros, before its loop (pipeline_hunyuan_video1_5.py:719)."

AHEAD = frozenset({"EasyAnimateRotaryPosEmbed"})
"Modules that make host tensors, which each block then uploads for itself (embeddings.py:984)."

CONSTANTS = frozenset({"HunyuanVideo15Transformer3DModel"})
"Models that select by masks of zeros or ones made in the forward (transformer_hunyuan_video15.py:704-714)."


@contextmanager
def gated(rig: Rig, watch: Watch) -> Iterator[None]:
    """On: each denoiser and each of its lists of blocks is of a subclass. Off: as they were."""
    with ExitStack() as stack:
        for denoiser in rig.denoisers:
            own = watch
            during: Callable[[], AbstractContextManager[None]] = nullcontext
            if any(denoiser is replica for replica in rig.replicas):  # called in a thread where the loop's watch is not
                own = Watch(_device_of(denoiser))
                during = own.during
                stack.enter_context(appended(rig.at_end, own.forget))
            gate = _Gate(rig, own, denoiser, during)
            stack.enter_context(_gate(denoiser, gate))
            stack.enter_context(mochi.knowing(denoiser, gate.known))
            for blocks in () if _is_compiled(denoiser) else _block_lists(denoiser):
                stack.enter_context(swap_class(blocks, _unwatched(type(blocks), own)))
            for module in denoiser.modules():
                if type(module).__name__ in AHEAD:
                    stack.enter_context(swap_class(module, _sending(type(module), own)))
        yield


def _device_of(denoiser: Any) -> str:
    return str(next(denoiser.parameters()).device)


@contextmanager
def twins_of_masks(rig: Rig) -> Iterator[None]:
    """The pipeline's own encoding, with a host twin to each mask that it returns: read there, before the loop."""
    with ExitStack() as stack:
        for name, places in ENCODED.get(type(rig.pipe).__name__, {}).items():
            stack.enter_context(swap_attr(rig.pipe, name, _twinned(rig, getattr(rig.pipe, name), places)))
        yield


def _twinned(rig: Rig, original: Any, places: tuple[int, ...]) -> Any:
    @functools.wraps(original)
    def encode(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if not rig.called:
            return found
        if isinstance(found, torch.Tensor):
            return mask(found)
        return tuple(mask(f) if i in places and f is not None else f for i, f in enumerate(found))

    return encode


class _Gate:
    """What one denoiser is given."""

    def __init__(
        self, rig: Rig, watch: Watch, denoiser: Any, during: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """during: entered around each forward."""
        name = type(denoiser).__name__
        self.rig, self.watch, self.during = rig, watch, during
        self.reads_masks = name in READERS
        self.knows_constants = name in CONSTANTS
        self.zeros = ZEROS.get(type(rig.pipe).__name__, ())
        self.known = mochi.Known()
        self._made: dict[str, tuple[torch.Tensor, Mirror]] = {}

    def call(self, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        if not self.rig.running:
            return forward(*args, **kwargs)
        whole = _is_compiled(module)
        self.known.learn(kwargs)
        masks_stay = self.reads_masks and not whole
        args, kwargs = _given(args, masks_stay), _given(kwargs, masks_stay)
        if masks_stay:
            kwargs |= {name: self._zeros(name, kwargs[name]) for name in self.zeros if name in kwargs}
        with self.during():
            return self._watched(whole, forward, args, kwargs)

    def _watched(self, whole: bool, forward: Any, args: Any, kwargs: Any) -> Any:
        mode, is_watched = self.watch.mode, self.watch.is_here()  # not after the first steps, if nothing is sent
        if is_watched:
            mode.knows_constants = self.knows_constants
        try:
            told = swap_item(self.rig.program, "host_sync.places", self.known.places)
            with told, self.watch.suspended() if whole else nullcontext():
                return forward(*args, **kwargs)
        finally:
            self.known.places = None
            if is_watched:
                mode.knows_constants = False

    def _zeros(self, name: str, value: Any) -> Any:
        """The same Mirror for the same tensor, so that what follows from it is worked out once."""
        if isinstance(value, Mirror):
            return value
        if name not in self._made or self._made[name][0] is not value:
            on_host = torch.zeros((), dtype=value.dtype).expand(value.shape)
            self._made[name] = (value, mask(value, on_host))
        return self._made[name][1]

    def forget(self, error: BaseException | None) -> None:
        self._made.clear()


def _given(value: Any, masks_stay: bool) -> Any:
    """Plain tensors, and those without a history: a compiler looks at what a view (`t.expand(2)`) is a view of.

    Walks by hand what nearly all calls consist of: torch's own walk takes some 50 us of each step.
    """
    if isinstance(value, Mirror):
        return value if masks_stay and value.memo is not None else value.lead
    if isinstance(value, torch.Tensor):
        return value.data if isinstance(value._base, Mirror) else value
    if type(value) is dict:
        return {name: _given(part, masks_stay) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_given(part, masks_stay) for part in value)
    return tree_map(lambda part: _given(part, masks_stay), value) if isinstance(value, dict | tuple | list) else value


@contextmanager
def _gate(denoiser: Any, gate: _Gate) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(appended(gate.rig.at_end, gate.forget))
        if "_orig_mod" in denoiser._modules:  # of `torch.compile(model)`: it hands every attribute on, its class too
            inner = denoiser.forward
            forward = functools.wraps(inner)(lambda *args, **kwargs: gate.call(denoiser, inner, args, kwargs))
            stack.enter_context(swap_attr(denoiser, "forward", forward))
        else:
            stack.enter_context(swap_class(denoiser, _called_through(type(denoiser), gate)))
        yield


def _called_through(cls: Any, gate: _Gate) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return gate.call(self, functools.partial(cls.__call__, self), args, kwargs)

    return subclass(cls, __call__=__call__)


def _unwatched(cls: Any, watch: Watch) -> type:
    """A list of blocks during whose iteration uploads are not looked for: thousands of operations, none of them one."""

    def __iter__(self: Any) -> Any:
        return cls.__iter__(self) if torch.compiler.is_compiling() else _iterated(cls, self, watch)

    return subclass(cls, __iter__=__iter__)


def _iterated(cls: Any, blocks: Any, watch: Watch) -> Iterator[Any]:
    with watch.suspended():
        yield from cls.__iter__(blocks)


def _sending(cls: Any, watch: Watch) -> type:
    """A module whose results are on the device before anybody asks for them there."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, device = cls.__call__(self, *args, **kwargs), watch.mode.device
        return tree_map(lambda x: sent(x, device) if is_on_host(x) and device.type != "cpu" else x, found)

    return subclass(cls, __call__=__call__)


def _block_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost lists of blocks."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _block_lists(child)


def _is_compiled(module: Any) -> bool:
    """As a whole: then nothing of ours may be in the way of the compiler."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
