"""Webhooks and the outbox of messages to them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from undercrank.jobs.database import OUTBOX, WEBHOOKS, Database
from undercrank.jobs.nouns import Delivery, Job, NoSuchJob, Webhook

LONGEST_WAIT_S = 6 * 3600.0
"No message waits longer than this for its next try."


class Outbox(Database):
    """Who is told of ended jobs, and the messages that wait for them."""

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

        The try after the last of `retry_s` is the last one.
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
            is_last = row.attempts >= len(retry_s)
            changed = {"attempts": row.attempts + 1, "next_at": now + wait_s}
            changed |= {"state": "given up"} if is_last else {}
            connection.execute(sa.update(OUTBOX).where(OUTBOX.c.seq == row.seq).values(changed))
        return Delivery(id=row.id, url=hook.url, secret=hook.secret, body=row.body, attempts=row.attempts + 1)

    def delivered(self, delivery_id: str) -> None:
        self._outbox_is(delivery_id, {"state": "delivered", "error": None})

    def not_delivered(self, delivery_id: str, error: str) -> None:
        """Keep the reason; the next try is set already."""
        self._outbox_is(delivery_id, {"error": error[:1000]})

    def _outbox_is(self, delivery_id: str, values: Mapping[str, Any]) -> None:
        with self._writing() as connection:
            connection.execute(sa.update(OUTBOX).where(OUTBOX.c.id == delivery_id).values(**values))


def put_in_outbox(connection: sa.Connection, job: Job, now: float) -> None:
    """A message for each webhook of the job's owner, in the transaction that ends the job."""
    hooks = connection.execute(sa.select(WEBHOOKS.c.id).where(WEBHOOKS.c.owner == job.owner)).all()
    data = {"id": job.id, "status": job.state.value, "error": job.error.to_dict() if job.error else None}
    body = {"type": f"video.{job.state.value}", "timestamp": _iso(job.ended_at or 0.0), "data": data}
    for hook in hooks:
        values = {"id": f"msg_{secrets.token_hex(12)}", "webhook_id": hook.id, "body": json.dumps(body)}
        values |= {"state": "waiting"}
        connection.execute(sa.insert(OUTBOX).values(attempts=0, next_at=now, **values))


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
