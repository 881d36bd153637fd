"""Two-sided tensors: a device tensor that carries its host twin, so that a host read never waits for the device.

Imported inside a lever's `engage` only, since it needs torch. Why `__torch_dispatch__` and not
`__torch_function__`: with a plain host table, `table[t]` never consults `__torch_function__` of its index; the
C++ indexing asks for the scalar, and only the dispatcher sees that question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from undercrank.tensors import version_of

aten = torch.ops.aten

_FOR_ONE_PROMPT: ContextVar[bool] = ContextVar("for_one_prompt", default=False)

# Computed on both twins; any other operation is given the plain leading tensor and returns a plain tensor.
# Only operations on which host and device agree to the bit (IEEE basic arithmetic, comparisons, views): the
# twin answers host reads, so a twin that was an ulp off could take another branch than stock does.
_EXACT_NAMES = (
    "select slice alias detach view unsqueeze squeeze lift_fresh unbind flip _unsafe_view _reshape_alias transpose "
    "clone add sub rsub mul div neg abs floor_divide floor ceil trunc clamp ge gt le lt eq ne "
    "max min argmin argmax any all logical_not bitwise_not"
)


def _overloads(names: str) -> frozenset[Any]:
    packets = [getattr(aten, name) for name in names.split()]
    return frozenset(getattr(p, overload) for p in packets for overload in p.overloads() if "out" not in overload)


_EXACT_OPS = _overloads(_EXACT_NAMES)
_SPREADING = _overloads("expand repeat")
"Make the argument of a model out of a timestep: there a plain tensor serves. Exact too."
_JOINING = _overloads("cat stack")
_COUNTING = _overloads("sum")
"Exact where what is summed up is whole numbers."
_ALIKE = _overloads("new_ones new_zeros ones_like zeros_like")
"Constants of a mask's kind."
_WRITING = _overloads("copy_ fill_ zero_ add_ sub_ mul_ div_ neg_")
"In-place operations whose result is the same on either side."


class Mirror(torch.Tensor):
    """`on_device` and `on_host` hold the same values; `leads_on_host` says which of the two it claims to be."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    on_device: torch.Tensor
    on_host: torch.Tensor
    leads_on_host: bool
    may_read: Callable[[], bool] | None
    "Whether a plain tensor that is joined to this one may be read now: before the loop it may."
    memo: dict[Any, Any] | None
    "Of a mask, which does not change during a generation: what was computed from it before."

    @staticmethod
    def __new__(
        cls,
        on_device: torch.Tensor,
        on_host: torch.Tensor,
        leads_on_host: bool,
        may_read: Callable[[], bool] | None = None,
        memo: dict[Any, Any] | None = None,
    ) -> Mirror:
        lead = on_host if leads_on_host else on_device
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            lead.size(),
            strides=lead.stride(),
            storage_offset=lead.storage_offset(),
            dtype=lead.dtype,
            layout=lead.layout,
            device=lead.device,
        )
        self.on_device, self.on_host, self.leads_on_host = on_device, on_host, leads_on_host
        self.may_read, self.memo = may_read, memo
        return self

    @property
    def lead(self) -> torch.Tensor:
        """The plain tensor that stock code would hold in its place."""
        return self.on_host if self.leads_on_host else self.on_device

    def like(self, on_device: torch.Tensor, on_host: torch.Tensor) -> Mirror:
        """Another one, computed from this one."""
        memo: dict[Any, Any] | None = None if self.memo is None else {}
        return Mirror(on_device, on_host, self.leads_on_host, self.may_read, memo)

    # Asked directly and not through the dispatcher: `torch.tensor([t])` asks where the dispatcher is switched off.
    def item(self) -> Any:
        return self.on_host.item()

    def __index__(self) -> int:
        return self.on_host.__index__()

    def __int__(self) -> int:
        return int(self.on_host)

    def __float__(self) -> float:
        return float(self.on_host)

    def __bool__(self) -> bool:
        return bool(self.on_host)

    def tolist(self) -> Any:
        return self.on_host.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.on_host.numpy(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mirror:
        return self.like(self.on_device.clone(), self.on_host.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.lead.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"Mirror({self.on_host!r}, lead={self.lead.device})"

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["on_device", "on_host"], self.leads_on_host

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], leads_on_host: bool, *_: Any) -> Mirror:
        return Mirror(inner["on_device"], inner["on_host"], leads_on_host)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HOST_ANSWERS:
            return func(*_each(_host, args), **kwargs)
        subject = args[0] if args else None
        if isinstance(subject, Mirror) and subject.memo is not None:
            return _remembered(subject, func, args, kwargs)
        return _answer(func, args, kwargs)


_HOST_ANSWERS = {aten._local_scalar_dense.default, aten.equal.default}
"Reads that end on the host."


