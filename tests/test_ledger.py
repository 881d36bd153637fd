"""Rows are appended, read back and found again; a broken line is named."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undercrank import families, ledger
from undercrank.ledger import Ledger, append, read_ledger
from undercrank.records import BadInput, Case, Device, Machine, Measurement

FAMILY = families.family("wan2.1-14b")
GPU = Device(kind="cuda", name="GPU")
CASE = Case(
    family=FAMILY, machine=Machine(name="m", devices=(GPU,), cpu_count=1), device=GPU, width=1280, height=720,
    num_frames=81, num_inference_steps=50, guidance_scale=5.0, dtype="bfloat16",
)  # fmt: skip


def a_row(**fields: Any) -> Measurement:
    row = Measurement(
        id="r", family=FAMILY.id, lever=None, source="measured", machine="m", device="GPU", versions={"torch": "2"},
        width=1280, height=720, num_frames=81, num_inference_steps=50, dtype="bfloat16", n=3, step_ms=1000.0,
    )  # fmt: skip
    return replace(row, **fields)


SHIPPED = ledger._shipped
SOURCES = {"measured here", "measured", "published", "random weights"}


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_shipped", list)


def test_what_is_appended_is_read_back_in_order(own_ledger: Path) -> None:
    rows = [a_row(id=str(number), note="\u732b\u2028\nx") for number in range(3)]
    for row in rows:
        append(row)
    assert list(read_ledger().rows) == rows
    assert len(own_ledger.read_bytes().splitlines()) == 3


def test_a_path_may_be_given_and_its_folder_is_made(tmp_path: Path, own_ledger: Path) -> None:
    path = tmp_path / "a" / "b" / "rows.jsonl"
    append(a_row(), path)
    assert read_ledger(path).rows == (a_row(),)
    assert not own_ledger.exists()


def test_a_ledger_is_private_to_write_and_no_program() -> None:
    append(a_row())
    mode = ledger.settings().ledger.stat().st_mode
    assert not mode & (stat.S_IWOTH | stat.S_IWGRP | stat.S_IXUSR)


def test_no_ledger_is_an_empty_ledger() -> None:
    assert read_ledger().rows == ()


def test_shipped_rows_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped.jsonl"
    shipped.write_text(a_row(id="shipped").to_json() + "\n\n")
    monkeypatch.setattr(ledger, "_shipped", lambda: [shipped])
    append(a_row(id="own"))
    assert [row.id for row in read_ledger().rows] == ["shipped", "own"]


@pytest.mark.parametrize("line", ["{", "[]", "3", "null", '{"id": "r"}', '"text"'])
def test_a_broken_line_is_named_with_its_file_and_number(own_ledger: Path, line: str) -> None:
    own_ledger.write_text(f"{a_row().to_json()}\n\n{line}\n")
    with pytest.raises(BadInput, match=r"ledger\.jsonl, line 3 is no ledger row .*remove the line"):
        read_ledger()


def test_a_row_with_an_unknown_field_is_named(own_ledger: Path) -> None:
    own_ledger.write_text(a_row().to_json().replace('"note"', '"nota"') + "\n")
    with pytest.raises(BadInput, match=r"line 1 .*Measurement has no field nota"):
        read_ledger()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_is_named(own_ledger: Path, number: str) -> None:
    own_ledger.write_text(a_row().to_json().replace("1000.0", number) + "\n")
    with pytest.raises(
        BadInput, match="line 1 is no ledger row .times and gains are finite numbers above 0.; remove the line"
    ):
        read_ledger()


@pytest.mark.parametrize("field", ["width", "height", "num_frames", "num_inference_steps"])
@pytest.mark.parametrize("value", [0, -16])
def test_a_ledger_line_of_an_empty_shape_is_refused_when_it_is_read(own_ledger: Path, field: str, value: int) -> None:
    own_ledger.write_text(a_row(**{field: value}).to_json() + "\n")
    with pytest.raises(BadInput, match="line 1 is no ledger row .* is no count.; remove the line"):
        read_ledger()


def test_a_ledger_of_one_pixel_and_one_step_is_read(own_ledger: Path) -> None:
    row = a_row(width=1, height=1, num_frames=1, num_inference_steps=1)
    own_ledger.write_text(row.to_json() + "\n")
    assert read_ledger().rows == (row,)


def test_a_file_that_is_no_text_is_no_ledger(own_ledger: Path) -> None:
    own_ledger.write_bytes(b"\xff\xfe\n")
    with pytest.raises(BadInput, match=r"ledger\.jsonl is no ledger: .*; move it away"):
        read_ledger()


def test_a_line_that_a_crash_tore_does_not_swallow_the_next_row(own_ledger: Path) -> None:
    own_ledger.write_text('{"id": "to')
    append(a_row())
    assert own_ledger.read_text().splitlines() == ['{"id": "to', a_row().to_json()]
    with pytest.raises(BadInput, match="line 1 is no ledger row"):
        read_ledger()


@pytest.mark.parametrize("before", ["", "\n"])
def test_a_ledger_that_ends_well_gets_no_empty_line(own_ledger: Path, before: str) -> None:
    own_ledger.write_text(before)
    append(a_row())
    append(a_row())
    assert own_ledger.read_text() == before + 2 * (a_row().to_json() + "\n")


def test_lines_of_many_writers_do_not_mix() -> None:
    def write(name: str) -> None:
        for number in range(20):
            append(a_row(id=f"{name}-{number}", note=name * 3000))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = read_ledger().rows
    assert sorted(row.id for row in rows) == sorted(f"{name}-{number}" for name in "abcd" for number in range(20))


def test_whole_runs_are_found_with_the_nearest_shape_first() -> None:
    far, near, same = a_row(id="far", width=128), a_row(id="near", num_frames=77), a_row(id="same")
    assert Ledger([far, near, same]).runs_like(CASE) == (same, near, far)


@pytest.mark.parametrize(
    "other",
    [{"lever": "host_sync"}, {"family": "flipbook"}, {"device": "CPU"}, {"dtype": "float32"}, {"step_ms": None}],
)
def test_a_run_of_something_else_is_not_a_run_like_this(other: dict[str, Any]) -> None:
    assert Ledger([a_row(**other)]).runs_like(CASE) == ()


def test_rows_of_a_lever_are_found_by_lever_and_family() -> None:
    mine = a_row(lever="crush")
    rows = Ledger([mine, a_row(lever="other"), a_row(), a_row(lever="crush", family="flipbook")])
    assert rows.of_lever("crush", CASE) == (mine,)


def test_a_package_without_measured_rows_ships_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ledger.resources, "files", lambda package: tmp_path)
    assert SHIPPED() == []


def test_the_shipped_rows_are_sound_and_none_claims_to_be_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_shipped", SHIPPED)
    rows = read_ledger().rows
    assert len({row.id for row in rows}) == len(rows)
    assert {row.source for row in rows} <= SOURCES - {ledger.HERE}
    assert all(row.machine and row.device and row.versions and row.n >= 1 for row in rows)
    assert {row.family for row in rows} <= {family.id for family in families.FAMILIES}


@pytest.mark.parametrize(
    ("old", "new"),
    [("1000.0", "1e999"), ("1000.0", '"fast"'), ("1000.0", "-5"), ('"width": 1280', '"width": 1280.5')],
)
def test_a_line_of_impossible_figures_is_refused(own_ledger: Path, old: str, new: str) -> None:
    text = a_row().to_json()
    assert old in text
    own_ledger.write_text(text.replace(old, new) + "\n")
    with pytest.raises(BadInput, match="line 1"):
        read_ledger()


def test_a_line_that_nests_for_ever_is_refused(own_ledger: Path) -> None:
    own_ledger.write_text("[" * 100_000 + "\n")
    with pytest.raises(BadInput, match="line 1"):
        read_ledger()
