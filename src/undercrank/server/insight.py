"""The routes that tell what levers and seeds did to films: the ledger's rows, and two clips beside each other.

Distances are taken on lossless masters by `undercrank compare`, in a process of its own, since torch stays out of
this one. Whether two clips are the same to the last bit is known without: each report holds the hash of its frames.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from undercrank.jobs import Job
from undercrank.ledger import read_ledger
from undercrank.levers import ORDER
from undercrank.metrics import METRICS, QUICK, beside, metric_named
from undercrank.records import BadInput, Distance, FidelityReport, Measurement, Plan, RunFailed
from undercrank.server.files import NotYet, inside, report_of
from undercrank.server.schemas import Comparison, DistanceCard, LedgerRows
from undercrank.server.studio import Studio, TheOwner, TheStudio

router = APIRouter(tags=["insight"])
NEED_WEIGHTS = ("st_lpips_alex", "lpips")
PATIENCE_S = 300.0
MAX_ROWS, MAX_KEPT = 2000, 100
ClipId = Annotated[str, Query(max_length=64, description="The id of a completed clip.")]


@router.get("/v1/ledger", response_model=LedgerRows)
def ledger(owner: TheOwner) -> Any:
    """The newest measured rows, those that came with the package among them, and what their metrics mean."""
    rows = read_ledger().rows[-MAX_ROWS:]
    return LedgerRows(data=[row.to_dict() for row in rows], metrics=[metric.to_dict() for metric in METRICS.values()])


@router.get("/v1/compare", response_model=Comparison)
async def compare(a: ClipId, b: ClipId, studio: TheStudio, owner: TheOwner) -> Any:
    """How far clip B is from clip A: whether they are bit-identical, and distances where both have a master."""
    pair = await run_in_threadpool(_pair, studio, owner.id, a, b)
    if pair.identical or pair.masters is None:
        return await run_in_threadpool(_told, pair, None)
    return await run_in_threadpool(_told, pair, await _measured(studio, pair.masters))


# --------------------------------------------------------------------------- two clips


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two completed clips. masters: their lossless files, where both have one."""

    a: Job
    b: Job
    report_a: dict[str, Any] = field(default_factory=dict)
    report_b: dict[str, Any] = field(default_factory=dict)
    masters: tuple[Path, Path] | None = None

    @property
    def identical(self) -> bool | None:
        """None: unknown, for lack of a hash."""
        a, b = (report.get("frames_hash") for report in (self.report_a, self.report_b))
        return a == b if a and b else None


def _pair(studio: Studio, owner: str, a: str, b: str) -> Pair:
    """Raises NoSuchJob, NotYet."""
    jobs = [studio.store.get(id, owner=owner) for id in (a, b)]
    for job in jobs:
        if not job.result:
            raise NotYet(f"{job.id} is {job.state.value}: completed clips can be compared")
    masters = [_master(studio, job) for job in jobs]
    return Pair(
        a=jobs[0],
        b=jobs[1],
        report_a=report_of(jobs[0]) or {},
        report_b=report_of(jobs[1]) or {},
        masters=(masters[0], masters[1]) if masters[0] and masters[1] else None,
    )


def _master(studio: Studio, job: Job) -> Path | None:
    name = (job.result or {}).get("files", {}).get("master")
    return inside(studio.folder, name) if name else None


def _told(pair: Pair, measured: FidelityReport | None) -> Comparison:
    floor = _floor_of(pair)
    return Comparison(
        a=pair.a.id,
        b=pair.b.id,
        identical=measured.identical if measured else pair.identical,
        basis=_basis(pair, measured),
        distances=[card(each, floor) for each in measured.distances if is_told(each)] if measured else [],
        faults=list(measured.faults) if measured else [],
        floor_note=_floor_note(floor, pair),
    )


def _basis(pair: Pair, measured: FidelityReport | None) -> str:
    if measured:
        return f"measured on both masters, {'x'.join(map(str, measured.shape))}"
    if pair.identical:
        return "the hashes of all frames are equal, so every distance is zero"
    return (
        "not measured: a distance needs a lossless master of both clips, since an mp4 moves pixels on its own; "
        "make them again with a master: the same seed makes the same frames"
    )


def is_told(distance: Distance) -> bool:
    """What lacks a package or weights here is the affair of whoever runs the server, and names its folders."""
    return distance.value is not None or distance.metric not in NEED_WEIGHTS


def card(distance: Distance, floor: Measurement | None) -> DistanceCard:
    """A distance with the words and the floor that it is read by."""
    metric, limit = metric_named(distance.metric), floor.floor.get(distance.metric) if floor else None
    placed = beside(distance, {} if limit is None else {"floor": limit})
    return DistanceCard(
        metric=distance.metric,
        title=metric.title,
        unit=distance.unit,
        closer=distance.closer,
        value=distance.value,
        worst=distance.worst,
        note=distance.note,
        sees=metric.sees,
        blind=metric.blind,
        floor=limit,
        inside_floor=None if limit is None or distance.value is None else bool(placed.inside),
    )


def _floor_of(pair: Pair) -> Measurement | None:
    """The rounding floor of runs like clip B's, where A is of the same model."""
    plan = pair.report_b.get("plan")
    if plan is None or pair.a.model != pair.b.model:
        return None
    try:
        return read_ledger().floor_for(Plan.from_dict(plan, levers=ORDER))
    except BadInput:  # a clip of another version, with levers that this one does not know
        return None


def _floor_note(floor: Measurement | None, pair: Pair) -> str:
    if floor is None:
        return f"no rounding floor of {pair.b.model} at this shape is in the ledger: undercrank verify measures it"
    return f"rounding floor: {floor.floor_of or 'see the row'}; {floor.dtype}, {floor.device} ({floor.source})"


# --------------------------------------------------------------------------- the other process


async def _measured(studio: Studio, masters: tuple[Path, Path]) -> FidelityReport:
    """One at a time, and once for a pair: clips never change. Raises RunFailed."""
    async with studio.comparing:
        kept = studio.compared
        if masters not in kept:
            kept[masters] = await _compare(*masters)
        while len(kept) > MAX_KEPT:
            del kept[next(iter(kept))]
        return kept[masters]


async def _compare(a: Path, b: Path) -> FidelityReport:
    words = [word for name in QUICK for word in ("--metric", name)]
    command = ("-m", "undercrank.cli", "compare", str(a), str(b), "--json", *words)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    except TimeoutError as error:
        raise RunFailed(f"comparing took longer than {PATIENCE_S:g} s and was stopped") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = err.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no reason was given"]
        raise RunFailed(f"the masters could not be compared: {last[0][:300]}")
    return FidelityReport.from_dict(json.loads(out)["report"])
