"""On a CUDA device: GELU inside the product before it is GELU after it, up to the rounding that it saves."""

import pytest
import torch
from torch.nn import functional

from undercrank.levers.epilogue import linear_gelu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_product_is_nearer_to_float32_than_the_two_apart(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, device="cuda", dtype=dtype) for s in ((3, 50, 512), (1024, 512), (1024,)))
    weight = weight / 512**0.5
    with torch.no_grad():
        exact = functional.gelu(functional.linear(x.float(), weight.float(), bias.float()), approximate="tanh")
        apart = functional.gelu(functional.linear(x, weight, bias), approximate="tanh")
        fused = linear_gelu(x, weight, bias)
    assert fused.shape == apart.shape and fused.dtype == dtype
    error = lambda found: float((found.float() - exact).norm() / exact.norm())  # noqa: E731
    assert error(fused) <= error(apart) < 0.01
