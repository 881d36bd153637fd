"""A sweep as one page that needs nothing but itself (`report.html`), as Markdown, and as JSON lines.

Charts are inline SVG, stills are data URIs; there is no script. Up is nearer to the reference in every chart. Numbers
at the marks are those of the table's rows. Everything that came from a person is escaped.
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from undercrank.chart import chart, numbered
from undercrank.metrics import metric_named, shown
from undercrank.records import Distance, Measurement
from undercrank.rounding import Floor, floors_in_words, medians
from undercrank.sweep import Point, Reel, Sample, Sweep, as_row, axes, beats_rival, gates
from undercrank.takes import spread
from undercrank.video import appears_whole, write_thumbnail


def write_reel(reel: Reel, folder: Path) -> tuple[Path, Path, Path]:
    """report.html, report.md and results.jsonl in that folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.html": as_html(reel.sweep, {label: _data_uri(still) for label, still in reel.stills.items()}),
        "report.md": as_markdown(reel.sweep),
        "results.jsonl": as_lines(reel.sweep, reel.samples),
    }
    files = []
    for name, text in texts.items():
        with appears_whole(folder / name) as part:
            part.write_text(text, encoding="utf-8")
        files.append(folder / name)
    return files[0], files[1], files[2]


def as_lines(found: Sweep, samples: Sequence[Sample]) -> str:
    """The sweep in the first line, then one film a line."""
    lines = [json.dumps({"kind": "sweep", **found.to_dict()}, allow_nan=False)]
    lines += [json.dumps({"kind": "film", **sample.to_dict()}, allow_nan=False) for sample in samples]
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------- what the sweep says


def verdicts(found: Sweep) -> list[str]:
    """The findings, in sentences: the floor first, then the rival."""
    sentences = []
    total = len(found.settings)
    for name in gates(found):
        title = metric_named(name).title
        for floor in found.floors:
            inside = [p for p in found.settings if is_inside(p, name, floor)]
            fastest = max(inside, key=lambda p: p.speed, default=None)
            best = f", the fastest {fastest.label} at {fastest.speed:.2f}x" if fastest else ""
            if floor.of(name):
                sentences.append(f"{title}: {len(inside)} of {total} settings inside the floor {floor.name!r}{best}.")
        judged = [(p, beats_rival(p, found, name)) for p in found.settings]
        known = [(p, wins) for p, wins in judged if wins is not None]
        if known:
            wins = sum(1 for _, won in known if won)
            sentences.append(f"{title}: {wins} of {len(known)} settings are nearer than fewer steps in as much time.")
    for floor in found.floors:
        if floor.missing:
            sentences.append(f"No floor of {floor.name}: {floor.missing}.")
    if not found.is_steady:
        sentences.append(
            f"The machine drifted: the first film took {found.drift:.2f}x as long at the end. Read the calls, not the "
            "seconds; the rows of this sweep have no gain."
        )
    return sentences


def is_inside(point: Point, metric: str, floor: Floor) -> bool:
    """Is the median no further than that of the floor?"""
    return any(d.metric == metric and floor.name in d.inside for d in point.distances)


