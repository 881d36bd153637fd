"""The log: one line for each answer, JSON where nobody watches. Door of structlog.

Never a prompt, a key or a cookie: only the path, without its query.
"""

from __future__ import annotations

import sys
import time

import structlog
from anyio import BrokenResourceError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from undercrank.server.meters import Meters

log = structlog.get_logger("undercrank")


def set_up() -> None:
    """To standard error: lines for people on a terminal, JSON elsewhere. Tracebacks hold no values, so no prompts."""
    renderers: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    if sys.stderr.isatty():
        renderers = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso"), *renderers],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class Told:
    """Wraps the app: each answer is counted, timed to its head, and logged."""

    def __init__(self, app: ASGIApp, *, meters: Meters) -> None:
        self.app, self.meters = app, meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, has_begun = time.perf_counter(), False

        async def tell(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._answered(scope, message["status"], time.perf_counter() - begun)
            await send(message)

        try:
            await self.app(scope, receive, tell)
        except* BrokenResourceError:  # a stream's client left while it was being told something
            if not has_begun:
                raise
            log.info("left", path=scope["path"][:200])

    def _answered(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        route = getattr(scope.get("route"), "path", "none")
        self.meters.answered(method=method, route=route, status=status, seconds=seconds)
        log.info("answered", method=method, path=scope["path"][:200], status=status, ms=round(seconds * 1000, 1))


METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH")