def mirror(tensor: torch.Tensor, device: torch.device | str, may_read: Callable[[], bool] | None = None) -> Mirror:
    """Both twins of a schedule tensor: one copy of the whole of it, before the loop."""
    if isinstance(tensor, Mirror):
        return tensor
    if tensor.device.type == "cpu":
        return Mirror(tensor.to(device), tensor, torch.device(device).type != "cpu", may_read)
    return Mirror(tensor, tensor.to("cpu"), leads_on_host=False, may_read=may_read)


def mask(on_device: torch.Tensor, on_host: torch.Tensor | None = None) -> Mirror:
    """A tensor that is the same throughout a generation: what is asked of it is worked out once."""
    if isinstance(on_device, Mirror):
        return on_device
    return Mirror(on_device, on_device.to("cpu") if on_host is None else on_host, leads_on_host=False, memo={})


def plain(value: Any) -> Any:
    """The leading tensor of a Mirror; anything else as it is."""
    return value.lead if isinstance(value, Mirror) else value


def sent(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device that nobody waits for. From pinned memory: CUDA would wait for any other.

    Not while a graph is captured, which would read that memory again and again: there stock's copy is refused by CUDA.
    """
    if device.type in ("cpu", "mps") or is_captured(device):
        return on_host.to(device)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


def is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_captured_for_all(device: torch.device) -> bool:
    """Captured by somebody who does not know that the graph serves one prompt only."""
    return is_captured(device) and not _FOR_ONE_PROMPT.get()


@contextmanager
def recorded_for_one_prompt() -> Iterator[None]:
    """Inside, a graph may be captured that keeps what masks answered: it is given to calls with the same masks only."""
    token = _FOR_ONE_PROMPT.set(True)
    try:
        yield
    finally:
        _FOR_ONE_PROMPT.reset(token)


def _host(value: Any) -> Any:
    return value.on_host if isinstance(value, Mirror) else value


def _each(side: Callable[[Any], Any], args: Any) -> list[Any]:
    """That side of each argument, and of each in a list, which is as deep as an operation's arguments go."""
    return [[side(part) for part in arg] if isinstance(arg, list | tuple) else side(arg) for arg in args]


# --------------------------------------------------------------------------- one operation


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    subject: Any = args[0] if args else None
    if func is aten._to_copy.default:
        return _copied(subject, kwargs)
    if func is aten.nonzero.default:
        return _positions(subject)
    if func is aten.index.Tensor:
        return _indexed(func, *args)
    if func._schema.is_mutable:
        return _written(func, args, kwargs)
    if func in _JOINING and not kwargs:
        return _joined(func, args)
    if func in _COUNTING and isinstance(subject, Mirror) and _counts(subject, kwargs):
        return subject.like(func(subject.on_device, *args[1:], **kwargs), func(subject.on_host, *args[1:], **kwargs))
    if func in _ALIKE and isinstance(subject, Mirror) and subject.memo is not None:
        on_host = func(subject.on_host, *args[1:], **{k: v for k, v in kwargs.items() if k in ("dtype", "layout")})
        return subject.like(func(subject.on_device, *args[1:], **kwargs), on_host)
    if _is_exact(func, subject) and not kwargs:
        mirrors = [arg for arg in args if isinstance(arg, Mirror)]
        if mirrors and _same_side(mirrors) and _others_are_scalars(args):
            return _paired(func, args, mirrors[0])
    return func(*_each(plain, args), **{name: plain(value) for name, value in kwargs.items()})


def _counts(subject: Mirror, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype") or subject.dtype
    return subject.memo is not None and not (dtype.is_floating_point or dtype.is_complex)


def _is_exact(func: Any, subject: Any) -> bool:
    if func in _EXACT_OPS:
        return True
    spreads = func in _SPREADING and isinstance(subject, Mirror)
    return spreads and (subject.leads_on_host or subject.memo is not None or subject.dim() > 1)


def _remembered(subject: Mirror, func: Any, args: Any, kwargs: Any) -> Any:
    """The same question about a mask gets the same answer, unless the mask was written into meanwhile.

    A captured graph keeps the answer for one prompt; whoever captures without saying `recorded_for_one_prompt` would
    give it for every other. Stock cannot be captured either.
    """
    assert subject.memo is not None
    if is_captured_for_all(subject.on_device.device):
        raise RuntimeError("this model selects tokens by a mask of the prompt, which a captured graph cannot follow")
    if func._schema.is_mutable:
        return _answer(func, args, kwargs)
    try:
        key = (func, args[1:], tuple(kwargs.items()), version_of(subject))
        known = subject.memo.get(key)
    except TypeError:  # an argument that is a list: not looked up
        return _answer(func, args, kwargs)
    if known is None:
        known = _answer(func, args, kwargs)
        if _is_two_sided(known):
            subject.memo[key] = known
    return _again(known)


def _is_two_sided(answer: Any) -> bool:
    return all(isinstance(part, Mirror) for part in (answer if isinstance(answer, list | tuple) else (answer,)))


def _again(answer: Any) -> Any:
    """Another wrapper of the same: torch gives each result of a view its own history."""
    if isinstance(answer, Mirror):
        return Mirror(answer.on_device, answer.on_host, answer.leads_on_host, answer.may_read, answer.memo)
    return type(answer)(_again(part) for part in answer) if isinstance(answer, list | tuple) else answer


def _copied(source: Mirror, kwargs: dict[str, Any]) -> torch.Tensor:
    """`.to(...)`: each device's side is already there; a third one (another index) gets a copy, of masks both sides."""
    target = torch.device(kwargs.get("device") or source.device)
    cast = {key: value for key, value in kwargs.items() if key == "dtype"}
    copy = aten._to_copy.default
    if target.type == "cpu" and source.on_device.device.type != "cpu":
        return copy(source.on_host, **cast)
    if target.type == source.on_device.device.type and target.index in (None, source.on_device.device.index):
        device_twin = copy(source.on_device, **cast) if cast or not source.leads_on_host else source.on_device
        result = source.like(device_twin, copy(source.on_host, **cast))
        result.leads_on_host = False
        return result
    if source.memo is not None and target.type == source.on_device.device.type:
        # A mask for a model on another device of the kind, which will read it back there: it keeps its host twin.
        return Mirror(copy(source.on_device, **kwargs), copy(source.on_host, **cast), leads_on_host=False, memo={})
    return copy(source.lead, **kwargs)


def _positions(source: Mirror) -> torch.Tensor:
    """`nonzero` of a schedule is consumed by index_for_timestep, whose `.item()` follows: the host's own will do.

    Of a mask it selects tokens: both sides.
    """
    on_host = aten.nonzero.default(source.on_host)
    return on_host if source.memo is None else source.like(sent(on_host, source.on_device.device), on_host)


def _indexed(func: Any, table: Any, indices: list[Any]) -> Any:
    """A table, an index or both are two-sided: no boolean mask and no host index reaches the device."""
    device = plain(table).device
    on_side = [part for index in indices for part in _index_for(index, device)]
    on_device = func(plain(table), on_side)
    if not isinstance(table, Mirror) or table.leads_on_host or any(_is_device_only(index) for index in indices):
        return on_device
    return table.like(on_device, func(table.on_host, [_host(index) for index in indices]))


def _index_for(index: Any, device: torch.device) -> list[Any]:
    """What the table's device is given: positions in place of a mask, sent ahead where they are the host's."""
    if isinstance(index, Mirror):
        if index.dtype in (torch.bool, torch.uint8) and device.type != "cpu":
            places = index.nonzero()
            places = places.on_device if isinstance(places, Mirror) else sent(places, device)
            return list(places.unbind(1))
        return [index.on_device if index.on_device.device == device else index.lead]
    if index is not None and index.device != device and index.dtype not in (torch.bool, torch.uint8):
        return [sent(index, device)]
    return [index]


def _is_device_only(index: Any) -> bool:
    return index is not None and not isinstance(index, Mirror) and index.device.type != "cpu"


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """In place: the other twin is written too, or where that could differ, copied from the leading one."""
    target = args[0]
    func(*_each(plain, args), **{name: plain(value) for name, value in kwargs.items()})
    if not isinstance(target, Mirror):
        return target
    other = target.on_device if target.leads_on_host else target.on_host
    if func in _WRITING and not target.leads_on_host and not kwargs and not any(map(_is_on_device, args[1:])):
        func(other, *map(_host, args[1:]))
    else:
        other.copy_(target.lead)
    return target


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Mirror) and value.device.type != "cpu"


def _joined(func: Any, args: Any) -> Any:
    """Two-sided if all parts are. Before the loop a plain part is read for it; masks are stacked for a model."""
    parts = args[0]
    first = next((part for part in parts if isinstance(part, Mirror)), None)
    stacked = first is not None and first.memo is not None and func in _overloads("stack")
    if first is not None and first.may_read is not None and first.may_read():
        parts = [part if isinstance(part, Mirror) else mirror(part, first.device) for part in parts]
    if first is None or stacked or not all(isinstance(part, Mirror) for part in parts) or not _same_side(parts):
        return func(*_each(plain, args))
    rest = args[1:]
    return first.like(func([p.on_device for p in parts], *rest), func([p.on_host for p in parts], *rest))


def _same_side(mirrors: list[Mirror]) -> bool:
    return len({m.leads_on_host for m in mirrors}) == 1


def _others_are_scalars(args: Any) -> bool:
    """Plain operands may only be host scalars: then both twins see the same value."""
    others = [arg for arg in args if isinstance(arg, torch.Tensor) and not isinstance(arg, Mirror)]
    return all(other.device.type == "cpu" and other.dim() == 0 for other in others)


def _paired(func: Any, args: Any, source: Mirror) -> Any:
    on_device = func(*[arg.on_device if isinstance(arg, Mirror) else arg for arg in args])
    on_host = func(*[_host(arg) for arg in args])
    if isinstance(on_device, list | tuple):
        pairs = zip(on_device, on_host, strict=True)
        return type(on_device)(source.like(d, h) for d, h in pairs)
    return source.like(on_device, on_host)
