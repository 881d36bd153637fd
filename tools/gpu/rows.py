"""Ledger rows out of what `never_wait.py`, `fewer_bits.py`, `decode.py`, `memory.py` and `two_devices.py` wrote.

    python tools/gpu/rows.py never_wait.json [more.json ...] >> src/undercrank/evidence/h200.jsonl

A row is one setting against the same without one lever, in one run, in both orders. Times only: random weights.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from undercrank.records import Measurement

SUBJECTS = {
    "cogvideox": ("cogvideox-2b", 720, 480, 49, "float16"),
    "hunyuan 720p": ("hunyuanvideo-1.5-720p", 1280, 720, 33, "bfloat16"),
    "hunyuan 480p": ("hunyuanvideo-1.5-480p", 848, 480, 33, "bfloat16"),
    "wan 14b": ("wan2.1-14b", 832, 480, 81, "bfloat16"),
    "small: wan2.1-1.3b": ("wan2.1-1.3b", 416, 240, 17, "bfloat16"),
    "small: ltx-video": ("ltx-video", 384, 256, 25, "bfloat16"),
}
"Beginning of a row's name -> family, width, height, frames, dtype."


@dataclass(frozen=True, kw_only=True)
class Pair:
    """B is A and one lever more. in_forward: which rows of `distances of one forward` they are."""

    lever: str
    a: str
    b: str
    in_forward: bool = False


PAIRS = (
    Pair(lever="host_sync", a="stock", b="host_sync"),
    Pair(lever="host_sync", a="stock", b="on"),
    Pair(lever="text_trim", a="stock", b="trimmed", in_forward=True),
    Pair(lever="compile", a="trimmed", b="trimmed, compiled", in_forward=True),
    Pair(lever="compile", a="eager", b="compiled"),
    Pair(lever="compile", a="host_sync", b="host_sync, compiled"),
    Pair(lever="cuda_graph", a="host_sync", b="host_sync, graphs"),
    Pair(lever="cuda_graph", a="host_sync, compiled", b="host_sync, compiled, graphs"),
    Pair(lever="cuda_graph", a="compiled", b="compiled, graphs"),
)


def rows_of(story: dict[str, Any]) -> list[Measurement]:
    found = []
    for name, row in story.items():
        subject = next((value for start, value in SUBJECTS.items() if name.startswith(start)), None)
        if subject is None or "failed" in row:
            continue
        for pair in PAIRS:
            sides = row.get(pair.a), row.get(pair.b)
            if all(isinstance(side, dict) and "step_ms" in side for side in sides):
                found.append(_row(story, name, subject, pair, *sides))
            if all(isinstance(side, dict) and "loops_s" in side for side in sides):
                found.append(_held_row(story, subject, pair, *sides))
    return found


def companion_rows(story: dict[str, Any]) -> list[Measurement]:
    """Of `fewer_bits.py`: each setting of weights of fewer bits against the dense model."""
    found = []
    for name, row in story.items():
        group = name.split(":")[0]
        subject = next((value for start, value in SUBJECTS.items() if start == group), None)
        settings = row if isinstance(row, dict) and "faithful" in row and subject else {}
        floor = story.get(f"{group}: floor of one forward", {}).get("faithful")
        for setting, each in settings.items():
            if isinstance(each, dict) and "=" in setting and "gain" in each:
                found.append(_companion(story, subject, setting, row["faithful"], each, floor))
    return found


def _companion(
    story: dict[str, Any],
    subject: tuple[Any, ...],
    setting: str,
    dense: dict[str, Any],
    each: dict[str, Any],
    floor: float | None,
) -> Measurement:
    is_denoiser, is_together = setting.startswith("transformer") and " " not in setting, " " in setting
    what = "a whole call" if is_together else {"t": "an encoding", "v": "a decoding"}.get(setting[0], "")
    what = "a forward" if is_denoiser else what
    error = {"one_forward": round(each["one_forward"], 6)} if "one_forward" in each else {}
    notes = [
        f"{what}: {dense['median_ms']} ms dense, {each['median_ms']} ms; pairs {', '.join(map(str, each['gain']))}"
    ]
    notes += [f"relative error of its output {each['relative_error']:.4g}"] if "relative_error" in each else []
    notes += [f"compiled in {each['compile_s']} s, dense {dense['compile_s']} s"] if "compile_s" in each else []
    notes += [f"peak of dense {dense['peak_gb']} GB, weights {dense['weights_gb']} and {each['weights_gb']} GB"]
    return _measurement(
        story,
        subject,
        lever="quantize",
        setting=setting,
        num_inference_steps=2,
        n=len(each["gain"]),
        step_ms=each["median_ms"] if is_denoiser else None,
        spread_ms=round((max(each["ms"]) - min(each["ms"])) / 2, 2) if is_denoiser else None,
        total_s=round(each["median_ms"] / 1000, 3) if is_together else None,
        peak_bytes=round(each["peak_gb"] * 1e9),
        gain=round(statistics.median(each["gain"]), 4) if is_denoiser or is_together else None,
        distances=error,
        floor={"one_forward": round(floor, 6)} if floor and error else {},
        note="; ".join(notes),
    )


DECODED = {
    "hunyuan 720p": ("hunyuanvideo-1.5-720p", 1280, 720, 33, "bfloat16"),
    "hunyuan 480p": ("hunyuanvideo-1.5-480p", 848, 480, 33, "bfloat16"),
    "wan 480p, float32": ("wan2.1-14b", 832, 480, 81, "bfloat16"),
}
"""Rows of `decode.py` that are of a VAE as the product loads it: Wan's in float32 beside a denoiser in bfloat16."""


