"""GELU goes into the product before it, where that computes the same."""

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn import functional

from undercrank.levers.epilogue import fuse_gelu, linear_gelu


class Feed(nn.Module):
    """A feed-forward as models write it."""

    def __init__(self, approximate: str = "tanh", bias: bool = True, twice: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=bias), nn.Linear(16, 8)
        self.approximate, self.twice = approximate, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = functional.linear(x, self.first.weight, self.first.bias)
        out = self.second(functional.gelu(wide, approximate=self.approximate))
        return out + wide.sum() if self.twice else out


def test_a_linear_layer_and_its_gelu_become_one_call_of_the_same_result() -> None:
    torch.manual_seed(0)
    plain = Feed()
    graph = symbolic_trace(plain)
    x = torch.randn(2, 5, 8)
    assert fuse_gelu(graph) == 1
    assert [node.target for node in graph.graph.nodes].count(linear_gelu) == 1
    assert not [node for node in graph.graph.nodes if node.target is functional.gelu]
    torch.testing.assert_close(graph(x), plain(x), atol=2e-3, rtol=0)  # the CPU's epilogue is the exact GELU


@pytest.mark.parametrize("other", [{"approximate": "none"}, {"bias": False}, {"twice": True}])
def test_what_would_compute_something_else_is_left_alone(other: dict[str, object]) -> None:
    plain = Feed(**other)  # type: ignore[arg-type]
    graph = symbolic_trace(plain)
    assert fuse_gelu(graph) == 0
    x = torch.randn(3, 8)
    assert torch.equal(graph(x), plain(x))


def test_the_compiler_takes_the_fused_call() -> None:
    torch.manual_seed(0)
    plain, counted = Feed(), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        counted.append(fuse_gelu(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    x = torch.randn(4, 8)
    compiled = torch.compile(plain, backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x), atol=2e-3, rtol=0)
    assert counted == [1]
