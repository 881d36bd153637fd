"""compile: the denoiser's repeated blocks run as compiled code.

Does: finds the lists of equal blocks in the module tree of every denoiser and calls each block through one
`torch.compile` callable for its class. Blocks that are alike share one graph. The compiled code stays with the
denoiser, so leaving and entering the lever again compiles nothing.

Promises: ROUNDING. With `parity`, the default, fused kernels round to the run's dtype where eager code does: the
film stays nearer to the stock one. `plain` keeps more digits inside a fused kernel: nearer to float32, further from
stock.

Costs: compiling in the first step, once more for the first other size; the second code serves every further size.

Measured: on one CPU core, torch 2.13, tiny random weights, 64x64, 5 frames, 6 steps, relative distance of the latents
to eager ones in bfloat16: Wan 0.0 with `parity`, 1.1e-2 with `plain`; HunyuanVideo-1.5 8.6e-3 and 1.2e-2. In float32
Wan 4.9e-7 either way. Compiling took 19 s in the first process and 3 s in the second. On one H200 1.15x to 1.69x over
eager code, see docs/evidence.md.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from undercrank.records import BadInput, Case, Lever, LeverRefused, Promise, Trace
from undercrank.undo import appended, swap_attr, swap_env

if TYPE_CHECKING:
    from undercrank.rig import Rig

MODES: dict[str, str] = {
    "parity": "rounds where eager code rounds",
    "plain": "the compiler's own rounding",
    "max": "parity, the fastest form of each fused kernel by trial, and GELU inside the product before it",
}
"What the knob may say besides auto, off and on (= parity)."

LEFT_BY_INDUCTOR = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"A variable that inductor sets for the loading of a library, each time anew, and leaves behind."

LEAST_SHARE = 0.03
"Of the weights in a denoiser's repeated blocks. Refiners hold 1 to 2 percent, any other list 4 or more."


@dataclass(frozen=True, kw_only=True)
class Compile(Lever):
    name = "compile"
    summary = "the denoiser's repeated blocks run as compiled code"
    only_measured = True
    seals = True

    mode: str = "parity"
    backend: str = "inductor"
    "For tests: another compiler of torch's. Only inductor makes anything faster."

    IMPLIED: ClassVar[str] = "parity"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise BadInput(f"compile={self.mode}: choose auto, off, on, {', '.join(MODES)}", field="compile")

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        word = wishes.get("compile", "on")
        return cls(mode=cls.IMPLIED if word == "on" else word)

    def promises(self, case: Case) -> Promise:
        return Promise.ROUNDING

    def doubt(self, case: Case) -> str | None:
        if "cfg_parallel" in case.engaged:
            return "two branches are computed at once, which is bit-identical in eager code only"
        return "compiling for the CPU takes longer than a clip" if case.device.kind == "cpu" else None

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _compiled_blocks(rig, self)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        seen = rig.counters
        calls, inside = seen.get("compile.calls", 0), seen.get("compile.executed", 0)
        if not calls:
            return ["no block was called through compiled code: no effect"]
        complaints = []
        if inside < calls:
            complaints.append(f"{calls - inside} of {calls} calls of blocks ran outside compiled code")
        if again := seen.get("compile.again"):
            complaints.append(f"blocks were compiled again {again} times for shapes that they had been compiled for")
        if renewed := seen.get("compile.renewed"):
            complaints.append(f"the compiler's limit of variants was reached {renewed} times: all were thrown away")
        return complaints


@contextmanager
def _compiled_blocks(rig: Rig, lever: Compile) -> Iterator[None]:
    """On: nn.Module.__call__ finds compiled code on each block. Off: it finds none, and the code waits."""
    if lever.backend == "inductor":
        _check_compiler(rig.device)
    with ExitStack() as stack:
        for denoiser in rig.denoisers:
            blocks = worth_compiling(repeated_blocks(denoiser))
            _check_plain(denoiser, blocks)
            _check_unhooked(denoiser, blocks)
            program = _program(denoiser, lever, rig)
            check = functools.partial(_check_unhooked, denoiser, blocks)
            stack.enter_context(appended(rig.at_start, lambda total, check=check: check()))
            stack.enter_context(swap_attr(program, "rig", rig))
            for name, block in blocks.items():
                call = functools.partial(program.call, name, block)
                stack.enter_context(swap_attr(block, "_compiled_call_impl", call))
        yield


# --------------------------------------------------------------------------- which blocks


def repeated_blocks(denoiser: Any) -> dict[str, Any]:
    """Blocks worth compiling one by one, by name: members of a list of two or more of one class, with children.

    From the tree and not from diffusers' `_repeated_blocks`, which many models leave empty. The outermost list
    counts: what is inside a block belongs to the block's own graph.
    """
    found: dict[str, Any] = {}
    for name, child in denoiser.named_children():
        inside = _members(child) or repeated_blocks(child)
        found |= {f"{name}.{each}": block for each, block in inside.items()}
    return found


def worth_compiling(blocks: dict[str, Any]) -> dict[str, Any]:
    """Without the classes whose blocks hold next to none of the weights: a text's refiner, a motion's encoder.

    A class costs one more graph to trace, seconds of each process's first clip, and saves microseconds of a step.
    """
    weights: Counter[type] = Counter()
    for block in blocks.values():  # quantised weights are buffers
        weights[type(block)] += sum(tensor.numel() for tensor in (*block.parameters(), *block.buffers()))
    least = LEAST_SHARE * weights.total()
    return {name: block for name, block in blocks.items() if weights[type(block)] >= least}


def _members(module: Any) -> dict[str, Any]:
    from torch import nn

    members = dict(module.named_children())
    is_alike = len(members) > 1 and len({type(member) for member in members.values()}) == 1
    if not isinstance(module, nn.ModuleList) or not is_alike:
        return {}
    return members if all(any(True for _ in member.children()) for member in members.values()) else {}


def _check_plain(denoiser: Any, blocks: dict[str, Any]) -> None:
    """Refuse what could not be compiled whole, or would be compiled twice, before anything is changed."""
    title = type(denoiser).__name__
    if not blocks:
        raise LeverRefused(f"compile: {title} has no list of equal blocks to compile; leave it out with compile=off")
    if hasattr(denoiser, "_orig_mod") or denoiser._compiled_call_impl is not None:
        raise LeverRefused(f"compile: {title} is compiled already; leave one of the two out, here with compile=off")
    for name, block in blocks.items():
        if block._compiled_call_impl is not None:
            raise LeverRefused(f"compile: {title}.{name} is compiled already; leave one out, here with compile=off")
        own = vars(block).get("forward")
        if own is not None and getattr(own, "__func__", None) is not type(block).forward:
            raise LeverRefused(
                f"compile: {title}.{name} runs under a hook (a cache, offloading), which compiled code cannot pass; "
                "remove the hook, or leave compile out with compile=off"
            )


def _check_unhooked(denoiser: Any, blocks: dict[str, Any]) -> None:
    """Refuse torch's own hooks inside blocks: dynamo does not look whether a module has one, so that a graph made
    without the hook would serve the block that has it, and the hook would never be called."""
    for name, block in blocks.items():
        for inner, module in block.named_modules():
            if module._forward_hooks or module._forward_pre_hooks:
                where = ".".join(filter(None, (type(denoiser).__name__, name, inner)))
                raise LeverRefused(
                    f"compile: {where} has a forward hook, which code that all blocks share would not call; "
                    "remove the hook, or leave compile out with compile=off"
                )


def _check_compiler(device: str) -> None:
    """Inductor writes C++ for a CPU and Triton for a GPU: say at once which of them is missing."""
    from torch._inductor import config
    from torch.utils._triton import has_triton

    if device.startswith("cpu"):
        names = [name for name in config.cpp.cxx if name]
        if not any(shutil.which(name) for name in names):
            raise LeverRefused(
                f"compile: no C++ compiler here ({', '.join(names)}), and compiling for the CPU needs one: "
                "install g++, or leave it out with compile=off"
            )
    elif not has_triton():
        raise LeverRefused(
            f"compile: Triton cannot serve {device} here, and compiling for it needs Triton: "
            "pip install triton, or leave it out with compile=off"
        )


# --------------------------------------------------------------------------- the compiled code of one denoiser


_programs: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Program]] = weakref.WeakKeyDictionary()
"Compiled code lives as long as its denoiser, not as long as a lever is on: entering again compiles nothing."


def _program(denoiser: Any, lever: Compile, rig: Rig) -> Program:
    programs, key = _programs.setdefault(denoiser, {}), (lever, *(name for name, _ in rig.graph_passes))
    if key not in programs:
        programs[key] = Program(lever)
    return programs[key]


def _through(block: Any, *args: Any, **kwargs: Any) -> Any:
    """What is compiled: a call of a block. The block is an argument, so that all of its kind share the graph."""
    return block._call_impl(*args, **kwargs)


_numbers = itertools.count()


def _own_copy(function: Any, title: str) -> types.FunctionType:
    """The same function under a code object and a name of its own.

    Dynamo files compiled code under the code object and allows it eight variants. Were the code shared, the ninth
    variant in a process, of whichever model, would not be compiled. What dynamo has learned of shapes is filed
    under the name: one model's sizes must not decide how another model is compiled.
    """
    code = function.__code__.replace(co_name=f"{title}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, code.co_name, closure=function.__closure__)


class Program:
    """The compiled code of one denoiser under one setting; it holds no reference to the denoiser."""

    rig: Rig | None = None
    "The rig whose lever is on; counts go to it."

    def __init__(self, lever: Compile) -> None:
        self.graphs = 0
        "Graphs compiled so far."
        self._lever = lever
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._known: set[tuple[Any, ...]] = set()
        "(block, shapes) that something was compiled for."

    def call(self, name: str, block: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a block through its compiled code. Never falls back to the plain block: raises LeverRefused."""
        graphs, begun = self.graphs, time.perf_counter()
        self._count("compile.calls")
        try:
            result = self._attempt(block, _plain(args), _plain(kwargs))
        except Exception as error:
            raise _explained(error, name, block) from error
        if self.graphs != graphs:
            self._count("compile.ms", round((time.perf_counter() - begun) * 1000))
            self._remember(name, args, kwargs)
        return result

    def _attempt(self, block: Any, args: Any, kwargs: Any) -> Any:
        """At dynamo's limit of variants, begin anew rather than run uncompiled; `verify` complains of it."""
        from torch._dynamo.exc import FailOnRecompileLimitHit

        kind = (type(block), _form(args), _form(kwargs))
        try:
            return self._of(kind)(block, *args, **kwargs)
        except FailOnRecompileLimitHit:
            self._count("compile.renewed")
            del self._compiled[kind]
            return self._of(kind)(block, *args, **kwargs)

    def _of(self, kind: tuple[Any, ...]) -> Callable[..., Any]:
        """The callable for blocks of one class called in one form, made on first use.

        fullgraph: what cannot be compiled whole is an error, not a silent patchwork. dynamic=None: the first size
        gets code for exactly that size, the second one code for every size.
        """
        import torch

        if kind not in self._compiled:
            body = _own_copy(_through, kind[0].__name__)
            self._compiled[kind] = torch.compile(body, fullgraph=True, dynamic=None, backend=self._backend)
        return self._compiled[kind]

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Called by dynamo for every graph. Options go with this graph; torch's own flags are not touched."""
        import torch
        from torch._dynamo.backends.registry import lookup_backend

        on_cpu = self.rig is not None and self.rig.device.startswith("cpu")
        options = {"config_patches": _options(self._lever.mode, on_cpu)} if self._lever.backend == "inductor" else {}
        if self._lever.mode == "max" and not on_cpu and not torch.is_grad_enabled():  # it has no derivative
            from undercrank.levers.epilogue import fuse_gelu

            self._count("compile.epilogues", fuse_gelu(graph))
        for _, change in self.rig.graph_passes if self.rig is not None else ():
            change(graph)
        with swap_env(LEFT_BY_INDUCTOR, ""):
            compiled = lookup_backend(self._lever.backend)(graph, inputs, **options)
        self.graphs += 1
        self._count("compile.graphs")

        def executed(*args: Any) -> Any:
            self._count("compile.executed")
            return compiled(*args)

        return executed

    def _remember(self, name: str, args: Any, kwargs: Any) -> None:
        """Something was compiled in this call: the same block for the same shapes a second time is a complaint."""
        key = (name, *(_shape(value) for value in (*args, *kwargs.values())))
        if key in self._known:
            self._count("compile.again")
        self._known.add(key)

    def _count(self, what: str, by: int = 1) -> None:
        if self.rig is not None:
            self.rig.count(what, by)


