"""Two-sided tensors: a device tensor that carries its host twin, so that a host read never waits for the device.

Imported inside a lever's `engage` only, since it needs torch. Why `__torch_dispatch__` and not
`__torch_function__`: with a plain host table, `table[t]` never consults `__torch_function__` of its index; the
C++ indexing asks for the scalar, and only the dispatcher sees that question.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten

# Computed on both twins; any other operation is given the plain leading tensor and returns a plain tensor.
# Only operations on which host and device agree to the bit (IEEE basic arithmetic, comparisons, views): the
# twin answers host reads, so a twin that was an ulp off could take another branch than stock does.
_EXACT_NAMES = (
    "select slice alias detach view unsqueeze squeeze lift_fresh unbind flip _unsafe_view clone "
    "add sub rsub mul div neg abs floor_divide ge gt le lt eq ne"
)
_EXACT_OPS = {
    getattr(packet, overload)
    for packet in (getattr(aten, name) for name in _EXACT_NAMES.split())
    for overload in packet.overloads()
    if "out" not in overload
}


class Mirror(torch.Tensor):
    """`on_device` and `on_host` hold the same values; `leads_on_host` says which of the two it claims to be."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    on_device: torch.Tensor
    on_host: torch.Tensor
    leads_on_host: bool

    @staticmethod
    def __new__(cls, on_device: torch.Tensor, on_host: torch.Tensor, leads_on_host: bool) -> Mirror:
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
        return self

    @property
    def lead(self) -> torch.Tensor:
        """The plain tensor that stock code would hold in its place."""
        return self.on_host if self.leads_on_host else self.on_device

    def tolist(self) -> Any:
        return self.on_host.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.on_host.numpy(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mirror:
        return Mirror(self.on_device.clone(), self.on_host.clone(), self.leads_on_host)

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
            return func(*tree_map(_host, args), **kwargs)
        if func is aten._to_copy.default:
            return _copied(args[0], kwargs)
        mirrors = [arg for arg in args if isinstance(arg, Mirror)]
        if func in _EXACT_OPS and not kwargs and _same_side(mirrors) and _others_are_scalars(args):
            return _paired(func, args, mirrors[0].leads_on_host)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


# Reads that end on the host: answered there. `nonzero` is consumed by index_for_timestep, whose `.item()` follows.
_HOST_ANSWERS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}


def mirror(tensor: torch.Tensor, device: torch.device | str) -> Mirror:
    """Both twins of a schedule tensor: one copy of the whole of it, before the loop."""
    if isinstance(tensor, Mirror):
        return tensor
    if tensor.device.type == "cpu":
        return Mirror(tensor.to(device), tensor, leads_on_host=torch.device(device).type != "cpu")
    return Mirror(tensor, tensor.to("cpu"), leads_on_host=False)


def plain(value: Any) -> Any:
    """The leading tensor of a Mirror; anything else as it is."""
    return value.lead if isinstance(value, Mirror) else value


def _host(value: Any) -> Any:
    return value.on_host if isinstance(value, Mirror) else value


def _copied(source: Mirror, kwargs: dict[str, Any]) -> torch.Tensor:
    """`.to(...)`: each device's side is already there; a third device (another index) gets a plain copy."""
    target = torch.device(kwargs.get("device") or source.device)
    cast = {key: value for key, value in kwargs.items() if key == "dtype"}
    copy = aten._to_copy.default
    if target.type == "cpu" and source.on_device.device.type != "cpu":
        return copy(source.on_host, **cast)
    if target.type == source.on_device.device.type and target.index in (None, source.on_device.device.index):
        device_twin = copy(source.on_device, **cast) if cast or not source.leads_on_host else source.on_device
        return Mirror(device_twin, copy(source.on_host, **cast), leads_on_host=False)
    return copy(source.lead, **kwargs)


def _same_side(mirrors: list[Mirror]) -> bool:
    return len({m.leads_on_host for m in mirrors}) == 1


def _others_are_scalars(args: Any) -> bool:
    """Plain operands may only be host scalars: then both twins see the same value."""
    others = [arg for arg in args if isinstance(arg, torch.Tensor) and not isinstance(arg, Mirror)]
    return all(other.device.type == "cpu" and other.dim() == 0 for other in others)


def _paired(func: Any, args: Any, leads_on_host: bool) -> Any:
    on_device = func(*[arg.on_device if isinstance(arg, Mirror) else arg for arg in args])
    on_host = func(*[_host(arg) for arg in args])
    if isinstance(on_device, list | tuple):
        pairs = zip(on_device, on_host, strict=True)
        return type(on_device)(Mirror(d, h, leads_on_host) for d, h in pairs)
    return Mirror(on_device, on_host, leads_on_host)
