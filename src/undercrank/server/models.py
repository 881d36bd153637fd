"""The routes about what can be made and how: models, their loading and unloading, levers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from undercrank import families
from undercrank.jobs import Command, NoSuchJob, State
from undercrank.levers import ORDER
from undercrank.records import Family
from undercrank.server.bodies import read_body
from undercrank.server.schemas import (
    LeverCard,
    LeverList,
    ModelCard,
    ModelCommand,
    ModelCommandList,
    ModelList,
    ModelLoading,
    ModelName,
    as_error,
    read,
)
from undercrank.server.studio import Studio, TheOwner, TheStudio

router = APIRouter(tags=["models"])
MODEL_BODY = {"x-body": "ModelName"}
CommandId = Annotated[int, Path(ge=1, le=2**31 - 1)]


@router.get("/v1/models", response_model=ModelList)
def list_models(studio: TheStudio, owner: TheOwner) -> Any:
    """Every model that can be named, its sizes and defaults, and whether a worker holds it."""
    held = memory_of(studio)
    return ModelList(data=[card_of(family, held) for family in families.FAMILIES if can_be_served(family)])


@router.post("/v1/models/load", response_model=ModelCommand, status_code=202, openapi_extra=MODEL_BODY)
async def load(http: HttpRequest, studio: TheStudio, owner: TheOwner) -> Any:
    """Ask a worker to read a model into memory; follow it under `/v1/models/commands/{id}`."""
    return await run_in_threadpool(command, studio, owner.id, "load", (await read_body(http))[0])


@router.post("/v1/models/unload", response_model=ModelCommand, status_code=202, openapi_extra=MODEL_BODY)
async def unload(http: HttpRequest, studio: TheStudio, owner: TheOwner) -> Any:
    """Ask the worker that holds a model to give its memory back."""
    return await run_in_threadpool(command, studio, owner.id, "unload", (await read_body(http))[0])


@router.get("/v1/models/commands", response_model=ModelCommandList)
def commands(studio: TheStudio, owner: TheOwner) -> Any:
    """The newest loads and unloads of yours."""
    mine = [each for each in studio.store.commands(limit=100) if each.owner == owner.id]
    return ModelCommandList(data=[as_command(each) for each in mine])


@router.get("/v1/models/commands/{command_id}", response_model=ModelCommand)
def follow(command_id: CommandId, studio: TheStudio, owner: TheOwner) -> Any:
    return as_command(the_command(studio, command_id, owner.id))


@router.post("/v1/models/commands/{command_id}/cancel", response_model=ModelCommand)
def cancel(command_id: CommandId, studio: TheStudio, owner: TheOwner) -> Any:
    """Stop it; what was read so far is given back."""
    the_command(studio, command_id, owner.id)
    return as_command(studio.store.cancel_command(command_id))


@router.get("/v1/models/{model_id:path}", response_model=ModelCard)
def retrieve(model_id: str, studio: TheStudio, owner: TheOwner) -> Any:
    family = families.find(model_id)
    if family is None:
        raise NoSuchJob(f"there is no model {model_id[:60]!r}: `/v1/models` lists them")
    return card_of(family, memory_of(studio))


@router.get("/v1/levers", response_model=LeverList)
def list_levers(studio: TheStudio, owner: TheOwner) -> Any:
    """The levers of this version: what each does to the film, what it costs, what was measured."""
    cards = [
        LeverCard(name=lever.name, knobs=list(lever.knobs or (lever.name,)), summary=lever.summary, about=lever.about())
        for lever in ORDER
    ]
    return LeverList(data=cards)


# --------------------------------------------------------------------------- how


def command(studio: Studio, owner: str, action: str, fields: dict[str, Any]) -> ModelCommand:
    family = families.family(read(ModelName, fields).model)
    return as_command(studio.store.command(action, family.id, owner=owner))


def the_command(studio: Studio, command_id: int, owner: str) -> Command:
    """Somebody else's looks like none."""
    found = studio.store.get_command(command_id)
    if found.owner != owner:
        raise NoSuchJob(f"there is no command {command_id}")
    return found


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is held, and what is on its way."""

    loaded: frozenset[str]
    loading: Mapping[str, ModelLoading]


def memory_of(studio: Studio) -> Memory:
    """What living workers hold and load, and what waits for one."""
    alive = [worker for worker in studio.store.workers() if worker.id in studio.watch.alive]
    waiting = [each.model for each in studio.store.commands(limit=100) if is_waiting(each)]
    under_way = {worker.loading["model"]: worker.loading for worker in alive if worker.loading}
    return Memory(
        loaded=frozenset(model for worker in alive for model in worker.models),
        loading={
            **{model: ModelLoading(state="queued") for model in waiting},
            **{model: ModelLoading.model_validate(how_far) for model, how_far in under_way.items()},
        },
    )


def is_waiting(command: Command) -> bool:
    return command.action == "load" and command.state is State.QUEUED


def can_be_served(family: Family) -> bool:
    """A model that needs a video goes in by the Python door only."""
    return not family.traits & {"video_input", "control_input"}


def card_of(family: Family, held: Memory) -> ModelCard:
    return ModelCard(
        id=family.id,
        owned_by=family.repo.partition("/")[0] if "/" in family.repo else "undercrank",
        title=family.title,
        task=family.task,
        width=family.width,
        height=family.height,
        size_multiple=family.size_multiple,
        trained_sizes=list(family.trained_sizes),
        num_frames=family.num_frames,
        frame_step=family.frame_step,
        fps=str(family.fps),
        num_inference_steps=family.num_inference_steps,
        guidance_scale=family.guidance_scale,
        negative_prompt=family.negative_prompt,
        takes_image="image_input" in family.traits,
        note=family.note,
        loaded=family.id in held.loaded,
        loading=held.loading.get(family.id),
    )


def as_command(found: Command) -> ModelCommand:
    return ModelCommand(
        id=found.id,
        action=found.action,
        model=found.model,
        status=found.state.value,
        stage="cancelling" if found.cancel_requested and found.ended_at is None else found.stage,
        progress=found.progress,
        created_at=int(found.created_at),
        completed_at=int(found.ended_at) if found.ended_at else None,
        error=as_error(found.error),
    )
