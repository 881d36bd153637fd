"""Server-sent events: in order, with numbers, from where one was."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import Hand, error

Ask = Callable[..., str]


def told(text: str) -> list[dict[str, Any]]:
    """The events of a stream, with their names and numbers."""
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in text.strip().split("\n\n")]
    return [{"event": b["event"], "number": int(b["id"]), **json.loads(b["data"])} for b in blocks if "event" in b]


def test_a_clip_that_has_ended_tells_its_whole_story(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask()
    id = hand.films()
    answer = client.get(f"/v1/videos/{id}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = told(answer.text)
    assert [event["event"] for event in events] == ["queued", "started", "step", "completed"]
    assert events[2]["step"] == 1 and events[2]["id"] == id
    numbers = [event["number"] for event in events]
    assert numbers == sorted(set(numbers))


def test_a_stream_goes_on_where_it_was(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask()
    url = f"/v1/videos/{hand.films()}/events"
    all_of_it = told(client.get(url).text)
    for seen in range(1, len(all_of_it)):
        after = {"last-event-id": str(all_of_it[seen - 1]["number"])}
        assert told(client.get(url, headers=after).text) == all_of_it[seen:]


def test_who_has_seen_the_end_is_told_not_to_come_back(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask()
    url = f"/v1/videos/{hand.films()}/events"
    last = told(client.get(url).text)[-1]["number"]
    answer = client.get(url, headers={"last-event-id": str(last)})
    assert answer.status_code == 204 and answer.content == b""


def test_what_happens_meanwhile_is_told(client: TestClient, ask: Ask, hand: Hand) -> None:
    id = ask()

    def film() -> None:
        time.sleep(0.3)
        hand.films()

    worker = threading.Thread(target=film)
    worker.start()
    events = told(client.get(f"/v1/videos/{id}/events").text)
    worker.join()
    assert [event["event"] for event in events] == ["queued", "started", "step", "completed"]


def test_a_stream_ends_when_its_clip_is_deleted_and_removed(client: TestClient, ask: Ask, hand: Hand) -> None:
    id = ask()

    def remove() -> None:
        time.sleep(0.2)
        hand.store.delete(id)
        hand.store.retain(lambda job: None)

    thread = threading.Thread(target=remove)
    thread.start()
    assert told(client.get(f"/v1/videos/{id}/events").text)[0]["event"] == "queued"
    thread.join()


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "9" * 30, "\u0661"])
def test_a_number_that_is_none_is_refused(client: TestClient, ask: Ask, number: str) -> None:
    answer = client.get(f"/v1/videos/{ask()}/events", headers={"last-event-id": number.encode()})
    assert answer.status_code == 400 and error(answer)["param"] == "Last-Event-ID"
