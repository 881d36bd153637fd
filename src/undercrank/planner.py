"""(request, machine, family, ledger) -> Plan: a pure function, made without torch.

The request is checked and its gaps are filled; then every lever in ORDER gets one decision with a reason,
engaged or not; then time and memory are estimated, each with its basis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from types import MappingProxyType

from undercrank import families, memory
from undercrank.ledger import HERE, Ledger
from undercrank.levers import ORDER, knobs, lever_of_knob
from undercrank.memory import BYTES_PER_VALUE
from undercrank.records import (
    BadInput,
    Case,
    Decision,
    Device,
    Expected,
    Family,
    Fidelity,
    Lever,
    LeverRefused,
    LoadSpec,
    Machine,
    Measurement,
    OutOfMemory,
    Plan,
    Promise,
    Request,
    Status,
    shown,
)

MAX_GUIDANCE = 100.0
MAX_SHIFT = 100.0
MAX_SEED = 2**63 - 1
MAX_PROMPT_CHARS = 100_000

# Near-lossless, quality, balanced, fast: how far the median end distance of a LOSSY lever may be, by metric.
BOUNDS: dict[Fidelity, dict[str, float]] = {
    Fidelity.FAITHFUL: {"lpips": 0.05, "st_lpips_alex": 0.005},
    Fidelity.QUALITY: {"lpips": 0.10, "st_lpips_alex": 0.01},
    Fidelity.BALANCED: {"lpips": 0.22, "st_lpips_alex": 0.03},
    Fidelity.FAST: {"lpips": 0.40, "st_lpips_alex": 0.10},
}
MIN_GAIN = 1.1
"A LOSSY lever that gains less than this is not worth its distance."
NOISE = 0.02
"A lever that loses more than this where it was measured is left off, whatever it promises."


NOTHING: Mapping[Lever, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Live:
    """What is already decided when a pipeline comes loaded: `accelerate` plans around it."""

    device: Device
    dtype: str
    scheduler: str


def make_plan(
    request: Request,
    *,
    family: Family,
    machine: Machine,
    ledger: Ledger,
    load: LoadSpec | None = None,
    live: Live | None = None,
    strict: bool = True,
    needs_picture: bool = True,
    refused: Mapping[Lever, str] = NOTHING,
) -> Plan:
    """Decide everything before the first weight is read. Raises BadInput and LeverRefused.

    load: where the weights come from, if not from the family's repository. live: a pipeline at hand. strict:
    False leaves the request's numbers to the pipeline's own checks (a call inside `accelerate`). needs_picture: False
    for a load alone, which needs none of a model that animates one. refused: settings that `auto` may not take, since
    they refused on this very pipeline, and why.
    """
    device = live.device if live else machine.device(request.device)
    if live is not None:
        request = replace(request, dtype=live.dtype)
    resolved, notes = resolve(request, family, device, needs_picture) if strict else adopt(request, family)
    load = replace(load or load_spec(family), dtype=str(resolved.dtype), device=device.torch_name)
    case = case_of(resolved, family, machine, device, load, live)
    case = replace(
        case,
        is_calibrated=ledger.is_calibrated(family.id, case.dtype),
        searched_budgets=ledger.searched_budgets(family.id, case.dtype, case.num_inference_steps),
    )
    levers, decisions = decide(resolved, case, ledger, load, refused)
    for lever in levers:
        if strict:
            lever.check(case)
        load = lever.configure(load)
    dense, case = case, under(case, levers)
    expected = expect(case, ledger)
    if live is None and (expected.peak_bytes or 0) > device.free_bytes:
        free = gib(device.free_bytes)
        notes = (*notes, f"does not fit: {device.torch_name} has {free} free; {fitting(dense, levers)}")
    return Plan(
        request=resolved,
        load=load,
        levers=levers,
        decisions=decisions,
        promise=Promise.weakest(lever.promises(case) for lever in levers),
        expected=expected,
        notes=notes,
    )


def load_spec(family: Family) -> LoadSpec:
    return LoadSpec(family=family.id, source=family.repo, dtype=family.dtype, device="cpu")


def case_of(
    request: Request,
    family: Family,
    machine: Machine,
    device: Device,
    load: LoadSpec,
    live: Live | None = None,
    engaged: tuple[str, ...] = (),
) -> Case:
    """The case that levers are asked about, from a resolved request."""
    assert request.width and request.height and request.num_frames and request.num_inference_steps
    assert request.guidance_scale is not None and request.dtype is not None
    case = Case(
        family=family,
        machine=machine,
        device=device,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        dtype=request.dtype,
        fidelity=request.fidelity,
        scheduler=live.scheduler if live else None,
        engaged=engaged,
        parameters=load.parameters or family.transformer_params + family.text_encoder_params + family.vae_params,
    )
    return memory.dense(replace(case, weights=_dense_bytes(case)))


def under(case: Case, levers: Iterable[Lever]) -> Case:
    """The case with these levers on."""
    for lever in levers:
        case = memory.under(case, lever)
    return case


# --------------------------------------------------------------------------- the request


def resolve(
    request: Request, family: Family, device: Device, needs_picture: bool = True
) -> tuple[Request, tuple[str, ...]]:
    """Check every field and fill the gaps from the family's row. Raises BadInput naming the field."""
    width = family.width if request.width is None else request.width
    height = family.height if request.height is None else request.height
    num_frames = family.num_frames if request.num_frames is None else request.num_frames
    families.check_size(family, width, height)
    families.check_frames(family, num_frames)
    _check_task(request, family, needs_picture)
    check_wishes(request.wishes)
    resolved = replace(
        request,
        prompt=_checked_text(request.prompt, "prompt"),
        negative_prompt=_checked_text(_negative(request, family), "negative_prompt"),
        width=width,
        height=height,
        num_frames=num_frames,
        fps=_checked_fps(family.fps if request.fps is None else request.fps),
        num_inference_steps=_checked_steps(request.num_inference_steps, family),
        guidance_scale=_checked_guidance(request.guidance_scale, family),
        guidance_scale_2=_checked_second_guidance(request.guidance_scale_2, family),
        flow_shift=_checked_shift(request.flow_shift, family),
        seed=_checked_seed(request.seed),
        dtype=_checked_dtype(request.dtype, family, device),
    )
    return resolved, tuple(_notes(request, resolved, family))


