"""Rows of the ledger are listed, narrowed and said in words; a slip in an id is answered with what is near."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.commands import run
from tests.test_ledger import a_row
from undercrank.explaining import HEADINGS, as_table, find, in_words, none_fit, select
from undercrank.ledger import append
from undercrank.records import BadInput, Measurement


def lossy(**fields: Any) -> Measurement:
    return a_row(
        **{
            "id": "cache-18", "lever": "step_cache", "setting": "budget=18", "source": "measured here", "gain": 1.6,
            "distances": {"psnr_db": 50.4, "st_lpips_alex": 0.004}, "floor": {"psnr_db": 51.8, "st_lpips_alex": 0.006},
            "prompts": ("a fox", "a dog"), "seeds": (1, 2), "ranges": {"psnr_db": (53.0, 47.0)},
            "floor_of": "bfloat16 against float32", "calibrated_on": ("a cat, seed 9001",),
        }
        | fields
    )  # fmt: skip


ROWS = [
    a_row(id="run"),
    a_row(id="run-gpu", device="NVIDIA H200", source="measured"),
    lossy(),
    lossy(id="other", family="flipbook"),
]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ({}, ["run", "run-gpu", "cache-18", "other"]),
        ({"lever": "step_cache"}, ["cache-18", "other"]),
        ({"lever": "none"}, ["run", "run-gpu"]),
        ({"family": "flipbook"}, ["other"]),
        ({"machine": "h200"}, ["run-gpu"]),
        ({"source": "measured here", "family": "wan"}, ["cache-18"]),
        ({"family": "nothing"}, []),
    ],
)
def test_rows_are_narrowed(words: dict[str, str], ids: list[str]) -> None:
    assert [row.id for row in select(ROWS, **words)] == ids


def test_where_no_row_fits_it_is_said_by_what_they_can_be_asked_for() -> None:
    more = "undercrank verify and undercrank bench --keep write some"
    there_are = "there are some of the levers none, step_cache and of the models flipbook, wan2.1-14b"
    assert none_fit(ROWS) == f"no such rows: {there_are}; {more}"
    assert none_fit([]) == f"no such rows: {more}"


def test_a_row_is_found_by_its_id_or_how_it_begins() -> None:
    assert find(ROWS, "run").id == "run" and find(ROWS, "cache").id == "cache-18"
    with pytest.raises(BadInput, match="several rows begin with 'ru': run, run-gpu"):
        find(ROWS, "ru")
    with pytest.raises(BadInput, match="no row 'cahe-18': cache-18"):
        find(ROWS, "cahe-18")
    with pytest.raises(BadInput, match="the ledger is empty"):
        find([], "x")


def test_a_table_has_a_cell_under_each_heading() -> None:
    rows = as_table(ROWS)
    assert all(len(row) == len(HEADINGS) for row in rows)
    cells = dict(zip(HEADINGS, rows[2], strict=True))
    assert (cells["lever"], cells["gain"], cells["psnr_db"]) == ("step_cache budget=18", "1.60x", "50.4")


def test_a_row_in_words_says_distance_direction_floor_and_films() -> None:
    text = in_words(lossy())
    for words in (
        "the lever step_cache (budget=18) on wan2.1-14b",
        "the loop without it took 1.600 times as long",
        "PSNR: 50.4 dB (higher is nearer), films from 47 to 53; outside the rounding floor of 51.8",
        "ST-LPIPS (alex): 0.004 0 is equal (lower is nearer); inside the rounding floor of 0.006",
        "prompts: a fox; a dog", "seeds: 1, 2", "set up on: a cat, seed 9001; none of the films",
        "floor of: bfloat16 against float32",
    ):  # fmt: skip
        assert words in text, text


def test_a_row_in_words_says_what_the_planner_makes_of_it() -> None:
    assert "  faithful: yes" in in_words(lossy())
    far = in_words(lossy(distances={"st_lpips_alex": 0.02}))
    assert "  faithful: no, " in far and "  quality: no, " in far and "  balanced: yes" in far
    assert "let it engage" not in in_words(a_row()) and "engage by itself" not in in_words(lossy(distances={}))


def test_a_row_without_distances_or_of_an_unknown_model_is_still_said() -> None:
    assert "film: no distance was measured" in in_words(lossy(distances={}))
    assert "engage" not in in_words(lossy(family="unknown:SomePipeline"))
    assert "source: random weights: it says something of time" in in_words(a_row(source="random weights"))


def test_the_command_lists_shows_and_answers_in_json(monkeypatch: Any, capsys: Any) -> None:
    append(lossy())
    code, out, _ = run(monkeypatch, capsys, "ledger", "--source", "measured here")
    assert code == 0 and "cache-18" in out
    code, out, _ = run(monkeypatch, capsys, "ledger", "--lever", "step_cache", "--family", "wan2.1-14b", "--json")
    assert [row["id"] for row in json.loads(out)["rows"]] == ["cache-18"]
    code, out, _ = run(monkeypatch, capsys, "ledger", "show", "cache-18")
    assert code == 0 and "the lever step_cache" in out
    code, out, _ = run(monkeypatch, capsys, "ledger", "show", "cache-18", "--json")
    assert Measurement.from_dict(json.loads(out)["row"]) == lossy()
    code, out, err = run(monkeypatch, capsys, "ledger", "show", "nothing-like-it")
    assert code == 2 and out == "" and "no row" in err
    code, out, err = run(monkeypatch, capsys, "ledger", "--family", "nothing")
    assert code == 0 and out == "" and "no such rows: there are some of the levers compile," in err
