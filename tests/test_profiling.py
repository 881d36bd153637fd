"""Reading a trace of CUDA without a GPU, and the host's time outside the denoiser on one."""

from contextlib import ExitStack

import pytest
import torch

import undercrank
from undercrank.figures import Kernel
from undercrank.profiling import between_forwards, profile_of, profiled
from undercrank.testing import tiny_inputs, tiny_pipeline


def span(cat: str, name: str, ts: float, dur: float, correlation: int = 0) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    span("user_annotation", "undercrank.wait", 0, 1000),
    span("cuda_runtime", "cudaDeviceSynchronize", 10, 980),  # ours
    span("kernel", "early", 100, 500),  # before the loop
    span("cuda_runtime", "cudaLaunchKernel", 1000, 5),
    span("kernel", "gemm", 1100, 3000),
    span("kernel", "rope", 3900, 400),  # overlaps the former by 200
    span("gpu_user_annotation", "Torch-Compiled Region", 1100, 6000),  # no work of the device
    span("cuda_runtime", "cudaMemcpyAsync", 2000, 700, correlation=1),
    span("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 4300, 100, correlation=1),
    span("cuda_runtime", "cudaStreamSynchronize", 2700, 1800),
    span("cuda_runtime", "cudaMemcpyAsync", 5000, 50, correlation=2),
    span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5100, 100, correlation=2),
    span("cuda_runtime", "cudaFreeAsync", 5060, 70),
    span("user_annotation", "undercrank.hold_back", 6000, 2000),
    span("cuda_runtime", "cudaEventSynchronize", 6010, 1900),  # ours
    span("kernel", "gemm", 6000, 4500),  # runs on after the loop has ended
    span("user_annotation", "undercrank.wait", 9000, 1000),
    span("cuda_runtime", "cudaDeviceSynchronize", 9010, 980),  # ours
]


def test_the_loop_is_between_our_first_wait_and_our_last() -> None:
    profile = profile_of(EVENTS, steps=3)
    assert profile.loop_ms == 9.0 and profile.steps == 3


def test_the_device_is_busy_where_at_least_one_kernel_or_copy_runs() -> None:
    profile = profile_of(EVENTS, steps=3)
    assert profile.busy_ms == pytest.approx(3.2 + 0.1 + 0.1 + 4.0)
    assert profile.gpu_idle_share == pytest.approx(1 - 7.4 / 9.0)


def test_the_host_was_blocked_by_synchronising_and_by_copies_of_memory_that_is_not_pinned() -> None:
    profile = profile_of(EVENTS, steps=3)
    assert profile.blocked_by == {"cudaMemcpyAsync": 0.7, "cudaStreamSynchronize": 1.8}
    assert profile.cpu_blocked_ms == pytest.approx(2.5)


def test_kernels_are_summed_by_name_longest_first() -> None:
    assert profile_of(EVENTS, steps=3).kernels[:2] == (
        Kernel(name="gemm", ms=7.5, count=2),
        Kernel(name="rope", ms=0.4, count=1),
    )


def test_a_trace_that_torch_wrote_is_read(tmp_path) -> None:
    """Of a CPU: the file's form, with no kernel in it."""
    import json

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            with torch.profiler.record_function("undercrank.wait"):
                torch.ones(4).sum()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    profile = profile_of(json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"], steps=1)
    assert profile.loop_ms > 0 and profile.busy_ms == 0 and profile.kernels == ()


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_there_is_no_profile_without_cuda(pipe) -> None:
    with undercrank.accelerate(pipe) as run, profiled(run.rig) as found, torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=2))
    assert found == []


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("steps", "most", "seen"), [(3, 2, 2), (2, 20, 2)], ids=["cut short", "whole"])
def test_the_loop_is_traced_from_its_start_for_so_many_steps(pipe, monkeypatch, steps, most, seen) -> None:
    """On the CPU, where the trace holds no kernel: only its beginning and end are seen."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with undercrank.accelerate(pipe) as run, ExitStack() as stack, torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=1))
        with monkeypatch.context() as disguised:
            disguised.setattr(run.rig, "device", "cuda")
            found = stack.enter_context(profiled(run.rig, most_steps=most))
        pipe(**tiny_inputs(pipe, steps=steps))
        stack.close()
        assert run.rig.at_step == [] == run.rig.at_end
    (profile,) = found
    assert profile.steps == seen and profile.loop_ms > 0 and profile.kernels == ()


def test_host_time_is_taken_of_every_step_and_the_first_output_is_kept(pipe) -> None:
    with undercrank.accelerate(pipe) as run, between_forwards(run.rig) as seen, torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=2))
    assert len(seen.host_us) == 2 and all(us > 0 for us in seen.host_us)
    assert seen.first_output is not None and seen.first_output.dtype == torch.float32
    assert "forward" not in vars(pipe.transformer)


def test_time_inside_the_denoiser_is_not_host_time(pipe, monkeypatch) -> None:
    """By a clock of its own: each forward takes a second of it."""
    now = [0.0]
    monkeypatch.setattr("undercrank.profiling.time.perf_counter", lambda: now[0])
    inner = pipe.transformer.forward

    def slow(*args, **kwargs):
        now[0] += 1.0
        return inner(*args, **kwargs)

    step = pipe.scheduler.step

    def step_of_a_millisecond(*args, **kwargs):
        now[0] += 0.001
        return step(*args, **kwargs)

    monkeypatch.setattr(pipe.transformer, "forward", slow)
    monkeypatch.setattr(pipe.scheduler, "step", step_of_a_millisecond)
    with undercrank.accelerate(pipe) as run, between_forwards(run.rig) as seen, torch.no_grad():
        pipe(**tiny_inputs(pipe, steps=3))
    assert seen.host_us == pytest.approx([1000.0] * 3)
