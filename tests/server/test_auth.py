"""Keys, owners, limits, cookies."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import ASKED, HERE, Hand, error
from undercrank.jobs import Limits, Store
from undercrank.server import auth
from undercrank.server.app import make_app
from undercrank.server.auth import NotAllowed, sealed, server_secret, unsealed
from undercrank.server.studio import Studio

OPEN = ["/healthz", "/readyz", "/version", "/", "/static/studio.css", "/openapi.json"]
SHUT = [
    "/v1/videos",
    "/v1/videos/x",
    "/v1/videos/x/content",
    "/v1/videos/x/events",
    "/v1/events",
    "/v1/models",
    "/v1/levers",
    "/metrics",
]


def key(store: Store, owner: str, **limits: int) -> dict[str, str]:
    _, secret = store.create_key(owner=owner, name=owner, limits=Limits(**limits))
    return {"authorization": f"Bearer {secret}"}


def test_without_any_key_this_computer_may_do_all(client: TestClient) -> None:
    assert client.get("/v1/videos").status_code == 200


def test_without_any_key_every_key_is_taken(client: TestClient) -> None:
    """The official client cannot but send one."""
    assert client.get("/v1/videos", headers={"authorization": "Bearer sk-anything"}).status_code == 200


@pytest.mark.parametrize("path", SHUT)
def test_once_there_is_a_key_it_is_asked_for(client: TestClient, store: Store, path: str) -> None:
    key(store, "ada")
    answer = client.get(path)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert error(answer)["type"] == "authentication_error"


@pytest.mark.parametrize("path", OPEN)
def test_probes_and_the_page_need_none(client: TestClient, store: Store, path: str) -> None:
    key(store, "ada")
    assert client.get(path).status_code in (200, 503)


def test_a_server_for_others_asks_even_while_there_is_no_key(studio: Studio) -> None:
    studio.key_needed = True
    with TestClient(make_app(studio), base_url=HERE) as client:
        assert client.get("/v1/videos").status_code == 401
        assert client.get("/v1/videos", headers={"authorization": "Bearer sk-anything"}).status_code == 401


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic YTpi", "Bearer uc_000000000000_x", "Bearer \u00e9"])
def test_a_wrong_key_opens_nothing(client: TestClient, store: Store, header: str) -> None:
    key(store, "ada")
    assert client.get("/v1/videos", headers={"authorization": header.encode()}).status_code == 401


def test_a_revoked_key_opens_nothing(client: TestClient, store: Store) -> None:
    first, _ = key(store, "ada"), key(store, "ben")
    assert client.get("/v1/videos", headers=first).status_code == 200
    store.revoke_key(store.keys()[0].id)
    assert client.get("/v1/videos", headers=first).status_code == 401


def test_no_secret_is_in_the_store(store: Store, tmp_path: Path) -> None:
    secret = key(store, "ada")["authorization"].removeprefix("Bearer ")
    store.close()
    held = b"".join(file.read_bytes() for file in tmp_path.glob("jobs.db*"))
    assert b"ada" in held and secret.encode() not in held


def test_a_clip_of_somebody_else_looks_like_none(client: TestClient, store: Store, hand: Hand) -> None:
    ada, ben = key(store, "ada"), key(store, "ben")
    client.post("/v1/videos", json=ASKED, headers=ada)
    id = hand.films()
    for method, path in [
        ("GET", ""), ("DELETE", ""), ("GET", "/content"), ("POST", "/cancel"), ("GET", "/events"), ("POST", "/remix"),
    ]:  # fmt: skip
        answer = client.request(method, f"/v1/videos/{id}{path}", headers=ben)
        assert answer.status_code == 404, path
        unknown = client.request(method, f"/v1/videos/video_000000000000000000000000{path}", headers=ben)
        assert error(answer)["message"].replace(id, "X") == error(unknown)["message"].replace(
            "video_000000000000000000000000", "X"
        )
    assert client.get("/v1/videos", headers=ben).json()["data"] == []
    assert client.get("/v1/videos", params={"after": id}, headers=ben).status_code == 400
    assert client.get(f"/v1/videos/{id}", headers=ada).status_code == 200


def test_an_idempotency_key_is_its_owners_alone(client: TestClient, store: Store) -> None:
    same = {"idempotency-key": "one"}
    ids = {client.post("/v1/videos", json=ASKED, headers=key(store, who) | same).json()["id"] for who in ("ada", "ben")}
    assert len(ids) == 2


def test_as_many_clips_at_a_time_as_the_key_allows(client: TestClient, store: Store) -> None:
    ada = key(store, "ada", max_jobs=2)
    answers = [client.post("/v1/videos", json=ASKED, headers=ada) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert error(answers[2])["type"] == "rate_limit_error" and int(answers[2].headers["retry-after"]) > 0
    assert client.post("/v1/videos", json=ASKED, headers=key(store, "ben")).status_code == 200


def test_as_much_work_as_the_key_allows(client: TestClient, store: Store) -> None:
    one = 128 * 128 * 5 * 3
    ada = key(store, "ada", max_cost=2 * one)
    answers = [client.post("/v1/videos", json=ASKED, headers=ada) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


def test_the_servers_own_limits_hold_for_who_has_none(studio: Studio) -> None:
    studio.limits = Limits(max_jobs=1)
    with TestClient(make_app(studio), base_url=HERE) as client:
        assert [client.post("/v1/videos", json=ASKED).status_code for _ in range(2)] == [200, 429]


# --------------------------------------------------------------------------- the cookie


def test_a_browser_signs_in_and_out(client: TestClient, store: Store) -> None:
    secret = key(store, "ada")["authorization"].removeprefix("Bearer ")
    answer = client.post("/login", json={"key": secret}, headers={"origin": HERE})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and secret not in cookie
    assert client.get("/v1/videos").status_code == 200
    client.post("/logout", headers={"origin": HERE})
    assert client.get("/v1/videos").status_code == 401


@pytest.mark.parametrize(("origin", "secure"), [(HERE, False), ("https://studio.example", True)])
def test_a_cookie_that_came_over_tls_goes_over_tls_only(
    studio: Studio, store: Store, origin: str, secure: bool
) -> None:
    studio.hosts = ("studio.example",)
    secret = key(store, "ada")["authorization"].removeprefix("Bearer ")
    with TestClient(make_app(studio), base_url=HERE) as client:
        headers = {"origin": origin, "host": origin.partition("//")[2]}
        cookie = client.post("/login", json={"key": secret}, headers=headers).headers["set-cookie"]
    assert ("Secure" in cookie) is secure


@pytest.mark.parametrize("wrong", ["uc_0_0", "", "uc_\ud800_x", "uc_\0_x", "\u00e9", "x" * 200])
def test_a_wrong_key_signs_nobody_in(client: TestClient, store: Store, wrong: str) -> None:
    key(store, "ada")
    answer = client.post("/login", content=json.dumps({"key": wrong}))
    assert answer.status_code in (400, 401) and "set-cookie" not in answer.headers


def test_a_sign_in_ends_with_its_key(client: TestClient, store: Store) -> None:
    secret = key(store, "ada")["authorization"].removeprefix("Bearer ")
    client.post("/login", json={"key": secret})
    store.revoke_key(store.keys()[0].id)
    key(store, "ben")
    assert client.get("/v1/videos").status_code == 401


def test_a_cookie_is_read_back() -> None:
    assert unsealed(sealed("abc", b"s", now=0), b"s", now=1) == "abc"


@pytest.mark.parametrize("cookie", ["", "abc", "abc.99999999999.00", "..", "a.b.c", "abc.\u00e9.\u00e9"])
def test_a_forged_cookie_is_refused(cookie: str) -> None:
    with pytest.raises(NotAllowed):
        unsealed(cookie, b"s")


def test_a_changed_cookie_is_refused() -> None:
    with pytest.raises(NotAllowed):
        unsealed("b" + sealed("abc", b"s")[1:], b"s")


def test_a_cookie_of_another_server_is_refused() -> None:
    with pytest.raises(NotAllowed):
        unsealed(sealed("abc", b"s"), b"t")


def test_a_cookie_ends() -> None:
    with pytest.raises(NotAllowed):
        unsealed(sealed("abc", b"s", now=0), b"s", now=auth.COOKIE_S + 1)


def test_the_secret_of_cookies_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    assert server_secret(tmp_path) == server_secret(tmp_path) and len(server_secret(tmp_path)) == 32
    assert stat.S_IMODE((tmp_path / "cookie-secret").stat().st_mode) == 0o600
