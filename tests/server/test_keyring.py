"""`undercrank keys`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from undercrank import cli
from undercrank.jobs import Limits, Store
from undercrank.records import UndercrankError


def keys(tmp_path: Path, *words: str) -> str:
    answer = CliRunner().invoke(cli.app, ["keys", *words, "--data", str(tmp_path)])
    if isinstance(answer.exception, UndercrankError):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_a_key_is_made_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    secret = keys(tmp_path, "create", "ada", "--max-jobs", "4").strip()
    with Store.open(f"sqlite:///{tmp_path / 'jobs.db'}") as store:
        key = store.key_of(secret)
        assert key is not None and key.owner == "ada" and key.limits == Limits(max_jobs=4)
        listed = keys(tmp_path, "list")
        assert key.id in listed and "ada" in listed and "in use" in listed and secret not in listed
        assert key.id in keys(tmp_path, "revoke", key.id)
        assert store.key_of(secret) is None
    assert "revoked" in keys(tmp_path, "list")


def test_keys_for_scripts(tmp_path: Path) -> None:
    made = json.loads(keys(tmp_path, "create", "ada", "--max-work", "9", "--json"))
    listed = json.loads(keys(tmp_path, "list", "--json"))["keys"]
    assert [(key["id"], key["limits"]["max_cost"]) for key in listed] == [(made["id"], 9)]


def test_a_key_that_is_none_cannot_be_revoked(tmp_path: Path) -> None:
    keys(tmp_path, "create", "ada")
    with pytest.raises(UndercrankError, match="keys list"):
        keys(tmp_path, "revoke", "nothing")


def test_the_store_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERCRANK_DB", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    secret = keys(tmp_path, "create", "ada").strip()
    with Store.open(f"sqlite:///{tmp_path / 'elsewhere.db'}") as store:
        assert store.key_of(secret) is not None
    assert not (tmp_path / "jobs.db").exists()
