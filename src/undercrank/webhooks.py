"""Tell others that a job has ended: messages from the outbox, signed as Standard Webhooks has it, tried repeatedly.

An address is somebody else's word: only https on its usual port, only to public addresses. The name is resolved once
for each message, every address that it gives must be public, the connection goes to the one that was checked, and a
redirect is an answer like any other, so that nobody is led to what stands behind our door.

Standard Webhooks: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import ipaddress
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit

from undercrank import __version__
from undercrank.beside import beside
from undercrank.jobs import Delivery, Store, StoreUnavailable
from undercrank.records import BadInput, UndercrankError

RETRY_S = (5.0, 30.0, 120.0, 600.0, 3600.0, 6 * 3600.0)
"Seconds to the next try, after each one that failed; a message that fails after the last of them is given up."
TIMEOUT_S = 10.0
PREFIX = "whsec_"

Resolve = Callable[[str], Sequence[str]]
"From a host name to its addresses."


class NotDelivered(UndercrankError):
    """Why a message did not arrive; it is tried again."""

    code = "not_delivered"


# --------------------------------------------------------------------------- addresses


def check_url(url: str) -> SplitResult:
    """The parts of an address that a webhook may have. Resolves nothing. Raises BadInput (field `url`)."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadInput(f"webhook {url[:80]!r} is no address: {error}", field="url") from error
    if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
        raise BadInput("a webhook's address is plain ASCII without spaces: write it percent-encoded", field="url")
    if parts.scheme != "https" or not parts.hostname or port not in (None, 443):
        raise BadInput(f"webhook {url[:80]!r}: only https addresses on port 443 are told", field="url")
    if parts.username is not None or parts.password is not None:
        raise BadInput("a webhook's address must hold no name or password: check the signature instead", field="url")
    with_brackets = parts.netloc.startswith("[")
    if with_brackets or parts.hostname.replace(".", "").isdigit():
        _refuse_private(parts.hostname, [parts.hostname])
    return parts


def addresses_of(host: str) -> tuple[str, ...]:
    """All that the system's resolver gives."""
    found = socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _refuse_private(host: str, addresses: Sequence[str]) -> None:
    """One that is not public is enough: which of them is taken would be the other's choice. Raises BadInput."""
    for address in addresses:
        try:
            is_public = _is_public(address)
        except ValueError as error:
            raise BadInput(f"webhook: {address[:80]!r} is no address: {error}", field="url") from error
        if not is_public:
            raise BadInput(f"webhook: {host} is {address}, which is not a public address", field="url")


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    if inner is None and isinstance(ip, ipaddress.IPv6Address) and ip in _NAT64:
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return (ip.is_global or ip in _NAT64) and not ip.is_multicast and (inner is None or inner.is_global)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


# --------------------------------------------------------------------------- signatures


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def check_secret(secret: str) -> bytes:
    """The key inside `whsec_...`. Raises BadInput (field `secret`)."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInput("a webhook's secret is whsec_ and base64", field="secret") from error
    if not 24 <= len(key) <= 64:
        raise BadInput(f"a webhook's secret holds 24 to 64 bytes, this one {len(key)}", field="secret")
    return key


def signed_headers(message_id: str, body: str, secret: str, *, now: float) -> dict[str, str]:
    """The three headers of Standard Webhooks: HMAC-SHA-256 over `id.timestamp.body`."""
    stamp = str(int(now))
    digest = hmac.digest(check_secret(secret), f"{message_id}.{stamp}.{body}".encode(), hashlib.sha256)
    signature = f"v1,{base64.b64encode(digest).decode()}"
    return {"webhook-id": message_id, "webhook-timestamp": stamp, "webhook-signature": signature}


# --------------------------------------------------------------------------- delivery


@contextmanager
def delivering(store: Store, *, every_s: float = 1.0) -> Iterator[None]:
    """Empty the outbox in a thread. It may run in several processes over one store."""

    def run(over: threading.Event) -> None:
        while not over.wait(every_s):
            try:
                while not over.is_set() and deliver_next(store):
                    pass
            except StoreUnavailable:
                continue  # the messages wait

    with beside(run, name="webhooks"):
        yield


def deliver_next(store: Store, *, send: Callable[[Delivery], None] | None = None) -> bool:
    """Try the next message that is due. False: there is none."""
    delivery = store.next_delivery(retry_s=RETRY_S)
    if delivery is None:
        return False
    try:
        (send or post)(delivery)
    except UndercrankError as error:
        store.not_delivered(delivery.id, str(error))
    else:
        store.delivered(delivery.id)
    return True


def post(
    delivery: Delivery,
    *,
    resolve: Resolve = addresses_of,
    context: ssl.SSLContext | None = None,
    now: Callable[[], float] = time.time,
    port: int = 443,
) -> None:
    """Send one message. Raises NotDelivered, BadInput (an address that may not be told)."""
    parts = check_url(delivery.url)
    assert parts.hostname
    try:
        addresses = resolve(parts.hostname)
    except (OSError, UnicodeError) as error:
        raise NotDelivered(f"{parts.hostname} has no address: {error}") from error
    _refuse_private(parts.hostname, addresses)
    headers = {
        "content-type": "application/json",
        "user-agent": f"undercrank/{__version__}",
        **signed_headers(delivery.id, delivery.body, delivery.secret, now=now()),
    }
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = _Pinned(parts.hostname, addresses[0], port, context or ssl.create_default_context())
    try:
        connection.request("POST", path, body=delivery.body.encode(), headers=headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise NotDelivered(f"{parts.hostname} could not be told: {error}") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise NotDelivered(f"{parts.hostname} answered {status}")


class _Pinned(http.client.HTTPSConnection):
    """A connection to the address that was checked, with the certificate of the name."""

    def __init__(self, host: str, address: str, port: int, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=TIMEOUT_S, context=context)
        self._address, self._tls = address, context

    def connect(self) -> None:
        raw = socket.create_connection((self._address, self.port), TIMEOUT_S)
        self.sock = self._tls.wrap_socket(raw, server_hostname=self.host)
