"""A copy of a denoiser on another device: filled from memory, compared by its weights, brought up to date.

Imported inside cfg_parallel's `engage` only, since it needs torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from undercrank.records import LeverRefused
from undercrank.undo import put_back

ADAPTER = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")
"What peft keeps beside the weights of a LoRA layer, and what decides whether and how strongly it acts."

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"Bytes of one value -> the integers that its bits are summed up as."


def refuse_patched(denoiser: Any, device: torch.device) -> None:
    """Raise LeverRefused for a denoiser that cannot be copied as it is, before anything is done."""
    title = type(denoiser).__name__
    for name, module in denoiser.named_modules():
        where = ".".join(filter(None, (title, name)))
        if hasattr(module, "_hf_hook") or _group_offloaded(module):
            raise LeverRefused(f"cfg_parallel: {where} is offloaded: there is no device that its weights stay on")
        if "forward" in vars(module):
            raise LeverRefused(
                f"cfg_parallel: {where} runs under a hook (a cache, a patch), which a copy would not have"
            )
        if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
            raise LeverRefused(
                f"cfg_parallel: {where} is compiled already, and a copy would not be: compile with compile=on instead"
            )
    for name, tensor in _tensors(denoiser):
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise LeverRefused(
                f"cfg_parallel: {title}.{name} is a {type(tensor).__name__}: only plain weights are copied, "
                "quantised ones are not"
            )
        if isinstance(tensor, nn.Parameter) and tensor.device != device:
            raise LeverRefused(f"cfg_parallel: {title}.{name} is on {tensor.device} and not on {device}: offloaded?")


def _group_offloaded(module: Any) -> bool:
    registry = vars(module).get("_diffusers_hook")
    return any("offload" in name for name in getattr(registry, "hooks", {}))


def bytes_of(denoiser: Any) -> int:
    """Weights and buffers, each once."""
    return sum({id(tensor): tensor.nbytes for _, tensor in _tensors(denoiser)}.values())


def copied(denoiser: Any, home: torch.device, device: torch.device, check: Callable[[], None] = lambda: None) -> Any:
    """The same module on `device`: what it has on `home` goes there straight away, all else is copied as it is.

    `check` is called before each tensor: what it raises leaves nothing behind. No second copy is made on the way.
    """
    moved: dict[int, Any] = {}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for tensor in _all_tensors(denoiser):
                check()
                if id(tensor) not in moved and tensor.device == home:
                    moved[id(tensor)] = _sent(tensor, device)
            replica = copy.deepcopy(denoiser, moved)
    except BaseException:
        moved.clear()  # the traceback would keep the copies alive
        raise
    for module in replica.modules():
        vars(module).pop("cache_context", None)  # the seam of the original
    return replica


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    there = tensor.detach().to(device, copy=True)
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, those that share their memory under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _all_tensors(module: Any) -> Iterator[torch.Tensor]:
    """And those that a module keeps as plain attributes."""
    yield from (tensor for _, tensor in _tensors(module))
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


# --------------------------------------------------------------------------- is it still the same?


def structure(module: Any) -> dict[str, Any]:
    """Names, dtypes and shapes of all weights: what must agree before values can be copied over."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in _tensors(module)}


def sums(module: Any) -> list[int]:
    """A checksum of each weight: the sum of its bits, as integers. One read from the device for all of them."""
    each = [_words(tensor).sum(dtype=torch.int64) for _, tensor in _tensors(module)]
    return torch.stack([total.to(each[0].device) for total in each]).cpu().tolist() if each else []


def _words(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(WORDS[plain.element_size()])


def adapters(module: Any) -> dict[str, Any]:
    """The settings of LoRA layers, by name."""
    return {
        f"{name}.{key}": vars(part)[key]
        for name, part in module.named_modules()
        for key in ADAPTER
        if key in vars(part)
    }


def has_same_adapters(replica: Any, denoiser: Any) -> bool:
    return adapters(replica) == adapters(denoiser)


def update(replica: Any, denoiser: Any) -> None:
    """Bring a replica of the same structure up to date: weights by name, and the settings of adapters."""
    theirs = dict(_tensors(denoiser))
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in _tensors(replica):
            tensor.copy_(theirs[name])
    originals = dict(denoiser.named_modules())
    for name, part in replica.named_modules():
        for key in ADAPTER:
            if key in vars(originals[name]):
                put_back(part, key, copy.deepcopy(vars(originals[name])[key]))
