"""What a person sees, by where the output goes: bars, lines, JSON or nothing."""

from __future__ import annotations

import io
import json
import sys
from contextlib import suppress
from dataclasses import dataclass

import pytest

from undercrank import screen
from undercrank.records import Loading

STAGES = ("load", "text", "denoise", "decode", "encode")


@dataclass(frozen=True, kw_only=True)
class Event:
    stage: str
    done: int
    total: int
    unit: str = ""
    step_ms: float | None = None
    eta_s: float | None = None
    loading: Loading | None = None


def a_film(steps: int) -> list[Event]:
    """The events of one clip."""
    return [
        Event(stage="load", done=0, total=2_000_000, unit="bytes"),
        Event(stage="load", done=1_000_000, total=2_000_000, unit="bytes"),
        Event(stage="load", done=2_000_000, total=2_000_000, unit="bytes"),
        Event(stage="text", done=0, total=1),
        Event(stage="text", done=1, total=1),
        *(
            Event(stage="denoise", done=n, total=steps, unit="steps", step_ms=210.0, eta_s=0.21 * (steps - n))
            for n in range(steps + 1)
        ),
        Event(stage="decode", done=0, total=1),
        *(Event(stage="encode", done=n, total=5, unit="frames") for n in range(6)),
    ]


def shown(capsys: pytest.CaptureFixture[str], *, steps: int, as_json: bool, quiet: bool) -> tuple[str, str]:
    with screen.showing(as_json=as_json, quiet=quiet) as show:
        for event in a_film(steps):
            show(event)
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_as_json_every_event_is_a_line_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown(capsys, steps=3, as_json=True, quiet=False)
    events = [json.loads(line) for line in out.splitlines()]
    assert len(events) == len(a_film(3))
    assert err == ""
    assert events[0] == {
        "event": "progress", "stage": "load", "done": 0, "total": 2_000_000, "unit": "bytes", "step_ms": None,
        "eta_s": None,
    }  # fmt: skip
    assert events[6]["step_ms"] == 210.0


def test_json_wins_over_quiet_since_a_program_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys, steps=3, as_json=True, quiet=True)
    assert out


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, steps=3, as_json=False, quiet=True) == ("", "")


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (4, 4), (10, 10), (25, 13), (50, 10), (1000, 10)])
def test_in_a_pipe_a_long_loop_is_about_ten_lines(capsys: pytest.CaptureFixture[str], steps: int, lines: int) -> None:
    out, err = shown(capsys, steps=steps, as_json=False, quiet=False)
    assert out == ""
    loop = [line for line in err.splitlines() if line.startswith("denoise ") and not line.startswith("denoise 0/")]
    assert len(loop) == lines
    assert loop[-1].startswith(f"denoise {steps}/{steps}")


def test_in_a_pipe_every_stage_says_that_it_began(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = shown(capsys, steps=2, as_json=False, quiet=False)
    assert err.splitlines() == [
        "load 0.0/2.0 MB",
        "load 2.0/2.0 MB",
        "read the prompt",
        "denoise 0/2  0.21 s/step  0.4 s left",
        "denoise 1/2  0.21 s/step  0.2 s left",
        "denoise 2/2  0.21 s/step",
        "decode",
        "encode 0/5",
        "encode 5/5",
    ]


def loading(state: str, component: str = "", done: int = 0) -> Event:
    at = Loading(state=state, component=component, bytes_done=done, bytes_total=2_000_000)
    total = 0 if state == "queued" else 2_000_000
    return Event(stage="load", done=done, total=total, unit="bytes", loading=at)


A_LOAD = [
    loading("queued"),
    loading("reading", "vae"),
    loading("placing", "vae", 1_000_000),
    loading("reading", "transformer", 2_000_000),
    loading("placing", "transformer", 2_000_000),
    loading("ready", done=2_000_000),
]


def test_in_a_pipe_a_load_is_two_lines_whatever_its_states(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.showing(as_json=False, quiet=False) as show:
        for event in A_LOAD:
            show(event)
    assert capsys.readouterr().err.splitlines() == ["load 0.0/2.0 MB", "load 2.0/2.0 MB"]


def test_as_json_a_load_tells_its_state_its_component_and_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.showing(as_json=True, quiet=False) as show:
        show(A_LOAD[2])
    assert json.loads(capsys.readouterr().out)["loading"] == {
        "state": "placing", "component": "vae", "bytes_done": 1_000_000, "bytes_total": 2_000_000,
    }  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bars(monkeypatch: pytest.MonkeyPatch, events: list[Event], error: type[Exception] | None = None) -> dict[str, int]:
    """Stage -> length of its bar, as a terminal shows it at the end."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")  # the last state alone is drawn
    monkeypatch.setenv("COLUMNS", "100")
    with suppress(error or ()), screen.showing(as_json=False, quiet=False) as show:
        for event in events:
            show(event)
        if error:
            raise error
    lines = [line for line in terminal.getvalue().splitlines() if line.strip()]
    return {line[:16].strip(): line.count("\u2501") for line in lines}


def test_on_a_terminal_every_stage_is_a_bar_that_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bars(monkeypatch, a_film(3)) == {screen.STAGES[stage]: 32 for stage in STAGES}


def test_a_stage_has_ended_when_the_next_one_begins_and_a_failed_one_stays_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [Event(stage="text", done=0, total=1), Event(stage="denoise", done=1, total=2, unit="steps")]
    assert bars(monkeypatch, events, ZeroDivisionError) == {"read the prompt": 32, "denoise": 16}


def test_the_last_stage_has_ended_when_all_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bars(monkeypatch, [Event(stage="decode", done=0, total=1)]) == {"decode": 32}


def test_every_stage_has_its_words() -> None:
    assert set(screen.STAGES) == set(STAGES)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Event(stage="load", done=20_100_000, total=29_200_000, unit="bytes"), "20.1/29.2 MB"),
        (A_LOAD[0], "queued"),
        (A_LOAD[2], "1.0/2.0 MB  placing vae"),
        (Event(stage="text", done=0, total=1), ""),
        (Event(stage="denoise", done=2, total=9, unit="steps", step_ms=90, eta_s=2.7), "2/9  0.09 s/step  2.7 s left"),
        (Event(stage="denoise", done=0, total=25, unit="steps"), "0/25"),
        (Event(stage="denoise", done=25, total=25, unit="steps", step_ms=210, eta_s=0.0), "25/25  0.21 s/step"),
        (Event(stage="encode", done=3, total=33, unit="frames"), "3/33"),
    ],
)  # fmt: skip
def test_progress_in_words(event: Event, text: str) -> None:
    assert screen.words(event) == text


def test_json_goes_to_standard_output_in_ascii_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_json({"prompt": "\u732b\n\u2028"})
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.count("\n") == 1
    assert json.loads(out) == {"prompt": "\u732b\n\u2028"}


def test_json_is_never_nan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        screen.print_json({"seconds": float("nan")})
    assert capsys.readouterr().out == ""


def test_what_is_said_to_the_person_does_not_mix_with_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    screen.say("note: this")
    assert capsys.readouterr() == ("", "note: this\n")


def test_a_table_in_a_pipe_is_not_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    long = "Wan-AI/" + "x" * 80
    screen.table(("model", "from"), [("wan [bold]", long), ("flipbook", "package:flipbook")], title="Models")
    out = capsys.readouterr().out
    assert long in out
    assert "wan [bold]" in out
    lines = out.splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["model", "from"]
