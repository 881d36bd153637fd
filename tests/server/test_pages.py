"""The pages as the server sends them: nothing of a clip in them, nothing from elsewhere."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import ASKED
from undercrank.jobs import Store
from undercrank.levers import knobs, lever_of_knob
from undercrank.server.pages import PAGE, STATIC


@pytest.mark.parametrize(("path", "title"), [("/", "Studio"), ("/compare", "Compare"), ("/ledger", "Ledger")])
def test_each_page_is_there_and_says_which_it_is(client: TestClient, path: str, title: str) -> None:
    page = client.get(path)
    assert page.status_code == 200 and f"<title>{title} - undercrank</title>" in page.text
    assert page.text.count('aria-current="page"') == 1


def test_the_page_itself_holds_no_clip(client: TestClient) -> None:
    client.post("/v1/videos", json=ASKED | {"prompt": "<script>alert(1)</script>"})
    assert "alert(1)" not in client.get("/").text


@pytest.mark.parametrize("path", ["/", "/compare", "/ledger"])
def test_without_a_sign_in_it_asks_for_a_key(client: TestClient, store: Store, path: str) -> None:
    store.create_key(owner="ada")
    page = client.get(path)
    assert page.status_code == 200 and 'name="key"' in page.text and "Studio" not in page.text


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for file in PAGE.rglob("*.*"):
        if file.suffix in (".html", ".css", ".js"):
            text = file.read_text(encoding="utf-8")
            assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), file
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", text), f"{file}: the policy forbids it"
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
                f"{file}: text is text"
            )


def test_a_page_names_all_modules_that_its_script_needs(client: TestClient) -> None:
    page = client.get("/").text
    for name in ("api.js", "recipe.js", "words.js"):
        assert f'<link rel="modulepreload" href="/static/{name}">' in page
        assert client.get(f"/static/{name}").headers["content-type"].startswith("text/javascript")


def test_every_word_that_a_knob_offers_is_taken_by_its_lever() -> None:
    text = (STATIC / "form.js").read_text(encoding="utf-8")
    table = re.search(r"const CHOICES = \{\n(.*?)\n\};", text, re.DOTALL)
    typed = re.findall(r'"(\w+)"', re.search(r"const TYPED = new Set\(\[(.*?)\]\)", text)[1])  # type: ignore[index]
    assert table is not None
    offered = {knob: re.findall(r'"(\w+)"', words) for knob, words in re.findall(r"(\w+): \[(.*?)\]", table[1])}
    assert set(offered) <= set(knobs()) and set(typed) <= set(knobs())
    for knob in set(knobs()) - set(typed):
        lever = lever_of_knob(knob)
        assert lever is not None
        for word in offered.get(knob, ["on"]):
            beside = {"transformer_cache_mask": "11"} if word == "mask" else {}
            lever.from_wish({knob: word, **beside})
