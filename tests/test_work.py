"""Counting what a call multiplies, against formulas written out by hand; and rates on whatever device is here."""

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
from torch import nn

import undercrank
from undercrank.figures import Attention, Gemm, Rate, Rates, floor_ms
from undercrank.testing import tiny_inputs, tiny_pipeline
from undercrank.work import first_step, rates, work_of


def only(items):
    (item,) = items
    return item


# --------------------------------------------------------------------------- one operation


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_linear_layer_is_one_product(mode) -> None:
    layer, x = nn.Linear(7, 5), torch.randn(2, 3, 7)
    with mode():
        work = work_of(lambda: layer(x))
    assert work.gemms == (Gemm(batch=1, m=6, n=5, k=7),) and work.gemm_flops == 2 * 6 * 5 * 7


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_is_counted_whole_and_once(mode, masked, device) -> None:
    query, key = torch.randn(2, 3, 8, 16, device=device), torch.randn(2, 3, 10, 16, device=device)
    mask = torch.ones(8, 10, dtype=torch.bool, device=device) if masked else None
    with mode():
        work = work_of(lambda: F.scaled_dot_product_attention(query, key, value=key, attn_mask=mask))
    assert work.attentions == (Attention(b=2, h=3, l=8, s=10, d=16),) and work.gemms == ()
    assert work.attention_flops == 2 * 3 * (2 * 8 * 10 * 16) * 2


def test_attention_by_its_operation_is_counted_as_by_its_name() -> None:
    query = torch.randn(1, 2, 8, 16)
    with torch.no_grad():
        work = work_of(lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query))
    assert work.attentions == (Attention(b=1, h=2, l=8, s=8, d=16),)


@pytest.mark.parametrize("kernel", ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"])
def test_kernels_of_a_gpu_are_counted_on_a_meta_device(kernel) -> None:
    query = torch.randn(1, 2, 8, 16, device="meta", dtype=torch.bfloat16)
    with torch.no_grad():
        work = work_of(lambda: getattr(torch.ops.aten, kernel)(query, query, query, None, False))
    assert work.attentions == (Attention(b=1, h=2, l=8, s=8, d=16),)


def test_products_by_hand_and_batched_ones_are_counted() -> None:
    a, b = torch.randn(4, 3, 7), torch.randn(4, 7, 5)
    with torch.no_grad():
        work = work_of(lambda: (torch.einsum("bik,bkj->bij", a, b), a @ b, torch.baddbmm(torch.zeros(4, 3, 5), a, b)))
    assert work.gemms == (Gemm(batch=4, m=3, n=5, k=7, count=3),)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_each_output_times_its_kernel(groups) -> None:
    layer = nn.Conv3d(4, 6, kernel_size=(1, 2, 2), stride=(1, 2, 2), groups=groups)
    with torch.no_grad():
        work = work_of(lambda: layer(torch.randn(1, 4, 3, 8, 8)))
    assert work.conv_flops == 2 * (6 * 3 * 4 * 4) * (4 // groups) * 4


def test_a_transposed_convolution_counts_each_input_times_its_kernel() -> None:
    layer = nn.ConvTranspose2d(4, 6, kernel_size=2, stride=2)
    with torch.no_grad():
        work = work_of(lambda: layer(torch.randn(1, 4, 5, 5)))
    assert work.conv_flops == 2 * (4 * 5 * 5) * 6 * 4


# --------------------------------------------------------------------------- whole models, by hand

H200 = Rates(
    device="H200",
    dtype="bfloat16",
    gemm=(Rate(kernel="gemm", shape="", tflops=760.0, low=760.0, high=760.0, n=1),),
    attention=(Rate(kernel="cudnn", shape="", tflops=600.0, low=600.0, high=600.0, n=1),),
)
"What one H200 showed in a hand probe; the floors below are those that were computed by hand from it."


@pytest.mark.parametrize(("rows", "columns", "hand_ms"), [(45, 80, 993.0), (30, 53, 255.0)], ids=["720p", "480p"])
def test_hunyuanvideo_15_multiplies_what_its_architecture_says(rows, columns, hand_ms) -> None:
    """54 blocks of two streams at full size, 33 frames, 30 tokens of text, no padding."""
    length, text, width, layers = 9 * rows * columns, 30, 16 * 128, 54
    with torch.device("meta"), torch.no_grad():
        block = HunyuanVideo15TransformerBlock(16, 128, mlp_ratio=4.0, qk_norm="rms_norm")
        rotary = (torch.empty(length, 128), torch.empty(length, 128))
        inputs = (torch.empty(1, length, width), torch.empty(1, text, width), torch.empty(1, width))
        work = work_of(lambda: block(*inputs, torch.ones(1, text, dtype=torch.bool), rotary))
    by_hand_gemm = 2 * (length + text) * (4 * width**2 + 2 * width * 4 * width)  # q, k, v, out; two of the MLP
    by_hand_attention = 4 * width * (length + text) ** 2
    assert work.gemm_flops == pytest.approx(by_hand_gemm, rel=0.01)
    assert work.attention_flops == pytest.approx(by_hand_attention, rel=0.01)
    assert layers * floor_ms(work, H200) == pytest.approx(hand_ms, rel=0.02)


def test_wan_14b_multiplies_what_its_architecture_says() -> None:
    """The whole denoiser at 480x832, 81 frames: 40 blocks, self and cross attention, 512 tokens of text."""
    length, text, width, inner, layers = 21 * 30 * 52, 512, 40 * 128, 13824, 40
    with torch.device("meta"), torch.no_grad():
        model = diffusers.WanTransformer3DModel()
        latents, words = torch.empty(1, 16, 21, 60, 104), torch.empty(1, text, 4096)
        work = work_of(lambda: model(latents, torch.empty(1), words))
    per_token = 4 * width**2 + 2 * width**2 + 2 * width * inner  # self attention, q and out of cross attention, MLP
    by_hand_gemm = layers * 2 * (length * per_token + text * 2 * width**2)
    by_hand_attention = layers * 4 * width * length * (length + text)
    assert work.gemm_flops == pytest.approx(by_hand_gemm, rel=0.01)
    assert work.attention_flops == pytest.approx(by_hand_attention, rel=0.01)
    assert work.conv_flops == 2 * length * width * 16 * 4
    assert floor_ms(work, H200) == pytest.approx(2520.0, rel=0.01)


# --------------------------------------------------------------------------- as really called


def counted(name: str, **levers: str):
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    with undercrank.accelerate(pipe, **levers) as run, torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=1))  # its levers come on in the first call
        with first_step(run.rig) as works:
            pipe(**tiny_inputs(pipe, steps=3))
    return works


