"""The ledger and comparisons over HTTP: what is told of two clips, and to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.server.conftest import ASKED, Hand, error
from undercrank.ledger import append
from undercrank.levers import ORDER
from undercrank.records import Measurement, Plan
from undercrank.server.studio import Studio
from undercrank.video import write_master


def report(client: TestClient, **more: Any) -> dict[str, Any]:
    """What a worker would say of such a clip, as far as a comparison reads it."""
    plan = client.post("/v1/plan", json=ASKED).json()["plan"]
    return {"frames_hash": "of these frames", "plan": plan, "request": plan["request"], **more}


def master(studio: Studio, name: str, level: int) -> str:
    frames_FHWC = np.full((5, 64, 64, 3), level, np.uint8)
    frames_FHWC[:, 10:30, 10:30] = 200
    write_master(studio.folder / name, frames_FHWC, fps=16, recipe={})
    return name


def compared(client: TestClient, a: str, b: str) -> Any:
    return client.get("/v1/compare", params={"a": a, "b": b})


def test_equal_hashes_are_bit_identical_without_a_look(client: TestClient, ask: Callable[..., str], hand: Hand) -> None:
    for _ in range(2):
        ask()
    a, b = (hand.films(report=report(client)) for _ in range(2))
    told = compared(client, a, b).json()
    assert told["identical"] is True and told["distances"] == [] and "hashes" in told["basis"]


def test_without_masters_it_says_what_is_lacking(client: TestClient, ask: Callable[..., str], hand: Hand) -> None:
    for _ in range(2):
        ask()
    a, b = (hand.films(report=report(client, frames_hash=word)) for word in ("one", "other"))
    told = compared(client, a, b).json()
    assert told["identical"] is False and told["distances"] == [] and "master" in told["basis"]


def test_masters_are_measured_beside_the_floor_of_such_runs(
    client: TestClient, ask: Callable[..., str], hand: Hand, studio: Studio
) -> None:
    for _ in range(2):
        ask()
    ids = []
    for name, level in (("a.mkv", 40), ("b.mkv", 41)):
        story = report(client, frames_hash=name)
        film = {"video": "x.mp4", "master": master(studio, name, level)}
        ids.append(hand.films(report=story, files=film))
    append(floor_of(Plan.from_dict(story["plan"], levers=ORDER)))
    told = compared(client, *ids).json()
    assert told["identical"] is False and told["basis"] == "measured on both masters, 5x64x64x3"
    by_name = {row["metric"]: row for row in told["distances"]}
    assert by_name["max_abs"]["value"] == pytest.approx(1.0, abs=1e-3) and by_name["max_abs"]["inside_floor"] is True
    assert by_name["psnr_db"]["inside_floor"] is False and by_name["psnr_db"]["closer"] == "higher"
    assert by_name["ssim"]["floor"] is None and by_name["ssim"]["inside_floor"] is None
    assert "made up" in told["floor_note"]


def floor_of(plan: Plan) -> Measurement:
    request = plan.request
    assert request.width and request.height and request.num_frames and request.num_inference_steps
    return Measurement(
        id="floor", family=request.model, lever=None, source="made up", machine="m", device="d", versions={}, n=1,
        width=request.width, height=request.height, num_frames=request.num_frames, dtype=plan.load.dtype,
        num_inference_steps=request.num_inference_steps, floor={"max_abs": 2.0, "psnr_db": 60.0},
    )  # fmt: skip


def test_a_clip_that_is_not_done_cannot_be_compared(client: TestClient, ask: Callable[..., str]) -> None:
    id = ask()
    answer = compared(client, id, id)
    assert answer.status_code == 409 and error(answer)["code"] == "not_ready"


def test_clips_of_others_look_like_none(
    client: TestClient, ask: Callable[..., str], hand: Hand, studio: Studio
) -> None:
    ask()
    id = hand.films(report=report(client))
    _, key = studio.store.create_key(owner="ada")
    answer = client.get("/v1/compare", params={"a": id, "b": id}, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 404


def test_the_ledger_is_told_with_the_meaning_of_its_metrics(client: TestClient) -> None:
    told = client.get("/v1/ledger").json()
    assert {"published"} <= {row["source"] for row in told["data"]}
    metrics = {metric["name"]: metric for metric in told["metrics"]}
    assert metrics["psnr_db"]["closer"] == "higher" and metrics["lpips"]["closer"] == "lower"
