"""Bodies in: JSON or a form, strictly read, and the picture that may come with them.

URLs are not fetched: only `data:` is read. The name of a file is not even looked at.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, ClassVar

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from undercrank.records import BadInput
from undercrank.server.schemas import read_json

REFERENCE = "input_reference"
MAX_FIELDS = 64
MAX_FIELD_BYTES = 2**20
URL_NAMES = {f"{REFERENCE}[image_url]": REFERENCE}
"How clients spell a nested field in a form."
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


class UnknownMedia(BadInput):
    http_status: ClassVar[int] = 415
    code: ClassVar[str] = "unsupported_media_type"


async def read_body(http: HttpRequest) -> tuple[dict[str, Any], bytes | None]:
    """(fields, bytes of the picture or None). Raises BadInput."""
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind in FORMS:
        return await _read_form(http)
    if kind != "application/json":
        raise UnknownMedia(f"content-type {kind[:60]}: send application/json or multipart/form-data")
    data = read_json(await http.body())
    if not isinstance(data, dict):
        raise BadInput(f"the body must be an object, not {type(data).__name__}")
    return data, _picture_of(data)


async def _read_form(http: HttpRequest) -> tuple[dict[str, Any], bytes | None]:
    fields: dict[str, Any] = {}
    try:
        async with http.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES) as form:
            for sent, value in form.multi_items():
                name = URL_NAMES.get(sent, sent)
                if name in fields:
                    raise BadInput(f"{name[:60]} is given twice", field=name[:60])
                fields[name] = await value.read() if isinstance(value, UploadFile) else value
    except HTTPException as error:  # Starlette's own refusal of a broken form
        raise BadInput(f"the form cannot be read: {str(error.detail)[:200]}") from error
    for name, value in fields.items():
        if isinstance(value, bytes) and name != REFERENCE:
            raise BadInput(f"{name[:60]}: no file is expected here", field=name[:60])
    return fields, _picture_of(fields)


def _picture_of(fields: dict[str, Any]) -> bytes | None:
    """Takes the picture out of the fields."""
    if isinstance(fields.get(REFERENCE), bytes):
        picture: bytes = fields.pop(REFERENCE)
        return picture
    given = fields.get(REFERENCE)
    url = given.get("image_url") if isinstance(given, dict) and set(given) == {"image_url"} else given
    if not isinstance(url, str):
        return None  # absent, or no picture at all: the schema says so
    del fields[REFERENCE]
    return from_data_url(url)


def from_data_url(url: str) -> bytes:
    """The bytes of `data:image/png;base64,...`. Nothing is fetched. Raises BadInput."""
    head, comma, body = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise BadInput(
            f"{REFERENCE} must be a file of the form or a data: URL; other addresses and paths are not read",
            field=REFERENCE,
        )
    if not head.endswith(";base64"):
        raise BadInput(f"{REFERENCE}: a data: URL in base64 is needed", field=REFERENCE)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInput(f"{REFERENCE}: this is no base64: {error}", field=REFERENCE) from error
