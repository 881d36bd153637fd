"""Rows of the ledger for people: a list that can be narrowed; one row in words, with what the planner makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from undercrank import families
from undercrank.ledger import HERE
from undercrank.metrics import GATES, METRICS, metric_named, shown
from undercrank.planner import unproven_loss
from undercrank.records import BadInput, Case, Device, Fidelity, Machine, Measurement

SOURCES = {
    HERE: "on this machine",
    "measured": "on the machine that it names; it ships with undercrank",
    "published": "by others, and not verified here",
    "random weights": "it says something of time and nothing of the film",
}


def select(
    rows: Sequence[Measurement],
    *,
    family: str | None = None,
    lever: str | None = None,
    machine: str | None = None,
    source: str | None = None,
) -> tuple[Measurement, ...]:
    """Rows whose family, lever and source begin with these words, and whose machine or device holds that one."""

    def fits(row: Measurement) -> bool:
        begins = ((family, row.family), (lever, row.lever or "none"), (source, row.source))
        here = f"{row.machine} {row.device}".lower()
        return all(word is None or text.startswith(word) for word, text in begins) and (machine or "").lower() in here

    return tuple(row for row in rows if fits(row))


def none_fit(rows: Sequence[Measurement]) -> str:
    """Where no row was found: by what those that there are can be asked for, and how to have more."""
    levers = ", ".join(sorted({row.lever or "none" for row in rows}))
    models = ", ".join(sorted({row.family for row in rows}))
    there_are = f"there are some of the levers {levers} and of the models {models}; " if rows else ""
    return f"no such rows: {there_are}undercrank verify and undercrank bench --keep write some"


def find(rows: Sequence[Measurement], name: str) -> Measurement:
    """The row of that id, or the only one whose id begins so. Raises BadInput, naming those that are near."""
    exact = [row for row in rows if row.id == name]
    found = exact[-1:] or [row for row in rows if row.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    ids = [row.id for row in found or rows]
    near = ids[:5] if found else get_close_matches(name, ids, n=5, cutoff=0.4) or ids[:3]
    what = "several rows begin with" if found else "no row"
    raise BadInput(f"{what} {name!r}: {', '.join(near) or 'the ledger is empty'}", field="id")


HEADINGS = ("id", "family", "lever", "source", "device", "clip", "steps", "dtype", "gain", "step ms", "n", *GATES)


def as_table(rows: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """One line a row under HEADINGS."""
    return [
        (
            row.id,
            row.family,
            " ".join(filter(None, (row.lever or "whole run", row.setting))),
            row.source,
            row.device,
            f"{row.width}x{row.height}x{row.num_frames}",
            str(row.num_inference_steps),
            row.dtype,
            f"{row.gain:.2f}x" if row.gain is not None else "-",
            f"{row.step_ms:.1f}" if row.step_ms is not None else "-",
            str(row.n),
            *(shown(row.distances.get(name)) for name in GATES),
        )
        for row in rows
    ]


def in_words(row: Measurement) -> str:
    """What was measured, on what, how surely; what it means for the film; what the planner makes of it."""
    return "\n".join([*_what(row), *_speed(row), *_film(row), *_films(row), *_policy(row), *_rest(row)])


def _what(row: Measurement) -> list[str]:
    lever = f"the lever {row.lever}{f' ({row.setting})' if row.setting else ''}" if row.lever else "a whole run"
    return [
        f"{row.id}: {lever} on {row.family}",
        f"source: {row.source}: {SOURCES.get(row.source, 'unknown to this version')}",
        f"machine: {row.machine}; {row.device}",
        f"clip: {row.width}x{row.height}, {row.num_frames} frames, {row.num_inference_steps} steps, {row.dtype}",
        f"runs: {row.n}",
    ]


def _speed(row: Measurement) -> list[str]:
    lines = []
    if row.gain is not None:
        lines.append(f"speed: the loop without it took {row.gain:.3f} times as long as with it")
    if row.step_ms is not None:
        spread = f" +- {row.spread_ms:.1f}" if row.spread_ms is not None else ""
        whole = f", {row.total_s:.2f} s in all" if row.total_s else ""
        lines.append(f"time: {row.step_ms:.1f}{spread} ms a step{whole}")
    if row.peak_bytes:
        lines.append(f"memory: {row.peak_bytes / 2**30:.2f} GiB at the peak")
    return lines


def _film(row: Measurement) -> list[str]:
    """A line for each distance, with its unit, direction and floor."""
    if row.lever and not row.distances:
        return ["film: no distance was measured"]
    lines = []
    for name, value in row.distances.items():
        metric = metric_named(name)
        words = f"  {metric.title}: {shown(value)} {metric.unit} ({metric.closer} is nearer)".replace("  (", " (")
        if name in row.ranges:
            low, high = sorted(row.ranges[name])
            words += f", films from {shown(low)} to {shown(high)}"
        if name in row.floor:
            place = "outside" if metric.further(value, row.floor[name]) else "inside"
            words += f"; {place} the rounding floor of {shown(row.floor[name])}"
        elif name in METRICS:
            words += "; no floor beside it"
        lines.append(words)
    return ["film, as far from the run without it:", *lines] if lines else []


def _films(row: Measurement) -> list[str]:
    lines = [f"prompts: {'; '.join(row.prompts)}"] if row.prompts else []
    lines += [f"seeds: {', '.join(map(str, row.seeds))}"] if row.seeds else []
    lines += [f"floor of: {row.floor_of}"] if row.floor_of else []
    lines += [f"set up on: {'; '.join(row.calibrated_on)}; none of the films"] if row.calibrated_on else []
    return lines


def _policy(row: Measurement) -> list[str]:
    """For a lossy lever: under which words this row alone would let it engage by itself."""
    if row.lever is None or not row.distances:
        return []
    known = next((family for family in families.FAMILIES if family.id == row.family), None)
    if known is None:
        return []
    device = Device(kind="", name=row.device)
    case = Case(
        family=known, device=device, machine=Machine(name=row.machine, devices=(device,), cpu_count=1), width=row.width,
        height=row.height, num_frames=row.num_frames, num_inference_steps=row.num_inference_steps,
        guidance_scale=known.guidance_scale, dtype=row.dtype,
    )  # fmt: skip
    lines = []
    for word in (w for w in Fidelity if w is not Fidelity.EXACT):
        why = unproven_loss((row,), word, case)
        lines.append(f"  {word.value}: {'yes' if why is None else f'no, {why}'}")
    return ["if the lever is lossy, this row alone lets it engage by itself under", *lines]


def _rest(row: Measurement) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(row.versions.items()))
    return [*([f"note: {row.note}"] if row.note else []), f"versions: {versions}"]
