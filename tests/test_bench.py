"""A against B: the order, the ratio of each pair, the verdict, and what the films lost."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from undercrank import bench
from undercrank.figures import Attention, Gemm, Kernel, Look, Profile, Rate, Rates, Work
from undercrank.records import BadInput, Fidelity, Request

A = Request(prompt="a ball", seed=1, wishes=(("host_sync", "off"),))
B = replace(A, wishes=(("host_sync", "on"),))


def stand_in(seconds: dict[str, list[float]], shift: int = 0):
    """A renderer that takes the given seconds, side by side, and whose B is `shift` of 255 brighter."""
    log: list[str] = []

    def make(request: Request):
        side = "A" if request is A else "B"
        log.append(side)
        loop_s = seconds[side][log.count(side) - 1]
        trace = SimpleNamespace(
            stage_s={"load": 9.0, "text": 0.5, "denoise": loop_s, "decode": 0.5},
            step_ms=(loop_s * 500, loop_s * 500),
            stalls=40 if side == "A" else 0,
            peak_bytes=2**30,
            stall_sites={"pipeline.py:7": 40} if side == "A" else {},
            host_us=(9000.0, 2000.0) if side == "A" else (),
            counters={"compile.ms": 3500} if side == "B" else {},
        )
        frames = np.full((2, 4, 4, 3), 100 + (shift if side == "B" else 0), np.uint8)
        plan = SimpleNamespace(levers=[SimpleNamespace(name="host_sync")] if side == "B" else [])
        report = SimpleNamespace(trace=trace, frames_hash=f"{frames[0, 0, 0, 0]}", plan=plan)
        return SimpleNamespace(frames_FHWC=frames, report=report)

    return make, log


@pytest.fixture(autouse=True)
def no_row(monkeypatch):
    monkeypatch.setattr(bench, "as_row", lambda comparison, film, lever: lever)


def test_the_runs_go_a_b_b_a_after_one_untimed_run_of_each():
    make, log = stand_in({"A": [5.0, 2.0, 2.2], "B": [9.0, 1.0, 1.1]})
    comparison, rows = bench.compare(make, A, B)
    assert "".join(log) == "AB" + "ABBA" and [run.side for run in comparison.runs] == list("ABBA")
    assert comparison.warm_up_s == pytest.approx({"A": 2.9, "B": 7.95})
    assert rows == ("host_sync",)


def test_the_ratio_is_a_over_b_in_both_orders():
    make, _ = stand_in({"A": [5.0, 2.0, 3.0], "B": [9.0, 1.0, 1.0]})
    comparison, _ = bench.compare(make, A, B)
    assert comparison.ratios == pytest.approx((2.0, 3.0)) and comparison.ratio == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("ratios", "noise", "words"),
    [
        ((1.2, 1.3), 0.02, "B is faster: 1.250x"),
        ((0.5, 0.4), 0.02, "A is faster: 2.222x"),
        ((1.01, 1.012), 0.05, "inside the noise"),
        ((1.2, 0.9), 0.01, "inside the noise"),
    ],
)
def test_a_difference_counts_when_every_pair_agrees_and_it_is_larger_than_the_noise(ratios, noise, words):
    assert words in bench.verdict(ratios, noise)


def test_equal_films_are_told_apart_from_different_ones():
    same, _ = bench.compare(stand_in({"A": [1.0] * 3, "B": [1.0] * 3})[0], A, B)
    other, _ = bench.compare(stand_in({"A": [1.0] * 3, "B": [1.0] * 3}, shift=5)[0], A, B)
    assert same.same_frames and same.psnr_db is None and "bit for bit" in bench.in_words(same)
    assert other.max_abs == 5 and other.psnr_db == pytest.approx(34.15, abs=0.01)
    assert "at most 5 of 255" in bench.in_words(other)


def test_a_side_that_does_not_repeat_itself_is_told_of():
    make, _ = stand_in({"A": [1.0] * 3, "B": [1.0] * 3})
    hashes = iter("abcdef")

    def unsteady(request):
        film = make(request)
        film.report.frames_hash = next(hashes)
        return film

    comparison, _ = bench.compare(unsteady, A, B)
    assert not comparison.repeats_itself and "not deterministic" in bench.in_words(comparison)


@pytest.mark.parametrize(
    "other", [{"num_inference_steps": 9}, {"seed": 2}, {"prompt": "a square"}, {"width": 64}, {"model": "mochi"}]
)
def test_two_different_clips_are_not_compared(other):
    with pytest.raises(BadInput, match=next(iter(other))):
        bench.compare(lambda request: pytest.fail("ran"), A, replace(B, **other))


def test_fidelity_may_differ_and_a_seed_must_be_given():
    bench.refuse_apples_and_pears(A, replace(B, fidelity=Fidelity.EXACT))
    with pytest.raises(BadInput, match="seed"):
        bench.refuse_apples_and_pears(replace(A, seed=None), replace(B, seed=None))


def test_no_pair_is_no_comparison():
    with pytest.raises(BadInput, match="at least 1"):
        bench.compare(lambda request: pytest.fail("ran"), A, B, pairs=0)


def test_every_timed_run_is_printed():
    make, _ = stand_in({"A": [5.0, 2.0, 2.25], "B": [9.0, 1.0, 1.125]})
    text = bench.in_words(bench.compare(make, A, B)[0])
    for word in ("run 1 A: loop 2.000 s", "run 4 A: loop 2.250 s", "stalls 40", "stalls 0", "2.000, 2.000"):
        assert word in text


def test_what_compiling_took_and_where_the_host_stalled_are_told_apart_by_side():
    make, _ = stand_in({"A": [5.0, 2.0, 2.25], "B": [9.0, 1.0, 1.125]})
    comparison, _ = bench.compare(make, A, B)
    assert comparison.compile_s == {"B": 3.5} and comparison.stall_sites == {"A": {"pipeline.py:7": 40}, "B": {}}
    assert [run.host_us for run in comparison.runs] == [2000.0, None, None, 2000.0]
    text = bench.in_words(comparison)
    for words in ("of that, compiling: B 3.5 s", "stalls of A: 40 at pipeline.py:7", "host 2.0 ms a step"):
        assert words in text


class StandInLab:
    """B has half of A's work."""

    def look(self, request):
        n = 1000 if request is A else 500
        work = Work(
            gemms=(Gemm(batch=1, m=10**6, n=n, k=500),),
            attentions=(Attention(b=1, h=1, l=10**4, s=10**4, d=n // 4),),
            conv_flops=0,
        )
        profile = Profile(
            steps=2, loop_ms=20.0, busy_ms=16.0, cpu_blocked_ms=3.25, blocked_by={"cudaStreamSynchronize": 3.25},
            kernels=(Kernel(name="nvjet_tst", ms=12.0, count=4), Kernel(name="rope", ms=4.0, count=4)),
        )  # fmt: skip
        return SimpleNamespace(look=Look(works=(work, work), profile=profile, host_us=(900.0, 100.0, 120.0)))

    def rates(self, looks):
        one = Rate(kernel="gemm", shape="x", tflops=10.0, low=9.0, high=11.0, n=5)
        best = Rate(kernel="cudnn", shape="x", tflops=1.0, low=1.0, high=1.0, n=5)
        return Rates(device="chip", dtype="bfloat16", gemm=(one,), attention=(best,), refused={"flash x": "too old"})

    def forward_error(self, a, b):
        return 0.004


def test_each_row_shows_its_time_over_the_floor_of_its_own_side():
    make, _ = stand_in({"A": [5.0, 2.0, 2.0], "B": [9.0, 1.0, 1.0]})
    comparison, _ = bench.compare(make, A, B, lab=StandInLab())
    # two forwards of 10^12 / 10^13 s and 10^11 / 10^12 s; B half of it
    assert comparison.floor_ms("A") == pytest.approx(400.0) and comparison.floor_ms("B") == pytest.approx(200.0)
    assert comparison.gpu_idle_share("A") == pytest.approx(1 - 8 / 1000)
    text = bench.in_words(comparison)
    for words in (
        "run 1 A: loop 2.000 s, 1000.0 ms a step, 2.500x its floor",
        "B, floor of a step: 200.0 ms; 2.500x",
        "CPU blocked 3.25 ms (cudaStreamSynchronize 3.25)",
        "GPU idle: 98.4%",
        "75.0%      12.00 ms  nvjet_tst",
        "host outside the denoiser: 110 us a step",
        "gemm x: 10.0 (9.0 to 11.0, n 5)",
        "flash x: does not serve here: too old",
        "first forward differs by 4.00e-03",
    ):
        assert words in text, text
    assert bench.Comparison.from_dict(comparison.to_dict()) == comparison


def test_without_a_lab_nothing_is_said_of_a_floor():
    make, _ = stand_in({"A": [5.0, 2.0, 2.0], "B": [9.0, 1.0, 1.0]})
    comparison, _ = bench.compare(make, A, B)
    assert comparison.floor_ms("A") is None and comparison.gpu_idle_share("A") is None
    assert "floor" not in bench.in_words(comparison) and "first forward" not in bench.in_words(comparison)
