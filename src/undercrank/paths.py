"""Schedules that were searched for and tried: which steps of so many to compute, kept for the runs after it.

A path is found by looking at finished latents (`searching.py`), which takes many runs; reading it takes none. Paths are
JSON lines: those of the embedded model come with the package, the user's own lie beside the curves. Each names the
weights it was found for, so that no path is ever used for others. Floor 1: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path as File

from undercrank import lines
from undercrank.records import BadInput, Record
from undercrank.schedules import Schedule
from undercrank.settings import settings


@dataclass(frozen=True, kw_only=True)
class Path(Record):
    """One schedule for both branches of guidance, and how it did on the films that it was searched on."""

    source: str
    "searched, or searched here"
    checkpoint: str
    "Fingerprint of the denoiser's weights, as they lay in memory."
    family: str
    dtype: str
    scheduler: str
    "Class name and shift."
    denoiser: str
    steps: int
    levels: tuple[float, ...]
    "Noise at the start of each step, as a share of all."
    budget: int
    "Computed steps."
    schedule: str
    "A 1 for each computed step and a 0 for each skipped one."
    error: float
    "Relative error of the finished latents against every step computed: geometric mean over the films."
    rule_error: float | None = None
    "The same of the best schedule of as many computed steps that MagCache's rule gave at any of its settings."
    films: int
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    width: int
    height: int
    num_frames: int
    guidance_scale: float
    forwards: int
    "Computed forwards of one film and branch that the whole search for these steps took."

    def __post_init__(self) -> None:
        if len(self.levels) != self.steps:
            raise BadInput(f"a path of {self.steps} steps has one level for each", field="levels")
        if set(self.schedule) - {"0", "1"} or len(self.schedule) != self.steps:
            raise BadInput(f"a path of {self.steps} steps has one digit for each, 0 or 1", field="schedule")
        if self.schedule.count("1") != self.budget or not self.schedule.startswith("1"):
            raise BadInput(f"a path of budget {self.budget} computes so many steps, and the first", field="schedule")

    @property
    def computes(self) -> Schedule:
        return tuple(digit == "1" for digit in self.schedule)


def find(
    paths: Iterable[Path], *, checkpoint: str, dtype: str, scheduler: str, denoiser: str, levels: Sequence[float]
) -> Mapping[int, Schedule]:
    """The paths of these weights for steps at these levels of noise, by budget; of several the newest."""
    wanted = (checkpoint, dtype, scheduler, denoiser)
    return {
        path.budget: path.computes
        for path in paths
        if wanted == (path.checkpoint, path.dtype, path.scheduler, path.denoiser) and _are_alike(path.levels, levels)
    }


def _are_alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """A pipeline may be given sigmas of its own: as many steps are not the same steps."""
    return len(a) == len(b) and all(abs(x - y) <= 0.001 for x, y in zip(a, b, strict=True))


def read_paths() -> tuple[Path, ...]:
    """Those of the package, then those of this user. A broken line is named, not skipped."""
    folder = resources.files("undercrank") / "evidence" / "paths"
    shipped = sorted(File(str(entry)) for entry in folder.iterdir()) if folder.is_dir() else []
    files = [*(file for file in shipped if file.suffix == ".jsonl"), own_file()]
    return tuple(path for file in files if file.exists() for path in _paths(file))


def own_file() -> File:
    return settings().calibrations.with_name("paths.jsonl")


def append(paths: Iterable[Path], file: File | None = None) -> None:
    """Add paths to the user's file."""
    lines.append(paths, file or own_file())


def _paths(file: File) -> list[Path]:
    text = file.read_text(encoding="utf-8", errors="replace")
    return lines.read(text, Path.from_dict, name=str(file), kind="searched path")
