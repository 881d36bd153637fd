"""The doors: host names, other sites, sizes of bodies, headers of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import ASKED, HERE, error
from undercrank.server.app import make_app
from undercrank.server.doors import HEADERS, MAX_BODY_BYTES, MAX_UPLOAD_BYTES, TooLarge, counted
from undercrank.server.studio import Studio


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8200", "localhost:8200", "[::1]:8200", "192.168.1.7", "LOCALHOST"]
)
def test_addresses_and_localhost_may_be_called(client: TestClient, host: str) -> None:
    assert client.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8200", "", "a" * 5000]
)
def test_a_name_that_is_not_ours_is_refused(client: TestClient, host: str) -> None:
    """DNS rebinding: somebody else's name, made to point here."""
    answer = client.get("/healthz", headers={"host": host})
    assert answer.status_code == 421 and error(answer)["code"] == "wrong_host"


def test_a_name_that_we_were_given_may_be_called(studio: Studio) -> None:
    studio.hosts = ("Studio.example",)
    with TestClient(make_app(studio), base_url=HERE) as client:
        assert client.get("/healthz", headers={"host": "studio.example:443"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8201"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": HERE},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/videos"), ("POST", "/login"), ("DELETE", "/v1/videos/x")])
def test_a_page_of_another_site_changes_nothing(
    client: TestClient, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = client.request(method, path, headers=headers, json=ASKED)
    assert answer.status_code == 403 and error(answer)["code"] == "other_site"
    assert client.get("/v1/videos").json()["data"] == []


@pytest.mark.parametrize("headers", [{}, {"origin": HERE}, {"origin": HERE, "sec-fetch-site": "same-origin"}])
def test_our_own_page_and_programs_may(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/v1/videos", headers=headers, json=ASKED).status_code == 200


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/models", "/nothing", "/static/studio.css", "/openapi.json"])
def test_every_answer_carries_the_headers(client: TestClient, path: str) -> None:
    sent = client.get(path).headers
    assert {name: sent.get(name) for name in HEADERS} == HEADERS


def test_a_refusal_at_the_door_carries_them_too(client: TestClient) -> None:
    sent = client.get("/healthz", headers={"host": "evil.example"}).headers
    assert {name: sent.get(name) for name in HEADERS} == HEADERS


def test_the_policy_lets_in_nothing_from_elsewhere() -> None:
    policy = HEADERS["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy


def test_a_long_body_is_refused_by_its_length(client: TestClient) -> None:
    answer = client.post("/v1/videos", content=b"x", headers={"content-length": str(MAX_UPLOAD_BYTES + 1)})
    assert answer.status_code == 413 and error(answer)["code"] == "too_large"


@pytest.mark.parametrize("length", ["-1", "many", "\u0661", "9" * 400])
def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    from starlette.datastructures import Headers

    from undercrank.records import BadInput
    from undercrank.server.doors import check_length

    with pytest.raises(BadInput):
        check_length(Headers(raw=[(b"content-length", length.encode())]), 100)


@pytest.mark.parametrize(("path", "limit"), [("/v1/videos", MAX_UPLOAD_BYTES), ("/login", MAX_BODY_BYTES)])
def test_a_body_is_counted_as_it_arrives(client: TestClient, path: str, limit: int) -> None:
    """Nobody said how long it would be."""

    def pieces() -> Iterator[bytes]:
        for _ in range(limit // 2**14 + 2):
            yield b" " * 2**14

    answer = client.post(path, content=pieces(), headers={"content-type": "application/json"})
    assert answer.status_code == 413 and error(answer)["code"] == "too_large"


def test_counting_stops_the_reading() -> None:
    taken = []

    async def receive() -> Any:
        taken.append(1)
        return {"type": "http.request", "body": b"x" * 10, "more_body": True}

    async def read() -> None:
        count = counted(receive, 25)
        with pytest.raises(TooLarge):
            for _ in range(100):
                await count()

    asyncio.run(read())
    assert len(taken) == 3
