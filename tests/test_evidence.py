"""What the package ships as measured stands on the page that people read."""

import re
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
    assert {row.lever for row in MEASURED} >= {"host_sync", "text_trim", "compile", "quantize", "decode", "offload"}


def its_ms(row: Measurement) -> float:
    """Of a step; where a row is of no step, the last figure before the note's first semicolon."""
    if row.step_ms is not None:
        return row.step_ms
    return float(re.findall(r"([\d.]+) ms", row.note.split(";")[0])[-1])


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.family} {row.lever} {row.id}")
def test_each_measured_step_stands_on_the_page(row: Measurement) -> None:
    figures = {f"{its_ms(row):.0f}", f"{its_ms(row):.1f}"}
    assert any(f"| {figure} " in PAGE for figure in figures), figures