def decode_rows(story: dict[str, Any]) -> list[Measurement]:
    """Of `decode.py`: the two settings of the lever against the VAE as shipped, one decode each, in both orders."""
    found = []
    for name, subject in DECODED.items():
        row = story.get(name, {})
        stock = row.get("stock", {})
        for setting in ("stream", "fused"):
            measured = row.get(setting, {})
            if "median_ms" not in stock or "median_ms" not in measured or "complaint" in measured:
                continue
            ratios = [a / b for a, b in zip(stock["ms"], measured["ms"], strict=True)]
            found.append(
                _measurement(
                    story,
                    subject,
                    lever="decode",
                    setting=setting,
                    num_inference_steps=1,
                    n=len(ratios),
                    gain=round(statistics.median(ratios), 4),
                    distances={"decode_relative": round(measured["relative"], 6)},
                    note=f"one decode, no denoising: {stock['median_ms']:.0f} -> {measured['median_ms']:.0f} ms; pairs "
                    f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}; {stock['peak_gib']:.1f} -> "
                    f"{measured['peak_gib']:.1f} GiB over {measured['resting_gib']:.1f} at rest; largest difference "
                    f"{measured['max_abs']:.3g} of {measured['largest_value']:.2f}; "
                    f"first call {measured['first_ms']:.0f} ms",
                )
            )
    return found


CAPPED = "group, 22 GiB"


def capped_rows(story: dict[str, Any]) -> list[Measurement]:
    """Of `memory.py`: by groups inside 22 GiB. No gain: that is for memory, and what it costs is in the note."""
    found = []
    for name, row in story.items():
        title, _, family = name.partition(": ")
        subject = next((value for value in SUBJECTS.values() if value[0] == family), None)
        if title != "capped" or subject is None or "failed" in row.get(CAPPED, {"failed": ""}):
            continue
        resident, moved = row["resident"], row[CAPPED]
        found.append(
            _measurement(
                story,
                subject,
                lever="offload",
                setting="group",
                num_inference_steps=2,
                n=1,
                step_ms=round(moved["step_s"] * 1000, 1),
                peak_bytes=round(max(moved["denoise_gib"], moved["decode_gib"]) * 2**30),
                note=f"inside 22 GiB, without a text encoder, eager, decode=stream in both: a step "
                f"{resident['step_s'] * 1000:.0f} ms resident, {moved['step_s'] * 1000:.0f} ms by groups, "
                f"{moved['over_resident']['step_s']:.3f} of it; a decode {resident['decode_s'] * 1000:.0f} and "
                f"{moved['decode_s'] * 1000:.0f} ms; peaks {resident['denoise_gib']:.1f} and "
                f"{resident['decode_gib']:.1f} GiB resident, {moved['denoise_gib']:.1f} and "
                f"{moved['decode_gib']:.1f} GiB",
            )
        )
    return found


def branch_rows(story: dict[str, Any]) -> list[Measurement]:
    """Of `two_devices.py`: both branches at once against one after the other, on two devices; on one there is no gain
    to be had, and no row. `auto` asks for rows of eager code; those over compiled blocks or a cache have a setting."""
    found = []
    for name, row in story.get("rows", {}).items():
        family, _, stack = name.partition(", ")
        subject = next((value for value in SUBJECTS.values() if value[0] == family), None)
        if subject is None or "failed" in row or len(row["peak_gib"]["B"]) < 2:
            continue
        steps, drift = row["step_ms"]["B"], row["drift"]
        apart = {"max_abs": 0.0} if drift["equal"] else {key: drift[key] for key in ("max_abs", "relative")}
        places = "bit for bit" if drift["equal"] else f"at most {drift['max_ulps']} steps of the last place apart"
        peaks = ", ".join(f"{device} {gib:.1f}" for device, gib in row["peak_gib"]["B"].items())
        found.append(
            _measurement(
                story,
                subject,
                lever="cfg_parallel",
                setting="" if stack == "eager" else f"over {stack}",
                num_inference_steps=row["steps"],
                n=len(row["pair_ratios"]),
                step_ms=round(statistics.median(steps), 2),
                spread_ms=round((max(steps) - min(steps)) / 2, 2),
                peak_bytes=round(max(row["peak_gib"]["B"].values()) * 2**30),
                gain=round(statistics.median(row["pair_ratios"]), 4),
                distances=apart,
                note=f"A: one branch after the other, B: both at once, {stack}, guidance on; pairs "
                f"{', '.join(f'{ratio:.3f}' for ratio in row['pair_ratios'])}; latents {places}; {row['at_once']} of "
                f"{row['steps']} steps at once; stalls {row['stalls']['B']}; replica {row['replica_gib']:.1f} GiB in "
                f"{row['replica_fill_s']:.2f} s; peaks {peaks} GiB",
            )
        )
    return found


