"""A clip beside its reference: the fidelity report that then travels with it, with the floor that the ledger knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from undercrank.bench import Film
from undercrank.engine import Clip
from undercrank.footage import Footage, read_footage
from undercrank.metrics import QUICK, beside
from undercrank.quality import as_FCHW, compare_frames
from undercrank.records import BadInput, FidelityReport, Measurement, Plan

NO_FLOOR = (
    "no rounding floor is known for this model, size, dtype and number of steps here: undercrank verify measures it"
)


def read_reference(path: Path, plan: Plan) -> Footage:
    """The film that the planned one will be measured against. Raises before anything is made: NotFound, BadInput."""
    footage = read_footage(path, kind="frames")
    frames, _, height, width = footage.tensors[0].shape
    asked = plan.request
    if (width, height, frames) != (asked.width, asked.height, asked.num_frames):
        raise BadInput(
            f"{path.name} is {width}x{height} with {frames} frames, and the clip will be {asked.width}x{asked.height} "
            f"with {asked.num_frames}: give --size {width}x{height} --frames {frames}, or another reference",
            field="reference",
        )
    return footage


def beside_reference(clip: Clip, reference: Footage, floor: Measurement | None) -> Clip:
    """The clip with its distances from the reference in its report."""
    found = compare_frames(
        reference.tensors[0], as_FCHW(clip.frames_FHWC), names=QUICK, a=reference.name, b="this clip",
        device=clip.report.plan.load.device,
    )  # fmt: skip
    return replace(clip, report=replace(clip.report, fidelity=with_floor(found, floor)))


def compare_clips(a: Film, b: Film, floor: Measurement | None = None) -> FidelityReport:
    """Two clips of one shape, on the device that made them."""
    device = a.report.plan.load.device
    return with_floor(compare_frames(as_FCHW(a.frames_FHWC), as_FCHW(b.frames_FHWC), names=QUICK, device=device), floor)


def with_floor(report: FidelityReport, floor: Measurement | None) -> FidelityReport:
    """The report with the floor of a ledger row beside its distances."""
    if floor is None:
        return replace(report, floor_note=NO_FLOOR)
    distances = tuple(
        beside(distance, {floor.floor_of or floor.id: floor.floor[distance.metric]})
        if distance.metric in floor.floor
        else distance
        for distance in report.distances
    )
    note = f"rounding floor: {floor.floor_of or 'see the row'}; {floor.source}, row {floor.id}"
    return replace(report, distances=distances, floor_note=note)
