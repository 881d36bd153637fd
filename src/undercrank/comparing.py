"""What `compare`, `verify`, `bench --sweep` and `tune` show: distances with units and floor; promises kept; a front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from undercrank import screen
from undercrank.ledger import append, read_ledger
from undercrank.metrics import METRICS, metric_named, shown
from undercrank.oneshot import OnCancellable, calm_threads
from undercrank.records import (
    BadInput,
    Cancelled,
    Distance,
    Fidelity,
    FidelityReport,
    Plan,
    Promise,
    Request,
    RunFailed,
    Status,
)

if TYPE_CHECKING:
    from undercrank.fidelity import Study, Verdict, Verification
    from undercrank.tune import Tuning

KINDS = ("auto", "frames", "latents")


def check_question(a: Path, b: Path, *, metrics: tuple[str, ...], kind: str) -> None:
    """Refuse what can be refused without reading a file: a slip is answered at once."""
    check_metrics(metrics)
    if kind not in KINDS:
        raise BadInput(f"kind {kind!r}: choose {', '.join(KINDS)}", field="kind")


def check_metrics(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in METRICS:
            raise BadInput(f"no metric {name!r}: choose {', '.join(METRICS)}", field="metric")


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


# --------------------------------------------------------------------------- verify


def run_verify(
    request: Request,
    *,
    prompts: tuple[str, ...],
    seeds: tuple[int, ...],
    steps: int,
    metrics: tuple[str, ...],
    keep: bool,
    allow_pickle: bool,
    local_files_only: bool,
    as_json: bool,
    on_cancellable: OnCancellable,
) -> None:
    """Judge, keep the rows, print. Raises RunFailed where a lever broke its promise, after all was printed."""
    check_metrics(metrics)
    with calm_threads():
        from undercrank.engine import Engine
        from undercrank.fidelity import verify

    with (
        Engine(allow_pickle=allow_pickle, local_files_only=local_files_only) as engine,
        on_cancellable(engine.cancel),
    ):
        found = verify(
            engine, request, prompts=prompts, seeds=seeds, steps=steps, names=metrics or None, tell=screen.say
        )
    for study in found.studies if keep else ():
        for row in study.rows:
            append(row)
    if as_json:
        screen.print_json({"event": "done", "verification": found.to_dict()})
    else:
        _print_verification(found)
    if found.broken:
        raise RunFailed(
            "; ".join(
                f"{verdict.lever} broke its promise ({verdict.promise.value}): {verdict.words}"
                for verdict in found.broken
            )
        )


def _print_verification(found: Verification) -> None:
    screen.put(f"{found.family}, {found.dtype} on {found.device}")
    screen.put(f"prompts: {'; '.join(found.prompts)}; seeds: {', '.join(map(str, found.seeds))}")
    for study in found.studies:
        screen.put(f"\n{study.steps} steps")
        for floor in study.floors:
            if floor.missing:
                screen.put(f"rounding floor, {floor.name}: not measured: {floor.missing}")
        for verdict in study.verdicts:
            _print_verdict(verdict, study)


def _print_verdict(verdict: Verdict, study: Study) -> None:
    word = {True: "kept", False: "BROKEN", None: "not judged"}[verdict.kept]
    if verdict.promise is Promise.LOSSY and verdict.kept:
        word = "stated"
    screen.put(f"{verdict.lever} promises {verdict.promise.value}: {word}. {verdict.words}")
    if verdict.distances:
        screen.table(*table_of(verdict.distances))


# --------------------------------------------------------------------------- bench --sweep


def run_sweep(
    request: Request,
    *,
    swept: tuple[str, ...],
    prompts: tuple[str, ...],
    seeds: tuple[int, ...],
    metrics: tuple[str, ...],
    out: Path,
    keep: bool,
    allow_pickle: bool,
    local_files_only: bool,
    as_json: bool,
    on_cancellable: OnCancellable,
) -> None:
    """Film the grid, write the report, say where it is. Raises the errors of `sweep.sweep`; OSError for the folder."""
    check_metrics(metrics)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file; name a folder", field="out")
    with calm_threads():
        from undercrank.engine import Engine
        from undercrank.report import as_rows, verdicts, write_reel
        from undercrank.sweep import grid_of, sweep

    with (
        Engine(allow_pickle=allow_pickle, local_files_only=local_files_only) as engine,
        on_cancellable(engine.cancel),
    ):
        steps = engine.plan(request).request.num_inference_steps or 0
        reel = sweep(
            engine, request, grid_of(swept, steps), prompts=prompts, seeds=seeds, names=metrics or None, tell=screen.say
        )
    files = write_reel(reel, out)
    for row in as_rows(reel) if keep else ():
        append(row)
    if as_json:
        screen.print_json({"event": "done", "files": [str(f) for f in files], "sweep": reel.sweep.to_dict()})
        return
    for sentence in verdicts(reel.sweep):
        screen.say(sentence)
    for file in files:
        screen.put(str(file))


# --------------------------------------------------------------------------- tune


def run_tune(
    request: Request,
    *,
    metric: str | None,
    budget: float | None,
    target_speedup: float | None,
    seconds: float,
    prompts: tuple[str, ...],
    seeds: tuple[int, ...],
    again: bool,
    allow_pickle: bool,
    local_files_only: bool,
    as_json: bool,
    on_cancellable: OnCancellable,
) -> None:
    """Measure, print the front and what was chosen. Raises RunFailed where nothing that was measured meets the goal,
    and Cancelled after a cancel, both after all was printed."""
    with calm_threads():
        from undercrank.engine import Engine
        from undercrank.tune import Goal, tune

    goal = Goal.of(metric, budget, target_speedup, request.fidelity)
    with (
        Engine(allow_pickle=allow_pickle, local_files_only=local_files_only) as engine,
        on_cancellable(engine.cancel),
    ):
        found = tune(engine, request, goal, seconds=seconds, prompts=prompts, seeds=seeds, again=again, tell=screen.say)
        engine.ledger = read_ledger()
        plans = {word: engine.plan(replace(request, fidelity=word, seed=1)) for word in list(Fidelity)[1:]}
    if as_json:
        screen.print_json(
            {"event": "done", "tuning": found.to_dict(), "plans": {word: p.to_dict() for word, p in plans.items()}}
        )
    else:
        _print_tuning(found, plans)
    if found.ended == "cancelled":
        raise Cancelled("cancelled; what was measured is kept, and the next run goes on from there")
    if not found.chosen:
        raise RunFailed(
            f"nothing that was measured is {goal.speed:g}x as fast: the fastest is "
            f"{max((t.speed for t in found.tried), default=1.0):.2f}x"
        )


def _print_tuning(found: Tuning, plans: Mapping[Fidelity, Plan]) -> None:
    screen.put(
        f"{found.family}, {found.dtype} on {found.device}, {found.width}x{found.height}, {found.num_frames} frames, "
        f"{found.num_inference_steps} steps"
    )
    screen.put(f"prompts: {'; '.join(found.prompts)}; seeds: {', '.join(map(str, found.seeds))}")
    metric = metric_named(found.goal.metric)
    headings = ("setting", "times as fast", metric.title, "first forward", "peak, GiB", "on the front", "row")
    rows = [
        (
            each.label,
            f"{each.speed:.2f}",
            shown(each.value(metric.name)),
            shown(each.value("one_forward")),
            "-" if each.peak_bytes is None else f"{each.peak_bytes / 2**30:.2f}",
            "yes" if each.label in found.front else "",
            f"{each.row}{' (known)' if each.was_known else ''}",
        )
        for each in sorted(found.tried, key=lambda each: -each.speed)
    ]
    screen.table(headings, rows)
    for line in found.left_out:
        screen.say(f"left out: {line}")
    for each in found.tried:
        for complaint in each.complaints:
            screen.say(f"{each.label}: {complaint}")
    how = {"complete": "all settings are measured", "time": "the time is up; another run goes on from here"}
    screen.put(f"{how.get(found.ended, found.ended)} ({found.seconds:.0f} s)")
    if found.chosen:
        options = " ".join(f"--lever {knob}={value}" for knob, value in found.wishes) or "no lever"
        screen.put(f"chosen: {found.chosen}: {options}")
    for word, plan in plans.items():
        on = [f"{d.lever} {d.chosen}{screen.cited(d.evidence)}" for d in plan.decisions if d.status is Status.APPLIED]
        screen.put(f"--fidelity {word.value} is now: {'; '.join(on) or 'no lever'}")


def read_prompts(text: str | None) -> tuple[str, ...]:
    """A text file with one prompt a line; None: the model's own domain."""
    if text is None:
        return ()
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--prompts {text}: cannot be read: {error}", field="prompts") from error
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise BadInput(f"--prompts {text}: holds no prompt; write one a line", field="prompts")
    return found
