"""The routes of `/v1/videos`: ask for a clip, follow it, fetch it, stop it, delete it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse

from undercrank.jobs import Job
from undercrank.records import BadInput, Plan, Request
from undercrank.server import events, files
from undercrank.server.auth import Owner
from undercrank.server.bodies import read_body
from undercrank.server.pictures import decoded, keep_picture, notes_on
from undercrank.server.schemas import (
    PlanAnswer,
    Remix,
    Video,
    VideoCreate,
    VideoDeleted,
    VideoList,
    as_plan_answer,
    as_request,
    read,
)
from undercrank.server.shown import as_video, as_videos
from undercrank.server.studio import Studio, TheOwner, TheStudio

router = APIRouter(tags=["videos"])
POLL_AFTER_MS = "500"
IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", max_length=255, description="The same key gives the same clip.")
]
VIDEO_BODY = {"x-body": "VideoCreate"}
REMIX_BODY = {"x-body": "Remix"}


@router.post("/v1/videos", response_model=Video, openapi_extra=VIDEO_BODY)
async def create(http: HttpRequest, studio: TheStudio, owner: TheOwner, idempotency_key: IdempotencyKey = None) -> Any:
    """Ask for a clip. It is checked and planned at once, and made when its turn comes."""
    fields, picture = await read_body(http)
    job = await run_in_threadpool(ask_for, studio, owner, fields, picture, idempotency_key)
    return await run_in_threadpool(as_video, studio, job)


@router.post("/v1/plan", response_model=PlanAnswer, openapi_extra=VIDEO_BODY)
async def plan(http: HttpRequest, studio: TheStudio, owner: TheOwner) -> Any:
    """What would run, how long it would take and why; nothing is started."""
    fields, picture = await read_body(http)
    return as_plan_answer((await run_in_threadpool(planned, studio, fields, picture)).plan)


@router.get("/v1/videos", response_model=VideoList)
def list_videos(
    studio: TheStudio,
    owner: TheOwner,
    after: Annotated[str | None, Query(max_length=64, description="The id of the last one seen.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Any:
    """Your clips, newest first."""
    page = studio.store.list(owner=owner.id, after=after, limit=limit, order=order)
    data = as_videos(studio, page.jobs)
    ids = [video.id for video in data]
    return VideoList(
        data=data, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=page.has_more
    )


def the_job(video_id: str, studio: TheStudio, owner: TheOwner) -> Job:
    """Somebody else's clip looks like none."""
    return studio.store.get(video_id, owner=owner.id)


TheJob = Annotated[Job, Depends(the_job)]


@router.get("/v1/videos/{video_id}", response_model=Video)
def retrieve(job: TheJob, studio: TheStudio, response: Response) -> Any:
    response.headers["openai-poll-after-ms"] = POLL_AFTER_MS
    return as_video(studio, job)


@router.delete("/v1/videos/{video_id}", response_model=VideoDeleted)
def delete(job: TheJob, studio: TheStudio, owner: TheOwner) -> Any:
    """Stop it if it is being made, and remove it with its files."""
    studio.store.delete(job.id, owner=owner.id)
    return VideoDeleted(id=job.id)


@router.post("/v1/videos/{video_id}/cancel", response_model=Video)
def cancel(job: TheJob, studio: TheStudio, owner: TheOwner) -> Any:
    """Stop it: `cancelled` once work has stopped. One that has ended stays as it is."""
    return as_video(studio, studio.store.cancel(job.id, owner=owner.id))


@router.post("/v1/videos/{video_id}/remix", response_model=Video, openapi_extra=REMIX_BODY)
async def remix(http: HttpRequest, job: TheJob, studio: TheStudio, owner: TheOwner, key: IdempotencyKey = None) -> Any:
    """The same recipe, seed included, with another prompt."""
    fields, picture = await read_body(http)
    if picture is not None:
        raise BadInput("a remix keeps its picture: leave input_reference out", field="input_reference")
    made = await run_in_threadpool(remix_of, studio, owner, job, read(Remix, fields), key)
    return await run_in_threadpool(as_video, studio, made)


