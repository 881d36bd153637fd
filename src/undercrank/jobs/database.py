"""The database under the store: its tables, how it is opened, how its schema is brought up to date.

SQLite in WAL mode, or PostgreSQL, by URL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from undercrank.jobs.nouns import SchemaTooNew, StoreUnavailable
from undercrank.jobs.watch import Clock
from undercrank.records import BadInput, NotFound

# --------------------------------------------------------------------------- tables

METADATA = sa.MetaData()

JOBS = sa.Table(
    "jobs",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("options", sa.JSON, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("cost", sa.BigInteger, nullable=False),
    sa.Column("idempotency_key", sa.String(255)),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("remixed_from", sa.String(64)),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(64)),
    sa.Column("lease", sa.String(64)),
    sa.Column("beats", sa.BigInteger, nullable=False),
    sa.Column("events", sa.Integer, nullable=False),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    sa.Column("hidden", sa.Boolean, nullable=False),
    sa.Column("stage", sa.String(32)),
    sa.Column("progress", sa.Integer, nullable=False),
    sa.Column("eta_s", sa.Float),
    sa.Column("error", sa.JSON(none_as_null=True)),
    sa.Column("result", sa.JSON(none_as_null=True)),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("expires_at", sa.Float),
    sa.UniqueConstraint("owner", "idempotency_key", name="one_job_a_key"),
    sa.Index("jobs_in_line", "state", "priority", "seq"),
    sa.Index("jobs_of_owner", "owner", "seq"),
    sqlite_autoincrement=True,  # a number is never given twice, not even after the newest job was deleted
)
EVENTS = sa.Table(
    "events",
    METADATA,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("job_id", sa.String(64), nullable=False),
    sa.Column("n", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.UniqueConstraint("job_id", "n", name="one_event_a_number"),
)
COUNTERS = sa.Table(
    "counters",
    METADATA,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)
KEYS = sa.Table(
    "keys",
    METADATA,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Column("max_jobs", sa.Integer),
    sa.Column("max_cost", sa.BigInteger),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("revoked_at", sa.Float),
)
WORKERS = sa.Table(
    "workers",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("models", sa.JSON, nullable=False),
    sa.Column("job_id", sa.String(64)),
    sa.Column("beats", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("loading", sa.JSON(none_as_null=True)),
)
COMMANDS = sa.Table(
    "commands",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("action", sa.String(16), nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("worker", sa.String(64)),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("stage", sa.String(32)),
    sa.Column("progress", sa.Integer, nullable=False),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    sa.Column("error", sa.JSON(none_as_null=True)),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sqlite_autoincrement=True,
)
WEBHOOKS = sa.Table(
    "webhooks",
    METADATA,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)
OUTBOX = sa.Table(
    "outbox",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("webhook_id", sa.String(32), nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("next_at", sa.Float, nullable=False),
    sa.Column("error", sa.Text),
    sa.Index("outbox_in_line", "state", "next_at"),
    sqlite_autoincrement=True,
)


# --------------------------------------------------------------------------- an open database


class Database:
    """An open database, and the two ways to use it. The parts of the store derive from it."""

    def __init__(self, engine: sa.Engine, *, keep_s: float | None = None, now: Callable[[], float] | None = None):
        self._engine = engine
        self._keep_s = keep_s
        self._now = now or Clock()

    def close(self) -> None:
        self._engine.dispose()

    def check(self) -> None:
        """Raise StoreUnavailable if nothing can be written now. Writes nothing."""
        with self._writing() as connection:
            connection.execute(sa.update(COUNTERS).where(COUNTERS.c.name == "no such").values(value=0))

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


# --------------------------------------------------------------------------- how it is opened


@contextmanager
def store_errors() -> Iterator[None]:
    try:
        yield
    except (sa.exc.OperationalError, sa.exc.TimeoutError) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise StoreUnavailable(f"the job store does not answer ({reason}): try again") from error


def one_at_a_time(connection: sa.Connection, what: str) -> None:
    """Let nobody else pass here for the same `what` until this transaction ends. SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(f"undercrank {what}"))))


def connect(url: str, busy_s: float) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise BadInput(f"this is no database URL: {_URLS}", field="db") from error
    if parsed.drivername == "sqlite":
        return _sqlite(parsed, busy_s)
    if parsed.drivername == "postgresql+psycopg":
        return _postgres(parsed, busy_s)
    raise BadInput(f"the job store cannot be {parsed.drivername}: {_URLS}", field="db")


CACHE_KIB = 512
"Of pages, for each connection: a server has up to fifteen, and SQLite's 2000 each would pass for a leak."

_URLS = "choose sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME"


def _sqlite(url: sa.URL, busy_s: float) -> sa.Engine:
    if not url.database or url.database == ":memory:":
        raise BadInput("the job store must be a file, since worker processes share it: sqlite:///FILE", field="db")
    _make_private_file(Path(url.database))
    engine = sa.create_engine(url, connect_args={"timeout": busy_s}, json_serializer=_json, hide_parameters=True)

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, see below
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"cache_size=-{CACHE_KIB}"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        """A writer takes the lock at once: a reader that turns writer would be refused without any waiting."""
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _make_private_file(path: Path) -> None:
    """The file holds prompts and the secrets of webhooks: for its owner only."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise StoreUnavailable(f"the job store {path} cannot be opened: {error.strerror}") from error


def _postgres(url: sa.URL, busy_s: float) -> sa.Engine:
    try:
        return sa.create_engine(
            url,
            connect_args={"connect_timeout": max(1, int(busy_s)), "options": f"-c lock_timeout={int(busy_s * 1000)}"},
            json_serializer=_json,
            hide_parameters=True,
            pool_pre_ping=True,
        )
    except ImportError as error:
        raise NotFound("PostgreSQL needs psycopg: pip install 'undercrank[server]'") from error


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def migrate(connection: sa.Connection) -> None:
    """Run the migrations that this database lacks. A revision that we do not know was made by a newer undercrank."""
    one_at_a_time(connection, "schema")
    folder = str(resources.files("undercrank") / "jobs" / "migrations")
    script = ScriptDirectory(folder, version_locations=[folder])
    known = {revision.revision for revision in script.walk_revisions()}
    context = MigrationContext.configure(connection)
    current = context.get_current_revision()
    if current is not None and current not in known:
        raise SchemaTooNew(
            f"the job store has schema {current}, which this undercrank does not know: a newer one made it; "
            "install that one, or give another --db"
        )
    missing = [revision for revision in script.iterate_revisions("head", current) if revision.revision != current]
    for revision in reversed(missing):
        with Operations.context(context):
            revision.module.upgrade()
        context.stamp(script, revision.revision)
