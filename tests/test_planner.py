"""The plan: every field checked, one reasoned decision per lever, time and memory with their basis. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from undercrank import families, planner
from undercrank.ledger import Ledger, read_ledger
from undercrank.levers import ORDER, knobs
from undercrank.planner import Live, case_of, expected_bytes, make_plan, refuse_if_too_big, under
from undercrank.ratios import Curve
from undercrank.records import (
    BadInput,
    Case,
    Decision,
    Device,
    Fidelity,
    Lever,
    LeverRefused,
    LoadSpec,
    Machine,
    Measurement,
    Needs,
    OutOfMemory,
    Plan,
    Promise,
    Request,
    Status,
)

CPU = Device(kind="cpu", name="Processor", total_bytes=64 << 30, free_bytes=48 << 30)
GPU = Device(kind="cuda", name="Accelerator", capability=(9, 0), total_bytes=141 << 30, free_bytes=139 << 30)
LAPTOP = Machine(name="laptop", devices=(CPU,), cpu_count=8)
SERVER = Machine(name="server", devices=(GPU, CPU), cpu_count=16, packages={"torchao": "0.17.0"})
WAN = "wan2.1-14b"


def plan(machine: Machine = SERVER, rows: tuple[Measurement, ...] = (), **fields: Any) -> Plan:
    request = Request(**{"prompt": "a red ball rolls left", "model": WAN, **fields})
    return make_plan(request, family=families.family(request.model), machine=machine, ledger=Ledger(rows))


def decision(made: Plan, lever: str) -> Decision:
    (found,) = [each for each in made.decisions if each.lever == lever]
    return found


def refusal(match: str, **fields: Any) -> BadInput:
    with pytest.raises(BadInput, match=match) as caught:
        plan(**fields)
    return caught.value


# --------------------------------------------------------------------------- the request


@pytest.mark.parametrize("steps", [0, -1, 1001, True, False, 2.5, "5", 10**6, float("nan")])
def test_a_number_of_steps_that_cannot_be_run_is_refused(steps: Any) -> None:
    error = refusal("whole number|at least 1|at most 1000|from 1 to 1000", num_inference_steps=steps)
    assert error.field == "num_inference_steps"


@pytest.mark.parametrize("steps", [1, 1000])
def test_the_least_and_the_most_steps_are_accepted(steps: int) -> None:
    assert plan(num_inference_steps=steps).request.num_inference_steps == steps


@pytest.mark.parametrize("guidance", [float("nan"), float("inf"), -float("inf"), "x", "5", True, [5.0], 10**400])
def test_a_guidance_that_is_no_finite_number_is_refused(guidance: Any) -> None:
    error = refusal("must be a finite number from 0 to 100", guidance_scale=guidance)
    assert error.field == "guidance_scale"
    assert len(str(error)) < 160


@pytest.mark.parametrize(("guidance", "nearest"), [(-1, "0"), (-0.001, "0"), (100.5, "100"), (1e9, "100")])
def test_a_guidance_out_of_range_is_refused_with_valid_ones(guidance: float, nearest: str) -> None:
    error = refusal(rf"number from 0 to 100, for instance {nearest} or 5 .0 to 1 turn", guidance_scale=guidance)
    assert error.field == "guidance_scale"


@pytest.mark.parametrize("guidance", [0, 1, 1.0000001, 100])
def test_a_guidance_in_range_is_kept_as_a_float(guidance: float) -> None:
    kept = plan(guidance_scale=guidance).request.guidance_scale
    assert kept == guidance
    assert type(kept) is float


@pytest.mark.parametrize("seed", [-1, 2**63, 10**400, True, 2.0, 2.5, "7", "x", float("nan")])
def test_a_seed_that_no_generator_takes_is_refused_with_the_range(seed: Any) -> None:
    error = refusal(r"seed .*: must be a whole number from 0 to 9223372036854775807\Z", seed=seed)
    assert error.field == "seed"
    assert len(str(error)) < 120


@pytest.mark.parametrize("seed", [0, 2**63 - 1, None])
def test_the_least_and_the_greatest_seed_are_kept_and_none_stays_none(seed: int | None) -> None:
    assert plan(seed=seed).request.seed == seed


def test_a_size_off_the_lattice_is_refused_with_the_rule_and_two_sizes() -> None:
    error = refusal(r"705x480: Wan.* needs multiples of 16: 704x480 or 720x480", width=705, height=480)
    assert error.field == "width"


@pytest.mark.parametrize(
    ("width", "height", "field"),
    [(0, 480, "width"), (-16, 480, "width"), (832, 0, "height"), (100_000, 480, "width"), (832, 10_000, "height"),
     ("832", 480, "width"), (832.0, 480, "width"), (832, True, "height")],
)  # fmt: skip
def test_a_size_that_is_no_size_is_refused_by_side(width: Any, height: Any, field: str) -> None:
    assert refusal(field, width=width, height=height).field == field


def test_a_length_off_the_lattice_is_refused_with_the_rule_and_two_lengths() -> None:
    error = refusal(r"82 frames: Wan.* needs a multiple of 4, plus 1: 81 or 85", num_frames=82)
    assert error.field == "num_frames"


@pytest.mark.parametrize("frames", [0, -3, 2.5, "81", True, 10**9])
def test_a_length_that_is_no_length_is_refused(frames: Any) -> None:
    assert refusal("num_frames", num_frames=frames).field == "num_frames"


@pytest.mark.parametrize("fps", [Fraction(0), Fraction(241), Fraction(-16), float("nan"), float("inf")])
def test_a_frame_rate_out_of_range_is_refused(fps: Any) -> None:
    assert refusal("must be above 0 and at most 240", fps=fps).field == "fps"


@pytest.mark.parametrize("fps", [Fraction(240), Fraction(1, 100), Fraction(24000, 1001)])
def test_a_frame_rate_in_range_is_kept(fps: Fraction) -> None:
    assert plan(fps=fps).request.fps == fps


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_a_long_text_is_accepted_and_an_endless_one_refused(field: str) -> None:
    assert getattr(plan(**{field: "x" * 50_000}).request, field) == "x" * 50_000
    plan(**{field: "x" * 100_000})
    assert refusal("has 100001 characters; at most 100000", **{field: "x" * 100_001}).field == field


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_half_a_character_is_refused_by_its_number(field: str) -> None:
    assert refusal(r"half a character \(U\+D83D\)", **{field: "a \ud83d b"}).field == field


@pytest.mark.parametrize("prompt", [None, 5, ["a"], b"a"])
def test_a_prompt_that_is_no_text_is_refused(prompt: Any) -> None:
    assert refusal("prompt must be text, not", prompt=prompt).field == "prompt"


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_an_empty_prompt_is_accepted_with_a_note(prompt: str) -> None:
    made = plan(prompt=prompt)
    assert made.request.prompt == prompt
    assert any("the prompt is empty" in note for note in made.notes)


def test_any_script_is_kept_as_it_is() -> None:
    text = "\u732b \U0001f408 \u05d7\u05ea\u05d5\u05dc\n"
    assert plan(prompt=text).request.prompt == text


def test_an_ordinary_request_has_no_notes() -> None:
    assert plan().notes == ()


def test_a_negative_prompt_without_guidance_is_noted() -> None:
    said = "the negative prompt has no effect"
    assert any(said in note for note in plan(negative_prompt="blurry", guidance_scale=1).notes)
    assert not any(said in note for note in plan(negative_prompt="blurry", guidance_scale=1.5).notes)
    assert not any(said in note for note in plan(guidance_scale=1).notes)


def test_a_size_that_the_model_was_not_trained_on_is_noted() -> None:
    assert any("640x480 is not among the sizes" in note for note in plan(width=640, height=480).notes)


def test_a_toy_model_tells_which_words_it_knows() -> None:
    (note,) = plan(LAPTOP, model="flipbook").notes
    assert note == families.family("flipbook").note
    assert note.startswith("flipbook knows shapes, colours, backgrounds and motions")


def test_more_frames_than_the_model_was_trained_on_are_noted() -> None:
    assert any("121 frames are more than the 81" in note for note in plan(num_frames=121).notes)


def test_a_picture_for_a_text_model_is_refused() -> None:
    assert refusal("takes no picture", image="cat.png").field == "image"


def test_a_picture_model_without_a_picture_is_refused() -> None:
    error = refusal("animates a picture: give one with --image", model="wan2.2-a14b-i2v")
    assert error.field == "image"
    assert plan(model="wan2.2-a14b-i2v", image="cat.png").request.image == "cat.png"


def test_a_model_that_takes_a_video_is_left_to_the_python_door() -> None:
    rows = [row for row in families.FAMILIES if row.traits & {"video_input", "control_input"}]
    assert rows
    for row in rows:
        image = "cat.png" if "image_input" in row.traits else None
        with pytest.raises(BadInput, match=r"needs a video as input.*undercrank\.accelerate\(pipe\)") as caught:
            plan(model=row.id, image=image)
        assert caught.value.field == "model"


def test_gaps_are_filled_from_the_family_and_the_wish_wins() -> None:
    request = plan().request
    family = families.family(WAN)
    assert (request.width, request.height, request.num_frames) == (family.width, family.height, family.num_frames)
    assert (request.fps, request.num_inference_steps) == (family.fps, family.num_inference_steps)
    assert request.guidance_scale == family.guidance_scale
    assert request.negative_prompt == family.negative_prompt
    assert plan(negative_prompt="").request.negative_prompt == ""
    assert plan(width=832, height=480).request.width == 832


def test_no_default_negative_prompt_is_the_empty_text() -> None:
    assert plan(model="skyreels-v2-14b").request.negative_prompt == ""


# --------------------------------------------------------------------------- device and dtype


def test_an_unknown_device_is_refused_with_what_there_is() -> None:
    assert refusal("device 'cuda:7': this machine has cuda:0, cpu", device="cuda:7").field == "device"
    refusal("this machine has cpu", machine=LAPTOP, device="cuda")


def test_an_accelerator_is_taken_first_and_the_cpu_when_named() -> None:
    assert plan().load.device == "cuda:0"
    assert plan(device="cpu").load.device == "cpu"
    assert plan(LAPTOP).load.device == "cpu"


def test_the_dtype_is_the_family_s_on_a_gpu_and_float32_on_a_cpu() -> None:
    assert plan().load.dtype == plan().request.dtype == "bfloat16"
    assert plan(LAPTOP).load.dtype == "float32"
    assert plan(dtype="float32").load.dtype == "float32"


def test_float16_is_refused_for_a_model_made_in_bfloat16() -> None:
    assert refusal("trained in bfloat16 and overflows in float16: choose bfloat16", dtype="float16").field == "dtype"


def test_an_unknown_dtype_is_refused_with_the_choice() -> None:
    for dtype in ("int8", "", ["float32"], 16):
        assert refusal("choose float32, bfloat16, float16", dtype=dtype).field == "dtype"


def test_the_weights_come_from_the_family_s_repository_unless_told_otherwise() -> None:
    family = families.family(WAN)
    assert (plan().load.source, plan().load.family) == (family.repo, WAN)
    load = LoadSpec(family=WAN, source="/models/mine", dtype="float32", device="cpu", allow_pickle=True)
    made = make_plan(Request(model=WAN), family=family, machine=SERVER, ledger=Ledger(), load=load)
    assert made.load == replace(load, dtype="bfloat16", device="cuda:0")


def test_a_pipeline_at_hand_keeps_its_own_configuration() -> None:
    family = families.family(WAN)
    live = Live(device=CPU, dtype="bfloat16", scheduler="UniPCMultistepScheduler")
    request = Request(width=17, height=3, num_frames=2, num_inference_steps=3, guidance_scale=-1.0)
    made = make_plan(request, family=family, machine=SERVER, ledger=Ledger(), live=live, strict=False)
    assert (made.request.width, made.request.num_frames, made.request.guidance_scale) == (17, 2, -1.0)
    assert (made.load.dtype, made.load.device) == ("bfloat16", "cpu")


def test_a_pipeline_at_hand_is_asked_as_strictly_as_any_unless_its_own_checks_hold() -> None:
    live = Live(device=CPU, dtype="bfloat16", scheduler="UniPCMultistepScheduler")
    with pytest.raises(BadInput, match="needs multiples of 16"):
        make_plan(Request(width=17), family=families.family(WAN), machine=SERVER, ledger=Ledger(), live=live)
    with pytest.raises(BadInput, match="no lever 'zzz'"):
        make_plan(
            Request(wishes=(("zzz", "on"),)), family=families.family(WAN), machine=SERVER, ledger=Ledger(), live=live,
            strict=False,
        )  # fmt: skip


# --------------------------------------------------------------------------- wishes


def test_an_unknown_lever_is_refused_with_the_nearest_names() -> None:
    error = refusal("no lever 'host_sink': this version has host_sync", wishes=(("host_sink", "off"),))
    assert error.field == "host_sink"
    assert all(knob in str(refusal("no lever 'zzz'", wishes=(("zzz", "on"),))) for knob in knobs())


def test_the_same_knob_twice_is_refused() -> None:
    error = refusal("host_sync is given twice", wishes=(("host_sync", "off"), ("host_sync", "on")))
    assert error.field == "host_sync"


@pytest.mark.parametrize(
    "wishes",
    [
        3,
        "ab",
        None,
        ("ab",),
        [("host_sync", "off")],
        (("host_sync",),),
        (("host_sync", "off", "now"),),
        (["host_sync", "off"],),
        (("host_sync", False),),
        (("host_sync", None),),
        ((5, "on"),),
    ],
    ids=str,
)
def test_wishes_that_are_no_pairs_of_words_are_refused(wishes: Any) -> None:
    error = refusal("wishes must be pairs of a lever's name and a word", wishes=wishes)
    assert error.field == "wishes"


def test_a_setting_that_the_lever_does_not_take_is_refused() -> None:
    assert refusal("host_sync=quick: host_sync takes auto, on or off", wishes=(("host_sync", "quick"),))


def test_host_sync_off_is_declined_because_it_was_asked_for() -> None:
    made = plan(wishes=(("host_sync", "off"),))
    found = decision(made, "host_sync")
    assert (found.status, found.reason, found.requested) == (Status.DECLINED, "asked for off", "host_sync=off")
    assert "host_sync" not in [lever.name for lever in made.levers]


def test_host_sync_on_is_applied_on_a_cpu_too_and_the_doubt_is_told() -> None:
    made = plan(LAPTOP, wishes=(("host_sync", "on"),))
    found = decision(made, "host_sync")
    assert (found.status, found.chosen) == (Status.APPLIED, "on")
    assert found.reason == "asked for, although the run is on the CPU: there is no device to wait for"
    assert [lever.name for lever in made.levers] == ["host_sync"]


@pytest.mark.parametrize("wishes", [(), (("host_sync", "auto"),)])
def test_host_sync_by_itself_is_declined_on_a_cpu_with_its_reason(wishes: tuple[tuple[str, str], ...]) -> None:
    found = decision(plan(LAPTOP, wishes=wishes), "host_sync")
    assert found.status is Status.DECLINED
    assert "no device to wait for" in found.reason


def on_an_unproven_pipeline(fidelity: str, *wishes: tuple[str, str]) -> Plan:
    family = replace(families.family(WAN), id="invented", title="Invented", pipeline="InventedPipeline")
    request = Request(model="invented", fidelity=fidelity, wishes=wishes)  # type: ignore[arg-type]
    return make_plan(request, family=family, machine=SERVER, ledger=Ledger())


def test_host_sync_on_a_pipeline_that_no_test_has_proven_is_not_exact() -> None:
    with pytest.raises(LeverRefused, match="host_sync=on is rounding, and fidelity exact was asked for"):
        on_an_unproven_pipeline("exact", ("host_sync", "on"))
    made = on_an_unproven_pipeline("faithful", ("host_sync", "on"))
    found = decision(made, "host_sync")
    assert (found.status, found.promise) == (Status.APPLIED, Promise.ROUNDING)
    assert found.reason == "asked for, although not proven on InventedPipeline yet"
    assert made.promise is Promise.ROUNDING


@pytest.mark.parametrize("word", list(Fidelity))
def test_host_sync_by_itself_stays_off_where_it_is_not_proven(word: Fidelity) -> None:
    made = on_an_unproven_pipeline(word.value)
    assert decision(made, "host_sync").status is Status.DECLINED
    assert made.promise is Promise.EXACT


def test_host_sync_by_itself_is_applied_on_a_gpu() -> None:
    made = plan(fidelity="exact")
    found = decision(made, "host_sync")
    assert (found.status, found.promise, found.requested) == (Status.APPLIED, Promise.EXACT, "auto")
    assert [lever.name for lever in made.levers] == ["prompt_cache", "host_sync"]
    assert made.promise is Promise.EXACT


# --------------------------------------------------------------------------- levers that change the numbers


class Pretended(Lever):
    """Base of the levers of these tests."""

    promise = Promise.EXACT
    doubts: str | None = None

    def promises(self, case: Case) -> Promise:
        return self.promise

    def doubt(self, case: Case) -> str | None:
        return self.doubts


@dataclass(frozen=True, kw_only=True)
class Exact(Pretended):
    name = "exact_one"
    summary = "changes nothing"


@dataclass(frozen=True, kw_only=True)
class Rounding(Pretended):
    name = "rounding_one"
    summary = "rounds otherwise"
    promise = Promise.ROUNDING


@dataclass(frozen=True, kw_only=True)
class Lossy(Pretended):
    name = "crush"
    summary = "leaves steps out"
    promise = Promise.LOSSY


@dataclass(frozen=True, kw_only=True)
class Tuned(Pretended):
    """Two knobs speak of it."""

    name = "tuned"
    knobs = ("tuned_scheme", "tuned_threshold")
    scheme: str = "plain"
    threshold: float = 0.5

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        threshold = float(wishes.get("tuned_threshold", "0.5"))
        return cls(scheme=wishes.get("tuned_scheme", "plain"), threshold=threshold)


Order = Callable[..., None]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    """Plan with these levers instead of the real ones."""

    def install(*levers: type[Lever]) -> None:
        table = {knob: lever for lever in levers for knob in lever.knobs or (lever.name,)}
        monkeypatch.setattr(planner, "ORDER", levers)
        monkeypatch.setattr(planner, "knobs", lambda: tuple(table))
        monkeypatch.setattr(planner, "lever_of_knob", table.get)

    return install


def a_row(**fields: Any) -> Measurement:
    """The lossy lever, measured: half as long again, hardly visible, within the model's own rounding."""
    row = Measurement(
        id="row-1", family=WAN, lever="crush", source="measured", machine="m", device="Accelerator", versions={},
        width=1280, height=720, num_frames=81, num_inference_steps=50, dtype="bfloat16", n=8, gain=1.5,
        distances={"lpips": 0.04}, floor={"lpips": 0.06},
    )  # fmt: skip
    return replace(row, **fields)


