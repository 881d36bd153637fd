"""What a person sees while a clip is made: a bar per stage on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

STAGES = {"load": "load", "text": "read the prompt", "denoise": "denoise", "decode": "decode", "encode": "encode"}


class Loads(Protocol):
    """How far a load is, by its attributes."""

    state: str
    component: str

    def to_dict(self) -> dict[str, Any]: ...


class Progressed(Protocol):
    """An event of the engine, by its attributes: this module needs no torch."""

    stage: str
    done: int
    total: int
    unit: str
    step_ms: float | None
    eta_s: float | None
    loading: Loads | None


Show = Callable[[Any], None]


@contextmanager
def showing(*, as_json: bool, quiet: bool) -> Iterator[Show]:
    """A listener for the engine's events, in the form that fits where the output goes."""
    if as_json:
        yield lambda event: print_json({"event": "progress", **_fields(event)})
    elif quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield _plain_lines()


@contextmanager
def _bars() -> Iterator[Show]:
    columns = (TextColumn("{task.description:>16}"), BarColumn(bar_width=32), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        tasks: dict[str, TaskID] = {}

        def show(event: Progressed) -> None:
            if event.stage not in tasks:
                tasks[event.stage] = progress.add_task(STAGES[event.stage], total=event.total, words="")
            progress.update(tasks[event.stage], completed=event.done, total=event.total, words=words(event))
            _finish_earlier(progress, tasks, event.stage)

        yield show
        for task in tasks.values():
            progress.update(task, completed=progress.tasks[task].total)


def _finish_earlier(progress: Progress, tasks: dict[str, TaskID], stage: str) -> None:
    """A stage that reports no end has ended when the next one begins."""
    for name, task in tasks.items():
        if name != stage:
            progress.update(task, completed=progress.tasks[task].total)


def _plain_lines() -> Show:
    """One line when a stage begins, and about ten lines of a long loop."""
    last = ""

    def show(event: Progressed) -> None:
        nonlocal last
        if event.stage == "denoise" and event.done:
            every = max(1, event.total // 10)
            if event.done % every and event.done != event.total:
                return
        elif event.stage in ("encode", "load") and 0 < event.done < event.total:
            return
        elif (event.stage == "text" and event.done) or (event.stage == "load" and not event.total):
            return  # it has ended, or it has not begun
        line = f"{STAGES[event.stage]} {words(event, plain=True)}".rstrip()
        if line != last:
            say(line)
        last = line

    return show


def words(event: Progressed, *, plain: bool = False) -> str:
    """ "12/25  0.21 s/step  2.7 s left", "20.1/29.2 MB  placing vae". plain: a line for each state would be many."""
    if event.unit == "bytes":
        megabytes = f"{event.done / 1e6:.1f}/{event.total / 1e6:.1f} MB" if event.total else ""
        if plain or event.loading is None:
            return megabytes
        return f"{megabytes}  {event.loading.state} {event.loading.component}".strip()
    if event.unit == "":
        return ""
    text = f"{event.done}/{event.total}"
    if event.step_ms is not None:
        text += f"  {event.step_ms / 1000:.2f} s/step"
    if event.eta_s is not None and event.done < event.total:
        text += f"  {event.eta_s:.1f} s left"
    return text


def _fields(event: Progressed) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in ("stage", "done", "total", "unit", "step_ms", "eta_s")}
    return fields if event.loading is None else fields | {"loading": event.loading.to_dict()}


def print_json(value: dict[str, Any]) -> None:
    put(json.dumps(value, ensure_ascii=True, allow_nan=False))


def say(line: str) -> None:
    """To the person, not into the data: standard error."""
    _write(line, sys.stderr)


def put(line: str) -> None:
    """Into the data: standard output."""
    _write(line, sys.stdout)


def _write(line: str, stream: TextIO) -> None:
    """A reader who has gone (`| head -1`) does not cost the clip: what follows goes nowhere."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def cited(rows: Sequence[str]) -> str:
    """The rows behind a decision, as `undercrank ledger show` takes them."""
    return f" [{', '.join(rows)}]" if rows else ""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """A table on standard output, as wide as the terminal, or unwrapped in a pipe."""
    grid = Table(*headings, title=title, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        grid.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    console.print(grid)