def conditions(found: Sweep) -> list[tuple[str, str]]:
    """On what it was measured, as (name, value)."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items()))
    return [
        ("model", f"{found.family}, {found.dtype}"),
        ("clip", f"{found.width}x{found.height}, {found.num_frames} frames, guidance {found.guidance_scale:g}"),
        ("reference", f"{found.num_inference_steps} steps, every lever off{''.join(f'; {n}' for n in found.notes)}"),
        ("machine", f"{found.machine}; {found.device}"),
        ("versions", versions),
        ("films", f"{len(found.prompts)} prompts, each with seed {', '.join(map(str, found.seeds))}"),
        ("prompts", "; ".join(found.prompts)),
        ("set up on", f"{found.set_up}: none of the films"),
        ("drift", f"{found.drift:.3f}x: the first film again at the end, over the beginning"),
    ]


def others(found: Sweep) -> list[str]:
    """The distances beside the gates that were computed."""
    names = ("ssim", "ms_ssim", "tdiff", "flicker", "lpips", "latent_rel", "one_forward")
    return [name for name in names if any(point.value(name) is not None for point in found.points)]


def _cell(distance: Distance | None) -> str:
    """ "43.7 (41.2 to 46)" """
    if distance is None or distance.value is None:
        return "-"
    found = spread(distance)
    if found is None or len(distance.curve) < 2:
        return shown(distance.value)
    low, high = sorted(found)
    return f"{shown(distance.value)} ({low:.3g} to {high:.3g})"


def _distance(point: Point, metric: str) -> Distance | None:
    return next((each for each in point.distances if each.metric == metric), None)


def rows(found: Sweep) -> list[list[str]]:
    """One row a point: mark, label, calls, loop, speed, distances, floor, rival."""
    marks, lines = numbered(found), []
    for point in found.points:
        low, high = point.loop_range_s
        lines.append(
            [
                marks.get(point.label, "") if point.kind == "setting" else "",
                point.label,
                f"{point.calls:g} ({point.fewer_calls:.2f}x fewer)",
                f"{point.loop_s:.2f} ({low:.2f} to {high:.2f})",
                f"{point.speed:.2f}x",
                *(_cell(_distance(point, name)) for name in gates(found)),
                _floor_words(point, found),
                _rival_words(point, found),
                *(_cell(_distance(point, name)) for name in others(found)),
            ]
        )
    return lines


def headings(found: Sweep) -> list[str]:
    gate_names, other_names = ([_heading(name) for name in names] for names in (gates(found), others(found)))
    judged = ["inside the floor", "against fewer steps"]
    return ["", "setting", "denoiser calls", "loop [s]", "speed", *gate_names, *judged, *other_names]


def _heading(name: str) -> str:
    row = metric_named(name)
    return f"{row.title} [{row.unit}, {row.closer} is nearer]"


def _floor_words(point: Point, found: Sweep) -> str:
    """Of each gate, the dtypes whose floor the setting is inside of."""
    words = []
    for name in gates(found) if point.kind != "reference" else ():
        dtypes = dict.fromkeys(floor.dtype for floor in found.floors if is_inside(point, name, floor))
        words.append(f"{metric_named(name).title}: {', '.join(dtypes) or 'no'}")
    return "; ".join(words)


def _rival_words(point: Point, found: Sweep) -> str:
    if not point.rival:
        return ""
    wins = {name: beats_rival(point, found, name) for name in gates(found)}
    words = [f"{metric_named(n).title} {'nearer' if won else 'further'}" for n, won in wins.items() if won is not None]
    return "; ".join([point.rival, *words])


# --------------------------------------------------------------------------- ledger


def as_rows(reel: Reel) -> list[Measurement]:
    """A row of the ledger for each setting of one lever: what it gained and cost over all films."""
    return [row for point in reel.sweep.settings if (row := _as_row(point, reel)) is not None]


def _as_row(point: Point, reel: Reel) -> Measurement | None:
    found = reel.sweep
    report, reference = reel.reports[point.label], reel.reports[found.points[0].label]
    always = {lever.name for lever in reference.plan.levers}
    apart = [lever for lever in report.plan.levers if lever.name not in always]
    if len(apart) != 1:  # a row speaks of one lever
        return None
    return as_row(
        point,
        report,
        lever=apart[0].name,
        gain=point.speed if found.is_steady else None,
        n=len(found.prompts) * len(found.seeds),
        floor=medians(found.floors, found.dtype),
        note=f"sweep: {point.label}; {point.calls:g} denoiser calls",
        prompts=found.prompts,
        seeds=found.seeds,
        floor_of=floors_in_words(found.floors, found.dtype),
        calibrated_on=(found.set_up,),
    )


# --------------------------------------------------------------------------- Markdown


def as_markdown(found: Sweep) -> str:
    """The same facts for a repository."""
    lines = [f"# {_md(found.title)} on {_md(found.family)}", ""]
    lines += [f"- {_md(sentence)}" for sentence in verdicts(found)]
    lines += ["", "| | |", "|---|---|", *(f"| {_md(name)} | {_md(value)} |" for name, value in conditions(found))]
    head = headings(found)
    lines += ["", "## Settings", "", "Medians over the films, nearest and furthest film in brackets.", ""]
    lines += [f"| {' | '.join(map(_md, head))} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(map(_md, row))} |" for row in rows(found)]
    lines += ["", "## The rounding floor", "", *_floor_table(found), ""]
    return "\n".join(lines)


def _floor_table(found: Sweep) -> list[str]:
    names = [*gates(found), *others(found)]
    lines = [
        f"| what differs | {' | '.join(_md(metric_named(n).title) for n in names)} |",
        f"|{'---|' * (len(names) + 1)}",
    ]
    for floor in found.floors:
        cells = (
            [_cell(floor.of(name)) for name in names] if floor.distances else [floor.missing, *[""] * (len(names) - 1)]
        )
        lines.append(f"| {_md(floor.name)} | {' | '.join(map(_md, cells))} |")
    return lines


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# --------------------------------------------------------------------------- HTML


def as_html(found: Sweep, stills: dict[str, str] | None = None) -> str:
    """One page. stills: label -> data URI of a picture."""
    title = f"{found.title} on {found.family}"
    charts = [chart(found, name, axis) for axis in axes(found) for name in gates(found)]
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<ul class=findings>" + "".join(f"<li>{escape(s)}</li>" for s in verdicts(found)) + "</ul>",
        f"<div class=charts>{''.join(charts)}</div>"
        if charts
        else "<p>No gate could be computed, so nothing is drawn.</p>",
        _legend(),
        "<h2>Settings</h2><p>Medians over the films; nearest and furthest film in brackets.</p>",
        _html_table(headings(found), rows(found), [point.kind for point in found.points]),
        "<h2>The rounding floor</h2>" + _html_floors(found),
        _html_stills(found, stills or {}),
        "<h2>Measured on</h2><dl>"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in conditions(found))
        + "</dl>",
    ]
    return _PAGE.replace("%TITLE%", escape(title)).replace("%BODY%", "\n".join(parts))


def _legend() -> str:
    return (
        "<p class=legend><span class='key setting'></span> a setting, by its row's number "
        "<span class='key front'></span> settings that no other one beats "
        "<span class='key steps'></span> simply fewer steps "
        "<span class='key floor'></span> rounding floor of the runs' dtype "
        "<span class='key other'></span> of another dtype. "
        "Up is nearer to the reference.</p>"
    )


def _html_table(head: Sequence[str], body: Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [
        f"<tr class={kind}>{''.join(f'<td>{_html_cell(cell)}</td>' for cell in row)}</tr>"
        for kind, row in zip(kinds, body, strict=True)
    ]
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _html_cell(text: str) -> str:
    """ "43.7 (41.2 to 46)": the value, and the films below it in small; of several answers, one a line."""
    if match := re.fullmatch(r"(\S+) \((.*)\)", text):
        return f"{escape(match[1])}<small>{escape(match[2])}</small>"
    return "<br>".join(escape(part) for part in text.split("; "))


def _html_floors(found: Sweep) -> str:
    names = [*gates(found), *others(found)]
    body = [[floor.name, *(_cell(floor.of(name)) for name in names), floor.missing] for floor in found.floors]
    head = ["what differs", *(metric_named(name).title for name in names), "not measured"]
    return _html_table(head, body, ["floor"] * len(body))


def _html_stills(found: Sweep, stills: dict[str, str]) -> str:
    marks = numbered(found)
    figures = [
        f"<figure><img alt='' src='{stills[point.label]}'><figcaption>"
        f"{escape(f'{marks[point.label]} ' if point.kind == 'setting' else '')}{escape(point.label)}"
        "</figcaption></figure>"
        for point in found.points
        if point.label in stills
    ]
    if not figures:
        return ""
    film = f"{found.prompts[0]}, seed {found.seeds[0]}"
    return f"<h2>The first film</h2><p>{escape(film)}</p><div class=stills>{''.join(figures)}</div>"


def _data_uri(frames_FHWC: np.ndarray) -> str:
    """The frames side by side, as a PNG inside the page."""
    strip = np.concatenate(list(frames_FHWC), axis=1)
    with tempfile.TemporaryDirectory() as folder:
        file = write_thumbnail(Path(folder) / "strip.png", strip[None], max_width=640)
        return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


# --------------------------------------------------------------------------- the page


_PAGE = """<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5a6570; --paper: #fff; --rule: #dde2e7; --band: #f4f6f8;
  --setting: #1d5fd1; --steps: #b4540a; --floor: #2a7d46; --other: #7a8590; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --soft: #a3adb7; --paper: #14181c; --rule: #323a42;
  --band: #1c2228; --setting: #7fb0ff; --steps: #ffb066; --floor: #74d296; --other: #8b96a1; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 24px;
  max-width: 1240px; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.findings { padding-left: 1.2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 12px; }
