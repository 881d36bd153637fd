"""Up is nearer, whichever way a metric counts; labels keep off each other; what is beyond stands on the edge."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.test_report import floor
from tests.test_sweep import a_point, a_sweep
from undercrank.chart import HEIGHT, LEFT, TOP, WIDTH, chart, nice
from undercrank.quality import EQUAL_DB
from undercrank.sweep import Sweep


def circles(svg: str) -> list[tuple[float, float]]:
    found = re.findall(r"<circle class=setting cx=([\d.]+) cy=([\d.]+)", svg)
    return [(float(x), float(y)) for x, y in found]


def labels(svg: str) -> list[tuple[float, float, str]]:
    found = re.findall(r"<text class='mark \w+' x=([\d.-]+) y=([\d.-]+)>([^<]*)<", svg)
    return [(float(x), float(y), text) for x, y, text in found]


def swept(metric: str, near: float, far: float) -> Sweep:
    return a_sweep(
        a_point("near", calls=36, speed=1.5, **{metric: near}), a_point("far", calls=20, speed=3.0, **{metric: far})
    )


@pytest.mark.parametrize(("metric", "near", "far"), [("psnr_db", 50.0, 30.0), ("st_lpips_alex", 0.001, 0.1)])
def test_nearer_is_higher_and_faster_is_to_the_right(metric: str, near: float, far: float) -> None:
    (x_near, y_near), (x_far, y_far) = circles(chart(swept(metric, near, far), metric, "speed"))
    assert y_near < y_far and x_near < x_far


def test_everything_lies_inside_the_picture() -> None:
    for metric, near, far in (("psnr_db", EQUAL_DB, 20.0), ("st_lpips_alex", 0.0, 0.9)):
        for x, y in circles(chart(swept(metric, near, far), metric, "fewer_calls")):
            assert LEFT <= x <= WIDTH and TOP <= y <= HEIGHT


def test_labels_of_one_place_keep_off_each_other() -> None:
    points = [a_point(f"p{n}", calls=36, speed=1.5, psnr_db=40.0 + n / 1000) for n in range(4)]
    far = a_point("far", calls=20, speed=3.0, psnr_db=30.0)
    boxes = [(x, y - 11, x + 7 * len(t), y) for x, y, t in labels(chart(a_sweep(*points, far), "psnr_db", "speed"))]
    assert len(boxes) == 5
    for index, (a, b, c, d) in enumerate(boxes):
        assert not any(a < g and e < c and b < h and f < d for e, f, g, h in boxes[index + 1 :])


def test_a_floor_in_reach_is_a_line_and_one_beyond_stands_on_the_edge_with_its_value() -> None:
    found = replace(swept("psnr_db", 50.0, 30.0), floors=(floor("bfloat16", 52.0), floor("float32", 92.0)))
    svg = chart(found, "psnr_db", "speed")
    assert ">bfloat16 against float32<" in svg and ">float32: kernels: 92, beyond this chart<" in svg
    (own,) = re.findall(r"<line class=floor [^>]*y1=([\d.]+)", svg)
    (other,) = re.findall(r"<line class=other [^>]*y1=([\d.]+)", svg)
    assert float(own) == TOP < float(other), "the runs' own dtype is float32"


def test_fewer_steps_are_a_line_with_their_numbers() -> None:
    plain = [a_point(f"{n} steps", kind="steps", steps=n, calls=2 * n, speed=30 / n, psnr_db=n * 2.0) for n in (20, 15)]
    svg = chart(a_sweep(a_point("a", calls=36, speed=1.6, psnr_db=45.0), *plain), "psnr_db", "speed")
    assert svg.count("<polyline class=steps") == 1 and {text for _, _, text in labels(svg)} == {"1", "20", "15"}


def test_what_was_not_computed_is_not_drawn() -> None:
    assert chart(swept("psnr_db", 50.0, 30.0), "st_lpips_alex", "speed") == ""


@pytest.mark.parametrize(("low", "high"), [(1.0, 3.1), (0.9, 1.02), (30.0, 92.0), (-1.0, 1.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = nice(low, high, 6)
    assert 2 <= len(ticks) <= 8 and low <= ticks[0] < ticks[-1] <= high
