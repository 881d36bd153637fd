"""Trials in a batch are what the same schedules do alone; a search keeps what it saw to be best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from undercrank import families, schedules
from undercrank.engine import accelerate
from undercrank.levers.trials import Trial
from undercrank.records import LeverRefused
from undercrank.rig import Rig
from undercrank.schedules import Schedule
from undercrank.searching import Films, Tries, candidates, improve, measure_gaps, search, typical
from undercrank.testing import fingerprint, tiny_pipeline

STEPS = 8
FILMS = Films(
    prompts=("a red ring", "a blue square grows"), seeds=(1, 2), width=32, height=32, num_frames=5,
    num_inference_steps=STEPS, guidance_scale=5.0, rows=5,
)  # fmt: skip


def made(name: str = "wan2.1-1.3b") -> Any:
    pipe = tiny_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe() -> Any:
    return made()


@pytest.fixture
def rig(pipe: Any) -> Iterator[Rig]:
    family = dataclasses.replace(families.family("wan2.1-1.3b"), max_sequence_length=16, negative_prompt="")
    rig = Rig(pipe, family, "cpu")
    with rig.seams():
        yield rig


def plan(digits: str) -> Schedule:
    return tuple(digit == "1" for digit in digits)


def alone(pipe: Any, film: int, schedule: str | None) -> torch.Tensor:
    """The finished latents of one film by itself, under a mask of step_cache."""
    knobs = {"transformer_cache": "off"} if schedule is None else {"transformer_cache_mask": schedule}
    with accelerate(pipe, "fast", host_sync="off", text_trim="off", compile="off", **knobs):
        return pipe(
            prompt=FILMS.prompts[film], negative_prompt="", generator=torch.Generator().manual_seed(FILMS.seeds[film]),
            num_inference_steps=STEPS, guidance_scale=5.0, height=32, width=32, num_frames=5, max_sequence_length=16,
            output_type="latent",
        ).frames  # fmt: skip


def test_a_trial_in_a_batch_errs_as_its_schedule_does_alone(pipe: Any) -> None:
    plans = ("11001011", "10011101", "11111101", "11111111")
    expected = {}
    for film in (0, 1):
        whole = alone(pipe, film, None)
        for digits in plans:
            other = alone(pipe, film, digits)
            expected[digits, film] = float((other - whole).norm() / whole.norm())
    family = dataclasses.replace(families.family("wan2.1-1.3b"), max_sequence_length=16, negative_prompt="")
    rig = Rig(pipe, family, "cpu")
    with rig.seams():
        found = Tries(rig, FILMS).errors([plan(digits) for digits in plans])
    for digits in plans[:3]:
        for film in (0, 1):
            assert expected[digits, film] > 1e-4
            assert found[plan(digits)][film] == pytest.approx(expected[digits, film], rel=1e-2)
    assert max(found[plan("11111111")]) == 0.0


def test_steps_before_the_first_skip_cost_nothing(rig: Rig) -> None:
    tries = Tries(rig, FILMS)
    before = tries.forwards
    tries.errors([plan("11111001")], [0])  # the step before the skips is computed again, and the last one
    assert tries.forwards - before == 2 * 2
    tries.errors([plan("11111001")], [0])  # known by now
    assert tries.forwards - before == 2 * 2
    assert Trial(film=0, schedule=plan("11111001")).works_from() == 4


def test_a_search_leaves_the_pipeline_as_it_was(pipe: Any) -> None:
    before = fingerprint(pipe)
    rig = Rig(pipe, dataclasses.replace(families.family("wan2.1-1.3b"), max_sequence_length=16), "cpu")
    with rig.seams():
        Tries(rig, FILMS).errors([plan("11111001")])
    after = fingerprint(pipe)
    assert {key: after[key] for key in before if "block" in key} == {
        key: before[key] for key in before if "block" in key
    }


def test_what_is_kept_is_the_best_of_all_that_was_tried(rig: Rig) -> None:
    ratios = (1.0, *[1.02] * (STEPS - 1))
    (path,) = search(rig, FILMS, [5], rule=lambda rule: schedules.magcache(ratios, rule), measured_on=1)
    assert path.budget == path.schedule.count("1") == 5 and path.steps == STEPS and path.films == 2
    assert path.rule_error is not None and path.error <= path.rule_error
    tries = Tries(rig, FILMS)
    tried = tries.errors([path.computes, *schedules.moved(path.computes)])
    assert typical(tried[path.computes]) == pytest.approx(path.error, rel=1e-3)
    assert min(typical(errors) for errors in tried.values()) >= path.error * 0.999
    gaps = measure_gaps(tries, STEPS, [0])
    assert all(typical(tries.errors([one])[one]) >= path.error * 0.999 for one in candidates(gaps, STEPS, 5))


def test_moving_a_step_never_makes_it_worse(rig: Rig) -> None:
    tries = Tries(rig, FILMS)
    start = plan("11000011")
    found, error = improve(tries, start)
    assert sum(found) == sum(start) and found[0] and found[-1]
    assert error <= typical(tries.errors([start])[start])


@pytest.mark.parametrize(("name", "why"), [("cogvideox-2b", "both branches"), ("wan2.2-a14b", "two experts")])
def test_a_model_that_cannot_be_searched_is_refused_with_the_reason(name: str, why: str) -> None:
    rig = Rig(made(name), families.family(name), "cpu")
    with rig.seams(), pytest.raises(LeverRefused, match=why):
        Tries(rig, FILMS)
