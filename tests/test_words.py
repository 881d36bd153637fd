"""What people type becomes a value or a refusal with an example; nothing is guessed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercrank.records import BadInput, Fidelity
from undercrank.words import as_fps, as_side, as_size, as_wishes


@pytest.mark.parametrize("text", ["832x480", "832X480", " 832 x 480 ", "832\u00d7480", "832*480"])
def test_a_size_may_be_written_in_several_ways(text: str) -> None:
    assert as_size(text) == (832, 480)


@given(st.integers(0, 999_999), st.integers(0, 999_999))
def test_any_size_is_read_back(width: int, height: int) -> None:
    assert as_size(f"{width}x{height}") == (width, height)


def test_no_size_is_the_family_s_own() -> None:
    assert as_size(None) == (None, None)


@pytest.mark.parametrize(
    "text", ["", "832", "832x", "x480", "832x480x3", "-832x480", "832.0x480", "832by480", "1234567x480", "832x480 px"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match="WIDTHxHEIGHT in pixels, such as 832x480") as caught:
        as_size(text)
    assert caught.value.field == "size"


@pytest.mark.parametrize(
    ("value", "fps"),
    [
        ("16", Fraction(16)),
        ("24000/1001", Fraction(24000, 1001)),
        ("23.976", Fraction(2997, 125)),
        (16, Fraction(16)),
        (29.97, Fraction(2997, 100)),
        (Fraction(30000, 1001), Fraction(30000, 1001)),
        (" 25 ", Fraction(25)),
        (None, None),
    ],
)
def test_a_frame_rate_is_an_exact_fraction(value: Any, fps: Fraction | None) -> None:
    assert as_fps(value) == fps
    assert value is None or type(as_fps(value)) is Fraction


@given(st.fractions(min_value=0, max_value=240, max_denominator=100_000))
def test_any_sensible_frame_rate_is_read_back(fps: Fraction) -> None:
    assert as_fps(str(fps)) == fps


@pytest.mark.parametrize(
    "value", ["", "fast", "nan", "inf", "16/0", "16 fps", "1/2/3", float("nan"), float("inf"), True]
)
def test_what_is_no_frame_rate_is_refused_with_an_example(value: Any) -> None:
    with pytest.raises(BadInput, match="write a number such as 16 or 24000/1001") as caught:
        as_fps(value)
    assert caught.value.field == "fps"


@pytest.mark.parametrize("value", ["1e9999999999", "1e-9999999999", "9" * 10_000, "1/" + "9" * 10_000, "1e2", "1_6"])
def test_a_number_that_would_take_for_ever_to_write_out_is_refused_at_once(value: str) -> None:
    with pytest.raises(BadInput, match="write a number such as 16") as caught:
        as_fps(value)
    assert len(str(caught.value)) < 120


def test_wishes_are_pairs_in_their_order() -> None:
    assert as_wishes(["host_sync=off", " cache = 0.1 ", "mask=1=0"]) == (
        ("host_sync", "off"),
        ("cache", "0.1"),
        ("mask", "1=0"),
    )
    assert as_wishes([]) == ()


@pytest.mark.parametrize("pair", ["host_sync", "host_sync=", "=off", " = ", ""])
def test_what_is_no_pair_is_refused_with_an_example(pair: str) -> None:
    with pytest.raises(BadInput, match="write NAME=VALUE, such as host_sync=off") as caught:
        as_wishes([pair])
    assert caught.value.field == "lever"


def test_a_side_is_a_fidelity_word_and_levers_divided_by_commas() -> None:
    assert as_side(["fidelity=faithful"]) == (Fidelity.FAITHFUL, ())
    assert as_side(["fidelity=quality,transformer_cache_quality=balanced"]) == (
        Fidelity.QUALITY,
        (("transformer_cache_quality", "balanced"),),
    )
    assert as_side(["host_sync=off, compile=on", "decode=off"], Fidelity.FAST) == (
        Fidelity.FAST,
        (("host_sync", "off"), ("compile", "on"), ("decode", "off")),
    )
    assert as_side([]) == (Fidelity.FAITHFUL, ())


@pytest.mark.parametrize(
    ("side", "match"),
    [
        (["fidelity=fine"], "fidelity 'fine': choose exact"),
        (["fidelity=fast", "fidelity=exact"], "given twice"),
        (["host_sync"], "write NAME=VALUE"),
        (["fidelity=fast,=on"], "write NAME=VALUE"),
    ],
)
def test_a_side_that_cannot_be_read_is_refused(side: list[str], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        as_side(side)
