"""`undercrank compare`: a table with units and direction, JSON, and exit code 2 for what has no distance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.commands import run
from undercrank import video
from undercrank.comparing import floor_in_words, table_of
from undercrank.metrics import METRICS
from undercrank.records import Distance, FidelityReport


@pytest.fixture
def films(tmp_path: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    frames = rng.integers(20, 230, (4, 32, 32, 3), dtype=np.uint8)
    a, b = tmp_path / "a.mkv", tmp_path / "b.npy"
    video.write_master(a, frames, fps=16, recipe={})
    np.save(b, frames + rng.integers(0, 3, frames.shape, dtype=np.uint8))
    return a, b


def test_two_films_are_compared_in_a_table(films: Any, monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = run(monkeypatch, capsys, "compare", *films)
    assert code == 0 and "not bit-identical" in out
    (psnr,) = [line for line in out.splitlines() if line.startswith("PSNR")]
    assert " dB " in psnr and "higher" in psnr
    (flicker,) = [line for line in out.splitlines() if line.startswith("luma flicker")]
    assert "of 255" in flicker and "lower" in flicker
    assert "LPIPS (alex): not computed" in out


def test_json_is_a_report(films: Any, monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = run(monkeypatch, capsys, "compare", *films, "--metric", "psnr_db", "--metric", "ssim", "--json")
    answer = json.loads(out)
    report = FidelityReport.from_dict(answer["report"])
    assert code == 0 and [d.metric for d in report.distances] == ["psnr_db", "ssim"]
    assert report.shape == (4, 32, 32, 3) and not report.identical and report.distances[0].closer == "higher"


def test_a_film_and_itself_are_identical(films: Any, monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = run(monkeypatch, capsys, "compare", films[0], films[0], "--metric", "psnr_db")
    assert code == 0 and "\nbit-identical" in out and "stands for infinite" in out


def test_latents_are_compared_as_latents(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    torch.save(torch.ones(1, 4, 2, 3, 3), tmp_path / "a.pt")
    torch.save(torch.ones(1, 4, 2, 3, 3) * 1.1, tmp_path / "b.pt")
    code, out, _ = run(monkeypatch, capsys, "compare", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    report = FidelityReport.from_dict(json.loads(out)["report"])
    assert code == 0 and report.kind == "latents"
    assert {d.metric: d.value for d in report.distances}["latent_rel"] == pytest.approx(0.1)


def hostile(tmp_path: Path) -> dict[str, tuple[object, ...]]:
    frames = np.full((3, 16, 16, 3), 90, np.uint8)
    np.save(tmp_path / "a.npy", frames)
    np.save(tmp_path / "small.npy", frames[:, :8, :8])
    np.save(tmp_path / "short.npy", frames[:2])
    np.save(tmp_path / "empty.npy", frames[:0])
    np.save(tmp_path / "nan.npy", np.full((3, 16, 16, 3), np.nan, np.float32))
    torch.save(torch.ones(1, 4, 2, 3, 3), tmp_path / "latents.pt")
    torch.save(torch.ones(5, 1, 4, 2, 3, 3), tmp_path / "steps.pt")
    video.write_mp4(tmp_path / "clip.mp4", frames, fps=16, recipe={})
    return {
        "one size": ("a.npy", "small.npy"),
        "has 2": ("a.npy", "short.npy"),
        "is empty": ("empty.npy", "empty.npy"),
        "NaN": ("a.npy", "nan.npy"),
        "lossy": ("a.npy", "clip.mp4"),
        "two of one kind": ("a.npy", "latents.pt"),
        "5 steps": ("latents.pt", "steps.pt"),
        "no metric 'psnr'": ("a.npy", "a.npy", "--metric", "psnr"),
        "kind 'film'": ("a.npy", "a.npy", "--kind", "film"),
    }


@pytest.mark.parametrize(
    "words",
    ["one size", "has 2", "is empty", "NaN", "lossy", "two of one kind", "5 steps", "no metric 'psnr'", "kind 'film'"],
)
def test_what_has_no_distance_ends_with_2_and_says_why(
    words: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    arguments = hostile(tmp_path)[words]
    monkeypatch.chdir(tmp_path)
    code, out, err = run(monkeypatch, capsys, "compare", *arguments)
    assert code == 2 and words in err and out == "" and len(err.strip().splitlines()) == 1


def test_one_frame_is_compared_but_for_its_motion(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    np.save(tmp_path / "one.npy", np.full((1, 16, 16, 3), 90, np.uint8))
    code, out, _ = run(monkeypatch, capsys, "compare", tmp_path / "one.npy", tmp_path / "one.npy")
    assert code == 0 and "temporal-difference error: not computed: one frame has no motion" in out


def test_a_missing_file_is_missing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert run(monkeypatch, capsys, "compare", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 5


def test_a_floor_stands_beside_its_distance() -> None:
    row = Distance(
        metric="psnr_db", value=50.0, unit="dB", closer="higher",
        floor={"bfloat16 against float32": 51.8, "attention kernels": 49.0}, inside=("attention kernels",),
    )  # fmt: skip
    assert floor_in_words(row) == "51.8 (bfloat16 against float32): outside; 49 (attention kernels): inside"
    headings, rows = table_of((row,))
    assert headings[-1] == "rounding floor" and rows[0][:5] == ("PSNR", "50", "-", "dB", "higher")
    assert METRICS["psnr_db"].further(50.0, 51.8) and not METRICS["psnr_db"].further(50.0, 49.0)
