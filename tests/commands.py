"""The command in this process."""

import sys

import pytest

from undercrank import cli


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Its exit code, what it printed, and what it said beside."""
    monkeypatch.setattr(sys, "argv", ["undercrank", *map(str, words)])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err
