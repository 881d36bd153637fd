"""Records as JSON lines in a file of the user's: added whole, read one by one. Floor 1: no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from undercrank.records import BadInput, Record

T = TypeVar("T")


def append(records: Iterable[Record], file: Path) -> None:
    """Add them at the end; one `write` call, so that two processes do not mix their lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = _missing_newline(file) + "".join(record.to_json() + "\n" for record in records)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, lines.encode())
    finally:
        os.close(descriptor)


def read(text: str, made: Callable[[Any], T], *, name: str, kind: str) -> list[T]:
    """What `made` makes of each line's JSON. Raises BadInput that names a broken line: none is skipped."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            found.extend([made(json.loads(line))] if line.strip() else [])
        except (BadInput, TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"{name}, line {number} is no {kind} ({error}); remove the line") from error
    return found


def _missing_newline(file: Path) -> str:
    """A last line that was torn by a crash must not swallow the next one."""
    if not file.exists() or file.stat().st_size == 0:
        return ""
    with file.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        return "" if opened.read(1) == b"\n" else "\n"
