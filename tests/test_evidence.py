"""What the package ships as measured stands on the page that people read."""

from pathlib import Path

import pytest

from undercrank.ledger import read_ledger
from undercrank.records import Measurement

PAGE = (Path(__file__).parent.parent / "docs" / "evidence.md").read_text(encoding="utf-8")
MEASURED = [
    row
    for row in read_ledger(Path("no such file")).rows
    if row.device == "NVIDIA H200" and row.lever and "docs/evidence/" not in row.note
]


def test_there_are_measured_rows() -> None:
    assert {row.lever for row in MEASURED} >= {"host_sync", "text_trim", "compile"}


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.family} {row.lever} {row.id}")
def test_each_measured_step_stands_on_the_page(row: Measurement) -> None:
    assert row.step_ms is not None
    figures = {f"{row.step_ms:.0f}", f"{row.step_ms:.1f}"}
    assert any(f"| {figure} " in PAGE for figure in figures), figures
