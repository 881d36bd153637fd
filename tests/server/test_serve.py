"""`undercrank serve` as processes: from nothing to a clip, kills, signals, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from tests.databases import postgres_server
from tests.server.serving import SOURCE, Serving, command, environment, serving, until
from undercrank.video import probe, read_recipe

SHORT = {
    "prompt": "a red ring moves left on a navy background",
    "num_frames": 5,
    "num_inference_steps": 3,
    "size": "64x64",
}
LONG = SHORT | {"num_inference_steps": 60}


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("studio")) as served:
        yield served


def stream(http: httpx2.Client, id: str, after: str | None = None) -> Iterator[dict[str, Any]]:
    """The events of a clip, with name and number, as they come."""
    headers = {} if after is None else {"last-event-id": after}
    with http.stream("GET", f"/v1/videos/{id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        event: dict[str, str] = {}
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line and not line.startswith(":"):
                event[name] = value
            elif event:
                yield {"event": event["event"], "number": event["id"], **json.loads(event["data"])}
                event = {}


def test_from_a_prompt_to_a_file_with_its_recipe(studio: Serving, tmp_path: Path) -> None:
    with studio.http as http:
        asked = http.post("/v1/videos", json=SHORT | {"master": True}).json()
        kinds = [event["event"] for event in stream(http, asked["id"])]
        assert kinds[:2] == ["queued", "started"] and kinds[-1] == "completed" and kinds.count("step") == 3
        video = http.get(f"/v1/videos/{asked['id']}").json()
        assert video["status"] == "completed" and video["seed"] == asked["seed"]
        for variant in ("video", "thumbnail", "preview", "master", "report"):
            answer = http.get(f"/v1/videos/{asked['id']}/content", params={"variant": variant})
            assert answer.status_code == 200 and answer.content, variant
            (tmp_path / variant).write_bytes(answer.content)
    assert probe(tmp_path / "video").num_frames == 5
    recipe = read_recipe(tmp_path / "video")
    assert recipe["request"] == video["request"] == json.loads((tmp_path / "report").read_text())["request"]
    assert recipe["request"]["seed"] == asked["seed"] and recipe["plan"]["decisions"]


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_the_official_client_creates_polls_lists_downloads_and_deletes(studio: Serving, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=f"{studio.url}/v1", api_key="none", max_retries=0) as client:
        more = {"num_inference_steps": 3, "negative_prompt": "blue", "host_sync": "off"}
        video = client.videos.create_and_poll(
            prompt="a red ring",
            model="flipbook",
            seconds="1",
            size="64x64",
            extra_body=more,  # type: ignore[arg-type]
        )
        assert video.status == "completed" and video.progress == 100 and video.size == "64x64" and video.seconds == "1"
        assert video.model_extra is not None and video.model_extra["num_inference_steps"] == 3
        assert video.model_extra["request"]["wishes"] == [["host_sync", "off"]]
        client.videos.download_content(video.id).write_to_file(tmp_path / "clip.mp4")
        assert probe(tmp_path / "clip.mp4").num_frames == 17
        assert client.videos.download_content(video.id, variant="thumbnail").read()
        assert video.id in [each.id for each in client.videos.list(limit=5)]
        remix = client.videos.remix(video.id, prompt="a blue star")
        assert remix.remixed_from_video_id == video.id
        for id in (video.id, remix.id):
            assert client.videos.delete(id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video.id)


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_the_official_client_is_told_what_is_wrong(studio: Serving) -> None:
    with openai.OpenAI(base_url=f"{studio.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.videos.create(prompt="x", size="130x128")  # type: ignore[arg-type]
    assert caught.value.param == "width" and caught.value.code == "bad_input"
    assert "128x128 or 144x128" in str(caught.value)


def test_a_clip_in_the_making_is_stopped_within_a_step(studio: Serving) -> None:
    with studio.http as http:
        id = http.post("/v1/videos", json=LONG).json()["id"]
        steps = 0
        for event in stream(http, id):
            steps += event["event"] == "step"
            if steps == 2 and event["event"] == "step":
                http.post(f"/v1/videos/{id}/cancel")
        assert event["event"] == "cancelled" and steps < 20
        assert http.get(f"/v1/videos/{id}").json()["status"] == "cancelled"


def test_killing_the_api_in_mid_job_loses_nothing(studio: Serving) -> None:
    """The worker films on; the client resumes behind the last event that it saw."""
    with studio.http as http:
        id = http.post("/v1/videos", json=LONG | {"seed": 5}).json()["id"]
        seen = []
        with pytest.raises(httpx2.TransportError):
            for event in stream(http, id):
                seen.append(event)
                if event["event"] == "step" and event["step"] == 3:
                    studio.child("undercrank.server.process").kill()
        assert seen[-1]["event"] != "completed"
        seen += stream(http, id, after=seen[-1]["number"])
        video = http.get(f"/v1/videos/{id}").json()
    assert video["status"] == "completed" and video["attempts"] == 1
    assert [event["step"] for event in seen if event["event"] == "step"] == list(range(1, 61))
    numbers = [int(event["number"]) for event in seen]
    assert numbers == sorted(set(numbers))


def test_a_model_is_unloaded_and_loaded_again(studio: Serving) -> None:
    with studio.http as http:
        for action, is_loaded in (("load", True), ("unload", False), ("load", True)):
            asked = http.post(f"/v1/models/{action}", json={"model": "flipbook"}).json()
            url = f"/v1/models/commands/{asked['id']}"
            until(lambda url=url: http.get(url).json()["status"] == "completed")
            until(lambda now=is_loaded: http.get("/v1/models/flipbook").json()["loaded"] is now)


def test_the_api_answers_while_a_clip_is_made(studio: Serving) -> None:
    with studio.http as http:
        id = http.post("/v1/videos", json=LONG).json()["id"]
        until(lambda: http.get(f"/v1/videos/{id}").json()["stage"] == "denoise")
        assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200
        http.delete(f"/v1/videos/{id}")


# --------------------------------------------------------------------------- starting and ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_processes(tmp_path: Path, number: int) -> None:
    with serving(tmp_path, "--workers", "0", wait=False) as served:
        until(lambda: _answers(served))
        family = served.family
        assert family and served.stop(number) == 0
        assert not any(child.is_running() for child in family)


def test_a_stream_ends_with_the_server(tmp_path: Path) -> None:
    """It is closed, not cut: nothing has to be killed for it."""
    with serving(tmp_path, "--workers", "0", wait=False) as served, served.http as http:
        until(lambda: _answers(served))
        id = http.post("/v1/videos", json=SHORT).json()["id"]
        kinds = []
        for event in stream(http, id):
            kinds.append(event["event"])
            served.process.terminate()
        assert kinds == ["queued"] and served.process.wait(60) == 0


def test_a_job_goes_back_into_the_queue_when_the_server_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as served, served.http as http:
        id = http.post("/v1/videos", json=LONG).json()["id"]
        until(lambda: http.get(f"/v1/videos/{id}").json()["stage"] == "denoise")
        family = served.family
        assert served.stop() == 0
        assert not any(child.is_running() for child in family)
    with serving(tmp_path, "--workers", "0", wait=False) as served, served.http as http:
        video = http.get(f"/v1/videos/{id}").json()
        assert (video["status"], video["attempts"]) == ("queued", 0)


def test_the_store_may_be_postgresql(tmp_path: Path) -> None:
    with postgres_server() as url, serving(tmp_path, "--db", url, "--workers", "0", wait=False) as served:
        with served.http as http:
            id = http.post("/v1/videos", json=SHORT).json()["id"]
            assert [video["id"] for video in http.get("/v1/videos").json()["data"]] == [id]
        password_holders = [" ".join(child.cmdline()) for child in served.family]
        assert password_holders and not any("postgresql" in line for line in password_holders)


def test_the_api_does_not_outlive_a_server_that_was_killed(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "0", wait=False) as served:
        until(lambda: _answers(served))
        family = served.family
        os.kill(served.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive


def _answers(served: Serving) -> bool:
    with served.http as http:
        return http.get("/healthz").status_code == 200


def refused(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), env=environment(), capture_output=True, text=True, timeout=60)


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "0", wait=False) as served:
        port = served.url.rpartition(":")[2]
        second = refused("serve", "--port", port, "--data", str(tmp_path / "second"))
    assert second.returncode == 1 and "--port" in second.stderr and "Traceback" not in second.stderr


def test_an_open_door_is_refused(tmp_path: Path) -> None:
    done = refused("serve", "--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path))
    assert done.returncode == 2 and "undercrank keys create" in done.stderr and done.stdout == ""


def test_an_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    assert refused("keys", "create", "ada", "--data", str(tmp_path)).returncode == 0
    done = refused("serve", "--host", "no.such.host.invalid", "--data", str(tmp_path))
    assert done.returncode == 2 and "--host" in done.stderr


def test_without_its_packages_the_studio_says_what_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None; from undercrank import cli; cli.main()"
    for words in (["serve"], ["keys", "list"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 5 and "pip install 'undercrank[server]'" in done.stderr, done.stderr


WITHOUT_TORCH = """
import sys, tempfile
from pathlib import Path
from starlette.testclient import TestClient
from undercrank.jobs import Store
from undercrank.server.app import make_app
from undercrank.server.studio import Studio
with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/jobs.db") as store:
    studio = Studio(store=store, folder=Path(folder), secret=b"")
    with TestClient(make_app(studio), base_url="http://127.0.0.1") as client:
        assert client.post("/v1/videos", json={"prompt": "x"}).status_code == 200
        for path in ("/", "/v1/videos", "/v1/models", "/v1/levers", "/metrics", "/readyz", "/openapi.json"):
            client.get(path)
print(sorted({"torch", "diffusers", "transformers"} & set(sys.modules)))
"""


def test_the_api_process_never_imports_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], env=environment(), capture_output=True, text=True, timeout=60, cwd=SOURCE
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
