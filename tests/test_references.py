"""A clip that is given a reference carries its distances from it, with the floor that the ledger knows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.commands import run
from tests.test_ledger import a_row
from undercrank.ledger import Ledger, append
from undercrank.metrics import fidelity_in_words
from undercrank.records import FidelityReport, Request
from undercrank.references import NO_FLOOR, compare_clips, with_floor
from undercrank.video import read_recipe

SMALL = ("--size", "64x64", "--frames", "5", "--steps", "2", "--seed", "1", "--quiet")
PROMPT = "a red ball rolls left"


def clip(shift: int = 0) -> Any:
    frames = np.random.default_rng(0).integers(10, 200, (4, 16, 16, 3), dtype=np.uint8)
    report = SimpleNamespace(plan=SimpleNamespace(load=SimpleNamespace(device="cpu")))
    return SimpleNamespace(frames_FHWC=frames + np.uint8(shift), report=report)


def test_a_ledger_row_s_floor_stands_beside_the_distances() -> None:
    floor = a_row(id="f", floor={"psnr_db": 40.0}, floor_of="bfloat16 against float32", source="measured here")
    report = compare_clips(clip(), clip(1), floor)
    by = {distance.metric: distance for distance in report.distances}
    assert by["psnr_db"].floor == {"bfloat16 against float32": 40.0}
    assert by["psnr_db"].inside == ("bfloat16 against float32",) and by["ssim"].floor == {}
    assert "row f" in report.floor_note
    assert any(
        "PSNR: 48.13 dB (higher is nearer); rounding floor: inside 40" in line for line in fidelity_in_words(report)
    )
    assert not {"flip", "vmaf"} & set(by), "beside a run only what is quick"


def test_without_a_floor_it_is_said_who_measures_one() -> None:
    assert with_floor(compare_clips(clip(), clip()), None).floor_note == NO_FLOOR


def test_the_newest_floor_of_the_same_runs_is_found() -> None:
    rows = [a_row(id="old", floor={"psnr_db": 1.0}), a_row(id="new", floor={"psnr_db": 2.0}), a_row(id="none")]
    rows += [
        a_row(id="steps", floor={"psnr_db": 3.0}, num_inference_steps=7),
        a_row(id="dtype", floor={"psnr_db": 3.0}, dtype="float32"),
    ]
    plan = SimpleNamespace(
        load=SimpleNamespace(family=rows[0].family, dtype="bfloat16"),
        request=Request(width=1280, height=720, num_frames=81, num_inference_steps=50),
    )
    found = Ledger(rows).floor_for(plan)  # type: ignore[arg-type]
    assert found is not None and found.id == "new"
    plan.request = Request(width=640, height=720, num_frames=81, num_inference_steps=50)
    assert Ledger(rows).floor_for(plan) is None  # type: ignore[arg-type]


def test_a_generated_clip_carries_its_report(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, capsys, "generate", PROMPT, *SMALL, "-o", "a.mp4", "--master", "a.mkv")[0] == 0
    append(a_row(id="f", family="flipbook", dtype="float32", width=64, height=64, num_frames=5, num_inference_steps=2,
                 floor={"psnr_db": 90.0}, floor_of="kernels"))  # fmt: skip
    words = ("generate", PROMPT, *SMALL[:-1], "--guidance", "3", "-o", "b.mp4", "--reference", "a.mkv")
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 0 and "against a.mkv: not bit-identical" in err and "outside 90" in err
    report = FidelityReport.from_dict(read_recipe("b.mp4")["fidelity"])
    assert report.shape == (5, 64, 64, 3) and report.a == "a.mkv" and not report.identical
    code, out, _ = run(monkeypatch, capsys, "generate", PROMPT, *SMALL, "-o", "c.mp4", "--reference", "a.mkv", "--json")
    done = json.loads(out.splitlines()[-1])
    assert code == 0 and done["report"]["fidelity"]["identical"] is True


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [("none.mkv", 5, "there is no file"), ("clip.mp4", 2, "lossy"), ("small.npy", 2, "give --size 8x8 --frames 2")],
)
def test_a_wrong_reference_is_told_of_before_anything_is_made(
    file: str, code: int, words: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"x")
    np.save(tmp_path / "small.npy", np.zeros((2, 8, 8, 3), np.uint8))
    monkeypatch.setattr("undercrank.engine.load", lambda *a, **k: pytest.fail("loaded"))
    found, out, err = run(monkeypatch, capsys, "generate", PROMPT, *SMALL, "-o", "a.mp4", "--reference", file)
    assert found == code and words in err and out == ""
