"""Requests that no person would send, made from the description of the API: no answer is a fault of the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.conftest import ASKED, Hand
from undercrank.jobs import State, Store
from undercrank.server.app import make_app
from undercrank.server.openapi import KEPT
from undercrank.server.studio import Studio

PATHS = json.loads(KEPT.read_text(encoding="utf-8"))["paths"]
MODES = {"as described": GenerationMode.POSITIVE, "otherwise": GenerationMode.NEGATIVE}


def can_be_otherwise(operation: dict[str, Any]) -> bool:
    """Any text is a text: where only the name of a clip is asked for, nothing is against the description."""
    parameters = operation.get("parameters", [])
    return "requestBody" in operation or any(p["in"] != "path" or p["schema"]["type"] != "string" for p in parameters)


CASES = [
    pytest.param(method, path, mode, id=f"{method} {path}, {mode}")
    for path, methods in PATHS.items()
    for method, operation in methods.items()
    for mode in MODES
    if path != "/v1/events"  # its answer has no end
    if mode == "as described" or can_be_otherwise(operation)
]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
Try = Callable[[str, str, str, int], None]


@pytest.fixture
def attempt(studio: Studio, store: Store, hand: Hand) -> Try:
    """Send so many made-up requests to an operation; every second one about a clip that exists."""
    studio.hosts = ("testserver",)
    for _ in range(2):
        store.beat("w", host="h", pid=1, device="cpu", state="idle")
        studio.look_around()
    app = make_app(studio)
    schema: Any = schemathesis.openapi.from_asgi("/openapi.json", app)

    def attempt(method: str, path: str, mode: str, times: int) -> None:
        operation = schema[path][method]
        count = iter(range(times * 10))

        @given(case=operation.as_strategy(generation_mode=MODES[mode]))
        @settings(
            max_examples=times, deadline=None, database=None, derandomize=times < 100, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def send(case: Any) -> None:
            if "video_id" in case.path_parameters and next(count) % 2:
                case.path_parameters["video_id"] = finished(store, hand)
            case.call_and_validate(checks=CHECKS)

        send()

    return attempt


def finished(store: Store, hand: Hand) -> str:
    """A clip that is done, whatever was deleted before."""
    done = store.list(states=[State.COMPLETED], limit=1).jobs
    if done:
        return done[0].id
    for job in store.list(states=[State.QUEUED], limit=100).jobs:
        store.cancel(job.id)
    asked = {"negative_prompt": "", "width": 64, "height": 64, "fps": "16", "guidance_scale": 5.0, **ASKED}
    store.enqueue(owner="local", model="flipbook", request=asked)
    return hand.films()


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_request_is_answered_with_a_fault(attempt: Try, method: str, path: str, mode: str) -> None:
    attempt(method, path, mode, 30 if path in ("/v1/videos", "/v1/plan") else 6)


@pytest.mark.long
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_none_of_thousands_of_requests_is(attempt: Try, method: str, path: str, mode: str) -> None:
    attempt(method, path, mode, 1000 if path in ("/v1/videos", "/v1/plan") else 250)
