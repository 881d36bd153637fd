"""One clip from the command line: refused early, written whole, remembered, told truly. The engine is pretended."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from undercrank import ledger, oneshot, video
from undercrank.ledger import HERE, read_ledger
from undercrank.levers import ORDER
from undercrank.machine import this_machine
from undercrank.oneshot import Outputs, make_clip, recipe_in_words
from undercrank.planner import make_plan
from undercrank.records import (
    BadInput,
    Cancelled,
    Device,
    NotFound,
    OutOfMemory,
    Receipt,
    Report,
    Request,
    RunFailed,
    Trace,
)
from undercrank.sources import which_model


class Film:
    """A clip whose file is its recipe."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def save(self, path: Path, *, listener: Any) -> Path:
        listener(
            SimpleNamespace(stage="encode", done=1, total=1, unit="frames", step_ms=None, eta_s=None, loading=None)
        )
        Path(path).write_text(json.dumps(self.report.to_dict()))
        return Path(path)

    def save_master(self, path: Path) -> Path:
        Path(path).write_text("master")
        return path


class PretendedEngine:
    """Plans in earnest, films nothing."""

    made: list[Request]
    options: dict[str, Any]
    frames_hash = "aa" * 32
    during: Callable[[PretendedEngine], None] = staticmethod(lambda engine: None)

    def __init__(self, **options: Any) -> None:
        type(self).options = options
        self.reason: str | None = None

    def __enter__(self) -> PretendedEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def cancel(self, reason: str) -> None:
        self.reason = reason

    def check_cancelled(self) -> None:
        if self.reason:
            raise Cancelled(self.reason)

    def generate(self, request: Request, *, listener: Any) -> Film:
        self.made.append(request)
        self.during(self)
        request = replace(request, seed=7 if request.seed is None else request.seed)
        family, load = which_model(request)
        machine = this_machine()
        plan = make_plan(request, family=family, machine=machine, ledger=read_ledger(), load=load)
        steps = (100.0, 300.0, 200.0)
        stages = {"load": 9.0, "text": 0.5, "denoise": 0.6, "decode": 0.25}
        return Film(
            Report(
                undercrank="0", request=plan.request, machine=machine, model_fingerprint="ff", plan=plan,
                receipts=(Receipt(lever="host_sync", engage_ms=1.0),),
                trace=Trace(stage_s=stages, step_ms=steps, stalls=None, peak_bytes=123),
                frames_hash=self.frames_hash, notes=(*plan.notes, "prompt: 3 tokens dropped"),
            )
        )  # fmt: skip


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[PretendedEngine]:
    engine = type("Engine", (PretendedEngine,), {"made": [], "options": {}})
    monkeypatch.setitem(sys.modules, "undercrank.engine", SimpleNamespace(Engine=engine))  # type: ignore[arg-type]
    monkeypatch.setattr(oneshot, "read_recipe", lambda path: json.loads(Path(path).read_text()))
    monkeypatch.setattr(ledger, "_shipped", list)  # the user's own rows alone
    monkeypatch.chdir(tmp_path)
    return engine


@contextmanager
def never(cancel: Callable[[str], None]) -> Iterator[None]:
    yield


def film(
    asked: Request | None = None, given: tuple[str, ...] = ("prompt",), repeat: Path | None = None, **options: Any
) -> None:
    outputs = {name: options.pop(name, None) for name in ("clip", "master", "report")}
    clip = outputs.pop("clip")
    make_clip(
        asked or Request(prompt="a red ball", seed=7),
        Outputs.checked(clip, **outputs),
        repeat=repeat,
        given=frozenset(given),
        **{
            "allow_pickle": False, "local_files_only": False, "as_json": False, "quiet": True, "on_cancellable": never,
        } | options,
    )  # fmt: skip


# --------------------------------------------------------------------------- before