WORDS = list(Fidelity)
LOSSY_WORDS = WORDS[1:]
"Under these a lossy lever may engage unasked, with rows."


@pytest.mark.parametrize("word", WORDS)
def test_a_rounding_lever_engages_by_itself_under_every_word_but_exact(order: Order, word: Fidelity) -> None:
    order(Rounding)
    made = plan(fidelity=word)
    found = decision(made, "rounding_one")
    if word is Fidelity.EXACT:
        assert found.status is Status.DECLINED
        assert "fidelity exact allows less" in found.reason
        assert made.promise is Promise.EXACT
    else:
        assert found.status is Status.APPLIED
        assert found.reason == "rounds otherwise; promise rounding"
        assert made.promise is Promise.ROUNDING


@pytest.mark.parametrize("word", WORDS)
def test_a_lossy_lever_without_a_row_is_declined_under_every_word(order: Order, word: Fidelity) -> None:
    order(Lossy)
    made = plan(fidelity=word)
    assert decision(made, "crush").status is Status.DECLINED
    assert made.levers == ()
    assert made.promise is Promise.EXACT
    if word in LOSSY_WORDS:
        assert "unmeasured here" in decision(made, "crush").reason


@pytest.mark.parametrize("word", LOSSY_WORDS)
def test_a_lossy_lever_with_a_row_inside_the_bound_engages_and_cites_it(order: Order, word: Fidelity) -> None:
    order(Lossy)
    made = plan(fidelity=word, rows=(a_row(),))
    found = decision(made, "crush")
    assert (found.status, found.evidence, found.promise) == (Status.APPLIED, ("row-1",), Promise.LOSSY)
    assert made.promise is Promise.LOSSY


