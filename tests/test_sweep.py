"""A sweep films a grid on the same films, and beside each setting the fewer steps that take as long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from undercrank import report
from undercrank.engine import Engine
from undercrank.levers import ORDER
from undercrank.quality import distance_of
from undercrank.records import BadInput, Lever, LeverRefused, Promise, Request
from undercrank.sweep import (
    Point,
    Reel,
    Sweep,
    _possible,
    axes,
    beats_rival,
    front,
    gates,
    grid_of,
    rival_of,
    rivals,
    sweep,
)
from undercrank.testing import tiny_folder
from undercrank.undo import swap_attr

ASKED = {"width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 4}


@dataclass(frozen=True, kw_only=True)
class Scale(Lever):
    """Makes the denoiser's answer larger by so many thousandths."""

    name = "scale"
    knobs = ("scale",)
    by: float = 0.0

    def promises(self, case: Any) -> Promise:
        return Promise.LOSSY

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        return cls(by=float(wishes.get("scale", "0")))

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        return tuple((("scale", str(value)),) for value in (1, steps))

    @contextmanager
    def engage(self, rig: Any) -> Iterator[None]:
        forward = rig.denoisers[0].forward

        def scaled(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            return (result[0] * (1 + self.by / 1000), *result[1:])

        with swap_attr(rig.denoisers[0], "forward", scaled):
            yield


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> None:
    levers = (*ORDER, Scale)
    for module in ("planner", "levers", "rounding", "fidelity", "sweep"):
        monkeypatch.setattr(f"undercrank.{module}.ORDER", levers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_folder("wan2.1-1.3b", tmp_path_factory.mktemp("models") / "wan")


def a_point(
    label: str, *, kind: str = "setting", steps: int = 30, calls: float = 60, speed: float = 1.0, **values: float
) -> Point:
    return Point(
        label=label, kind=kind, wishes=(), steps=steps, loop_s=30 / speed, loop_range_s=(1.0, 2.0), speed=speed,
        calls=calls, fewer_calls=60 / calls, distances=tuple(distance_of(*pair) for pair in values.items()),
    )  # fmt: skip


def a_sweep(*points: Point, **fields: Any) -> Sweep:
    sweep = Sweep(
        title="scale", family="flipbook", machine="m", device="d", versions={}, width=8, height=8, num_frames=5,
        num_inference_steps=30, guidance_scale=5.0, dtype="float32", prompts=("a",), seeds=(1,), set_up="b, seed 2",
        points=points, floors=(), drift=1.0,
    )  # fmt: skip
    return replace(sweep, **fields)


# --------------------------------------------------------------------------- what is swept


def test_a_lever_brings_its_own_grid(scale: None) -> None:
    assert grid_of(["scale"], 20) == ((("scale", "1"),), (("scale", "20"),))
    assert grid_of(["host_sync"], 20) == ((("host_sync", "on"),),)


@pytest.mark.parametrize("steps", [3, 20, 50])
def test_every_setting_of_every_lever_s_grid_is_one_that_it_takes(steps: int) -> None:
    for lever in ORDER:
        settings = [lever.from_wish(dict(wishes)) for wishes in lever.grid(steps)]
        assert settings and len(set(settings)) == len(settings)


def test_knobs_with_values_are_combined(scale: None) -> None:
    grid = grid_of(["scale=1, 2", "host_sync=on,off"], 20)
    assert len(grid) == 4 and grid[1] == (("scale", "1"), ("host_sync", "off"))
    assert grid_of([], 20) == ()


@pytest.mark.parametrize(
    ("word", "words"), [("scal", "no lever 'scal'"), ("scal=1", "no lever has a knob"), ("host_sync=", "give values")]
)
def test_a_slip_is_answered(word: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        grid_of([word], 20)


# --------------------------------------------------------------------------- the rival


def test_a_rival_takes_as_long_by_time_or_by_calls_whichever_grants_it_more() -> None:
    base = Request(num_inference_steps=30)
    assert rivals([a_point("a", calls=36, speed=1.5), a_point("b", calls=36, speed=2.0)], base) == [20, 18]
    assert rivals([a_point("by time", speed=1.6)], base) == [19], "no call is saved"
    assert rivals([a_point("slow", speed=0.5), a_point("same", speed=1.0)], base) == [], "all steps are no fewer"


def test_the_rival_is_the_nearest_run_that_takes_no_less() -> None:
    plain = [a_point(f"{n} steps", kind="steps", steps=n, calls=2 * n, speed=30 / n) for n in (20, 18, 15)]
    assert rival_of(a_point("a", calls=36, speed=2.0), plain, 30) == "18 steps"
    assert rival_of(a_point("a", calls=32, speed=2.0), plain, 30) == "18 steps", "15 steps would be less"
    assert rival_of(a_point("a", calls=32, speed=1.5), plain, 30) == "20 steps", "its seconds grant 20"
    assert rival_of(a_point("a", calls=58, speed=2.0), plain, 30) == "" and rival_of(plain[0], plain, 30) == ""


@pytest.mark.parametrize(("own", "other", "wins"), [(45.0, 40.0, True), (40.0, 45.0, False)])
def test_a_setting_beats_its_rival_when_it_is_nearer(own: float, other: float, wins: bool) -> None:
    point = replace(a_point("a", calls=36, psnr_db=own, st_lpips_alex=1 / own), rival="18 steps")
    found = a_sweep(point, a_point("18 steps", kind="steps", psnr_db=other, st_lpips_alex=1 / other))
    assert beats_rival(point, found, "psnr_db") is wins and beats_rival(point, found, "st_lpips_alex") is wins
    assert beats_rival(point, found, "ssim") is None and beats_rival(replace(point, rival=""), found, "psnr_db") is None


def test_the_front_is_what_no_other_setting_beats_in_both() -> None:
    points = [a_point(str(s), speed=s, psnr_db=p) for s, p in ((1.5, 50.0), (2.0, 40.0), (1.8, 39.0), (3.0, 30.0))]
    assert [point.label for point in front(points, "psnr_db")] == ["1.5", "2.0", "3.0"]
    points = [a_point(str(s), speed=s, st_lpips_alex=p) for s, p in ((1.5, 0.01), (2.0, 0.02), (1.8, 0.03))]
    assert [point.label for point in front(points, "st_lpips_alex")] == ["1.5", "2.0"]


def test_seconds_of_a_machine_that_drifted_make_no_gain(monkeypatch: Any) -> None:
    steady, drifted = a_sweep(a_point("a"), drift=1.05), a_sweep(a_point("a"), drift=0.5)
    assert steady.is_steady and not drifted.is_steady
    levers = {"base": [], "a": [SimpleNamespace(name="scale")]}
    reports = {
        name: SimpleNamespace(plan=SimpleNamespace(levers=on), trace=SimpleNamespace(peak_bytes=1))
        for name, on in levers.items()
    }
    monkeypatch.setattr(report, "as_row", lambda point, report, **measured: measured)
    gains = []
    for found in (steady, drifted):
        swept = replace(found, points=(a_point("base", kind="reference"), a_point("a", speed=2.0)))
        gains += [row["gain"] for row in report.as_rows(Reel(sweep=swept, reports=reports))]  # type: ignore[arg-type, index]
    assert gains == [2.0, None]


def test_calls_are_an_axis_where_some_are_saved() -> None:
    assert axes(a_sweep(a_point("a", calls=36))) == ["fewer_calls", "speed"] and axes(a_sweep(a_point("a"))) == [
        "speed"
    ]
    assert gates(a_sweep(a_point("a", ssim=1.0, psnr_db=1.0))) == ["psnr_db"]


# --------------------------------------------------------------------------- the whole of it


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


def test_a_sweep_has_its_settings_their_rivals_and_the_floors(scale: None, engine: Engine, folder: Path) -> None:
    request = Request(model=str(folder), wishes=(("host_sync", "on"),), **ASKED)
    grid = grid_of(["scale=1,50"], 4)
    reel = sweep(engine, request, grid, prompts=("a ball", "a box"), seeds=(1,), names=("psnr_db", "ssim"))
    found = reel.sweep
    near, far = found.settings
    assert (near.label, far.label) == ("scale=1", "scale=50")
    assert near.value("psnr_db") > far.value("psnr_db") > 0  # type: ignore[operator]
    assert dict(near.wishes)["scale"] == "1" and dict(near.wishes)["host_sync"] == "on", "the request's wishes stay on"
    assert dict(found.points[0].wishes)["scale"] == "off" and found.points[0].kind == "reference"
    assert {point.label for point in found.plain} <= {"1 steps", "2 steps", "3 steps"}
    assert [sample.point for sample in reel.samples].count("scale=1") == 2 == len(near.distances[0].curve)
    assert {floor.dtype for floor in found.floors} == {"float32", "bfloat16"} and near.distances[0].floor
    assert (
        found.prompts == ("a ball", "a box")
        and "seed 9001" in found.set_up
        and found.notes == ("on in every run: host_sync=on",)
    )
    assert Sweep.from_json(found.to_json()) == found
    assert reel.stills["scale=1"].shape == (4, 32, 32, 3)


def test_a_setting_that_is_refused_here_is_left_out_and_said(engine: Engine, folder: Path, monkeypatch: Any) -> None:
    request = Request(model=str(folder), **ASKED)
    grid = [(("host_sync", "on"),), (("offload", "model"),)]
    possible, refused = _possible(engine, request, grid)
    assert possible == grid[:1] and len(refused) == 1 and refused[0].startswith("left out: offload=model: ")
    with pytest.raises(LeverRefused, match="offload=model"):
        _possible(engine, request, grid[1:])


def test_an_empty_grid_and_a_film_of_the_set_up_are_refused(scale: None, engine: Engine, folder: Path) -> None:
    request = Request(model=str(folder), **ASKED)
    with pytest.raises(BadInput, match="nothing to sweep"):
        sweep(engine, request, ())
    with pytest.raises(BadInput, match="judge them by other prompts and seeds"):
        sweep(engine, request, grid_of(["scale=1"], 4), prompts=("a ball",), seeds=(9001,))


def test_the_command_writes_a_report_and_rows(
    scale: None, folder: Path, tmp_path: Path, capsys: Any, own_ledger: Path
) -> None:
    from undercrank.comparing import run_sweep
    from undercrank.ledger import read_ledger

    options: dict[str, Any] = dict(
        swept=("scale=50",), prompts=("a ball",), seeds=(1,), metrics=("psnr_db",), keep=True, allow_pickle=False,
        local_files_only=True, as_json=False, on_cancellable=lambda cancel: nullcontext(),
    )  # fmt: skip
    run_sweep(Request(model=str(folder), **ASKED), out=tmp_path / "report", **options)
    files = capsys.readouterr().out.splitlines()
    assert [Path(file).name for file in files] == ["report.html", "report.md", "results.jsonl"]
    assert all(Path(file).stat().st_size > 500 for file in files)
    (row,) = [row for row in read_ledger().rows if row.source == "measured here"]
    assert (row.lever, row.n, row.num_inference_steps) == ("scale", 1, 4) and row.distances["psnr_db"] < 60
    assert row.prompts == ("a ball",) and row.calibrated_on and row.floor["psnr_db"] > 60
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file; name a folder"):
        run_sweep(Request(model=str(folder), **ASKED), out=tmp_path / "file", **options)
