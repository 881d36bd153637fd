"""Measured rows: append, look up. "What did this cost in a case like this, how surely?"

Rows are JSON lines. The package ships `evidence/*.jsonl`; what is measured on this machine is appended to the
user's own file (`UNDERCRANK_LEDGER`). A row is never edited: a later one of the same case stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from undercrank import lines
from undercrank.paths import Path as SearchedPath
from undercrank.paths import read_paths
from undercrank.ratios import Curve, read_curves
from undercrank.records import BadInput, Case, Measurement, Plan
from undercrank.settings import settings

HERE = "measured here"


class Ledger:
    """A set of rows, read once."""

    def __init__(
        self,
        rows: Iterable[Measurement] = (),
        curves: Callable[[], Iterable[Curve]] = tuple,
        paths: Callable[[], Iterable[SearchedPath]] = tuple,
    ) -> None:
        """curves, paths: asked anew at each plan, since a run may have measured some."""
        self.rows = tuple(rows)
        self._curves, self._paths = curves, paths

    def runs_like(self, case: Case) -> tuple[Measurement, ...]:
        """Whole runs of this model on this kind of device, the nearest shape first."""
        rows = [
            row
            for row in self.rows
            if row.lever is None and row.family == case.family.id and row.step_ms is not None
            and row.device == case.device.name and row.dtype == case.dtype
        ]  # fmt: skip
        return tuple(sorted(rows, key=lambda row: abs(_pixels(row) - _pixels(case))))

    def of_lever(self, lever: str, case: Case, setting: str = "") -> tuple[Measurement, ...]:
        """Rows that compare this lever, at this setting, with its absence, for this model."""
        return tuple(
            row for row in self.rows if row.lever == lever and row.family == case.family.id and row.setting == setting
        )

    def denied(self, lever: str, case: Case, setting: str) -> tuple[Measurement, ...]:
        """Rows that deny this setting for this model, or a part of it."""
        words = set(setting.split())
        return tuple(
            row
            for row in self.rows
            if row.verdict == "denied" and row.lever == lever and row.family == case.family.id
            and set(row.setting.split()) <= words
        )  # fmt: skip

    def floor_for(self, plan: Plan) -> Measurement | None:
        """The newest row that holds a rounding floor for this model, size, dtype and number of steps."""
        asked = plan.request
        wanted = (plan.load.family, plan.load.dtype, asked.width, asked.height, asked.num_frames,
                  asked.num_inference_steps)  # fmt: skip
        found = [
            row
            for row in self.rows
            if row.floor
            and wanted == (row.family, row.dtype, row.width, row.height, row.num_frames, row.num_inference_steps)
        ]
        return found[-1] if found else None

    def is_calibrated(self, family: str, dtype: str) -> bool:
        """Has a checkpoint of this family been measured here for step_cache, in this dtype?"""
        return any(curve.family == family and curve.dtype == dtype for curve in self._curves())

    def searched_budgets(self, family: str, dtype: str, steps: int) -> tuple[int, ...]:
        """For how many computed steps of so many a path was searched for, on a checkpoint of this family."""
        wanted = (family, dtype, steps)
        return tuple(sorted({p.budget for p in self._paths() if wanted == (p.family, p.dtype, p.steps)}))


def read_ledger(path: Path | None = None) -> Ledger:
    """The shipped rows and the user's own. A broken line in the user's file is named, not skipped."""
    shipped = [row for file in _shipped() for row in _rows(file.read_text(encoding="utf-8"), file.name)]
    own = path or settings().ledger
    rows = [*shipped, *_rows(_text(own), str(own))] if own.exists() else shipped
    return Ledger(rows, read_curves, read_paths)


def append(row: Measurement, path: Path | None = None) -> None:
    """Add one row to the user's ledger."""
    lines.append([row], path or settings().ledger)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no ledger: {error}; move it away") from error


def _shipped() -> list[Path]:
    folder = resources.files("undercrank") / "evidence"
    if not folder.is_dir():
        return []
    return sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".jsonl"))


def _rows(text: str, name: str) -> list[Measurement]:
    return lines.read(text, _row, name=name, kind="ledger row")


def _row(data: dict[str, Any]) -> Measurement:
    row = Measurement.from_dict(data)
    for count in (row.width, row.height, row.num_frames, row.num_inference_steps, row.n):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{count} is no count")
    times = [value for value in (row.step_ms, row.total_s, row.gain) if value is not None]
    if not all(_is_finite(value) and value > 0 for value in times):
        raise ValueError("times and gains are finite numbers above 0")
    if not all(_is_finite(value) for value in (*row.distances.values(), *row.floor.values())):
        raise ValueError("distances are finite numbers")
    return row


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _pixels(shape: Measurement | Case) -> int:
    return shape.width * shape.height * shape.num_frames
