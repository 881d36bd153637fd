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

The tables are in `database`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

from undercrank.database import (
    COMMANDS,
    COUNTERS,
    EVENTS,
    JOBS,
    KEYS,
    OUTBOX,
    WEBHOOKS,
    WORKERS,
    connect,
    migrate,
    one_at_a_time,
    store_errors,
)
from undercrank.database import (
    SchemaTooNew as SchemaTooNew,
)
from undercrank.database import (
    StoreUnavailable as StoreUnavailable,
)
from undercrank.records import BadInput, Record, UndercrankError

# --------------------------------------------------------------------------- errors


class LeaseLost(UndercrankError):
    """The job has gone to somebody else, has ended or was deleted: stop working on it, write nothing."""

    http_status = 409
    code = "lease_lost"


class NoSuchJob(UndercrankError):
    """There is none of that id, or it belongs to somebody else: both look the same."""

    exit_code = 2
    http_status = 404
    code = "not_found"


class IdempotencyConflict(UndercrankError):
    """The key was used before, with another request."""

    exit_code = 2
    http_status = 409
    code = "idempotency_conflict"


class LimitReached(UndercrankError):
    """The owner has as many jobs queued and running, or as much work, as is allowed at a time."""

    http_status = 429
    code = "limit_reached"


# --------------------------------------------------------------------------- records


