"""The rounding floor: how far films are apart that differ in rounding alone, for one model, shape, steps and prompts.

Two kinds. The number format: the same run in bfloat16 and in float32. The order of sums: the same run with two exact
attention kernels. A distance means something only beside the floor of the dtype that its run uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from undercrank import metrics
from undercrank.engine import Engine
from undercrank.levers import ORDER
from undercrank.metrics import METRICS
from undercrank.records import Distance, Lever, OutOfMemory, Record, Request
from undercrank.takes import Take, compare_takes, take, together
from undercrank.undo import swap_attr

Tell = Callable[[str], None]

KERNELS = {"cuda": ("_native_efficient", "_native_cudnn", "_native_flash"), "cpu": ("_native_math",)}
"Exact kernels to set against the stock one, by diffusers' names: the first that makes other bits is taken."


@dataclass(frozen=True, kw_only=True)
class Floor(Record):
    """One kind of rounding, over several films."""

    name: str
    "What the two runs differ in."
    dtype: str
    "The dtype whose rounding it shows."
    distances: tuple[Distance, ...] = ()
    "Medians; the curve has one value a film."
    missing: str = ""
    "Why there is none."

    def of(self, metric: str) -> Distance | None:
        found = next((each for each in self.distances if each.metric == metric), None)
        return found if found is not None and found.value is not None else None


def stock(request: Request) -> Request:
    """The same film with every lever off."""
    return replace(request, wishes=tuple(wish for cls in ORDER for wish in off(cls)))


def off(lever: type[Lever]) -> tuple[tuple[str, str], ...]:
    """The wishes that turn a lever off: its first knob stands for all, unless each speaks of a thing of its own."""
    knobs = lever.knobs or (lever.name,)
    return tuple((knob, "off") for knob in (knobs if lever.apart else knobs[:1]))


def measure_floors(
    engine: Engine, takes: Sequence[Take], *, names: Sequence[str] | None = None, device: str = "cpu",
    tell: Tell = lambda words: None,
) -> tuple[Floor, ...]:  # fmt: skip
    """Both kinds of floor for these stock takes. A kind that cannot be had here says why in `missing`."""
    return (
        floor_of_kernels(engine, takes, names, device, tell),
        _floor_of_format(engine, takes, names, device, tell),
    )


def floor_of_kernels(
    engine: Engine, takes: Sequence[Take], names: Sequence[str] | None, device: str, tell: Tell
) -> Floor:
    dtype = str(takes[0].request.dtype)
    reasons = []
    engine.move_to(engine.plan(takes[0].request))
    assert engine.rig is not None
    for kernel in KERNELS.get(engine.rig.device.partition(":")[0], ()):
        name = f"{dtype}: attention by {kernel.removeprefix('_native_')} against stock"
        try:
            with attention_by(engine.rig, kernel) as modules:
                if not modules:
                    return Floor(
                        name=name, dtype=dtype, missing="this model's attention cannot be given another kernel"
                    )
                tell(f"rounding floor: {name}")
                first = compare_takes(takes[0], take(engine, takes[0].request), names=names, device=device)
                if first.identical:
                    reasons.append(f"{kernel}: the stock kernel itself")
                    continue
                rest = [
                    compare_takes(each, take(engine, each.request), names=names, device=device) for each in takes[1:]
                ]
                return Floor(name=name, dtype=dtype, distances=together([first, *rest]))
        except (RuntimeError, ValueError) as error:  # a kernel that does not serve these shapes says so by raising
            reasons.append(f"{kernel}: {str(error).splitlines()[0][:120]}")
    return Floor(name=f"{dtype}: attention kernels", dtype=dtype, missing="; ".join(reasons) or "no other exact kernel")


def _floor_of_format(
    engine: Engine, takes: Sequence[Take], names: Sequence[str] | None, device: str, tell: Tell
) -> Floor:
    """The low format against float32, whichever of them the takes are in."""
    own = str(takes[0].request.dtype)
    other = "bfloat16" if own == "float32" else "float32"
    low = other if own == "float32" else own
    name = f"{low} against float32"
    tell(f"rounding floor: {name}")
    try:
        others = [take(engine, replace(each.request, dtype=other)) for each in takes]
    except OutOfMemory as error:
        return Floor(name=name, dtype=low, missing=str(error))
    pairs = zip(takes, others, strict=True) if own == "float32" else zip(others, takes, strict=True)
    reports = [compare_takes(exact, rounded, names=names, device=device) for exact, rounded in pairs]
    return Floor(name=name, dtype=low, distances=together(reports))


@contextmanager
def attention_by(rig: Any, kernel: str) -> Iterator[int]:
    """Every attention that diffusers dispatches uses this kernel in the block. Yields how many there are.

    The choice is each processor's own attribute, so that nothing of the process changes.
    """
    processors = [
        processor
        for denoiser in rig.denoisers
        for module in denoiser.modules()
        if hasattr(processor := getattr(module, "processor", None), "_attention_backend")
    ]
    with ExitStack() as stack:
        for processor in {id(each): each for each in processors}.values():
            stack.enter_context(swap_attr(processor, "_attention_backend", kernel))
        yield len(processors)


def beside(distances: Sequence[Distance], floors: Sequence[Floor]) -> tuple[Distance, ...]:
    """Each distance with the floors of its metric, by name, and which of them it does not exceed: medians both."""
    return tuple(_beside(distance, floors) for distance in distances)


def _beside(distance: Distance, floors: Sequence[Floor]) -> Distance:
    found = {floor.name: d.value for floor in floors if (d := floor.of(distance.metric)) and d.value is not None}
    return metrics.beside(distance, found)


def furthest(metric: str, floors: Sequence[Floor], dtype: str) -> float | None:
    """The furthest film of all floors of that dtype: how far rounding alone has been seen to move one."""
    values = [value for floor in floors if floor.dtype == dtype and (d := floor.of(metric)) for value in d.curve]
    return METRICS[metric].furthest(values) if values else None


def medians(floors: Sequence[Floor], dtype: str) -> dict[str, float]:
    """One floor for each metric, as a ledger row holds it: the larger of that dtype's medians."""
    found: dict[str, float] = {}
    for name, metric in METRICS.items():
        values = [d.value for floor in floors if floor.dtype == dtype and (d := floor.of(name)) and d.value is not None]
        if values:
            found[name] = metric.furthest(values)
    return found


def floors_in_words(floors: Sequence[Floor], dtype: str) -> str:
    """What the floor of that dtype is of, or why there is none."""
    have = [floor.name for floor in floors if floor.dtype == dtype and floor.distances]
    lack = [f"{floor.name}: {floor.missing}" for floor in floors if floor.dtype == dtype and floor.missing]
    return "; ".join([*have, *(f"not measured: {each}" for each in lack)]) or f"no floor of {dtype} was measured"
