"""One run that measures a checkpoint, and what it keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from undercrank import cli, paths, ratios
from undercrank.calibrate import calibrate, find_paths
from undercrank.engine import Engine
from undercrank.prompts import SET_UP_SEED, TOY
from undercrank.records import BadInput, Request

SMALL: dict[str, Any] = {"width": 64, "height": 64, "num_frames": 5, "num_inference_steps": 6}


@pytest.fixture
def engine() -> Any:
    with Engine() as engine:
        yield engine


def test_a_calibration_keeps_a_curve_of_each_branch_with_its_identity(engine: Engine) -> None:
    found = calibrate(engine, Request(**SMALL))
    assert found.curves == ratios.read_curves()
    assert [(c.denoiser, c.branch, c.steps) for c in found.curves] == [
        ("transformer", "cond", 6), ("transformer", "uncond", 6)
    ]  # fmt: skip
    for curve in found.curves:
        assert curve.family == "flipbook" and curve.dtype == "float32" and curve.source == ratios.HERE
        assert len(curve.checkpoint) == 32 and "flipbook" in curve.repo and "UniPC" in curve.scheduler
        assert curve.levels == tuple(sorted(curve.levels, reverse=True)) and curve.levels[0] <= 1
        assert curve.floor is not None and 0 < curve.floor < 1e-4
        assert curve.ratios[0] == 1 and curve.drifts[0] == 0 and all(drift > 0 for drift in curve.drifts[1:])


def test_it_films_what_no_lever_is_judged_by(engine: Engine) -> None:
    found = calibrate(engine, Request(**SMALL))
    assert found.prompt not in TOY and found.seed == SET_UP_SEED


def test_measuring_again_adds_a_curve_and_changes_none(engine: Engine) -> None:
    first = calibrate(engine, Request(**SMALL))
    second = calibrate(engine, Request(**SMALL | {"num_inference_steps": 12}))
    assert ratios.read_curves() == (*first.curves, *second.curves)
    assert [curve.steps for curve in second.curves] == [12, 12]


def test_after_it_the_next_run_skips(engine: Engine) -> None:
    calibrate(engine, Request(**SMALL | {"num_inference_steps": 12}))
    request = Request(prompt="a red ring", seed=1, fidelity="quality", **SMALL | {"num_inference_steps": 12})
    clip = engine.generate(request)
    decision = next(d for d in clip.report.plan.decisions if d.lever == "step_cache")
    assert decision.chosen == "quality" and "calibrated here, distance not measured" in decision.reason
    assert "0" in "".join(clip.report.trace.schedules.values())


def test_the_command_prints_what_each_preset_would_compute(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", "flipbook", "--size", "64x64", "--frames", "5", "--steps", "6"]
    cli.app(arguments, standalone_mode=False)
    words = capsys.readouterr().out
    assert "cond" in words and "of 6" in words and "calibrations.jsonl" in words
    cli.app([*arguments, "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["event"] == "done" and len(told["calibration"]["curves"]) == 2


def test_a_search_keeps_a_path_for_each_preset_and_the_next_run_takes_it(engine: Engine) -> None:
    request = Request(**SMALL | {"num_inference_steps": 12})
    shipped = paths.read_paths()
    found = find_paths(engine, request, films=1, rows=64)
    assert paths.read_paths() == (*shipped, *found)
    assert [path.budget for path in found] == [7, 5, 4]
    assert all(path.prompts[0] not in TOY and path.rule_error is not None for path in found)
    clip = engine.generate(
        Request(prompt="a red ring", seed=1, fidelity="quality", **SMALL | {"num_inference_steps": 12})
    )
    decision = next(d for d in clip.report.plan.decisions if d.lever == "step_cache")
    assert decision.chosen == "searched quality"
    assert set(clip.report.trace.schedules.values()) == {found[0].schedule}


@pytest.mark.parametrize(
    ("films", "steps", "match"), [(9, 12, "at most 8"), (1, 2, "2 steps: too few"), (1, 1, "1 steps: too few")]
)
def test_a_search_that_cannot_be_had_is_refused_before_anything_is_filmed(
    engine: Engine, films: int, steps: int, match: str
) -> None:
    with pytest.raises(BadInput, match=match):
        find_paths(engine, Request(**SMALL | {"num_inference_steps": steps}), films=films)
    assert engine.rig is None
