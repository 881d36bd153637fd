"""Levers are held to their promises beside the rounding floor; each grade can be lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from undercrank import families, fidelity
from undercrank.engine import Engine
from undercrank.fidelity import films_of, grade, only, refuse_overlap, verify
from undercrank.levers import ORDER, lever_of_knob
from undercrank.metrics import METRICS
from undercrank.prompts import FILMED, SET_UP, TOY, prompts_for
from undercrank.quality import distance_of
from undercrank.records import BadInput, FidelityReport, Lever, LeverRefused, Measurement, Promise, Request, RunFailed
from undercrank.rounding import Floor, attention_by, beside, furthest, measure_floors, medians, stock
from undercrank.takes import compare_takes, spread, take, together
from undercrank.testing import tiny_folder
from undercrank.undo import swap_attr

NAMES = ("psnr_db", "ssim")
ASKED = {"width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_folder("wan2.1-1.3b", tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture
def request_(folder: Path) -> Request:
    return Request(prompt="a red ball", model=str(folder), seed=7, wishes=(("host_sync", "on"),), **ASKED)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


class Shift(Lever):
    """Adds a little to what the denoiser makes; `by` and `promised` are set by each test."""

    name = "shift"
    by = 0.0
    promised = Promise.EXACT

    def promises(self, case: Any) -> Promise:
        return self.promised

    @contextmanager
    def engage(self, rig: Any) -> Iterator[None]:
        (module,) = rig.denoisers
        forward = module.forward

        def shifted(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            return (result[0] * (1 + self.by), *result[1:])

        with swap_attr(module, "forward", shifted):
            yield


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> type[Shift]:
    levers = (*ORDER, Shift)
    for module in ("planner", "levers", "rounding", "fidelity"):
        monkeypatch.setattr(f"undercrank.{module}.ORDER", levers)
    monkeypatch.setattr(Shift, "by", 0.0)
    return Shift


# --------------------------------------------------------------------------- a take


def test_a_take_sees_every_step_and_both_branches_of_the_first(engine: Engine, request_: Request) -> None:
    seen = take(engine, request_)
    assert len(seen.latents) == 3 and len(seen.forwards) == 2
    assert seen.latents[-1].shape == (1, 16, 2, 4, 4) and seen.frames_FCHW.shape == (5, 3, 32, 32)
    assert seen.is_finite and not torch.equal(seen.forwards[0], seen.forwards[1])


def test_a_witness_leaves_nothing_and_changes_no_bit(engine: Engine, request_: Request) -> None:
    plain = engine.generate(request_).report.frames_hash
    engine.move_to(engine.plan(request_))
    before = [dict(module.__dict__) for module in engine.rig.denoisers]  # type: ignore[union-attr]
    assert take(engine, request_).report.frames_hash == plain
    assert [dict(module.__dict__) for module in engine.rig.denoisers] == before  # type: ignore[union-attr]


def test_takes_are_compared_inside_a_forward_along_the_run_and_at_the_end(engine: Engine, request_: Request) -> None:
    first, other = take(engine, request_), take(engine, replace(request_, guidance_scale=4.0))
    by = {d.metric: d for d in compare_takes(first, other, names=NAMES).distances}
    assert list(by) == ["one_forward", "latent_rel", "latent_max_abs", *NAMES]
    assert by["one_forward"].value == 0, "guidance acts after the forward"
    assert len(by["latent_rel"].curve) == 3 and by["latent_rel"].value > 0
    assert compare_takes(first, take(engine, request_), names=NAMES).identical


def a_report(psnr: float | None, note: str = "") -> FidelityReport:
    distances = (distance_of("psnr_db", psnr, (), note),)
    return FidelityReport(a="", b="", kind="frames", shape=(1, 1, 1, 3), identical=False, distances=distances)


def test_several_films_have_a_median_and_a_furthest_one() -> None:
    (distance,) = together([a_report(40.0), a_report(50.0), a_report(42.0)])
    assert (distance.value, distance.worst, spread(distance)) == (42.0, 40.0, (50.0, 40.0))
    (distance,) = together([a_report(40.0), a_report(None, "not computed: x")])
    assert distance.value == 40.0 and distance.note == "not computed: x; of 1 of 2 films"


# --------------------------------------------------------------------------- the floor


def test_the_floor_has_both_kinds_each_in_its_dtype(engine: Engine, request_: Request) -> None:
    reference = take(engine, stock(engine.plan(request_).request))
    kernels, numbers = measure_floors(engine, [reference], names=NAMES)
    assert (kernels.dtype, kernels.name) == ("float32", "float32: attention by math against stock")
    assert (numbers.dtype, numbers.name) == ("bfloat16", "bfloat16 against float32")
    small, large = kernels.of("one_forward"), numbers.of("one_forward")
    assert small and large and 0 < small.value < 1e-4 < large.value < 0.1  # type: ignore[operator]


def test_another_kernel_is_left_again(engine: Engine, request_: Request) -> None:
    engine.move_to(engine.plan(request_))
    processors = [m.processor for m in engine.rig.denoisers[0].modules() if hasattr(m, "processor")]  # type: ignore[union-attr]
    with attention_by(engine.rig, "_native_math") as count:
        assert count == len(processors) and all(p._attention_backend == "_native_math" for p in processors)
    assert all("_attention_backend" not in vars(p) for p in processors)


def test_a_model_whose_attention_cannot_be_chosen_says_so(engine: Engine, request_: Request, monkeypatch: Any) -> None:
    @contextmanager
    def none(rig: Any, kernel: str) -> Iterator[int]:
        yield 0

    reference = take(engine, stock(engine.plan(request_).request))
    monkeypatch.setattr("undercrank.rounding.attention_by", none)
    floor = measure_floors(engine, [reference], names=NAMES)[0]
    assert not floor.distances and "cannot be given another kernel" in floor.missing


def floor_of(dtype: str = "bfloat16", **films: tuple[float, ...]) -> Floor:
    distances = []
    for name, values in films.items():
        distances.append(distance_of(name, sorted(values)[len(values) // 2], values))
    return Floor(name=f"{dtype} floor", dtype=dtype, distances=tuple(distances))


def test_a_distance_is_inside_the_floors_that_it_does_not_exceed() -> None:
    near, far = floor_of(psnr_db=(60.0,)), replace(floor_of(psnr_db=(40.0,)), name="wide")
    (row,) = beside([distance_of("psnr_db", 50.0)], [near, far])
    assert row.floor == {"bfloat16 floor": 60.0, "wide": 40.0} and row.inside == ("wide",)


def test_a_ledger_row_holds_the_floor_of_the_dtype_of_its_run() -> None:
    low = floor_of("bfloat16", psnr_db=(40.0, 45.0, 50.0), one_forward=(0.01,))
    floors = [floor_of("float32", psnr_db=(90.0,)), low]
    assert medians(floors, "bfloat16") == {"psnr_db": 45.0, "one_forward": 0.01}
    assert medians(floors, "float32") == {"psnr_db": 90.0}
    assert furthest("psnr_db", floors, "bfloat16") == 40.0 and furthest("ssim", floors, "bfloat16") is None


# --------------------------------------------------------------------------- grades


def graded(promise: Promise, identical: bool = False, floors: Any = (), **values: float) -> Any:
    distances = [distance_of(name, value) for name, value in values.items()]
    return grade(promise, distances, identical, floors, "bfloat16")


WIDE = [floor_of(psnr_db=(40.0, 45.0), one_forward=(0.01, 0.02))]


@pytest.mark.parametrize("promise", Promise)
def test_equal_bits_keep_every_promise(promise: Promise) -> None:
    assert graded(promise, identical=True, psnr_db=150.0)[0] is True


def test_exact_is_broken_by_any_bit() -> None:
    kept, words = graded(Promise.EXACT, floors=WIDE, psnr_db=90.0, one_forward=1e-7)
    assert kept is False and "not bit-identical" in words and "90 dB" in words


def test_rounding_is_kept_up_to_the_furthest_film_of_the_floor() -> None:
    assert graded(Promise.ROUNDING, floors=WIDE, psnr_db=41.0, one_forward=0.02)[0] is True
    kept, words = graded(Promise.ROUNDING, floors=WIDE, psnr_db=41.0, one_forward=0.03)
    assert kept is False and "relative error of the first forward 0.03 is beyond 0.02" in words
    assert graded(Promise.ROUNDING, floors=WIDE, psnr_db=39.0)[0] is False


def test_rounding_without_a_floor_of_its_dtype_is_not_judged() -> None:
    kept, words = graded(Promise.ROUNDING, floors=[floor_of("float32", psnr_db=(90.0,))], psnr_db=80.0)
    assert kept is None and "no rounding floor" in words


def test_lossy_is_stated_and_placed_beside_the_floor() -> None:
    assert graded(Promise.LOSSY, floors=WIDE, psnr_db=30.0) == (True, "PSNR 30 dB, outside the rounding floor")
    assert graded(Promise.LOSSY, floors=WIDE, psnr_db=42.0) == (True, "PSNR 42 dB, inside the rounding floor")


# --------------------------------------------------------------------------- verify


def verified(engine: Engine, request: Request, **options: Any) -> Any:
    return verify(engine, request, prompts=("a ball", "a box"), seeds=(1,), steps=2, names=NAMES, **options)


def test_a_lever_that_keeps_its_promise_is_said_to_and_gets_its_row(engine: Engine, request_: Request) -> None:
    found = verified(engine, request_)
    (study,) = found.studies
    (verdict,), (row,) = study.verdicts, study.rows
    assert (verdict.lever, verdict.kept, study.steps) == ("host_sync", True, 2) and found.broken == ()
    assert verdict.words == "bit-identical in every step and frame"
    assert (row.lever, row.source, row.n, row.dtype, row.gain) == ("host_sync", "measured here", 2, "float32", None)
    assert row.prompts == ("a ball", "a box") and row.seeds == (1,) and row.floor_of.startswith("float32: attention")
    assert row.distances["one_forward"] == 0 and row.floor["psnr_db"] > 60 and row.ranges["psnr_db"] == (150.0, 150.0)
    assert Measurement.from_json(row.to_json()) == row
    assert all(row.calibrated_on[0].partition(",")[0] != prompt for prompt in row.prompts)


def test_a_lever_that_moves_a_bit_breaks_exact(engine: Engine, request_: Request, shift: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Shift, "by", 1e-3)
    found = verified(engine, replace(request_, wishes=(("shift", "on"),)))
    (verdict,) = found.broken
    assert verdict.lever == "shift" and "not bit-identical" in verdict.words


@pytest.mark.parametrize(("by", "kept"), [(1e-7, True), (1e-2, False)])
def test_rounding_is_held_to_the_floor(
    by: float, kept: bool, engine: Engine, request_: Request, shift: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Shift, "by", by)
    monkeypatch.setattr(Shift, "promised", Promise.ROUNDING)
    found = verified(engine, replace(request_, wishes=(("shift", "on"),)))
    assert found.studies[0].verdicts[0].kept is kept, found.studies[0].verdicts[0].words


def test_a_lossy_lever_runs_all_its_steps_and_its_row_has_a_gain(
    engine: Engine, request_: Request, shift: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Shift, "by", 0.05)
    monkeypatch.setattr(Shift, "promised", Promise.LOSSY)
    found = verified(engine, replace(request_, wishes=(("shift", "on"), ("host_sync", "on"))))
    assert {study.steps: study.verdicts[0].lever for study in found.studies} == {2: "host_sync", 3: "shift"}
    (row,) = next(study.rows for study in found.studies if study.steps == 3)
    assert row.gain and row.gain > 0 and row.num_inference_steps == 3 and 0.01 < row.distances["one_forward"] < 0.06


def test_a_lever_that_says_it_did_nothing_is_believed(engine: Engine, request_: Request, monkeypatch: Any) -> None:
    from undercrank.levers.host_sync import HostSync

    monkeypatch.setattr(HostSync, "verify", lambda self, rig, trace: ["nothing happened"])
    (verdict,) = verified(engine, request_).broken
    assert "nothing happened" in verdict.words


def test_a_lever_that_refuses_on_the_pipeline_is_not_judged_by_films_without_it(
    engine: Engine, request_: Request, shift: Any, monkeypatch: Any
) -> None:
    def refuses(self: Lever, rig: Any) -> Any:
        raise LeverRefused("shift: not on this model")

    monkeypatch.setattr(Shift, "engage", refuses)
    found = verified(engine, request_)
    (verdict,) = [each for study in found.studies for each in study.verdicts if each.lever == "shift"]
    assert verdict.kept is None and verdict.words == "off when it is the only one: not on this model"
    assert {row.lever for study in found.studies for row in study.rows} == {"host_sync"}


def test_nothing_on_is_nothing_to_verify(engine: Engine, request_: Request) -> None:
    with pytest.raises(BadInput, match="no lever is on .*host_sync: "):
        verified(engine, replace(request_, wishes=()))


def test_only_one_lever_is_on_in_its_films(request_: Request) -> None:
    asked = replace(request_, wishes=(("host_sync", "on"), ("compile", "on")))
    wishes = dict(only("host_sync", asked).wishes)
    assert wishes.pop("host_sync") == "on" and set(wishes.values()) == {"off"}
    assert {lever_of_knob(knob).name for knob in wishes} == {cls.name for cls in ORDER} - {"host_sync"}  # type: ignore[union-attr]
    assert set(dict(stock(asked).wishes).values()) == {"off"}


# --------------------------------------------------------------------------- what is filmed


def test_every_prompt_is_filmed_with_every_seed(request_: Request) -> None:
    films = films_of(request_, ("a", "b"), (1, 2))
    assert [(film.prompt, film.seed) for film in films] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    with pytest.raises(BadInput, match="at least one prompt and one seed"):
        films_of(request_, ("a",), ())


@pytest.mark.parametrize("same", [{"prompt": "set-up"}, {"seed": 9}])
def test_a_lever_is_not_judged_by_what_set_it_up(same: dict[str, Any], request_: Request) -> None:
    with pytest.raises(BadInput, match="judge them by other prompts and seeds"):
        refuse_overlap([replace(request_, **same)], replace(request_, prompt="set-up", seed=9))


def test_no_prompt_to_measure_on_is_one_to_set_up_with() -> None:
    assert not set(SET_UP.values()) & {*TOY, *FILMED} and len(set(TOY)) == len(TOY) >= 12
    assert prompts_for(families.family("flipbook"), 3) == TOY[:3]
    assert prompts_for(families.family("mochi"), 2) == FILMED[:2]


def test_what_rounding_is_held_to_are_metrics() -> None:
    assert set(fidelity.HELD) <= set(METRICS)


# --------------------------------------------------------------------------- from the command line


def test_verify_prints_keeps_rows_and_fails_when_a_promise_is_broken(
    request_: Request, shift: Any, monkeypatch: Any, capsys: Any, own_ledger: Path
) -> None:
    from contextlib import nullcontext

    from undercrank.comparing import run_verify

    options: dict[str, Any] = dict(
        prompts=("a ball",), seeds=(1,), steps=2, metrics=NAMES, keep=True, allow_pickle=False, local_files_only=True,
        as_json=False, on_cancellable=lambda cancel: nullcontext(),
    )  # fmt: skip
    run_verify(replace(request_, wishes=(("host_sync", "on"), ("shift", "off"))), **options)
    out = capsys.readouterr().out
    assert "host_sync promises exact: kept. bit-identical" in out and "rounding floor" in out
    assert len(own_ledger.read_text().splitlines()) == 1
    monkeypatch.setattr(Shift, "by", 0.01)
    with pytest.raises(RunFailed, match="shift broke its promise .exact."):
        run_verify(replace(request_, wishes=(("shift", "on"),)), **(options | {"keep": False}))
    assert "shift promises exact: BROKEN" in capsys.readouterr().out
    assert len(own_ledger.read_text().splitlines()) == 1
