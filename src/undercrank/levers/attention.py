"""attention: every attention of the denoiser runs through one chosen kernel.

Does: torch chooses an attention kernel by flags that hold for the whole process, so two threads cannot choose
differently. Here the choice goes with the call: while an attention processor of the denoiser runs, each
`scaled_dot_product_attention` of this thread is given to the chosen kernel's own operator. A call that the kernel does
not take, by a table that is looked up before the call, stays with torch and is counted with its reason. In a graph that
the lever `compile` is about to compile, the calls are replaced by the same table.

Promises: ROUNDING: another kernel computes the same sums in another order. `sage` rounds queries and keys to 8 bits:
LOSSY.

Costs: about 2 us of host time for each torch call inside an attention processor, in eager code; none in compiled code.

Measured: on one H200, torch 2.11, bfloat16, without a mask torch takes cuDNN by itself: the same bits, and no gain.
FlashAttention 2 takes 1.3 to 1.7 times as long, the memory-efficient kernel 3 to 3.5 times. Nothing to gain by `auto`
there: it is off until a row of the ledger shows a gain.
"""

from __future__ import annotations

import functools
import importlib.util
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from undercrank.records import BadInput, Case, Lever, LeverRefused, Promise, Trace
from undercrank.undo import appended, subclass, swap_attr, swap_class

if TYPE_CHECKING:
    from undercrank.rig import Rig

