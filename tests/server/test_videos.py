"""The life of a clip over HTTP: asked for, followed, fetched, stopped, deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import ASKED, Hand, error
from undercrank import planner
from undercrank.jobs import JobError, Limits, Store
from undercrank.ledger import append
from undercrank.records import Measurement, Request
from undercrank.server.studio import Studio
from undercrank.shelf import live_picture

Ask = Callable[..., str]
NOBODY = "video_000000000000000000000000"


# --------------------------------------------------------------------------- asking


def test_a_clip_that_is_asked_for_has_the_whole_resolved_record(client: TestClient) -> None:
    video = client.post("/v1/videos", json=ASKED).json()
    assert video["object"] == "video" and video["status"] == "queued" and video["progress"] == 0
    assert video["size"] == "128x128" and video["seconds"] == "0.25" and video["fps"] == "16"
    assert video["queue_position"] == 0 and video["error"] is None and video["completed_at"] is None
    request = video["request"]
    assert None not in (request[name] for name in ("width", "height", "num_frames", "fps", "guidance_scale", "dtype"))
    assert {"lever", "chosen", "status", "promise", "reason"} <= set(video["plan"]["decisions"][0])


def test_the_seed_that_the_server_draws_is_told(client: TestClient, store: Store) -> None:
    video = client.post("/v1/videos", json=ASKED).json()
    assert video["seed"] == video["request"]["seed"] == store.get(video["id"]).seed
    assert client.post("/v1/videos", json=ASKED).json()["seed"] != video["seed"]
    assert client.post("/v1/videos", json=ASKED | {"seed": 7}).json()["seed"] == 7


def test_what_is_stored_is_a_request_with_every_gap_filled(client: TestClient, store: Store) -> None:
    id = client.post("/v1/videos", json=ASKED | {"host_sync": "off"}).json()["id"]
    stored = Request.from_dict(store.get(id).request)
    assert (stored.width, stored.height, stored.num_frames, stored.num_inference_steps) == (128, 128, 5, 3)
    assert stored.wishes == (("host_sync", "off"),) and stored.dtype is None


def test_the_cost_is_pixels_frames_and_steps(client: TestClient, store: Store) -> None:
    client.post("/v1/videos", json=ASKED)
    assert store.load_of("local").cost == 128 * 128 * 5 * 3


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"num_frames": 32}, 400, "num_frames", "29 or 33"),
        ({"size": "130x128"}, 400, "width", "128x128 or 144x128"),
        ({"size": "100000x10000"}, 400, "width", "at most"),
        ({"num_frames": 10**9}, 400, "num_frames", "at most"),
        ({"num_inference_steps": 0}, 400, "num_inference_steps", "from 1 to 1000"),
        ({"num_inference_steps": -1}, 400, "num_inference_steps", "from 1 to 1000"),
        ({"guidance_scale": 1e9}, 400, "guidance_scale", "from 0 to 100"),
        ({"guidance_scale_2": 3}, 400, "guidance_scale_2", "no second expert"),
        ({"model": "wan2.2-a14b", "guidance_scale_2": -1}, 400, "guidance_scale_2", "from 0 to 100"),
        ({"flow_shift": 0}, 400, "flow_shift", "above 0"),
        ({"model": "ltx-video", "flow_shift": 3, "num_frames": 9}, 400, "flow_shift", "no shift to set"),
        ({"seed": -1}, 400, "seed", "from 0"),
        ({"seed": 2**63}, 400, "seed", "from 0"),
        ({"fps": "0"}, 400, "fps", "above 0"),
        ({"prompt": "x" * 100_001}, 400, "prompt", "at most"),
        ({"prompt": "\ud800"}, 400, "prompt", "half a character"),
        ({"fidelity": "best"}, 400, "fidelity", "exact"),
        ({"model": "wan"}, 400, "model", "nearest are"),
        ({"guidence_scale": 1}, 400, "guidence_scale", "guidance_scale"),
        ({"\ud800": 1}, 400, "\ud800", "unknown field"),
        ({"host_sync": "sometimes"}, 400, "host_sync", "auto, on or off"),
        ({"compile": "on", "fidelity": "exact"}, 409, None, "exact was asked for"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/videos", "/v1/plan"])
def test_what_cannot_be_made_is_refused_at_once_by_name(
    client: TestClient, path: str, fields: dict[str, Any], status: int, param: str | None, says: str
) -> None:
    answer = client.post(path, content=json.dumps(ASKED | fields))  # the client's own encoder knows no half characters
    assert answer.status_code == status, answer.text
    assert error(answer)["param"] == param and says in error(answer)["message"]
    assert client.get("/v1/videos").json()["data"] == []


def test_a_denied_setting_is_refused_with_its_figures_unless_that_is_allowed(client: TestClient) -> None:
    append(
        Measurement(
            id="no", family="flipbook", lever="quantize", setting="transformer=int8", source="measured", machine="m",
            device="d", versions={}, width=64, height=64, num_frames=5, num_inference_steps=4, dtype="float32", n=1,
            gain=1.01, distances={"lpips": 0.4}, verdict="denied",
        )
    )  # fmt: skip
    wish = ASKED | {"transformer_quant": "int8"}
    for path in ("/v1/plan", "/v1/videos"):
        answer = client.post(path, json=wish)
        assert answer.status_code == 409 and error(answer)["code"] == "lever_refused"
        assert "denied by what was measured: 1.01x, lpips 0.4 on d (no)" in error(answer)["message"]
    video = client.post("/v1/videos", json=wish | {"allow_denied": True}).json()
    assert video["allow_denied"] is True and video["request"]["allow_denied"] is True
    assert client.post("/v1/videos", data=wish | {"allow_denied": "true"}).json()["allow_denied"] is True
    decision = next(each for each in video["plan"]["decisions"] if each["lever"] == "quantize")
    assert "although denied" in decision["reason"] and decision["evidence"][0] == "no"


def test_a_knob_of_no_lever_is_refused_by_name(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """All knobs are fields, also those whose levers a version does not have."""
    monkeypatch.setattr(planner, "knobs", lambda: ("compile",))
    answer = client.post("/v1/videos", json=ASKED | {"host_sync": "on"})
    assert answer.status_code == 400 and error(answer)["param"] == "host_sync"


def test_what_can_never_fit_is_refused_with_what_would(client: TestClient, studio: Studio) -> None:
    from tests.server.conftest import ROOMY
    from undercrank.records import Device, Machine

    small = Machine(name=ROOMY.name, cpu_count=2, devices=(Device(kind="cpu", name="small", total_bytes=2**34),))
    studio.find_machine = lambda: small
    answer = client.post("/v1/videos", json={"prompt": "x", "model": "wan2.1-14b"})
    assert answer.status_code == 507 and error(answer)["code"] == "out_of_memory"


def test_memory_that_a_loaded_model_holds_counts_as_free(client: TestClient, studio: Studio) -> None:
    """The made-up machine says that nothing is free: a worker may give it back."""
    assert studio.find_machine().devices[0].free_bytes == 0
    assert client.post("/v1/videos", json=ASKED).status_code == 200


def test_an_empty_prompt_is_taken_and_noted(client: TestClient) -> None:
    assert any("empty" in note for note in client.post("/v1/videos", json=ASKED | {"prompt": ""}).json()["notes"])


def test_the_same_idempotency_key_gives_the_same_clip(client: TestClient) -> None:
    key = {"idempotency-key": "one"}
    first, second = (client.post("/v1/videos", json=ASKED, headers=key).json() for _ in range(2))
    assert first["id"] == second["id"] and first["seed"] == second["seed"]
    other = client.post("/v1/videos", json=ASKED | {"seed": 1}, headers=key)
    assert other.status_code == 409 and error(other)["code"] == "idempotency_conflict"
    assert len(client.get("/v1/videos").json()["data"]) == 1


def test_a_plan_starts_nothing(client: TestClient) -> None:
    answer = client.post("/v1/plan", json=ASKED).json()
    assert answer["object"] == "plan" and answer["promise"] in ("exact", "rounding") and answer["seconds_basis"]
    assert client.get("/v1/videos").json()["data"] == []


# --------------------------------------------------------------------------- following


def test_a_clip_in_the_making_tells_stage_and_progress(client: TestClient, ask: Ask, hand: Hand) -> None:
    id = ask()
    claim = hand.claims()
    hand.store.event(claim.lease, "step", {"step": 1}, stage="denoise", progress=40, eta_s=1.5)
    answer = client.get(f"/v1/videos/{id}")
    video = answer.json()
    assert (video["status"], video["stage"], video["progress"], video["eta_s"]) == ("in_progress", "denoise", 40, 1.5)
    assert int(answer.headers["openai-poll-after-ms"]) > 0


def test_a_clip_that_is_done_tells_what_happened(client: TestClient, ask: Ask, hand: Hand) -> None:
    id = ask()
    plan = client.get(f"/v1/videos/{id}").json()["plan"]
    trace = {"stage_s": {"load": 9.0, "denoise": 2.0, "decode": 0.5}, "peak_bytes": 2**30}
    hand.films(report={"plan": plan | {"promise": "lossy"}, "trace": trace, "notes": ["said by the run"]})
    video = client.get(f"/v1/videos/{id}").json()
    assert (video["status"], video["progress"], video["variants"]) == ("completed", 100, ["video"])
    assert (video["inference_time_s"], video["peak_memory_mb"]) == (2.5, 1024)
    assert video["promise"] == "lossy" and video["notes"] == ["said by the run"]
    assert video["created_at"] <= video["completed_at"]


def test_a_clip_that_failed_tells_why_and_what_to_do(client: TestClient, ask: Ask, hand: Hand) -> None:
    id = ask()
    hand.store.fail(hand.claims().lease, JobError(code="out_of_memory", message="memory ran out", remedy="64x64 fits"))
    video = client.get(f"/v1/videos/{id}").json()
    assert video["status"] == "failed" and video["completed_at"] is None
    assert video["error"] == {"code": "out_of_memory", "message": "memory ran out: 64x64 fits"}


def test_those_that_wait_know_their_place(client: TestClient, ask: Ask, hand: Hand) -> None:
    ids = [ask() for _ in range(3)]
    hand.claims()
    places = {video["id"]: video["queue_position"] for video in client.get("/v1/videos").json()["data"]}
    assert [places[id] for id in ids] == [None, 0, 1]
    assert [client.get(f"/v1/videos/{id}").json()["queue_position"] for id in ids] == [None, 0, 1]


def test_the_list_goes_by_pages_newest_first(client: TestClient, ask: Ask) -> None:
    ids = [ask() for _ in range(5)]
    first = client.get("/v1/videos", params={"limit": 2}).json()
    assert [v["id"] for v in first["data"]] == ids[:2:-1] and first["has_more"]
    assert (first["first_id"], first["last_id"]) == (ids[4], ids[3])
    rest = client.get("/v1/videos", params={"after": first["last_id"], "limit": 100}).json()
    assert [v["id"] for v in rest["data"]] == ids[2::-1] and not rest["has_more"]
    assert [v["id"] for v in client.get("/v1/videos", params={"order": "asc"}).json()["data"]] == ids


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order"),
     ({"after": NOBODY}, "after"), ({"after": "x" * 1000}, "after")],
)  # fmt: skip
def test_a_page_that_cannot_be_is_refused_by_name(client: TestClient, query: dict[str, Any], param: str) -> None:
    answer = client.get("/v1/videos", params=query)
    assert answer.status_code == 400 and error(answer)["param"] == param


@pytest.mark.parametrize("id", [NOBODY, "x", "%2e%2e%2fjobs.db", "a" * 500, "%00", "\u00e9"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("GET", "/content"), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/remix")],
)
def test_a_clip_that_is_none_is_not_found(client: TestClient, id: str, method: str, path: str) -> None:
    answer = client.request(method, f"/v1/videos/{id}{path}")
    assert answer.status_code == 404 and error(answer)["type"] == "not_found"


# --------------------------------------------------------------------------- stopping and deleting


def test_a_queued_clip_is_cancelled_at_once(client: TestClient, ask: Ask) -> None:
    assert client.post(f"/v1/videos/{ask()}/cancel").json()["status"] == "cancelled"


def test_a_clip_in_the_making_is_cancelled_when_work_has_stopped(client: TestClient, ask: Ask, hand: Hand) -> None:
    id = ask()
    claim = hand.claims()
    video = client.post(f"/v1/videos/{id}/cancel").json()
    assert (video["status"], video["stage"]) == ("in_progress", "cancelling")
    hand.store.stopped(claim.lease)
    assert client.get(f"/v1/videos/{id}").json()["status"] == "cancelled"


def test_a_clip_that_has_ended_stays_as_it_is(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask()
    assert client.post(f"/v1/videos/{hand.films()}/cancel").json()["status"] == "completed"


def test_a_deleted_clip_is_gone(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask()
    id = hand.films()
    assert client.delete(f"/v1/videos/{id}").json() == {"id": id, "object": "video.deleted", "deleted": True}
    assert client.get(f"/v1/videos/{id}").status_code == client.delete(f"/v1/videos/{id}").status_code == 404
    assert client.get("/v1/videos").json()["data"] == []


def test_deleting_a_clip_in_the_making_asks_its_worker_to_stop(client: TestClient, ask: Ask, hand: Hand) -> None:
    id = ask()
    claim = hand.claims()
    assert client.delete(f"/v1/videos/{id}").status_code == 200
    assert hand.store.renew(claim.lease)


# --------------------------------------------------------------------------- again


def test_a_remix_is_the_same_recipe_with_another_prompt(client: TestClient, ask: Ask) -> None:
    id = ask(seed=5, size="160x96", guidance_scale=3.5, host_sync="off")
    remix = client.post(f"/v1/videos/{id}/remix", json={"prompt": "a blue star"}).json()
    first = client.get(f"/v1/videos/{id}").json()
    assert remix["remixed_from_video_id"] == id and remix["id"] != id and remix["prompt"] == "a blue star"
    assert remix["request"] == first["request"] | {"prompt": "a blue star"}


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "seed": 1}, {"prompt": None}])
def test_a_remix_changes_the_prompt_only(client: TestClient, ask: Ask, body: dict[str, Any]) -> None:
    assert client.post(f"/v1/videos/{ask()}/remix", json=body).status_code == 400


def test_a_remix_counts_against_the_limits(client: TestClient, ask: Ask, studio: Studio) -> None:
    id = ask()
    studio.limits = Limits(max_jobs=1)
    assert client.post(f"/v1/videos/{id}/remix", json={"prompt": "x"}).status_code == 429


# --------------------------------------------------------------------------- files


def test_a_clip_is_fetched_whole_or_by_ranges(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask(seed=7)
    url = f"/v1/videos/{hand.films(b'0123456789')}/content"
    whole = client.get(url)
    assert whole.content == b"0123456789" and whole.headers["content-type"] == "video/mp4"
    assert whole.headers["accept-ranges"] == "bytes" and "-7.mp4" in whole.headers["content-disposition"]
    part = client.get(url, headers={"range": "bytes=2-4"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    assert client.get(url, headers={"range": "bytes=-3"}).content == b"789"
    assert client.get(url, headers={"range": "bytes=99-"}).status_code == 416


def test_a_clip_may_be_asked_about_without_fetching_it(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask()
    head = client.head(f"/v1/videos/{hand.films(b'0123456789')}/content")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "10")


def test_a_look_at_a_clip_in_the_making(client: TestClient, ask: Ask, hand: Hand, tmp_path: Path) -> None:
    url = f"/v1/videos/{ask()}/content?variant=preview"
    claim = hand.claims()
    assert client.get(url).status_code == 204
    live = live_picture(tmp_path, hand.store.get(claim.job.id))
    live.parent.mkdir(parents=True)
    live.write_bytes(b"a picture")
    answer = client.get(url)
    assert (answer.content, answer.headers["content-type"]) == (b"a picture", "image/jpeg")
    assert answer.headers["cache-control"] == "no-store"


def test_a_clip_that_is_not_done_has_no_file_yet(client: TestClient, ask: Ask) -> None:
    answer = client.get(f"/v1/videos/{ask()}/content")
    assert answer.status_code == 409 and error(answer)["code"] == "not_ready"


def test_a_variant_that_was_not_kept_is_named(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask()
    answer = client.get(f"/v1/videos/{hand.films()}/content", params={"variant": "master"})
    assert answer.status_code == 404 and "it has video" in error(answer)["message"]


@pytest.mark.parametrize("variant", ["../../jobs.db", "", "VIDEO", "video\0"])
def test_a_variant_is_one_of_a_few_words(client: TestClient, ask: Ask, hand: Hand, variant: str) -> None:
    ask()
    answer = client.get(f"/v1/videos/{hand.films()}/content", params={"variant": variant})
    assert answer.status_code == 400 and error(answer)["param"] == "variant"


def test_a_file_that_somebody_removed_is_told(client: TestClient, ask: Ask, hand: Hand, tmp_path: Path) -> None:
    ask()
    id = hand.films()
    next((tmp_path / "videos").rglob("video.mp4")).unlink()
    answer = client.get(f"/v1/videos/{id}/content")
    assert answer.status_code == 404 and "gone" in error(answer)["message"]


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "link"])
def test_no_file_outside_the_folder_is_ever_sent(
    client: TestClient, ask: Ask, hand: Hand, studio: Studio, tmp_path: Path, name: str
) -> None:
    """Not even if the store said so."""
    inner = tmp_path / "data"
    inner.mkdir()
    (tmp_path / "outside").write_text("secret")
    (inner / "link").symlink_to(tmp_path / "outside")
    studio.folder = inner
    ask()
    hand.store.finish(hand.claims().lease, {"files": {"video": name}})
    id = client.get("/v1/videos").json()["data"][0]["id"]
    answer = client.get(f"/v1/videos/{id}/content")
    assert answer.status_code == 404 and "secret" not in answer.text
