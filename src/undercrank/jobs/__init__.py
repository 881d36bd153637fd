"""The durable job store and queue: the database is the queue. It knows nothing of video, of HTTP or of torch.

    with Store.open("sqlite:///jobs.db") as store:
        job, _ = store.enqueue(owner="local", model="flipbook", request={"prompt": "a red ball"})
        lease = store.claim(worker="w1").lease
        store.event(lease, "step", {"step": 1}, stage="denoise", progress=10)  # renews the lease; tells of a cancel
        store.finish(lease, {"files": {"video": "clip.mp4"}})

A job is queued, in_progress, completed, failed or cancelled. Whoever claims it holds a lease; each write of a worker
is fenced: it names the lease in its WHERE and raises LeaseLost when the job has gone to somebody else.

No clock is compared with another one. A lease is alive while its heartbeat counter moves, as a `Watch` sees it by its
own monotonic clock; jobs and events are ordered by numbers that the database gives; times are for people to read.

The folder is the one door of SQLAlchemy and alembic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from undercrank.jobs.database import connect, migrate
from undercrank.jobs.keys import Keyring
from undercrank.jobs.nouns import (
    ENDED,
    LIVE,
    Claim,
    Command,
    Delivery,
    IdempotencyConflict,
    Job,
    JobError,
    JobEvent,
    Key,
    Lease,
    LeaseLost,
    LimitReached,
    Limits,
    Load,
    NoSuchJob,
    Page,
    SchemaTooNew,
    State,
    StoreUnavailable,
    Webhook,
    Worker,
)
from undercrank.jobs.outbox import Outbox
from undercrank.jobs.queue import Queue
from undercrank.jobs.registry import Registry
from undercrank.jobs.watch import Clock, Watch

__all__ = [
    "Claim", "Clock", "Command", "Delivery", "ENDED", "IdempotencyConflict", "Job", "JobError", "JobEvent",
    "Key", "LIVE", "Lease", "LeaseLost", "LimitReached", "Limits", "Load", "NoSuchJob", "Page",
    "SchemaTooNew", "State", "Store", "StoreUnavailable", "Watch", "Webhook", "Worker", "default_url",
]  # fmt: skip


def default_url(data: Path) -> str:
    """The store that goes with a data folder when no other is named."""
    return f"sqlite:///{data.resolve() / 'jobs.db'}"


class Store(Queue, Registry, Keyring, Outbox):
    """The door to the database; safe to use from many threads and processes. Use it as a context manager."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        busy_s: float = 30.0,
        keep_s: float | None = None,
        now: Callable[[], float] | None = None,
    ) -> Store:
        """Connect, and bring the schema up to date.

        url: `sqlite:///FILE` or `postgresql+psycopg://USER:PASSWORD@HOST/NAME`. busy_s: how long to wait for a locked
        database. keep_s: how long an ended job is kept; None: for ever.
        Raises BadInput for another kind of URL, StoreUnavailable, SchemaTooNew.
        """
        engine = connect(url, busy_s)
        store = cls(engine, keep_s=keep_s, now=now)
        try:
            with store._writing() as connection:
                migrate(connection)
        except BaseException:
            engine.dispose()
            raise
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
