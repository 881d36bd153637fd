"""Where a clip's files lie in the data folder. The worker puts them there, the server hands them out.

Each attempt has a folder of its own, `videos/ID.ATTEMPT`: a worker that was given up for dead and wakes again writes
beside its successor's files, never over them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from undercrank.jobs import Job, Lease

VIDEOS = "videos"


def attempt_folder(data: Path, lease: Lease) -> Path:
    return data / VIDEOS / f"{lease.job_id}.{lease.attempt}"


def remove_earlier_attempts(data: Path, lease: Lease) -> None:
    """What attempts before this one left. Should one of them wake again, it finds no place to write to."""
    for attempt in range(1, lease.attempt):
        shutil.rmtree(data / VIDEOS / f"{lease.job_id}.{attempt}", ignore_errors=True)


def live_picture(data: Path, job: Job) -> Path:
    """The newest preview of a job in progress, a JPEG; there after its first `preview` event, gone when it ends."""
    return data / VIDEOS / f"{job.id}.{job.attempts}" / "live.jpg"


def stored_name(data: Path, file: Path) -> str:
    """As it stands in a job's result: relative to the data folder, so that the folder may be moved."""
    return file.relative_to(data).as_posix()


def remove_files(data: Path, job: Job) -> None:
    """All that any attempt of this job left. Nothing there is no error."""
    for folder in sorted((data / VIDEOS).glob(f"{job.id}.*")):
        shutil.rmtree(folder)
