"""`undercrank compare A B`: two files -> a table of distances with units and direction."""

from __future__ import annotations

from pathlib import Path

from undercrank import screen
from undercrank.metrics import METRICS, metric_named, shown
from undercrank.records import BadInput, Distance, FidelityReport

KINDS = ("auto", "frames", "latents")


def check_question(a: Path, b: Path, *, metrics: tuple[str, ...], kind: str) -> None:
    """Refuse what can be refused without reading a file: a slip is answered at once."""
    for name in metrics:
        if name not in METRICS:
            raise BadInput(f"no metric {name!r}: choose {', '.join(METRICS)}", field="metric")
    if kind not in KINDS:
        raise BadInput(f"kind {kind!r}: choose {', '.join(KINDS)}", field="kind")


def show_comparison(a: Path, b: Path, *, metrics: tuple[str, ...], kind: str, key: str | None, as_json: bool) -> None:
    """Read both, compare, print. Raises NotFound, and BadInput where no distance is defined."""
    report = compare_files(a, b, metrics=metrics, kind=kind, key=key)
    if as_json:
        screen.print_json({"event": "done", "report": report.to_dict()})
        return
    print_report(report)


def compare_files(
    a: Path, b: Path, *, metrics: tuple[str, ...] = (), kind: str = "auto", key: str | None = None
) -> FidelityReport:
    """How far the film or the latents in file B are from those in file A."""
    from undercrank.footage import read_footage
    from undercrank.quality import compare_frames, compare_latents

    first, second = (read_footage(path, kind=kind, key=key) for path in (a, b))
    names = {"a": str(a), "b": str(b)} if first.name == second.name else {"a": first.name, "b": second.name}
    if first.kind != second.kind:
        raise BadInput(f"{names['a']} holds {first.kind}, {names['b']} holds {second.kind}: compare two of one kind")
    if first.kind == "latents":
        if len(first.tensors) != len(second.tensors):
            counts = f"{len(first.tensors)} and {len(second.tensors)}"
            raise BadInput(f"the trajectories have {counts} steps: compare runs of as many steps")
        return compare_latents(first.tensors, second.tensors, a_name=names["a"], b_name=names["b"])
    return compare_frames(first.tensors[0], second.tensors[0], names=metrics or None, **names)


def print_report(report: FidelityReport) -> None:
    """The report as a person reads it, on standard output."""
    screen.put(f"A: {report.a}\nB: {report.b}\n{report.kind} {'x'.join(map(str, report.shape))}")
    screen.put("bit-identical" if report.identical else "not bit-identical")
    headings, rows = table_of(report.distances)
    screen.table(headings, rows)
    for distance in report.distances:
        if distance.note:
            screen.put(f"{metric_named(distance.metric).title}: {distance.note}")
    for fault in report.faults:
        screen.put(f"B is {fault}")
    if report.floor_note:
        screen.put(report.floor_note)


def table_of(distances: tuple[Distance, ...]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows: every distance with its unit and the way that is nearer; its floor where there is one."""
    with_floor = any(distance.floor for distance in distances)
    headings = ("distance", "value", "worst", "unit", "nearer is", *(("rounding floor",) if with_floor else ()))
    rows = []
    for distance in distances:
        floor = (floor_in_words(distance),) if with_floor else ()
        rows.append(
            (
                metric_named(distance.metric).title,
                shown(distance.value),
                shown(distance.worst),
                distance.unit,
                distance.closer,
                *floor,
            )
        )
    return headings, rows


def floor_in_words(distance: Distance) -> str:
    """ "51.8 (bfloat16 against float32): outside" """
    words = []
    for name, value in distance.floor.items():
        verdict = "inside" if name in distance.inside else "outside"
        words.append(f"{shown(value)} ({name}){'' if distance.value is None else ': ' + verdict}")
    return "; ".join(words) or "not measured"
