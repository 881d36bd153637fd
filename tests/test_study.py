"""The study of flipbook's schedules runs, and its report says what its rows say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from undercrank import paths
from undercrank.ledger import read_ledger
from undercrank.paths import Path as SearchedPath
from undercrank.prompts import TOY

TOOLS = Path(__file__).parent.parent / "tools" / "study"
COMMITTED = Path(__file__).parent.parent / "docs" / "evidence" / "step-cache-flipbook"
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
        steps=STEPS, levels=tuple(1 - i / STEPS for i in range(STEPS)), budget=schedule.count("1"), schedule=schedule,
        error=0.1, rule_error=0.2, films=1,
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


# --------------------------------------------------------------------------- the report that is committed


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return tool("step_cache_report")


@pytest.fixture(scope="module")
def committed(report: ModuleType) -> Any:
    return report.read(COMMITTED)


def test_the_committed_report_is_what_its_results_say(report: ModuleType, committed: Any, tmp_path: Path) -> None:
    report.write(committed, tmp_path)
    for name in ("report.md", "report.html", "results.jsonl"):
        assert (tmp_path / name).read_text() == (COMMITTED / name).read_text(), name


def test_it_is_of_twelve_held_out_prompts_three_seeds_and_three_numbers_of_steps(committed: Any) -> None:
    assert committed.counts == (20, 30, 50)
    assert committed.about["prompts"] == list(TOY) and committed.about["seeds"] == [1, 2, 3]
    assert all(len(row.films["psnr_db"]) == 36 for row in committed.rows)
    assert not {prompt for each in committed.paths for prompt in each["prompts"]} & set(TOY)


def test_the_searched_path_is_nearer_than_the_rule_at_equal_calls_everywhere(
    report: ModuleType, committed: Any
) -> None:
    paths_ = [row for steps in committed.counts for row in committed.of(steps, "path")]
    assert len(paths_) == 9
    for row in paths_:
        rivals = [other for other in committed.of(row.of, "equal") if other.preset == row.preset]
        assert len(rivals) >= 2 and all(row.calls - 1 <= other.calls <= row.calls for other in rivals)
        assert all(row.nearer(other, metric) for other in rivals for metric in report.GATES), row.name


def test_presets_keep_what_they_are_held_to_but_for_quality_at_20_steps(report: ModuleType, committed: Any) -> None:
    kept = {}
    for steps in committed.counts:
        for row in committed.of(steps, "path"):
            kept[steps, row.preset] = report.holds(row, committed.floor(steps), committed.plain(row)[0])
    assert [cell for cell, holds in kept.items() if not holds] == [(20, "quality")]


def test_what_ships_is_what_the_study_found(report: ModuleType, committed: Any) -> None:
    found = [SearchedPath.from_dict(each) for each in committed.paths]
    assert [path for path in paths.read_paths() if path.source == "searched"] == found
    rows = [row for row in read_ledger(Path("no such file")).rows if row.setting.startswith("searched ")]
    assert rows == report.as_measurements(committed)