def _plain(value: Any) -> Any:
    """The same tensors, not as views. Where nothing is recorded for a gradient the two compute the same.

    Dynamo guards a view by its base, whose shape and strides are an accident of the code before the block: the
    first block's input is a view, the second one's is not, and each would be given a graph.
    """
    if hasattr(value, "_is_view"):
        return value.detach() if value._is_view() and not value.requires_grad else value
    if type(value) is tuple or type(value) is list:
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value


def _form(value: Any) -> Any:
    """The form of a block's arguments: which are given, flags and words. Another form is another program.

    LTX-2 calls its blocks in three forms in every step; together they would use up one limit of variants.
    """
    if type(value) is dict:
        return tuple((key, _form(item)) for key, item in value.items())
    if type(value) is tuple or type(value) is list:
        return tuple(map(_form, value))
    return value if value is None or isinstance(value, bool | str) else type(value)


def _options(mode: str, on_cpu: bool) -> dict[str, Any]:
    """Inductor's options of a mode, for one graph.

    On a CPU a graph is one file of C++: nothing to share out to threads, which would outlive the run.
    No trial of matrix products in `max`: those of a video model run at 740 to 760 TFLOP/s on an H200 as they are, and
    trying 20 kernels for each small one took a minute.
    """
    options: dict[str, Any] = {"emulate_precision_casts": mode != "plain"}
    if on_cpu:
        options["compile_threads"] = 1
    if mode == "max":
        options |= {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}
    return options


def _shape(value: Any) -> Any:
    """What of an argument decides which compiled code serves it, in a form that can be compared."""
    if isinstance(value, list | tuple):
        return tuple(_shape(item) for item in value)
    if hasattr(value, "shape"):
        return tuple(value.shape), str(value.dtype), str(value.device)
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _explained(error: Exception, name: str, block: Any) -> Exception:
    """The compiler's own failures, named by block and with the remedy; any other error is the block's own."""
    import torch
    from torch._dynamo.exc import TorchDynamoException

    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, torch.OutOfMemoryError | MemoryError):
        return inner
    if not isinstance(error, TorchDynamoException):
        return error
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return LeverRefused(
        f"compile: {type(block).__name__} ({name}) cannot be compiled whole: {reason[:200]}; "
        "leave it out with compile=off"
    )
