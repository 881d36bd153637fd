"""Probes and counts that tell the truth."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from structlog.testing import capture_logs

from tests.server.conftest import ASKED, HERE
from undercrank import __version__
from undercrank.jobs import Store, StoreUnavailable
from undercrank.server.app import make_app
from undercrank.server.studio import PATIENCE_S, Studio


def beat(store: Store, studio: Studio, *, times: int = 2) -> None:
    for _ in range(times):
        store.beat("w", host="h", pid=1, device="cpu", state="idle")
        studio.look_around()


def test_it_lives(client: TestClient) -> None:
    assert client.get("/healthz").json() == client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json() == {"version": __version__}


def test_without_a_worker_it_is_not_ready_and_says_why(client: TestClient) -> None:
    answer = client.get("/readyz")
    assert answer.status_code == 503 and not answer.json()["ready"] and "no worker" in answer.json()["reasons"][0]


def test_with_a_living_worker_it_is_ready(client: TestClient, store: Store, studio: Studio) -> None:
    beat(store, studio)
    assert client.get("/readyz").json() == {"ready": True, "reasons": [], "workers": 1}


def test_a_worker_that_fell_silent_does_not_count(store: Store, studio: Studio, client: TestClient) -> None:
    now = [0.0]
    studio.watch._monotonic = lambda: now[0]
    beat(store, studio)
    assert client.get("/readyz").status_code == 200
    for _ in range(6):
        now[0] += PATIENCE_S / 4
        studio.look_around()
    assert client.get("/readyz").status_code == 503


def test_a_store_that_does_not_answer_is_a_reason(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StoreUnavailable("the job store does not answer")

    monkeypatch.setattr(studio.store, "check", fail)
    answer = client.get("/readyz")
    assert answer.status_code == 503 and answer.json()["reasons"] == ["the job store does not answer"]


def test_a_store_that_is_away_is_told_to_clients_as_such(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise StoreUnavailable("the job store does not answer")

    monkeypatch.setattr(studio.store, "enqueue", fail)
    answer = client.post("/v1/videos", json=ASKED)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0


def test_a_fault_of_ours_is_500_and_tells_nothing(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(studio.store, "enqueue", fail)
    app = make_app(studio)
    with capture_logs() as logged, TestClient(app, base_url=HERE, raise_server_exceptions=False) as client:
        answer = client.post("/v1/videos", json=ASKED)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "secret detail" not in answer.text
    assert any(isinstance(line.get("exc_info"), ZeroDivisionError) for line in logged)


def test_counts_are_those_of_the_store(client: TestClient, store: Store, studio: Studio) -> None:
    client.post("/v1/videos", json=ASKED)
    beat(store, studio)
    text = client.get("/metrics").text
    for line in (
        'undercrank_jobs{state="queued"} 1.0',
        "undercrank_queue_depth 1.0",
        'undercrank_workers{state="idle"} 1.0',
        'undercrank_http_requests_total{method="POST",route="/v1/videos",status="200"} 1.0',
    ):
        assert line in text


def test_neither_counts_nor_log_hold_a_prompt_a_key_or_an_id(client: TestClient, store: Store) -> None:
    with capture_logs() as logged:
        id = client.post("/v1/videos", json=ASKED | {"prompt": "my secret film"}).json()["id"]
        client.get(f"/v1/videos/{id}?note=secret-query")
        metrics = client.get("/metrics").text
        _, key = store.create_key(owner="ada")
        client.get("/v1/videos", headers={"authorization": f"Bearer {key}"})
    assert [line["status"] for line in logged] == [200] * 4
    for secret in ("my secret film", key, "secret-query"):
        assert secret not in f"{logged}{metrics}"
    assert id not in metrics


def test_an_unheard_of_method_makes_no_new_series(client: TestClient) -> None:
    for number in range(3):
        client.request(f"X{number}", "/healthz")
        client.get(f"/nothing/{number}")
    text = client.get("/metrics").text
    assert "X1" not in text and "/nothing" not in text


def test_a_broken_ledger_is_the_servers_affair(
    client: TestClient, own_ledger: Path, store: Store, studio: Studio
) -> None:
    beat(store, studio)
    own_ledger.write_text("no row\n")
    with capture_logs() as logged:
        answer = client.post("/v1/videos", json=ASKED)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "ledger_broken"
    assert str(own_ledger) not in answer.text and any(str(own_ledger) in str(line.get("reason")) for line in logged)
    assert client.get("/readyz").json()["reasons"] == [answer.json()["error"]["message"]]
    own_ledger.unlink()
    assert client.post("/v1/videos", json=ASKED).status_code == 200
