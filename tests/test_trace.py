"""What a trace says is what happened."""

import time
import warnings
from collections import Counter

import pytest
import torch

from tests.test_rig import FAMILY, Toy
from undercrank.rig import Rig
from undercrank.trace import Event, Tracer, cuda_stalls


@pytest.fixture
def rig():
    return Rig(Toy(), FAMILY, "cpu")


def traced(rig, run):
    events: list[Event] = []
    tracer = Tracer(rig, events.append)
    with rig.seams(), rig.call(), tracer.watching():
        run()
    return tracer.trace(load_s=1.5, load_bytes=7), events


def test_steps_calls_and_loading_are_in_the_trace(rig):
    trace, _ = traced(rig, lambda: rig.pipe(steps=4))
    assert len(trace.step_ms) == trace.computed_steps == 4 and trace.calls == {"cond": 4, "uncond": 4}
    assert trace.stage_s["load"] == 1.5 and trace.load_bytes == 7 and trace.peak_bytes > 2**20


def test_stages_share_out_the_whole_call(rig):
    def run():
        time.sleep(0.02)
        rig.pipe(steps=2)
        time.sleep(0.02)

    trace, _ = traced(rig, run)
    assert trace.stage_s["text"] >= 0.02 and trace.stage_s["decode"] >= 0.02
    assert trace.stage_s["denoise"] * 1000 >= sum(trace.step_ms) * 0.99


def test_on_a_cpu_stalls_are_unknown_not_zero(rig):
    trace, _ = traced(rig, lambda: rig.pipe(steps=1))
    assert trace.stalls is None


def test_on_a_cpu_the_host_has_no_time_of_its_own(rig):
    trace, _ = traced(rig, lambda: rig.pipe(steps=2))
    assert trace.host_us == ()


def test_what_levers_counted_is_in_the_trace_of_their_run(rig):
    def run():
        rig.pipe(steps=1)
        rig.count("compile.ms", 1500)

    trace, _ = traced(rig, run)
    assert trace.counters == {"compile.ms": 1500}
    assert traced(rig, lambda: rig.pipe(steps=1))[0].counters == {}


def test_time_in_which_we_hold_the_host_back_is_not_its_own(rig, monkeypatch):
    """A device by stand-in: a step takes the host 10 ms, and holding it back 1 s."""
    now = [0.0]
    monkeypatch.setattr("undercrank.trace.time.perf_counter", lambda: now[0])
    tracer = Tracer(rig)

    def hold_back(steps):
        now[0] += 1.0

    monkeypatch.setattr(tracer._clock, "hold_back", hold_back)
    with rig.call(), tracer.watching():
        rig._start(3)
        for _ in range(3):
            now[0] += 0.01
            rig._step(1)
        rig._end(None)
    assert tracer._host_us == pytest.approx([10_000.0] * 3)


def test_events_come_in_the_order_of_the_work(rig):
    _, events = traced(rig, lambda: rig.pipe(steps=2))
    assert [(e.stage, e.done) for e in events] == [
        ("text", 0), ("text", 1), ("denoise", 0), ("denoise", 1), ("denoise", 2), ("decode", 0),
    ]  # fmt: skip
    assert events[3].step_ms is not None and events[3].eta_s is not None and events[4].eta_s == 0


def test_a_failed_run_announces_no_decode(rig):
    events: list[Event] = []
    tracer = Tracer(rig, events.append)
    with pytest.raises(ZeroDivisionError), rig.seams(), rig.call(), tracer.watching():
        rig.pipe(fail_at=1)
    assert events[-1].stage == "denoise" and len(tracer.trace().step_ms) == 1


def test_the_tracer_takes_its_callbacks_away(rig):
    traced(rig, lambda: rig.pipe(steps=1))
    assert rig.at_start == rig.at_step == rig.at_end == []


def test_sync_warnings_are_counted_by_line_and_others_pass(monkeypatch):
    """CUDA itself is not here: its mode is a stand-in, the warnings are those that it would give."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    counts: Counter[str] = Counter()
    shown = warnings.showwarning
    with pytest.warns(UserWarning, match="another"), cuda_stalls(counts):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally ...)", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert list(counts.values()) == [3] and modes == ["warn", 0] and warnings.showwarning is shown
