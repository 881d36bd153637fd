"""The wire: what clients may send and what they get back, in the shape of `/v1/videos`.

Unknown fields are refused by name with the nearest known one. Numbers may come as strings, since multipart forms have
nothing else; nothing is rounded and nothing is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from undercrank import families
from undercrank.jobs import JobError as StoredError
from undercrank.records import BadInput, Family, Fidelity, Plan, Request, shown
from undercrank.words import as_fps, as_size

Body = TypeVar("Body", bound=BaseModel)

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
MAX_WORD_CHARS = 2000
"A lever's setting in a request: a word, a number, a mask of steps."


def _no_bool(value: Any) -> Any:
    """Python takes true for 1; a person who writes it means something else."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value.strip() if isinstance(value, str) else value


def _as_word(value: Any) -> Any:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if isinstance(value, int | float) else value


Whole = Annotated[int, BeforeValidator(_no_bool, json_schema_input_type=int | str)]
Real = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_no_bool, json_schema_input_type=float | str)]
Number = Annotated[str, BeforeValidator(_as_word, json_schema_input_type=float | str), Field(max_length=40)]
"A number that is kept as it was written: 24000/1001 is no float."
Setting = Annotated[
    str, BeforeValidator(_as_word, json_schema_input_type=str | float | bool), Field(max_length=MAX_WORD_CHARS)
]


# --------------------------------------------------------------------------- what clients send


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ImageReference(_Strict):
    """A picture as the newer clients send it; only `data:` URLs are read, nothing is fetched."""

    image_url: str


class Knobs(_Strict):
    """Every knob that a request may name, of this version's levers and of planned ones; the planner refuses the latter.

    Each takes auto (decide for me), off, on, or a setting of its lever.
    """

    transformer_cache: Setting | None = Field(None, description="Step cache: its kind, or auto, off.")
    transformer_cache_quality: Setting | None = Field(None, description="Step cache: a named quality.")
    transformer_cache_threshold: Setting | None = Field(
        None, description="Step cache: the error it may make before a step is computed again."
    )
    transformer_cache_budget: Setting | None = Field(None, description="Step cache: how many steps to compute.")
    transformer_cache_retention: Setting | None = Field(
        None, description="Step cache: the share of steps at the start that are all computed."
    )
    transformer_cache_mask: Setting | None = Field(
        None, description="Step cache: which steps to compute, as ones and zeros."
    )
    transformer_quant: Setting | None = Field(None, description="Number format of the denoiser's weights.")
    text_encoder_quant: Setting | None = Field(None, description="Number format of the text encoder's weights.")
    vae_quant: Setting | None = Field(None, description="Number format of the VAE's weights.")
    attention_backend: Setting | None = Field(None, description="Attention kernel.")
    cfg_parallel: Setting | None = Field(None, description="The two guidance branches on two devices.")
    compile: Setting | None = Field(None, description="Torch.compile, block by block.")
    cuda_graph: Setting | None = Field(None, description="The denoiser as one CUDA graph.")
    host_sync: Setting | None = Field(None, description="No waits of the host inside the loop.")
    text_trim: Setting | None = Field(None, description="No attention to padding of the text.")
    offload: Setting | None = Field(None, description="Weights in host memory, moved in as they are needed.")
    decode: Setting | None = Field(None, description="Latents become frames chunk by chunk.")
    prompt_cache: Setting | None = Field(None, description="A prompt is read once; its reader may wait on the host.")
    context_parallel: Setting | None = Field(None, description="One clip over several devices.")


KNOBS = tuple(Knobs.model_fields)


class VideoCreate(Knobs):
    """A clip that is asked for. What is left out is the model's own."""

    prompt: str = Field(description="What the film shows.")
    model: str = Field("flipbook", description="An id of `/v1/models`.", max_length=512)
    negative_prompt: str | None = Field(None, description="What it must not show.")
    size: str | None = Field(None, description="Pixels, WIDTHxHEIGHT.", examples=["832x480"], max_length=40)
    width: Whole | None = Field(None, description="Pixels.")
    height: Whole | None = Field(None, description="Pixels.")
    seconds: Number | None = Field(None, description="From the first frame to the last: (num_frames - 1) / fps.")
    num_frames: Whole | None = Field(None, description="Number of frames.")
    fps: Number | None = Field(None, description="Frames a second, 16 or 24000/1001.")
    num_inference_steps: Whole | None = Field(None, description="Denoising steps.")
    guidance_scale: Real | None = Field(None, description="Guidance; 1 or less: off.")
    guidance_scale_2: Real | None = Field(None, description="Guidance of the second expert, where there is one.")
    flow_shift: Real | None = Field(None, description="Shift of the noise schedule.")
    seed: Whole | None = Field(None, description="The same seed makes the same film; left out: the server draws one.")
    fidelity: Fidelity = Field(Fidelity.FAITHFUL, description="How far the film may move from the stock pipeline's.")
    input_reference: str | ImageReference | None = Field(
        None, description="First frame, for models that take one: a file of the form, or a data: URL."
    )
    master: bool = Field(False, description="Also keep a lossless master.")
    allow_denied: bool = Field(False, description="Use a setting that measured rows deny, where it is asked for.")


