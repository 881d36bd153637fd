"""Searched schedules: kept, found again for the weights they are of, and never used for others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from undercrank import paths
from undercrank.ledger import Ledger
from undercrank.paths import Path
from undercrank.prompts import SEARCHED_ON, SET_UP, TOY
from undercrank.records import BadInput

PATH = Path(
    source="searched here", checkpoint="a" * 32, family="flipbook", dtype="float32", scheduler="Euler, shift 3",
    denoiser="transformer", steps=8, levels=(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), budget=5, schedule="11010011",
    error=0.01, rule_error=0.02, films=2,
    prompts=("a", "b"), seeds=(1, 2), width=64, height=64, num_frames=5, guidance_scale=5.0, forwards=100,
)  # fmt: skip
OF = {
    "checkpoint": "a" * 32, "dtype": "float32", "scheduler": "Euler, shift 3", "denoiser": "transformer",
    "levels": PATH.levels,
}  # fmt: skip


def test_paths_come_back_as_they_were_kept_after_those_of_the_package() -> None:
    shipped = paths.read_paths()
    other = dataclasses.replace(PATH, budget=4, schedule="11000011")
    paths.append([PATH, other])
    assert paths.read_paths() == (*shipped, PATH, other)


def test_a_line_that_a_crash_tore_does_not_swallow_the_next_one() -> None:
    paths.append([PATH])
    whole = paths.own_file().read_bytes()
    paths.own_file().write_bytes(whole.rstrip(b"\n"))
    paths.append([PATH])
    assert paths.own_file().read_bytes() == whole + whole


def test_a_path_is_found_by_its_budget_and_the_newest_wins() -> None:
    newer = dataclasses.replace(PATH, schedule="11100011")
    found = paths.find([PATH, dataclasses.replace(PATH, budget=4, schedule="11000011"), newer], **OF)
    assert found == {5: newer.computes, 4: (True, True, False, False, False, False, True, True)}


@pytest.mark.parametrize(
    "change",
    [{name: "other"} for name in OF if name != "levels"]
    + [{"levels": PATH.levels[1:]}, {"levels": (*PATH.levels[:-1], 0.29)}],
)
def test_a_path_of_anything_else_is_never_used(change: dict[str, Any]) -> None:
    assert paths.find([PATH], **(OF | change)) == {}


@pytest.mark.parametrize(
    "change",
    [{"schedule": "1101001"}, {"schedule": "1101002x"}, {"schedule": "01110011"}, {"budget": 4}, {"levels": (1.0,)}],
)
def test_a_schedule_that_is_not_what_the_row_says_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        dataclasses.replace(PATH, **change)


@pytest.mark.parametrize("line", ["{", "{}", '{"steps": 3}'])
def test_a_broken_line_is_named_and_not_skipped(line: str) -> None:
    paths.append([PATH])
    with paths.own_file().open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BadInput, match=r"line 2 is no searched path .*remove the line"):
        paths.read_paths()


def test_the_ledger_tells_the_budgets_of_a_family_and_a_number_of_steps() -> None:
    ledger = Ledger(paths=lambda: [PATH, dataclasses.replace(PATH, budget=4, schedule="11000011")])
    assert ledger.searched_budgets("flipbook", "float32", 8) == (4, 5)
    assert ledger.searched_budgets("flipbook", "bfloat16", 8) == ledger.searched_budgets("flipbook", "float32", 9) == ()


def test_no_film_of_a_search_is_one_that_a_lever_is_judged_by() -> None:
    searched = set(SEARCHED_ON[True])
    assert not searched & set(TOY) and SET_UP[True] not in searched
    for path in paths.read_paths():
        assert not set(path.prompts) & set(TOY)
