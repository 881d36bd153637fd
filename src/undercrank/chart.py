"""One chart of a sweep as inline SVG: speed along, nearness up, the floors across, fewer steps as a line.

Up is nearer to the reference, whichever way the metric counts. What lies beyond the chart is drawn on its edge, with
its value. Colours are CSS variables of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from undercrank.metrics import METRICS, Metric, shown
from undercrank.quality import EQUAL_DB
from undercrank.rounding import Floor
from undercrank.sweep import Point, Sweep, front

AXIS_TITLES = {"fewer_calls": "times fewer denoiser calls", "speed": "times faster denoising loop"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 360, 64, 24, 44, 46
NEAR_ENOUGH = 0.6
"A floor that would stretch the chart by more than this share of it is drawn on its edge instead."

Box = tuple[float, float, float, float]


def numbered(found: Sweep) -> dict[str, str]:
    """Label -> what stands at its mark: the row's number for settings, the number of steps for plain runs."""
    marks = {point.label: str(number) for number, point in enumerate(found.settings, start=1)}
    return marks | {point.label: str(point.steps) for point in found.plain}


def chart(found: Sweep, metric: str, axis: str) -> str:
    """A figure; empty where no setting has this distance. axis: speed or fewer_calls."""
    row = METRICS[metric]
    settings, plain = ([p for p in group if p.value(metric) is not None] for group in (found.settings, found.plain))
    if not settings:
        return ""
    floors = [(floor, float(d.value or 0)) for floor in found.floors if (d := floor.of(metric))]
    plot = _Plot.over([*settings, *plain], floors, row, axis)
    lines, taken = _floor_lines(floors, plot, found.dtype)
    parts = [
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label='{escape(_title(row, axis), quote=True)}'>",
        f"<text class=title x={LEFT} y=20>{escape(row.title)} "
        f"<tspan class=unit>[{escape(row.unit)}, {row.closer} is nearer]</tspan></text>",
        f"<text class=axis x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 8} text-anchor=middle>{AXIS_TITLES[axis]}</text>",
        *_grid(plot),
        *lines,
        _line("steps", [plot.at(point) for point in plain]),
        _line("front", [plot.at(point) for point in front(settings, metric, axis)]),
        *_marks([*settings, *plain], plot, numbered(found), taken),
    ]
    return f"<figure class=chart>{''.join(parts)}</svg></figure>"


def _title(row: Metric, axis: str) -> str:
    return f"{row.title} [{row.unit}, {row.closer} is nearer] against {AXIS_TITLES[axis]}"


# --------------------------------------------------------------------------- where things lie


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """From values to places. A metric that is nearer when lower stands on a logarithm, turned over."""

    row: Metric
    axis: str
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def over(cls, points: Sequence[Point], floors: Sequence[tuple[Floor, float]], row: Metric, axis: str) -> _Plot:
        along = [1.0, *(float(getattr(point, axis)) for point in points)]
        low, high = _range([float(point.value(row.name) or 0) for point in points], log=row.closer == "lower")
        plot = cls(
            row=row, axis=axis, x_low=min(along), x_high=1 + (max(along) - 1) * 1.05 + 0.02, y_low=low, y_high=high
        )
        for _, value in floors:
            share = plot.share(value)
            if row.closer == "higher" and -NEAR_ENOUGH < share < 1 + NEAR_ENOUGH:
                low, high = min(low, value - (high - low) * 0.06), max(high, value + (high - low) * 0.06)
            elif row.closer == "lower" and value > 0 and -NEAR_ENOUGH < share < 1 + NEAR_ENOUGH:
                low, high = min(low, value / 1.3), max(high, value * 1.3)
        return cls(row=row, axis=axis, x_low=plot.x_low, x_high=plot.x_high, y_low=low, y_high=high)

    def share(self, value: float) -> float:
        """0 at the bottom, 1 at the top, beyond where it is beyond."""
        if self.row.closer == "higher":
            return (value - self.y_low) / (self.y_high - self.y_low)
        at = max(value, self.y_low * 1e-9)
        return 1 - math.log(at / self.y_low) / math.log(self.y_high / self.y_low)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (1 - min(1.0, max(0.0, self.share(value)))) * (HEIGHT - TOP - BOTTOM)

    def at(self, point: Point) -> tuple[float, float]:
        return self.x(float(getattr(point, self.axis))), self.y(float(point.value(self.row.name) or 0))

    def x_ticks(self) -> list[float]:
        return nice(self.x_low, self.x_high, 6)

    def y_ticks(self) -> list[float]:
        if self.row.closer == "higher":
            return nice(self.y_low, self.y_high, 6)
        decades = range(math.floor(math.log10(self.y_low)), math.ceil(math.log10(self.y_high)) + 1)
        multiples = (1, 2, 5) if len(decades) <= 4 else (1,)
        found = [m * 10.0**d for d in decades for m in multiples if self.y_low <= m * 10.0**d <= self.y_high]
        return found[:: math.ceil(len(found) / 8)] or [self.y_low, self.y_high]


