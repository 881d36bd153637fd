"""What a denoiser is given under host_sync, compiled or not."""

import pytest
import torch

from undercrank.engine import family_of_pipeline
from undercrank.families import family
from undercrank.levers.host_sync import HostSync
from undercrank.levers.mirror import Mirror
from undercrank.levers.uploads import _innermost
from undercrank.rig import Rig
from undercrank.testing import tiny_inputs, tiny_pipeline, tiny_pipeline_of

# Mochi asks for an autocast that the CPU does not have, and runs without it.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning")
LTX = "ltx-video"


def seen_by_the_denoiser(pipe, name: str, **more) -> list[dict]:
    seen: list[dict] = []
    kept = pipe.transformer.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    rig = Rig(pipe, family(name), "cpu")
    with rig.seams(), HostSync().engage(rig), rig.call(), torch.no_grad():
        pipe(**tiny_inputs(name, steps=2, **more))
    kept.remove()
    return seen


def test_a_denoiser_is_given_plain_tensors() -> None:
    for kwargs in seen_by_the_denoiser(tiny_pipeline(LTX), LTX):
        tensors = [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
        assert tensors and not any(isinstance(t, Mirror) or isinstance(t._base, Mirror) for t in tensors)


def test_a_model_that_reads_its_masks_is_given_two_sided_ones() -> None:
    name = "hunyuanvideo-1.5-480p"
    first, _, second, *_ = seen_by_the_denoiser(tiny_pipeline(name), name)
    for argument in ("encoder_attention_mask", "encoder_attention_mask_2", "image_embeds"):
        assert isinstance(first[argument], Mirror) and first[argument] is second[argument]


def test_outside_a_run_the_gate_is_open() -> None:
    pipe = tiny_pipeline(LTX)
    rig = Rig(pipe, family(LTX), "cpu")
    with HostSync().engage(rig):
        masks = pipe.encode_prompt("a", do_classifier_free_guidance=False)[1]
        assert type(masks) is torch.Tensor and type(pipe.transformer).__name__ == "LTXVideoTransformer3DModel"


@pytest.mark.parametrize("how", ["whole", "wrapped", "blocks"])
def test_a_compiled_denoiser_makes_the_same_latents_in_as_many_graphs(how: str) -> None:
    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def run(lever: bool) -> torch.Tensor:
        torch._dynamo.reset()
        graphs.clear()
        pipe = tiny_pipeline("hunyuanvideo-1.5-480p" if how == "blocks" else LTX)
        if how == "whole":
            pipe.transformer.compile(backend=backend)
        elif how == "wrapped":
            pipe.transformer = torch.compile(pipe.transformer, backend=backend)
        else:
            for block in pipe.transformer.transformer_blocks:
                block.compile(backend=backend)
        rig = Rig(pipe, family("hunyuanvideo-1.5-480p" if how == "blocks" else LTX), "cpu")
        inputs = tiny_inputs(rig.family, steps=2)
        with rig.seams(), rig.call(), torch.no_grad():
            if not lever:
                return pipe(**inputs).frames
            with HostSync().engage(rig):
                return pipe(**inputs).frames

    stock, count = run(False), len(graphs)
    assert torch.equal(stock, run(True)) and len(graphs) == count > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bare_timestep_is_plain_when_a_unet_gets_it(compiled: bool) -> None:
    """UNets are given `t` itself, where transformers are given `t.expand(batch)`."""
    pipe = tiny_pipeline_of("AnimateDiffPipeline")
    inputs = tiny_inputs(pipe, steps=2)
    with torch.no_grad():
        stock = pipe(**inputs).frames
    seen: list[type] = []
    if compiled:
        torch._dynamo.reset()
        pipe.unet = torch.compile(pipe.unet, backend="eager")
    else:
        pipe.unet.register_forward_pre_hook(lambda module, args: seen.extend(type(arg) for arg in args))
    rig = Rig(pipe, family_of_pipeline(pipe), "cpu")
    with rig.seams(), HostSync().engage(rig), rig.call(), torch.no_grad():
        assert torch.equal(stock, pipe(**tiny_inputs(pipe, steps=2)).frames)
    assert set(seen) <= {torch.Tensor} and (seen or compiled)


def test_blocks_are_iterated_without_the_watch(monkeypatch) -> None:
    """As on a GPU: the mode is on in the loop, and off while the blocks run."""
    monkeypatch.setattr("undercrank.levers.uploads.Watch.start", lambda self, total: self._push())
    pipe = tiny_pipeline(LTX)
    inside, outside = [], []
    pipe.transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: inside.append(_innermost()))
    pipe.transformer.proj_in.register_forward_pre_hook(lambda *_: outside.append(_innermost()))
    rig = Rig(pipe, family(LTX), "cpu")
    with rig.seams(), HostSync().engage(rig), rig.call(), torch.no_grad():
        pipe(**tiny_inputs(LTX, steps=2))
    assert inside == [None, None] and None not in outside and _innermost() is None
