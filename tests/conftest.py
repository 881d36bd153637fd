"""Every test keeps its own ledger: no run of the suite writes into, or learns from, the user's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("long")  # tests that ask for its name try more


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The same number of threads from the first reference to the last comparison; torch is not imported for it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    yield


@pytest.fixture(autouse=True)
def own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERCRANK_LEDGER", str(tmp_path / "ledger.jsonl"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "ledger.jsonl"
