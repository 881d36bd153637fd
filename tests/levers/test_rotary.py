"""Rotary embeddings alone, compiled: as near to eager code as their precision allows. bf16 drifts there first."""

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_ltx import apply_rotary_emb as of_ltx

from undercrank.levers.compile import Compile

SHAPE_BHLD = (1, 2, 24, 16)


def angles(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    phase = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 6.28
    return phase.cos(), phase.sin()


ROTARIES = {  # what CogVideoX and HunyuanVideo call, and LTX's own
    "cos and sin by pairs": (apply_rotary_emb, SHAPE_BHLD, angles(24, 16)),
    "ltx": (of_ltx, (1, 24, 32), angles(1, 24, 32)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what Python is about to drop
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROTARIES)
def test_a_compiled_rotary_embedding_is_eager_codes_within_its_precision(name: str, dtype: torch.dtype) -> None:
    rotary, shape, phases = ROTARIES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    eager = rotary(x, phases)
    compiled = torch.compile(rotary, fullgraph=True, options={"emulate_precision_casts": True})(x, phases)
    assert Compile().mode == "parity" and compiled.dtype == eager.dtype == dtype
    error = (compiled.float() - eager.float()).norm() / eager.float().norm()
    assert error <= (1e-6 if dtype is torch.float32 else 2e-3), error
