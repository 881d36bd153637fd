"""The page: templates, and what a browser signs in and out with. All it loads comes from this server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from fastapi.templating import Jinja2Templates
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from undercrank.server.auth import COOKIE, COOKIE_S, NotAllowed, check_key, sealed
from undercrank.server.bodies import read_body
from undercrank.server.schemas import Health, Login, read
from undercrank.server.shown import as_videos
from undercrank.server.studio import TheStudio, who_asks

router = APIRouter(tags=["page"])
PAGE = Path(__file__).parent / "page"
STATIC = PAGE / "static"
TEMPLATES = Jinja2Templates(directory=PAGE / "templates")


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
def index(http: HttpRequest, studio: TheStudio) -> Any:
    try:
        owner = who_asks(http, studio)
    except NotAllowed:
        return TEMPLATES.TemplateResponse(http, "index.html", {"signed_in": False, "videos": []})
    videos = as_videos(studio, studio.store.list(owner=owner.id).jobs)
    return TEMPLATES.TemplateResponse(http, "index.html", {"signed_in": True, "videos": videos})


@router.post("/login", response_model=Health, openapi_extra={"x-body": "Login"})
async def login(http: HttpRequest, studio: TheStudio, response: Response) -> Any:
    """A cookie for a key, for this browser only; the key itself is not kept there."""
    asked = read(Login, (await read_body(http))[0])
    key = await run_in_threadpool(check_key, asked.key, studio.store)
    response.set_cookie(
        COOKIE,
        sealed(key.id, studio.secret),
        max_age=COOKIE_S,
        httponly=True,
        samesite="strict",
        secure=http.headers.get("origin", "").startswith("https:"),  # also behind a proxy that speaks TLS for us
    )
    return Health()


@router.post("/logout", response_model=Health)
async def logout(response: Response) -> Any:
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return Health()
