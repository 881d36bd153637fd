"""How a studio is run, and when it will not open its door."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from undercrank.jobs import Store
from undercrank.records import BadInput, Device, Machine
from undercrank.server import serve
from undercrank.server.options import Options, make_folder, refuse_open_door


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_this_computer_alone_needs_no_key(store: Store, host: str) -> None:
    options = Options(data="x", host=host)
    assert options.is_local
    refuse_open_door(options, store)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "studio.example", "", "localhost.evil.example"])
def test_beyond_this_computer_a_key_is_needed(store: Store, host: str) -> None:
    options = Options(data="x", host=host)
    assert not options.is_local
    with pytest.raises(BadInput, match="undercrank keys create"):
        refuse_open_door(options, store)
    key, _ = store.create_key(owner="ada")
    refuse_open_door(options, store)
    store.revoke_key(key.id)
    with pytest.raises(BadInput):
        refuse_open_door(options, store)


def test_the_store_is_in_the_folder_unless_told_otherwise() -> None:
    assert Options(data="/x").db_url == "sqlite:////x/jobs.db"
    assert Options(data="/x", db="sqlite:////y").db_url == "sqlite:////y"


def test_options_travel_as_json() -> None:
    options = Options(data="/x", hosts=("a", "b"), keep_days=1.5, max_jobs=3)
    assert Options.from_json(options.to_json()) == options


def test_the_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="--data"):
        make_folder(tmp_path / "file" / "b")


def test_what_is_for_the_workers_reaches_them() -> None:
    assert Options(data="x").worker_options == ("--resident", "1", "--warm", "flipbook")
    options = Options(data="x", resident=2, local_files_only=True)
    assert options.worker_options == ("--resident", "2", "--warm", "flipbook", "--local-files-only")


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, ("0", "1")), ("3,7", ("3", "7")), ("GPU-a,GPU-b", ("GPU-a", "GPU-b"))]
)
def test_gpus_are_named_as_cuda_names_them(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: tuple[str, ...]
) -> None:
    two = Machine(
        name="m", cpu_count=2, devices=(Device(kind="cuda"), Device(kind="cuda", index=1), Device(kind="cpu"))
    )
    monkeypatch.setattr(serve, "this_machine", lambda: two)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert serve.gpus() == expected
