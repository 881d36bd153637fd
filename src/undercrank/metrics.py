"""The distances between two films: what each is called, its unit, which way is nearer, and what it does not see.

`quality.py` computes them; whoever shows one reads its row here. Floor 1: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from undercrank.records import Distance, FidelityReport, Record


@dataclass(frozen=True, kw_only=True)
class Metric(Record):
    """One way to say how far film B is from film A."""

    name: str
    "The key in records and ledger rows."
    title: str
    unit: str
    closer: str
    "lower or higher: which value means the nearer film"
    of: str
    "frames, latents or forward: what is compared"
    sees: str
    blind: str = ""
    per: str = "frame"
    "What its curve runs over."

    def further(self, a: float, b: float) -> bool:
        """Does the value `a` mean a greater distance than `b`?"""
        return a > b if self.closer == "lower" else a < b

    def furthest(self, values: list[float]) -> float:
        return max(values) if self.closer == "lower" else min(values)

    def nearest(self, values: list[float]) -> float:
        return min(values) if self.closer == "lower" else max(values)


METRICS: dict[str, Metric] = {
    row.name: row
    for row in (
        Metric(
            name="max_abs", title="largest difference of a value", unit="of 255", closer="lower", of="frames",
            sees="the one worst pixel", blind="how many pixels differ",
        ),
        Metric(
            name="rel_l2", title="relative error of frames", unit="ratio", closer="lower", of="frames",
            sees="all differences, by their size", blind="where they are",
        ),
        Metric(
            name="psnr_db", title="PSNR", unit="dB", closer="higher", of="frames",
            sees="all differences, by their size", blind="structure: a shift of one pixel costs as much as noise",
        ),
        Metric(
            name="ssim", title="SSIM", unit="0..1", closer="higher", of="frames",
            sees="local contrast and structure", blind="brightness of the whole frame",
        ),
        Metric(
            name="ms_ssim", title="MS-SSIM", unit="0..1", closer="higher", of="frames",
            sees="structure from coarse to fine", blind="brightness of the whole frame",
        ),
        Metric(
            name="tdiff", title="temporal-difference error", unit="ratio", closer="lower", of="frames",
            sees="motion that differs, relative to the motion of A", blind="what stands still",
            per="step between frames",
        ),
        Metric(
            name="flicker", title="luma flicker", unit="of 255", closer="lower", of="frames",
            sees="brightness that jumps between frames", blind="anything inside a frame", per="step between frames",
        ),
        Metric(
            name="st_lpips_alex", title="ST-LPIPS (alex)", unit="0 is equal", closer="lower", of="frames",
            sees="what people call different", blind="brightness flicker, shifts of 1 to 4 pixels; no value of LPIPS",
        ),
        Metric(
            name="lpips", title="LPIPS (alex)", unit="0 is equal", closer="lower", of="frames",
            sees="what people call different", blind="motion",
        ),
        Metric(
            name="flip", title="FLIP", unit="0..1", closer="lower", of="frames",
            sees="what is seen when two pictures alternate", blind="motion",
        ),
        Metric(
            name="vmaf", title="VMAF", unit="0..100", closer="higher", of="frames",
            sees="what coding does to a film", blind="flicker; noise is flattered; equal films score below 100",
        ),
        Metric(
            name="latent_rel", title="relative error of latents", unit="ratio", closer="lower", of="latents",
            sees="all differences before the decoder", blind="which of them show", per="denoising step",
        ),
        Metric(
            name="latent_max_abs", title="largest difference of latents", unit="latent units", closer="lower",
            of="latents", sees="the one worst value", blind="how many values differ", per="denoising step",
        ),
        Metric(
            name="one_forward", title="relative error of the first forward", unit="ratio", closer="lower", of="forward",
            sees="what a lever does inside one forward, before a run makes it grow", blind="what happens between steps",
            per="branch",
        ),
    )
}  # fmt: skip

QUICK = tuple(name for name, row in METRICS.items() if row.of == "frames" and name not in ("flip", "vmaf"))
"What is taken beside a run: all distances of frames but those that take longer than many a run."

GATES = ("psnr_db", "st_lpips_alex")
"The two distances that a gate names: one that sees everything, one that sees what people see."


def metric_named(name: str) -> Metric:
    """Rows of a ledger may hold the distances of another version: those are shown by their bare name."""
    unknown = Metric(name=name, title=name, unit="", closer="lower", of="frames", sees="")
    return METRICS.get(name, unknown)


def beside(distance: Distance, floors: Mapping[str, float]) -> Distance:
    """The distance with these floors by name, and which of them it does not exceed."""
    metric, value = metric_named(distance.metric), distance.value
    inside = () if value is None else tuple(name for name, limit in floors.items() if not metric.further(value, limit))
    return replace(distance, floor=dict(floors), inside=inside)


def fidelity_in_words(report: FidelityReport) -> list[str]:
    """A line for each distance that was computed, with its floor; then the faults."""
    lines = [f"against {report.a}: {'bit-identical' if report.identical else 'not bit-identical'}"]
    for distance in report.distances:
        if distance.value is None:
            continue
        words = f"  {metric_named(distance.metric).title}: {shown(distance.value)} {distance.unit}"
        lines.append(f"{words} ({distance.closer} is nearer){_floor_words(distance)}")
    lines += [f"  frames are {fault}" for fault in report.faults]
    return [*lines, *([f"  {report.floor_note}"] if report.floor_note else [])]


def _floor_words(distance: Distance) -> str:
    places = [f"{'inside' if name in distance.inside else 'outside'} {shown(v)}" for name, v in distance.floor.items()]
    return f"; rounding floor: {', '.join(places)}" if places else ""


def shown(value: float | None) -> str:
    """A distance in four digits, whatever its size."""
    return "-" if value is None else f"{value:.4g}"
