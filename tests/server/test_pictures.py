"""Pictures that came in: limits, names, what is recorded, what is removed."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.pretended import PretendedEngine
from tests.server.test_bodies import I2V, form, picture
from undercrank.images import MAX_PIXELS
from undercrank.jobs import Store
from undercrank.records import BadInput
from undercrank.server import pictures
from undercrank.server.pictures import decoded, keep_picture, notes_on, remove_unused
from undercrank.video import read_recipe
from undercrank.worker import Worker


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    side = int(MAX_PIXELS**0.5) + 100
    raw = io.BytesIO()
    Image.new("1", (side, side)).save(raw, "PNG", optimize=True)
    with pytest.raises(BadInput, match="megapixels") as caught:
        decoded(raw.getvalue())
    assert caught.value.field == "input_reference"


def test_equal_pictures_are_kept_once(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8))
    assert keep_picture(image, tmp_path) == keep_picture(image, tmp_path)
    assert len(list((tmp_path / "pictures").iterdir())) == 1


def test_what_was_done_to_a_picture_is_recorded(client: TestClient, store: Store) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = picture("JPEG", exif=exif)
    answer = client.post("/v1/videos", data=form(I2V), files={"input_reference": ("a.jpg", raw, "image/jpeg")})
    assert any("upright" in note for note in answer.json()["notes"])
    assert any("upright" in note for note in store.get(answer.json()["id"]).options["picture_notes"])


def test_a_picture_is_kept_as_it_will_be_used(tmp_path: Path) -> None:
    """Upright, RGB, on white where it was transparent."""
    source = Image.new("RGBA", (4, 6), (255, 0, 0, 0))
    raw = io.BytesIO()
    source.save(raw, "PNG")
    image = decoded(raw.getvalue())
    with Image.open(tmp_path / keep_picture(image, tmp_path)) as kept:
        assert kept.mode == "RGB" and kept.getpixel((0, 0)) == (255, 255, 255)
    assert "white" in notes_on(image)[0] and notes_on(None) == []


def test_a_remix_keeps_its_picture(client: TestClient, store: Store) -> None:
    first = client.post("/v1/videos", data=form(I2V), files={"input_reference": ("a", picture(), "image/png")}).json()
    remix = client.post(f"/v1/videos/{first['id']}/remix", json={"prompt": "another"}).json()
    assert store.get(remix["id"]).request["image"] == store.get(first["id"]).request["image"]


def test_a_picture_goes_when_no_clip_needs_it(
    client: TestClient, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, Any] = {"input_reference": ("a", picture(), "image/png")}
    id = client.post("/v1/videos", data=form(I2V), files=files).json()["id"]
    [kept] = (tmp_path / "pictures").iterdir()
    keep_picture(Image.new("RGB", (9, 9)), tmp_path)  # nobody asked for this one, but it is new
    monkeypatch.setattr(pictures, "UNUSED_S", 600.0)
    os.utime(kept, (0, time.time() - 1000))
    remove_unused(tmp_path, store)
    assert len(list((tmp_path / "pictures").iterdir())) == 2
    store.cancel(id)
    store.delete(id)
    remove_unused(tmp_path, store)
    assert not kept.exists() and len(list((tmp_path / "pictures").iterdir())) == 1


def test_the_clips_story_names_the_picture_as_the_job_does(client: TestClient, store: Store, tmp_path: Path) -> None:
    """The worker finds the file; neither the recipe nor the answer tells where the server keeps it."""
    seen = []
    look = staticmethod(lambda engine, event, request: seen.append(request.image))
    engine = type("Engine", (PretendedEngine,), {"alive": [], "born": [], "made": [], "during": look})
    fields = {
        "prompt": "it moves",
        "model": "ltx-video-i2v",
        "size": "64x64",
        "num_frames": 9,
        "num_inference_steps": 2,
    }
    exif = Image.Exif()
    exif[0x0112] = 6
    files: dict[str, Any] = {"input_reference": ("a", picture("JPEG", exif=exif), "image/jpeg")}
    asked = client.post("/v1/videos", data=form(fields), files=files)
    assert asked.status_code == 200, asked.text
    with Worker(store, tmp_path, new_engine=engine) as worker:
        worker.run(until_idle=True)
    id = asked.json()["id"]
    video = client.get(f"/v1/videos/{id}").json()
    assert video["status"] == "completed", video["error"]
    assert seen and Path(str(seen[0])).is_file()
    name = store.get(id).request["image"]
    assert video["request"]["image"] == video["plan"]["request"]["image"] == name
    assert any("upright" in note for note in video["notes"])
    recipe = read_recipe(tmp_path / "videos" / f"{id}.1" / "video.mp4")
    assert recipe["request"]["image"] == name and str(tmp_path) not in json.dumps(recipe)
