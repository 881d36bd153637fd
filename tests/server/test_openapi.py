"""The description that is kept is that of the code."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from undercrank.server.openapi import KEPT
from undercrank.server.schemas import VideoCreate
from undercrank.server.serve import openapi_text


def test_the_kept_description_is_the_present_one() -> None:
    kept = KEPT.read_text(encoding="utf-8")
    assert kept == openapi_text(), f"renew it: undercrank serve --openapi > {KEPT}"


def test_the_server_hands_out_the_same(client: TestClient) -> None:
    assert client.get("/openapi.json").json() == json.loads(KEPT.read_text(encoding="utf-8"))


def test_every_field_of_a_clip_is_described() -> None:
    document = json.loads(KEPT.read_text(encoding="utf-8"))
    for name in ("VideoCreate", "VideoCreateForm"):
        assert set(document["components"]["schemas"][name]["properties"]) == set(VideoCreate.model_fields)


def test_every_reference_leads_somewhere() -> None:
    text = KEPT.read_text(encoding="utf-8")
    schemas = json.loads(text)["components"]["schemas"]
    names = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names and names <= set(schemas)


@pytest.mark.parametrize(
    "path",
    ["/v1/videos", "/v1/videos/{video_id}", "/v1/videos/{video_id}/content", "/v1/videos/{video_id}/cancel",
     "/v1/videos/{video_id}/events", "/v1/videos/{video_id}/remix", "/v1/models", "/v1/models/load",
     "/v1/models/unload", "/v1/levers", "/v1/plan", "/healthz", "/readyz", "/metrics"],
)  # fmt: skip
def test_every_route_is_described_with_its_errors(path: str) -> None:
    for operation in json.loads(KEPT.read_text(encoding="utf-8"))["paths"][path].values():
        assert operation["responses"]["default"] == {"$ref": "#/components/responses/Error"}
        assert "422" not in operation["responses"]
