"""The nouns of undercrank: frozen, keyword-only records, their JSON, the `Lever` base class and the errors.

Everything the system decides is one of these records, can be printed as JSON and compared with `==`.
A record travels: Request + Machine + Family + ledger rows -> Plan -> Receipt per lever -> Trace -> Report.
Floor 0: standard library only.
"""

from __future__ import annotations

import enum
import functools
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from undercrank.rig import Rig

# --------------------------------------------------------------------------- errors


class UndercrankError(Exception):
    """An error with a reason and a remedy, meant for the person who asked. Never shown as a traceback."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "run_failed"


class RunFailed(UndercrankError):
    """The run itself failed: non-finite frames, disk full."""


class BadInput(UndercrankError, ValueError):
    """A value that cannot be used. `field` names it as the Request does."""

    exit_code = 2
    http_status = 400
    code = "bad_input"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class LeverRefused(UndercrankError):
    """A lever was asked for by name and cannot be honoured."""

    exit_code = 3
    http_status = 409
    code = "lever_refused"


class OutOfMemory(UndercrankError):
    """Memory ran out, foreseen by the plan or met in the run."""

    exit_code = 4
    http_status = 507
    code = "out_of_memory"


class NotFound(UndercrankError):
    """A model, a package or a service is missing."""

    exit_code = 5
    http_status = 424
    code = "missing"


class Cancelled(UndercrankError):
    """The run was stopped from outside."""

    exit_code = 130
    http_status = 499
    code = "cancelled"


def shown(value: object) -> str:
    """A value as an error message shows it; Python itself refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return str(value)[:60]


# --------------------------------------------------------------------------- words


class Promise(enum.StrEnum):
    """What a lever does to the numbers. Ordered: EXACT < ROUNDING < LOSSY."""

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"

    @property
    def rank(self) -> int:
        return list(Promise).index(self)

    @staticmethod
    def weakest(promises: Iterable[Promise]) -> Promise:
        """The promise of several levers together is that of the weakest one."""
        return max(promises, key=lambda promise: promise.rank, default=Promise.EXACT)


class Fidelity(enum.StrEnum):
    """How far the film may move from the stock pipeline's: the ceiling for levers that decide by themselves."""

    EXACT = "exact"
    FAITHFUL = "faithful"
    QUALITY = "quality"
    BALANCED = "balanced"
    FAST = "fast"

    @classmethod
    def of(cls, word: str) -> Fidelity:
        try:
            return cls(word)
        except ValueError as error:
            choices = ", ".join(each.value for each in cls)
            raise BadInput(f"fidelity {word!r}: choose {choices}", field="fidelity") from error

    @property
    def ceiling(self) -> Promise:
        """The weakest promise that may engage unasked. A LOSSY lever needs ledger rows besides, under any word."""
        return Promise.EXACT if self is Fidelity.EXACT else Promise.LOSSY


class Status(enum.StrEnum):
    APPLIED = "applied"
    DECLINED = "declined"
    UNSUPPORTED = "unsupported"


# --------------------------------------------------------------------------- records and their JSON


class Record:
    """Base of every record: `to_dict`, `to_json`, `from_dict`, `from_json`; unknown keys are refused.

    A record that holds levers is read back with the classes that may occur: `Plan.from_json(text, levers=ORDER)`.
    """

    def to_dict(self) -> dict[str, Any]:
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=True, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, levers: Sequence[type[Lever]] = ()) -> Self:
        return typing.cast(Self, _build(cls, data, levers))

    @classmethod
    def from_json(cls, text: str, *, levers: Sequence[type[Lever]] = ()) -> Self:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{cls.__name__} cannot be read: {str(error)[:120]}") from error
        return cls.from_dict(data, levers=levers)


def _plain(value: Any) -> Any:
    if isinstance(value, Lever):
        return {"lever": value.name, **Record.to_dict(value)}
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _build(cls: type, data: Mapping[str, Any], levers: Sequence[type[Lever]]) -> Any:
    assert is_dataclass(cls), cls
    if not isinstance(data, Mapping):
        raise BadInput(f"{cls.__name__} must be an object, not {type(data).__name__}")
    known = {f.name: f for f in fields(cls)}
    if unknown := sorted(str(name) for name in set(data) - set(known)):
        raise BadInput(f"{cls.__name__} has no field {', '.join(unknown)}", field=unknown[0])
    required = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in data]:
        raise BadInput(f"{cls.__name__} lacks {', '.join(missing)}", field=missing[0])
    hints = _hints(cls)
    return cls(**{name: _field(hints[name], name, data[name], levers) for name in data})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=False, localns={"Lever": Lever})