HALF = frozenset({"bfloat16", "float16"})
OLDEST, NEWEST = (0, 0), (99, 0)
KNOB = "attention_backend"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One row: a kernel, what it needs, what it takes, what it promises."""

    name: str
    title: str
    dtypes: frozenset[str]
    head_dim_step: int
    head_dim_max: int
    capability: tuple[tuple[int, int], tuple[int, int]]
    "Of the GPU, first and last."
    best_from: tuple[int, int] | None = None
    "`on` takes it from this capability, if no row above it fits. None: only by its name."
    on_cpu: frozenset[str] = frozenset()
    "Dtypes that it takes on a CPU; none: it is not there."
    package: str | None = None
    "As its distribution is called."
    module: str | None = None
    install: str = ""
    promise: Promise = Promise.ROUNDING
    bound: float = 2e-2
    "How far a trial may lie from torch's own kernel, as a relative error."


KERNELS = (
    Kernel(
        name="cudnn", title="cuDNN's fused attention", dtypes=HALF, head_dim_step=8, head_dim_max=128,
        capability=((8, 0), NEWEST), best_from=(9, 0),
    ),
    Kernel(
        name="flash", title="torch's FlashAttention 2, on a CPU its own", dtypes=HALF, head_dim_step=8,
        head_dim_max=256, capability=((8, 0), NEWEST), best_from=(8, 0),
        on_cpu=HALF | {"float32", "float64"},
    ),
    Kernel(
        name="efficient", title="torch's memory-efficient attention", dtypes=HALF | {"float32"}, head_dim_step=8,
        head_dim_max=65536, capability=((5, 0), NEWEST), best_from=(5, 0),
    ),
    Kernel(
        name="flash3", title="FlashAttention 3", dtypes=HALF, head_dim_step=8, head_dim_max=256,
        capability=((9, 0), (9, 0)), package="flash_attn_3", module="flash_attn_interface",
        install='pip install --no-build-isolation '
        '"git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"',
    ),
    Kernel(
        name="flash4", title="FlashAttention 4", dtypes=HALF, head_dim_step=8, head_dim_max=128,
        capability=((9, 0), NEWEST), package="flash-attn-4", module="flash_attn.cute",
        install="pip install --pre flash-attn-4",
    ),
    Kernel(
        name="sage", title="SageAttention, 8-bit queries and keys", dtypes=HALF, head_dim_step=64, head_dim_max=128,
        capability=((8, 0), NEWEST), package="sageattention", module="sageattention",
        install="pip install --no-build-isolation sageattention", promise=Promise.LOSSY, bound=1e-1,
    ),
)  # fmt: skip
"From the best to the least, and then those that come with a package of their own."

BY_NATURE = frozenset({"mask", "causal", "dropout", "gradient", "head groups", "empty"})
"Reasons that lie in the call: another kernel of the table would not take it either."


@dataclass(frozen=True, kw_only=True)
class Attention(Lever):
    name = "attention"
    knobs = (KNOB,)
    summary = "every attention of the denoiser runs through one chosen kernel"
    only_measured = True

    kernel: str = "best"
    "A row's name; best: the first row that fits the device and the dtype."

    WORDS: ClassVar[tuple[str, ...]] = ("best", *(row.name for row in KERNELS))

    def __post_init__(self) -> None:
        if self.kernel not in self.WORDS:
            rows = ", ".join(row.name for row in KERNELS)
            hint = "; torch's own choice is off" if self.kernel == "native" else ""
            raise BadInput(f"{KNOB}={self.kernel}: choose auto, off, on, {rows}{hint}", field=KNOB)

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        word = wishes.get(KNOB, "on")
        return cls(kernel="best" if word == "on" else word)

    def promises(self, case: Case) -> Promise:
        return next((row.promise for row in KERNELS if row.name == self.kernel), Promise.ROUNDING)

    def lacks(self, case: Case) -> str | None:
        """The packages are those that the plan knows of; `engage` looks again where it runs."""
        device = case.device
        kernel = pick(self.kernel, device.kind, device.capability or OLDEST, case.dtype)
        if isinstance(kernel, str):
            return kernel
        if kernel.package and kernel.package not in case.machine.packages:
            return f"needs the package {kernel.package}: {kernel.install}"
        return None

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        return _routed_attention(rig, self.kernel)

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        seen: Counter[str] = Counter()
        for denoiser in rig.denoisers:
            tally = _tallies.get(denoiser)
            if tally is not None and tally.rig is rig:
                seen += (tally.run or tally.before) + tally.traced[tally.kernel]
        kept = {what: count for what, count in seen.items() if what.startswith("native: ")}
        complaints = []
        if len(kept) == len(seen):
            why = ", ".join(f"{count} of them: {what.removeprefix('native: ')}" for what, count in kept.items())
            complaints.append(f"no attention call ran through the chosen kernel ({why or 'none was seen'}): no effect")
        for what, count in kept.items():
            reason = what.removeprefix("native: ")
            if reason not in BY_NATURE:
                complaints.append(f"{count} attention calls stayed with torch's own kernel: {reason}")
        return complaints


# --------------------------------------------------------------------------- the table, looked up


def pick(name: str, device_kind: str, capability: tuple[int, int], dtype: str) -> Kernel | str:
    """The row of that name, or the best one, for a device and a dtype; or else the reason why not, with the remedy."""
    if name == "best":
        fit = (row for row in KERNELS if misfit(row, device_kind, capability, dtype) is None)
        best = next((row for row in fit if row.on_cpu or capability >= (row.best_from or NEWEST)), None)
        return best or f"no kernel of the table takes {dtype} on {device_kind}: leave it out with {KNOB}=off"
    row = next(row for row in KERNELS if row.name == name)
    return misfit(row, device_kind, capability, dtype) or row


def misfit(row: Kernel, device_kind: str, capability: tuple[int, int], dtype: str) -> str | None:
    """Why this kernel is not for this device and dtype; None: it is."""
    first, last = row.capability
    if device_kind not in ("cuda", "cpu") or (device_kind == "cpu" and not row.on_cpu):
        return f"{row.name} does not run on {device_kind}: {_others(row, device_kind)}"
    if device_kind == "cuda" and not first[0] <= capability[0] <= last[0]:
        span = f"{first[0]}.x" if first[0] == last[0] else f"{first[0]}.{first[1]} or later"
        return f"{row.name} needs a GPU of capability {span}, this is {capability[0]}.{capability[1]}"
    takes = row.on_cpu if device_kind == "cpu" else row.dtypes
    if dtype not in takes:
        return f"{row.name} takes {', '.join(sorted(takes))}, and the model runs in {dtype}: choose another dtype"
    return None


def _others(row: Kernel, device_kind: str) -> str:
    others = [each.name for each in KERNELS if each.on_cpu and device_kind == "cpu"]
    return f"there choose {', '.join(others)}" if others else f"leave it out with {KNOB}=off"


def why_native(row: Kernel, call: Mapping[str, Any]) -> str | None:
    """Why a call of `scaled_dot_product_attention` with these arguments is not for this kernel; None: it takes it.

    query, key and value: (batch, heads, tokens, head_dim). Only what a compiler too knows of a tensor is asked.
    """
    query, key, value = call["query"], call["key"], call["value"]
    if call.get("attn_mask") is not None:
        return "mask"
    if call.get("is_causal"):
        return "causal"
    if call.get("dropout_p"):
        return "dropout"
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return "gradient"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "not of four dimensions"
    if query.shape[:2] != key.shape[:2] or key.shape[:3] != value.shape[:3]:
        return "head groups"
    if query.shape[2] == 0 or key.shape[2] == 0:
        return "empty"
    dtype = str(query.dtype).removeprefix("torch.")
    if dtype not in (row.on_cpu if query.device.type == "cpu" else row.dtypes):
        return f"dtype {dtype}"
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return "mixed dtypes"
    width = query.shape[3]
    if key.shape[3] != width or value.shape[3] != width:
        return "head dims that differ"
    if query.device.type != "cpu" and (width % row.head_dim_step or width > row.head_dim_max):
        return f"head dim {width}"
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return "head dim not contiguous"
    return None


# --------------------------------------------------------------------------- on and off


class _Tally:
    """What the attention calls of one denoiser ran through."""

    def __init__(self) -> None:
        self.rig: Rig | None = None
        self.kernel = ""
        self.run: Counter[str] = Counter()
        "Calls of eager code in the run under way."
        self.before: Counter[str] = Counter()
        "Those of the last run that had any: a CUDA graph that was recorded then calls no Python now."
        self.traced: dict[str, Counter[str]] = {}
        "Calls in compiled code, by kernel: that code stays with the denoiser, and so does the count."

    def begin(self, total: int) -> None:
        self.before, self.run = self.run or self.before, Counter()

    def clear(self) -> None:
        self.before, self.run = Counter(), Counter()

    def count(self, what: str) -> None:
        self.run[what] += 1
        if self.rig is not None:  # the trace tells which kernels ran
            self.rig.count(f"attention.{what}")


_tallies: weakref.WeakKeyDictionary[Any, _Tally] = weakref.WeakKeyDictionary()
"They live as long as the denoiser, as its compiled code does."

_now: ContextVar[_Tally | None] = ContextVar("undercrank_attention", default=None)
"The tally of the forward under way in this thread."


def _route_graph_of_now(graph: Any) -> None:
    """The same choice in a graph that is about to be compiled for the forward under way."""
    if (tally := _now.get()) is not None:
        tally.traced[tally.kernel] += route_graph(graph, _row(tally.kernel))


@contextmanager
def _routed_attention(rig: Rig, name: str) -> Iterator[None]:
    """On: each attention processor of a denoiser is of a class that routes its calls. Off: of its own class."""
    with ExitStack() as stack:
        stack.enter_context(appended(rig.graph_passes, (f"attention={name}", _route_graph_of_now)))
        for denoiser in rig.denoisers:
            kernel = _kernel_for(denoiser, name, rig.device)
            tally = _tallies.setdefault(denoiser, _Tally())
            tally.traced.setdefault(kernel.name, Counter())
            tally.clear()
            stack.enter_context(swap_attr(tally, "rig", rig))
            stack.enter_context(swap_attr(tally, "kernel", kernel.name))
            stack.enter_context(appended(rig.at_start, tally.begin))
            stack.enter_context(swap_attr(denoiser, "forward", _tallied(_forward_of(denoiser), tally)))
            for processor in _processors(denoiser):
                stack.enter_context(swap_class(processor, _routed(processor.__class__, kernel.name)))
        yield


def _kernel_for(denoiser: Any, name: str, device: str) -> Kernel:
    """The row that will be used, tried on this device. Raises LeverRefused before anything is changed."""
    import torch

    dtype = str(denoiser.dtype).removeprefix("torch.")
    kind = torch.device(device).type
    capability = torch.cuda.get_device_capability(device) if kind == "cuda" else OLDEST
    kernel = pick(name, kind, capability, dtype)
    if isinstance(kernel, str):
        raise LeverRefused(f"attention: {kernel}")
    if kernel.module and not _is_installed(kernel.module):
        raise LeverRefused(f"attention: needs the package {kernel.package}: {kernel.install}")
    _check_reachable(denoiser)
    _try_out(kernel, device, denoiser.dtype)
    return kernel


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False


def _check_reachable(denoiser: Any) -> None:
    """Refuse a denoiser whose attention does not come to `scaled_dot_product_attention` in a processor."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    title, native = type(denoiser).__name__, ("native", None)
    if any(module._compiled_call_impl is not None for module in denoiser.modules()) or hasattr(denoiser, "_orig_mod"):
        raise LeverRefused(
            f"attention: {title} is compiled already, with the kernels that it had then: choose the kernel before "
            f"compiling, or leave it out with {KNOB}=off"
        )
    processors = list(_processors(denoiser))
    if not processors:
        raise LeverRefused(
            f"attention: {title} keeps no attention processors to choose a kernel in; leave it out with {KNOB}=off"
        )
    chosen = {getattr(each, "_attention_backend", None) for each in processors}
    chosen = {_AttentionBackendRegistry.get_active_backend()[0] if each is None else each for each in chosen}
    if others := sorted(str(getattr(each, "value", each)) for each in chosen if each not in native):
        raise LeverRefused(
            f"attention: {title} is set to the attention backend {', '.join(others)} of diffusers: call its "
            f"reset_attention_backend() and unset DIFFUSERS_ATTN_BACKEND, or leave it out with {KNOB}=off"
        )