def adopt(request: Request, family: Family) -> tuple[Request, tuple[str, ...]]:
    """A call of a pipeline at hand: its own checks and its own configuration hold, ours would be a second opinion."""
    check_wishes(request.wishes)
    return replace(request, fps=family.fps), ()


def _negative(request: Request, family: Family) -> str:
    return request.negative_prompt if request.negative_prompt is not None else family.negative_prompt or ""


def _check_task(request: Request, family: Family, needs_picture: bool) -> None:
    takes_image = "image_input" in family.traits
    if takes_image and needs_picture and not request.image:
        raise BadInput(f"{family.id} animates a picture: give one with --image FILE", field="image")
    if request.image and not takes_image:
        raise BadInput(f"{family.id} takes no picture; leave --image out, or choose an -i2v model", field="image")
    if family.traits & {"video_input", "control_input"}:
        raise BadInput(
            f"{family.id} needs a video as input, which only the Python door takes: "
            "undercrank.accelerate(pipe) around your own pipeline",
            field="model",
        )


def _checked_text(text: object, field: str) -> str:
    if not isinstance(text, str):
        raise BadInput(f"{field} must be text, not {type(text).__name__}", field=field)
    if len(text) > MAX_PROMPT_CHARS:
        raise BadInput(f"{field} has {len(text)} characters; at most {MAX_PROMPT_CHARS} are read", field=field)
    lone = next((char for char in text if "\ud800" <= char <= "\udfff"), None)
    if lone:
        raise BadInput(f"{field} is no valid text: it holds half a character (U+{ord(lone):04X})", field=field)
    return text


def _checked_fps(fps: Fraction) -> Fraction:
    if not 0 < fps <= 240:
        raise BadInput(f"fps {fps}: must be above 0 and at most 240", field="fps")
    return fps


def _checked_steps(steps: int | None, family: Family) -> int:
    steps = family.num_inference_steps if steps is None else steps
    families.check_steps(family, steps)
    return steps


