"""The report of a sweep: one page that needs nothing else, the same facts as Markdown, and lines that are read back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_sweep import a_point, a_sweep
from undercrank.quality import distance_of
from undercrank.report import as_html, as_lines, as_markdown, headings, rows, verdicts, write_reel
from undercrank.rounding import Floor, beside
from undercrank.sweep import Reel, Sample, Sweep, rival_of

EVIL = "<script>alert('x')</script> & \"more\" | pipe"


def floor(dtype: str, psnr: float) -> Floor:
    name = {"bfloat16": "bfloat16 against float32", "float32": "float32: kernels"}[dtype]
    return Floor(name=name, dtype=dtype, distances=(distance_of("psnr_db", psnr, (psnr - 1, psnr + 1)),))


@pytest.fixture
def found() -> Sweep:
    plain = [
        a_point(f"{n} steps", kind="steps", steps=n, calls=2 * n, speed=30 / n, psnr_db=p)
        for n, p in ((18, 42.0), (13, 34.0))
    ]
    points = [
        a_point("reference, 30 steps", kind="reference"),
        a_point("quality=high", calls=36, speed=1.7, psnr_db=53.0),
        a_point("quality=low", calls=26, speed=2.4, psnr_db=33.0),
    ]
    points = [replace(point, rival=rival_of(point, plain, 30)) for point in points]
    floors = (floor("float32", 92.0), floor("bfloat16", 52.0))
    points = [replace(point, distances=beside(point.distances, floors)) for point in (*points, *plain)]
    return a_sweep(*points, floors=floors, prompts=("a ball", EVIL), drift=1.2)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_but_itself_and_runs_nothing(found: Sweep) -> None:
    html = as_html(found, {"quality=high": "data:image/png;base64,AAAA"})
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    addresses = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert addresses == ["data:image/png;base64,AAAA"] and "http" not in html and "url(" not in html
    assert EVIL in page.text, "what a person typed is shown as they typed it"


def test_the_findings_name_floor_rival_and_drift(found: Sweep) -> None:
    said = verdicts(found)
    assert "PSNR: 0 of 2 settings inside the floor 'float32: kernels'." in said
    assert (
        "PSNR: 1 of 2 settings inside the floor 'bfloat16 against float32', the fastest quality=high at 1.70x." in said
    )
    assert "PSNR: 1 of 2 settings are nearer than fewer steps in as much time." in said
    assert any("drifted" in sentence and "1.20x" in sentence for sentence in said)
    missing = Floor(name="kernels", dtype="float32", missing="no other kernel")
    assert "No floor of kernels: no other kernel." in verdicts(replace(found, floors=(missing,)))


def test_every_row_has_its_columns_units_and_direction(found: Sweep) -> None:
    head, body = headings(found), rows(found)
    assert "PSNR [dB, higher is nearer]" in head and all(len(row) == len(head) for row in body)
    high = dict(zip(head, body[1], strict=True))
    assert high["setting"] == "quality=high" and high["denoiser calls"] == "36 (1.67x fewer)"
    assert high["inside the floor"] == "PSNR: bfloat16" and high["against fewer steps"] == "18 steps; PSNR nearer"
    low = dict(zip(head, body[2], strict=True))
    assert low["inside the floor"] == "PSNR: no" and low["against fewer steps"] == "13 steps; PSNR further"


def test_markdown_is_a_table_that_nothing_typed_can_break(found: Sweep) -> None:
    lines = as_markdown(found).splitlines()
    tables = [line for line in lines if line.startswith("|")]
    counts = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    assert counts.count(counts[-1]) >= 3 and any("quality=high" in line for line in tables)
    assert any("\\|" in line for line in tables)


def test_lines_are_read_back(found: Sweep) -> None:
    sample = Sample(
        point="quality=high", prompt=EVIL, seed=1, loop_s=1.0, calls=36, identical=False, distances={"psnr_db": 53.0},
        frames_hash="x",
    )  # fmt: skip
    first, second = (json.loads(line) for line in as_lines(found, [sample]).splitlines())
    assert first.pop("kind") == "sweep" and Sweep.from_dict(first) == found
    assert second.pop("kind") == "film" and Sample.from_dict(second) == sample


def test_the_files_appear_with_their_stills(found: Sweep, tmp_path: Path) -> None:
    stills = {point.label: np.zeros((4, 16, 16, 3), np.uint8) for point in found.points}
    html, markdown, lines = write_reel(Reel(sweep=found, stills=stills), tmp_path / "new" / "folder")
    assert html.read_text().count("data:image/png;base64,iVBOR") == len(found.points)
    assert markdown.read_text().startswith("# scale on flipbook") and lines.read_text().startswith('{"kind": "sweep"')


def test_a_sweep_without_gates_says_so() -> None:
    assert "nothing is drawn" in as_html(a_sweep(a_point("a", ssim=0.9)))