def _field(hint: Any, name: str, value: Any, levers: Sequence[type[Lever]]) -> Any:
    try:
        return _typed(hint, value, levers)
    except BadInput:
        raise
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise BadInput(f"{name} cannot be {str(value)[:60]!r}: {error}", field=name) from error


def _typed(hint: Any, value: Any, levers: Sequence[type[Lever]]) -> Any:
    """`value`, as read from JSON, in the type of its field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(next(a for a in args if a is not type(None)), value, levers)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError("a list is needed")
        inner = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_typed(hint, item, levers) for hint, item in zip(inner, value, strict=True))
    if origin is frozenset:
        return frozenset(value)
    if origin is dict:
        return {key: _typed(args[1], item, levers) for key, item in value.items()}
    if not isinstance(hint, type):
        return value
    if issubclass(hint, Lever):
        return _lever(value, levers)
    if issubclass(hint, Record):
        return _build(hint, value, levers)
    if hint is Fraction and not _FRACTION.fullmatch(str(value)):  # "1e9999999999" would be computed for ever
        raise ValueError("a number such as 16 or 24000/1001 is needed")
    if issubclass(hint, enum.Enum | Fraction):
        return hint(value)
    return value


_FRACTION = re.compile(r"-?\d{1,300}(/\d{1,300}|\.\d{1,300})?")


def _lever(data: Mapping[str, Any], levers: Sequence[type[Lever]]) -> Lever:
    known = {lever.name: lever for lever in levers}
    name = data.get("lever") if isinstance(data, Mapping) else None
    if name not in known:
        raise BadInput(f"unknown lever {name!r}: this version has {', '.join(known) or 'none'}")
    return known[name].from_dict({key: value for key, value in data.items() if key != "lever"})


# --------------------------------------------------------------------------- what is asked


@dataclass(frozen=True, kw_only=True)
class Request(Record):
    """What a person asked for. None means: the family's default. Nothing edits a request; the planner resolves it.

    `wishes` are (knob, value) pairs: "auto" lets the planner decide, "off" forbids, anything else is a setting.
    """

    prompt: str = ""
    negative_prompt: str | None = None
    model: str = "flipbook"
    image: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: Fraction | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    "Of the second expert, where there is one; None: the first one's."
    flow_shift: float | None = None
    "Shift of the noise schedule; None: the checkpoint's."
    seed: int | None = None
    fidelity: Fidelity = Fidelity.FAITHFUL
    wishes: tuple[tuple[str, str], ...] = ()
    device: str | None = None
    dtype: str | None = None
    allow_denied: bool = False
    "Honour a wish that measured rows speak against."

    def __post_init__(self) -> None:
        object.__setattr__(self, "fidelity", Fidelity.of(self.fidelity))  # a plain word is welcome, a wrong one is not


# --------------------------------------------------------------------------- what is known


@dataclass(frozen=True, kw_only=True)
class Family(Record):
    """One row of the table of model families: facts about a checkpoint, with no code of its own."""

    id: str
    title: str
    repo: str
    "Hub id of the diffusers-layout repository, or `package:flipbook` for the embedded model."
    pipeline: str
    "Name of the diffusers pipeline class."
    task: str
    "t2v, i2v, v2v, control"
    size_multiple: int
    "Width and height in pixels must be multiples of this (VAE stride x patch size)."
    frame_step: int
    "num_frames must be frame_step * k + 1."
    width: int
    height: int
    num_frames: int
    fps: Fraction
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int | None = None
    "Text tokens kept by the encoder, passed to the pipeline where it takes the argument."
    negative_prompt: str | None = None
    "The checkpoint's own default negative prompt, where its authors publish one; None: the empty text."
    trained_sizes: tuple[tuple[int, int], ...] = ()
    "(width, height) pairs that the checkpoint was trained on; others run with a warning. Empty: any on the lattice."
    max_trained_frames: int | None = None
    branches: str = "sequential"
    "sequential (one transformer call per CFG branch), batched (one call), guider (diffusers guider), single."
    branch_names: tuple[str, ...] = ()
    "Names that the pipeline gives to `cache_context`, in call order; empty: it names none."
    traits: frozenset[str] = frozenset()
    "two_experts, distilled, image_input, audio, dynamic_cfg, cache_context, ..."
    transformer_cache_quality: str = "balanced"
    "The preset of step_cache that `auto` may go up to: quality, balanced or fast."
    dtype: str = "bfloat16"
    "The dtype of the published weights' intended use on a GPU."
    transformer_params: int = 0
    text_encoder_params: int = 0
    vae_params: int = 0
    transformer_width: int = 0
    "Hidden size of the denoiser, for the memory estimate."
    vae_width: int = 96
    "Channels of the VAE's decoder where it is at full size, for each pixel of a frame; for the memory estimate."
    temporal_stride: int = 4
    spatial_stride: int = 8
    patch: tuple[int, int, int] = (1, 2, 2)
    "Latent (frames, rows, columns) per token."
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Device(Record):
    kind: str
    "cpu, cuda, mps, xpu"
    index: int = 0
    name: str = ""
    capability: tuple[int, int] | None = None
    total_bytes: int = 0
    free_bytes: int = 0

    @property
    def torch_name(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, kw_only=True)
class Machine(Record):
    """What this computer is, as far as it can be known without torch."""

    name: str
    devices: tuple[Device, ...]
    "Accelerators in their order, then the CPU."
    cpu_count: int
    packages: dict[str, str] = field(default_factory=dict)
    "Installed versions of the packages that decide results."
    driver: str | None = None

    def device(self, name: str | None) -> Device:
        """The device of that torch name; None: the first (accelerators come before the CPU)."""
        if name is None:
            return self.devices[0]
        for device in self.devices:
            if name in (device.torch_name, device.kind):
                return device
        have = ", ".join(device.torch_name for device in self.devices)
        raise BadInput(f"device {name!r}: this machine has {have}", field="device")


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """One row of the ledger: what was measured, where, on what, how surely."""

    id: str
    family: str
    lever: str | None
    "None: a whole run (seconds a step), not the comparison of a lever."
    setting: str = ""
    "Which of the lever's settings was measured, where it has several: its own `setting`."
    source: str
    "measured here, measured, published, random weights"
    machine: str
    device: str
    versions: dict[str, str]
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    dtype: str
    n: int
    step_ms: float | None = None
    "Median over n runs."
    spread_ms: float | None = None
    "Half the range of the n runs."
    total_s: float | None = None
    peak_bytes: int | None = None
    gain: float | None = None
    "Reference time over lever time, same run, both orders."
    distances: dict[str, float] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    note: str = ""
    prompts: tuple[str, ...] = ()
    "Of the films behind the distances, which are medians over all of them."
    seeds: tuple[int, ...] = ()
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    "Nearest and furthest film, by metric."
    floor_of: str = ""
    "What the runs of the floor differ in, and their dtype."
    calibrated_on: tuple[str, ...] = ()
    "Prompts and seeds of the runs that set the lever up; none of them is among the films."
    verdict: str = ""
    """What follows from the row, where its figures do not say it alone. denied: refused even where it is asked for;
    allowed: worth its distance without a gain in time, for the memory that it saves."""


@dataclass(frozen=True, kw_only=True)
class Distance(Record):
    """How far film B is from film A by one metric of `metrics.py`. value None: not computed, and `note` says why."""

    metric: str
    value: float | None
    unit: str
    closer: str
    "higher or lower: which value means the nearer film"
    worst: float | None = None
    "Of the worst frame, step or branch; of several films, of the furthest film."
    curve: tuple[float, ...] = ()
    note: str = ""
    floor: dict[str, float] = field(default_factory=dict)
    "The same metric between runs that differ by rounding alone, by what they differ in; medians."
    inside: tuple[str, ...] = ()
    "The floors that this distance does not exceed."


@dataclass(frozen=True, kw_only=True)
class FidelityReport(Record):
    """What happened to a film: B beside its reference A, with the rounding floor where it was measured."""

    a: str
    b: str
    kind: str
    "frames or latents"
    shape: tuple[int, ...]
    "F H W 3 of frames; of latents as they were given."
    identical: bool
    "Every bit of every value."
    distances: tuple[Distance, ...]
    faults: tuple[str, ...] = ()
    "Frozen, black or non-finite frames of B."
    floor_note: str = ""
    "In which dtype, at which shape, over what the floor was measured; or why there is none."


@dataclass(frozen=True, kw_only=True)
class Needs(Record):
    """What a table can say about where a lever can work; the rest is `Lever.lacks` and `Lever.doubt`."""

    traits: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    devices: int = 1
    conflicts: frozenset[str] = frozenset()
    rivals: frozenset[str] = frozenset()
    "Levers that `auto` takes in its place where they were measured to gain more: they are decided first there."


@dataclass(frozen=True, kw_only=True)
class Case(Record):
    """What a lever is asked about: this model, at this shape, on this device, with these levers already on."""

    family: Family
    device: Device
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    dtype: str
    machine: Machine
    scheduler: str | None = None
    "Class name of the scheduler where the pipeline is at hand."
    engaged: tuple[str, ...] = ()
    parameters: int = 0
    "Weights of all components together; 0 means unknown."
    fidelity: Fidelity = Fidelity.FAITHFUL
    is_calibrated: bool = False
    "Has a run of this model in this dtype been measured here for step_cache?"
    searched_budgets: tuple[int, ...] = ()
    "Computed steps for which step_cache knows a searched path, of this model in this dtype at so many steps."
    weights: dict[str, int] = field(default_factory=dict)
    "Bytes of each component that the device holds at a time under the levers that are on; empty: unknown."
    stage: str = ""
    "text, denoise or decode, where a lever is asked what is held in that stage; empty: at any time."
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    "`weights` of each stage, where levers hold less in some."
    working: dict[str, int] = field(default_factory=dict)
    "What each stage needs beside the weights, by formula."


# --------------------------------------------------------------------------- what is decided


@dataclass(frozen=True, kw_only=True)
class LoadSpec(Record):
    """What the weights look like once loaded. A change of it means a reload."""

    family: str
    source: str
    "Hub id or folder, or `package:flipbook`."
    dtype: str
    device: str
    revision: str | None = None
    local_files_only: bool = False
    allow_pickle: bool = False
    parameters: int = 0
    "Counted in the files' headers where a folder is at hand; 0: the family's published counts hold."
    formats: tuple[tuple[str, str], ...] = ()
    "(role of a component, its weight format) where it is not that of `dtype`."
    resident: bool = True
    "All weights lie on the device; else they are on the host until a lever sends for them."


@dataclass(frozen=True, kw_only=True)
class Loading(Record):
    """How far a load is."""

    state: str
    """queued, reading, placing, engaging, warming, ready; failed or cancelled if it ended before. Components take turns
    in reading and placing."""
    component: str = ""
    "The component that is read or placed, or the lever that is engaged; `download` while files come from the hub."
    bytes_done: int = 0
    "reading: of all weight files, or of the download; placing: of this component."
    bytes_total: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """One lever, engaged or not, and why."""

    lever: str
    requested: str
    chosen: str
    status: Status
    promise: Promise
    reason: str
    evidence: tuple[str, ...] = ()
    "Ids of the ledger rows behind it."


@dataclass(frozen=True, kw_only=True)
class Expected(Record):
    """Time and memory, before the run. `basis` says where the figure is from."""

    seconds: float | None
    seconds_basis: str
    peak_bytes: int | None
    memory_basis: str
    stage_peak_bytes: dict[str, int] = field(default_factory=dict)
    "Of text, denoise and decode, by formula; empty: unknown."


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Everything decided before the first weight is read."""

    request: Request
    "Resolved: every field that the run needs is filled."
    load: LoadSpec
    levers: tuple[Lever, ...]
    decisions: tuple[Decision, ...]
    promise: Promise
    "The weakest promise among the engaged levers."
    expected: Expected
    notes: tuple[str, ...] = ()
    "What the person should know: off-size warnings, ignored texts."


