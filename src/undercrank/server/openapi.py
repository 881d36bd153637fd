"""The description of the API. `undercrank serve --openapi` prints it; a copy is kept beside this file.

Bodies are read by hand, so that a form and JSON go the same way: their schemas are put in here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from undercrank.server.schemas import ErrorBody, Login, ModelName, Remix, VideoCreate

KEPT = Path(__file__).with_name("openapi.json")
BODIES = (VideoCreate, Remix, ModelName, Login)
ERROR = {
    "description": "What went wrong, and what to do about it.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}
REFERENCE = "input_reference"


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made once for each app."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version="1", routes=app.routes, summary="Clips, one job each")
        schemas = document["components"]["schemas"]
        schemas |= body_schemas()
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # said as 400, in our own shape
                operation["responses"]["default"] = {"$ref": "#/components/responses/Error"}
                if name := operation.pop("x-body", None):
                    operation["requestBody"] = body(name)
        document["components"]["responses"] = {"Error": ERROR}
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"key": []}]
        app.openapi_schema = document
    return app.openapi_schema


def body(name: str) -> dict[str, Any]:
    form = f"{name}Form" if name == VideoCreate.__name__ else name
    ref = "#/components/schemas/"
    return {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": ref + name}},
            "multipart/form-data": {"schema": {"$ref": ref + form}},
        },
    }


def body_schemas() -> dict[str, Any]:
    _, found = models_json_schema(
        [(model, "validation") for model in (*BODIES, ErrorBody)], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = found["$defs"]
    form = copy.deepcopy(schemas[VideoCreate.__name__])
    form["title"] = f"{VideoCreate.__name__}Form"
    form["properties"][REFERENCE] = {
        "type": "string",
        "format": "binary",
        "description": "First frame, for models that take one: PNG, JPEG, WebP, TIFF or BMP.",
    }
    return schemas | {form["title"]: form}
