"""What the job store speaks of: its records and its errors."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from undercrank.records import Record, UndercrankError

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


class StoreUnavailable(UndercrankError):
    """The database does not answer: it was locked for longer than `busy_s`, or it is gone. Try again later."""

    exit_code = 5
    http_status = 503
    code = "store_unavailable"


class SchemaTooNew(UndercrankError):
    """A newer undercrank has been here; this one would not understand what it reads."""

    exit_code = 5
    http_status = 503
    code = "schema_too_new"


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
    loading: dict[str, Any] | None
    "The load under way: its `model`, and how far it is, as the worker tells it."


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