# --------------------------------------------------------------------------- what happened


@dataclass(frozen=True, kw_only=True)
class Receipt(Record):
    """What turning a lever on cost, and what its `verify` said after the run."""

    lever: str
    engage_ms: float
    bytes: int = 0
    "Device memory that it took when it was entered, and what it held in the run."
    complaints: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    "What it has to say of the run, where nothing is wrong."


@dataclass(frozen=True, kw_only=True)
class Trace(Record):
    """What really happened in one run."""

    stage_s: dict[str, float]
    "Seconds per stage: load, text, denoise, decode; and encode, as far as it was waited for, of a clip in a file."
    step_ms: tuple[float, ...]
    stalls: int | None
    "Host waits inside the denoising loop; None where the device cannot tell."
    stall_sites: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    "Denoiser calls by branch name."
    computed_steps: int = 0
    skipped_steps: int = 0
    "Steps in which no forward computed its blocks."
    schedules: dict[str, str] = field(default_factory=dict)
    "By denoiser/branch, a 1 for each computed forward and a 0 for each skipped one; empty where no lever skips."
    peak_bytes: int | None = None
    load_bytes: int = 0
    cpu_threads: int = 0
    "Threads of torch on the CPU: another number sums in another order, and so makes other bits."
    host_us: tuple[float, ...] = ()
    "Host microseconds of each step, without those in which we held it back; empty where there is no device beside it."
    counters: dict[str, int] = field(default_factory=dict)
    "What the levers counted, by `lever.what`: `compile.ms`, `host_sync.mirrored`."


