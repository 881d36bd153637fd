"""`undercrank bench --companions`: each part of side B alone against side A, then all of it, in one table.

A part is what is chosen by itself: the format of the denoiser, of the text encoders, of the VAE, or a whole lever such
as a cache. Every configuration is a request as a user makes it: the engine loads, quantises and places it as in any
run, so that its peak is the user's.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from undercrank import screen
from undercrank.bench import Comparison, compare, in_words, wishes_in_words
from undercrank.ledger import append, read_ledger
from undercrank.levers import group_of, lever_of_knob
from undercrank.machine import this_machine
from undercrank.metrics import shown
from undercrank.oneshot import OnCancellable, calm_threads
from undercrank.planner import doubts, make_plan
from undercrank.records import LeverRefused, Measurement, Request
from undercrank.sources import which_model

Wishes = tuple[tuple[str, str], ...]

COMPANIONS: Wishes = (
    ("transformer_quant", "fp8"),
    ("text_encoder_quant", "fp8"),
    ("vae_quant", "fp8"),
    ("transformer_cache_quality", "quality"),
)
"Side B where it names no lever."
ALL = "all"


def run_companions(
    a: Request,
    b: Request,
    *,
    pairs: int,
    keep: bool,
    look: bool,
    allow_pickle: bool,
    local_files_only: bool,
    as_json: bool,
    on_cancellable: OnCancellable,
) -> None:
    """Time every configuration against A and print a table. Raises the errors of the engine and of `bench.compare`."""
    stock, configured, refused = to_be_had(a, b, allow_pickle=allow_pickle, local_files_only=local_files_only)
    for title, reason in refused.items():
        screen.say(f"left out: {title}: {reason}")
    with calm_threads():
        from undercrank.engine import Engine
        from undercrank.lab import Lab
        from undercrank.references import compare_clips

    found: dict[str, Comparison] = {}
    rows: list[Measurement] = []
    with (
        Engine(allow_pickle=allow_pickle, local_files_only=local_files_only) as engine,
        on_cancellable(engine.cancel),
    ):
        for title, request in configured.items():
            screen.say(f"{title}: {wishes_in_words(request)}")
            found[title], measured = compare(
                engine.generate,
                stock,
                request,
                pairs=pairs,
                lab=Lab(engine) if look else None,
                judge=lambda x, y: compare_clips(x, y, read_ledger().floor_for(x.report.plan)),
            )
            rows += measured
            for row in measured if keep else ():
                append(row)
            if not as_json:
                screen.put(in_words(found[title]))
    if as_json:
        told = {title: each.to_dict() for title, each in found.items()}
        screen.print_json(
            {"event": "done", "comparisons": told, "left_out": refused, "rows": [row.to_dict() for row in rows]}
        )
    else:
        screen.table(HEADINGS, table_of(found))


def to_be_had(
    a: Request, b: Request, *, allow_pickle: bool = False, local_files_only: bool = False
) -> tuple[Request, dict[str, Request], dict[str, str]]:
    """Side A, the configurations, and why parts that B did not name are left out.

    Raises LeverRefused where this machine or model cannot have a part that B names, saying which parts it can.
    """
    stock, configured = configurations(a, b)
    reasons = {
        title: _why_not(each, bool(b.wishes), allow_pickle, local_files_only) for title, each in configured.items()
    }
    refused = {title: reason for title, reason in reasons.items() if reason and title != ALL}
    able = [title for title in configured if title not in refused and title != ALL]
    if (refused and b.wishes) or not able:
        can = f"those that can be had: {', '.join(able)}" if able else "no part of side B can be had here"
        raise LeverRefused(f"{'; '.join(refused.values())}; {can}")
    if refused:
        wishes = tuple(wish for wish in COMPANIONS if group_of(wish[0]) in able)
        stock, configured = configurations(a, replace(b, wishes=wishes))
    return stock, configured, refused


def _why_not(request: Request, is_named: bool, allow_pickle: bool, local_files_only: bool) -> str | None:
    """What speaks against a configuration; a lever's doubt only where nobody asked for it by name."""
    family, load = which_model(request, allow_pickle=allow_pickle, local_files_only=local_files_only)
    machine = this_machine()
    try:
        plan = make_plan(request, family=family, machine=machine, ledger=read_ledger(), load=load)
    except LeverRefused as error:
        return str(error)
    asked = {lever.name for knob, value in request.wishes if value != "off" and (lever := lever_of_knob(knob))}
    against = [why for name, why in doubts(plan, family, machine).items() if name in asked]
    return None if is_named or not against else "; ".join(against)


def configurations(a: Request, b: Request) -> tuple[Request, dict[str, Request]]:
    """Side A with every part of B off that A does not name; and by its name each part of B alone, then all of them."""
    parts, base = _parts(b.wishes or COMPANIONS), _parts(a.wishes)
    base |= {part: _off(wishes) for part, wishes in parts.items() if part not in base}

    def with_(some: dict[str, Wishes], side: Request) -> Request:
        return replace(side, wishes=tuple(wish for wishes in (base | some).values() for wish in wishes))

    configured = {part: with_({part: wishes}, a) for part, wishes in parts.items()}
    return with_({}, a), configured | ({ALL: with_(parts, b)} if len(parts) > 1 else {})


def _parts(wishes: Wishes) -> dict[str, Wishes]:
    parts: dict[str, Wishes] = {}
    for knob, value in wishes:
        parts[group_of(knob)] = (*parts.get(group_of(knob), ()), (knob, value))
    return parts


def _off(wishes: Wishes) -> Wishes:
    """What turns off that part."""
    knob = wishes[0][0]
    lever = lever_of_knob(knob)
    assert lever is not None
    return ((knob if lever.apart else (lever.knobs or (lever.name,))[0], "off"),)


HEADINGS = (
    "configuration", "ms a step", "times as fast", "all, s", "peak, GiB", "ST-LPIPS", "PSNR", "first forward",
    "compiling, s",
)  # fmt: skip


def table_of(found: dict[str, Comparison]) -> list[tuple[str, ...]]:
    """Side A as the first comparison saw it, then each configuration."""
    rows = []
    for number, (title, each) in enumerate(found.items()):
        if number == 0:
            rows.append(_row("A", each, "A"))
        rows.append(_row(title, each, "B"))
    return rows


def _row(title: str, found: Comparison, side: str) -> tuple[str, ...]:
    runs = [run for run in found.runs if run.side == side]
    distances = {d.metric: d.value for d in found.fidelity.distances} if found.fidelity and side == "B" else {}
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return (
        title,
        f"{found.step_ms(side):.1f}",
        "" if side == "A" else f"{found.ratio:.3f} ({', '.join(f'{ratio:.3f}' for ratio in found.ratios)})",
        f"{statistics.median(run.total_s for run in runs):.2f}",
        f"{max(peaks) / 2**30:.2f}" if peaks else "-",
        shown(distances.get("st_lpips_alex")),
        shown(distances.get("psnr_db")),
        shown(found.forward_error) if side == "B" else "",
        f"{found.compile_s[side]:.1f}" if side in found.compile_s else "-",
    )