@router.head("/v1/videos/{video_id}/content", response_class=FileResponse, include_in_schema=False)
@router.get("/v1/videos/{video_id}/content", response_class=FileResponse, openapi_extra=files.CONTENT)
def content(job: TheJob, studio: TheStudio, variant: files.Variant = "video") -> Any:
    """The clip, or what goes with it. Ranges are served."""
    return files.response(studio, job, variant)


def where_to_go_on(job: TheJob, studio: TheStudio, last_event_id: events.LastEventId = None) -> int:
    after = events.number_of(last_event_id)
    events.refuse_if_over(studio, job.id, after)
    return after


@router.get("/v1/videos/{video_id}/events", response_class=EventSourceResponse)
async def follow(
    job: TheJob, studio: TheStudio, after: Annotated[int, Depends(where_to_go_on)]
) -> AsyncIterator[ServerSentEvent]:
    """All that happens to it, as server-sent events, until it has ended. `Last-Event-ID` goes on where it was."""
    async for event in events.of_job(studio, job.id, after):
        yield event


def where_owner_goes_on(
    studio: TheStudio,
    owner: TheOwner,
    last: Annotated[int | None, Depends(events.number_of_header)],
    since: Annotated[
        Literal["now", "living"],
        Query(description="living: begin where the oldest clip that is not over was asked for."),
    ] = "now",
) -> int | None:
    return events.before_the_living(studio, owner.id) if last is None and since == "living" else last


@router.get("/v1/events", response_class=EventSourceResponse)
async def follow_all(
    studio: TheStudio, owner: TheOwner, after: Annotated[int | None, Depends(where_owner_goes_on)]
) -> AsyncIterator[ServerSentEvent]:
    """All that happens to your clips from now on, or from behind `Last-Event-ID`, without end."""
    async for event in events.of_owner(studio, owner.id, after):
        yield event


# --------------------------------------------------------------------------- from a body to a job


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A clip that somebody asked for, understood and planned; nothing is stored yet."""

    request: Request
    plan: Plan
    options: dict[str, Any]


def planned(studio: Studio, fields: dict[str, Any], picture: bytes | None, *, keep: bool = False) -> Asked:
    """Raises whatever a plan can raise. keep: the picture is wanted later."""
    asked = read(VideoCreate, fields)
    image = None if picture is None else decoded(picture)
    name = None if image is None else keep_picture(image, studio.folder) if keep else "input_reference"
    request = as_request(asked, image=name)
    options = {"master": asked.master, "picture_notes": notes_on(image)}
    return Asked(request=request, plan=studio.plan(request), options=options)


def ask_for(
    studio: Studio, owner: Owner, fields: dict[str, Any], picture: bytes | None, idempotency_key: str | None
) -> Job:
    return enqueue(studio, owner, planned(studio, fields, picture, keep=True), idempotency_key)


def remix_of(studio: Studio, owner: Owner, job: Job, asked: Remix, idempotency_key: str | None) -> Job:
    request = replace(Request.from_dict(job.request), prompt=asked.prompt)
    again = Asked(request=request, plan=studio.plan(request), options=job.options)
    return enqueue(studio, owner, again, idempotency_key, remixed_from=job.id)


def enqueue(
    studio: Studio, owner: Owner, asked: Asked, idempotency_key: str | None, *, remixed_from: str | None = None
) -> Job:
    """Store it with every gap filled, but for the seed, which the store draws, and the dtype, which is its worker's."""
    request = replace(asked.plan.request, dtype=asked.request.dtype)
    job, _ = studio.store.enqueue(
        owner=owner.id,
        model=request.model,
        request=request.to_dict(),
        options=asked.options,
        cost=cost(request),
        idempotency_key=idempotency_key,
        remixed_from=remixed_from,
        limits=studio.limits_of(owner),
    )
    return job


def cost(request: Request) -> int:
    """Pixels x frames x steps."""
    assert request.width and request.height and request.num_frames and request.num_inference_steps
    return request.width * request.height * request.num_frames * request.num_inference_steps
