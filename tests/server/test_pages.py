"""The page: what it shows, and that nothing comes from elsewhere."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import ASKED
from undercrank.jobs import Store
from undercrank.server.pages import PAGE


def test_the_page_lists_the_clips(client: TestClient) -> None:
    id = client.post("/v1/videos", json=ASKED).json()["id"]
    assert id in client.get("/").text and ASKED["prompt"] in client.get("/").text


@pytest.mark.parametrize("prompt", ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", '"><b>', "'"])
def test_a_prompt_is_shown_as_text(client: TestClient, prompt: str) -> None:
    client.post("/v1/videos", json=ASKED | {"prompt": prompt})
    page = client.get("/").text
    assert "<img" not in page and "<script>alert" not in page and "<b>" not in page


def test_without_a_sign_in_it_shows_no_clip(client: TestClient, store: Store) -> None:
    client.post("/v1/videos", json=ASKED)
    store.create_key(owner="ada")
    answer = client.get("/")
    assert answer.status_code == 200 and ASKED["prompt"] not in answer.text


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for file in PAGE.rglob("*.*"):
        if file.suffix in (".html", ".css", ".js"):
            text = file.read_text(encoding="utf-8")
            assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), file
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", text), f"{file}: the policy forbids it"