class Remix(_Strict):
    """The same recipe with another prompt."""

    prompt: str


class ModelName(_Strict):
    model: str = Field(max_length=512)


class Login(_Strict):
    key: str = Field(max_length=200)


def read(body: type[Body], data: Mapping[str, Any]) -> Body:
    """The body as its model. Raises BadInput naming the field that is wrong."""
    if not isinstance(data, Mapping):
        raise BadInput(f"the body must be an object, not {type(data).__name__}")
    refuse_unknown(data, body.model_fields)
    try:
        return body.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        reason = "is needed" if first["type"] == "missing" else str(first["msg"]).removeprefix("Value error, ")
        raise BadInput(f"{name or 'the body'}: {reason}", field=name) from error


def refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            near = get_close_matches(name[:60], known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise BadInput(f"unknown field {name[:60]!r}: {hint}", field=name[:60])


def read_json(raw: bytes) -> Any:
    """JSON, strictly: UTF-8, no key twice, no NaN. Raises BadInput."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is no JSON: {str(error)[:120]}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BadInput(f"{name[:60]} is given twice", field=name[:60])
        found[name] = value
    return found


def _no_constant(word: str) -> None:
    raise BadInput(f"{word} is no number that can be used")


# --------------------------------------------------------------------------- from the wire to a request


def as_request(asked: VideoCreate, *, image: str | None = None) -> Request:
    """The request as the planner takes it. Raises BadInput where two fields say different things.

    image: where the picture of `input_reference` was put.
    """
    family = families.family(asked.model)
    width, height = _size(asked)
    fps = as_fps(asked.fps)
    return Request(
        prompt=asked.prompt,
        negative_prompt=asked.negative_prompt,
        model=family.id,
        image=image,
        width=width,
        height=height,
        num_frames=_num_frames(asked, family, fps),
        fps=fps,
        num_inference_steps=asked.num_inference_steps,
        guidance_scale=asked.guidance_scale,
        guidance_scale_2=asked.guidance_scale_2,
        flow_shift=asked.flow_shift,
        seed=asked.seed,
        fidelity=asked.fidelity,
        allow_denied=asked.allow_denied,
        wishes=tuple((knob, value.strip()) for knob in KNOBS if (value := getattr(asked, knob)) is not None),
    )


def _size(asked: VideoCreate) -> tuple[int | None, int | None]:
    width, height = as_size(asked.size)
    if (asked.width is None) != (asked.height is None):
        absent = "height" if asked.height is None else "width"
        raise BadInput(f"{absent} is needed too: give both, or size", field=absent)
    if asked.width is None:
        return width, height
    if width is not None and (width, height) != (asked.width, asked.height):
        raise BadInput(f"size {asked.size} and {shown(asked.width)}x{shown(asked.height)} differ", field="size")
    return asked.width, asked.height


def _num_frames(asked: VideoCreate, family: Family, fps: Fraction | None) -> int | None:
    """Frames that last exactly `seconds` from the first to the last; else the two lengths next to it are named."""
    if asked.seconds is None:
        return asked.num_frames
    rate = family.fps if fps is None else fps
    if rate <= 0:
        raise BadInput(f"fps {rate}: must be above 0", field="fps")
    exact = _as_seconds(asked.seconds) * rate + 1
    lengths = families.nearest_frames(family, int(exact))
    if exact not in lengths:
        near = lengths if len(lengths) == 2 else (lengths[0], lengths[0] + family.frame_step)
        words = " or ".join(f"{in_seconds(n, rate)} ({n} frames)" for n in near)
        raise BadInput(f"seconds {asked.seconds} at {rate} fps: {family.title} can make {words}", field="seconds")
    num_frames = int(exact)
    if asked.num_frames not in (None, num_frames):
        raise BadInput(
            f"seconds {asked.seconds} at {rate} fps are {num_frames} frames, and num_frames says "
            f"{shown(asked.num_frames)}",
            field="seconds",
        )
    return num_frames


def _as_seconds(text: str) -> Fraction:
    try:
        seconds = as_fps(text)  # the same spelling: 4, 2.5, 10/3
    except BadInput:
        seconds = None
    if seconds is None or not 0 <= seconds <= 3600:
        raise BadInput(f"seconds {text!r}: write a number of seconds from 0 to 3600, such as 4 or 2.5", field="seconds")
    return seconds


def in_seconds(num_frames: int, fps: Fraction) -> str:
    """ "4", "2.5", and "81/29" where no short decimal says it."""
    seconds = (num_frames - 1) / fps
    short = f"{float(seconds):.6f}".rstrip("0").rstrip(".")
    return short if Fraction(short) == seconds else str(seconds)


# --------------------------------------------------------------------------- what clients get back


class Problem(BaseModel):
    """What went wrong, and what to do about it."""

    code: str
    message: str
    param: str | None = None
    type: str


class ErrorBody(BaseModel):
    error: Problem


class JobError(BaseModel):
    code: str
    message: str


class Video(BaseModel):
    """One clip, from the moment that it is accepted."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: int = Field(ge=0, le=100)
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    prompt: str
    size: str
    seconds: str
    remixed_from_video_id: str | None = None
    error: JobError | None = None
    # ------------------------------------------------ ours
    negative_prompt: str | None = None
    width: int
    height: int
    num_frames: int
    fps: str
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
    seed: int
    fidelity: Fidelity
    allow_denied: bool = False
    stage: str | None = Field(None, description="load, text, denoise, decode, encode; cancelling while it stops.")
    eta_s: float | None = None
    queue_position: int | None = Field(None, description="Jobs before this one; 0: the next.")
    attempts: int = 0
    promise: str | None = Field(None, description="exact, rounding or lossy.")
    inference_time_s: float | None = None
    peak_memory_mb: float | None = None
    variants: list[str] = Field(default_factory=list, description="What `/content` has of it.")
    request: dict[str, Any] = Field(description="The resolved request: every gap filled.")
    plan: dict[str, Any] | None = Field(
        description="What was decided, lever by lever, with reasons: as it ran, or as it would be now."
    )
    notes: list[str] = Field(default_factory=list)


class VideoList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class PlanAnswer(BaseModel):
    """What would run and why; nothing was started."""

    object: Literal["plan"] = "plan"
    request: dict[str, Any]
    plan: dict[str, Any]
    promise: str
    seconds: float | None = Field(description="Expected; null: unknown.")
    seconds_basis: str
    peak_bytes: int | None
    memory_basis: str
    notes: list[str]


class ModelLoading(BaseModel):
    """How far a model's load is."""

    state: str = Field(description="queued, reading, placing, engaging, warming, ready, failed or cancelled")
    component: str = Field(default="", description="What is read or placed, or the lever that is engaged.")
    bytes_done: int = 0
    bytes_total: int = 0


class ModelCard(BaseModel):
    """A model that this server can make clips with, and what it takes."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str
    title: str
    task: str
    width: int
    height: int
    size_multiple: int
    trained_sizes: list[tuple[int, int]]
    num_frames: int
    frame_step: int
    fps: str
    num_inference_steps: int
    guidance_scale: float
    negative_prompt: str | None
    takes_image: bool
    note: str
    loaded: bool = Field(description="A living worker has it in memory.")
    loading: ModelLoading | None = Field(description="A load of it that is under way, or waits for a worker.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelCommand(BaseModel):
    """A wish to a worker: load or unload a model."""

    id: int
    object: Literal["model.command"] = "model.command"
    action: str = Field(description="load or unload")
    model: str
    status: Status
    stage: str | None
    progress: int = Field(ge=0, le=100)
    created_at: int
    completed_at: int | None
    error: JobError | None


class ModelCommandList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCommand]


class LeverCard(BaseModel):
    name: str
    knobs: list[str]
    summary: str
    about: str


class LeverList(BaseModel):
    object: Literal["list"] = "list"
    data: list[LeverCard]


class LedgerRows(BaseModel):
    """Measured rows, oldest first, and the metrics that their distances are in."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    metrics: list[dict[str, Any]]


class DistanceCard(BaseModel):
    """One distance between two clips, and what it means."""

    metric: str
    title: str
    unit: str
    closer: str = Field(description="lower or higher: which value means the nearer film.")
    value: float | None = Field(description="null: not computed, and `note` says why.")
    worst: float | None = None
    note: str = ""
    sees: str = ""
    blind: str = ""
    floor: float | None = Field(None, description="The same metric between runs that differ by rounding alone.")
    inside_floor: bool | None = None


class Comparison(BaseModel):
    """How far clip B is from clip A."""

    object: Literal["comparison"] = "comparison"
    a: str
    b: str
    identical: bool | None = Field(description="Every bit of every frame; null: not known.")
    basis: str = Field(description="What was looked at, or why there are no distances.")
    distances: list[DistanceCard]
    faults: list[str]
    floor_note: str


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str


class Readiness(BaseModel):
    ready: bool
    reasons: list[str]
    workers: int


def as_error(error: StoredError | None) -> JobError | None:
    """Reason and remedy in one text, as clients of this shape show it."""
    if error is None:
        return None
    return JobError(code=error.code, message=f"{error.message}: {error.remedy}" if error.remedy else error.message)


def as_plan_answer(plan: Plan) -> PlanAnswer:
    return PlanAnswer(
        request=plan.request.to_dict(),
        plan=plan.to_dict(),
        promise=plan.promise.value,
        seconds=plan.expected.seconds,
        seconds_basis=plan.expected.seconds_basis,
        peak_bytes=plan.expected.peak_bytes,
        memory_basis=plan.expected.memory_basis,
        notes=list(plan.notes),
    )
