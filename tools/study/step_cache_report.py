"""From what `step_cache_flipbook.py` wrote to a report that can be committed: Markdown, a page, the numbers.

python tools/study/step_cache_report.py study docs/evidence/step-cache-flipbook --package

With --package the paths that it found and the rows of what they cost become those that ship.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import undercrank
from undercrank.chart import chart
from undercrank.metrics import METRICS, shown
from undercrank.paths import Path as SearchedPath
from undercrank.quality import distance_of
from undercrank.records import Measurement
from undercrank.rounding import Floor
from undercrank.schedules import PRESETS
from undercrank.sweep import Point, Sweep

GATES = ("psnr_db", "st_lpips_alex")
KINDS = {
    "floor": "rounding floor",
    "preset": "MagCache's rule, preset",
    "path": "searched path",
    "equal": "MagCache's rule at the calls of the path",
    "drifts": "search on drifts, which looks at no film",
    "steps": "fewer steps",
}
LEAST = {"quality": 1.6, "balanced": 2.2, "fast": 2.5}
"How many times fewer calls each preset is held to."
WITHIN_DB = 2.0
"Of the floor's PSNR, for the preset `quality`."


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting over all films, in their order."""

    of: int
    name: str
    kind: str
    preset: str
    calls: int
    schedules: dict[str, str] = field(default_factory=dict)
    films: dict[str, list[float]]
    seconds: float | None = None
    "All films together, decoded."
    reference_seconds: list[float] = field(default_factory=list)
    "The same with every step computed, before and after."

    def median(self, metric: str) -> float:
        return statistics.median(self.films[metric])

    @property
    def fewer(self) -> float:
        return 2 * self.of / self.calls

    def nearer(self, other: Row, metric: str) -> bool:
        return METRICS[metric].further(other.median(metric), self.median(metric))


