"""The floor: work over rates; and the small sums over a profile and a trace."""

import pytest

from undercrank import figures
from undercrank.figures import Attention, Gemm, Kernel, Profile, Rate, Rates, Work
from undercrank.records import Trace


def rate(tflops: float) -> Rate:
    return Rate(kernel="k", shape="s", tflops=tflops, low=tflops, high=tflops, n=3)


RATES = Rates(device="chip", dtype="bfloat16", gemm=(rate(500.0), rate(800.0)), attention=(rate(600.0), rate(550.0)))


def test_the_floor_is_work_over_the_best_rate_of_its_kind() -> None:
    work = Work(
        gemms=(Gemm(batch=1, m=10**6, n=1000, k=400, count=2),),
        attentions=(Attention(b=1, h=3, l=10**5, s=10**5, d=10),),
        conv_flops=8 * 10**11,
    )
    assert work.gemm_flops == 16 * 10**11 and work.attention_flops == 12 * 10**11
    assert figures.floor_ms(work, RATES) == pytest.approx(24e11 / 800e12 * 1000 + 12e11 / 600e12 * 1000)


def test_work_without_attention_needs_no_rate_of_attention() -> None:
    none = Rates(device="chip", dtype="bfloat16", gemm=(rate(1.0),), attention=())
    assert figures.floor_ms(Work(gemms=(Gemm(batch=1, m=500, n=1000, k=1000),)), none) == pytest.approx(1.0)


def test_the_table_of_kernels_holds_shares_of_all_kernels() -> None:
    kernels = (Kernel(name="a", ms=6.0, count=1), Kernel(name="b", ms=3.0, count=1), Kernel(name="c", ms=1.0, count=1))
    profile = Profile(steps=1, loop_ms=20.0, busy_ms=10.0, cpu_blocked_ms=0.0, kernels=kernels)
    assert figures.kernel_table(profile, top=2) == [("a", 6.0, 0.6), ("b", 3.0, 0.3)]
    assert profile.gpu_idle_share == 0.5


def test_the_first_step_does_not_count_as_host_time_of_a_step() -> None:
    def trace(*host_us: float) -> Trace:
        return Trace(stage_s={}, step_ms=(), stalls=None, host_us=host_us)

    assert figures.host_step_us(trace(900.0, 10.0, 30.0)) == 20.0
    assert figures.host_step_us(trace()) is None


def test_figures_travel_as_json() -> None:
    assert Rates.from_dict(RATES.to_dict()) == RATES
