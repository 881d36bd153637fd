"""What a clip left on disk, handed out by variant. The store names the files; a client never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from starlette.responses import FileResponse, Response

from undercrank.jobs import Job, State
from undercrank.records import UndercrankError
from undercrank.server.studio import Studio
from undercrank.shelf import live_picture
from undercrank.video import safe_stem

Variant = Literal["video", "thumbnail", "preview", "master", "report"]
MEDIA = {
    ".mp4": "video/mp4",
    ".mkv": "video/x-matroska",
    ".webp": "image/webp",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".json": "application/json",
}
CONTENT = {
    "responses": {
        "200": {"content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in MEDIA.values()}},
        "204": {"description": "The preview of a clip in the making that has no picture yet."},
        "206": {"description": "The range that was asked for."},
    }
}
FOR_EVER, NOT_AT_ALL = "private, max-age=31536000, immutable", "no-store"
"A clip is never changed; a look at one in the making is soon another."


class NotYet(UndercrankError):
    http_status: ClassVar[int] = 409
    code: ClassVar[str] = "not_ready"


class NoFile(UndercrankError):
    http_status: ClassVar[int] = 404
    code: ClassVar[str] = "no_such_variant"


def report_of(job: Job) -> dict[str, Any] | None:
    return (job.result or {}).get("report")


def variants_of(studio: Studio, job: Job) -> list[str]:
    return [name for name in (job.result or {}).get("files", {})]


def response(studio: Studio, job: Job, variant: str) -> Response:
    """Raises NotYet, NoFile."""
    if variant == "preview" and job.state is State.IN_PROGRESS:
        return live_look(studio, job)
    if job.state is not State.COMPLETED:
        raise NotYet(f"{job.id} is {job.state.value}: there is a file once it is completed")
    name = (job.result or {}).get("files", {}).get(variant)
    if name is None:
        raise NoFile(f"{job.id} has no {variant}: it has {', '.join(variants_of(studio, job))}")
    file = inside(studio.folder, name)
    if file is None:
        raise NoFile(f"the {variant} of {job.id} is gone: its file was removed")
    shown = f"{safe_stem(str(job.request.get('prompt', '')))}-{job.seed}{file.suffix}"
    return FileResponse(
        file,
        media_type=MEDIA.get(file.suffix, "application/octet-stream"),
        filename=shown,
        content_disposition_type="inline",
        headers={"cache-control": FOR_EVER},
    )


def live_look(studio: Studio, job: Job) -> Response:
    """The newest picture of a clip in the making; 204 while there is none. It may go at any moment: read at once."""
    live = live_picture(studio.folder, job)
    try:
        picture = live.read_bytes()
    except FileNotFoundError:
        return Response(status_code=204, headers={"cache-control": NOT_AT_ALL})
    return Response(picture, media_type=MEDIA[live.suffix], headers={"cache-control": NOT_AT_ALL})


def inside(folder: Path, name: str) -> Path | None:
    """The file of that name, if it is a file and lies in the folder, links followed."""
    file = (folder / name).resolve()
    return file if file.is_relative_to(folder.resolve()) and file.is_file() else None
