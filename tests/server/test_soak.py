"""Ten minutes of eight clients: no job is lost, no process grows. Only with `-m long`.

UNDERCRANK_SOAK_S: another length in seconds.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.server.serving import Serving, serving

LENGTH_S = float(os.environ.get("UNDERCRANK_SOAK_S", 600))
CLIENTS = 8
CLIP = {"prompt": "a red ring moves left", "size": "64x64", "num_frames": 5, "num_inference_steps": 2}
GROWTH = 1.05


@dataclass(kw_only=True)
class Seen:
    asked: int = 0
    completed: int = 0
    otherwise: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def client(studio: Serving, until: float, seen: Seen) -> None:
    """Asks, waits by events, looks, fetches; deletes every second one."""
    with studio.http as http:
        while time.monotonic() < until:
            with seen.lock:
                seen.asked += 1
                is_even = seen.asked % 2 == 0
            asked = http.post("/v1/videos", json=CLIP)
            if asked.status_code != 200:
                seen.otherwise.append(asked.text)
                return
            id = asked.json()["id"]
            http.get(f"/v1/videos/{id}/events")
            video = http.get(f"/v1/videos/{id}").json()
            whole = http.get(f"/v1/videos/{id}/content")
            if is_even:
                http.delete(f"/v1/videos/{id}")
            with seen.lock:
                if video["status"] == "completed" and whole.status_code == 200:
                    seen.completed += 1
                else:
                    seen.otherwise.append(f"{video['status']} {video['error']}")


def resident_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


@pytest.mark.long
def test_eight_clients_lose_no_job_and_make_no_process_grow(tmp_path: Path) -> None:
    with serving(tmp_path) as studio:
        watched = {"api": studio.child("undercrank.server.process"), "worker": studio.child("worker")}
        until, seen = time.monotonic() + LENGTH_S, Seen()
        threads = [threading.Thread(target=client, args=(studio, until, seen)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        samples: dict[str, list[int]] = {name: [] for name in watched}
        while time.monotonic() < until:
            time.sleep(LENGTH_S / 120)
            for name, process in watched.items():
                samples[name].append(resident_bytes(process))
        for thread in threads:
            thread.join()
        assert all(process.is_running() for process in watched.values()), "a process was started anew"
        with studio.http as http:
            metrics = http.get("/metrics").text
    lines = [line for line in metrics.splitlines() if line.startswith("undercrank_jobs{")]
    counts = {line.split('"')[1]: float(line.split()[-1]) for line in lines}
    print({"asked": seen.asked, "completed": seen.completed, "kept": counts})
    for name, taken in samples.items():  # the first quarter warms up
        quarter = len(taken) // 4
        early, late = statistics.median(taken[quarter : 2 * quarter]), statistics.median(taken[-quarter:])
        print(f"{name}: {early / 2**20:.1f} MiB in the second quarter, {late / 2**20:.1f} MiB in the last")
    assert seen.otherwise == [] and seen.completed == seen.asked
    assert counts["queued"] == counts["in_progress"] == counts["failed"] == 0
    for name, taken in samples.items():
        quarter = len(taken) // 4
        growth = statistics.median(taken[-quarter:]) / statistics.median(taken[quarter : 2 * quarter])
        assert growth <= GROWTH, f"the {name} grew by {growth:.3f}"
