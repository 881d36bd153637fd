"""Looking into both sides of a comparison, on the CPU: the work, the host's time, the first forward."""

from dataclasses import replace

import pytest

import undercrank
from undercrank import bench
from undercrank.engine import Engine
from undercrank.lab import Lab, watched
from undercrank.profiling import between_forwards
from undercrank.records import Request
from undercrank.testing import differences, fingerprint, tiny_inputs, tiny_pipeline
from undercrank.work import first_step

NAME = "hunyuanvideo-1.5-480p"
STOCK = Request(
    prompt="a red ball", model=NAME, seed=1, width=64, height=64, num_frames=5, num_inference_steps=3,
    wishes=(("text_trim", "off"),),
)  # fmt: skip
TRIMMED = replace(STOCK, wishes=(("text_trim", "on"),))


@pytest.fixture(scope="module")
def compared():
    pipe = tiny_pipeline(NAME)
    pipe.set_progress_bar_config(disable=True)
    with Engine(pipe=pipe) as engine:
        engine.generate(STOCK)
    before = fingerprint(pipe)
    with Engine(pipe=pipe) as engine:
        comparison, rows = bench.compare(engine.generate, STOCK, TRIMMED, pairs=1, lab=Lab(engine))
        engine.generate(STOCK)  # a run that was cut short leaves the pipeline's own notes of where it was
    return comparison, rows, differences(before, fingerprint(pipe))


def test_each_side_shows_the_work_of_its_own_forwards(compared) -> None:
    looks = compared[0].looks
    assert [len(looks[side].works) for side in "AB"] == [2, 2]  # with guidance, and without
    assert looks["B"].works[0].attention_flops < looks["A"].works[0].attention_flops


def test_the_first_forwards_are_compared(compared) -> None:
    comparison, rows, _ = compared
    assert 0 <= comparison.forward_error < 1e-5
    assert rows[0].lever == "text_trim" and rows[0].distances["one_forward"] == comparison.forward_error
    assert "the first forward" in bench.in_words(comparison)


def test_without_a_device_there_is_no_floor_and_no_profile(compared) -> None:
    comparison, _, _ = compared
    assert comparison.rates is None and comparison.floor_ms("A") is None
    assert comparison.looks["A"].profile is None and len(comparison.looks["A"].host_us) == 3


def test_what_was_seen_travels_as_json(compared) -> None:
    comparison, _, _ = compared
    assert bench.Comparison.from_dict(comparison.to_dict()) == comparison


def test_looking_leaves_nothing_behind(compared) -> None:
    assert not compared[2]


def test_the_same_side_twice_has_an_equal_first_forward() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    asked = Request(
        prompt="a red ball", model="wan2.1-1.3b", seed=1, width=64, height=64, num_frames=5, num_inference_steps=2
    )
    with Engine(pipe=pipe) as engine:
        lab = Lab(engine)
        seen = [lab.look(asked) for _ in range(2)]
        assert lab.forward_error(*seen) == 0.0
        halved = replace(seen[1], first_output=seen[1].first_output / 2)
        assert lab.forward_error(seen[0], halved) == pytest.approx(0.5)


def test_a_watch_ends_the_run_when_it_has_seen_enough() -> None:
    pipe = tiny_pipeline("wan2.1-1.3b")
    pipe.set_progress_bar_config(disable=True)
    with undercrank.accelerate(pipe) as run:
        works = watched(run.rig, first_step, lambda: pipe(**tiny_inputs(pipe, steps=3)))
        assert len(works) == 2 and run.rig.step_index == 1
        between = watched(run.rig, between_forwards, lambda: pipe(**tiny_inputs(pipe, steps=10)))
        assert len(between.host_us) == run.rig.step_index == 8
