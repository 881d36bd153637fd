"""A linear layer and the GELU after it as one product: the activation is computed before the product is stored.

Part of the compile lever's `max`. A transformer's feed-forward stores its widest tensor twice, before and after the
activation; cuBLASLt has the tanh form of GELU as an epilogue, which the compiler does not use by itself. The value
before the activation is then not rounded to the run's dtype: nearer to float32, a little further from stock.

Imported inside the lever's compiling only, since it needs torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x @ weight.T + bias), tanh form on CUDA. x: (..., in), weight: (out, in), bias: (out,) -> (..., out)."""
    rows = x.reshape(-1, x.shape[-1])
    product = torch.ops.aten._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return product.view(*x.shape[:-1], product.shape[-1])


def fuse_gelu(graph: GraphModule) -> int:
    """Put `linear_gelu` in place of each linear layer with a bias that only a tanh GELU reads. Returns how many."""
    fused = [node for node in graph.graph.nodes if _is_fusible(node)]
    for node in fused:
        linear = node.args[0]
        with graph.graph.inserting_before(node):
            x, weight, bias = _operands(linear)
            both = graph.graph.call_function(linear_gelu, (x, weight, bias))
        both.meta = dict(node.meta)
        node.replace_all_uses_with(both)
        graph.graph.erase_node(node)
        graph.graph.erase_node(linear)
    graph.recompile()
    return len(fused)


def _is_fusible(node: Node) -> bool:
    if node.target not in (functional.gelu, torch._C._nn.gelu) or node.kwargs.get("approximate") != "tanh":
        return False
    linear = node.args[0]
    is_linear = isinstance(linear, Node) and linear.target in (functional.linear, torch._C._nn.linear)
    return is_linear and len(linear.users) == 1 and _operands(linear)[2] is not None


def _operands(linear: Node) -> tuple[Any, Any, Any]:
    given = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | linear.kwargs
    return given["input"], given["weight"], given.get("bias")