class State(enum.StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = (State.QUEUED, State.IN_PROGRESS)
ENDED = (State.COMPLETED, State.FAILED, State.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class JobError(Record):
    """Why a job failed: what a program compares, what a person reads, and what to do about it."""

    code: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Job(Record):
    id: str
    seq: int
    "Place in the order of arrival; the queue is by priority, then by this."
    owner: str
    state: State
    model: str
    request: dict[str, Any]
    "As the caller stored it, plus `seed`."
    options: dict[str, Any]
    'What its worker shall do besides: {"master": true} keeps a lossless master.'
    seed: int
    "Chosen when the job was stored, if the request named none: a second attempt makes the same film."
    priority: int
    cost: int
    created_at: float
    "Seconds since 1970, as all times here."
    started_at: float | None
    "When its newest attempt began."
    ended_at: float | None
    expires_at: float | None
    attempts: int
    max_attempts: int
    worker: str | None
    cancel_requested: bool
    "In progress and asked to stop, but still running: `cancelled` is said when work has stopped."
    stage: str | None
    progress: int
    "0 to 100."
    eta_s: float | None
    error: JobError | None
    result: dict[str, Any] | None
    "As the worker stored it: files by variant, the report."
    remixed_from: str | None


@dataclass(frozen=True, kw_only=True)
class Lease(Record):
    """The right to work on one job. Every write of a worker carries it."""

    job_id: str
    token: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    job: Job
    lease: Lease


@dataclass(frozen=True, kw_only=True)
class JobEvent(Record):
    id: int
    "Grows over all jobs, in the order of commit: good for `Last-Event-ID`."
    job_id: str
    n: int
    "1, 2, 3, ... within the job."
    kind: str
    "queued, started, step, preview, stage, cancelling, requeued, completed, failed, cancelled, deleted"
    data: dict[str, Any]
    at: float


@dataclass(frozen=True, kw_only=True)
class Page(Record):
    jobs: tuple[Job, ...]
    has_more: bool


@dataclass(frozen=True, kw_only=True)
class Load(Record):
    """What an owner has queued and running."""

    jobs: int
    cost: int


@dataclass(frozen=True, kw_only=True)
class Limits(Record):
    """None: no limit."""

    max_jobs: int | None = None
    max_cost: int | None = None


@dataclass(frozen=True, kw_only=True)
class Key(Record):
    id: str
    owner: str
    name: str
    created_at: float
    revoked_at: float | None
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Worker(Record):
    id: str
    host: str
    pid: int
    device: str
    state: str
    "starting, idle, busy, loading"
    models: tuple[str, ...]
    "Loaded now."
    job_id: str | None
    beats: int
    started_at: float


@dataclass(frozen=True, kw_only=True)
class Command(Record):
    """A wish of the API to a worker: load or unload a model."""

    id: int
    action: str
    model: str
    owner: str
    worker: str | None
    "Who does it; None: nobody yet, anybody may."
    state: State
    stage: str | None
    progress: int
    cancel_requested: bool
    error: JobError | None
    created_at: float
    ended_at: float | None


@dataclass(frozen=True, kw_only=True)
class Webhook(Record):
    id: str
    owner: str
    url: str
    secret: str
    "whsec_ and base64, as Standard Webhooks has it."
    created_at: float


@dataclass(frozen=True, kw_only=True)
class Delivery(Record):
    """One message to one webhook, from the outbox."""

    id: str
    url: str
    secret: str
    body: str
    attempts: int
    "This one included."


# --------------------------------------------------------------------------- time


class Clock:
    """Seconds since 1970 that do not jump while this process lives, whatever is done to the system's clock."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset_s


@dataclass(frozen=True, kw_only=True)
class _Seen:
    beat: object
    silent_s: float
    moved: bool


class Watch:
    """Who has gone silent, by counters that should move: call `look` often, at least four times within `patience_s`.

    A pause of the onlooker itself (a locked database, a suspended machine) counts for a quarter of the patience at
    most: those who could not speak meanwhile are not taken for dead.
    """

    def __init__(self, patience_s: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.patience_s = patience_s
        self._monotonic = monotonic
        self._looked_at: float | None = None
        self._seen: dict[str, _Seen] = {}

    def look(self, beats: Mapping[str, object]) -> None:
        """Note the counters of all who should be alive; who is no longer among them is forgotten."""
        now = self._monotonic()
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, self.patience_s / 4)
        self._looked_at = now
        self._seen = {key: self._next(key, beat, passed_s) for key, beat in beats.items()}

    def _next(self, key: str, beat: object, passed_s: float) -> _Seen:
        seen = self._seen.get(key)
        if seen is None:
            return _Seen(beat=beat, silent_s=0.0, moved=False)
        if seen.beat != beat:
            return _Seen(beat=beat, silent_s=0.0, moved=True)
        return _Seen(beat=beat, silent_s=seen.silent_s + passed_s, moved=seen.moved)

    @property
    def silent(self) -> frozenset[str]:
        """Those whose counter has stood still for the whole patience."""
        return frozenset(key for key, seen in self._seen.items() if seen.silent_s >= self.patience_s)

    @property
    def alive(self) -> frozenset[str]:
        """Those whose counter was seen to move, and not too long ago."""
        return frozenset(key for key, seen in self._seen.items() if seen.moved) - self.silent


# --------------------------------------------------------------------------- the store

_JOB_COLUMNS = tuple(JOBS.c[name] for name in Job.__dataclass_fields__)
_WORKER_COLUMNS = tuple(WORKERS.c[name] for name in Worker.__dataclass_fields__)
_COMMAND_COLUMNS = tuple(COMMANDS.c[name] for name in Command.__dataclass_fields__)

LONGEST_WAIT_S = 6 * 3600.0
"No message waits longer than this for its next try."


def default_url(data: Path) -> str:
    """The store that goes with a data folder when no other is named."""
    return f"sqlite:///{data.resolve() / 'jobs.db'}"


class Store:
    """The door to the database; safe to use from many threads and processes. Use it as a context manager."""

    def __init__(self, engine: sa.Engine, *, keep_s: float | None = None, now: Callable[[], float] | None = None):
        self._engine = engine
        self._keep_s = keep_s
        self._now = now or Clock()

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

    def close(self) -> None:
        self._engine.dispose()

    def check(self) -> None:
        """Raise StoreUnavailable if nothing can be written now. Writes nothing."""
        with self._writing() as connection:
            connection.execute(sa.update(COUNTERS).where(COUNTERS.c.name == "no such").values(value=0))

    # ----------------------------------------------------------------------- what a client does

    def enqueue(
        self,
        *,
        owner: str,
        model: str,
        request: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        priority: int = 0,
        cost: int = 0,
        idempotency_key: str | None = None,
        remixed_from: str | None = None,
        max_attempts: int = 2,
        limits: Limits | None = None,
    ) -> tuple[Job, bool]:
        """Store a job at the end of its priority's line. Returns it, and whether it is new.

        The same idempotency key with the same request gives the job of the first time; with another request it raises
        IdempotencyConflict. A request without a seed is given one. Raises LimitReached.
        """
        options = dict(options or {})
        fingerprint = _fingerprint({"model": model, "request": dict(request), "options": options})
        seed = request.get("seed")
        seed = secrets.randbelow(2**31) if seed is None else int(seed)
        with self._writing() as connection:
            one_at_a_time(connection, f"owner {owner}")
            if idempotency_key is not None and (known := self._of_key(connection, owner, idempotency_key)):
                if known.fingerprint != fingerprint:
                    raise IdempotencyConflict(
                        f"the idempotency key {idempotency_key[:60]!r} was used before, with another request: "
                        "send another key with another request"
                    )
                return _job(known), False
            _check_limits(_load(connection, owner), cost, limits or Limits())
            values: dict[str, Any] = {
                "id": f"video_{secrets.token_hex(12)}",
                "owner": owner,
                "state": State.QUEUED,
                "model": model,
                "request": {**request, "seed": seed},
                "options": options,
                "seed": seed,
                "priority": priority,
                "cost": cost,
                "idempotency_key": idempotency_key,
                "fingerprint": fingerprint,
                "remixed_from": remixed_from,
                "attempts": 0,
                "max_attempts": max_attempts,
                "beats": 0,
                "events": 0,
                "cancel_requested": False,
                "hidden": False,
                "progress": 0,
                "created_at": self._now(),
            }
            row = connection.execute(sa.insert(JOBS).values(values).returning(*_JOB_COLUMNS)).one()
            self._append(connection, row.id, State.QUEUED, {})
            return _job(row), True

    def get(self, job_id: str, *, owner: str | None = None) -> Job:
        """owner None: whoever it belongs to. Raises NoSuchJob."""
        with self._reading() as connection:
            return _job(self._shown(connection, job_id, owner))

    def list(
        self,
        *,
        owner: str | None = None,
        after: str | None = None,
        limit: int = 20,
        order: str = "desc",
        states: Collection[State] = (),
    ) -> Page:
        """A page of jobs by arrival, newest first ("desc") or oldest first ("asc"), beginning behind job `after`.

        Raises BadInput (fields after, limit, order).
        """
        if order not in ("asc", "desc"):
            raise BadInput(f"order {order!r}: choose asc or desc", field="order")
        if not 1 <= limit <= 100:
            raise BadInput(f"limit {limit}: choose 1 to 100", field="limit")
        query = sa.select(*_JOB_COLUMNS).where(~JOBS.c.hidden)
        if owner is not None:
            query = query.where(JOBS.c.owner == owner)
        if states:
            query = query.where(JOBS.c.state.in_(list(states)))
        with self._reading() as connection:
            if after is not None:
                try:
                    seq = self._shown(connection, after, owner).seq
                except NoSuchJob as error:
                    raise BadInput(f"after {after[:60]!r}: there is no such job", field="after") from error
                query = query.where(JOBS.c.seq > seq if order == "asc" else JOBS.c.seq < seq)
            query = query.order_by(JOBS.c.seq.asc() if order == "asc" else JOBS.c.seq.desc())
            rows = connection.execute(query.limit(limit + 1)).all()
        return Page(jobs=tuple(map(_job, rows[:limit])), has_more=len(rows) > limit)

    def cancel(self, job_id: str, *, owner: str | None = None) -> Job:
        """Stop a job: at once if it is queued; else the worker is asked, and says `cancelled` when it has stopped.

        A job that has ended stays as it is. Raises NoSuchJob.
        """
        with self._writing() as connection:
            job = _job(self._shown(connection, job_id, owner, lock=True))
            self._cancel(connection, job)
            return _job(self._shown(connection, job_id, owner))

    def delete(self, job_id: str, *, owner: str | None = None) -> Job:
        """Stop it if it lives, and show it to nobody from now on. Its row and files go with the next `retain`.

        Raises NoSuchJob.
        """
        with self._writing() as connection:
            job = _job(self._shown(connection, job_id, owner, lock=True))
            self._cancel(connection, job)
            connection.execute(sa.update(JOBS).where(JOBS.c.id == job_id).values(hidden=True, idempotency_key=None))
            self._append(connection, job_id, "deleted", {})
            return job

    def retain(self, remove: Callable[[Job], None]) -> tuple[str, ...]:
        """Remove what was deleted and what has expired: its files by `remove(job)` first, then its row and events.

        A crash in between leaves a row without files, which the next call finishes. Jobs that live are kept. Returns
        the ids.
        """
        over = JOBS.c.hidden | (JOBS.c.expires_at < self._now())
        with self._reading() as connection:
            rows = connection.execute(sa.select(*_JOB_COLUMNS).where(over, JOBS.c.state.in_(ENDED))).all()
        for row in rows:
            remove(_job(row))
            with self._writing() as connection:
                connection.execute(sa.delete(EVENTS).where(EVENTS.c.job_id == row.id))
                connection.execute(sa.delete(JOBS).where(JOBS.c.id == row.id))
        return tuple(row.id for row in rows)

    def events_after(
        self, after: int = 0, *, job_id: str | None = None, owner: str | None = None, limit: int = 500
    ) -> tuple[JobEvent, ...]:
        """Events with a greater id than `after`, in order: of one job, of one owner's jobs, or of all."""
        query = sa.select(EVENTS).where(EVENTS.c.id > after).order_by(EVENTS.c.id).limit(limit)
        if job_id is not None:
            query = query.where(EVENTS.c.job_id == job_id)
        if owner is not None:
            query = query.join(JOBS, JOBS.c.id == EVENTS.c.job_id).where(JOBS.c.owner == owner)
        with self._reading() as connection:
            return tuple(JobEvent.from_dict(row._asdict()) for row in connection.execute(query))

    def newest_event(self) -> int:
        """The id of the newest event of all: who goes on behind it hears only what happens from now on."""
        with self._reading() as connection:
            query = sa.select(COUNTERS.c.value).where(COUNTERS.c.name == "events")
            return int(connection.execute(query).scalar_one())

    def queue_position(self, job_id: str) -> int | None:
        """How many queued jobs come before it; None if it is not queued."""
        with self._reading() as connection:
            row = connection.execute(sa.select(*_JOB_COLUMNS).where(JOBS.c.id == job_id)).one_or_none()
            if row is None or row.state != State.QUEUED:
                return None
            before = (JOBS.c.priority > row.priority) | ((JOBS.c.priority == row.priority) & (JOBS.c.seq < row.seq))
            query = sa.select(sa.func.count()).where(JOBS.c.state == State.QUEUED, before)
            return int(connection.execute(query).scalar_one())

    def queue_positions(self) -> dict[str, int]:
        """How many queued jobs come before it, for each that is queued."""
        query = sa.select(JOBS.c.id).where(JOBS.c.state == State.QUEUED).order_by(JOBS.c.priority.desc(), JOBS.c.seq)
        with self._reading() as connection:
            return {row.id: position for position, row in enumerate(connection.execute(query))}

    def counts(self) -> dict[State, int]:
        """How many jobs there are in each state."""
        query = sa.select(JOBS.c.state, sa.func.count()).where(~JOBS.c.hidden).group_by(JOBS.c.state)
        with self._reading() as connection:
            found = {State(state): int(count) for state, count in connection.execute(query)}
        return {state: found.get(state, 0) for state in State}

    def load_of(self, owner: str) -> Load:
        with self._reading() as connection:
            return _load(connection, owner)

    # ----------------------------------------------------------------------- what a worker does

    def claim(self, worker: str) -> Claim | None:
        """Take the first job in line; None if there is none. No two workers get the same one."""
        if not self._anybody_in_line():  # a look costs no lock: an idle worker may ask often
            return None
        token = secrets.token_hex(16)
        first = sa.select(JOBS.c.seq).where(JOBS.c.state == State.QUEUED)
        first = first.order_by(JOBS.c.priority.desc(), JOBS.c.seq).limit(1).with_for_update(skip_locked=True)
        with self._writing() as connection:
            row = connection.execute(
                sa.update(JOBS)
                .where(JOBS.c.seq == first.scalar_subquery(), JOBS.c.state == State.QUEUED)
                .values(
                    state=State.IN_PROGRESS,
                    attempts=JOBS.c.attempts + 1,
                    worker=worker,
                    lease=token,
                    beats=JOBS.c.beats + 1,
                    started_at=self._now(),
                )
                .returning(*_JOB_COLUMNS)
            ).one_or_none()
            if row is None:
                return None
            self._append(connection, row.id, "started", {"attempt": row.attempts, "worker": worker})
        return Claim(job=_job(row), lease=Lease(job_id=row.id, token=token, attempt=row.attempts))

    def renew(self, lease: Lease) -> bool:
        """Say that the work goes on. True: somebody asked to cancel. Raises LeaseLost."""
        with self._writing() as connection:
            return self._renew(connection, lease, {})

    def event(
        self,
        lease: Lease,
        kind: str,
        data: Mapping[str, Any],
        *,
        stage: str | None = None,
        progress: int | None = None,
        eta_s: float | None = None,
    ) -> bool:
        """Append an event and renew the lease, in one transaction. True: somebody asked to cancel. Raises LeaseLost.

        stage, progress (0 to 100), eta_s: what the job shows from now on; left out, the first two stay.
        """
        shown: dict[str, Any] = {"eta_s": eta_s}
        if stage is not None:
            shown["stage"] = stage
        if progress is not None:
            shown["progress"] = progress
        with self._writing() as connection:
            cancel_requested = self._renew(connection, lease, shown)
            self._append(connection, lease.job_id, kind, data)
            return cancel_requested

    def finish(self, lease: Lease, result: Mapping[str, Any]) -> Job:
        """The job is done, its files lie where `result` says. Raises LeaseLost."""
        return self._end_of(lease, State.COMPLETED, result=dict(result), progress=100)

    def fail(self, lease: Lease, error: JobError) -> Job:
        """The job is over, for a reason that another attempt would meet again. Raises LeaseLost."""
        return self._end_of(lease, State.FAILED, error=error.to_dict())

    def stopped(self, lease: Lease) -> Job:
        """The work on a cancelled job has stopped. Raises LeaseLost."""
        return self._end_of(lease, State.CANCELLED)

    def release(self, lease: Lease) -> None:
        """Give the job back unharmed, as a worker does that is told to leave: the attempt is not counted."""
        with self._writing() as connection:
            self._renew(connection, lease, {"attempts": JOBS.c.attempts - 1})
            row = connection.execute(sa.select(*_JOB_COLUMNS).where(JOBS.c.id == lease.job_id)).one()
            self._give_back(connection, _job(row), "its worker was told to leave")

    # ----------------------------------------------------------------------- when a worker does not come back

    def requeue_expired(self, watch: Watch) -> tuple[str, ...]:
        """Give back the jobs whose lease has not been renewed within the watch's patience; their ids.

        Call it about once a second with the same watch. A job goes back in line while attempts remain, else it fails
        with `worker_lost`; one that was to be cancelled is cancelled.
        """
        query = sa.select(*_JOB_COLUMNS, JOBS.c.lease, JOBS.c.beats).where(JOBS.c.state == State.IN_PROGRESS)
        with self._writing() as connection:  # while nobody can write, nobody can renew either: that is no silence
            rows = {f"{row.id} {row.lease}": row for row in connection.execute(query)}
        watch.look({key: row.beats for key, row in rows.items()})
        given_back = []
        for key in sorted(watch.silent):
            row = rows[key]
            with self._writing() as connection:
                still = (JOBS.c.id == row.id, JOBS.c.lease == row.lease, JOBS.c.beats == row.beats)
                if connection.execute(sa.select(JOBS.c.id).where(*still).with_for_update()).one_or_none():
                    self._give_back(connection, _job(row), "its worker fell silent")
                    given_back.append(row.id)
        return tuple(given_back)

    def worker_lost(self, worker: str) -> tuple[str, ...]:
        """A worker process is known to be dead: forget it, and give back its job at once. Ids of the jobs."""
        with self._writing() as connection:
            connection.execute(sa.delete(WORKERS).where(WORKERS.c.id == worker))
            lost = JobError(code="worker_lost", message="the worker process ended before the command was done")
            connection.execute(
                sa.update(COMMANDS)
                .where(COMMANDS.c.worker == worker, COMMANDS.c.state == State.IN_PROGRESS)
                .values(state=State.FAILED, error=lost.to_dict(), ended_at=self._now())
            )
            query = sa.select(*_JOB_COLUMNS).where(JOBS.c.state == State.IN_PROGRESS, JOBS.c.worker == worker)
            rows = connection.execute(query.with_for_update()).all()
            for row in rows:
                self._give_back(connection, _job(row), "its worker process ended")
        return tuple(row.id for row in rows)

    # ----------------------------------------------------------------------- workers and the models they hold

    def beat(
        self,
        worker: str,
        *,
        host: str,
        pid: int,
        device: str,
        state: str,
        models: Sequence[str] = (),
        job_id: str | None = None,
    ) -> None:
        """Say that this worker lives, and how it is; the first beat introduces it."""
        told = {"state": state, "models": list(models), "job_id": job_id}
        with self._writing() as connection:
            known = sa.update(WORKERS).where(WORKERS.c.id == worker).values(beats=WORKERS.c.beats + 1, **told)
            if connection.execute(known).rowcount == 0:
                first = {"id": worker, "host": host, "pid": pid, "device": device, "beats": 1, **told}
                connection.execute(sa.insert(WORKERS).values(started_at=self._now(), **first))

    def workers(self) -> tuple[Worker, ...]:
        """All that ever beat and have not left. Which of them live, a `Watch` over their `beats` tells."""
        with self._reading() as connection:
            rows = connection.execute(sa.select(*_WORKER_COLUMNS).order_by(WORKERS.c.started_at)).all()
        return tuple(Worker.from_dict(row._asdict()) for row in rows)

    def command(self, action: str, model: str, *, owner: str) -> Command:
        """Ask a worker to `load` or `unload` a model; the first that is free does it. Raises BadInput."""
        if action not in ("load", "unload"):
            raise BadInput(f"{action!r}: a worker can load or unload a model", field="action")
        with self._writing() as connection:
            row = connection.execute(
                sa.insert(COMMANDS)
                .values(
                    action=action, model=model, owner=owner, state=State.QUEUED, progress=0, cancel_requested=False,
                    created_at=self._now(),
                )
                .returning(*_COMMAND_COLUMNS)
            ).one()  # fmt: skip
        return _command(row)

    def get_command(self, command_id: int) -> Command:
        with self._reading() as connection:
            row = connection.execute(sa.select(*_COMMAND_COLUMNS).where(COMMANDS.c.id == command_id)).one_or_none()
        if row is None:
            raise NoSuchJob(f"there is no command {command_id}")
        return _command(row)

    def commands(self, *, limit: int = 20) -> tuple[Command, ...]:
        """The newest first."""
        with self._reading() as connection:
            rows = connection.execute(sa.select(*_COMMAND_COLUMNS).order_by(COMMANDS.c.id.desc()).limit(limit)).all()
        return tuple(map(_command, rows))

    def cancel_command(self, command_id: int) -> Command:
        """At once if nobody has taken it, else the worker is asked to stop."""
        with self._writing() as connection:
            this = COMMANDS.c.id == command_id
            stopped = {"state": State.CANCELLED, "ended_at": self._now()}
            connection.execute(sa.update(COMMANDS).where(this, COMMANDS.c.state == State.QUEUED).values(stopped))
            running = COMMANDS.c.state == State.IN_PROGRESS
            connection.execute(sa.update(COMMANDS).where(this, running).values(cancel_requested=True))
        return self.get_command(command_id)

    def claim_command(self, worker: str, *, holds: Collection[str] = ()) -> Command | None:
        """Take the oldest command that this worker can do: a load, or an unload of a model that it holds."""
        mine = (COMMANDS.c.action == "load") | COMMANDS.c.model.in_(list(holds))
        query = sa.select(COMMANDS.c.id).where(COMMANDS.c.state == State.QUEUED, mine).order_by(COMMANDS.c.id).limit(1)
        with self._reading() as connection:
            if connection.execute(query).one_or_none() is None:
                return None
        with self._writing() as connection:
            first = query.with_for_update(skip_locked=True).scalar_subquery()
            row = connection.execute(
                sa.update(COMMANDS)
                .where(COMMANDS.c.id == first, COMMANDS.c.state == State.QUEUED)
                .values(state=State.IN_PROGRESS, worker=worker)
                .returning(*_COMMAND_COLUMNS)
            ).one_or_none()
        return _command(row) if row else None

    def command_progress(self, command_id: int, worker: str, *, stage: str, progress: int) -> bool:
        """True: somebody asked to cancel. Raises LeaseLost."""
        return self._command_is(command_id, worker, {"stage": stage, "progress": progress}).cancel_requested

    def end_command(self, command_id: int, worker: str, state: State, error: JobError | None = None) -> Command:
        """Raises LeaseLost."""
        assert state in ENDED
        ended: dict[str, Any] = {"state": state, "ended_at": self._now(), "error": error.to_dict() if error else None}
        return self._command_is(command_id, worker, ended | ({"progress": 100} if state is State.COMPLETED else {}))

    # ----------------------------------------------------------------------- keys

    def create_key(self, *, owner: str, name: str = "", limits: Limits | None = None) -> tuple[Key, str]:
        """A new API key, and its secret, which is stored nowhere: only its hash is."""
        key_id, limits = secrets.token_hex(6), limits or Limits()
        secret = f"uc_{key_id}_{secrets.token_urlsafe(32)}"
        values = {"id": key_id, "owner": owner, "name": name, "hash": _hash(secret), "created_at": self._now()}
        with self._writing() as connection:
            connection.execute(sa.insert(KEYS).values(**values, **limits.to_dict()))
            row = connection.execute(sa.select(KEYS).where(KEYS.c.id == key_id)).one()
        return _key(row), secret

    def key_of(self, secret: str) -> Key | None:
        """The key of that secret; None if there is none, or it was revoked."""
        parts = secret.split("_", 2)
        key_id = parts[1] if len(parts) == 3 else ""
        with self._reading() as connection:
            row = connection.execute(sa.select(KEYS).where(KEYS.c.id == key_id)).one_or_none()
        right = hmac.compare_digest(_hash(secret), row.hash if row else _hash(""))
        return _key(row) if right and row is not None and row.revoked_at is None else None

    def keys(self) -> tuple[Key, ...]:
        """All, revoked ones too, oldest first."""
        with self._reading() as connection:
            return tuple(map(_key, connection.execute(sa.select(KEYS).order_by(KEYS.c.created_at, KEYS.c.id))))

    def revoke_key(self, key_id: str) -> Key:
        """From now on it opens nothing. Raises NoSuchJob."""
        with self._writing() as connection:
            this = KEYS.c.id == key_id
            connection.execute(sa.update(KEYS).where(this, KEYS.c.revoked_at.is_(None)).values(revoked_at=self._now()))
            row = connection.execute(sa.select(KEYS).where(this)).one_or_none()
        if row is None:
            raise NoSuchJob(f"there is no key {key_id[:60]!r}: `undercrank keys list` shows them")
        return _key(row)

    # ----------------------------------------------------------------------- webhooks and their outbox

    def add_webhook(self, *, owner: str, url: str, secret: str) -> Webhook:
        """Tell `url` of every job of this owner that ends from now on. The URL is checked by `webhooks.check_url`."""
        hook = Webhook(id=secrets.token_hex(8), owner=owner, url=url, secret=secret, created_at=self._now())
        with self._writing() as connection:
            connection.execute(sa.insert(WEBHOOKS).values(**hook.to_dict()))
        return hook

    def webhooks(self, *, owner: str | None = None) -> tuple[Webhook, ...]:
        query = sa.select(WEBHOOKS).order_by(WEBHOOKS.c.created_at, WEBHOOKS.c.id)
        if owner is not None:
            query = query.where(WEBHOOKS.c.owner == owner)
        with self._reading() as connection:
            return tuple(Webhook.from_dict(row._asdict()) for row in connection.execute(query))

    def remove_webhook(self, webhook_id: str, *, owner: str | None = None) -> None:
        """Its waiting messages go too. Raises NoSuchJob."""
        this = [WEBHOOKS.c.id == webhook_id, *([WEBHOOKS.c.owner == owner] if owner is not None else [])]
        with self._writing() as connection:
            if connection.execute(sa.delete(WEBHOOKS).where(*this)).rowcount == 0:
                raise NoSuchJob(f"there is no webhook {webhook_id[:60]!r}")
            connection.execute(sa.delete(OUTBOX).where(OUTBOX.c.webhook_id == webhook_id))

    def next_delivery(self, *, retry_s: Sequence[float]) -> Delivery | None:
        """The next message that is due. It comes again after `retry_s[attempts - 1]` unless it is `delivered` before.

        After the last of `retry_s` it is given up.
        """
        now = self._now()
        due = (OUTBOX.c.next_at <= now) | (OUTBOX.c.next_at > now + LONGEST_WAIT_S)  # the clock was set back
        query = sa.select(OUTBOX).where(OUTBOX.c.state == "waiting", due).order_by(OUTBOX.c.seq).limit(1)
        with self._reading() as connection:
            if connection.execute(query).one_or_none() is None:
                return None
        with self._writing() as connection:
            row = connection.execute(query.with_for_update(skip_locked=True)).one_or_none()
            hook = row and connection.execute(sa.select(WEBHOOKS).where(WEBHOOKS.c.id == row.webhook_id)).one_or_none()
            if row is None or hook is None:
                return None
            wait_s = min(retry_s[min(row.attempts, len(retry_s) - 1)], LONGEST_WAIT_S)
            is_last = row.attempts + 1 >= len(retry_s)
            changed = {"attempts": row.attempts + 1, "next_at": now + wait_s}
            changed |= {"state": "given up"} if is_last else {}
            connection.execute(sa.update(OUTBOX).where(OUTBOX.c.seq == row.seq).values(changed))
        return Delivery(id=row.id, url=hook.url, secret=hook.secret, body=row.body, attempts=row.attempts + 1)

    def delivered(self, delivery_id: str) -> None:
        self._outbox_is(delivery_id, {"state": "delivered", "error": None})

    def not_delivered(self, delivery_id: str, error: str) -> None:
        """Keep the reason; the next try is set already."""
        self._outbox_is(delivery_id, {"error": error[:1000]})

    # ----------------------------------------------------------------------- how

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with store_errors(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with store_errors(), self._engine.connect() as connection:
            connection = connection.execution_options(writes=True)
            with connection.begin():
                yield connection

    def _anybody_in_line(self) -> bool:
        with self._reading() as connection:
            query = sa.select(JOBS.c.seq).where(JOBS.c.state == State.QUEUED).limit(1)
            return connection.execute(query).one_or_none() is not None

    def _of_key(self, connection: sa.Connection, owner: str, key: str) -> Any:
        query = sa.select(*_JOB_COLUMNS, JOBS.c.fingerprint)
        return connection.execute(query.where(JOBS.c.owner == owner, JOBS.c.idempotency_key == key)).one_or_none()

    def _shown(self, connection: sa.Connection, job_id: str, owner: str | None, *, lock: bool = False) -> Any:
        query = sa.select(*_JOB_COLUMNS).where(JOBS.c.id == job_id, ~JOBS.c.hidden)
        if owner is not None:
            query = query.where(JOBS.c.owner == owner)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        if row is None:
            raise NoSuchJob(f"there is no job {job_id[:60]!r}")
        return row

    def _append(self, connection: sa.Connection, job_id: str, kind: str, data: Mapping[str, Any]) -> None:
        """One more event. The counter's row is locked to the end of the transaction, so ids are in commit order."""
        number = (
            sa.update(JOBS).where(JOBS.c.id == job_id).values(events=JOBS.c.events + 1).returning(JOBS.c.events)
        )  # the job first, then the counter, in every transaction: two of them never wait for each other
        n = connection.execute(number).scalar_one()
        counter = sa.update(COUNTERS).where(COUNTERS.c.name == "events").values(value=COUNTERS.c.value + 1)
        event_id = connection.execute(counter.returning(COUNTERS.c.value)).scalar_one()
        values = {"id": event_id, "job_id": job_id, "n": n, "kind": kind, "data": dict(data), "at": self._now()}
        connection.execute(sa.insert(EVENTS).values(values))

    def _renew(self, connection: sa.Connection, lease: Lease, shown: Mapping[str, Any]) -> bool:
        held = (JOBS.c.id == lease.job_id, JOBS.c.lease == lease.token, JOBS.c.attempts == lease.attempt)
        renewed = (
            sa.update(JOBS).where(*held).values(beats=JOBS.c.beats + 1, **shown).returning(JOBS.c.cancel_requested)
        )
        cancel_requested = connection.execute(renewed).scalar_one_or_none()
        if cancel_requested is None:
            raise LeaseLost(f"{lease.job_id} is no longer ours (attempt {lease.attempt})")
        return bool(cancel_requested)

    def _end_of(self, lease: Lease, state: State, **values: Any) -> Job:
        with self._writing() as connection:
            self._renew(connection, lease, {})
            return self._end(connection, lease.job_id, state, **values)

    def _end(self, connection: sa.Connection, job_id: str, state: State, **values: Any) -> Job:
        now = self._now()
        values |= {"state": state, "ended_at": now, "lease": None, "eta_s": None, "cancel_requested": False}
        values["expires_at"] = now + self._keep_s if self._keep_s is not None else None
        ended = sa.update(JOBS).where(JOBS.c.id == job_id).values(values).returning(*_JOB_COLUMNS, JOBS.c.hidden)
        row = connection.execute(ended).one()
        job = _job(row)
        self._append(connection, job_id, state, {"error": job.error.to_dict()} if job.error else {})
        if not row.hidden:
            self._put_in_outbox(connection, job)
        return job

    def _cancel(self, connection: sa.Connection, job: Job) -> None:
        if job.state is State.QUEUED:
            self._end(connection, job.id, State.CANCELLED)
        elif job.state is State.IN_PROGRESS and not job.cancel_requested:
            connection.execute(sa.update(JOBS).where(JOBS.c.id == job.id).values(cancel_requested=True))
            self._append(connection, job.id, "cancelling", {})

    def _give_back(self, connection: sa.Connection, job: Job, reason: str) -> None:
        """Back in line, at the place of its arrival; or the end, where that was asked or it has been tried enough."""
        fresh = connection.execute(sa.select(*_JOB_COLUMNS).where(JOBS.c.id == job.id)).one()
        if fresh.cancel_requested:
            self._end(connection, job.id, State.CANCELLED)
            return
        if fresh.attempts >= fresh.max_attempts:
            error = JobError(
                code="worker_lost",
                message=f"{reason}, {fresh.attempts} times",
                remedy="look into the worker's log; a smaller size or fewer frames need less memory",
            )
            self._end(connection, job.id, State.FAILED, error=error.to_dict())
            return
        back = {"state": State.QUEUED, "lease": None, "worker": None, "stage": None, "progress": 0, "eta_s": None}
        connection.execute(sa.update(JOBS).where(JOBS.c.id == job.id).values(back))
        self._append(connection, job.id, "requeued", {"reason": reason, "attempt": fresh.attempts})

    def _put_in_outbox(self, connection: sa.Connection, job: Job) -> None:
        hooks = connection.execute(sa.select(WEBHOOKS.c.id).where(WEBHOOKS.c.owner == job.owner)).all()
        data = {"id": job.id, "status": job.state.value, "error": job.error.to_dict() if job.error else None}
        body = {"type": f"video.{job.state.value}", "timestamp": _iso(job.ended_at or 0.0), "data": data}
        for hook in hooks:
            values = {"id": f"msg_{secrets.token_hex(12)}", "webhook_id": hook.id, "body": json.dumps(body)}
            values |= {"state": "waiting"}
            connection.execute(sa.insert(OUTBOX).values(attempts=0, next_at=self._now(), **values))

    def _outbox_is(self, delivery_id: str, values: Mapping[str, Any]) -> None:
        with self._writing() as connection:
            connection.execute(sa.update(OUTBOX).where(OUTBOX.c.id == delivery_id).values(**values))

    def _command_is(self, command_id: int, worker: str, values: Mapping[str, Any]) -> Command:
        ours = (COMMANDS.c.id == command_id, COMMANDS.c.worker == worker, COMMANDS.c.state == State.IN_PROGRESS)
        with self._writing() as connection:
            changed = sa.update(COMMANDS).where(*ours).values(**values).returning(*_COMMAND_COLUMNS)
            row = connection.execute(changed).one_or_none()
        if row is None:
            raise LeaseLost(f"command {command_id} is no longer ours")
        return _command(row)


# --------------------------------------------------------------------------- rows to records


def _job(row: Any) -> Job:
    return Job.from_dict({name: row._mapping[name] for name in Job.__dataclass_fields__})


def _command(row: Any) -> Command:
    return Command.from_dict(row._asdict())


def _key(row: Any) -> Key:
    fields = {name: row._mapping[name] for name in ("id", "owner", "name", "created_at", "revoked_at")}
    return Key(**fields, limits=Limits(max_jobs=row.max_jobs, max_cost=row.max_cost))


def _load(connection: sa.Connection, owner: str) -> Load:
    query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(JOBS.c.cost), 0))
    jobs, cost = connection.execute(query.where(JOBS.c.owner == owner, JOBS.c.state.in_(LIVE))).one()
    return Load(jobs=int(jobs), cost=int(cost))


def _check_limits(load: Load, cost: int, limits: Limits) -> None:
    if limits.max_jobs is not None and load.jobs + 1 > limits.max_jobs:
        raise LimitReached(f"{load.jobs} jobs are queued or running, {limits.max_jobs} are allowed: wait for one")
    if limits.max_cost is not None and load.cost + cost > limits.max_cost:
        raise LimitReached(
            f"queued, running and this job are {load.cost + cost} pixels x frames x steps, {limits.max_cost} are "
            "allowed: wait, or make it smaller"
        )


def _fingerprint(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _hash(secret: str) -> str:
    """Secrets are 32 random bytes: a plain hash is enough, nobody can guess them."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