def test_both_branches_of_the_first_step_are_counted_and_no_later_step() -> None:
    conditional, unconditional = counted("wan2.1-1.3b")
    assert conditional.gemm_flops and conditional.attention_flops and conditional.conv_flops
    assert conditional == unconditional


def test_trimmed_text_is_counted_trimmed() -> None:
    stock, trimmed = (counted("hunyuanvideo-1.5-480p", text_trim=wish)[0] for wish in ("off", "on"))
    assert trimmed.attention_flops < stock.attention_flops and trimmed.gemm_flops < stock.gemm_flops


def test_compiled_code_is_stepped_around_while_it_is_counted() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)

    def compiled(*args, **kwargs):
        pytest.fail("compiled code shows no operations")

    blocks = pipe.transformer.blocks
    with undercrank.accelerate(pipe) as run:
        for block in blocks:
            block._compiled_call_impl = compiled
        with first_step(run.rig) as works, torch.no_grad():
            pipe(**tiny_inputs(pipe, steps=1))
        assert all(block._compiled_call_impl is compiled for block in blocks)
        for block in blocks:
            block._compiled_call_impl = None
    assert works[0] == counted("wan2.1-1.3b")[0]


# --------------------------------------------------------------------------- how fast


def test_rates_are_measured_at_the_heavy_shapes_and_at_a_square() -> None:
    layer, query = nn.Linear(64, 64), torch.randn(1, 2, 32, 16)
    with torch.no_grad():
        work = work_of(lambda: (layer(torch.randn(128, 64)), F.scaled_dot_product_attention(query, query, query)))
    drawn = torch.get_rng_state()
    found = rates(work, "cpu", "float32", square=32, samples=3)
    assert [rate.shape for rate in found.gemm] == ["128 x 64 x 64", "32 x 32 x 32"]
    assert only(found.attention).shape == "B1 H2 L32 S32 D16"
    for rate in (*found.gemm, *found.attention):
        assert 0 < rate.low <= rate.tflops <= rate.high and rate.n == 3
    assert found.gemm_tflops > 0 and floor_ms(work, found) > 0
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_kernel_that_does_not_serve_is_named_with_its_reason(monkeypatch) -> None:
    def refuse(*_):
        raise RuntimeError("no such chip\nand more")

    monkeypatch.setattr("undercrank.work._attention_kernels", lambda device: {"odd": refuse})
    query = torch.randn(1, 2, 8, 16)
    found = rates(work_of(lambda: F.scaled_dot_product_attention(query, query, query)), "cpu", "float32", square=8)
    assert found.refused == {"odd B1 H2 L8 S8 D16": "no such chip"} and found.attention == ()
