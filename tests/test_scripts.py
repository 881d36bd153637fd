"""The scripts are sound: they parse, can be started, and name nothing that exists on one machine only."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for folder in ("scripts", ".ci") for path in (ROOT / folder).iterdir() if path.is_file())
SETTINGS = [*sorted((ROOT / "constraints").iterdir()), ROOT / ".pre-commit-config.yaml", ROOT / "zensical.toml"]
NAMES = [str(path.relative_to(ROOT)) for path in SCRIPTS]
ELSEWHERE = re.compile(r"https?://|file://|index-url|find-links|pypi|pytorch\.org|/(?:work|root|home|opt|tmp)/", re.I)


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_script_parses(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_what_is_started_can_be_started_and_what_is_sourced_cannot(script: Path) -> None:
    is_started = script.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    assert os.access(script, os.X_OK) == is_started


@pytest.mark.parametrize("script", [s for s in SCRIPTS if os.access(s, os.X_OK)], ids=lambda s: s.name)
def test_a_script_stops_at_the_first_failure(script: Path) -> None:
    assert "\nset -euo pipefail\n" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [*SCRIPTS, *SETTINGS], ids=lambda f: str(f.relative_to(ROOT)))
def test_nothing_names_a_registry_or_a_path_of_one_machine(file: Path) -> None:
    assert ELSEWHERE.search(file.read_text(encoding="utf-8").replace("PYTHON=/path/to/python", "")) is None


def test_ci_runs_what_a_person_runs() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("\nexec scripts/test")


def test_every_pin_is_one_version() -> None:
    lines = (ROOT / "constraints" / "ci.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", pin)] == []


def test_an_old_python_is_named_and_refused(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1" && exit 0\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    answer = subprocess.run(
        [ROOT / "scripts" / "first-clip", tmp_path / "venv"],
        env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True,
    )  # fmt: skip
    assert answer.returncode != 0
    assert "Python 3.11 or later is needed" in answer.stderr and "Python 3.9.1" in answer.stderr
    assert not (tmp_path / "venv").exists()
