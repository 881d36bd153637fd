"""From what people type to values: sizes, frame rates, lever wishes. Raises BadInput, never guesses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from undercrank.records import BadInput, Fidelity


def as_size(text: str | None) -> tuple[int | None, int | None]:
    """ "832x480" -> (832, 480); None -> (None, None), the family's own size."""
    if text is None:
        return None, None
    match = re.fullmatch(r"\s*(\d{1,6})\s*[xX\u00d7*]\s*(\d{1,6})\s*", text)
    if match is None:
        raise BadInput(f"size {text!r}: write WIDTHxHEIGHT in pixels, such as 832x480 or 128x128", field="size")
    return int(match[1]), int(match[2])


def as_fps(value: str | int | float | Fraction | None) -> Fraction | None:
    """ "24000/1001", "16", 16, 23.976 -> an exact fraction."""
    if value is None:
        return None
    text = str(value).strip()
    if not re.fullmatch(r"-?\d{1,6}(\.\d{1,20})?|-?\d{1,8}/\d{1,6}", text):
        raise BadInput(f"fps {text[:40]!r}: write a number such as 16 or 24000/1001", field="fps")
    try:
        return Fraction(text).limit_denominator(100_000)
    except ZeroDivisionError as error:
        raise BadInput(f"fps {text!r}: write a number such as 16 or 24000/1001", field="fps") from error


def as_seeds(text: str) -> tuple[int, ...]:
    """ "1,2,3" -> (1, 2, 3)."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,18}", part) for part in parts):
        raise BadInput(f"seeds {text[:40]!r}: write whole numbers with commas, such as 1,2,3", field="seeds")
    return tuple(dict.fromkeys(int(part) for part in parts))


def as_wishes(pairs: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """ "host_sync=off" -> ("host_sync", "off"). Whether the knob exists is the planner's question."""
    wishes = []
    for pair in pairs:
        knob, sign, value = pair.partition("=")
        if not sign or not knob.strip() or not value.strip():
            raise BadInput(f"lever {pair!r}: write NAME=VALUE, such as host_sync=off", field="lever")
        wishes.append((knob.strip(), value.strip()))
    return tuple(wishes)


def as_side(
    pairs: Iterable[str], fidelity: Fidelity = Fidelity.FAITHFUL
) -> tuple[Fidelity, tuple[tuple[str, str], ...]]:
    """["fidelity=quality,transformer_cache_quality=balanced"] -> the word, and the lever wishes beside it.

    Several in one text are divided by commas. fidelity: the word where none is given.
    """
    each = [part for pair in pairs for part in pair.split(",") if part.strip()]
    wishes = as_wishes(each)
    words = [value for knob, value in wishes if knob == "fidelity"]
    if len(words) > 1:
        raise BadInput(f"fidelity is given twice: {', '.join(words)}", field="fidelity")
    return Fidelity.of(words[0]) if words else fidelity, tuple(wish for wish in wishes if wish[0] != "fidelity")
