"""Where files lie: a folder for each attempt, which go together with their job and leave others alone."""

from __future__ import annotations

from pathlib import Path

from undercrank.jobs import Lease, Store
from undercrank.shelf import attempt_folder, live_picture, remove_earlier_attempts, remove_files, stored_name


def test_files_of_every_attempt_go_with_their_job_and_those_of_others_stay(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Store.open(f"sqlite:///{tmp_path}/jobs.db") as store:
        for _ in range(2):
            store.enqueue(owner="ann", model="m", request={})
        claims = []
        for worker in ("w1", "w1", "w2"):
            claim = store.claim(worker)
            assert claim is not None
            claims.append(claim)
            folder = attempt_folder(data, claim.lease)
            folder.mkdir(parents=True)
            assert live_picture(data, claim.job).parent == folder
            live_picture(data, claim.job).touch()
            if len(claims) == 1:
                store.worker_lost(worker)
    first, again, other = claims
    assert first.job.id == again.job.id != other.job.id
    assert stored_name(data, live_picture(data, other.job)) == f"videos/{other.job.id}.1/live.jpg"
    remove_files(data, again.job)
    assert [folder.name for folder in (data / "videos").iterdir()] == [f"{other.job.id}.1"]
    remove_files(data, again.job)


def test_an_attempt_clears_what_earlier_ones_left(tmp_path: Path) -> None:
    leases = [Lease(job_id="video_1", token="x", attempt=attempt) for attempt in (1, 2, 3)]
    for lease in leases:
        attempt_folder(tmp_path, lease).mkdir(parents=True)
    remove_earlier_attempts(tmp_path, leases[1])
    assert sorted(folder.name for folder in (tmp_path / "videos").iterdir()) == ["video_1.2", "video_1.3"]
