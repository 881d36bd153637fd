"""On a CUDA device: each kernel against torch's own choice, in two threads, in a CUDA graph, and in films."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from undercrank.families import family
from undercrank.levers.attention import KERNELS, Attention, _operator, _route_to, misfit
from undercrank.levers.compile import Compile
from undercrank.levers.text_trim import TextTrim
from undercrank.rig import Rig
from undercrank.testing import tiny_inputs, tiny_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = [row.name for row in KERNELS if row.package is None]
KERNEL_OF = {
    "cudnn": "cudnn",
    "flash": "flash_fwd",
    "efficient": "fmha_cutlass",
}
"A part of the name of the device code that each row runs."


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    row = next(row for row in KERNELS if row.name == request.param)
    if reason := misfit(row, "cuda", torch.cuda.get_device_capability(), "bfloat16"):
        pytest.skip(reason)
    return row.name


def qkv(tokens: int = 2048, keys: int | None = None, width: int = 128, heads: int = 4) -> list[torch.Tensor]:
    """Bfloat16 (batch, heads, tokens, width), as views of (batch, tokens, heads, width), as diffusers has them."""
    random = torch.Generator("cuda").manual_seed(tokens)
    lengths = (tokens, keys or tokens, keys or tokens)
    return [
        torch.randn(1, length, heads, width, generator=random, device="cuda").bfloat16().transpose(1, 2)
        for length in lengths
    ]


def error(truth: torch.Tensor, other: torch.Tensor) -> float:
    return float((truth.float() - other.float()).norm() / truth.float().norm())


@pytest.mark.parametrize(("tokens", "keys", "width"), [(2048, None, 128), (1000, 77, 64), (33, 512, 128), (515, 1, 64)])
def test_a_kernel_is_as_near_to_float32_as_torchs_own(name: str, tokens: int, keys: int | None, width: int) -> None:
    query, key, value = qkv(tokens, keys, width)
    truth = scaled_dot_product_attention(query.float(), key.float(), value.float())
    stock = scaled_dot_product_attention(query, key, value)
    own = _operator(name)(query, key, value, None)
    assert error(truth, own) < 1.25 * error(truth, stock) + 1e-6 and error(stock, own) < 1e-2


def test_the_scale_is_heeded(name: str) -> None:
    query, key, value = qkv(256)
    stock = scaled_dot_product_attention(query, key, value, scale=0.5)
    assert error(stock, _operator(name)(query, key, value, 0.5)) < 1e-2


def test_the_kernel_that_is_named_is_the_kernel_that_runs(name: str) -> None:
    query, key, value = qkv()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile, _route_to(name)():
        scaled_dot_product_attention(query, key, value)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any(KERNEL_OF[name] in each.lower() for each in names), names


def test_two_threads_run_different_kernels_at_once() -> None:
    """torch's flags for kernels hold for the whole process; the choice made here does not."""
    kinds = [name for name in ("cudnn", "flash") if name in NAMES]
    tensors = qkv(512)
    alone = {}
    for name in kinds:
        with _route_to(name)():
            alone[name] = scaled_dot_product_attention(*tensors)
    assert not torch.equal(*alone.values())
    wrong, barrier = [], threading.Barrier(len(kinds))

    def work(name: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), _route_to(name)():
            barrier.wait()
            for _ in range(200):
                if not torch.equal(scaled_dot_product_attention(*tensors), alone[name]):
                    wrong.append(name)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(name,)) for name in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_can_be_captured_in_a_graph(name: str) -> None:
    query, key, value = qkv(512)
    with _route_to(name)():
        for _ in range(3):
            eager = scaled_dot_product_attention(query, key, value)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = scaled_dot_product_attention(query, key, value)
    query.copy_(other := torch.randn_like(query))
    graph.replay()
    torch.cuda.synchronize()
    assert error(captured, eager) > 0.1
    assert torch.equal(captured, _operator(name)(other, key, value, None))


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("model", ["wan2.1-1.3b", "hunyuanvideo-1.5-480p", "cogvideox-2b", "mochi"])
def test_a_film_is_stocks_to_the_rounding(name: str, model: str, backend: str | None) -> None:
    pipe = tiny_pipeline(model).to("cuda", torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    rig = Rig(pipe, family(model), "cuda:0")
    stock = film(rig, [])
    levers: list[Any] = [TextTrim()] if "hunyuan" in model else []
    levers += [Attention(kernel=name), *([Compile(backend=backend)] if backend else [])]
    moved = film(rig, levers)
    assert torch.isfinite(moved).all() and error(stock, moved) < 5e-2


def film(rig: Rig, levers: list[Any]) -> torch.Tensor:
    with ExitStack() as stack, torch.no_grad():
        for lever in levers:
            stack.enter_context(lever.engage(rig))
        with rig.seams(), rig.call():
            frames = rig.pipe(**tiny_inputs(rig.pipe, steps=2)).frames
        complaints = [each for lever in levers for each in lever.verify(rig, None)]
    assert [each for each in complaints if "head dim" not in each and "no effect" not in each] == []
    return frames