def _checked_guidance(guidance: float | None, family: Family) -> float:
    if guidance is None:
        return family.guidance_scale
    is_number = _is_number(guidance)
    if is_number and 0 <= guidance <= MAX_GUIDANCE:  # NaN fails it too
        return float(guidance)
    near = 0 if is_number and guidance < 0 else MAX_GUIDANCE
    raise BadInput(
        f"guidance {shown(guidance)}: must be a finite number from 0 to {MAX_GUIDANCE:g}, for instance {near:g} or "
        f"{family.guidance_scale:g} (0 to 1 turn guidance off)",
        field="guidance_scale",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_second_guidance(guidance: float | None, family: Family) -> float | None:
    if guidance is None:
        return None
    if "two_experts" not in family.traits:
        raise BadInput(f"{family.title} has no second expert: leave guidance_scale_2 out", field="guidance_scale_2")
    if _is_number(guidance) and 0 <= guidance <= MAX_GUIDANCE:
        return float(guidance)
    raise BadInput(
        f"guidance {shown(guidance)} of the second expert: must be a finite number from 0 to {MAX_GUIDANCE:g}",
        field="guidance_scale_2",
    )


def _checked_shift(shift: float | None, family: Family) -> float | None:
    if shift is None:
        return None
    if "flow_shift" not in family.traits:
        raise BadInput(f"the schedule of {family.title} has no shift to set: leave flow_shift out", field="flow_shift")
    if _is_number(shift) and 0 < shift <= MAX_SHIFT:
        return float(shift)
    raise BadInput(f"flow_shift {shown(shift)}: must be a number above 0 and at most {MAX_SHIFT:g}", field="flow_shift")


def _checked_seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= MAX_SEED:
        return seed
    raise BadInput(f"seed {shown(seed)}: must be a whole number from 0 to {MAX_SEED}", field="seed")


def _checked_dtype(dtype: str | None, family: Family, device: Device) -> str:
    """float32 on a CPU, where lower precision is seldom faster and always less exact; the family's elsewhere."""
    if dtype is None:
        return "float32" if device.kind == "cpu" else family.dtype
    if not isinstance(dtype, str) or dtype not in BYTES_PER_VALUE:
        raise BadInput(f"dtype {dtype!r}: choose {', '.join(BYTES_PER_VALUE)}", field="dtype")
    if dtype == "float16" and family.dtype == "bfloat16":
        raise BadInput(
            f"{family.title} was trained in bfloat16 and overflows in float16: choose bfloat16", field="dtype"
        )
    return dtype


def check_wishes(wishes: tuple[tuple[str, str], ...]) -> None:
    """Every wish must name a knob of this version, once."""
    known = knobs()
    if not isinstance(wishes, tuple) or not all(_is_wish(wish) for wish in wishes):
        raise BadInput(f"wishes must be pairs of a lever's name and a word, not {str(wishes)[:60]}", field="wishes")
    for index, (knob, _) in enumerate(wishes):
        if knob not in known:
            near = get_close_matches(knob, known, n=3, cutoff=0.5) or list(known)
            raise BadInput(f"no lever {knob!r}: this version has {', '.join(near)}", field=knob)
        if knob in {other for other, _ in wishes[:index]}:
            raise BadInput(f"{knob} is given twice", field=knob)


def _is_wish(wish: object) -> bool:
    return isinstance(wish, tuple) and len(wish) == 2 and all(isinstance(word, str) for word in wish)


def _notes(asked: Request, resolved: Request, family: Family) -> list[str]:
    """What the person should know before the run."""
    assert resolved.guidance_scale is not None and resolved.width and resolved.height and resolved.num_frames
    notes = []
    if not resolved.prompt.strip():
        notes.append("the prompt is empty: the model draws what it likes")
    if asked.negative_prompt and resolved.guidance_scale <= 1 and family.branches != "single":
        notes.append("guidance is off (1 or less): the negative prompt has no effect")
    if warning := families.off_track(family, resolved.width, resolved.height, resolved.num_frames):
        notes.append(warning)
    if "toy_domain" in family.traits:
        notes.append(family.note)
    return notes


# --------------------------------------------------------------------------- the levers


def decide(
    request: Request, case: Case, ledger: Ledger, load: LoadSpec, refused: Mapping[Lever, str] = NOTHING
) -> tuple[tuple[Lever, ...], tuple[Decision, ...]]:
    """One decision for every lever in ORDER. Raises LeverRefused for an explicit wish that cannot be honoured.

    What was asked for by name is decided first: a lever that decides by itself then gives way to it. Then what spares
    memory, which others ask about.
    """
    engaged: dict[type[Lever], Lever] = {}
    decided: dict[type[Lever], Decision] = {}

    def turn(cls: type[Lever]) -> tuple[bool, bool, bool]:
        return not _explicit(cls, request), not cls.spares_memory, _gains_less(cls, case, ledger)

    for cls in sorted(ORDER, key=turn):
        on = [engaged[cls] for cls in ORDER if cls in engaged]
        lever, decided[cls] = _decide_one(cls, request, under(case, on), ledger, load, on, refused)
        if lever is not None:
            engaged[cls] = lever
    return tuple(engaged[cls] for cls in ORDER if cls in engaged), tuple(decided[cls] for cls in ORDER)


def _gains_less(cls: type[Lever], case: Case, ledger: Ledger) -> bool:
    """Was a rival measured to gain more, for this model on this kind of device?"""

    def gain(name: str) -> float:
        rows = [row for row in ledger.rows if row.lever == name and row.family == case.family.id]
        return _median(gains_on(rows, case) or [0.0])

    return any(gain(rival) > gain(cls.name) for rival in cls.needs.rivals)


def is_asked_for(lever: Lever, request: Request) -> bool:
    """By name, so that it is honoured or the request refused."""
    return bool(_explicit(type(lever), request))


def _wishes_of(cls: type[Lever], request: Request) -> dict[str, str]:
    return {
        knob: "off" if value in cls.off_words else value for knob, value in request.wishes if lever_of_knob(knob) is cls
    }


def _explicit(cls: type[Lever], request: Request) -> dict[str, str]:
    return {knob: value for knob, value in _wishes_of(cls, request).items() if value not in ("auto", "off")}


def _clash(lever: Lever, engaged: Iterable[Lever]) -> str | None:
    """Levers that are on already and do not go together with this one, whichever of the two says so."""
    others = [each for each in engaged if each.name in lever.conflicts or lever.name in each.conflicts]
    names = [_conflicting(each, lever) for each in others]
    return f"does not go together with {', '.join(names)}: turn that off" if names else None


def _conflicting(other: Lever, lever: Lever) -> str:
    """Its name; and its setting, where it is that which conflicts."""
    always = other.name in lever.needs.conflicts or lever.name in other.needs.conflicts
    return other.name if always else f"{other.name}={other.setting}"


def _decide_one(
    cls: type[Lever],
    request: Request,
    case: Case,
    ledger: Ledger,
    load: LoadSpec,
    on: Sequence[Lever],
    refused: Mapping[Lever, str],
) -> tuple[Lever | None, Decision]:
    """Of the lever's choices that may engage one with which all fits, where there is one; of those the one that was
    measured to gain most, of equal ones the first. Where none may, what is said of the last one that has rows."""
    wishes, explicit = _wishes_of(cls, request), _explicit(cls, request)
    settings = {knob: value for knob, value in wishes.items() if value != "auto"} if cls.apart else explicit
    choices = cls.from_wish(settings).choices(case)
    if all(value == "auto" for value in wishes.values()):
        choices = (*choices, *_measured_choices(cls, case, ledger, besides=choices))
    answers = []
    for choice in choices:
        refusal = None if explicit else refused.get(choice)  # what is asked for by name is tried again
        hindrance = _clash(choice, on) or _comes_too_late(choice, load) or refusal
        answers.append(_decide_choice(choice, wishes, explicit, request, case, ledger, hindrance, on))
    able = [answer for answer in answers if answer[0] is not None]
    told = next((answer for answer in reversed(answers) if answer[1].evidence), answers[-1])
    return max(able, key=lambda answer: _worth(answer[0], case, ledger), default=told)


def _measured_choices(cls: type[Lever], case: Case, ledger: Ledger, besides: tuple[Lever, ...]) -> Iterator[Lever]:
    """Further settings of the lever's own grid whose distance was measured on this machine."""
    known = {choice.setting for choice in besides}
    for wishes in cls.grid(case.num_inference_steps):
        choice = cls.from_wish(dict(wishes)).choices(case)[0]
        rows = ledger.of_lever(cls.name, case, choice.setting)
        own = [row for row in _measured(rows) if is_own(row, case)]
        if choice.setting not in known and any(row.num_inference_steps == case.num_inference_steps for row in own):
            yield choice


def _worth(lever: Lever | None, case: Case, ledger: Ledger) -> tuple[bool, float]:
    """What saves memory is not chosen by the time that it takes: does all fit with it? Then, what does it gain?"""
    assert lever is not None
    fits = memory.peak(memory.under(case, lever)) <= case.device.free_bytes
    return fits, _recorded_gain(lever, case, ledger)


def _recorded_gain(lever: Lever, case: Case, ledger: Ledger) -> float:
    """By the rows that speak first; 0 where none says."""
    rows = ledger.of_lever(lever.name, case, lever.setting)
    gains = gains_on(rows, case) or [row.gain for row in rows if row.gain is not None and math.isfinite(row.gain)]
    return _median(gains) if gains else 0.0


def _decide_choice(
    lever: Lever,
    wishes: dict[str, str],
    explicit: dict[str, str],
    request: Request,
    case: Case,
    ledger: Ledger,
    hindrance: str | None,
    on: Sequence[Lever],
) -> tuple[Lever | None, Decision]:
    cls = type(lever)
    requested = " ".join(f"{knob}={value}" for knob, value in wishes.items()) or "auto"
    promise = lever.promises(case)

    def answer(status: Status, reason: str, rows: tuple[Measurement, ...] = ()) -> Decision:
        return Decision(
            lever=cls.name,
            requested=requested,
            chosen=(lever.setting or "on") if status is Status.APPLIED else "off",
            status=status,
            promise=promise,
            reason=reason,
            evidence=tuple(row.id for row in rows),
        )

    if _is_off(cls, wishes, explicit):
        return None, answer(Status.DECLINED, "asked for off")
    if unmet := unmet_need(cls, case) or lever.lacks(case) or hindrance:
        if explicit:
            raise LeverRefused(f"{requested}: {unmet}")
        return None, answer(Status.UNSUPPORTED, unmet)
    doubt = lever.doubt(case)
    rows = ledger.of_lever(cls.name, case, lever.setting)
    denied = tuple(row for row in ledger.denied(cls.name, case, lever.setting) if not _is_overruled(row, rows, case))
    if explicit:
        if denied and not request.allow_denied:
            raise LeverRefused(f"{requested} is {denied_by(denied[0])}; --allow-denied uses it all the same")
        if request.fidelity is Fidelity.EXACT and promise is not Promise.EXACT:
            raise LeverRefused(
                f"{requested} is {promise.value}, and fidelity exact was asked for: leave one of the two out"
            )
        doubts = [*([denied_by(denied[0])] if denied else []), *([doubt] if doubt else [])]
        reason = f"asked for, although {' and '.join(doubts)}" if doubts else "asked for"
        return lever, answer(Status.APPLIED, reason, (*denied, *(row for row in rows if row not in denied)))
    if promise.rank > request.fidelity.ceiling.rank:
        return None, answer(Status.DECLINED, f"{promise.value}, and fidelity {request.fidelity.value} allows less")
    if doubt:
        return None, answer(Status.DECLINED, doubt)
    if denied:
        return None, answer(Status.DECLINED, denied_by(denied[0]), denied)
    rows = tuple(row for row in rows if row.verdict != "denied")
    if slower := measured_slower(rows, case):
        return None, answer(Status.DECLINED, slower, rows)
    telling = tuple(row for row in rows if _is_as_large(row, case)) if cls.only_when_small else rows
    if cls.only_measured and not measured_faster(telling, case):
        knob = (cls.knobs or (cls.name,))[0]
        return None, answer(Status.DECLINED, f"unmeasured on {case.device.name}: ask for it with {knob}=on", rows)
    if cls.only_identical and not measured_identical(rows, case):
        knob = (cls.knobs or (cls.name,))[0]
        return None, answer(
            Status.DECLINED, f"not measured bit-identical on {case.device.name}: ask for it with {knob}=on", rows
        )
    vouched = lever.vouch(case) if promise is not Promise.LOSSY or not _measured(rows) else None
    if promise is Promise.LOSSY and (unproven := unproven_loss(rows, request.fidelity, case)):
        if vouched is None or request.fidelity is Fidelity.FAITHFUL:
            return None, answer(Status.DECLINED, unproven, rows)
    elif promise is Promise.LOSSY and all(row.source == "published" for row in _measured(rows)):
        vouched = "published, not verified here"
    beside = [each for each in on if Promise.LOSSY is promise is each.promises(case)]
    joint = measured_together([*beside, lever], case, ledger) if beside else ()
    if beside and joint and (unproven := unproven_loss(joint, request.fidelity, case)):
        names = ", ".join(each.name for each in beside)
        return None, answer(Status.DECLINED, f"together with {names} {unproven}", joint)
    apart = f"measured apart from {', '.join(each.name for each in beside)}" if beside and not joint else None
    reason = "; ".join(filter(None, (lever.summary, f"promise {promise.value}", vouched, apart)))
    return lever, answer(Status.APPLIED, reason, (*rows, *joint))


def doubts(plan: Plan, family: Family, machine: Machine) -> dict[str, str]:
    """Why levers that are on in a plan would not be by themselves here, by their names."""
    case = case_of(plan.request, family, machine, machine.device(plan.load.device), plan.load)
    return {lever.name: doubt for lever in plan.levers if (doubt := lever.doubt(case)) is not None}


def _is_off(cls: type[Lever], wishes: dict[str, str], explicit: dict[str, str]) -> bool:
    """The first knob stands for the lever, unless each knob speaks of a thing of its own."""
    knobs_of = cls.knobs or (cls.name,)
    if cls.apart:
        return all(wishes.get(knob) == "off" for knob in knobs_of)
    return wishes.get(knobs_of[0]) == "off" or ("off" in wishes.values() and not explicit)


def _comes_too_late(lever: Lever, load: LoadSpec) -> str | None:
    """A lever that changes how weights are loaded can do nothing for a pipeline that came loaded."""
    if load.source != "live" or lever.configure(load) == load:
        return None
    return "already loaded: it acts while weights are read, so let undercrank load the model"


def measured_together(levers: Sequence[Lever], case: Case, ledger: Ledger) -> tuple[Measurement, ...]:
    """Whole runs on this machine with just these lossy settings, as `undercrank tune` names them; () where there is
    none."""
    words = {word for lever in levers for word in _wishes_for(lever, case)}
    return tuple(
        row
        for row in ledger.rows
        if row.lever is None and row.family == case.family.id and is_own(row, case) and row.distances
        and words and set(row.setting.split(", ")) == words
    )  # fmt: skip


def _wishes_for(lever: Lever, case: Case) -> Iterator[str]:
    """The wishes of its own grid that ask for this setting; of a lever whose knobs are apart, for each part of it."""
    parts = set(lever.setting.split())
    for wishes in lever.grid(case.num_inference_steps):
        setting = lever.from_wish(dict(wishes)).choices(case)[0].setting
        if setting == lever.setting or (lever.apart and setting and set(setting.split()) <= parts):
            yield from (f"{knob}={value}" for knob, value in wishes)


def denied_by(row: Measurement) -> str:
    """What a row that denies a setting has measured, in words."""
    found = [f"{row.gain:.2f}x" if row.gain is not None else ""]
    found += [f"{metric} {value:.3g}" for metric, value in row.distances.items()]
    return f"denied by what was measured: {', '.join(filter(None, found))} on {row.device} ({row.id})"


def unmet_need(cls: type[Lever], case: Case) -> str | None:
    """What a table can say against this lever here, with the remedy; None: nothing."""
    needs = cls.needs
    if lacking := sorted(needs.traits - case.family.traits):
        return f"{case.family.title} lacks {', '.join(lacking)}"
    if absent := [name for name in needs.packages if name not in case.machine.packages]:
        return f"needs the package {', '.join(absent)}: pip install {' '.join(absent)}"
    if needs.capability and (case.device.capability or (0, 0)) < needs.capability:
        return f"needs a GPU of capability {needs.capability[0]}.{needs.capability[1]} or later"
    alike = sum(device.kind == case.device.kind for device in case.machine.devices)
    if needs.devices > max(1, alike):
        return f"needs {needs.devices} devices of one kind; here is {alike} of kind {case.device.kind}"
    return None


def measured_faster(rows: tuple[Measurement, ...], case: Case) -> bool:
    """Does the median row of this kind of device show a gain beyond the noise?"""
    gains = gains_on(rows, case)
    return bool(gains) and _median(gains) > 1 + NOISE


def _is_as_large(row: Measurement, case: Case) -> bool:
    """Has its clip at least half as many tokens?"""
    return 2 * _tokens_of(row, case) >= _tokens(case)


def gains_on(rows: Iterable[Measurement], case: Case) -> list[float]:
    """On this kind of device; where this machine itself was measured, on it alone."""
    here = _own_first([row for row in rows if row.gain is not None and row.device == case.device.name], case)
    return [row.gain for row in here if row.gain is not None]


def is_own(row: Measurement, case: Case) -> bool:
    """Was it measured on this very machine and device, by whoever uses it?"""
    return row.source == HERE and row.machine == case.machine.name and row.device == case.device.name


def _own_first(rows: Sequence[Measurement], case: Case) -> Sequence[Measurement]:
    """What was measured on this machine outranks what was measured on others of its kind; of that, what was measured in
    just such a run outranks other sizes and numbers of steps."""
    own = [row for row in rows if is_own(row, case)]
    return [row for row in own if _run_of(row) == _run_of(case)] or own or rows


def _run_of(shape: Measurement | Case) -> tuple[int, int, int, int]:
    return shape.width, shape.height, shape.num_frames, shape.num_inference_steps


def measured_identical(rows: tuple[Measurement, ...], case: Case) -> bool:
    """Did every run of this dtype on this kind of device give the same frames with the lever and without?"""
    here = [row for row in rows if row.device == case.device.name and row.dtype == case.dtype]
    return bool(here) and all(row.distances.get("max_abs") == 0.0 for row in here)


def measured_slower(rows: tuple[Measurement, ...], case: Case) -> str | None:
    """Why rows of this model on this kind of device speak against a lever; None: they do not."""
    gains = gains_on(rows, case)
    if gains and max(gains) < 1 - NOISE:
        return f"measured slower on {case.device.name}: {max(gains):.2f}x"
    return None


def unproven_loss(rows: tuple[Measurement, ...], fidelity: Fidelity, case: Case) -> str | None:
    """Why measured rows do not let a LOSSY lever engage unasked under this word; None: they do.

    Rows of this machine speak before those of its kind of device, and those before others'; what is published elsewhere
    speaks for `quality` and below. Every metric that was measured must lie within its bound, by the median over rows.
    """
    if denied := next((row for row in rows if row.verdict == "denied"), None):
        return denied_by(denied)
    rows = _measured(rows)
    if fidelity is Fidelity.FAITHFUL:
        rows = tuple(row for row in rows if row.source != "published")
    rows = tuple(row for row in rows if row.device == case.device.name) or rows
    rows = tuple(_own_first(rows, case))
    if not rows:
        return "unmeasured here: its distance on this model is not in the ledger"
    gain = _median(row.gain if row.gain is not None and math.isfinite(row.gain) else 0.0 for row in rows)
    if gain < MIN_GAIN and not any(row.verdict == "allowed" for row in rows):
        return f"gains {gain:.2f}x, less than {MIN_GAIN}x" if gain else "its gain was not measured"
    bounds = BOUNDS[fidelity]
    measured = [metric for metric in bounds if any(metric in row.distances for row in rows)]
    if not measured:
        return f"no distance that fidelity {fidelity.value} speaks of was measured"
    for metric in measured:
        distance = _median(row.distances[metric] for row in rows if metric in row.distances)
        if not distance <= _limit(metric, rows, fidelity):
            return f"its measured distance ({metric} {distance:.3g}) is beyond what fidelity {fidelity.value} allows"
    return _beyond_rounding(rows) if fidelity is Fidelity.FAITHFUL else None


def _beyond_rounding(rows: tuple[Measurement, ...]) -> str | None:
    """Under `faithful` what acts inside a forward stays inside the rounding of one: a clip's own end may be chaotic."""
    errors = [row.distances["one_forward"] for row in rows if "one_forward" in row.distances]
    floors = [row.floor["one_forward"] for row in rows if "one_forward" in row.floor]
    if not errors or _median(errors) <= (_median(floors) if floors else 0.0):
        return None
    floor = f"{_median(floors):.2g}" if floors else "not measured"
    return f"its error in one forward ({_median(errors):.2g}) is beyond that of rounding ({floor})"


def _is_overruled(denied: Measurement, rows: Iterable[Measurement], case: Case) -> bool:
    """A denial from elsewhere says nothing more where the very setting was measured on this machine."""
    own = [row for row in rows if is_own(row, case) and row.distances]
    return not is_own(denied, case) and bool(own)


def _measured(rows: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
    """Rows that say something of quality."""
    return tuple(row for row in rows if row.source != "random weights" and row.distances)


def _limit(metric: str, rows: tuple[Measurement, ...], fidelity: Fidelity) -> float:
    """The word's bound; under `faithful` the model's own rounding floor too, without which nothing is faithful."""
    bound = BOUNDS[fidelity][metric]
    if fidelity is not Fidelity.FAITHFUL:
        return bound
    floors = [row.floor[metric] for row in rows if math.isfinite(row.floor.get(metric, math.nan))]
    return min(bound, _median(floors)) if floors else 0.0


# --------------------------------------------------------------------------- time and memory


def expect(case: Case, ledger: Ledger) -> Expected:
    seconds, seconds_basis = _expected_seconds(case, ledger)
    peak_bytes, memory_basis = _expected_peak(case, ledger)
    return Expected(
        seconds=seconds,
        seconds_basis=seconds_basis,
        peak_bytes=peak_bytes,
        memory_basis=memory_basis,
        stage_peak_bytes=memory.peaks(case) if case.family.transformer_width else {},
    )


def _expected_seconds(case: Case, ledger: Ledger) -> tuple[float | None, str]:
    """From the nearest measured shape, scaled by tokens and steps; None where nothing was measured."""
    rows = ledger.runs_like(case)
    if not rows:
        return None, "unmeasured on this device: the first run measures it"
    near = _own_first(_same_shape(rows, case) or rows[:1], case)
    step_ms = _median(row.step_ms for row in near if row.step_ms is not None)
    row = near[0]
    scale = _tokens(case) / _tokens_of(row, case)
    rest_s = _median(max(0.0, (r.total_s or 0.0) - (r.step_ms or 0.0) * r.num_inference_steps / 1000) for r in near)
    seconds = scale * (step_ms * case.num_inference_steps / 1000 + rest_s)
    is_same = (row.width, row.height, row.num_frames) == (case.width, case.height, case.num_frames)
    how = "same shape" if is_same else f"scaled by tokens from {row.width}x{row.height}x{row.num_frames}"
    return seconds, f"{row.source}, {how}, n={len(near)}"


def _median(values: Iterable[float]) -> float:
    """Of the `statistics` module's only this is needed, and importing it costs a tenth of the command's time."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _same_shape(rows: tuple[Measurement, ...], case: Case) -> tuple[Measurement, ...]:
    shape = (case.width, case.height, case.num_frames)
    return tuple(row for row in rows if (row.width, row.height, row.num_frames) == shape)


def _expected_peak(case: Case, ledger: Ledger) -> tuple[int | None, str]:
    """The formula, or what a run of no more tokens was seen to take, if that is more. Only the formula on a CPU, where
    the rows hold the peak of a whole process, and where levers save memory: the rows are of runs without them too."""
    formula, basis = expected_bytes(case)
    dense = memory.dense(replace(case, weights=_dense_bytes(case)))
    is_saved = memory.peak(case) < memory.peak(dense)
    rows = () if case.device.kind == "cpu" or is_saved else ledger.runs_like(case)
    seen = max((row.peak_bytes or 0 for row in rows if _tokens_of(row, case) <= _tokens(case)), default=0)
    if seen > (formula or 0):
        return seen, "measured, for a clip of no more tokens"
    return formula, basis


def expected_bytes(case: Case) -> tuple[int | None, str]:
    """Weights by their counted parameters, working memory by formula; a guard against hopeless runs, no promise."""
    if not case.weights or not case.family.transformer_width:
        return None, "the number of parameters of this model is not known"
    basis = "weights counted, working memory by formula, not measured here"
    if not memory.decoder(case.family).is_measured:
        basis += "; that of this decoder not measured anywhere"
    return memory.peak(case), basis


def _dense_bytes(case: Case) -> dict[str, int]:
    """Of each role, by its share of the published counts; where a folder was counted, of that count."""
    family, value = case.family, BYTES_PER_VALUE[case.dtype]
    published = {
        "transformer": family.transformer_params,
        "text_encoder": family.text_encoder_params,
        "vae": family.vae_params,
    }
    if not case.parameters:
        return {}
    if not (total := sum(published.values())):
        return {"transformer": value * case.parameters}
    counted = {role: case.parameters * count // total for role, count in published.items()}
    counted["transformer"] += case.parameters - sum(counted.values())
    return {role: value * count for role, count in counted.items()}


def refuse_if_too_big(plan: Plan, family: Family, machine: Machine, device: Device) -> None:
    """Raise OutOfMemory before anything is read, with the size that would fit."""
    peak = plan.expected.peak_bytes
    if peak is None or peak <= device.free_bytes:
        return
    dense = case_of(plan.request, family, machine, device, plan.load)
    need, free = gib(peak), gib(device.free_bytes)
    advice = "; ".join(filter(None, (fitting(dense, plan.levers), _lever_that_fits(plan, dense))))
    raise OutOfMemory(f"{family.title} needs about {need} and {device.torch_name} has {free} free: {advice}")


def _lever_that_fits(plan: Plan, dense: Case) -> str:
    """A lever with which the clip as asked would fit, in words; of several the one that changes the film least."""
    found: list[tuple[int, str]] = []
    for cls in ORDER:
        for wish in cls.grid(dense.num_inference_steps):
            lever = cls.from_wish(dict(wish))
            others = {type(each): each for each in plan.levers} | {cls: lever}
            levers = [others.get(each) for each in ORDER]
            case = under(dense, [each for each in levers if each is not None])
            if not (unmet_need(cls, dense) or lever.lacks(dense)) and memory.peak(case) <= dense.device.free_bytes:
                found.append((lever.promises(dense).rank, ", ".join(f"{knob}={word}" for knob, word in wish)))
    return f"or as it is with {min(found, key=lambda each: each[0])[1]}" if found else ""


def fitting(dense: Case, levers: Iterable[Lever], budget_bytes: int | None = None) -> str:
    """The largest smaller clip of about the same aspect whose estimate under the levers fits and that the model can
    make, in words."""
    budget = dense.device.free_bytes if budget_bytes is None else budget_bytes
    levers = tuple(levers)
    if found := _largest(dense, levers, budget):
        return found
    if sum(under(dense, levers).weights.values()) > budget:
        return "its weights alone do not fit here: choose a smaller model or a device with more memory"
    return "not even its smallest clip fits here: choose a smaller model or a device with more memory"


def _largest(dense: Case, levers: tuple[Lever, ...], budget: int) -> str | None:
    for smaller in _smaller(dense):
        if (expected_bytes(under(memory.dense(smaller), levers))[0] or 0) <= budget:
            return f"{smaller.width}x{smaller.height} with {smaller.num_frames} frames would fit"
    return None


def fitting_after(expected: int, dense: Case, levers: Iterable[Lever]) -> str:
    """What to try when memory ran out all the same: seven tenths of the working memory beside the same weights."""
    levers = tuple(levers)
    weights = min(sum(under(dense, levers).weights.values()), expected)
    budget = int(weights + 0.7 * (expected - weights))
    return _largest(dense, levers, budget) or "try fewer frames or a smaller size; by the plan none would take less"


def _smaller(case: Case) -> Iterator[Case]:
    """Valid clips of fewer tokens, from large to small."""
    multiple, step = case.family.size_multiple, case.family.frame_step
    for percent in range(95, 0, -5):
        width = max(multiple, round(case.width * percent / 100 / multiple) * multiple)
        height = max(multiple, round(case.height * percent / 100 / multiple) * multiple)
        frames = max(1, (case.num_frames - 1) * percent // 100 // step * step + 1)
        yield from _if_valid(replace(case, num_frames=frames), case)
        yield from _if_valid(replace(case, width=width, height=height), case)
        yield from _if_valid(replace(case, width=width, height=height, num_frames=frames), case)
    least = families.least_frames(case.family)
    yield from _if_valid(replace(case, width=multiple, height=multiple, num_frames=least), case)


def _if_valid(smaller: Case, case: Case) -> Iterator[Case]:
    try:
        families.check_size(case.family, smaller.width, smaller.height)
        families.check_frames(case.family, smaller.num_frames)
    except BadInput:
        return
    if _tokens(smaller) < _tokens(case):
        yield smaller


def gib(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / 2**30:.1f} GiB"


def _tokens(case: Case) -> int:
    return families.tokens(case.family, case.width, case.height, case.num_frames)


def _tokens_of(row: Measurement, case: Case) -> int:
    return families.tokens(case.family, row.width, row.height, row.num_frames)
