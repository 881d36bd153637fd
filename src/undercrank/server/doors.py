"""The doors: who may knock, how much may come in, and what every answer carries. One ASGI middleware, no framework.

Host names are checked against DNS rebinding: a name that an attacker owns may point at 127.0.0.1, an address cannot.
Requests that change something must come from this very site when a browser sends them. Bodies are counted as they
arrive, whatever their length was said to be.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from typing import ClassVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from undercrank.records import BadInput, UndercrankError

MAX_UPLOAD_BYTES = 48 * 2**20
"A picture of 32 MiB as a data: URL, and room for its prompt."
MAX_BODY_BYTES = 64 * 2**10
"Everything else: the names of models, keys."
UPLOADS = ("/v1/videos", "/v1/plan")
READS = ("GET", "HEAD", "OPTIONS")

CSP = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class TooLarge(BadInput):
    http_status: ClassVar[int] = 413
    code: ClassVar[str] = "too_large"


class NoEntry(UndercrankError):
    """Sent by a page of another site."""

    http_status: ClassVar[int] = 403
    code: ClassVar[str] = "other_site"


class WrongHost(BadInput):
    http_status: ClassVar[int] = 421
    code: ClassVar[str] = "wrong_host"


class Doors:
    """Wraps the app: refuses by host, origin and size; puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str] = ()) -> None:
        """hosts: names by which the server may be called, besides localhost and plain addresses."""
        self.app = app
        self.hosts = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self.check_host(headers)
            check_site(scope, headers)
            limit = body_limit(scope["path"])
            check_length(headers, limit)
        except UndercrankError as error:
            await answer(error)(scope, receive, with_headers(send))
            return
        await self.app(scope, counted(receive, limit), with_headers(send))

    def check_host(self, headers: Headers) -> None:
        host = _host_name(headers.get("host", ""))
        if host not in self.hosts and not _is_address(host):
            raise WrongHost(f"this server is not called {host[:100]!r}: start it with --allow-host {host[:100]}")


def check_site(scope: Scope, headers: Headers) -> None:
    """A browser says where a request comes from; one with a bearer key was not sent by accident."""
    if scope["method"] in READS or "authorization" in headers:
        return
    origin = headers.get("origin")
    other = origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    if other or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise NoEntry("a page of another site sent this: open the studio's own page, or send a bearer key")


def body_limit(path: str) -> int:
    return MAX_UPLOAD_BYTES if path.startswith(UPLOADS) else MAX_BODY_BYTES


def check_length(headers: Headers, limit: int) -> None:
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise BadInput("content-length must be a number")
    if len(length) > 15 or int(length) > limit:
        raise TooLarge(f"the body is larger than {limit} bytes")


def counted(receive: Receive, limit: int) -> Receive:
    """`receive`, refusing to go on past `limit` bytes."""
    seen = 0

    async def count() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise TooLarge(f"the body is larger than {limit} bytes")
        return message

    return count


def with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sent


def answer(error: UndercrankError) -> Response:
    """What a client is told of a foreseen error."""
    status = error.http_status
    if status == 204:
        return Response(status_code=204)
    return problem(status, error.code, str(error), getattr(error, "field", None))


RETRY_AFTER_S = "5"
HINTS = {
    401: {"www-authenticate": "Bearer"},
    413: {"connection": "close"},  # what is still on its way is not read
    429: {"retry-after": RETRY_AFTER_S},
    503: {"retry-after": RETRY_AFTER_S},
}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found", 429: "rate_limit_error"}


def problem(status: int, code: str, message: str, param: str | None = None) -> Response:
    """An error in the shape that clients of `/v1/videos` read. In ASCII: a message may quote half a character."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"code": code, "message": message, "param": param, "type": kind}}
    return Response(json.dumps(body), status_code=status, headers=HINTS.get(status), media_type="application/json")


def _host_name(host: str) -> str:
    """Without the port, in small letters; of an IPv6 address, without its brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
