"""The study of flipbook's schedules runs, and its report says what its rows say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from undercrank.paths import Path as SearchedPath
from undercrank.prompts import TOY

TOOLS = Path(__file__).parent.parent / "tools" / "study"
STEPS = 12
SCHEDULES = ("111101010001", "110010010001", "110000100001")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def path(schedule: str) -> SearchedPath:
    return SearchedPath(
        source="searched", checkpoint="", family="flipbook", dtype="float32", scheduler="", denoiser="transformer",
        steps=STEPS, budget=schedule.count("1"), schedule=schedule, error=0.1, rule_error=0.2, films=1,
        prompts=("another",), seeds=(9,), width=32, height=32, num_frames=5, guidance_scale=5.0, forwards=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three prompts of the study, as small as it goes, on paths that are given."""
    out = tmp_path_factory.mktemp("study")
    known = out / "known.jsonl"
    known.write_text("".join(path(schedule).to_json() + "\n" for schedule in SCHEDULES))
    words = ["--prompts", "3", "--seeds", "1", "--steps", f"{STEPS}", "--frames", "5", "--size", "32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDERCRANK_CALIBRATIONS", "")
        patch.setattr(sys, "argv", ["study", "--out", str(out / "made"), "--paths", str(known), *words,
                                    "--metrics", "psnr_db", "ssim", "st_lpips_alex"])  # fmt: skip
        tool("step_cache_flipbook").main()
    return out / "made"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_setting_films_the_same_films_and_counts_its_calls(studied: Path) -> None:
    settings, films = lines(studied / "settings.jsonl"), lines(studied / "results.jsonl")
    assert {each["kind"] for each in settings} == {"floor", "preset", "path", "equal", "drifts", "steps"}
    for each in settings:
        own = [(film["prompt"], film["seed"]) for film in films if film["setting"] == each["name"]]
        assert own == [(prompt, 1) for prompt in TOY[:3]], each["name"]
        if each["schedules"]:
            assert each["calls"] == sum(digits.count("1") for digits in each["schedules"].values())
    by_path = {each["schedules"]["cond"] for each in settings if each["kind"] == "path"}
    assert by_path == set(SCHEDULES)


def test_the_rule_is_given_as_many_calls_as_the_path_or_one_fewer(studied: Path) -> None:
    settings = lines(studied / "settings.jsonl")
    spent = {each["preset"]: each["calls"] for each in settings if each["kind"] == "path"}
    rivals = [each for each in settings if each["kind"] == "equal"]
    assert rivals and all(spent[each["preset"]] - 1 <= each["calls"] <= spent[each["preset"]] for each in rivals)


def test_a_skipping_film_is_further_from_its_reference_than_rounding(studied: Path) -> None:
    found = {each["name"]: each["psnr_db"] for each in lines(studied / "settings.jsonl")}
    assert found["math"] > found["bfloat16"] > found["path 5"]


def test_the_report_says_what_the_rows_say_and_can_be_made_again_from_itself(studied: Path, tmp_path: Path) -> None:
    report = tool("step_cache_report")
    report.write(report.read(studied), tmp_path / "a")
    report.write(report.read(tmp_path / "a"), tmp_path / "b")
    names = ["report.html", "report.md", "results.jsonl"]
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == names
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    text, page = (tmp_path / "a" / "report.md").read_text(), (tmp_path / "a" / "report.html").read_text()
    path_5 = next(each for each in lines(studied / "settings.jsonl") if each["name"] == "path 5")
    assert f"{path_5['psnr_db']:.4g}" in text and SCHEDULES[1] in text
    assert page.count("<svg") == 2 and "http" not in page


def row(report: ModuleType, kind: str, calls: int, psnr: float, lpips: float, preset: str = "") -> Any:
    films = {"psnr_db": [psnr] * 3, "st_lpips_alex": [lpips] * 3}
    return report.Row(of=20, name=kind, kind=kind, preset=preset, calls=calls, films=films)


def test_what_a_preset_is_held_to() -> None:
    report = tool("step_cache_report")
    floor, plain = row(report, "floor", 40, 44.0, 0.002), row(report, "steps", 18, 30.0, 0.02)

    def kept(preset: str, calls: int, psnr: float, lpips: float) -> bool:
        return bool(report.holds(row(report, "path", calls, psnr, lpips, preset), floor, plain))

    assert kept("quality", 24, 42.1, 0.002)
    assert not kept("quality", 26, 42.1, 0.002)  # 1.54 times fewer
    assert not kept("quality", 24, 41.9, 0.002) and not kept("quality", 24, 42.1, 0.0021)
    assert kept("balanced", 18, 31.0, 0.01)
    assert not kept("balanced", 18, 29.0, 0.01) and not kept("balanced", 18, 31.0, 0.03)
    assert not kept("fast", 18, 31.0, 0.01) and kept("fast", 16, 31.0, 0.01)
