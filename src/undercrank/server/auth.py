"""Who asks: a bearer key, or the cookie that a browser got for one.

Keys are made, hashed and compared in the job store. While it holds none, everybody on this computer is the owner
`local`; a server that listens beyond it does not start without a key, and never lets anybody in without one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from starlette.requests import Request as HttpRequest

from undercrank.jobs import Key, Limits, Store
from undercrank.records import UndercrankError

LOCAL = "local"
COOKIE = "undercrank"
COOKIE_S = 30 * 24 * 3600


class NotAllowed(UndercrankError):
    """No key, or not one that is known here."""

    http_status: ClassVar[int] = 401
    code: ClassVar[str] = "invalid_api_key"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who asks, and how much may be queued and running at a time."""

    id: str
    limits: Limits = Limits()


def owner_of(http: HttpRequest, store: Store, *, secret: bytes, key_needed: bool) -> Owner:
    """key_needed: also while there is no key at all. Raises NotAllowed.

    While nobody needs a key, any is accepted: the official client cannot but send one.
    """
    keys = {key.id: key for key in store.keys() if key.revoked_at is None}  # noqa: SIM118 - no dict
    if not keys and not key_needed:
        return Owner(id=LOCAL)
    authorization = http.headers.get("authorization")
    if authorization is not None:
        return _stands_for(check_key(key_in(authorization), store))
    if COOKIE not in http.cookies:
        raise NotAllowed("a key is needed: send the header `Authorization: Bearer KEY`, or sign in on the page")
    key = keys.get(unsealed(http.cookies[COOKIE], secret))
    if key is None:
        raise NotAllowed("the key of this sign-in was revoked: enter another one")
    return _stands_for(key)


def key_in(authorization: str) -> str:
    """Raises NotAllowed."""
    kind, _, key = authorization.partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        raise NotAllowed("the header must read `Authorization: Bearer KEY`")
    return key.strip()


def check_key(secret: str, store: Store) -> Key:
    """Raises NotAllowed."""
    key = store.key_of(secret) if secret.isascii() and secret.isprintable() else None  # PostgreSQL takes no NUL
    if key is None:
        raise NotAllowed("this key is not known here, or was revoked")
    return key


def _stands_for(key: Key) -> Owner:
    return Owner(id=key.owner, limits=key.limits)


# --------------------------------------------------------------------------- the cookie


def server_secret(folder: Path) -> bytes:
    """The secret that cookies are signed with, made at the first start and readable by its owner only."""
    file = folder / "cookie-secret"
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return file.read_bytes()
    with os.fdopen(descriptor, "wb") as made:
        secret = secrets.token_bytes(32)
        made.write(secret)
    return secret


def sealed(key_id: str, secret: bytes, *, now: float | None = None) -> str:
    """A cookie for that key: its id, when it ends, and a signature. It holds no key."""
    text = f"{key_id}.{int((time.time() if now is None else now) + COOKIE_S)}"
    return f"{text}.{_signature(text, secret)}"


def unsealed(cookie: str, secret: bytes, *, now: float | None = None) -> str:
    """The id of the key that a cookie stands for. Raises NotAllowed."""
    text, _, signature = cookie.rpartition(".")
    key_id, _, until = text.partition(".")
    is_ours = hmac.compare_digest(_signature(text, secret).encode(), signature.encode("utf-8", "replace"))
    if not is_ours or int(until) < (time.time() if now is None else now):
        raise NotAllowed("this browser's sign-in has ended: enter the key again")
    return key_id


def _signature(text: str, secret: bytes) -> str:
    return hmac.new(secret, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()