def _range(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    """With some room; equal films, which are infinitely near, lie on the edge and stretch nothing."""
    if log:
        positive = [value for value in values if value > 0] or [1e-3]
        return min(positive) / 1.5, max(positive) * 1.5
    finite = [value for value in values if value < EQUAL_DB] or [50.0]
    room = max((max(finite) - min(finite)) * 0.1, abs(max(finite)) * 0.01)
    return min(finite) - room, max(finite) + room


def nice(low: float, high: float, count: int) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


# --------------------------------------------------------------------------- what is drawn


def _grid(plot: _Plot) -> list[str]:
    parts = []
    for tick in plot.x_ticks():
        x = plot.x(tick)
        parts.append(f"<line class=grid x1={x:.1f} x2={x:.1f} y1={TOP} y2={HEIGHT - BOTTOM} />")
        parts.append(f"<text class=tick x={x:.1f} y={HEIGHT - BOTTOM + 16} text-anchor=middle>{tick:g}x</text>")
    for tick in plot.y_ticks():
        y = plot.y(tick)
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} />")
        parts.append(f"<text class=tick x={LEFT - 8} y={y + 4:.1f} text-anchor=end>{shown(tick)}</text>")
    return parts


def _floor_lines(floors: Sequence[tuple[Floor, float]], plot: _Plot, dtype: str) -> tuple[list[str], list[Box]]:
    """Lines with their labels above them, or below where another line is close above; and the places of the labels."""
    parts, boxes, last = [], [], -100.0
    for floor, value in sorted(floors, key=lambda pair: plot.y(pair[1])):
        y = plot.y(value)
        base = y + 13 if y - last < 18 else y - 5
        kind = "floor" if floor.dtype == dtype else "other"
        text = floor.name + ("" if 0 <= plot.share(value) <= 1 else f": {shown(value)}, beyond this chart")
        parts.append(f"<line class={kind} x1={LEFT} x2={WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} />")
        parts.append(f"<text class={kind} x={WIDTH - RIGHT} text-anchor=end y={base:.1f}>{escape(text)}</text>")
        boxes.append((WIDTH - RIGHT - 6.4 * len(text), base - 11, float(WIDTH - RIGHT), base))
        last = y
    return parts, boxes


def _line(kind: str, places: Sequence[tuple[float, float]]) -> str:
    if len(places) < 2:
        return ""
    return f"<polyline class={kind} points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in places)}' />"


def _marks(points: Sequence[Point], plot: _Plot, marks: dict[str, str], taken: list[Box]) -> list[str]:
    """Every mark, then every label: a label keeps off all marks and off the labels that are there already."""
    shapes, labels = [], []
    taken = [*taken, *(_around(*plot.at(point)) for point in points)]
    for point in points:
        x, y = plot.at(point)
        value, gain = float(point.value(plot.row.name) or 0), float(getattr(point, plot.axis))
        hint = f"<title>{escape(point.label)}: {shown(value)} {escape(plot.row.unit)}, {gain:.2f}x</title>"
        if point.kind == "setting":
            shapes.append(f"<circle class=setting cx={x:.1f} cy={y:.1f} r=5>{hint}</circle>")
        else:
            shapes.append(f"<rect class=steps x={x - 4:.1f} y={y - 4:.1f} width=8 height=8>{hint}</rect>")
        text = marks[point.label]
        lx, ly = _free_place(x, y, text, taken, above=point.kind == "setting")
        labels.append(f"<text class='mark {point.kind}' x={lx:.1f} y={ly:.1f}>{escape(text)}</text>")
    return [*shapes, *labels]


def _around(x: float, y: float) -> Box:
    return x - 5, y - 5, x + 5, y + 5


def _free_place(x: float, y: float, text: str, taken: list[Box], *, above: bool) -> tuple[float, float]:
    """The first place around the mark where the text lies on nothing and inside the chart; it is then taken."""
    wide, high = 7.0 * len(text), 11.0
    over = [(-wide / 2, -9), (7, -6), (-7 - wide, -6), (9, 4), (-9 - wide, 4)]
    under = [(-wide / 2, 19), (7, 15), (-7 - wide, 15)]
    places = [*over, *under] if above else [*under, *over]
    boxes = [(x + dx, y + dy - high, x + dx + wide, y + dy) for dx, dy in places]
    best = next((box for box in boxes if _is_inside(box) and not any(_meet(box, other) for other in taken)), boxes[0])
    taken.append(best)
    return best[0], best[3]


def _is_inside(box: Box) -> bool:
    return box[0] >= LEFT - 4 and box[2] <= WIDTH - 2 and box[1] >= TOP - 16 and box[3] <= HEIGHT - BOTTOM + 4


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
