"""The page in a real browser, over a real server: make a clip, watch it, stop it, find it again, compare it.

Each test fails on an error in the browser's console, on a script that throws, and on a request to another host.
Skipped where no Chromium is installed; see `.ci/run`.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from hatchling.builders.wheel import WheelBuilder
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from tests.server.serving import PATIENCE_S, Serving, serving, until
from undercrank.jobs import Store
from undercrank.server.pages import PAGE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

OFF = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
OFF += "--disable-component-update --disable-sync --mute-audio"
LOOKS = os.environ.get("UNDERCRANK_TEST_LOOKS")
"A folder for pictures of what the tests saw, for a person to look at."

PROMPT = "a red ring moves left on a navy background"
SMALL: dict[str, Any] = {
    "prompt": PROMPT,
    "size": "64x64",
    "num_frames": 5,
    "num_inference_steps": 3,
}
LONG = SMALL | {"num_inference_steps": 80}


@dataclass(kw_only=True)
class Watched:
    """A page, and what its browser complained of."""

    page: Page
    host: str
    faults: list[str] = field(default_factory=list)
    foreseen: list[str] = field(default_factory=list)
    "Complaints that the test provokes, as patterns."

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.fault(message.text))
        self.page.on("pageerror", lambda error: self.fault(f"thrown: {error}"))
        self.page.on("request", lambda request: self.see(request.url))

    def see(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self.host:
            self.fault(f"a request to {url}")

    def fault(self, text: str) -> None:
        if not any(re.search(pattern, text) for pattern in self.foreseen):
            self.faults.append(text)

    def open(self, path: str = "/") -> Page:
        self.page.goto(f"http://{self.host}{path}")
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def look(self, name: str) -> None:
        if LOOKS:
            self.page.screenshot(path=Path(LOOKS) / f"{name}.png")


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("studio")) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=OFF.split())
        yield opened
        opened.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    opened = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    yield opened
    opened.close()


@pytest.fixture
def watched(context: BrowserContext, studio: Serving) -> Iterator[Watched]:
    seen = Watched(page=context.new_page(), host=urlsplit(studio.url).netloc)
    yield seen
    assert seen.faults == []


def ask(page: Page, *, seed: int, steps: int = 3, prompt: str = PROMPT) -> None:
    """Fill the form in by hand and send it."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.locator("[name=size]").select_option("other")
    page.locator("[name=width]").fill("64")
    page.locator("[name=height]").fill("64")
    page.locator("[name=num_frames]").fill("5")
    page.locator("[name=num_inference_steps]").fill(str(steps))
    page.locator("[name=seed]").fill(str(seed))
    page.get_by_role("button", name="Make the clip").click()


def made(studio: Serving, **fields: Any) -> dict[str, Any]:
    """A clip that is there already, by the API."""
    with studio.http as http:
        id = http.post("/v1/videos", json=SMALL | fields).json()["id"]
        until(lambda: http.get(f"/v1/videos/{id}").json()["status"] == "completed")
        return dict(http.get(f"/v1/videos/{id}").json())


def form_of(page: Page) -> dict[str, str]:
    names = ("prompt", "size", "width", "height", "num_frames", "num_inference_steps", "guidance_scale", "seed")
    values = {name: page.locator(f"[name={name}]").input_value() for name in names}
    return values | {"fidelity": page.locator("[name=fidelity]:checked").input_value()}


def clip_card(page: Page, id: str) -> Locator:
    return page.locator(f".card[data-id={id}]")


# --------------------------------------------------------------------------- the studio


@in_browser
def test_the_plan_is_there_before_the_button_is_pressed(watched: Watched, studio: Serving) -> None:
    page = watched.open()
    plan = page.get_by_role("region", name="What will run")
    expect(plan.get_by_text("attention", exact=False).first).to_be_visible()
    expect(plan.locator(".levers li")).to_have_count(len(levers(studio)))
    for reason in plan.locator(".reason").all():
        assert reason.inner_text().strip()
    expect(plan.locator(".figures dt")).to_have_text(["Time", "Memory", "Promise"])
    page.locator("#advanced summary").click()
    page.locator("[name=attention_backend]").select_option("flash")
    expect(plan.locator(".levers li.on .name")).to_have_text([re.compile("^attention ")])
    expect(plan.locator(".figures dd").last).to_contain_text("rounding")
    expect(page.locator("#plan-line")).to_contain_text(re.compile(r"(time unknown|about .+ s) · .+ MiB · ≈ rounding"))
    watched.look("plan")
    assert clips(studio) == [], "nothing was started"


