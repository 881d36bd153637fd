"""JSON and forms, and the pictures in them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.server.conftest import ASKED, error
from undercrank.server.bodies import from_data_url

I2V = ASKED | {"model": "wan2.1-14b-480p-i2v"}


def picture(kind: str = "PNG", size: tuple[int, int] = (64, 48), **more: Any) -> bytes:
    raw = io.BytesIO()
    Image.new("RGB", size, (200, 30, 60)).save(raw, kind, **more)
    return raw.getvalue()


def form(fields: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items()}


def test_a_form_and_json_ask_for_the_same(client: TestClient) -> None:
    by_json = client.post("/v1/plan", json=ASKED | {"seed": 3}).json()
    by_form = client.post("/v1/plan", data=form(ASKED | {"seed": 3})).json()
    by_parts = client.post("/v1/plan", files={n: (None, v) for n, v in form(ASKED | {"seed": 3}).items()}).json()
    assert by_json["request"] == by_form["request"] == by_parts["request"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
def test_a_picture_comes_as_a_file_or_as_a_data_url(client: TestClient, kind: str, tmp_path: Path) -> None:
    raw = picture(kind)
    url = f"data:image/whatever;base64,{base64.b64encode(raw).decode()}"
    answers = [
        client.post("/v1/videos", data=form(I2V), files={"input_reference": ("a.txt", raw, "text/plain")}),
        client.post("/v1/videos", json=I2V | {"input_reference": url}),
        client.post("/v1/videos", json=I2V | {"input_reference": {"image_url": url}}),
        client.post("/v1/videos", data=form(I2V) | {"input_reference[image_url]": url}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text[:200] for answer in answers]
    kept = list((tmp_path / "pictures").iterdir())
    assert len(kept) == 1 and kept[0].suffix == ".png"
    with Image.open(kept[0]) as image:
        assert image.size == (64, 48)


def test_the_servers_folder_is_not_told(client: TestClient, tmp_path: Path) -> None:
    answer = client.post("/v1/videos", data=form(I2V), files={"input_reference": ("a", picture(), "image/png")})
    assert str(tmp_path) not in answer.text


@pytest.mark.parametrize(
    "name", ["../../x", "..\\..\\x", "/etc/x", "C:\\x", "a%00b", "x" * 300, "a.png\r\nX: y", "%2e%2e%2fx"]
)
def test_the_name_of_an_upload_names_nothing_here(client: TestClient, tmp_path: Path, name: str) -> None:
    before = {path for path in tmp_path.parent.rglob("*") if "jobs.db" not in path.name}
    answer = client.post("/v1/videos", data=form(I2V), files={"input_reference": (name, picture(), "image/png")})
    assert answer.status_code == 200
    made = {path for path in tmp_path.parent.rglob("*") if "jobs.db" not in path.name} - before
    assert {path.parent.name for path in made if path.is_file()} == {"pictures"}


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8200/x.png",
        "https://example.com/a.png",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "/etc/passwd",
        "../../etc/passwd",
        "ftp://example.com/a.png",
        "data:image/png,abc",
        "data:image/png;base64,@@@",
        "data:",
        "",
    ],
)
def test_nothing_is_fetched_and_no_path_is_read(client: TestClient, url: str) -> None:
    for body in ({"json": I2V | {"input_reference": url}}, {"data": form(I2V) | {"input_reference": url}}):
        answer = client.post("/v1/videos", **body)  # type: ignore[arg-type]
        assert answer.status_code == 400 and error(answer)["param"] == "input_reference", url


@pytest.mark.parametrize("value", [5, True, ["x"], {"file_id": "x"}, {"image_url": 5}, {"image_url": "x", "more": 1}])
def test_what_is_no_picture_at_all_is_refused(client: TestClient, value: object) -> None:
    answer = client.post("/v1/videos", json=I2V | {"input_reference": value})
    assert answer.status_code == 400 and error(answer)["param"] == "input_reference"


@pytest.mark.parametrize("raw", [b"", b"GIF89a", b"<svg/>", b"\x89PNG\r\n\x1a\n", picture()[:60], b"\0" * 1000])
def test_a_broken_picture_is_refused(client: TestClient, raw: bytes) -> None:
    answer = client.post("/v1/videos", data=form(I2V), files={"input_reference": ("a.png", raw, "image/png")})
    assert answer.status_code == 400 and error(answer)["param"] == "input_reference"


def test_a_picture_for_a_model_that_takes_none_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/videos", data=form(ASKED), files={"input_reference": ("a", picture(), "image/png")})
    assert answer.status_code == 400


def test_a_model_that_animates_a_picture_needs_one(client: TestClient) -> None:
    assert client.post("/v1/videos", json=I2V).status_code == 400


def test_a_file_where_none_is_expected_is_refused_by_name(client: TestClient) -> None:
    answer = client.post("/v1/videos", data=form(ASKED), files={"negative_prompt": ("a", b"x", "text/plain")})
    assert answer.status_code == 400 and error(answer)["param"] == "negative_prompt"


def test_a_field_given_twice_is_refused_by_name(client: TestClient) -> None:
    answer = client.post("/v1/videos", data={"prompt": ["a", "b"]})
    assert answer.status_code == 400 and error(answer)["param"] == "prompt"


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"5", "application/json", 400),
        (b"null", "application/json; charset=utf-8", 400),
        (b"\xff", "application/json", 400),
        (b"prompt: x", "application/yaml", 415),
        (b"x", "multipart/form-data", 400),
        (b"x", "multipart/form-data; boundary=y", 400),
        (b"--y\r\nContent-Disposition: form-data\r\n\r\n", "multipart/form-data; boundary=y", 400),
        (b"%ff=%zz", "application/x-www-form-urlencoded", 400),
        (b"prompt=" + b"a" * (2**20 + 10), "application/x-www-form-urlencoded", 400),
    ],
)
def test_a_body_that_cannot_be_read_is_a_clear_refusal(client: TestClient, raw: bytes, kind: str, status: int) -> None:
    answer = client.post("/v1/videos", content=raw, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    error(answer)


def test_more_fields_than_there_are_are_refused(client: TestClient) -> None:
    answer = client.post("/v1/videos", files=[(f"f{i}", (None, "x")) for i in range(200)])
    assert answer.status_code == 400


def test_a_data_url_is_decoded() -> None:
    assert from_data_url("data:image/png;base64,aGVsbG8=") == b"hello"
