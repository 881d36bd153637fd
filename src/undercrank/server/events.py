"""Server-sent events: what is stored already, then what comes.

`id:` is the number of the stored event, so a client that lost the connection, or whose server was started anew, goes
on with `Last-Event-ID` where it was. The database is asked, not the worker: an event that was sent is never lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, ClassVar

from fastapi import Header
from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from undercrank.jobs import ENDED, LIVE, JobEvent, NoSuchJob
from undercrank.records import BadInput, UndercrankError
from undercrank.server.studio import Studio

POLL_S = 0.1
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=40)]


class NothingMore(UndercrankError):
    """The clip has ended and the client has seen its end: 204 tells an EventSource not to come back."""

    http_status: ClassVar[int] = 204
    code: ClassVar[str] = "nothing_more"


def number_of(last_event_id: str | None) -> int:
    text = "0" if last_event_id is None else last_event_id.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadInput(f"Last-Event-ID {text[:40]!r}: must be the id of an event", field="Last-Event-ID")
    return int(text)


def number_of_header(last_event_id: LastEventId = None) -> int | None:
    return None if last_event_id is None else number_of(last_event_id)


def refuse_if_over(studio: Studio, job_id: str, after: int) -> None:
    """Raises NothingMore where the job has ended and no event is left."""
    job = studio.store.get(job_id)
    if job.state in ENDED and not studio.store.events_after(after, job_id=job_id, limit=1):
        raise NothingMore("all was said")


async def of_job(studio: Studio, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    """Until the job has ended or is gone."""
    while not studio.leaving():
        events, is_over = await run_in_threadpool(_look, studio, job_id, after)
        for event in events:
            yield as_sent(event)
            after = event.id
        if is_over and not events:
            return
        if not is_over:
            await asyncio.sleep(POLL_S)


def _look(studio: Studio, job_id: str, after: int) -> tuple[tuple[JobEvent, ...], bool]:
    """New events, and whether the job was over before they were read: then nothing comes after them."""
    try:
        is_over = studio.store.get(job_id).state in ENDED
    except NoSuchJob:
        is_over = True
    return studio.store.events_after(after, job_id=job_id), is_over


def before_the_living(studio: Studio, owner: str) -> int | None:
    """The event before the first one of the owner's oldest job that is not over; None where all are."""
    oldest = studio.store.list(owner=owner, states=LIVE, order="asc", limit=1).jobs
    first = studio.store.events_after(job_id=oldest[0].id, limit=1) if oldest else ()
    return first[0].id - 1 if first else None


async def of_owner(studio: Studio, owner: str, after: int | None) -> AsyncIterator[ServerSentEvent]:
    """All clips of an owner, without end. after None: from now on."""
    if after is None:
        after = await run_in_threadpool(studio.store.newest_event)
        yield ServerSentEvent(comment="from now on", id=str(after))
    while not studio.leaving():
        events = await run_in_threadpool(studio.store.events_after, after, owner=owner)
        for event in events:
            yield as_sent(event)
            after = event.id
        if not events:
            await asyncio.sleep(POLL_S)


def as_sent(event: JobEvent) -> ServerSentEvent:
    data = {"id": event.job_id, "at": event.at, **event.data}
    return ServerSentEvent(id=str(event.id), event=event.kind, data=data)