def clips(studio: Serving) -> list[dict[str, Any]]:
    with studio.http as http:
        return list(http.get("/v1/videos").json()["data"])


def levers(studio: Serving) -> list[dict[str, Any]]:
    with studio.http as http:
        return list(http.get("/v1/levers").json()["data"])


@in_browser
def test_only_knobs_that_the_server_knows_can_be_set(watched: Watched, studio: Serving) -> None:
    page = watched.open()
    shown = {control.get_attribute("name") for control in page.locator("#knobs [name]").all()}
    assert shown == {knob for lever in levers(studio) for knob in lever["knobs"]}


@in_browser
def test_a_wrong_field_is_marked_and_said(watched: Watched) -> None:
    watched.foreseen.append("status of 400")
    page = watched.open()
    page.locator("[name=num_frames]").fill("6")
    expect(page.locator("[name=num_frames][aria-invalid=true]")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("5 or 9")
    page.locator("[name=num_frames]").fill("9")
    expect(page.locator("[aria-invalid]")).to_have_count(0)
    expect(page.get_by_role("alert")).to_be_hidden()


@in_browser
def test_a_clip_is_made_watched_found_again_and_downloaded(watched: Watched, tmp_path: Path) -> None:
    page = watched.open()
    ask(page, seed=11)
    job = page.locator(".job")
    expect(job).to_be_visible()
    expect(page.locator("#gallery .card")).to_have_count(1)
    expect(job).to_have_count(0)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download, seed 11").click()
    assert download.value.suggested_filename == "a-red-ring-moves-left-on-a-navy-background-11.mp4"
    page.reload()
    page.wait_for_selector("html[data-ready]")
    expect(page.locator("#gallery .card")).to_have_count(1)
    assert form_of(page)["seed"] == "11", "what stood in the form is still there"
    page.get_by_placeholder("Filter by words").fill("no such clip")
    expect(page.locator("#gallery .card")).to_be_hidden()
    page.get_by_placeholder("Filter by words").fill("ring 64")
    expect(page.locator("#gallery .card")).to_be_visible()


@in_browser
def test_progress_is_live_survives_a_reload_and_is_stopped(watched: Watched) -> None:
    page = watched.open()
    ask(page, seed=12, steps=LONG["num_inference_steps"])
    job = page.locator(".job")
    expect(job.locator("rect")).to_have_count(80)
    expect(job.locator("rect.done").nth(2)).to_be_attached()
    expect(job.locator(".state")).to_contain_text(re.compile(r"Denoising, step \d+ of 80, .+ left"))
    expect(job.locator(".look img")).to_be_visible()
    watched.look("running")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    expect(job.locator("rect").first).to_have_class("done")  # a step that went by before the page was loaded again
    value = int(job.get_by_role("progressbar").get_attribute("aria-valuenow") or 0)
    assert 0 < value < 100
    job.get_by_role("button", name="Cancel").click()
    expect(page.locator(".card[data-status=cancelled]")).to_have_count(1)
    expect(job).to_have_count(0)


@in_browser
def test_settings_come_back_from_a_clip(watched: Watched, studio: Serving) -> None:
    clip = made(studio, seed=13, guidance_scale=3.5, fidelity="exact", prompt="a blue star spins", flow_shift=2.5)
    page = watched.open()
    clip_card(page, clip["id"]).get_by_role("button", name="Restore").click()
    expected = {
        "prompt": "a blue star spins", "size": "other", "width": "64", "height": "64", "num_frames": "5",
        "num_inference_steps": "3", "guidance_scale": "3.5", "seed": "13", "fidelity": "exact",
    }  # fmt: skip
    assert form_of(page) == expected
    clip_card(page, clip["id"]).get_by_role("button", name="Open").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("video")).to_have_js_property("videoWidth", 64)
    expect(dialog).to_contain_text("exact")
    watched.look("clip")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


@in_browser
def test_a_dropped_mp4_gives_its_settings(watched: Watched, studio: Serving) -> None:
    clip = made(studio, seed=14, prompt="a green cross grows", host_sync="off", num_inference_steps=4)
    with studio.http as http:
        film = http.get(f"/v1/videos/{clip['id']}/content").content
    page = watched.open()
    drop(page, film, "clip.mp4", "video/mp4")
    expect(page.locator("[name=prompt]")).to_have_value("a green cross grows")
    form = form_of(page)
    assert (form["seed"], form["num_inference_steps"], form["width"]) == ("14", "4", "64")
    expect(page.locator("[name=host_sync]")).to_have_value("off")
    drop(page, b"no film at all", "other.mp4", "video/mp4")
    expect(page.get_by_role("alert")).to_contain_text("other.mp4 is no mp4")


