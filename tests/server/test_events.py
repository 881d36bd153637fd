"""Server-sent events: in order, with numbers, from where one was."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import Hand, error
from undercrank.jobs import Store
from undercrank.server import events

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
    story = told(answer.text)
    assert [event["event"] for event in story] == ["queued", "started", "step", "completed"]
    assert story[2]["step"] == 1 and story[2]["id"] == id
    numbers = [event["number"] for event in story]
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
    story = told(client.get(f"/v1/videos/{id}/events").text)
    worker.join()
    assert [event["event"] for event in story] == ["queued", "started", "step", "completed"]


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


# --------------------------------------------------------------------------- of all clips of an owner


def heard(client: TestClient, count: int, *, after: str | None = None, then: Callable[[], object] = int) -> list[Any]:
    """The first `count` events of all clips; `then` happens once somebody listens."""

    async def listen() -> list[Any]:
        found: list[Any] = []
        stream = events.of_owner(client.app.state.studio, "local", events.number_of_header(after))  # type: ignore[attr-defined]
        async for event in stream:
            if event.comment:
                then()
            else:
                found.append({"event": event.event, "number": event.id, **event.data})
            if len(found) == count:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    return asyncio.run(listen())


def test_who_listens_to_all_clips_hears_what_happens_from_now_on(client: TestClient, ask: Ask, hand: Hand) -> None:
    first = ask()
    told = heard(client, 4, then=lambda: (ask(), hand.films()))
    assert [event["event"] for event in told] == ["queued", "started", "step", "completed"]
    assert told[0]["id"] != first == told[1]["id"] == told[3]["id"]


def test_a_stream_of_all_clips_goes_on_where_it_was(client: TestClient, ask: Ask, hand: Hand) -> None:
    ask()
    hand.films()
    told = heard(client, 4, after="0")
    assert heard(client, 2, after=told[1]["number"]) == told[2:]


def test_nothing_is_heard_of_others(client: TestClient, ask: Ask, store: Store) -> None:
    request = store.get(ask()).request
    store.enqueue(owner="ben", model="flipbook", request=request)
    mine = ask()
    assert [event["id"] for event in heard(client, 2, after="0")][1] == mine
