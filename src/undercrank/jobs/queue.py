"""The queue: what a client, a worker and an onlooker do with jobs, each in one transaction."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

import sqlalchemy as sa

from undercrank.jobs.database import COMMANDS, COUNTERS, EVENTS, JOBS, WORKERS, Database, one_at_a_time
from undercrank.jobs.nouns import (
    ENDED,
    LIVE,
    Claim,
    IdempotencyConflict,
    Job,
    JobError,
    JobEvent,
    Lease,
    LeaseLost,
    LimitReached,
    Limits,
    Load,
    NoSuchJob,
    Page,
    State,
)
from undercrank.jobs.outbox import put_in_outbox
from undercrank.jobs.watch import Watch
from undercrank.records import BadInput

_JOB_COLUMNS = tuple(JOBS.c[name] for name in Job.__dataclass_fields__)


class Queue(Database):
    """The jobs, their events and their leases."""

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

    def first_in_line(self) -> str | None:
        """The model of the job that `claim` would take; None: nobody waits."""
        with self._reading() as connection:
            row = connection.execute(_in_line(JOBS.c.model)).one_or_none()
        return row.model if row else None

    def claim(self, worker: str) -> Claim | None:
        """Take the first job in line; None if there is none. No two workers get the same one."""
        if self.first_in_line() is None:  # a look costs no lock: an idle worker may ask often
            return None
        token = secrets.token_hex(16)
        first = _in_line(JOBS.c.seq).with_for_update(skip_locked=True)
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
            lost = JobError(
                code="worker_lost", message="the worker process ended before the command was done", remedy="ask again"
            )
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

    # ----------------------------------------------------------------------- how

    def _of_key(self, connection: sa.Connection, owner: str, key: str) -> Any:
        query = sa.select(*_JOB_COLUMNS, JOBS.c.fingerprint)
        return connection.execute(query.where(JOBS.c.owner == owner, JOBS.c.idempotency_key == key)).one_or_none()

    def _shown(self, connection: sa.Connection, job_id: str, owner: str | None, *, lock: bool = False) -> Any:
        query = sa.select(*_JOB_COLUMNS).where(JOBS.c.id == job_id, ~JOBS.c.hidden)
        if owner is not None:
            query = query.where(JOBS.c.owner == owner)
        asked = job_id.isprintable()  # PostgreSQL does not even look for a text that holds NUL
        row = connection.execute(query.with_for_update() if lock else query).one_or_none() if asked else None
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
            put_in_outbox(connection, job, now)
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


def _job(row: Any) -> Job:
    return Job.from_dict({name: row._mapping[name] for name in Job.__dataclass_fields__})


def _in_line(column: Any) -> sa.Select[Any]:
    """That of the first job that waits."""
    waiting = sa.select(column).where(JOBS.c.state == State.QUEUED)
    return waiting.order_by(JOBS.c.priority.desc(), JOBS.c.seq).limit(1)


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