@in_browser
def test_a_model_that_begins_with_a_picture_asks_for_one(watched: Watched) -> None:
    watched.foreseen.append("status of 507")  # this machine may be too small for it
    page = watched.open()
    page.locator("[name=model]").select_option("wan2.1-14b-480p-i2v")
    expect(page.get_by_role("region", name="What will run")).to_contain_text("Choose a first frame")
    page.get_by_role("button", name="Make the clip").click()
    expect(page.locator("[name=input_reference][aria-invalid=true]")).to_be_visible()
    drop(page, base64.b64decode(ONE_PIXEL), "first.png", "image/png")
    expect(page.locator("#picture-shown")).to_be_visible()
    expect(page.locator("#plan-body")).not_to_contain_text("Choose a first frame")
    watched.look("picture")
    page.locator("[name=model]").select_option("flipbook")
    expect(page.locator("#picture")).to_be_hidden()


ONE_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def drop(page: Page, content: bytes, name: str, kind: str) -> None:
    page.evaluate(
        """([text, name, type]) => {
          const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([bytes], name, { type }));
          for (const kind of ["dragenter", "dragover", "drop"]) {
            document.body.dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }));
          }
        }""",
        [base64.b64encode(content).decode(), name, kind],
    )


@in_browser
def test_a_deleted_clip_is_gone_after_it_was_asked_twice(watched: Watched, studio: Serving) -> None:
    clip = made(studio, seed=15)
    page = watched.open()
    clip_card(page, clip["id"]).get_by_role("button", name="Open").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete for good").click()
    expect(clip_card(page, clip["id"])).to_have_count(0)
    with studio.http as http:
        assert http.get(f"/v1/videos/{clip['id']}").status_code == 404


# --------------------------------------------------------------------------- compare and ledger


@in_browser
def test_two_clips_play_in_one_clock_beside_their_distances(watched: Watched, studio: Serving) -> None:
    a, b = (made(studio, seed=seed, master=True) for seed in (21, 22))
    page = watched.open()
    for clip in (a, b):
        clip_card(page, clip["id"]).get_by_role("button", name="Compare").click()
    page.get_by_role("link", name="Compare", exact=True).last.click()
    expect(page.locator("#where")).to_have_text("frame 1 of 5")
    page.get_by_role("button", name="One frame on").click()
    page.keyboard.press(".")
    expect(page.locator("#where")).to_have_text("frame 3 of 5")
    until(lambda: frames_shown(page) == [2, 2])
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#seek")).not_to_have_value("2")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.locator("#seek").fill("3")
    expect(page.locator("#where")).to_have_text("frame 4 of 5")
    until(lambda: frames_shown(page) == [3, 3])
    page.keyboard.press("3")
    expect(page.locator("#map-said")).to_contain_text(re.compile(r"largest difference [1-9]\d* of 255"))
    assert page.evaluate(
        "(map => map.getContext('2d').getImageData(0, 0, map.width, map.height).data.some((v, i) => i % 4 < 3 && v))"
        "(document.getElementById('map'))"
    )
    watched.look("difference")
    page.keyboard.press("2")
    boxes = [page.locator(f"#video-{side}").bounding_box() for side in "ab"]
    assert boxes[0] and boxes[1] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    card = page.get_by_role("region", name="Fidelity")
    expect(card).to_contain_text("Not bit-identical")
    expect(card.get_by_role("row", name=re.compile("PSNR"))).to_contain_text("higher is nearer")
    expect(card).to_contain_text("ounding floor")
    expect(card.get_by_role("row", name=re.compile("^seed"))).to_contain_text("22")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.set_viewport_size({"width": 1280, "height": 900})
    watched.look("compare")


def frames_shown(page: Page) -> list[int]:
    times = page.evaluate("['a', 'b'].map((side) => document.getElementById(`video-${side}`).currentTime * 16)")
    return [int(time) for time in times]