def _measurement(story: dict[str, Any], subject: tuple[Any, ...], **measured: Any) -> Measurement:
    family, width, height, num_frames, dtype = subject
    machine = story["machine"]
    row = Measurement(
        id="",
        family=family,
        source="random weights",
        machine=machine["name"],
        device=machine["devices"][0]["name"],
        versions=machine["packages"] | ({"driver": machine["driver"]} if machine.get("driver") else {}),
        width=width,
        height=height,
        num_frames=num_frames,
        dtype=dtype,
        **measured,
    )
    return replace(row, id=hashlib.sha256(row.to_json().encode()).hexdigest()[:12])


def _row(
    story: dict[str, Any], name: str, subject: tuple[Any, ...], pair: Pair, a: dict[str, Any], b: dict[str, Any]
) -> Measurement:
    steps = len(b["step_ms"]) // len(b["denoise_s"])
    medians = [statistics.median(b["step_ms"][i * steps : (i + 1) * steps]) for i in range(len(b["denoise_s"]))]
    ratios = [x / y for x, y in zip(a["denoise_s"], b["denoise_s"], strict=True)]
    group = next(start for start in SUBJECTS if name.startswith(start))
    distances, floor = _distances(story.get(f"{group}: distances of one forward", {}), pair)
    return _measurement(
        story,
        subject,
        lever=pair.lever,
        num_inference_steps=steps,
        n=len(ratios),
        step_ms=round(b["median_step_ms"], 2),
        spread_ms=round((max(medians) - min(medians)) / 2, 2),
        peak_bytes=round(b["peak_gib"] * 2**30),
        gain=round(statistics.median(ratios), 4),
        distances=distances | ({"latents": 0.0} if _same(a, b) else {}),
        floor=floor,
        note=_note(pair, a, b, ratios),
    )


HELD_STEPS = 20


def _held_row(
    story: dict[str, Any], subject: tuple[Any, ...], pair: Pair, a: dict[str, Any], b: dict[str, Any]
) -> Measurement:
    """Levers kept on, as in a server: the first of an entry's three loops compiles and records, and is left out."""
    before, after = ([loop for entry in side["loops_s"] for loop in entry[1:]] for side in (a, b))
    ratios = [x / y for x, y in zip(before, after, strict=True)]
    to_ms = 1000 / HELD_STEPS
    once = ", ".join(f"{entry[0] - min(entry[1:]):.2f}" for entry in b["loops_s"])
    return _measurement(
        story,
        subject,
        lever=pair.lever,
        num_inference_steps=HELD_STEPS,
        n=len(ratios),
        step_ms=round(statistics.median(after) * to_ms, 2),
        spread_ms=round((max(after) - min(after)) / 2 * to_ms, 2),
        gain=round(statistics.median(ratios), 4),
        note=f"A: {pair.a}, B: {pair.b}, levers kept on over three loops; pairs of the later ones "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}; the first loop {once} s longer",
    )


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Both equal to the first setting, or equally far from it: two levers that change nothing change it alike."""
    return bool(a["repeats"] and b["repeats"] and a["relative_to_first"] == b["relative_to_first"])


def _distances(row: dict[str, Any], pair: Pair) -> tuple[dict[str, float], dict[str, float]]:
    """Relative error of one forward against stock, and stock's own against float32: the rounding floor."""
    if not pair.in_forward or pair.b not in row:
        return {}, {}
    floor = row["stock"]["against trimmed float32"]
    return {"one_forward": round(row[pair.b]["against stock"], 6)}, {"one_forward": round(floor, 6)}


def _note(pair: Pair, a: dict[str, Any], b: dict[str, Any], ratios: list[float]) -> str:
    pairs = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    stalls = f"; stalls {a['stalls'][-1]} -> {b['stalls'][-1]}"
    steady = a["median_step_ms"] / b["median_step_ms"]
    recorded = f"; recording included, {steady:.2f}x a step once recorded" if pair.lever == "cuda_graph" else ""
    return f"A: {pair.a}, B: {pair.b}, one forward a step; pairs {pairs}{recorded}{stalls}"


def main() -> None:
    for path in sys.argv[1:]:
        story = json.loads(Path(path).read_text())
        for rows in (rows_of, companion_rows, decode_rows, capped_rows, branch_rows):
            for row in rows(story):
                print(row.to_json())


if __name__ == "__main__":
    main()
