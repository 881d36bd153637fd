"""Pictures that came in: decoded within limits, kept under names of ours, removed when no clip needs them.

A picture is known by its content, never by its name or by what the client calls it. It is decoded within the limits of
`images` and written anew, so that nothing but its pixels is kept.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from undercrank.images import notes, open_image
from undercrank.jobs import Job, Store
from undercrank.records import BadInput
from undercrank.server.bodies import REFERENCE

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "pictures"
UNUSED_S = 3600.0
"How long a picture is kept for which there is no clip: one may just be about to be stored."


def decoded(picture: bytes) -> Image:
    """Upright and RGB. Raises BadInput: no picture by its content, broken, or too large."""
    try:
        return open_image(picture)
    except BadInput as error:
        raise BadInput(str(error), field=REFERENCE) from error


def notes_on(image: Image | None) -> list[str]:
    """What was done to a picture that came in: turned, scaled to 8 bits, put on a background."""
    return list(notes(image)) if image is not None else []


def keep_picture(image: Image, folder: Path) -> str:
    """Write it as PNG under a name of ours, the hash of its pixels; the name within `folder`."""
    raw = io.BytesIO()
    image.save(raw, format="PNG")
    name = f"{FOLDER}/{hashlib.sha256(raw.getvalue()).hexdigest()}.png"
    (folder / FOLDER).mkdir(exist_ok=True)
    part = folder / f"{name}.{secrets.token_hex(8)}.part"
    part.write_bytes(raw.getvalue())
    os.replace(part, folder / name)
    return name


def remove_unused(folder: Path, store: Store) -> None:
    """Pictures whose clips are gone."""
    old = [file for file in (folder / FOLDER).glob("*") if time.time() - file.stat().st_mtime > UNUSED_S]
    if old:
        used = {job.request.get("image") for job in _all_jobs(store)}
        for file in old:
            if f"{FOLDER}/{file.name}" not in used:
                file.unlink(missing_ok=True)


def _all_jobs(store: Store) -> Iterator[Job]:
    after = None
    while (page := store.list(after=after, limit=100)).jobs:
        yield from page.jobs
        after = page.jobs[-1].id