@in_browser
def test_one_recipe_is_told_to_be_bit_identical(watched: Watched, studio: Serving) -> None:
    a, b = (made(studio, seed=23) for _ in range(2))
    page = watched.open(f"/compare?a={a['id']}&b={b['id']}")
    expect(page.get_by_text("Bit-identical", exact=True)).to_be_visible()
    page.locator("#b").select_option(a["id"])  # one file beside itself: two files of equal frames may be coded unlike
    page.locator("[name=mode][value=map]").check(force=True)
    expect(page.locator("#map-said")).to_contain_text("largest difference 0 of 255")


@in_browser
def test_the_ledger_draws_gain_against_distance(watched: Watched, studio: Serving) -> None:
    with studio.http as http:
        rows = http.get("/v1/ledger").json()["data"]
    page = watched.open("/ledger")
    page.locator("#metric").select_option("lpips")
    points = [row for row in rows if row["gain"] and "lpips" in row["distances"]]
    expect(page.get_by_role("img", name=re.compile("times as fast at distance"))).to_have_count(len(points))
    expect(page.locator(".front")).to_have_count(1)
    assert len(points) >= 4 and page.locator("#rows tbody tr").count() == len(rows)
    watched.look("ledger")
    page.locator("#lever").select_option("step_cache")
    expect(page.locator("#rows tbody tr")).to_have_count(sum(row["lever"] == "step_cache" for row in rows))


# --------------------------------------------------------------------------- for everybody


@in_browser
@pytest.mark.parametrize("path", ["/", "/compare", "/ledger"])
def test_a_phone_shows_it_without_scrolling_sideways(watched: Watched, path: str) -> None:
    watched.page.set_viewport_size({"width": 360, "height": 740})
    page = watched.open(path)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@in_browser
def test_the_keyboard_reaches_all_and_is_seen(watched: Watched) -> None:
    page = watched.open()
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "(() => { const it = document.activeElement; const seen = it.type === 'radio' ? it.nextElementSibling : it;"
            " return [it.name || it.id || it.textContent.trim(), getComputedStyle(seen).outlineStyle]; })()"
        )
        assert outline != "none", f"{name} has the focus and does not show it"
        seen.append(name)
        if name == "Make the clip":
            break
    for name in ("Skip to content", "theme", "prompt", "model", "num_frames", "seed", "fidelity", "Make the clip"):
        assert name in seen, (name, seen)


@in_browser
def test_dark_and_light_follow_the_system_until_the_toggle_says(watched: Watched) -> None:
    watched.page.emulate_media(color_scheme="dark")
    page = watched.open()
    html = page.locator("html")
    expect(html).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Change between dark and light").click()
    expect(html).to_have_attribute("data-theme", "light")
    page.reload()
    expect(html).to_have_attribute("data-theme", "light")


@in_browser
def test_a_key_is_traded_for_a_cookie_that_scripts_cannot_read(context: BrowserContext, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'jobs.db'}") as store:
        _, key = store.create_key(owner="ada")
    with serving(tmp_path, "--workers", "0", wait=False) as served:
        watched = Watched(page=context.new_page(), host=urlsplit(served.url).netloc, foreseen=["status of 401"])
        watched.page.goto(served.url)
        watched.page.get_by_label("Key").fill("wrong")
        watched.page.get_by_role("button", name="Sign in").click()
        expect(watched.page.get_by_role("alert")).to_contain_text("not known")
        watched.page.get_by_label("Key").fill(key)
        watched.page.get_by_role("button", name="Sign in").click()
        watched.page.wait_for_selector("html[data-ready]")
        expect(watched.page.get_by_role("button", name="Make the clip")).to_be_visible()
        assert watched.page.evaluate("document.cookie") == ""
        watched.page.get_by_role("button", name="Sign out").click()
        expect(watched.page.get_by_label("Key")).to_be_visible()
        watched.page.close()
        assert watched.faults == []


# --------------------------------------------------------------------------- without a browser


def test_all_of_the_page_is_in_the_wheel() -> None:
    root = Path(__file__).parents[2]
    packed = {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()}
    files = [file for file in PAGE.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".html", ".css", ".js", ".svg"}
    assert {file.relative_to(root / "src").as_posix() for file in files} <= packed


def test_every_module_that_the_page_imports_is_there() -> None:
    for file in PAGE.rglob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', file.read_text(encoding="utf-8")):
            assert (file.parent / name).is_file(), f"{file.name} imports {name}"


def test_the_policy_allows_no_script_in_the_page_itself(studio: Serving) -> None:
    with httpx2.Client(base_url=studio.url) as http:
        policy = http.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'self'" in policy and "object-src 'none'" in policy