@dataclass(frozen=True, kw_only=True)
class Report(Record):
    """The whole story of one clip: it travels with the file."""

    undercrank: str
    request: Request
    machine: Machine
    model_fingerprint: str
    plan: Plan
    receipts: tuple[Receipt, ...]
    trace: Trace
    frames_hash: str | None
    "sha256 of the decoded uint8 frames before encoding; None for latents."
    notes: tuple[str, ...] = ()
    fidelity: FidelityReport | None = None
    "How far the clip is from its reference, where one was given."


# --------------------------------------------------------------------------- the lever protocol


@dataclass(frozen=True, kw_only=True)
class Lever(Record):
    """A value you enter and leave. One lever, one file; its fields are its settings.

    Undone means: same attributes, same outputs. Compiler caches and allocator fragmentation stay.
    """

    name: ClassVar[str]
    knobs: ClassVar[tuple[str, ...]] = ()
    "Request knobs that speak of this lever; its own name when empty."
    needs: ClassVar[Needs] = Needs()
    summary: ClassVar[str] = ""
    only_measured: ClassVar[bool] = False
    "`auto` engages it only where a ledger row of this model on this kind of device shows a gain."
    only_when_small: ClassVar[bool] = False
    "It spares the host's work, which a larger clip hides: a gain counts for clips of at most twice as many tokens."
    only_identical: ClassVar[bool] = False
    "`auto` engages it only where such a row shows the same frames, bit for bit."
    spares_memory: ClassVar[bool] = False
    "It takes much memory away and costs nothing: decided before those that ask whether everything fits without them."
    apart: ClassVar[bool] = False
    "Its knobs speak of different things: off for one of them is off for that one alone."
    seals: ClassVar[bool] = False
    "It compiles or records forwards: nothing may look into the first of them from outside."
    off_words: ClassVar[tuple[str, ...]] = ("off",)
    "What its knobs call off."

    def promises(self, case: Case) -> Promise:
        """What it does to the numbers in this case."""
        return Promise.EXACT

    def lacks(self, case: Case) -> str | None:
        """What it cannot do without and does not find here, with the remedy, where `needs` cannot say it in data.

        Unlike a doubt it also refuses a wish. None: nothing.
        """
        return None

    @property
    def conflicts(self) -> frozenset[str]:
        """Names of levers that it does not go together with, in this setting."""
        return self.needs.conflicts

    def choices(self, case: Case) -> tuple[Self, ...]:
        """The settings that `auto` may take here, the boldest first: the first that may engage does."""
        return (self,)

    @property
    def setting(self) -> str:
        """Its settings as ledger rows name them, where rows differ by them."""
        return ""

    def check(self, case: Case) -> None:
        """Raise BadInput for a setting that cannot be meant in this case. A call inside `accelerate` is not asked
        for: there only the run itself knows its length."""

    def vouch(self, case: Case) -> str | None:
        """Where no row of its distance is known: what may stand for one under `quality` and below; None: nothing."""
        return None

    def doubt(self, case: Case) -> str | None:
        """A reason to leave it off here; None: no objection."""
        return None

    def holds(self, case: Case) -> Mapping[str, int]:
        """Bytes of each component that the device holds in `case.stage` with it on; `case.weights`: as without."""
        return case.weights

    def works(self, case: Case) -> Mapping[str, int]:
        """Bytes that each stage needs beside the weights with this lever on; `case.working`: as without."""
        return case.working

    def configure(self, load: LoadSpec) -> LoadSpec:
        """What it changes about how weights are loaded (undone by a reload)."""
        return load

    def engage(self, rig: Rig) -> AbstractContextManager[Any]:
        """Before `yield`: on. After: off. Changes objects through `undo` only."""
        return nullcontext()

    def verify(self, rig: Rig, trace: Trace) -> list[str]:
        """After a generation: did it take effect? Complaints; [] means that it works."""
        return []

    @classmethod
    def grid(cls, steps: int) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Wishes worth comparing in a sweep over runs of so many steps, one tuple a setting."""
        return ((((cls.knobs or (cls.name,))[0], "on"),),)

    @classmethod
    def about(cls) -> str:
        """Does, promises, costs, measured: the docstring of its module."""
        return (sys.modules[cls.__module__].__doc__ or "").strip()

    @classmethod
    def from_wish(cls, wishes: Mapping[str, str]) -> Self:
        """The lever that explicit settings ask for. `wishes` holds this lever's knobs, none of them auto or off."""
        for knob, value in wishes.items():
            if value != "on":
                raise BadInput(f"{knob}={value}: {cls.name} takes auto, on or off", field=knob)
        return cls()