figure { margin: 0; } .chart { border: 1px solid var(--rule); border-radius: 8px; padding: 8px; }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .title { fill: var(--ink); font-size: 14px; font-weight: 600; }
svg .unit { fill: var(--soft); font-weight: 400; font-size: 12px; }
svg .grid { stroke: var(--rule); } svg polyline { fill: none; stroke-width: 2; }
svg line.floor { stroke: var(--floor); stroke-dasharray: 6 4; stroke-width: 1.5; }
svg line.other { stroke: var(--other); stroke-dasharray: 2 4; stroke-width: 1.5; }
svg text.floor { fill: var(--floor); } svg text.other { fill: var(--other); }
svg polyline.steps { stroke: var(--steps); } svg rect.steps { fill: var(--steps); }
svg polyline.front { stroke: var(--setting); opacity: .45; } svg circle.setting { fill: var(--setting); }
svg text.mark { font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
svg text.mark.setting { fill: var(--setting); } svg text.mark.steps { fill: var(--steps); font-weight: 400; }
.legend { color: var(--soft); }
.key { display: inline-block; width: 18px; margin: 0 4px 0 12px; vertical-align: middle; }
.key:first-child { margin-left: 0; }
.key.setting { width: 10px; height: 10px; border-radius: 5px; background: var(--setting); }
.key.front { border-top: 2px solid var(--setting); opacity: .45; }
.key.steps { width: 10px; height: 10px; background: var(--steps); }
.key.floor { border-top: 2px dashed var(--floor); } .key.other { border-top: 2px dotted var(--other); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 500; min-width: 6.5rem; } th:first-child { min-width: 0; }
 td { white-space: nowrap; } small { display: block; color: var(--soft); }
 tr.reference td { background: var(--band); }
tr.setting td:first-child { color: var(--setting); font-weight: 600; } tr.steps td:nth-child(2) { color: var(--steps); }
.stills { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 12px; }
.stills img { width: 100%; display: block; border-radius: 4px; } figcaption { font-size: 13px; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; font-size: 13px; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
</style></head><body>
%BODY%
</body></html>
"""