def _try_out(kernel: Kernel, device: str, dtype: Any) -> None:
    """One small call, held against torch's own kernel: what does not run here, or runs wrong, is refused."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 192, 64, generator=random).to(device, dtype)
    with torch.no_grad():
        stock = scaled_dot_product_attention(query, key, value).float()
        try:
            own = _operator(kernel.name)(query, key, value, None).float()
        except (RuntimeError, ImportError, TypeError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise LeverRefused(f"attention: {kernel.name} does not run here: {reason}") from error
    error_ratio = float((own - stock).norm() / stock.norm())
    if not error_ratio <= kernel.bound:
        raise LeverRefused(
            f"attention: {kernel.name} is off by {error_ratio:.2g} here, more than {kernel.bound:g}: "
            f"leave it out with {KNOB}=off"
        )


def _forward_of(denoiser: Any) -> Callable[..., Any]:
    """The forward beneath ours: one on the instance, or else that of the class, whatever it is by then."""
    own: Callable[..., Any] | None = vars(denoiser).get("forward")
    return own or (lambda *args, **kwargs: type(denoiser).forward(denoiser, *args, **kwargs))


def _tallied(forward: Callable[..., Any], tally: _Tally) -> Callable[..., Any]:
    def tallied(*args: Any, **kwargs: Any) -> Any:
        token = _now.set(tally)
        try:
            return forward(*args, **kwargs)
        finally:
            _now.reset(token)

    return tallied


def _processors(denoiser: Any) -> Iterator[Any]:
    """The attention processors, each once: blocks may share one."""
    known: set[int] = set()
    for module in denoiser.modules():
        processor = getattr(module, "processor", None)
        if callable(processor) and id(processor) not in known:
            known.add(id(processor))
            yield processor


# --------------------------------------------------------------------------- one call


@functools.cache
def _routed(cls: Any, name: str) -> type:
    """A subclass of a processor's class that routes the attention calls within `__call__`.

    One for all blocks, kept: a compiler takes blocks for alike only while their processors are of one class, and
    code that it made for another kernel is not for this class. What is being compiled is not routed here: the
    compiler's graph is, by `route_graph`.
    """
    import torch

    route = _route_to(name)

    @functools.wraps(cls.__call__)  # diffusers' Attention drops arguments that its processor's signature does not name
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.__call__(self, *args, **kwargs)
        with route():
            return cls.__call__(self, *args, **kwargs)

    return subclass(cls, __call__=__call__)


@functools.cache
def _route_to(name: str) -> Any:
    """A mode that gives attention calls to a kernel. Modes belong to the thread that enters them."""
    from torch.nn.functional import scaled_dot_product_attention as stock
    from torch.overrides import TorchFunctionMode

    row, operator = _row(name), _operator(name)

    def attend(*args: Any, **kwargs: Any) -> Any:
        call = _arguments(args, kwargs)
        reason = why_native(row, call)
        if (tally := _now.get()) is not None:
            tally.count(name if reason is None else f"native: {reason}")
        if reason is not None:
            return stock(*args, **kwargs)
        return operator(call["query"], call["key"], call["value"], call.get("scale"))

    class Route(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (attend if function is stock else function)(*args, **(kwargs or {}))

    return Route


def route_graph(graph: Any, row: Kernel) -> Counter[str]:
    """Replace the attention calls of a torch.fx.GraphModule in place; what was counted, by kernel or reason."""
    from torch.nn.functional import scaled_dot_product_attention as stock

    seen: Counter[str] = Counter()
    for node in graph.graph.find_nodes(op="call_function", target=stock):
        call = _arguments(node.args, node.kwargs)
        known = {name: _example(value) for name, value in call.items()}
        reason = why_native(row, known)
        seen[row.name if reason is None else f"native: {reason}"] += 1
        if reason is None:
            node.target = _operator(row.name)
            node.args, node.kwargs = (call["query"], call["key"], call["value"], call.get("scale")), {}
    graph.recompile()
    return seen


def _example(value: Any) -> Any:
    """A tensor of the compiler's that stands for what a node gives; anything but a node stands for itself."""
    return value.meta["example_value"] if hasattr(value, "meta") and hasattr(value, "users") else value


