"""Curves of a checkpoint: kept, read, found for the right weights only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undercrank import ratios
from undercrank.ratios import Curve, Identity, find
from undercrank.records import BadInput
from undercrank.settings import settings

CURVE = Curve(
    source=ratios.HERE, checkpoint="c", family="f", repo="r", revision="v", dtype="bfloat16", scheduler="S, shift 5",
    denoiser="transformer", branch="cond", levels=(1.0, 0.6, 0.2), ratios=(1.0, 1.1, 1.05), drifts=(0.0, 0.2, 0.1),
    floor=1e-3, tokens=12,
)  # fmt: skip
IDENTITY = Identity(
    checkpoint="c", dtype="bfloat16", scheduler="S, shift 5", denoiser="transformer", branch="cond"
)  # fmt: skip


def longer(steps: int, **other: Any) -> Curve:
    levels = tuple(1 - step / steps for step in range(steps))
    return replace(CURVE, levels=levels, ratios=(1.0,) * steps, drifts=(0.0,) * steps, **other)


def test_curves_come_back_as_they_were_kept_in_order() -> None:
    ratios.append([CURVE])
    ratios.append([replace(CURVE, branch="uncond"), CURVE])
    assert ratios.read_curves() == (CURVE, replace(CURVE, branch="uncond"), CURVE)


def test_they_lie_beside_the_ledger_unless_said_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().calibrations == settings().ledger.with_name("calibrations.jsonl")
    monkeypatch.setenv("UNDERCRANK_CALIBRATIONS", str(tmp_path / "own.jsonl"))
    ratios.append([CURVE])
    assert (tmp_path / "own.jsonl").exists() and ratios.read_curves() == (CURVE,)


@pytest.mark.parametrize("name", Identity.__dataclass_fields__)
def test_a_curve_of_anything_else_is_never_used(name: str) -> None:
    assert find([CURVE], IDENTITY, 3) == CURVE
    assert find([CURVE], replace(IDENTITY, **{name: "another"}), 3) is None


def test_the_curve_of_as_many_steps_is_taken_then_the_finest_then_the_newest() -> None:
    twenty, thirty, newer = longer(20), longer(30), longer(30, tokens=99)
    curves = [thirty, twenty, newer]
    assert find(curves, IDENTITY, 20) == twenty
    assert find(curves, IDENTITY, 25) == newer and find(curves, IDENTITY, 8) == newer
    assert find([longer(20)], IDENTITY, 41) is None and find([longer(20)], IDENTITY, 40) is not None


@pytest.mark.parametrize(
    "change", [{"ratios": (1.0, 1.1)}, {"drifts": (0.0,)}, {"levels": (1.0,)}, {"ratios": (1.0, 0.0, 1.0)}]
)
def test_a_curve_that_is_too_short_or_no_ratio_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        replace(CURVE, **change)


@pytest.mark.parametrize("line", ["{", "[]", '{"source": 1}', CURVE.to_json().replace("1.05", "null")])
def test_a_broken_line_is_named_and_not_skipped(line: str) -> None:
    ratios.append([CURVE])
    with settings().calibrations.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BadInput, match="line 2 is no calibration"):
        ratios.read_curves()
