"""What the scripts that time on a GPU have in common: their options, and rows that are kept as they come.

One failed row must not cost the others: its error is the row.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from undercrank.machine import this_machine


def options_of(story: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=story)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--rows", nargs="*", default=[], help="rows whose names begin so")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after this time")
    return parser


def kept(work: Callable[[], Any]) -> Any:
    """What it found, or how it failed."""
    try:
        return work()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc().splitlines()[-12:]}


def free() -> None:
    """What the last row left on the device must not lie in the next one's peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Story:
    """Rows by name, in one file that is whole after each of them."""

    def __init__(self, file: Path, seconds: float) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._until = file, time.monotonic() + seconds
        self.rows: dict[str, Any] = {"machine": this_machine().to_dict(), "torch": torch.__version__}

    def has_time_for(self, name: str) -> bool:
        """Says so where it has none."""
        if time.monotonic() <= self._until:
            return True
        print(f"{name}: not begun, the time is up", flush=True)
        return False

    def tell(self, name: str, work: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        self.rows[name] = kept(work) | {"took_s": round(time.perf_counter() - begun, 1)}
        print(name, json.dumps(self.rows[name])[:3000], flush=True)
        self._file.write_text(json.dumps(self.rows, indent=1))
