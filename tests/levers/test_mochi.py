"""Mochi's attention, told which tokens are valid, is stock's, and no graph breaks in it."""

import pytest
import torch
from diffusers.models.attention_processor import MochiAttnProcessor2_0

from undercrank.families import family
from undercrank.levers.host_sync import HostSync
from undercrank.levers.mirror import mask
from undercrank.levers.mochi import Known, knowing
from undercrank.rig import Rig
from undercrank.testing import tiny_inputs, tiny_pipeline

# Mochi asks for an autocast that the CPU does not have, and runs without it.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning")
VALID = torch.tensor([[True, True, True, False], [False, False, False, False], [True, False, True, True]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [True, False])
def test_attention_is_stocks_bit_for_bit(dtype: torch.dtype, turned: bool) -> None:
    model = tiny_pipeline("mochi").transformer
    attn = model.transformer_blocks[0].attn1.to(dtype)
    draw = torch.Generator().manual_seed(0)
    shapes = (3, 6, attn.to_q.in_features), (3, 4, attn.add_q_proj.in_features)
    video, text = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    angles = tuple(torch.randn((6, 2, 8), generator=draw) for _ in range(2)) if turned else None
    with torch.no_grad():
        stock = attn(video, text, image_rotary_emb=angles, attention_mask=VALID)
        known = Known()
        known.learn({"encoder_attention_mask": mask(VALID)})
        with knowing(model, known):
            ours = attn(video, text, image_rotary_emb=angles, attention_mask=None)
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


def test_a_plain_mask_is_left_to_stock() -> None:
    known = Known()
    known.learn({"encoder_attention_mask": VALID})
    assert known.places is None


def test_another_processor_is_left_alone() -> None:
    class Mine(MochiAttnProcessor2_0):
        pass

    model = tiny_pipeline("mochi").transformer
    model.transformer_blocks[0].attn1.processor = Mine()
    with knowing(model, Known()):
        assert type(model.transformer_blocks[0].attn1.processor) is Mine
        assert type(model.transformer_blocks[1].attn1.processor) is not MochiAttnProcessor2_0


def test_compiled_blocks_are_whole_and_equal() -> None:
    """Stock breaks each block at its look-up; here all but the last, which is another, share one graph."""
    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    latents, counts = [], []
    for lever in (False, True):
        torch._dynamo.reset()
        graphs.clear()
        pipe = tiny_pipeline("mochi")
        for block in pipe.transformer.transformer_blocks:
            block.compile(backend=backend)
        rig = Rig(pipe, family("mochi"), "cpu")
        with rig.seams(), rig.call(), torch.no_grad():
            if lever:
                with HostSync().engage(rig):
                    latents.append(pipe(**tiny_inputs("mochi", steps=2)).frames)
            else:
                latents.append(pipe(**tiny_inputs("mochi", steps=2)).frames)
        counts.append(len(graphs))
    assert torch.equal(*latents) and counts[1] == 2 < counts[0]
