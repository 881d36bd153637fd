"""Uploads that nobody waits for: what a loop sends to the device goes there from pinned memory.

A stock upload (`noise.to(device)`, `torch.tensor([t], device=device)`, `table[[0, -1]]`) makes the host wait until
the device has done all that was asked of it before. The same bytes are sent here without that wait.

Imported inside host_sync's `engage` only, since it needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from undercrank.levers.mirror import Mirror, mask, sent

WATCHED = 3
"Steps without an upload after which a run is no longer watched: a mode costs about 2 us for each torch function."

LARGEST = 64 * 2**20
"Bytes of an upload that is pinned: weights that an offloader moves are not ours to copy once more."

_NOT_OURS: Any = object()


class Uploads(TorchFunctionMode):
    """Sees every torch function of this thread while it is pushed; acts on those that send something."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.cured = 0
        "Uploads sent without a wait since the loop began."
        self.knows_constants = False
        "Whether tensors of zeros and ones are masks now (`Gate`)."
        self._constants: dict[Any, Mirror] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cure = _CURES.get(func)
        answer = _NOT_OURS if cure is None else cure(self, func, args, kwargs)
        if answer is _NOT_OURS:
            return func(*args, **kwargs)
        self.cured += 1
        return answer

    def is_here(self, device: Any) -> bool:
        if device is None:
            return False
        device = torch.device(device)
        return device.type == self.device.type and device.index in (None, self.device.index or 0)

    def send(self, on_host: torch.Tensor) -> torch.Tensor:
        return sent(on_host, self.device)

    def forget(self) -> None:
        self.cured = 0
        self._constants.clear()

    def constant(self, func: Any, args: Any, kwargs: Any) -> Mirror:
        """Made once and given again: neither the values nor what follows from them change."""
        key = (func, args, tuple(kwargs.items()))
        if key not in self._constants:
            self._constants[key] = mask(func(*args, **kwargs), func(*args, **{**kwargs, "device": "cpu"}))
        return self._constants[key]


class Watch:
    """When the mode is on: in the denoising loop, but not inside the blocks of a denoiser, which send nothing."""

    def __init__(self, device: str) -> None:
        self.mode = Uploads(device)
        self._pushed = False

    def start(self, total: int) -> None:
        self.stop()
        self.mode.forget()
        if self.sends and not self._pushed:  # else it is on still, beneath somebody's mode, and serves
            self._push()

    @property
    def sends(self) -> bool:
        """Whether there is a way to the device that somebody could wait for."""
        return self.mode.device.type not in ("cpu", "mps")

    def step(self, index: int) -> None:
        """Schedulers that draw noise, and pipelines that send something, do so from the first steps on."""
        if index + 1 >= WATCHED and not self.mode.cured:
            self.stop()

    def stop(self, error: BaseException | None = None) -> None:
        if self._pushed and _innermost() is self.mode:
            self.mode.__exit__(None, None, None)
            self._pushed = False

    def forget(self, error: BaseException | None = None) -> None:
        """What one generation made is not kept for the next."""
        self.mode.forget()

    def is_here(self) -> bool:
        """Whether the mode is on in this thread, be it beneath another one."""
        depth = torch._C._len_torch_function_stack()
        return any(torch._C._get_function_stack_at(place) is self.mode for place in range(depth))

    @contextmanager
    def during(self) -> Iterator[None]:
        """On inside the block, in a thread that the loop is not in: for one forward of a replica."""
        if not self.sends:
            yield
            return
        self._push()
        try:
            yield
        finally:
            self.stop()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Off inside the block, if it is on and no other mode was put on top of it."""
        if not (self._pushed and _innermost() is self.mode):
            yield
            return
        self.stop()
        try:
            yield
        finally:
            self._push()

    def _push(self) -> None:
        self.mode.__enter__()
        self._pushed = True


@contextmanager
def unwatched() -> Iterator[None]:
    """None of these modes inside: a compiler would look into them, and compile blocks anew because of them."""
    taken: list[Uploads] = []
    while isinstance(mode := _innermost(), Uploads):
        mode.__exit__(None, None, None)
        taken.append(mode)
    try:
        yield
    finally:
        for mode in reversed(taken):
            mode.__enter__()


def _innermost() -> Any:
    depth = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None


# --------------------------------------------------------------------------- what is sent


def _to(mode: Uploads, func: Any, args: Any, kwargs: Any) -> Any:
    """`x.to(device)`, `x.to(device, dtype)`, `x.to(other)`; the cast is the host's, as in stock's blocking copy."""
    source, device, dtype = args[0], kwargs.get("device"), kwargs.get("dtype")
    if not is_on_host(source) or set(kwargs) - {"device", "dtype"}:
        return _NOT_OURS
    for arg in args[1:]:
        if isinstance(arg, torch.Tensor):
            device, dtype = arg.device, arg.dtype
        elif isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, torch.device | str):
            device = arg
        else:
            return _NOT_OURS
    if not mode.is_here(device) or source.nbytes > LARGEST or not source.is_contiguous():
        return _NOT_OURS
    return mode.send(source if dtype is None else source.to(dtype))


def _made(mode: Uploads, func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.tensor(numbers, device=...)`: made on the host, as stock does, and sent."""
    if not mode.is_here(kwargs.get("device")) or isinstance(args[0], torch.Tensor):
        return _NOT_OURS
    return mode.send(func(*args, **{key: value for key, value in kwargs.items() if key != "device"}))


def _taken(mode: Uploads, func: Any, args: Any, kwargs: Any) -> Any:
    """`table[[0, -1]]` and `table[places of the host]`."""
    table, index = args
    if isinstance(table, Mirror) or not isinstance(table, torch.Tensor) or not mode.is_here(table.device):
        return _NOT_OURS
    parts = index if isinstance(index, tuple) else (index,)
    if not any(_is_host_index(part) for part in parts):
        return _NOT_OURS
    shown = tuple(mode.send(torch.as_tensor(p)) if _is_host_index(p) else p for p in parts)
    return func(table, shown if isinstance(index, tuple) else shown[0])


def _constant(mode: Uploads, func: Any, args: Any, kwargs: Any) -> Any:
    is_mask = mode.knows_constants and len(args) == 1 and isinstance(args[0], tuple) and len(args[0]) == 2
    return mode.constant(func, args, kwargs) if is_mask and mode.is_here(kwargs.get("device")) else _NOT_OURS


def is_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Mirror) and value.device.type == "cpu"


def _is_host_index(part: Any) -> bool:
    if isinstance(part, list):
        return bool(part) and all(type(number) is int for number in part)
    return is_on_host(part) and part.dim() > 0 and part.dtype in (torch.int64, torch.int32)


_CURES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.__getitem__: _taken,
    torch.tensor: _made,
    torch.as_tensor: _made,
    torch.zeros: _constant,
    torch.ones: _constant,
}
