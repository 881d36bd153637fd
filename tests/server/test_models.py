"""Models and levers over HTTP."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import error
from undercrank import families
from undercrank.jobs import JobError, State, Store
from undercrank.levers import ORDER
from undercrank.server.studio import Studio


def test_every_model_that_can_be_served_is_listed_with_its_lattice(client: TestClient) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    served = {f.id for f in families.FAMILIES if not f.traits & {"video_input", "control_input"}}
    assert set(cards) == served and len(served) < len(families.FAMILIES)
    assert (cards["flipbook"]["size_multiple"], cards["flipbook"]["frame_step"]) == (16, 4)
    assert cards["wan2.1-14b-480p-i2v"]["takes_image"] and not cards["flipbook"]["takes_image"]


def test_a_model_is_found_by_its_id_and_its_repository(client: TestClient) -> None:
    assert client.get("/v1/models/flipbook").json()["id"] == "flipbook"
    row = families.family("wan2.1-14b")
    assert client.get(f"/v1/models/{row.repo}").json()["id"] == row.id
    assert client.get("/v1/models/nothing").status_code == 404


def test_a_model_is_loaded_where_a_living_worker_holds_it(client: TestClient, store: Store, studio: Studio) -> None:
    def beat() -> None:
        store.beat("w", host="h", pid=1, device="cpu", state="idle", models=["flipbook"])

    beat()
    assert not client.get("/v1/models/flipbook").json()["loaded"]  # was it there before we looked?
    studio.look_around()
    beat()
    studio.look_around()
    assert client.get("/v1/models/flipbook").json()["loaded"]


def test_a_model_is_loaded_followed_and_unloaded(client: TestClient, store: Store) -> None:
    asked = client.post("/v1/models/load", json={"model": "flipbook"})
    assert asked.status_code == 202 and asked.json()["status"] == "queued"
    url = f"/v1/models/commands/{asked.json()['id']}"
    command = store.claim_command("w")
    assert command is not None
    store.command_progress(command.id, "w", stage="load", progress=40)
    assert client.get(url).json() | {"status": "in_progress", "stage": "load", "progress": 40} == client.get(url).json()
    store.end_command(command.id, "w", State.FAILED, JobError(code="missing", message="no weights", remedy="get some"))
    assert client.get(url).json()["error"] == {"code": "missing", "message": "no weights: get some"}
    assert client.post("/v1/models/unload", data={"model": "flipbook"}).json()["action"] == "unload"
    assert [c["action"] for c in client.get("/v1/models/commands").json()["data"]] == ["unload", "load"]


def test_a_load_is_cancelled(client: TestClient, store: Store) -> None:
    first, second = (client.post("/v1/models/load", json={"model": "flipbook"}).json()["id"] for _ in range(2))
    store.claim_command("w")
    assert client.post(f"/v1/models/commands/{first}/cancel").json()["stage"] == "cancelling"
    assert client.post(f"/v1/models/commands/{second}/cancel").json()["status"] == "cancelled"


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "model"), ({"model": "/etc"}, "model"), ({"model": "flipbook", "x": 1}, "x"), ({"model": 1}, "model")],
)
def test_a_load_of_something_else_is_refused(client: TestClient, body: dict[str, object], param: str) -> None:
    answer = client.post("/v1/models/load", json=body)
    assert answer.status_code == 400 and error(answer)["param"] == param


def test_a_command_of_somebody_else_looks_like_none(client: TestClient, store: Store) -> None:
    theirs = store.command("load", "flipbook", owner="ben").id
    assert client.get(f"/v1/models/commands/{theirs}").status_code == 404
    assert client.post(f"/v1/models/commands/{theirs}/cancel").status_code == 404
    assert client.get("/v1/models/commands").json()["data"] == []


@pytest.mark.parametrize("id", ["0", "-1", "x", "9" * 30, "3000000000"])
def test_a_command_has_a_number(client: TestClient, id: str) -> None:
    assert client.get(f"/v1/models/commands/{id}").status_code == 400


def test_every_lever_is_listed_with_its_four_paragraphs(client: TestClient) -> None:
    cards = client.get("/v1/levers").json()["data"]
    assert [card["name"] for card in cards] == [lever.name for lever in ORDER]
    assert all(word in card["about"] for card in cards for word in ("Does:", "Promises:", "Costs:", "Measured:"))


def test_a_model_that_is_being_loaded_says_how_far_it_is(client: TestClient, store: Store, studio: Studio) -> None:
    store.command("load", "wan2.1-1.3b", owner="ann")
    assert client.get("/v1/models/wan2.1-1.3b").json()["loading"]["state"] == "queued"
    how_far = {"state": "placing", "component": "vae", "bytes_done": 3, "bytes_total": 8}
    for _ in range(2):
        who = {"host": "h", "pid": 1, "device": "cpu", "state": "loading"}
        store.beat("w", **who, loading={"model": "wan2.1-1.3b", **how_far})
        studio.look_around()
    cards = {card["id"]: card["loading"] for card in client.get("/v1/models").json()["data"]}
    assert cards["wan2.1-1.3b"] == how_far and cards["flipbook"] is None
