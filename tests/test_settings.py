"""The environment is read in one place, anew at each question."""

from __future__ import annotations

from pathlib import Path

import pytest

from undercrank.settings import settings

NAMES = (
    "UNDERCRANK_DB", "UNDERCRANK_LEDGER", "UNDERCRANK_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME",
    "UNDERCRANK_LPIPS_BACKBONE",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")


def test_a_bare_environment_gives_the_usual_places() -> None:
    now = settings()
    assert now.ledger == Path("/home/somebody/.local/share/undercrank/ledger.jsonl")
    assert now.hub_cache == Path("/home/somebody/.cache/huggingface/hub")
    assert now.offline is False
    assert now.visible_cuda is None


def test_the_ledger_is_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert settings().ledger == Path("/data/undercrank/ledger.jsonl")
    monkeypatch.setenv("UNDERCRANK_LEDGER", "/elsewhere/rows.jsonl")
    assert settings().ledger == Path("/elsewhere/rows.jsonl")


def test_the_job_store_is_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().db is None
    monkeypatch.setenv("UNDERCRANK_DB", "sqlite:///jobs.db")
    assert settings().db == "sqlite:///jobs.db"


def test_the_hub_s_cache_is_where_the_hub_s_own_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert settings().hub_cache == Path("/xdg/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/hf")
    assert settings().hub_cache == Path("/hf/hub")
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", "/old")
    assert settings().hub_cache == Path("/old")
    monkeypatch.setenv("HF_HUB_CACHE", "/models")
    assert settings().hub_cache == Path("/models")


@pytest.mark.parametrize(
    ("name", "ledger", "hub_cache"),
    [
        ("UNDERCRANK_LEDGER", "here", None),
        ("XDG_DATA_HOME", "here/undercrank/ledger.jsonl", None),
        ("XDG_CACHE_HOME", None, "here/huggingface/hub"),
        ("HF_HOME", None, "here/hub"),
        ("HUGGINGFACE_HUB_CACHE", None, "here"),
        ("HF_HUB_CACHE", None, "here"),
    ],
)
def test_a_tilde_is_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, name: str, ledger: str | None, hub_cache: str | None
) -> None:
    before, home = settings(), Path("/home/somebody")
    monkeypatch.setenv(name, "~/here")
    assert settings().ledger == (home / ledger if ledger else before.ledger)
    assert settings().hub_cache == (home / hub_cache if hub_cache else before.hub_cache)


@pytest.mark.parametrize("name", ["UNDERCRANK_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize(
    ("value", "offline"),
    [("1", True), ("true", True), ("YES", True), (" on ", True), ("0", False), ("", False), ("false", False)],
)
def test_any_of_the_switches_takes_the_network_away(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, offline: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert settings().offline is offline


@pytest.mark.parametrize("value", ["", "1,0", "GPU-abc"])
def test_the_visible_gpus_are_passed_on_as_written(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert settings().visible_cuda == value


def test_an_empty_variable_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    for name in set(NAMES) - {"CUDA_VISIBLE_DEVICES"}:
        monkeypatch.setenv(name, "")
    assert settings() == before


def test_a_change_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings().offline
    monkeypatch.setenv("UNDERCRANK_OFFLINE", "1")
    assert settings().offline
