"""Downloads in a process of their own, from a hub of our own that answers as slowly as it is told."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from undercrank.engine import Engine
from undercrank.fetching import fetch
from undercrank.records import Cancelled, NotFound, Request

REPO, COMMIT = "somebody/some-model", "a" * 40
FILES = {"model_index.json": b'{"_class_name": "WanPipeline"}', "vae/model.safetensors": bytes(3_000_000)}
HANGS_AFTER = 1_000_000
"Bytes of the large file after which the hub says no more."


class Hub(BaseHTTPRequestHandler):
    hangs = False
    over = threading.Event()

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            tree = [
                {"type": "file", "path": p, "size": len(b), "oid": f"{n}"} for n, (p, b) in enumerate(FILES.items())
            ]
            self.send(json.dumps(tree).encode(), {"Content-Type": "application/json"})
        else:
            self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        if name not in FILES:
            self.send_error(404)
            return
        headers = {"ETag": f'"{name.replace("/", "-")}"', "X-Repo-Commit": COMMIT}
        self.send(FILES[name], headers, body=body)

    def send(self, data: bytes, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:HANGS_AFTER])
            if self.hangs and len(data) > HANGS_AFTER:
                self.over.wait(60)
            self.wfile.write(data[HANGS_AFTER:])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("OurHub", (Hub,), {"over": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    for name in ("UNDERCRANK_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield handler
    handler.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


def children() -> str:
    """The command lines of the processes that this one has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append((process / "cmdline").read_bytes().decode())
    return "\n".join(found)


OPTIONS = {"revision": COMMIT, "allow_patterns": ["*.json", "*.safetensors"], "etag_timeout": 10}


def test_a_model_is_fetched_and_its_bytes_are_told(hub: type[Hub]) -> None:
    told: list[tuple[int, int]] = []
    folder = fetch(REPO, OPTIONS, lambda done, total: told.append((done, total)))
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == set(FILES)
    assert all(0 <= done <= sum(map(len, FILES.values())) for done, _ in told) and told
    assert "undercrank.fetching" not in children()


def test_a_download_that_hangs_is_ended_at_once_and_nothing_of_it_is_left(hub: type[Hub], tmp_path: Path) -> None:
    hub.hangs = True
    asked = []
    threads = threading.active_count()

    def progress(done: int, total: int) -> None:
        asked.append(done)
        if any((tmp_path / "hub").rglob("*.incomplete")):
            assert "undercrank.fetching" in children()
            raise Cancelled("enough")

    with pytest.raises(Cancelled, match="enough"):
        fetch(REPO, OPTIONS, progress)
    assert "undercrank.fetching" not in children() and threading.active_count() <= threads + 2, "but those of the hub"


def test_what_the_hub_refuses_is_an_error_in_words(hub: type[Hub]) -> None:
    with pytest.raises(OSError, match=r"\S"):
        fetch("somebody/else", {**OPTIONS, "revision": "b" * 40, "allow_patterns": ["*.json"]}, lambda *_: None)


def test_a_download_while_planning_is_cancelled_and_told_as_such(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.hangs = True
    told = []
    with Engine() as engine:

        def listener(event: Any) -> None:
            told.append(event.loading)
            if len(told) == 3:
                engine.cancel("enough")

        from undercrank import sources

        real = sources.fetch
        monkeypatch.setattr(
            sources, "fetch", lambda repo, options, progress: real(repo, {**options, "revision": COMMIT}, progress)
        )
        monkeypatch.setattr("undercrank.load.TELL_S", 0.0)
        with pytest.raises(Cancelled, match="enough"):
            engine.prepare(Request(prompt="", model=REPO), listener=listener)
        assert {at.component for at in told} == {"download"}
        assert [at.state for at in told][-2:] == ["reading", "cancelled"]


def test_a_model_that_is_not_there_is_missing_also_from_another_process(hub: type[Hub]) -> None:
    with Engine() as engine, pytest.raises(NotFound, match="could not be fetched"):
        engine.prepare(Request(prompt="", model="somebody/nothing"))
