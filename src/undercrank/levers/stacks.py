"""The block stack of a denoiser as something that can be run, watched or skipped.

Each list of blocks is swapped for a subclass of it that shares its children: names, state dict, LoRA, hooks, indices
and length stay. Only iterating it inside a forward of the rig's own run asks a cache which blocks there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from undercrank.rig import DENOISERS, Rig
from undercrank.undo import swap_attr, swap_child


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a class of denoisers runs its blocks."""

    lists: tuple[str, ...]
    "Lists of blocks, in the order in which they run: together they are the stack."
    streams: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    "A block's first arguments, which are also what it returns, in order: one tensor, or a tuple of both."


FORMS: dict[str, Form] = {
    "WanTransformer3DModel": Form(lists=("blocks",)),
    "ChronoEditTransformer3DModel": Form(lists=("blocks",)),
    "SkyReelsV2Transformer3DModel": Form(lists=("blocks",)),
    "HunyuanVideoTransformer3DModel": Form(lists=("transformer_blocks", "single_transformer_blocks")),
    "HunyuanVideo15Transformer3DModel": Form(lists=("transformer_blocks",)),
    "CogVideoXTransformer3DModel": Form(lists=("transformer_blocks",)),
    "LTXVideoTransformer3DModel": Form(lists=("transformer_blocks",)),
    "LTX2VideoTransformer3DModel": Form(
        lists=("transformer_blocks",), streams=("hidden_states", "audio_hidden_states")
    ),
    "MochiTransformer3DModel": Form(lists=("transformer_blocks",)),
    "Kandinsky5Transformer3DModel": Form(lists=("visual_transformer_blocks",), streams=("visual_embed",)),
    "CosmosTransformer3DModel": Form(lists=("transformer_blocks",), streams=("hidden_states",)),
    "AllegroTransformer3DModel": Form(lists=("transformer_blocks",), streams=("hidden_states",)),
}
"By class name. A class that is not here is not taken: nobody has looked at what lies between its blocks."

WHY_NOT: dict[str, str] = {
    "WanVACETransformer3DModel": "its control hints are added between blocks, by index",
    "WanAnimateTransformer3DModel": "its face adapter runs between blocks, by index",
    "LatteTransformer3DModel": "it runs two lists of blocks in turn",
    "MotifVideoTransformer3DModel": "its second stream changes its meaning half-way",
}


def unfit(rig: Rig) -> str | None:
    """Why the stacks of this pipeline cannot be skipped as one, with the remedy; None: they can."""
    for module in rig.denoisers:
        title = type(module).__name__
        if title in WHY_NOT:
            return f"{title} cannot skip its blocks as one: {WHY_NOT[title]}"
        if title not in FORMS:
            return f"{title} is not known to run its blocks one after the other"
        if len(set((getattr(module, "hf_device_map", None) or {}).values())) > 1:
            return f"{title} is spread over several devices, and what is reused would have to cross them"
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return f"{title} is compiled as a whole, which fixes what it runs: compile its blocks, with compile=on"
        if getattr(module, "is_cache_enabled", False):
            return f"{title} has a cache of diffusers on already: call disable_cache() on it"
    if "controlnet" in rig.pipe.components:
        return "its control network adds to the blocks one by one"
    if getattr(rig.scheduler, "order", 1) > 1:
        return f"{type(rig.scheduler).__name__} calls the model several times a step"
    return None


class Cache(Protocol):
    """What decides over the blocks of a forward."""

    def forward(self, part: Part, call: dict[str, Any], run: Callable[[], Any]) -> Any:
        """One forward of a denoiser; `call` holds its arguments by name, `run` performs it."""

    def blocks(self, part: Part, stack: Stack) -> Iterator[Any]:
        """The blocks that the forward under way is to run of this list."""


class Stack(nn.ModuleList):
    """A list of blocks with the children of another one."""

    part: Part

    @classmethod
    def over(cls, blocks: nn.ModuleList, part: Part) -> Stack:
        stack = cls()
        stack.__dict__.update(blocks.__dict__)
        stack.part = part
        return stack

    @property
    def real(self) -> list[Any]:
        return list(self._modules.values())

    def __iter__(self) -> Iterator[Any]:
        return self.part.cache.blocks(self.part, self) if self.part.inside else iter(self.real)

    def __getitem__(self, index: Any) -> Any:
        """A slice is a plain list: the class's own would be made without a part."""
        return nn.ModuleList(self.real[index]) if isinstance(index, slice) else super().__getitem__(index)


class Part:
    """One denoiser of the rig, with its stacks under a cache."""

    def __init__(self, rig: Rig, name: str, module: Any, cache: Cache) -> None:
        self.rig, self.name, self.cache = rig, name, cache
        self.form = FORMS[type(module).__name__]
        self.inside = False
        "True in a forward of the rig's own run: only then are blocks asked for."
        self.stacks = {
            name: Stack.over(blocks, self) for name in self.form.lists if len(blocks := module._modules[name])
        }
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]
        self._stock = _forward_of(module)

    def is_first(self, stack: Stack) -> bool:
        return stack is next(iter(self.stacks.values()))

    def is_last(self, stack: Stack) -> bool:
        return stack is list(self.stacks.values())[-1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.rig.running or self.inside:
            return self._stock(*args, **kwargs)
        call = dict(zip(self._names, args, strict=False)) | kwargs
        self.inside = True
        try:
            return self.cache.forward(self, call, lambda: self._stock(*args, **kwargs))
        finally:
            self.inside = False

    def again(self, call: dict[str, Any]) -> Any:
        """A further forward with these arguments, all of whose blocks are run and of which nothing is kept."""
        self.inside = False
        try:
            return self._stock(**call)
        finally:
            self.inside = True

    def of(self, call: dict[str, Any]) -> Any:
        """A forward with these arguments in place of those that the pipeline gave; its blocks are asked for."""
        return self._stock(**call)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The streams among a block's arguments; None where one is not given."""
        return [args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(self.form.streams)]


def _forward_of(module: Any) -> Callable[..., Any]:
    """The forward beneath ours: one on the instance, or else that of the class, whatever it is by then."""
    own: Callable[..., Any] | None = vars(module).get("forward")
    return own or (lambda *args, **kwargs: type(module).forward(module, *args, **kwargs))


@contextmanager
def stacked(rig: Rig, cache: Cache, beside: Cache) -> Iterator[None]:
    """On: every denoiser of the rig asks the cache for its blocks, and every replica, which may be in its forward at
    the same time, the one `beside` it. Off: they have their own lists again."""
    names = [name for name in DENOISERS if getattr(rig.pipe, name, None) is not None]
    parts = [(name, module, cache) for name, module in zip(names, rig.primaries, strict=True)]
    parts += [(name, module, beside) for name, module in zip(names, rig.replicas, strict=False)]
    with ExitStack() as stack:
        for name, module, its in parts:
            part = Part(rig, name, module, its)
            for list_name, blocks in part.stacks.items():
                stack.enter_context(swap_child(module, list_name, blocks))
            stack.enter_context(swap_attr(module, "forward", part.forward))
        yield
