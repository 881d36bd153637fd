"""The app: routes, doors and errors put together. It asks the job store and the planner; torch is never imported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from undercrank import __version__
from undercrank.jobs import StoreUnavailable
from undercrank.records import BadInput, UndercrankError
from undercrank.server import health, insight, models, pages, videos
from undercrank.server.doors import Doors, answer, problem
from undercrank.server.logs import Told, log
from undercrank.server.openapi import describe
from undercrank.server.studio import Studio

LOOK_S, TIDY_S = 1.0, 3600.0
"How often it is looked whether workers are alive, and for pictures that no clip needs any more."


def make_app(studio: Studio) -> FastAPI:
    """The studio as an ASGI app. Its lifespan watches the workers; who made the studio closes its store."""
    app = FastAPI(
        title="undercrank",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
        lifespan=_lifespan,
    )
    app.state.studio = studio
    for part in (videos, models, insight, health, pages):
        app.include_router(part.router)
    app.mount("/static", StaticFiles(directory=pages.STATIC), name="static")
    app.add_exception_handler(UndercrankError, _foreseen)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(Exception, _unforeseen)
    app.add_middleware(Doors, hosts=studio.hosts)
    app.add_middleware(Told, meters=studio.meters)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    studio = app.state.studio
    tasks = [_every(LOOK_S, studio.look_around), _every(TIDY_S, studio.tidy)]
    running = [asyncio.create_task(task) for task in tasks]
    yield
    for task in running:
        task.cancel()


async def _every(seconds: float, do: Callable[[], None]) -> None:
    """Again and again, in a thread. A store that is away is waited for; a disk that errs is tried again."""
    while True:
        try:
            await run_in_threadpool(do)
        except (StoreUnavailable, OSError) as error:
            log.warning("housekeeping failed", reason=str(error))
        await asyncio.sleep(seconds)


# --------------------------------------------------------------------------- errors


CODES = {404: "not_found", 405: "method_not_allowed"}


async def _foreseen(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, UndercrankError)
    return answer(error)


async def _invalid(_: HttpRequest, error: Exception) -> Response:
    """A parameter of the address or a header, as FastAPI checks it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return answer(BadInput(f"{name}: {first['msg']}", field=name))


async def _of_framework(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    told = problem(error.status_code, CODES.get(error.status_code, "bad_request"), message)
    told.headers.update(error.headers or {})
    return told


async def _unforeseen(_: HttpRequest, error: Exception) -> Response:
    """A bug of ours: the log has the traceback, the client the fact."""
    log.error("unforeseen error", exc_info=error)
    return problem(500, "internal_error", "an error that was not foreseen: the server's log says more")