@pytest.mark.parametrize(
    ("field", "name", "suffix"),
    [("-o", "x.avi", ".mp4"), ("--master", "x.mp4", ".mkv"), ("--report", "x.txt", ".json")],
)
def test_a_name_of_the_wrong_kind_is_refused_with_a_right_one(field: str, name: str, suffix: str) -> None:
    places: dict[str, Any] = {"-o": None, "--master": None, "--report": None, field: Path(name)}
    clip, master, report = places.values()
    with pytest.raises(BadInput, match=rf"{field} {name}: the name must end in {suffix}, such as x{suffix}") as caught:
        Outputs.checked(clip, master=master, report=report)
    assert caught.value.field == field


def test_names_of_the_right_kind_are_kept_whatever_their_case(tmp_path: Path) -> None:
    clip, master, report = tmp_path / "a.MP4", tmp_path / "a.mkv", tmp_path / "a.json"
    outputs = Outputs.checked(clip, master=master, report=report)
    assert (outputs.clip, outputs.master, outputs.report) == (clip, master, report)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no folder .*/films; make it with mkdir -p"):
        Outputs.checked(tmp_path / "films" / "a.mp4", master=None, report=None)


def test_a_folder_as_a_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").mkdir()
    with pytest.raises(BadInput, match="is a folder; name a file in it"):
        Outputs.checked(tmp_path / "a.mp4", master=None, report=None)


