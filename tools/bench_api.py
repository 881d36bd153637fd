"""What the API costs a job: from its acceptance to the start of its denoising loop, with a warm worker. flipbook, CPU.

    python tools/bench_api.py [JOBS]

Not a test: it times, and a busy machine is slow. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from undercrank.machine import this_machine

ASKED = {"prompt": "a red ring moves left", "size": "64x64", "num_frames": 5, "num_inference_steps": 2}
WARM_UP = 2


def main() -> None:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with served() as http:
        measured = [one_job(http) for _ in range(WARM_UP + jobs)][WARM_UP:]
    machine = this_machine()
    result = {name: spread([job[name] for job in measured]) for name in measured[0]}
    about = {"cpu": machine.name, "cores": machine.cpu_count, "packages": machine.packages, "n": jobs}
    print(json.dumps({**result, **about}))


def one_job(http: httpx2.Client) -> dict[str, float]:
    """Milliseconds: the POST, then from its acceptance as the store saw it to what the worker told of."""
    begun = time.perf_counter()
    video = http.post("/v1/videos", json=ASKED).json()
    post_ms = 1000 * (time.perf_counter() - begun)
    events = list(events_of(http, video["id"]))
    accepted = events[0]["at"]
    at = {event.get("stage", event["event"]): event["at"] for event in reversed(events)}
    return {
        "post_ms": post_ms,
        "to_claim_ms": 1000 * (at["started"] - accepted),
        "to_text_ms": 1000 * (at["text"] - accepted),
        "to_denoise_ms": 1000 * (at["denoise"] - accepted),
    }


def events_of(http: httpx2.Client, id: str) -> Iterator[dict[str, Any]]:
    with http.stream("GET", f"/v1/videos/{id}/events") as answer:
        name = ""
        for line in answer.iter_lines():
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                yield {"event": name, **json.loads(value)}


@contextmanager
def served() -> Iterator[httpx2.Client]:
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "undercrank.cli", "serve", "--port", "0", "--data", data]
        environment = os.environ | {"UNDERCRANK_LEDGER": f"{data}/ledger.jsonl"}  # its tiny clips teach nobody
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert process.stdout is not None
        try:
            with httpx2.Client(base_url=process.stdout.readline().strip(), timeout=120) as http:
                while http.get("/readyz").status_code != 200:
                    time.sleep(0.1)
                yield http
        finally:
            process.terminate()
            process.wait()


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(values), 1),
        "least": round(ordered[0], 1),
        "most": round(ordered[-1], 1),
    }


if __name__ == "__main__":
    main()
