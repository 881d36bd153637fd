"""A studio over a store of its own, and a worker's part played by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from undercrank.jobs import Claim, Store
from undercrank.records import Device, Machine
from undercrank.server import logs
from undercrank.server.app import make_app
from undercrank.server.studio import Studio

HERE = "http://127.0.0.1:8200"
ASKED = {"prompt": "a red ring moves left on a navy background", "num_frames": 5, "num_inference_steps": 3}


ROOMY = Machine(name="made up", devices=(Device(kind="cpu", name="made up", total_bytes=2**42),), cpu_count=2)
"Every model fits."


@pytest.fixture(scope="session", autouse=True)
def plain_log() -> None:
    logs.set_up()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Migrated once: that takes as long as most of these tests."""
    file = tmp_path_factory.mktemp("store") / "jobs.db"
    Store.open(f"sqlite:///{file}").close()
    return file


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> Iterator[Store]:
    shutil.copy(empty_store, tmp_path / "jobs.db")
    with Store.open(f"sqlite:///{tmp_path / 'jobs.db'}") as opened:
        yield opened


@pytest.fixture
def studio(store: Store, tmp_path: Path) -> Studio:
    return Studio(store=store, folder=tmp_path, secret=b"of a test", find_machine=lambda: ROOMY)


@pytest.fixture
def client(studio: Studio) -> Iterator[TestClient]:
    with TestClient(make_app(studio), base_url=HERE) as opened:
        yield opened


@dataclass(kw_only=True)
class Hand:
    """Does what a worker does with the first job in line."""

    store: Store
    folder: Path

    def claims(self) -> Claim:
        claim = self.store.claim("by hand")
        assert claim is not None, "nothing is queued"
        return claim

    def films(self, clip: bytes = b"0123456789", **more: Any) -> str:
        """Claims, steps once, finishes; the id of the job. `clip` is what the file holds."""
        claim = self.claims()
        self.store.event(claim.lease, "step", {"step": 1, "total": 3}, stage="denoise", progress=30)
        name = f"videos/{claim.job.id}.1/video.mp4"
        (self.folder / name).parent.mkdir(parents=True)
        (self.folder / name).write_bytes(clip)
        self.store.finish(claim.lease, {"files": {"video": name}, **more})
        return claim.job.id


@pytest.fixture
def hand(store: Store, tmp_path: Path) -> Hand:
    return Hand(store=store, folder=tmp_path)


@pytest.fixture
def ask(client: TestClient) -> Callable[..., str]:
    """Asks for a clip; its id."""

    def post(**fields: Any) -> str:
        answer = client.post("/v1/videos", json=ASKED | fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    return post


def error(answer: Any) -> dict[str, Any]:
    """The error of an answer, in the shape that all of them have."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"code", "message", "param", "type"}, body
    return dict(body["error"])
