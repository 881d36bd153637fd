"""From the wire to a request: strict, nothing rounded, nothing dropped."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from undercrank.levers import knobs
from undercrank.records import BadInput, Request
from undercrank.server import schemas
from undercrank.server.schemas import VideoCreate, as_request, in_seconds, read, read_json


def asked(**fields: Any) -> Request:
    return as_request(read(VideoCreate, {"prompt": "x", **fields}))


def refusal(**fields: Any) -> BadInput:
    with pytest.raises(BadInput) as caught:
        asked(**fields)
    return caught.value


def test_every_knob_of_this_version_is_a_field() -> None:
    assert set(knobs()) <= set(schemas.KNOBS)


def test_a_field_of_every_kind_arrives() -> None:
    fields: dict[str, Any] = {
        "negative_prompt": "blue", "size": "160x96", "num_frames": 9, "fps": "24000/1001", "num_inference_steps": 7,
        "guidance_scale": 4.5, "guidance_scale_2": 3, "flow_shift": "8", "seed": 12, "fidelity": "exact",
        "host_sync": "off", "allow_denied": "true",
    }  # fmt: skip
    assert asked(**fields) == Request(
        prompt="x", negative_prompt="blue", width=160, height=96, num_frames=9, fps=Fraction(24000, 1001),
        num_inference_steps=7, guidance_scale=4.5, guidance_scale_2=3.0, flow_shift=8.0,
        seed=12, fidelity="exact", wishes=(("host_sync", "off"),), allow_denied=True,
    )  # fmt: skip


def test_numbers_may_come_as_words() -> None:
    words = {"width": "160", "height": "96", "num_frames": "9", "guidance_scale": "4.5", "seed": "12", "seconds": 1}
    numbers = {"width": 160, "height": 96, "num_frames": 9, "guidance_scale": 4.5, "seed": 12, "seconds": "1"}
    assert asked(**words | {"fps": 8}) == asked(**numbers | {"fps": "8"})


@pytest.mark.parametrize(("value", "word"), [(True, "on"), (False, "off"), (0.2, "0.2"), ("auto", "auto"), (5, "5")])
def test_a_setting_of_a_lever_may_be_a_word_a_number_or_a_truth(value: object, word: str) -> None:
    assert asked(transformer_cache_threshold=value).wishes == (("transformer_cache_threshold", word),)


@pytest.mark.parametrize(
    "field", ["width", "height", "num_frames", "num_inference_steps", "guidance_scale", "seed", "seconds", "fps"]
)
@pytest.mark.parametrize("value", ["ten", [1], {}, "", "1 2", "nan", "inf", float("nan"), float("inf")])
def test_what_is_no_number_is_refused_by_name(field: str, value: object) -> None:
    assert refusal(**{field: value}).field == field


@pytest.mark.parametrize("field", ["width", "num_frames", "seed", "num_inference_steps", "guidance_scale"])
def test_a_truth_is_no_number(field: str) -> None:
    assert refusal(**{field: True}).field == field


@pytest.mark.parametrize("field", ["num_frames", "num_inference_steps", "seed"])
def test_a_broken_number_is_refused_where_a_whole_one_is_needed(field: str) -> None:
    assert refusal(**{field: 1.5}).field == refusal(**{field: "1.5"}).field == field


@pytest.mark.parametrize("value", [None, 5, ["x"], {"a": 1}, True])
def test_a_prompt_is_text(value: object) -> None:
    assert refusal(prompt=value).field == "prompt"


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(BadInput, match="prompt: is needed"):
        read(VideoCreate, {})


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    error = refusal(guidence_scale=2)
    assert error.field == "guidence_scale" and "did you mean guidance_scale?" in str(error)


def test_an_unknown_field_like_no_other_is_refused_with_all() -> None:
    assert "known are" in str(refusal(zzz=1))


def test_a_long_unknown_name_is_not_given_back_whole() -> None:
    assert len(str(refusal(**{"z" * 100_000: 1}))) < 2000


@pytest.mark.parametrize("model", ["../../etc/passwd", "/etc/passwd", ".", "nobody/nothing", "~", ""])
def test_a_model_is_one_of_the_table_never_a_path(model: str) -> None:
    error = refusal(model=model)
    assert error.field == "model" and "nearest are" in str(error)


def test_size_and_sides_must_agree() -> None:
    assert asked(size="160x96", width=160, height=96) == asked(size="160x96")
    assert refusal(size="160x96", width=160, height=128).field == "size"


def test_one_side_alone_is_refused() -> None:
    assert refusal(width=160).field == "height"
    assert refusal(height=96).field == "width"


# flipbook: 16 frames a second, 4 k + 1 frames


@pytest.mark.parametrize(
    ("fields", "num_frames"),
    [({"seconds": "2"}, 33), ({"seconds": 1.5}, 25), ({"seconds": "0"}, 1), ({"seconds": "4", "fps": 8}, 33)],
)
def test_seconds_last_from_the_first_frame_to_the_last(fields: dict[str, Any], num_frames: int) -> None:
    assert asked(**fields).num_frames == num_frames


def test_seconds_off_the_lattice_are_refused_with_the_two_next_to_them() -> None:
    error = refusal(seconds="1.3")
    assert error.field == "seconds" and "1.25 (21 frames) or 1.5 (25 frames)" in str(error)


def test_seconds_between_two_frames_are_refused_with_the_two_next_to_them() -> None:
    """1.03 seconds are 17.48 frames, and 17 is a length that can be made."""
    assert "1 (17 frames) or 1.25 (21 frames)" in str(refusal(seconds="1.03"))
    assert "625 (10001 frames)" in str(refusal(seconds="3600"))


def test_seconds_need_a_rate() -> None:
    assert refusal(seconds="1", fps="0").field == refusal(seconds="1", fps="-5").field == "fps"


def test_seconds_and_frames_must_agree() -> None:
    assert asked(seconds="2", num_frames=33).num_frames == 33
    assert refusal(seconds="2", num_frames=29).field == "seconds"


@pytest.mark.parametrize("value", ["-1", "99999", "1/0", "1e3"])
def test_seconds_out_of_reason_are_refused(value: str) -> None:
    assert refusal(seconds=value).field == "seconds"


@pytest.mark.parametrize(
    ("num_frames", "fps", "text"), [(33, "16", "2"), (41, "16", "2.5"), (1, "16", "0"), (81, "24000/1001", "1001/300")]
)
def test_seconds_are_shown_exactly(num_frames: int, fps: str, text: str) -> None:
    assert in_seconds(num_frames, Fraction(fps)) == text


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"prompt": "a", "prompt": "b"}', "given twice"),
        (b'{"seed": NaN}', "NaN is no number"),
        (b'{"seed": -Infinity}', "-Infinity is no number"),
    ],
)
def test_json_is_read_strictly(raw: bytes, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_json(raw)
