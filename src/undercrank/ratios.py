"""What an uncached run tells of a checkpoint, kept for the runs after it: one curve for each branch of a denoiser.

Curves are JSON lines in the user's data folder (`UNDERCRANK_CALIBRATIONS`). Each names the weights it was taken of, so
that no curve is ever used for others. A curve is never edited: a later one of the same case stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from undercrank import lines
from undercrank.records import BadInput, Record
from undercrank.schedules import check_ratios
from undercrank.settings import settings

HERE = "calibrated here"


@dataclass(frozen=True, kw_only=True)
class Curve(Record):
    """One branch of one denoiser over the steps of one run. All lists have one entry a step."""

    source: str
    checkpoint: str
    "Fingerprint of the denoiser's weights, as they lay in memory."
    family: str
    repo: str
    revision: str | None = None
    dtype: str
    scheduler: str
    "Class name and shift."
    denoiser: str
    branch: str
    levels: tuple[float, ...]
    "Noise at the start of each step, falling: timestep over training steps, which is sigma in flow matching."
    ratios: tuple[float, ...]
    "Mean over tokens of |residual| over |residual one step before|; the first is 1."
    drifts: tuple[float, ...]
    """Mean over tokens of |change of the residual since one step before| over |output of the stack|; the first is 0.
    The change that both branches of guidance do not share counts by the scale of guidance, and is in the curves of
    both."""
    floor: float | None = None
    """Rounding: how far one forward in the middle moves, relative to its output, when its input moves by one unit in
    the last place of the weights' dtype."""
    tokens: int = 0
    "Length of the sequence that was measured."

    def __post_init__(self) -> None:
        check_ratios(self.ratios)
        if not len(self.levels) == len(self.ratios) == len(self.drifts):
            raise BadInput(
                f"a curve of {len(self.levels)} levels has {len(self.ratios)} ratios and {len(self.drifts)} drifts",
                field="ratios",
            )

    @property
    def steps(self) -> int:
        return len(self.ratios)

    def is_of(self, other: Identity) -> bool:
        return all(getattr(self, name) == getattr(other, name) for name in Identity.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Identity(Record):
    """What a curve must have been taken of to be used."""

    checkpoint: str
    dtype: str
    scheduler: str
    denoiser: str
    branch: str


def find(curves: Iterable[Curve], identity: Identity, steps: int) -> Curve | None:
    """The curve of these weights for a run of so many steps: of as many steps, else the finest, else the newest.

    A curve of fewer than half the steps is too coarse to read between its points.
    """
    fitting = [curve for curve in curves if curve.is_of(identity) and 2 * curve.steps >= steps]
    return max(reversed(fitting), key=lambda curve: (curve.steps == steps, curve.steps), default=None)


def read_curves(path: Path | None = None) -> tuple[Curve, ...]:
    """Every curve of this user. A broken line is named, not skipped."""
    file = path or settings().calibrations
    if not file.exists():
        return ()
    text = file.read_text(encoding="utf-8", errors="replace")
    return tuple(lines.read(text, Curve.from_dict, name=str(file), kind="calibration"))


def append(curves: Iterable[Curve], path: Path | None = None) -> None:
    """Add curves to the user's file."""
    lines.append(curves, path or settings().calibrations)
