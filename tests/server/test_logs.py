"""What is told of answers, and of clients that leave in the middle of one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import BrokenResourceError

from undercrank.server.logs import Told

START = {"type": "http.response.start", "status": 200, "headers": []}
SCOPE = {"type": "http", "method": "GET", "path": "/v1/events"}


def told(error: BaseException, *, begins: bool) -> list[Any]:
    """What goes out of an app that fails like this, before or after its answer has begun."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begins:
            await send(START)
        raise error

    async def send(message: Any) -> None:
        sent.append(message)

    uncounted: Any = SimpleNamespace(answered=lambda **_: None)
    asyncio.run(Told(app, meters=uncounted)(dict(SCOPE), None, send))  # type: ignore[arg-type]
    return sent


def test_a_client_that_leaves_a_stream_is_no_error_of_the_server() -> None:
    assert told(ExceptionGroup("tasks", [BrokenResourceError()]), begins=True) == [START]


def test_any_other_error_of_a_stream_stays_one() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        told(ExceptionGroup("tasks", [BrokenResourceError(), ValueError("a bug")]), begins=True)
    assert [type(error) for error in raised.value.exceptions] == [ValueError]


def test_an_answer_that_never_began_is_an_error() -> None:
    with pytest.raises(ExceptionGroup):
        told(ExceptionGroup("tasks", [BrokenResourceError()]), begins=False)
