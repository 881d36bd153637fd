"""Is it alive, can it serve, and what has it done: for probes, for people and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Response

from undercrank import __version__
from undercrank.jobs import StoreUnavailable
from undercrank.server.meters import MEDIA_TYPE
from undercrank.server.schemas import Health, Readiness, Version
from undercrank.server.studio import LedgerBroken, Studio, TheOwner, TheStudio

router = APIRouter(tags=["health"])


@router.get("/healthz", response_model=Health)
@router.get("/health", response_model=Health, include_in_schema=False)
async def healthz() -> Any:
    """This process answers."""
    return Health()


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
def readyz(studio: TheStudio, response: Response) -> Any:
    """A clip that is asked for now would be made: the store can be written to and a worker lives."""
    reasons = list(why_not_ready(studio))
    response.status_code = 503 if reasons else 200
    return Readiness(ready=not reasons, reasons=reasons, workers=len(studio.watch.alive))


@router.get("/version", response_model=Version)
async def version() -> Any:
    return Version(version=__version__)


@router.get("/metrics", response_class=Response)
def metrics(studio: TheStudio, owner: TheOwner) -> Any:
    """Counts and times for Prometheus, over all owners; never a prompt, never the id of a clip."""
    return Response(studio.meters.text(), media_type=MEDIA_TYPE)


def why_not_ready(studio: Studio) -> Iterator[str]:
    try:
        studio.check()
    except (StoreUnavailable, LedgerBroken) as error:
        yield str(error)
        return
    if not studio.watch.alive:
        yield "no worker is alive: what is asked for waits in the queue"