@pytest.mark.parametrize("word", WORDS)
def test_a_lossy_lever_that_hardly_gains_is_declined(order: Order, word: Fidelity) -> None:
    order(Lossy)
    found = decision(plan(fidelity=word, rows=(a_row(gain=1.09),)), "crush")
    assert found.status is Status.DECLINED
    if word in LOSSY_WORDS:
        assert "gains 1.09x, less than 1.1x" in found.reason
        assert found.evidence == ("row-1",)
        assert decision(plan(fidelity=word, rows=(a_row(gain=1.1),)), "crush").status is Status.APPLIED
        assert decision(plan(fidelity=word, rows=(a_row(gain=None),)), "crush").status is Status.DECLINED


@pytest.mark.parametrize(
    ("word", "metric", "bound"),
    [
        (Fidelity.FAITHFUL, "lpips", 0.05),
        (Fidelity.FAITHFUL, "st_lpips_alex", 0.005),
        (Fidelity.QUALITY, "lpips", 0.10),
        (Fidelity.BALANCED, "lpips", 0.22),
        (Fidelity.FAST, "lpips", 0.40),
        (Fidelity.QUALITY, "st_lpips_alex", 0.01),
        (Fidelity.BALANCED, "st_lpips_alex", 0.03),
        (Fidelity.FAST, "st_lpips_alex", 0.10),
    ],
)
def test_a_lossy_lever_engages_up_to_the_bound_of_the_word(
    order: Order, word: Fidelity, metric: str, bound: float
) -> None:
    order(Lossy)
    at = decision(plan(fidelity=word, rows=(a_row(distances={metric: bound}, floor={metric: 1.0}),)), "crush")
    above = a_row(distances={metric: bound * 1.01}, floor={metric: 1.0})
    beyond = decision(plan(fidelity=word, rows=(above,)), "crush")
    assert at.status is Status.APPLIED
    assert beyond.status is Status.DECLINED
    assert f"beyond what fidelity {word.value} allows" in beyond.reason


@pytest.mark.parametrize("distances", [{"lpips": 0.051}, {"lpips": 0.04, "floor": 0.03}, {"psnr_db": 60.0}])
def test_faithful_admits_no_lossy_lever_beyond_the_rounding_floor_or_the_near_lossless_bound(
    order: Order, distances: dict[str, float]
) -> None:
    order(Lossy)
    floor = {"lpips": distances.pop("floor", 0.29)}
    made = plan(fidelity=Fidelity.FAITHFUL, rows=(a_row(distances=distances, floor=floor),))
    assert decision(made, "crush").status is Status.DECLINED


def test_faithful_admits_a_lossy_lever_within_the_rounding_floor_and_the_near_lossless_bound(order: Order) -> None:
    order(Lossy)
    for distance, floor in ((0.04, 0.06), (0.05, 0.05), (0.0, 0.0)):
        row = a_row(distances={"lpips": distance}, floor={"lpips": floor})
        found = decision(plan(fidelity="faithful", rows=(row,)), "crush")
        assert (found.status, found.evidence) == (Status.APPLIED, ("row-1",))


@pytest.mark.parametrize("fields", [{"floor": {}}, {"floor": {"st_lpips_alex": 1.0}}, {"source": "published"}])
def test_faithful_needs_a_floor_and_a_row_that_is_not_only_published(order: Order, fields: dict[str, Any]) -> None:
    order(Lossy)
    row = a_row(**fields)
    assert decision(plan(fidelity="faithful", rows=(row,)), "crush").status is Status.DECLINED
    assert decision(plan(fidelity="quality", rows=(row,)), "crush").status is Status.APPLIED


def test_every_metric_that_was_measured_must_lie_within_its_bound(order: Order) -> None:
    order(Lossy)
    for distances in ({"lpips": 0.9, "st_lpips_alex": 0.001}, {"lpips": 0.001, "st_lpips_alex": 0.9}):
        found = decision(plan(fidelity="quality", rows=(a_row(distances=distances),)), "crush")
        assert found.status is Status.DECLINED
        assert "0.9) is beyond what fidelity quality allows" in found.reason
    both = a_row(distances={"lpips": 0.1, "st_lpips_alex": 0.01})
    assert decision(plan(fidelity="quality", rows=(both,)), "crush").status is Status.APPLIED


def test_rows_of_this_kind_of_device_speak_before_others(order: Order) -> None:
    order(Lossy)
    here = a_row(id="here", gain=1.0, source="measured here")
    elsewhere = a_row(id="elsewhere", gain=1.5, source="published", device="Other")
    found = decision(plan(fidelity="quality", rows=(here, elsewhere)), "crush")
    assert found.status is Status.DECLINED
    assert "gains 1.00x, less than 1.1x" in found.reason
    assert decision(plan(fidelity="quality", rows=(elsewhere,)), "crush").status is Status.APPLIED
    near = a_row(id="near", distances={"lpips": 0.01})
    far = replace(elsewhere, distances={"lpips": 0.9})
    assert decision(plan(fidelity="quality", rows=(far, near)), "crush").status is Status.APPLIED


