"""Linear layers whose weights are kept in 8 bits, with one scale for each output feature.

Plain tensors in plain modules, and no subclass of a tensor: a compiler reads them as it reads any layer, equal blocks
share one graph, and offloading, moving and recording work as ever.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

TYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 1e-12
"The least that a row is scaled by: a row of zeros is divided by this and not by zero."
ROWS = 16
"""Rows of a narrow product come in multiples of this: cuBLAS was seen to refuse 60 of them with row-wise scales on an
H200. torch 2.11's own kernel takes them there (`tools/gpu/fewer_bits.py`, products)."""
FAST_SUMS = True
"""Sums stay in the tensor core, which on Hopper keeps fewer than 32 bits of them: torchao's default too. Otherwise they
are taken out again and again, which costs time; `tools/gpu/fewer_bits.py` measures both."""


def by_row(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) -> the same in `dtype`, and float32 scales (rows, 1).

    Widened before the largest value is sought: inductor of torch 2.13 writes C++ that does not compile where three
    layers seek it in one input in bfloat16.
    """
    values = values.float()
    largest = values.abs().amax(dim=1, keepdim=True).clamp(min=TINY)
    scale = largest / LARGEST[dtype]
    scaled = (values / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


class FewBits(nn.Module):
    """Storage only: the weights are brought back to the type of the input in each call."""

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, layer: nn.Linear, kind: str, device: str) -> Self:
        """Raises ValueError where the layer's weights are not finite."""
        values, scale = by_row(layer.weight.detach().to(device), TYPES[kind])
        if not bool(scale.isfinite().all()):
            raise ValueError("its weights are not finite")
        return cls(values, scale, None if layer.bias is None else layer.bias.detach().to(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, (self.values.to(self.scale.dtype) * self.scale).to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.values.dtype}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to(dtype)` is for what is computed with: what is stored follows to a device, and keeps its type."""
        kept = self.values, self.scale
        super()._apply(fn, recurse)
        for name, tensor in zip(("values", "scale"), kept, strict=True):
            moved = getattr(self, name)
            if moved.dtype != tensor.dtype:
                self.register_buffer(name, tensor.to(moved.device))
        return self


class FewBitsProduct(FewBits):
    """The input is quantised row by row too, and the product is that of the 8-bit type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        if count == 0:
            return super().forward(x)
        if count % (ROWS // 2):
            rows = functional.pad(rows, (0, 0, 0, -count % ROWS))
        values, scale = by_row(rows, self.values.dtype)
        values = values.contiguous()  # a product takes whole rows only, and HunyuanVideo-1.5's tokens lie by columns
        fused = self.bias if self.bias is not None and self.bias.dtype is torch.bfloat16 else None
        product = torch._scaled_mm(
            values,
            self.values.t(),
            scale_a=scale,
            scale_b=self.scale.t(),
            bias=fused,
            use_fast_accum=FAST_SUMS,
            out_dtype=torch.bfloat16,  # the only type that row-wise scales are multiplied into
        )
        product = product[:count].to(x.dtype)
        if self.bias is not None and fused is None:
            product = product + self.bias
        return product.reshape(*x.shape[:-1], self.out_features)