@dataclass(frozen=True, kw_only=True)
class Study:
    about: dict[str, Any]
    rows: tuple[Row, ...]
    paths: tuple[dict[str, Any], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(sorted({row.of for row in self.rows}))

    def of(self, steps: int, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row.of == steps and row.kind in kinds]

    def floor(self, steps: int) -> Row | None:
        return next((row for row in self.of(steps, "floor") if row.name == "bfloat16"), None)

    def path(self, steps: int, preset: str) -> Row | None:
        return next((row for row in self.of(steps, "path") if row.preset == preset), None)

    def best(self, rows: Iterable[Row], metric: str) -> Row | None:
        """The nearest to the reference, by its median."""
        nearest = max if METRICS[metric].closer == "higher" else min
        return nearest(rows, key=lambda row: row.median(metric), default=None)

    def plain(self, row: Row) -> list[Row]:
        """Fewer steps, with as many calls or, where a number is odd, one step more."""
        return [other for other in self.of(row.of, "steps") if row.calls <= other.calls <= row.calls + 2][:1]


# --------------------------------------------------------------------------- reading


def read(folder: Path) -> Study:
    """A folder that the study wrote, or the results that a report was made of."""
    if (folder / "settings.jsonl").exists():
        return _of_study(folder)
    first, *lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return Study(about=first["about"], paths=tuple(first["paths"]), rows=tuple(Row(**line) for line in lines))


def _of_study(folder: Path) -> Study:
    films: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
        films.setdefault((line["of"], line["setting"]), []).append(line)
    rows, timed = [], folder / "seconds.json"
    seconds = json.loads(timed.read_text()) if timed.exists() else {}
    for each in map(json.loads, (folder / "settings.jsonl").read_text().splitlines()):
        own = films[each["of"], each["name"]]
        values = {name: [film[name] for film in own] for name in METRICS if all(name in film for film in own)}
        told = {name: each[name] for name in ("of", "name", "kind", "preset", "calls", "schedules", "seconds")}
        whole = seconds.get(str(each["of"]), each["reference_seconds"])
        rows.append(Row(films=values, reference_seconds=whole, **told))
    found = folder / "paths.jsonl"
    paths = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    about = json.loads((folder / "about.json").read_text())
    return Study(about=about, rows=tuple(rows), paths=tuple(paths))


def as_lines(study: Study) -> str:
    lines: list[dict[str, Any]] = [{"about": study.about, "paths": study.paths}]
    lines += [vars(row) for row in sorted(study.rows, key=lambda row: (row.of, tuple(KINDS).index(row.kind)))]
    return "".join(json.dumps(line) + "\n" for line in lines)


# --------------------------------------------------------------------------- what it says


Table = tuple[str, str, list[str], list[list[str]]]
"Title, what it shows, headings, rows."


def figures(row: Row | None) -> list[str]:
    return [shown(row.median(name)) for name in GATES] if row else ["-", "-"]


def tables(study: Study) -> list[Table]:
    made = (presets(study), searched(study), resamplings(study), drifting(study), *map_rows(study), found(study))
    return [table for table in made if table[3]]


def presets(study: Study) -> Table:
    """Each preset as `auto` has it, against what it is held to."""
    lines = []
    for steps in study.counts:
        for preset in PRESETS:
            row, floor = study.path(steps, preset), study.floor(steps)
            plain = study.plain(row)[0] if row and study.plain(row) else None
            if row:
                kept = "kept" if holds(row, floor, plain) else "**not kept**"
                lines.append([f"{steps}", preset, f"{row.calls} of {2 * steps}", f"{row.fewer:.2f}x", *figures(row),
                              *figures(floor), *figures(plain), kept])  # fmt: skip
    head = ["steps", "preset", "calls", "fewer", "PSNR dB", "ST-LPIPS", "floor: PSNR", "ST-LPIPS", "fewer steps: PSNR",
            "ST-LPIPS", "held to"]  # fmt: skip
    text = (
        "Searched paths, as `auto` takes them. Held to: `quality` at least 1.6 times fewer calls, a median ST-LPIPS "
        "inside the bfloat16 floor and a median PSNR within 2 dB of it; `balanced` at least 2.2 times and `fast` 2.5 "
        "times, both distances smaller than those of a run of fewer steps with as many calls."
    )
    return "The presets", text, head, lines


def holds(row: Row, floor: Row | None, plain: Row | None) -> bool:
    if row.fewer < LEAST[row.preset]:
        return False
    if row.preset == "quality":
        return floor is not None and (
            row.median("psnr_db") >= floor.median("psnr_db") - WITHIN_DB and not floor.nearer(row, "st_lpips_alex")
        )
    return plain is not None and all(row.nearer(plain, name) for name in GATES)


def searched(study: Study) -> Table:
    lines = []
    for steps in study.counts:
        for row in study.of(steps, "path"):
            rule = [other for other in study.of(steps, "equal") if other.preset == row.preset]
            best = {name: other for name in GATES if (other := study.best(rule, name))}
            if not best:
                continue
            wins = [METRICS[name].title for name, other in best.items() if row.nearer(other, name)]
            pairs = zip(row.films["psnr_db"], best["psnr_db"].films["psnr_db"], strict=True)
            lines.append(
                [f"{steps}", f"{row.calls // 2}", *figures(row), *(shown(best[name].median(name)) for name in GATES),
                 f"{len(rule)}", f"{sum(a > b for a, b in pairs)} of {len(row.films['psnr_db'])}",
                 " and ".join(wins) or "neither"]
            )  # fmt: skip
    head = ["steps", "computed", "path: PSNR dB", "ST-LPIPS", "rule: PSNR dB", "ST-LPIPS", "settings of the rule",
            "films nearer (PSNR)", "path nearer by"]  # fmt: skip
    text = (
        "At equal calls. Of the rule: at several of its settings, each at the threshold that spends as many calls (or "
        "one less); of those, for each distance by itself, the one that did best on these very films."
    )
    return "Searched paths against MagCache's rule", text, head, lines


def resamplings(study: Study) -> Table:
    lines = []
    for steps in study.counts:
        for preset in PRESETS:
            rows = {how: next((r for r in study.of(steps, "preset") if r.name == f"{preset} {how}"), None)
                    for how in ("nearest", "index", "sigma")}  # fmt: skip
            cells = [[f"{row.calls}", *figures(row)] if row else ["-"] * 3 for row in rows.values()]
            if any(rows.values()):
                lines.append([f"{steps}", preset, *(cell for each in cells for cell in each)])
    head = ["steps", "preset", "nearest: calls", "PSNR", "ST-LPIPS", "by index: calls", "PSNR", "ST-LPIPS",
            "by sigma: calls", "PSNR", "ST-LPIPS"]  # fmt: skip
    text = (
        "MagCache's rule under its presets, from one curve of 50 steps read for each number of steps: the nearest "
        "ratio, the running product read by index, the running product read by sigma."
    )
    return "Ratios for another number of steps", text, head, lines


def drifting(study: Study) -> Table:
    lines = [
        [f"{steps}", f"{row.calls // 2}", *figures(row)] for steps in study.counts for row in study.of(steps, "drifts")
    ]
    text = "How far residuals move, weighed by sigma: what one run tells, with no look at finished latents."
    return "The search on drifts", text, ["steps", "computed", "PSNR dB", "ST-LPIPS"], lines


def map_rows(study: Study) -> list[Table]:
    return [_every(study, steps) for steps in study.counts]


def _every(study: Study, steps: int) -> Table:
    lines = []
    for row in sorted(study.of(steps, *KINDS), key=lambda row: (tuple(KINDS).index(row.kind), -row.calls)):
        cells = []
        for name in ("psnr_db", "ssim", "st_lpips_alex"):
            values = sorted(row.films.get(name, [0.0]))
            cells.append(f"{shown(statistics.median(values))} ({values[0]:.3g} to {values[-1]:.3g})")
        schedules = " ".join(dict.fromkeys(row.schedules.values()))
        lines.append([row.name, KINDS[row.kind], f"{row.calls}", *cells, f"`{schedules}`" if schedules else ""])
    head = ["setting", "kind", "calls", "PSNR dB", "SSIM", "ST-LPIPS", "computed steps (cond, uncond)"]
    return f"Everything at {steps} steps", "Medians over the films; the extremes in brackets.", head, lines


def found(study: Study) -> Table:
    lines = [
        [f"{each['steps']}", f"{each['budget']}", f"`{each['schedule']}`", f"{each['error']:.4f}",
         "-" if each["rule_error"] is None else f"{each['rule_error']:.4f}", f"{each['films']}", f"{each['forwards']}"]
        for each in study.paths
    ]  # fmt: skip
    head = ["steps", "computed", "path", "error", "error by the rule", "films", "forwards of the whole search"]
    text = (
        "Relative errors of finished latents, geometric mean over the films of the search, which are none of the "
        "study's. The rule's is that of its best schedule with as many computed steps, over 2000 settings, on the same "
        "films."
    )
    return "What the search found", text, head, lines


def conditions(study: Study) -> list[tuple[str, str]]:
    about = study.about
    films = f"{len(about['prompts'])} prompts, seeds {', '.join(map(str, about['seeds']))}"
    prompt, seed, steps = about["curve_of"]
    return [
        ("model", f"flipbook, {about['dtype']}, {about['size']}x{about['size']}, {about['frames']} frames, guidance "
                  f"{about['guidance_scale']:g}"),
        ("machine", f"{about['device']}, torch {about['torch']}, diffusers {about['diffusers']}"),
        ("films", f"{films}: {'; '.join(about['prompts'])}"),
        ("searched on", "; ".join(searched_films(study))),
        ("curve", f"{prompt}, seed {seed}, {steps} steps"),
    ]  # fmt: skip


# --------------------------------------------------------------------------- Markdown and the page


INTRO = (
    "Which schedule keeps flipbook's films nearest for as many calls of the denoiser. The reference computes every "
    "step. Distances are taken on 8-bit frames: PSNR in dB, higher is nearer; ST-LPIPS (alex), lower is nearer."
)


def as_markdown(study: Study) -> str:
    lines = ["# Which steps flipbook can skip", "", INTRO, "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in conditions(study)]
    for title, text, head, body in tables(study):
        lines += ["", f"## {title}", "", text, "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [f"| {' | '.join(row)} |" for row in body]
    return "\n".join(lines) + "\n"


def as_html(study: Study) -> str:
    parts = ["<h1>Which steps flipbook can skip</h1>", f"<p>{escape(INTRO)}</p>"]
    for steps in study.counts:
        drawn = "".join(chart(as_sweep(study, steps), name, "fewer_calls") for name in GATES)
        parts.append(f"<h2>{steps} steps</h2><div class=charts>{drawn}</div><p>{escape(_key(study, steps))}</p>")
    for title, text, head, body in tables(study):
        top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in body)
        table = f"<div class=wide><table><tr>{top}</tr>{lines}</table></div>"
        parts.append(f"<h2>{escape(title)}</h2><p>{_cell(text)}</p>{table}")
    parts += ["<h2>Measured on</h2><dl>"]
    parts += [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in conditions(study)]
    return _PAGE.replace("%BODY%", "\n".join([*parts, "</dl>"]))


def _cell(text: str) -> str:
    return escape(text.replace("**", "").replace("`", ""))


def drawn_rows(study: Study, steps: int) -> list[Row]:
    return [*study.of(steps, "path"), *(row for row in study.of(steps, "preset", "equal") if row.kind == "equal"
                                        or row.name.endswith("nearest"))]  # fmt: skip


def _key(study: Study, steps: int) -> str:
    marks = [f"{n} {KINDS[row.kind]}, {row.name}" for n, row in enumerate(drawn_rows(study, steps), start=1)]
    return f"Circles: {'; '.join(marks)}. Squares: fewer steps. Dashed: bfloat16 against float32. Up is nearer."


def as_sweep(study: Study, steps: int) -> Sweep:
    """For the chart."""
    about = study.about
    points = [_point(row, "setting") for row in drawn_rows(study, steps)]
    points += [_point(row, "steps") for row in study.of(steps, "steps")]
    floors = [
        Floor(name="bfloat16 against float32", dtype="float32",
              distances=tuple(distance_of(name, row.median(name)) for name in GATES))
        for row in [study.floor(steps)] if row
    ]  # fmt: skip
    return Sweep(
        title="step_cache", family="flipbook", machine=about["device"], device=about["device"], versions={},
        width=about["size"], height=about["size"], num_frames=about["frames"], num_inference_steps=steps,
        guidance_scale=about["guidance_scale"], dtype="float32", prompts=(), seeds=(), set_up="",
        points=tuple(points), floors=tuple(floors), drift=1.0,
    )  # fmt: skip


def _point(row: Row, kind: str) -> Point:
    return Point(
        label=row.name, kind=kind, wishes=(), steps=row.calls // 2, loop_s=0.0, loop_range_s=(0.0, 0.0), speed=1.0,
        calls=row.calls, fewer_calls=row.fewer,
        distances=tuple(distance_of(name, row.median(name)) for name in GATES),
    )  # fmt: skip


_PAGE = """<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<title>Which steps flipbook can skip</title>
<style>
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5a6570; --paper: #fff; --rule: #dde2e7; --setting: #1d5fd1;
  --steps: #b4540a; --floor: #2a7d46; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --soft: #a3adb7; --paper: #14181c; --rule: #323a42;
  --setting: #7fb0ff; --steps: #ffb066; --floor: #74d296; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 24px;
  max-width: 1240px; }
h2 { font-size: 1.15rem; margin-top: 2rem; } p { color: var(--soft); } figure { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 12px; }
.chart { border: 1px solid var(--rule); border-radius: 8px; padding: 8px; }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; } svg text { fill: var(--soft); }
svg .title { fill: var(--ink); font-size: 14px; font-weight: 600; } svg .grid { stroke: var(--rule); }
svg polyline { fill: none; stroke-width: 2; } svg polyline.steps { stroke: var(--steps); }
svg polyline.front { stroke: var(--setting); opacity: .45; } svg rect.steps { fill: var(--steps); }
svg circle.setting { fill: var(--setting); } svg line.floor { stroke: var(--floor); stroke-dasharray: 6 4; }
svg text.floor { fill: var(--floor); } svg text.mark { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
svg text.mark.setting { fill: var(--setting); font-weight: 600; } svg text.mark.steps { fill: var(--steps); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px;
  font-size: 13px; } dt { color: var(--soft); } dd { margin: 0; }
</style></head><body>
%BODY%
</body></html>
"""


def write(study: Study, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts: Sequence[tuple[str, str]] = (
        ("report.md", as_markdown(study)), ("report.html", as_html(study)), ("results.jsonl", as_lines(study)),
    )  # fmt: skip
    for name, text in texts:
        (folder / name).write_text(text, encoding="utf-8")


def as_measurements(study: Study) -> list[Measurement]:
    """A row of the ledger for each searched path. The floor is that of the dtype of the runs, float32: two kernels."""
    return [_measurement(study, row) for steps in study.counts for row in study.of(steps, "path")]


def _measurement(study: Study, row: Row) -> Measurement:
    about, steps = study.about, row.of
    kernels = next(other for other in study.of(steps, "floor") if other.name == "math")
    metrics = [name for name in METRICS if name in row.films]
    count = len(row.films[metrics[0]])
    assert row.seconds, "a row has a gain"
    return Measurement(
        id=f"flipbook-step_cache-searched-{row.preset}-{steps}",
        family="flipbook",
        lever="step_cache",
        setting=f"searched {row.preset}",
        source="measured",
        machine=about["device"],
        device=about["device"],
        versions={"torch": about["torch"], "diffusers": about["diffusers"]},
        width=about["size"],
        height=about["size"],
        num_frames=about["frames"],
        num_inference_steps=steps,
        dtype="float32",
        n=count,
        gain=round(statistics.fmean(row.reference_seconds) / row.seconds, 3),
        distances={name: round(row.median(name), 7) for name in metrics},
        floor={name: round(kernels.median(name), 9) for name in metrics},
        ranges={name: _ends(name, row.films[name]) for name in metrics},
        note=f"{row.calls} of {2 * steps} denoiser calls; time of {count} films in one batch, decoded; "
        "docs/evidence/step-cache-flipbook/report.md",
        prompts=tuple(about["prompts"]),
        seeds=tuple(about["seeds"]),
        floor_of="float32: attention by math against stock",
        calibrated_on=tuple(searched_films(study)),
    )


def _ends(metric: str, values: list[float]) -> tuple[float, float]:
    return METRICS[metric].nearest(values), METRICS[metric].furthest(values)


def searched_films(study: Study) -> list[str]:
    return sorted({f"{prompt}, seed {seed}" for path in study.paths
                   for prompt, seed in zip(path["prompts"], path["seeds"], strict=True)})  # fmt: skip


def package(study: Study) -> None:
    """What ships with the package: the paths, and what each is known to cost."""
    folder = Path(undercrank.__file__).parent / "evidence"
    (folder / "paths").mkdir(exist_ok=True)
    known = [SearchedPath.from_dict(each) for each in study.paths]
    (folder / "paths" / "flipbook.jsonl").write_text("".join(path.to_json() + "\n" for path in known))
    rows = "".join(row.to_json() + "\n" for row in as_measurements(study))
    (folder / "step_cache.jsonl").write_text(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the folder that the study wrote")
    parser.add_argument("report", type=Path, help="the folder to write to")
    parser.add_argument("--package", action="store_true", help="also write the package's own paths and rows")
    args = parser.parse_args()
    study = read(args.study)
    write(study, args.report)
    if args.package:
        package(study)


if __name__ == "__main__":
    main()
