"""Workers, the models that they hold, and the wishes to load and unload them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from undercrank.jobs.database import COMMANDS, WORKERS, Database
from undercrank.jobs.nouns import ENDED, Command, JobError, LeaseLost, NoSuchJob, State, Worker
from undercrank.records import BadInput

CANCELLED, OVERTAKEN = "cancelled", "overtaken"
"Why a load shall end."

_WORKER_COLUMNS = tuple(WORKERS.c[name] for name in Worker.__dataclass_fields__)
_COMMAND_COLUMNS = tuple(COMMANDS.c[name] for name in Command.__dataclass_fields__)


class Registry(Database):
    """Who works, with what in memory."""

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
        loading: Mapping[str, Any] | None = None,
    ) -> None:
        """Say that this worker lives, and how it is; the first beat introduces it."""
        told: dict[str, Any] = {"state": state, "models": list(models), "job_id": job_id}
        told["loading"] = dict(loading) if loading else None
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

    def first_command(self, *, holds: Collection[str] = ()) -> tuple[str, str] | None:
        """Action and model of the command that `claim_command` would take; None: there is none."""
        with self._reading() as connection:
            row = connection.execute(_first((COMMANDS.c.action, COMMANDS.c.model), holds)).one_or_none()
        return (row.action, row.model) if row else None

    def claim_command(self, worker: str, *, holds: Collection[str] = ()) -> Command | None:
        """Take the oldest command that this worker can do: a load, or an unload of a model that it holds."""
        if self.first_command(holds=holds) is None:
            return None
        with self._writing() as connection:
            first = _first((COMMANDS.c.id,), holds).with_for_update(skip_locked=True).scalar_subquery()
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

    def why_end(self, command_id: int, worker: str, *, gives_way_after_s: float | None = None) -> str | None:
        """Why a load under way shall end: somebody asked to cancel it, or, where it gives way, a newer load of another
        model was left waiting for so long, since nobody else is free to take it. None: it goes on. Raises LeaseLost."""
        newer = sa.select(COMMANDS.c.id).where(
            COMMANDS.c.state == State.QUEUED,
            COMMANDS.c.action == "load",
            COMMANDS.c.id > command_id,
            COMMANDS.c.created_at <= self._now() - (gives_way_after_s or 0),
        )
        with self._reading() as connection:
            ours = connection.execute(sa.select(*_COMMAND_COLUMNS).where(COMMANDS.c.id == command_id)).one_or_none()
            if ours is None or (ours.worker, ours.state) != (worker, State.IN_PROGRESS):
                raise LeaseLost(f"command {command_id} is no longer ours")
            if ours.cancel_requested:
                return CANCELLED
            waits = connection.execute(newer.where(COMMANDS.c.model != ours.model).limit(1)).one_or_none()
        return OVERTAKEN if gives_way_after_s is not None and waits is not None else None

    def end_command(self, command_id: int, worker: str, state: State, error: JobError | None = None) -> Command:
        """Raises LeaseLost."""
        assert state in ENDED
        ended: dict[str, Any] = {"state": state, "ended_at": self._now(), "error": error.to_dict() if error else None}
        return self._command_is(command_id, worker, ended | ({"progress": 100} if state is State.COMPLETED else {}))

    def _command_is(self, command_id: int, worker: str, values: Mapping[str, Any]) -> Command:
        ours = (COMMANDS.c.id == command_id, COMMANDS.c.worker == worker, COMMANDS.c.state == State.IN_PROGRESS)
        with self._writing() as connection:
            changed = sa.update(COMMANDS).where(*ours).values(**values).returning(*_COMMAND_COLUMNS)
            row = connection.execute(changed).one_or_none()
        if row is None:
            raise LeaseLost(f"command {command_id} is no longer ours")
        return _command(row)


def _first(columns: tuple[Any, ...], holds: Collection[str]) -> sa.Select[Any]:
    """Those of the oldest command for a worker that holds these models."""
    mine = (COMMANDS.c.action == "load") | COMMANDS.c.model.in_(list(holds))
    return sa.select(*columns).where(COMMANDS.c.state == State.QUEUED, mine).order_by(COMMANDS.c.id).limit(1)


def _command(row: Any) -> Command:
    return Command.from_dict(row._asdict())
