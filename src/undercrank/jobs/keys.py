"""API keys. A secret is stored nowhere, only its hash is."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

import sqlalchemy as sa

from undercrank.jobs.database import KEYS, Database
from undercrank.jobs.nouns import Key, Limits, NoSuchJob


class Keyring(Database):
    """Who may come in."""

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


def _key(row: Any) -> Key:
    fields = {name: row._mapping[name] for name in ("id", "owner", "name", "created_at", "revoked_at")}
    return Key(**fields, limits=Limits(max_jobs=row.max_jobs, max_cost=row.max_cost))


def _hash(secret: str) -> str:
    """Secrets are 32 random bytes: a plain hash is enough, nobody can guess them."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