@pytest.mark.parametrize("clip", ["a.mp4", None])
def test_a_read_only_folder_is_refused_before_anything_runs(
    engine: type[PretendedEngine], monkeypatch: pytest.MonkeyPatch, clip: str | None
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(BadInput, match="is read-only; choose another"):
        film(clip=Path(clip) if clip else None)
    assert engine.made == []


def test_no_prompt_is_a_question_and_an_empty_one_is_not(engine: type[PretendedEngine]) -> None:
    with pytest.raises(BadInput, match="what shall the film show") as caught:
        film(Request(seed=1), given=())
    assert caught.value.field == "prompt"
    film(Request(prompt="", seed=1))
    assert [request.prompt for request in engine.made] == [""]


@pytest.mark.parametrize(
    "wrong", [{"num_inference_steps": 0}, {"model": "flipbok"}, {"device": "tpu"}, {"wishes": (("host_sink", "on"),)}]
)
def test_a_slip_is_refused_before_the_engine_is_made(engine: type[PretendedEngine], wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        film(Request(**{"prompt": "x", **wrong}))
    assert (engine.made, engine.options) == ([], {})


def test_a_full_disk_is_foreseen(engine: type[PretendedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 10**12, 1000))
    with pytest.raises(RunFailed, match="the disk is full: .* has 1000 bytes free, the clip needs about"):
        film()
    assert engine.made == []


def test_a_clip_that_cannot_fit_is_refused_before_torch_is_imported(
    engine: type[PretendedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = replace(this_machine(), devices=(Device(kind="cpu", name="full", free_bytes=1000),))
    monkeypatch.setattr(oneshot, "this_machine", lambda: full)
    with pytest.raises(OutOfMemory, match="cpu has 0.0 GiB free"):
        film()
    assert engine.made == []


def test_a_recipe_file_that_is_not_there_is_named(engine: type[PretendedEngine]) -> None:
    with pytest.raises(NotFound, match="there is no file nowhere.mp4"):
        film(Request(), given=(), repeat=Path("nowhere.mp4"))


# --------------------------------------------------------------------------- made and written


def test_a_clip_is_named_after_its_prompt_and_seed(
    engine: type[PretendedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    film(Request(prompt="A red/ball", seed=41), quiet=False)
    (file,) = Path.cwd().glob("*.mp4")
    assert file.name == f"{video.safe_stem('A red/ball')}-41.mp4"
    assert capsys.readouterr().out == f"{file.name}\n"


def test_a_name_that_we_made_up_never_replaces_an_earlier_film(engine: type[PretendedEngine]) -> None:
    stem = f"{video.safe_stem('a red ball')}-7"
    for number, name in enumerate([stem, f"{stem}-2", f"{stem}-3"], start=1):
        film(Request(prompt="a red ball", seed=7, num_inference_steps=number + 1))
        assert {file.stem for file in Path.cwd().glob("*.mp4")} >= {name}
    kept = [json.loads(Path(f"{name}.mp4").read_text()) for name in (stem, f"{stem}-2", f"{stem}-3")]
    assert [each["request"]["num_inference_steps"] for each in kept] == [2, 3, 4]


def test_a_freed_name_is_used_again_and_a_given_one_as_it_is(engine: type[PretendedEngine]) -> None:
    stem = f"{video.safe_stem('a red ball')}-7"
    Path(f"{stem}.mp4").mkdir()  # whatever is there counts
    assert oneshot._unused(Path(f"{stem}.mp4")) == Path(f"{stem}-2.mp4")
    film(clip=Path("a.mp4"))
    film(Request(prompt="other", seed=8), clip=Path("a.mp4"))
    assert json.loads(Path("a.mp4").read_text())["request"]["prompt"] == "other"
    assert sorted(file.name for file in Path.cwd().glob("*.mp4")) == sorted(["a.mp4", f"{stem}.mp4"])


def test_everything_asked_for_is_written(engine: type[PretendedEngine], tmp_path: Path) -> None:
    film(clip=tmp_path / "a.mp4", master=tmp_path / "a.mkv", report=tmp_path / "a.json")
    assert (tmp_path / "a.mkv").read_text() == "master"
    report = Report.from_json((tmp_path / "a.json").read_text(), levers=ORDER)
    assert report.request.prompt == "a red ball"
    recipe, told = json.loads((tmp_path / "a.mp4").read_text()), report.to_dict()
    assert told["trace"]["stage_s"].pop("encode") >= 0  # the clip itself cannot know how long its writing took
    assert recipe == told
    assert not list(tmp_path.glob("*.part*"))


def test_permissions_reach_the_engine(engine: type[PretendedEngine]) -> None:
    film(allow_pickle=True, local_files_only=True)
    assert engine.options == {"allow_pickle": True, "local_files_only": True, "encode_ahead": True}


def test_a_cancel_while_the_file_is_written_stops_it(engine: type[PretendedEngine]) -> None:
    @contextmanager
    def at_once(cancel: Callable[[str], None]) -> Iterator[None]:
        engine.during = staticmethod(lambda made: cancel("cancelled"))
        yield

    with pytest.raises(Cancelled):
        film(on_cancellable=at_once)
    assert not list(Path.cwd().glob("*.mp4"))
    assert read_ledger().rows == ()


def test_a_file_that_cannot_be_written_is_an_error_and_no_run_to_remember(
    engine: type[PretendedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Film, path: Path, *, listener: Any) -> Path:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Film, "save", full)
    with pytest.raises(OSError, match="No space left"):
        film()
    assert read_ledger().rows == ()


# --------------------------------------------------------------------------- remembered


def test_the_run_s_times_are_kept_for_the_next_plan(engine: type[PretendedEngine]) -> None:
    film(Request(prompt="x", seed=1, width=64, height=64, num_frames=5, num_inference_steps=3))
    (row,) = read_ledger().rows
    assert (row.family, row.lever, row.source, row.n) == ("flipbook", None, HERE, 1)
    assert (row.width, row.height, row.num_frames, row.num_inference_steps) == (64, 64, 5, 3)
    assert (row.step_ms, row.spread_ms, row.peak_bytes) == (200.0, 100.0, 123)
    assert row.total_s == pytest.approx(1.35), "the load is paid once, not by every clip"
    assert row.note == "levers: host_sync"
    assert len(row.id) == 12
    family, load = which_model(Request())
    request = Request(width=64, height=64, num_frames=5, num_inference_steps=3, device=engine.made[0].device)
    plan = make_plan(request, family=family, machine=this_machine(), ledger=read_ledger(), load=load)
    assert plan.expected.seconds == pytest.approx(1.35)
    assert plan.expected.seconds_basis == "measured here, same shape, n=1"


def test_a_ledger_that_cannot_be_written_costs_a_note_and_not_the_clip(
    engine: type[PretendedEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(row: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(oneshot, "append", read_only)
    film(clip=Path("a.mp4"))
    assert Path("a.mp4").exists()
    assert "note: the times of this run could not be kept" in capsys.readouterr().err


# --------------------------------------------------------------------------- told


def test_as_json_the_first_line_is_the_plan_and_the_last_the_report(
    engine: type[PretendedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    film(clip=Path("a.mp4"), as_json=True)
    out, err = capsys.readouterr()
    first, *_, last = (json.loads(line) for line in out.splitlines())
    assert err == ""
    assert (first["event"], last["event"], last["file"]) == ("plan", "done", "a.mp4")
    assert first["plan"]["request"]["prompt"] == "a red ball"
    assert last["report"]["frames_hash"] == engine.frames_hash


def test_quiet_says_nothing(engine: type[PretendedEngine], capsys: pytest.CaptureFixture[str]) -> None:
    film(Request(prompt="", seed=1), clip=Path("a.mp4"))
    assert capsys.readouterr() == ("", "")


def test_every_note_is_said_once_and_the_levers_and_the_promise_too(
    engine: type[PretendedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    film(Request(prompt="", seed=1, device="cpu", wishes=(("host_sync", "on"),)), clip=Path("a.mp4"), quiet=False)
    out, err = capsys.readouterr()
    assert out == "a.mp4\n"
    assert err.count("the prompt is empty") == 1
    assert err.count("note: prompt: 3 tokens dropped") == 1
    assert "flipbook, float32 on cpu; levers: host_sync; promise: exact" in err


# --------------------------------------------------------------------------- repeated


def a_recipe(engine: type[PretendedEngine]) -> Path:
    film(Request(prompt="a red ball", seed=41, num_inference_steps=3, guidance_scale=2.5), clip=Path("first.mp4"))
    engine.made.clear()
    return Path("first.mp4")


def test_a_recipe_is_repeated_as_it_was(engine: type[PretendedEngine], capsys: pytest.CaptureFixture[str]) -> None:
    file = a_recipe(engine)
    film(Request(), given=(), repeat=file, clip=Path("second.mp4"), quiet=False)
    (made,) = engine.made
    assert (made.prompt, made.seed, made.num_inference_steps, made.guidance_scale) == ("a red ball", 41, 3, 2.5)
    assert "the same frames as in the recipe, bit for bit" in capsys.readouterr().err


def test_what_was_typed_wins_over_the_recipe(engine: type[PretendedEngine]) -> None:
    file = a_recipe(engine)
    asked = Request(
        prompt="a cube", negative_prompt="blue", width=64, height=32, num_frames=5, fps=Fraction(8),
        num_inference_steps=2, guidance_scale=1.0, seed=9, fidelity="exact", wishes=(("host_sync", "off"),),  # type: ignore[arg-type]
        device="cpu", dtype="float32",
    )  # fmt: skip
    given = ("prompt", "negative_prompt", "size", "frames", "fps", "steps", "guidance", "seed", "fidelity", "lever",
             "device", "dtype", "model", "image")  # fmt: skip
    film(asked, given=given, repeat=file)
    assert engine.made == [asked]


@pytest.mark.parametrize("option", ["seed", "steps", "size"])
def test_only_what_was_typed_changes(engine: type[PretendedEngine], option: str) -> None:
    file = a_recipe(engine)
    film(Request(seed=5, num_inference_steps=9, width=64, height=64), given=(option,), repeat=file)
    (made,) = engine.made
    assert made.prompt == "a red ball"
    assert made.seed == (5 if option == "seed" else 41)
    assert made.num_inference_steps == (9 if option == "steps" else 3)
    assert (made.width, made.height) == ((64, 64) if option == "size" else (128, 128))


def test_every_field_of_a_request_can_be_typed() -> None:
    assert {*oneshot.OPTIONS.values(), "width", "height"} == set(Request.__dataclass_fields__)


@pytest.mark.parametrize("recipe", [{}, {"request": None}, {"request": 3}, {"request": {"speed": 3}}])
def test_a_recipe_of_another_program_is_refused(engine: type[PretendedEngine], recipe: Any) -> None:
    Path("other.mp4").write_text(json.dumps(recipe))
    with pytest.raises(BadInput):
        film(Request(), given=(), repeat=Path("other.mp4"))
    assert engine.made == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_fingerprint": "00"}, "other weights"),
        ({"machine": {"name": "elsewhere"}}, "another machine, other package versions"),
        ({"request": {}}, "changed settings"),
        ({}, "no difference in the recipe explains it"),
    ],
)
def test_other_frames_come_with_what_differs(
    engine: type[PretendedEngine], capsys: pytest.CaptureFixture[str], change: dict[str, Any], reason: str
) -> None:
    file = a_recipe(engine)
    recipe = json.loads(file.read_text())
    report = Report.from_dict(recipe, levers=ORDER)
    said = oneshot._compared(recipe | {"frames_hash": "00"} | change, report)
    assert said == f"not the same frames as in the recipe: {reason}"


# --------------------------------------------------------------------------- shown


def test_a_recipe_is_shown_in_words_and_as_json(engine: type[PretendedEngine]) -> None:
    file = a_recipe(engine)
    lines = recipe_in_words(file, as_json=False).splitlines()
    assert "prompt: a red ball" in lines
    assert "seed: 41" in lines
    assert any(line.startswith("host_sync: ") for line in lines)
    assert "note: prompt: 3 tokens dropped" in lines
    assert "seconds: load 9.0, text 0.5, denoise 0.6, decode 0.2" in lines
    assert f"frames_hash: {engine.frames_hash}" in lines
    assert not any(line.startswith("image:") for line in lines)
    assert json.loads(recipe_in_words(file, as_json=True)) == json.loads(file.read_text())


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound, match="there is no file nowhere.mp4"):
        recipe_in_words(Path("nowhere.mp4"), as_json=False)


@pytest.mark.parametrize(
    "recipe",
    [
        {"request": "hello"},
        {"request": {}, "plan": {"decisions": [{"foo": 1}]}, "machine": {}, "trace": {}, "notes": []},
        {"request": {}, "plan": {"decisions": []}, "machine": "m", "trace": {}, "notes": []},
        {"request": {}, "plan": {"decisions": []}, "machine": {}, "trace": {}, "notes": 3},
    ],
)
def test_a_recipe_that_is_not_ours_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]
) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(b"")
    monkeypatch.setattr(oneshot, "read_recipe", lambda path: recipe)
    with pytest.raises(BadInput, match="not one of undercrank's"):
        oneshot.recipe_in_words(file, as_json=False)


def test_a_prompt_from_elsewhere_does_not_steer_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(b"")
    recipe = {
        "request": {"prompt": "\x1b]0;owned\x07"},
        "plan": {"decisions": []},
        "machine": {},
        "trace": {},
        "notes": [],
    }
    monkeypatch.setattr(oneshot, "read_recipe", lambda path: recipe)
    assert "\x1b" not in oneshot.recipe_in_words(file, as_json=False)


@pytest.mark.parametrize(("asked", "seen"), [(None, ("PASSIVE", "1000")), ("ACTIVE", ("ACTIVE", None))])
def test_waiting_threads_soon_sleep_unless_the_person_has_decided_otherwise(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, seen: tuple[str, str | None]
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", asked)
    before, found = dict(os.environ), []
    stand_in = ModuleType("undercrank.engine")
    monkeypatch.setitem(sys.modules, "undercrank.engine", stand_in)
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    stand_in.__getattr__ = lambda name: found.append(tuple(map(os.environ.get, names))) or object  # type: ignore[method-assign]
    oneshot._engine_class()
    assert found[0] == seen and dict(os.environ) == before