def test_the_middle_of_several_rows_decides_and_not_the_best(order: Order) -> None:
    order(Lossy)

    def status(*rows: Measurement) -> Status:
        return decision(plan(fidelity="quality", rows=rows), "crush").status

    near, far = a_row(distances={"lpips": 0.01}), a_row(distances={"lpips": 0.9})
    assert (status(near, near, far), status(near, far, far)) == (Status.APPLIED, Status.DECLINED)
    fast, slow = a_row(gain=9.0), a_row(gain=1.0)
    assert (status(fast, fast, slow), status(fast, slow, slow)) == (Status.APPLIED, Status.DECLINED)


@pytest.mark.parametrize("gain", [float("nan"), float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("word", WORDS)
def test_a_gain_that_is_no_number_admits_nothing(order: Order, word: Fidelity, gain: float) -> None:
    order(Lossy)
    assert decision(plan(fidelity=word, rows=(a_row(gain=gain),)), "crush").status is Status.DECLINED


def own(**fields: Any) -> Measurement:
    """The lossy lever, measured by whoever uses this very machine."""
    return a_row(**{"id": "own", "source": "measured here", "machine": SERVER.name} | fields)


@pytest.mark.parametrize("word", LOSSY_WORDS)
def test_rows_of_this_machine_outrank_those_of_others_of_its_kind(order: Order, word: Fidelity) -> None:
    order(Lossy)
    shipped = tuple(a_row(id=f"shipped-{i}") for i in range(3))
    far, slow = own(distances={"lpips": 0.5}), own(gain=1.0)
    assert decision(plan(fidelity=word, rows=shipped), "crush").status is Status.APPLIED
    assert "lpips 0.5" in decision(plan(fidelity=word, rows=(*shipped, far)), "crush").reason
    assert "gains 1.00x" in decision(plan(fidelity=word, rows=(*shipped, slow)), "crush").reason
    bad = tuple(replace(row, distances={"lpips": 0.9}) for row in shipped)
    found = decision(plan(fidelity=word, rows=(*bad, own())), "crush")
    assert found.status is Status.APPLIED and "own" in found.evidence
    elsewhere = own(machine="another")
    assert decision(plan(fidelity=word, rows=(*bad, elsewhere)), "crush").status is Status.DECLINED


def test_of_this_machine_s_rows_those_of_such_a_run_speak_first(order: Order) -> None:
    order(Lossy)
    far_in_short_runs = tuple(own(id=f"short-{i}", num_inference_steps=8, distances={"lpips": 0.9}) for i in range(3))
    assert "lpips 0.9" in decision(plan(fidelity="quality", rows=far_in_short_runs), "crush").reason
    found = decision(plan(fidelity="quality", rows=(*far_in_short_runs, own())), "crush")
    assert found.status is Status.APPLIED


def test_a_denial_from_elsewhere_is_overruled_by_what_was_measured_on_this_machine(order: Order) -> None:
    order(Lossy)
    denial = a_row(id="denial", verdict="denied", distances={"lpips": 0.9})
    assert "denied" in decision(plan(fidelity="balanced", rows=(denial,)), "crush").reason
    assert decision(plan(fidelity="balanced", rows=(denial, own())), "crush").status is Status.APPLIED
    assert "denied" in decision(plan(fidelity="balanced", rows=(own(), own(id="no", verdict="denied"))), "crush").reason


def test_a_gain_of_this_machine_speaks_for_a_lever_that_waits_for_one(order: Order) -> None:
    order(Careful)
    shipped = a_row(lever="careful", gain=1.5, distances={})
    assert decision(plan(rows=(shipped,)), "careful").status is Status.APPLIED
    slower = own(lever="careful", gain=0.9, distances={})
    assert "measured slower" in decision(plan(rows=(shipped, slower)), "careful").reason
    silent = own(lever="careful", gain=None, distances={"psnr_db": 60.0})
    assert decision(plan(rows=(shipped, silent)), "careful").status is Status.APPLIED, "it says nothing of time"


def test_faithful_admits_nothing_that_moves_a_forward_further_than_rounding(order: Order) -> None:
    order(Lossy)
    inside = {"distances": {"lpips": 0.04, "one_forward": 0.01}, "floor": {"lpips": 0.06, "one_forward": 0.02}}
    beyond = {"distances": {"lpips": 0.04, "one_forward": 0.03}, "floor": {"lpips": 0.06, "one_forward": 0.02}}
    unknown = {"distances": {"lpips": 0.04, "one_forward": 0.03}}
    assert decision(plan(fidelity="faithful", rows=(a_row(**inside),)), "crush").status is Status.APPLIED
    for fields in (beyond, unknown):
        found = decision(plan(fidelity="faithful", rows=(a_row(**fields),)), "crush")
        assert found.status is Status.DECLINED and "in one forward (0.03)" in found.reason
        assert decision(plan(fidelity="quality", rows=(a_row(**fields),)), "crush").status is Status.APPLIED


@dataclass(frozen=True, kw_only=True)
class Graded(Pretended):
    """Chooses from two settings, and its grid has a third."""

    name = "graded"
    promise = Promise.LOSSY
    summary = "leaves more or less out"
    word: str = "auto"

    @property
    def setting(self) -> str:
        return self.word

    def choices(self, case: Case) -> tuple[Self, ...]:
        return tuple(type(self)(word=word) for word in ("bold", "careful")) if self.word == "auto" else (self,)

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        return cls(word=wishes.get("graded", "auto"))

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        return tuple((("graded", word),) for word in ("bold", "careful", "searched"))


def graded(setting: str, gain: float, lpips: float, **fields: Any) -> Measurement:
    return a_row(id=setting, lever="graded", setting=setting, gain=gain, distances={"lpips": lpips}, **fields)


def test_a_word_is_the_fastest_setting_whose_recorded_distance_it_allows(order: Order) -> None:
    order(Graded)
    rows = (graded("bold", 1.4, 0.08), graded("careful", 1.9, 0.09))
    assert decision(plan(fidelity="quality", rows=rows), "graded").chosen == "careful"
    assert decision(plan(fidelity="quality", rows=rows), "graded").evidence == ("careful",)
    rows = (graded("bold", 2.5, 0.2), graded("careful", 1.9, 0.09))
    assert decision(plan(fidelity="quality", rows=rows), "graded").chosen == "careful", "bold is beyond the word"
    assert decision(plan(fidelity="balanced", rows=rows), "graded").chosen == "bold"
    assert decision(plan(fidelity="fast", rows=()), "graded").status is Status.DECLINED


def test_two_lossy_levers_are_held_to_what_was_measured_of_both_together(order: Order) -> None:
    order(Lossy, Graded)
    rows = (a_row(), graded("bold", 1.4, 0.08))
    apart = decision(plan(fidelity="quality", rows=rows), "graded")
    assert apart.chosen == "bold" and apart.reason.endswith("measured apart from crush")
    both = own(id="both", lever=None, setting="crush=on, graded=bold", gain=1.8)
    found = decision(plan(fidelity="quality", rows=(*rows, both)), "graded")
    assert found.chosen == "bold" and "apart" not in found.reason and found.evidence == ("bold", "both")
    far = replace(both, distances={"lpips": 0.15})
    found = decision(plan(fidelity="quality", rows=(*rows, far)), "graded")
    assert found.status is Status.DECLINED and "together with crush its measured distance (lpips 0.15)" in found.reason
    assert found.evidence == ("both",)
    assert decision(plan(fidelity="balanced", rows=(*rows, far)), "graded").chosen == "bold"
    elsewhere = replace(far, machine="another")
    assert decision(plan(fidelity="quality", rows=(*rows, elsewhere)), "graded").chosen == "bold"


def test_a_setting_that_was_measured_on_this_machine_may_be_chosen_though_the_lever_would_not(order: Order) -> None:
    order(Graded)
    shipped = graded("searched", 3.0, 0.05)
    assert decision(plan(fidelity="quality", rows=(shipped,)), "graded").status is Status.DECLINED
    mine = replace(shipped, source="measured here", machine=SERVER.name)
    careful = graded("careful", 1.9, 0.09)
    assert decision(plan(fidelity="quality", rows=(careful, mine)), "graded").chosen == "searched"
    other_run = replace(mine, num_inference_steps=8)
    assert decision(plan(fidelity="quality", rows=(careful, other_run)), "graded").chosen == "careful"
    asked = plan(fidelity="quality", rows=(careful, mine), wishes=(("graded", "careful"),))
    assert decision(asked, "graded").chosen == "careful"


@pytest.mark.parametrize("distances", [{}, {"psnr_db": 60.0}, {"lpips": float("nan")}])
@pytest.mark.parametrize("word", WORDS)
def test_a_row_without_a_known_distance_admits_nothing(
    order: Order, word: Fidelity, distances: dict[str, float]
) -> None:
    order(Lossy)
    found = decision(plan(fidelity=word, rows=(a_row(distances=distances),)), "crush")
    assert found.status is Status.DECLINED
    assert distances or word not in LOSSY_WORDS or "unmeasured here" in found.reason


@pytest.mark.parametrize("word", WORDS)
def test_a_row_of_random_weights_never_counts(order: Order, word: Fidelity) -> None:
    order(Lossy)
    found = decision(plan(fidelity=word, rows=(a_row(source="random weights"),)), "crush")
    assert found.status is Status.DECLINED
    if word in LOSSY_WORDS:
        assert "unmeasured here" in found.reason


def test_a_row_of_another_model_or_lever_does_not_count(order: Order) -> None:
    order(Lossy)
    rows = (a_row(family="flipbook"), a_row(lever="other"))
    assert decision(plan(fidelity="fast", rows=rows), "crush").status is Status.DECLINED


def test_an_explicit_lossy_lever_under_exact_is_refused(order: Order) -> None:
    order(Lossy)
    with pytest.raises(LeverRefused, match="crush=on is lossy, and fidelity exact was asked for"):
        plan(fidelity="exact", wishes=(("crush", "on"),), rows=(a_row(),))


def test_an_explicit_rounding_lever_under_exact_is_refused_and_an_exact_one_is_not(order: Order) -> None:
    order(Rounding, Exact)
    with pytest.raises(LeverRefused, match="rounding_one=on is rounding"):
        plan(fidelity="exact", wishes=(("rounding_one", "on"),))
    assert plan(fidelity="exact", wishes=(("exact_one", "on"),)).promise is Promise.EXACT


@pytest.mark.parametrize("word", WORDS[1:])
def test_an_explicit_lever_beyond_the_ceiling_is_honoured_and_lowers_the_promise(order: Order, word: Fidelity) -> None:
    order(Exact, Rounding, Lossy)
    made = plan(fidelity=word, wishes=(("crush", "on"),), rows=(a_row(),))
    found = decision(made, "crush")
    assert (found.status, found.reason, found.requested) == (Status.APPLIED, "asked for", "crush=on")
    assert made.promise is Promise.LOSSY and found.evidence == ("row-1",)


def test_a_doubt_stops_auto_and_not_an_explicit_wish(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    order(Exact)
    monkeypatch.setattr(Exact, "doubts", "slower here")
    assert decision(plan(), "exact_one").reason == "slower here"
    assert decision(plan(), "exact_one").status is Status.DECLINED
    asked = decision(plan(wishes=(("exact_one", "on"),)), "exact_one")
    assert (asked.status, asked.reason) == (Status.APPLIED, "asked for, although slower here")


def test_a_lever_learns_which_levers_are_on_before_it(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    order(Exact, Rounding)
    monkeypatch.setattr(Rounding, "doubt", lambda self, case: f"after {case.engaged}")
    assert decision(plan(), "rounding_one").reason == "after ('exact_one',)"
    off = plan(wishes=(("exact_one", "off"),))
    assert decision(off, "rounding_one").reason == "after ()"


def test_levers_are_entered_in_their_order(order: Order) -> None:
    order(Rounding, Exact)
    assert [lever.name for lever in plan().levers] == ["rounding_one", "exact_one"]


def test_a_lever_may_change_how_weights_are_loaded(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    order(Exact)
    monkeypatch.setattr(Exact, "configure", lambda self, load: replace(load, revision="small"))
    assert plan().load.revision == "small"
    assert plan(wishes=(("exact_one", "off"),)).load.revision is None


def test_several_knobs_make_one_lever_and_one_decision(order: Order) -> None:
    order(Tuned)
    made = plan(wishes=(("tuned_threshold", "0.25"), ("tuned_scheme", "fine")))
    assert made.levers == (Tuned(scheme="fine", threshold=0.25),)
    assert decision(made, "tuned").requested == "tuned_threshold=0.25 tuned_scheme=fine"
    half = plan(wishes=(("tuned_threshold", "0.25"), ("tuned_scheme", "auto")))
    assert half.levers == (Tuned(threshold=0.25),)


def test_a_lever_is_off_when_no_knob_of_it_is_on(order: Order) -> None:
    order(Tuned)
    made = plan(wishes=(("tuned_scheme", "fine"), ("tuned_threshold", "off")))
    assert made.levers == (Tuned(scheme="fine"),)
    assert decision(made, "tuned").requested == "tuned_scheme=fine tuned_threshold=off"
    for wishes in ((("tuned_threshold", "off"),), (("tuned_scheme", "auto"), ("tuned_threshold", "off"))):
        assert decision(plan(wishes=wishes), "tuned").reason == "asked for off"


# --------------------------------------------------------------------------- needs

NEEDS = [
    (Needs(capability=(9, 1)), "needs a GPU of capability 9.1 or later"),
    (Needs(capability=(10, 0)), "needs a GPU of capability 10.0 or later"),
    (Needs(traits=frozenset({"guider", "cache_context"})), "lacks guider"),
    (Needs(packages=("no_such_package",)), "needs the package no_such_package: pip install no_such_package"),
    (Needs(packages=("torchao", "a", "b")), "needs the package a, b: pip install a b"),
    (Needs(devices=2), "needs 2 devices of one kind; here is 1 of kind cuda"),
]


@pytest.mark.parametrize(("needs", "reason"), NEEDS)
def test_an_unmet_need_is_unsupported_by_itself_and_refused_when_asked_for(
    order: Order, monkeypatch: pytest.MonkeyPatch, needs: Needs, reason: str
) -> None:
    order(Exact, Rounding)
    monkeypatch.setattr(Rounding, "needs", needs)
    found = decision(plan(), "rounding_one")
    assert found.status is Status.UNSUPPORTED
    assert reason in found.reason
    with pytest.raises(LeverRefused, match=re.escape(reason)):
        plan(wishes=(("rounding_one", "on"),))
    assert decision(plan(wishes=(("rounding_one", "off"),)), "rounding_one").reason == "asked for off"


@pytest.mark.parametrize(
    "needs",
    [
        Needs(capability=(9, 0)),
        Needs(capability=(8, 9)),
        Needs(traits=frozenset({"cache_context"})),
        Needs(conflicts=frozenset({"other"})),
        Needs(packages=("torchao",)),
        Needs(devices=1),
    ],
)
def test_a_met_need_is_no_obstacle(order: Order, monkeypatch: pytest.MonkeyPatch, needs: Needs) -> None:
    order(Exact, Rounding)
    monkeypatch.setattr(Rounding, "needs", needs)
    assert decision(plan(), "rounding_one").status is Status.APPLIED


def test_a_cpu_has_no_capability(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    order(Exact)
    monkeypatch.setattr(Exact, "needs", Needs(capability=(1, 0)))
    assert decision(plan(LAPTOP), "exact_one").status is Status.UNSUPPORTED


@pytest.mark.parametrize("count", [2, 3])
def test_devices_of_one_kind_are_counted_and_those_of_another_are_not(
    order: Order, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    order(Exact)
    monkeypatch.setattr(Exact, "needs", Needs(devices=2))
    gpus = tuple(replace(GPU, index=index) for index in range(count))
    assert decision(plan(replace(SERVER, devices=(*gpus, CPU))), "exact_one").status is Status.APPLIED
    on_cpu = decision(plan(replace(SERVER, devices=(*gpus, CPU)), device="cpu"), "exact_one")
    assert (on_cpu.status, on_cpu.reason) == (
        Status.UNSUPPORTED, "needs 2 devices of one kind; here is 1 of kind cpu",
    )  # fmt: skip


CONFLICT = "does not go together with"


@pytest.fixture(params=["the first says so", "the second says so", "both say so"])
def clashing(request: pytest.FixtureRequest, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact and Rounding do not go together, whichever of the two knows it."""
    order(Exact, Rounding)
    if request.param != "the second says so":
        monkeypatch.setattr(Exact, "needs", Needs(conflicts=frozenset({"rounding_one", "other"})))
    if request.param != "the first says so":
        monkeypatch.setattr(Rounding, "needs", Needs(conflicts=frozenset({"exact_one", "other"})))


@pytest.mark.usefixtures("clashing")
def test_of_two_levers_that_do_not_go_together_the_first_one_is_on() -> None:
    made = plan()
    assert [lever.name for lever in made.levers] == ["exact_one"]
    found = decision(made, "rounding_one")
    assert (found.status, found.reason) == (Status.UNSUPPORTED, f"{CONFLICT} exact_one: turn that off")


@pytest.mark.usefixtures("clashing")
def test_a_lever_that_decides_by_itself_gives_way_to_one_that_was_asked_for() -> None:
    made = plan(wishes=(("rounding_one", "on"),))
    assert [lever.name for lever in made.levers] == ["rounding_one"]
    assert [each.lever for each in made.decisions] == ["exact_one", "rounding_one"]
    assert decision(made, "exact_one").status is Status.UNSUPPORTED
    assert decision(made, "exact_one").reason == f"{CONFLICT} rounding_one: turn that off"


@pytest.mark.usefixtures("clashing")
def test_two_levers_that_do_not_go_together_cannot_both_be_asked_for() -> None:
    with pytest.raises(LeverRefused, match=f"rounding_one=on: {CONFLICT} exact_one: turn that off"):
        plan(wishes=(("rounding_one", "on"), ("exact_one", "on")))


def test_levers_that_were_asked_for_are_entered_in_their_order_too(order: Order) -> None:
    order(Rounding, Exact, Lossy)
    made = plan(wishes=(("crush", "on"), ("exact_one", "on")))
    assert [lever.name for lever in made.levers] == ["rounding_one", "exact_one", "crush"]
    assert [each.lever for each in made.decisions] == ["rounding_one", "exact_one", "crush"]


def test_a_conflict_with_a_lever_that_is_off_is_none(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    order(Exact, Rounding)
    monkeypatch.setattr(Rounding, "needs", Needs(conflicts=frozenset({"exact_one"})))
    assert decision(plan(wishes=(("exact_one", "off"),)), "rounding_one").status is Status.APPLIED


# --------------------------------------------------------------------------- memory


def on_gpu_with(free_gib: float) -> Machine:
    return Machine(name="m", devices=(replace(GPU, free_bytes=int(free_gib * 2**30)), CPU), cpu_count=1)


def guarded(machine: Machine, **fields: Any) -> Plan:
    """With all weights on the device."""
    made = plan(machine, **{"wishes": (("offload", "none"), ("prompt_cache", "keep"))} | fields)
    refuse_if_too_big(made, families.family(made.request.model), machine, machine.devices[0])
    return made


def test_a_clip_that_fits_is_not_refused() -> None:
    assert guarded(SERVER).expected.peak_bytes < GPU.free_bytes  # type: ignore[operator]
    exactly = plan().expected.peak_bytes
    assert exactly
    guarded(Machine(name="m", devices=(replace(GPU, free_bytes=exactly),), cpu_count=1))


def test_a_setting_that_makes_all_fit_is_taken_before_one_that_was_measured_faster() -> None:
    keep = own(lever="prompt_cache", setting="keep", gain=1.01, distances={})
    for rows in ((), (keep,)):
        made = plan(replace(on_gpu_with(40), name=SERVER.name), rows=rows, width=832, height=480)
        assert decision(made, "prompt_cache").chosen == "host"
        assert decision(made, "offload").status is Status.DECLINED and not made.notes
    roomy = plan(rows=(keep,), width=832, height=480)
    assert decision(roomy, "prompt_cache").chosen == "keep"


def test_what_a_run_took_without_levers_says_nothing_of_one_that_saves_memory() -> None:
    seen = own(lever=None, gain=None, step_ms=1000.0, distances={}, peak_bytes=45 << 30, width=832, height=480)
    machine = replace(on_gpu_with(20), name=SERVER.name)
    made = plan(machine, rows=(seen,), width=832, height=480)
    assert made.expected.peak_bytes and made.expected.peak_bytes < 20 << 30 and not made.notes
    refuse_if_too_big(made, families.family(WAN), machine, machine.devices[0])
    stock = (("offload", "none"), ("decode", "off"), ("prompt_cache", "keep"))
    far = replace(seen, peak_bytes=99 << 30)
    assert plan(rows=(far,), width=832, height=480, wishes=stock).expected.peak_bytes == 99 << 30


@pytest.mark.parametrize("free_gib", [39, 41, 43, 45])
def test_a_clip_that_is_too_big_is_refused_with_a_size_that_fits(free_gib: float) -> None:
    machine = on_gpu_with(free_gib)
    with pytest.raises(
        OutOfMemory, match=rf"Wan 2.1 14B needs about .* and cuda:0 has {free_gib}.0 GiB free"
    ) as caught:
        guarded(machine)
    found = re.search(r"(\d+)x(\d+) with (\d+) frames would fit", str(caught.value))
    assert found, str(caught.value)
    width, height, frames = map(int, found.groups())
    smaller = guarded(machine, width=width, height=height, num_frames=frames)
    assert smaller.expected.peak_bytes <= machine.devices[0].free_bytes  # type: ignore[operator]
    assert width * height * frames < 1280 * 720 * 81


def test_a_model_whose_weights_alone_do_not_fit_says_so() -> None:
    with pytest.raises(OutOfMemory, match="its weights alone do not fit here: choose a smaller model"):
        guarded(on_gpu_with(24))


def test_a_model_whose_weights_fit_and_nothing_more_is_not_said_to_be_too_heavy() -> None:
    family = families.family(WAN)
    weights = 2 * (family.transformer_params + family.text_encoder_params + family.vae_params)
    machine = Machine(name="m", devices=(replace(GPU, free_bytes=weights + 1000), CPU), cpu_count=1)
    with pytest.raises(OutOfMemory, match="not even its smallest clip fits here: choose a smaller model"):
        guarded(machine)


def test_the_files_own_count_of_weights_wins_over_the_family_s() -> None:
    family = families.family(WAN)
    load = LoadSpec(family=WAN, source="/models/tiny", dtype="float32", device="cpu", parameters=1_000_000)
    tiny = make_plan(Request(model=WAN), family=family, machine=SERVER, ledger=Ledger(), load=load)
    weights = family.transformer_params + family.text_encoder_params + family.vae_params
    assert plan().expected.peak_bytes - tiny.expected.peak_bytes == 2 * (weights - 1_000_000)  # type: ignore[operator]


def test_a_refusal_names_the_lever_that_would_make_the_clip_fit() -> None:
    with pytest.raises(OutOfMemory, match=r"would fit; or as it is with offload=model"):
        guarded(on_gpu_with(41))
    hunyuan = {"model": "hunyuanvideo-1.5-720p", "num_frames": 33}
    with pytest.raises(OutOfMemory, match=r"or as it is with decode=stream"):
        guarded(on_gpu_with(50), wishes=(("offload", "none"), ("decode", "off"), ("prompt_cache", "keep")), **hunyuan)
    with pytest.raises(OutOfMemory) as caught:
        guarded(on_gpu_with(1))
    assert "or as it is" not in str(caught.value)


def test_a_plan_tells_each_stage_and_the_largest_is_its_peak() -> None:
    expected = plan(SERVER).expected
    assert list(expected.stage_peak_bytes) == ["text", "denoise", "decode"]
    assert max(expected.stage_peak_bytes.values()) == expected.peak_bytes


def test_a_model_of_unknown_size_is_not_refused() -> None:
    family = replace(families.family(WAN), transformer_params=0, text_encoder_params=0, vae_params=0)
    made = make_plan(Request(), family=family, machine=on_gpu_with(0.1), ledger=Ledger())
    assert made.expected.peak_bytes is None
    assert "not known" in made.expected.memory_basis
    refuse_if_too_big(made, family, on_gpu_with(0.1), on_gpu_with(0.1).devices[0])


def test_the_estimate_is_at_least_the_weights_and_grows_with_the_clip_and_the_dtype() -> None:
    family = families.family(WAN)
    weights = 2 * (family.transformer_params + family.text_encoder_params + family.vae_params)
    small, large = plan(width=832, height=480), plan()
    assert weights < small.expected.peak_bytes < large.expected.peak_bytes  # type: ignore[operator]
    assert plan(dtype="float32").expected.peak_bytes > 1.6 * large.expected.peak_bytes  # type: ignore[operator]  # its VAE is in float32 anyway
    assert "not measured" in large.expected.memory_basis


@given(st.integers(1, 90), st.integers(1, 60), st.integers(0, 60))
@hypothesis_settings(max_examples=30, deadline=None)
def test_a_longer_or_larger_clip_never_needs_less(wide: int, high: int, frames: int) -> None:
    def peak(width: int, height: int, num_frames: int) -> int:
        made = plan(width=width * 16, height=height * 16, num_frames=num_frames * 4 + 1)
        assert made.expected.peak_bytes
        return made.expected.peak_bytes

    here = peak(wide, high, frames)
    assert here <= min(peak(wide + 1, high, frames), peak(wide, high + 1, frames), peak(wide, high, frames + 1))


# --------------------------------------------------------------------------- time


def a_run(**fields: Any) -> Measurement:
    """50 steps of one second each, and ten seconds of the rest."""
    row = a_row(
        lever=None, gain=None, distances={}, floor={}, step_ms=1000.0, total_s=60.0, source="measured here", n=1
    )
    return replace(row, **fields)


def test_a_run_of_the_same_shape_tells_the_time() -> None:
    expected = plan(rows=(a_run(),)).expected
    assert expected.seconds == pytest.approx(60)
    assert expected.seconds_basis == "measured here, same shape, n=1"


def test_other_steps_scale_the_loop_and_not_the_rest() -> None:
    assert plan(rows=(a_run(),), num_inference_steps=25).expected.seconds == pytest.approx(35)


def test_the_middle_of_several_runs_of_the_same_shape_is_taken() -> None:
    rows = tuple(a_run(step_ms=ms, total_s=ms * 50 / 1000) for ms in (900.0, 1000.0, 9000.0))
    expected = plan(rows=rows).expected
    assert expected.seconds == pytest.approx(50)
    assert "n=3" in expected.seconds_basis
    assert plan(rows=rows[:2]).expected.seconds == pytest.approx(47.5)


def test_another_shape_is_scaled_by_its_tokens_from_the_nearest_run() -> None:
    near, far = a_run(width=832, height=480), a_run(width=128, height=128, step_ms=1e6)
    expected = plan(rows=(far, near)).expected
    assert expected.seconds == pytest.approx(60 * (80 * 45) / (52 * 30))
    assert expected.seconds_basis == "measured here, scaled by tokens from 832x480x81, n=1"


def test_a_turned_shape_has_as_many_tokens_and_is_not_called_the_same() -> None:
    expected = plan(width=480, height=832, rows=(a_run(width=832, height=480),)).expected
    assert expected.seconds == pytest.approx(60)
    assert expected.seconds_basis == "measured here, scaled by tokens from 832x480x81, n=1"


def test_a_run_of_the_same_shape_is_preferred_to_another() -> None:
    rows = (a_run(width=832, height=480, step_ms=1.0), a_run())
    assert plan(rows=rows).expected.seconds == pytest.approx(60)


@pytest.mark.parametrize(
    "fields", [None, {"device": "Other"}, {"dtype": "float32"}, {"family": "flipbook"}, {"step_ms": None}]
)
def test_without_a_run_like_it_the_time_is_unknown(fields: dict[str, Any] | None) -> None:
    expected = plan(rows=() if fields is None else (a_run(**fields),)).expected
    assert expected.seconds is None
    assert "unmeasured on this device" in expected.seconds_basis


def test_a_run_without_a_total_counts_the_loop_alone() -> None:
    assert plan(rows=(a_run(total_s=None),)).expected.seconds == pytest.approx(50)


# --------------------------------------------------------------------------- properties of every plan

PLAIN = [row.id for row in families.FAMILIES if not row.traits & {"video_input", "control_input"}]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    family = families.family(draw(st.sampled_from(PLAIN)))
    some = lambda values: draw(st.one_of(st.none(), values))  # noqa: E731
    side = st.none() if "one_size" in family.traits else st.integers(1, 40).map(lambda k: k * family.size_multiple)
    return Request(
        model=family.id,
        prompt=draw(st.text(max_size=5)),
        image="cat.png" if "image_input" in family.traits else None,
        width=some(side),
        height=some(side),
        num_frames=some(st.integers(8, 40).map(lambda k: k * family.frame_step + 1)),
        num_inference_steps=some(st.integers(2, 1000)),
        guidance_scale=some(st.floats(0, 100)),
        seed=some(st.integers(0, 2**63 - 1)),
        fps=some(st.fractions(1, 240, max_denominator=1001)),
        fidelity=draw(st.sampled_from(Fidelity)),
        wishes=draw(st.sampled_from([(), *(((knob, word),) for knob in knobs() for word in ("auto", "off"))])),
    )


def planned(request: Request, machine: Machine, rows: tuple[Measurement, ...] = ()) -> Plan:
    return make_plan(request, family=families.family(request.model), machine=machine, ledger=Ledger(rows))


@given(requests(), st.sampled_from([LAPTOP, SERVER]))
@hypothesis_settings(max_examples=60, deadline=None)
def test_every_lever_gets_exactly_one_decision_with_a_reason(request: Request, machine: Machine) -> None:
    made = planned(request, machine)
    assert [each.lever for each in made.decisions] == [lever.name for lever in ORDER]
    assert all(each.reason.strip() and each.requested and each.chosen for each in made.decisions)
    on = [each.lever for each in made.decisions if each.status is Status.APPLIED]
    assert [lever.name for lever in made.levers] == on
    assert made.promise.rank <= made.request.fidelity.ceiling.rank


@given(requests(), st.sampled_from([LAPTOP, SERVER]))
@hypothesis_settings(max_examples=40, deadline=None)
def test_the_same_question_gets_the_same_plan_and_it_survives_json(request: Request, machine: Machine) -> None:
    made = planned(request, machine)
    assert planned(request, machine) == made
    assert Plan.from_json(made.to_json(), levers=ORDER) == made


@given(requests(), st.sampled_from([LAPTOP, SERVER]))
@hypothesis_settings(max_examples=40, deadline=None)
def test_a_resolved_request_has_no_gaps_and_resolves_to_itself(request: Request, machine: Machine) -> None:
    made = planned(request, machine)
    names = (
        "width",
        "height",
        "num_frames",
        "fps",
        "num_inference_steps",
        "guidance_scale",
        "negative_prompt",
        "dtype",
    )
    assert all(getattr(made.request, name) is not None for name in names)
    assert planned(made.request, machine).request == made.request
    for name in (*names, "seed"):
        asked = getattr(request, name)
        assert asked is None or getattr(made.request, name) == asked


@given(requests(), st.integers(0, 2**40), st.integers(0, 2**40))
@hypothesis_settings(max_examples=40, deadline=None)
def test_more_memory_never_turns_a_lever_off_but_the_one_that_saves_it(request: Request, some: int, more: int) -> None:
    def on(free: int) -> set[str]:
        device = replace(GPU, free_bytes=free, total_bytes=max(free, GPU.total_bytes))
        made = planned(request, Machine(name="m", devices=(device,), cpu_count=1))
        return {each.lever for each in made.decisions if each.status is Status.APPLIED} - {"offload"}

    low, high = sorted((some, more))
    assert on(low) <= on(high)


@given(requests(), st.integers(0, 2**40))
@hypothesis_settings(max_examples=40, deadline=None)
def test_a_clip_is_refused_exactly_when_its_estimate_is_beyond_what_is_free(request: Request, free: int) -> None:
    device = replace(GPU, free_bytes=free)
    family = families.family(request.model)
    machine = Machine(name="m", devices=(device,), cpu_count=1)
    made = planned(request, machine)
    peak, _ = expected_bytes(under(case_of(made.request, family, machine, device, made.load), made.levers))
    assert peak == made.expected.peak_bytes
    if peak is not None and peak > free:
        with pytest.raises(OutOfMemory):
            refuse_if_too_big(made, family, machine, device)
    else:
        refuse_if_too_big(made, family, machine, device)


@pytest.mark.parametrize("cut", [1, 10**8, 10**9, 3 * 10**9])
@pytest.mark.parametrize("shortest", [False, True])
@pytest.mark.parametrize("model", PLAIN)
def test_a_size_that_would_fit_is_one_that_the_model_can_make_and_that_does_fit(
    model: str, shortest: bool, cut: int
) -> None:
    family = families.family(model)
    num_frames = families.least_frames(family) if shortest else None
    image = "cat.png" if "image_input" in family.traits else None
    made = plan(model=model, image=image, num_frames=num_frames, wishes=(("offload", "none"), ("prompt_cache", "keep")))
    assert made.expected.peak_bytes
    machine = on_gpu_with((made.expected.peak_bytes - cut) / 2**30)
    with pytest.raises(OutOfMemory) as caught:
        refuse_if_too_big(planned(made.request, machine), family, machine, machine.devices[0])
    if found := re.search(r"(\d+)x(\d+) with (\d+) frames would fit", str(caught.value)):
        width, height, frames = map(int, found.groups())
        smaller = planned(replace(made.request, width=width, height=height, num_frames=frames), machine)
        assert smaller.load.resident
        refuse_if_too_big(smaller, family, machine, machine.devices[0])
    else:
        assert "choose a smaller model or a device with more memory" in str(caught.value)


@pytest.mark.parametrize("field", ["seed", "guidance_scale", "num_inference_steps", "width", "num_frames"])
def test_a_number_of_thousands_of_digits_is_refused_in_one_line(field: str) -> None:
    with pytest.raises(BadInput) as caught:
        plan(**{field: 10**5000})
    assert len(str(caught.value)) < 400


def test_where_hardly_more_than_the_weights_fits_a_tiny_clip_is_suggested() -> None:
    least = plan(width=16, height=16, num_frames=1).expected.peak_bytes
    assert least
    with pytest.raises(OutOfMemory, match=r"\d+x\d+ with \d+ frames would fit") as caught:
        guarded(Machine(name="m", devices=(replace(GPU, free_bytes=least),), cpu_count=1))
    found = re.search(r"(\d+)x(\d+) with (\d+) frames", str(caught.value))
    assert found and int(found[1]) * int(found[2]) * int(found[3]) < 128 * 64 * 81


@dataclass(frozen=True, kw_only=True)
class Careful(Pretended):
    name = "careful"
    summary = "waits for a measurement"
    promise = Promise.ROUNDING
    only_measured = True


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ((), Status.DECLINED),
        ((1.3,), Status.APPLIED),
        ((1.01,), Status.DECLINED),
        ((1.3, 0.9, 1.2), Status.APPLIED),
        ((1.3, 0.9, 0.8), Status.DECLINED),
    ],
)
def test_a_lever_that_waits_for_a_measurement_engages_where_the_median_row_shows_a_gain(
    order: Order, rows: tuple[float, ...], status: Status
) -> None:
    order(Careful)
    made = plan(rows=tuple(a_row(lever="careful", gain=gain) for gain in rows))
    found = decision(made, "careful")
    assert found.status is status
    if not rows:
        assert found.reason == f"unmeasured on {GPU.name}: ask for it with careful=on"


def test_a_gain_on_another_device_is_no_measurement_here(order: Order) -> None:
    order(Careful)
    made = plan(rows=(a_row(lever="careful", gain=2.0, device="another GPU"),))
    assert decision(made, "careful").status is Status.DECLINED


@dataclass(frozen=True, kw_only=True)
class Sparing(Careful):
    name = "sparing"
    only_when_small = True


@pytest.mark.parametrize(("width", "status"), [(832, Status.APPLIED), (416, Status.APPLIED), (208, Status.DECLINED)])
def test_what_spares_the_host_is_believed_for_clips_of_at_most_twice_as_many_tokens(
    order: Order, width: int, status: Status
) -> None:
    order(Sparing)
    made = plan(rows=(a_row(lever="sparing", gain=2.0, width=width),), width=832, height=480, num_frames=81)
    assert decision(made, "sparing").status is status


def test_a_wish_needs_no_measurement(order: Order) -> None:
    order(Careful)
    assert decision(plan(wishes=(("careful", "on"),)), "careful").status is Status.APPLIED


# --------------------------------------------------------------------------- a lossy lever with several settings

HV15 = "hunyuanvideo-1.5-720p"


def step_cache(ledger: Ledger, **request: Any) -> Decision:
    asked = Request(model=HV15, prompt="a", **request)
    return decision(make_plan(asked, family=families.family(HV15), machine=SERVER, ledger=ledger), "step_cache")


def own_curves(family: str = "hunyuanvideo-1.5-720p", dtype: str = "bfloat16") -> list[Curve]:
    return [
        Curve(
            source="calibrated here", checkpoint="c", family=family, repo="", dtype=dtype, scheduler="S",
            denoiser="transformer", branch="cond", levels=(1.0, 0.5), ratios=(1.0, 1.0), drifts=(0.0, 0.1),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "chosen", "reason"),
    [
        ("exact", "off", "allows less"),
        ("faithful", "off", "unmeasured here"),
        ("quality", "quality", "published, not verified here"),
        ("balanced", "quality", "published, not verified here"),
        ("fast", "quality", "published, not verified here"),
    ],
)
def test_published_rows_engage_the_family_s_preset_under_quality_and_below(word: str, chosen: str, reason: str) -> None:
    found = step_cache(Ledger(read_ledger().rows, own_curves), fidelity=Fidelity(word))
    assert (found.chosen, reason in found.reason) == (chosen, True), found
    assert all(row.startswith("published-") for row in found.evidence)


@pytest.mark.parametrize(("word", "status"), [("faithful", Status.DECLINED), ("quality", Status.APPLIED)])
def test_a_calibration_of_one_s_own_counts_as_a_row_of_the_quality_preset(word: str, status: Status) -> None:
    found = step_cache(Ledger([], own_curves), fidelity=Fidelity(word))
    assert found.status is status
    if status is Status.APPLIED:
        assert found.chosen == "quality" and "calibrated here, distance not measured" in found.reason
        assert found.promise is Promise.LOSSY


@pytest.mark.parametrize("curves", [[], own_curves(family="mochi"), own_curves(dtype="float16")])
def test_what_was_never_measured_is_measured_in_the_first_run_and_that_is_exact(curves: list[Curve]) -> None:
    found = step_cache(Ledger([], lambda: curves), fidelity=Fidelity.QUALITY)
    assert found.status is Status.APPLIED and found.promise is Promise.EXACT
    assert "for the next run" in found.reason


def test_a_measured_distance_beyond_the_word_speaks_before_a_calibration() -> None:
    far = a_row(lever="step_cache", family=HV15, setting="quality", distances={"lpips": 0.3})
    found = step_cache(Ledger([far], own_curves), fidelity=Fidelity.QUALITY)
    assert found.status is Status.DECLINED and "lpips 0.3" in found.reason


def test_rows_of_another_setting_say_nothing_of_this_one() -> None:
    row = a_row(lever="step_cache", family=HV15, setting="balanced")
    found = step_cache(Ledger([row]), fidelity=Fidelity.FAITHFUL)
    assert found.status is Status.DECLINED and "unmeasured" in found.reason


@pytest.mark.parametrize(
    ("family", "word", "preset"),
    [(WAN, "fast", "balanced"), (WAN, "balanced", "balanced"), (WAN, "quality", "quality"), (HV15, "fast", "quality")],
)
def test_the_preset_of_auto_is_the_family_s_and_no_bolder_than_the_word(family: str, word: str, preset: str) -> None:
    asked = Request(model=family, prompt="a", fidelity=Fidelity(word), wishes=(("transformer_cache", "magcache"),))
    made = make_plan(asked, family=families.family(family), machine=SERVER, ledger=Ledger())
    assert next(lever for lever in made.levers if lever.name == "step_cache").setting == preset


def test_few_steps_are_declined_by_auto_and_honoured_with_a_warning_when_asked_for() -> None:
    assert "8 steps are few" in step_cache(read_ledger(), fidelity=Fidelity.QUALITY, num_inference_steps=8).reason
    asked = step_cache(read_ledger(), num_inference_steps=8, wishes=(("transformer_cache", "magcache"),))
    assert asked.status is Status.APPLIED and asked.reason.startswith("asked for, although 8 steps are few")


def test_off_is_off_whatever_else_is_set() -> None:
    wishes = (("transformer_cache", "off"), ("transformer_cache_quality", "fast"))
    assert step_cache(read_ledger(), wishes=wishes).status is Status.DECLINED


def test_a_mask_of_another_length_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(BadInput, match="mask of 3 steps for a run of 50") as raised:
        step_cache(Ledger(), wishes=(("transformer_cache_mask", "101"),))
    assert raised.value.field == "transformer_cache_mask"


def test_five_is_not_fifty() -> None:
    five = step_cache(read_ledger(), fidelity=Fidelity.QUALITY, num_inference_steps=5)
    fifty = step_cache(read_ledger(), fidelity=Fidelity.QUALITY, num_inference_steps=50)
    assert (five.status, fifty.status) == (Status.DECLINED, Status.APPLIED)


# --------------------------------------------------------------------------- two devices


def two_gpus(second_free_gib: float) -> Machine:
    second = replace(GPU, index=1, free_bytes=int(second_free_gib * 2**30))
    return Machine(name="two", devices=(GPU, second, CPU), cpu_count=16)


def test_a_second_device_without_room_refuses_the_wish_with_both_figures_and_declines_auto() -> None:
    with pytest.raises(LeverRefused) as refused:
        plan(two_gpus(11.2), wishes=(("cfg_parallel", "on"),))
    assert refused.value.exit_code == 3
    assert re.search(r"second device has 11\.2 GiB free, replica needs \d+\.\d GiB", str(refused.value))
    told = decision(plan(two_gpus(11.2)), "cfg_parallel")
    assert (told.chosen, "11.2 GiB free" in told.reason) == ("off", True)


def test_a_recording_of_forwards_is_declined_beside_a_second_device_and_says_why() -> None:
    """It records what one device does."""
    both = plan(two_gpus(139), wishes=(("cfg_parallel", "on"),))
    assert "cfg_parallel" in [lever.name for lever in both.levers]
    told = decision(both, "cuda_graph")
    assert (told.chosen, told.reason) == ("off", "does not go together with cfg_parallel: turn that off")
    with pytest.raises(LeverRefused, match="does not go together with cfg_parallel"):
        plan(two_gpus(139), wishes=(("cfg_parallel", "on"), ("cuda_graph", "on")))
