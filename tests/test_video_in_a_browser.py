"""A clip as a browser shows it: Chromium plays the mp4 and its canvas gives back the colours that went in.

Skipped where there is no Chromium. Files of other tools, untagged, are off by up to 25 of 255 at 720p there.
"""

import base64
import functools
import http.server
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from undercrank.video import write_mp4

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

COLOURS = [
    (230, 31, 36),
    (31, 184, 56),
    (36, 77, 235),
    (245, 219, 36),
    (148, 46, 204),
    (26, 209, 219),
    (128, 128, 128),
    (12, 12, 14),
]
OFF = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
OFF += "--disable-component-update --disable-sync --mute-audio"
PAGE = """<!doctype html><body><script>
const video = document.createElement("video");
video.muted = true;
video.src = "data:video/mp4;base64,%s";
video.addEventListener("loadeddata", () => { video.currentTime = 0.2; });
video.addEventListener("seeked", () => {
  const canvas = document.createElement("canvas");
  canvas.width = video.videoWidth; canvas.height = video.videoHeight;
  const pen = canvas.getContext("2d");
  pen.drawImage(video, 0, 0);
  const seen = [];
  for (let i = 0; i < 8; i++) {
    const x = Math.floor((i + 0.5) * canvas.width / 8);
    seen.push(Array.from(pen.getImageData(x, canvas.height / 2, 1, 1).data).slice(0, 3).join("."));
  }
  fetch("/seen?" + canvas.width + "x" + canvas.height + "&" + seen.join("-"));
});
video.addEventListener("error", () => fetch("/seen?error"));
</script>"""


class Page(http.server.BaseHTTPRequestHandler):
    """Serves one page on the loopback, and hears what it saw."""

    def __init__(self, html: str, heard: list[str], done: threading.Event, *rest):
        self.html, self.heard, self.done = html, heard, done
        super().__init__(*rest)

    def do_GET(self):
        if self.path.startswith("/seen?"):
            self.heard.append(self.path.removeprefix("/seen?"))
            self.done.set()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(self.html.encode())

    def log_message(self, *_):
        pass


def as_seen(file: Path, profile: Path) -> str:
    """What Chromium shows of a clip: "WxH&r.g.b-r.g.b-..." of eight patches, left to right."""
    html, heard, done = PAGE % base64.b64encode(file.read_bytes()).decode(), [], threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Page, html, heard, done))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    browser = subprocess.Popen(
        [CHROMIUM, *OFF.split(), f"--user-data-dir={profile}", "--remote-debugging-port=0", address],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert done.wait(60), "Chromium did not report within a minute"
    finally:
        browser.terminate()
        browser.wait(20)
        server.shutdown()
        server.server_close()
    return heard[0]


@pytest.mark.parametrize(("width", "height"), [(320, 176), (848, 480), (1280, 720)])
def test_chromium_plays_a_clip_and_shows_its_colours(tmp_path: Path, width: int, height: int) -> None:
    frame = np.zeros((height, width, 3), np.uint8)
    for index, colour in enumerate(COLOURS):
        frame[:, index * width // 8 : (index + 1) * width // 8] = colour
    file = write_mp4(tmp_path / "patches.mp4", np.stack([frame] * 8), fps=16, recipe={})
    size, seen = as_seen(file, tmp_path / "profile").split("&")
    assert size == f"{width}x{height}"
    shown = [tuple(map(int, re.findall(r"\d+", patch))) for patch in seen.split("-")]
    errors = [
        max(abs(a - b) for a, b in zip(got, asked, strict=True)) for got, asked in zip(shown, COLOURS, strict=True)
    ]
    # The file's planes are right to one step. Chromium's software conversion holds the weight of blue, 2.11, as at most
    # 2.0: a saturated blue comes out 8 to 10 too dark, whoever wrote the file.
    allowed = [10 if colour == (36, 77, 235) else 9 for colour in COLOURS]
    assert all(error <= most for error, most in zip(errors, allowed, strict=True)), list(
        zip(COLOURS, shown, strict=True)
    )