def _row(name: str) -> Kernel:
    return next(row for row in KERNELS if row.name == name)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call of `scaled_dot_product_attention`, by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return dict(zip(names, args, strict=False)) | dict(kwargs)


@functools.cache
def _operator(name: str) -> Callable[[Any, Any, Any, float | None], Any]:
    """The kernel of a row: (batch, heads, tokens, head_dim) three times and a scale -> the same shape."""
    return OPERATORS[name]()


def _cudnn() -> Callable[..., Any]:
    from torch import ops

    run = ops.aten._scaled_dot_product_cudnn_attention
    return lambda q, k, v, scale: run(q, k, v, None, False, 0.0, False, False, scale=scale)[0]


def _flash() -> Callable[..., Any]:
    from torch import ops

    on_gpu = ops.aten._scaled_dot_product_flash_attention
    on_cpu = ops.aten._scaled_dot_product_flash_attention_for_cpu

    def flash(q: Any, k: Any, v: Any, scale: float | None) -> Any:
        if q.device.type == "cpu":
            return on_cpu(q, k, v, 0.0, False, scale=scale)[0]
        return on_gpu(q, k, v, 0.0, False, False, scale=scale)[0]

    return flash


def _efficient() -> Callable[..., Any]:
    from torch import ops

    run = ops.aten._scaled_dot_product_efficient_attention
    return lambda q, k, v, scale: run(q, k, v, None, False, 0.0, False, scale=scale)[0]


