"""The page: templates, and what a browser signs in and out with. All it loads comes from this server."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from fastapi.templating import Jinja2Templates
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from undercrank.records import Fidelity
from undercrank.server.auth import COOKIE, COOKIE_S, LOCAL, NotAllowed, check_key, sealed
from undercrank.server.bodies import read_body
from undercrank.server.schemas import Health, Login, read
from undercrank.server.studio import Studio, TheStudio, who_asks

router = APIRouter(tags=["page"])
PAGE = Path(__file__).parent / "page"
STATIC = PAGE / "static"
TEMPLATES = Jinja2Templates(directory=PAGE / "templates")

WORDS = {
    Fidelity.EXACT: "Bit for bit the film of the stock pipeline.",
    Fidelity.FAITHFUL: "The same film, up to the model's own rounding noise.",
    Fidelity.QUALITY: "Also levers whose distance was measured and is meant to be hardly visible.",
    Fidelity.BALANCED: "Faster. A difference can be seen, and its distance is stated.",
    Fidelity.FAST: "Fastest. A plain difference, and its distance is stated.",
}


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
def index(http: HttpRequest, studio: TheStudio) -> Any:
    return page(http, studio, "studio", fidelity=WORDS, default=Fidelity.FAITHFUL)


@router.get("/compare", response_class=HTMLResponse, include_in_schema=False)
def compare(http: HttpRequest, studio: TheStudio) -> Any:
    return page(http, studio, "compare")


@router.get("/ledger", response_class=HTMLResponse, include_in_schema=False)
def ledger(http: HttpRequest, studio: TheStudio) -> Any:
    return page(http, studio, "ledger")


def page(http: HttpRequest, studio: Studio, name: str, **context: Any) -> Any:
    """That page, or the one that asks for a key. It holds no clip: its scripts fetch what its owner may see."""
    try:
        owner = who_asks(http, studio).id
    except NotAllowed:
        name, owner = "login", None
    context |= {"here": name, "owner": owner, "local": LOCAL, "modules": modules_of(f"{name}.js")}
    return TEMPLATES.TemplateResponse(http, f"{name}.html", context)


@functools.cache
def modules_of(script: str) -> tuple[str, ...]:
    """All that a script imports, and what that imports: a browser that is told can fetch it all at once."""
    found: list[str] = []
    waiting = [script]
    while waiting:
        text = (STATIC / waiting.pop()).read_text(encoding="utf-8")
        fresh = [name for name in re.findall(r'from "\./([\w.]+)"', text) if name not in found]
        found += fresh
        waiting += fresh
    return tuple(sorted(found))


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
