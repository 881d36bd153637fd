"""On a CUDA device: a floor below every time, waits that host_sync takes away, kernels with names."""

from dataclasses import replace

import pytest
import torch

from undercrank import bench
from undercrank.engine import Engine
from undercrank.figures import Gemm, Work
from undercrank.lab import Lab
from undercrank.records import Request
from undercrank.work import rates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STOCK = Request(
    prompt="a red ball rolls left", seed=1, device="cuda", num_inference_steps=6, wishes=(("host_sync", "off"),)
)


@pytest.fixture(scope="module")
def comparison():
    with Engine() as engine:
        found, _ = bench.compare(
            engine.generate, STOCK, replace(STOCK, wishes=(("host_sync", "on"),)), pairs=1, lab=Lab(engine)
        )
    print(bench.in_words(found))
    return found


def test_no_step_is_faster_than_its_floor(comparison) -> None:
    for side in "AB":
        assert 0 < comparison.floor_ms(side) < comparison.step_ms(side)


def test_host_sync_takes_the_waits_away(comparison) -> None:
    stock, fast = (comparison.looks[side].profile for side in "AB")
    assert stock.steps == fast.steps == 6
    assert fast.cpu_blocked_ms < stock.cpu_blocked_ms, (stock.blocked_by, fast.blocked_by)
    assert fast.cpu_blocked_ms < 5, fast.blocked_by
    assert comparison.forward_error == 0.0


def test_the_device_is_busy_some_of_the_time_and_its_kernels_have_names(comparison) -> None:
    for side in "AB":
        profile = comparison.looks[side].profile
        assert 0 < profile.busy_ms <= profile.loop_ms
        assert profile.kernels and all(kernel.name and kernel.ms > 0 for kernel in profile.kernels)
        assert not any("undercrank" in kernel.name for kernel in profile.kernels)
        assert 0 <= comparison.gpu_idle_share(side) < 1


def test_host_time_of_a_step_is_told(comparison) -> None:
    assert all(run.host_us is not None and run.host_us > 0 for run in comparison.runs)
    assert len(comparison.looks["B"].host_us) == 6


def test_a_large_product_reaches_a_good_part_of_the_chip() -> None:
    found = rates(Work(gemms=(Gemm(batch=1, m=32768, n=2048, k=2048),)), "cuda", "bfloat16")
    assert [rate.shape for rate in found.gemm] == ["32768 x 2048 x 2048", "8192 x 8192 x 8192"]
    assert found.gemm_tflops > 20