def _flash3() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_func

    return _opaque("flash3", lambda q, k, v, scale: flash_attn_func(q, k, v, softmax_scale=scale))


def _flash4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    return _opaque("flash4", lambda q, k, v, scale: flash_attn_func(q, k, v, softmax_scale=scale))


def _sage() -> Callable[..., Any]:
    from sageattention import sageattn

    return _opaque("sage", lambda q, k, v, scale: sageattn(q, k, v, tensor_layout="NHD", sm_scale=scale))


def _opaque(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A package's function as an operator of torch's, which compilers call and do not look into.

    function: (batch, tokens, heads, head_dim) three times and a scale -> the same shape; some also return sums.
    """
    import torch

    def attend(q: Any, k: Any, v: Any, scale: float | None) -> Any:
        out = function(q, k, v, scale)
        return (out[0] if isinstance(out, tuple) else out).contiguous()

    schema = "(Tensor q, Tensor k, Tensor v, float? scale) -> Tensor"
    operator = torch.library.custom_op(f"undercrank::attention_{name}", attend, mutates_args=(), schema=schema)
    operator.register_fake(lambda q, k, v, scale: q.new_empty(q.shape))
    return lambda q, k, v, scale: operator(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale).transpose(
        1, 2
    )


OPERATORS: dict[str, Callable[[], Callable[..., Any]]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "flash3": _flash3,
    "flash4": _flash4,
    "sage": _sage,
}
