"""(request, machine, family, ledger) -> Plan: a pure function, made without torch.

The request is checked and its gaps are filled; then every lever in ORDER gets one decision with a reason,
engaged or not; then time and memory are estimated, each with its basis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction

from undercrank import families
from undercrank.ledger import Ledger
from undercrank.levers import ORDER, knobs, lever_of_knob
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
)

MAX_GUIDANCE = 100.0
MAX_SEED = 2**63 - 1
MAX_PROMPT_CHARS = 100_000
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}

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
) -> Plan:
    """Decide everything before the first weight is read. Raises BadInput and LeverRefused.

    load: where the weights come from, if not from the family's repository. live: a pipeline at hand. strict:
    False leaves the request's numbers to the pipeline's own checks (a call inside `accelerate`).
    """
    device = live.device if live else machine.device(request.device)
    if live is not None:
        request = replace(request, dtype=live.dtype)
    resolved, notes = resolve(request, family, device) if strict else adopt(request, family)
    load = replace(load or load_spec(family), dtype=str(resolved.dtype), device=device.torch_name)
    levers, decisions = decide(resolved, case_of(resolved, family, device, load, live), ledger)
    for lever in levers:
        load = lever.configure(load)
    case = case_of(resolved, family, device, load, live, engaged=tuple(lever.name for lever in levers))
    return Plan(
        request=resolved,
        load=load,
        levers=levers,
        decisions=decisions,
        promise=Promise.weakest(lever.promises(case) for lever in levers),
        expected=expect(case, ledger),
        notes=notes,
    )


def load_spec(family: Family) -> LoadSpec:
    return LoadSpec(family=family.id, source=family.repo, dtype=family.dtype, device="cpu")


def case_of(
    request: Request,
    family: Family,
    device: Device,
    load: LoadSpec,
    live: Live | None = None,
    engaged: tuple[str, ...] = (),
) -> Case:
    """The case that levers are asked about, from a resolved request."""
    assert request.width and request.height and request.num_frames and request.num_inference_steps
    assert request.guidance_scale is not None and request.dtype is not None
    return Case(
        family=family,
        device=device,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        dtype=request.dtype,
        scheduler=live.scheduler if live else None,
        engaged=engaged,
        parameters=load.parameters or family.transformer_params + family.text_encoder_params + family.vae_params,
    )


# --------------------------------------------------------------------------- the request


def resolve(request: Request, family: Family, device: Device) -> tuple[Request, tuple[str, ...]]:
    """Check every field and fill the gaps from the family's row. Raises BadInput naming the field."""
    width = family.width if request.width is None else request.width
    height = family.height if request.height is None else request.height
    num_frames = family.num_frames if request.num_frames is None else request.num_frames
    families.check_size(family, width, height)
    families.check_frames(family, num_frames)
    _check_task(request, family)
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


def _check_task(request: Request, family: Family) -> None:
    takes_image = "image_input" in family.traits
    if takes_image and not request.image:
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
    if not isinstance(guidance, int | float) or isinstance(guidance, bool) or not math.isfinite(guidance):
        raise BadInput(
            f"guidance {guidance}: must be a finite number from 0 to {MAX_GUIDANCE:g}", field="guidance_scale"
        )
    if not 0 <= guidance <= MAX_GUIDANCE:
        near = 0.0 if guidance < 0 else MAX_GUIDANCE
        raise BadInput(
            f"guidance {guidance:g}: must lie from 0 to {MAX_GUIDANCE:g}, for instance {near:g} or "
            f"{family.guidance_scale:g} (0 to 1 turn guidance off)",
            field="guidance_scale",
        )
    return float(guidance)


def _checked_seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        near = 0 if isinstance(seed, int) and seed < 0 else MAX_SEED
        raise BadInput(f"seed {seed}: must be a whole number from 0 to {MAX_SEED}, the nearest is {near}", field="seed")
    return seed


def _checked_dtype(dtype: str | None, family: Family, device: Device) -> str:
    """float32 on a CPU, where lower precision is seldom faster and always less exact; the family's elsewhere."""
    if dtype is None:
        return "float32" if device.kind == "cpu" else family.dtype
    if dtype not in BYTES_PER_VALUE:
        raise BadInput(f"dtype {dtype!r}: choose {', '.join(BYTES_PER_VALUE)}", field="dtype")
    if dtype == "float16" and family.dtype == "bfloat16":
        raise BadInput(
            f"{family.title} was trained in bfloat16 and overflows in float16: choose bfloat16", field="dtype"
        )
    return dtype


def check_wishes(wishes: tuple[tuple[str, str], ...]) -> None:
    """Every wish must name a knob of this version, once."""
    known = knobs()
    for index, (knob, _) in enumerate(wishes):
        if knob not in known:
            near = get_close_matches(knob, known, n=3, cutoff=0.5) or list(known)
            raise BadInput(f"no lever {knob!r}: this version has {', '.join(near)}", field=knob)
        if knob in {other for other, _ in wishes[:index]}:
            raise BadInput(f"{knob} is given twice", field=knob)


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


def decide(request: Request, case: Case, ledger: Ledger) -> tuple[tuple[Lever, ...], tuple[Decision, ...]]:
    """One decision for every lever in ORDER. Raises LeverRefused for an explicit wish that cannot be honoured."""
    levers: list[Lever] = []
    decisions: list[Decision] = []
    for cls in ORDER:
        case = replace(case, engaged=tuple(lever.name for lever in levers))
        lever, decision = _decide_one(cls, request, case, ledger)
        decisions.append(decision)
        if lever is not None:
            levers.append(lever)
    return tuple(levers), tuple(decisions)


def _decide_one(cls: type[Lever], request: Request, case: Case, ledger: Ledger) -> tuple[Lever | None, Decision]:
    wishes = {knob: value for knob, value in request.wishes if lever_of_knob(knob) is cls}
    explicit = {knob: value for knob, value in wishes.items() if value not in ("auto", "off")}
    requested = " ".join(f"{knob}={value}" for knob, value in wishes.items()) or "auto"
    lever = cls.from_wish(explicit)
    promise = lever.promises(case)

    def answer(status: Status, chosen: str, reason: str, rows: tuple[Measurement, ...] = ()) -> Decision:
        return Decision(
            lever=cls.name, requested=requested, chosen=chosen, status=status, promise=promise, reason=reason,
            evidence=tuple(row.id for row in rows),
        )  # fmt: skip

    if "off" in wishes.values():
        return None, answer(Status.DECLINED, "off", "asked for off")
    if unmet := unmet_need(cls, case):
        if explicit:
            raise LeverRefused(f"{requested}: {unmet}")
        return None, answer(Status.UNSUPPORTED, "off", unmet)
    if explicit:
        if request.fidelity is Fidelity.EXACT and promise is not Promise.EXACT:
            raise LeverRefused(
                f"{requested} is {promise.value}, and fidelity exact was asked for: leave one of the two out"
            )
        return lever, answer(Status.APPLIED, "on", "asked for")
    if promise.rank > request.fidelity.ceiling.rank:
        return None, answer(
            Status.DECLINED, "off", f"{promise.value}, and fidelity {request.fidelity.value} allows less"
        )
    if doubt := lever.doubt(case):
        return None, answer(Status.DECLINED, "off", doubt)
    rows = ledger.of_lever(cls.name, case)
    if slower := measured_slower(rows, case):
        return None, answer(Status.DECLINED, "off", slower, rows)
    if promise is Promise.LOSSY and (unproven := unproven_loss(rows, request.fidelity)):
        return None, answer(Status.DECLINED, "off", unproven, rows)
    return lever, answer(Status.APPLIED, "on", _why(lever, promise), rows)


def unmet_need(cls: type[Lever], case: Case) -> str | None:
    """What a table can say against this lever here, with the remedy; None: nothing."""
    needs = cls.needs
    if lacking := sorted(needs.traits - case.family.traits):
        return f"{case.family.title} lacks {', '.join(lacking)}"
    if needs.capability and (case.device.capability or (0, 0)) < needs.capability:
        return f"needs a GPU of capability {needs.capability[0]}.{needs.capability[1]} or later"
    if clash := sorted(needs.conflicts & set(case.engaged)):
        return f"does not go together with {', '.join(clash)}: turn that off"
    return None


def measured_slower(rows: tuple[Measurement, ...], case: Case) -> str | None:
    """Why rows of this model on this kind of device speak against a lever; None: they do not."""
    gains = [row.gain for row in rows if row.gain is not None and row.device == case.device.name]
    if gains and max(gains) < 1 - NOISE:
        return f"measured slower on {case.device.name}: {max(gains):.2f}x"
    return None


def unproven_loss(rows: tuple[Measurement, ...], fidelity: Fidelity) -> str | None:
    """Why measured rows do not let a LOSSY lever engage unasked under this word; None: they do."""
    rows = tuple(row for row in rows if row.source != "random weights" and row.distances)
    if not rows:
        return "unmeasured here: its distance on this model is not in the ledger"
    best = max(rows, key=lambda row: row.gain or 0.0)
    if (best.gain or 0.0) < MIN_GAIN:
        return f"gains {best.gain or 0:.2f}x, less than {MIN_GAIN}x"
    for metric, bound in BOUNDS.get(fidelity, {}).items():
        floor = best.floor.get(metric)
        limit = min(bound, floor) if fidelity is Fidelity.FAITHFUL and floor is not None else bound
        if metric in best.distances and best.distances[metric] <= limit:
            return None
    return f"its measured distance is beyond what fidelity {fidelity.value} allows"


def _why(lever: Lever, promise: Promise) -> str:
    return f"{lever.summary}; promise {promise.value}"


# --------------------------------------------------------------------------- time and memory


def expect(case: Case, ledger: Ledger) -> Expected:
    seconds, seconds_basis = _expected_seconds(case, ledger)
    peak_bytes, memory_basis = expected_bytes(case)
    return Expected(seconds=seconds, seconds_basis=seconds_basis, peak_bytes=peak_bytes, memory_basis=memory_basis)


def _expected_seconds(case: Case, ledger: Ledger) -> tuple[float | None, str]:
    """From the nearest measured shape, scaled by tokens and steps; None where nothing was measured."""
    rows = ledger.runs_like(case)
    if not rows:
        return None, "unmeasured on this device: the first run measures it"
    near = _same_shape(rows, case) or rows[:1]
    step_ms = _median(row.step_ms for row in near if row.step_ms is not None)
    row = near[0]
    scale = _tokens(case) / _tokens_of(row, case)
    rest_s = _median(max(0.0, (r.total_s or 0.0) - (r.step_ms or 0.0) * r.num_inference_steps / 1000) for r in near)
    seconds = scale * (step_ms * case.num_inference_steps / 1000 + rest_s)
    how = "same shape" if scale == 1 else f"scaled by tokens from {row.width}x{row.height}x{row.num_frames}"
    return seconds, f"{row.source}, {how}, n={len(near)}"


def _median(values: Iterable[float]) -> float:
    """Of the `statistics` module's only this is needed, and importing it costs a tenth of the command's time."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _same_shape(rows: tuple[Measurement, ...], case: Case) -> tuple[Measurement, ...]:
    shape = (case.width, case.height, case.num_frames)
    return tuple(row for row in rows if (row.width, row.height, row.num_frames) == shape)


def expected_bytes(case: Case) -> tuple[int | None, str]:
    """Weights by their counted parameters, working memory by formula; a guard against hopeless runs, no promise."""
    family, value = case.family, BYTES_PER_VALUE[case.dtype]
    if not case.parameters or not family.transformer_width:
        return None, "the number of parameters of this model is not known"
    weights = value * case.parameters
    # One block's inputs, its MLP (4 x width) and attention's q, k, v and output, all alive at once.
    denoise = value * _tokens(case) * family.transformer_width * 12
    # The VAE's widest layers at full size over one chunk of frames, in and out.
    decode = value * case.width * case.height * family.temporal_stride * 96 * 2
    frames = 4 * 3 * case.width * case.height * case.num_frames
    return weights + max(denoise, decode + frames), "weights counted, working memory by formula, not measured"


def refuse_if_too_big(plan: Plan, family: Family, device: Device) -> None:
    """Raise OutOfMemory before anything is read, with the size that would fit."""
    peak = plan.expected.peak_bytes
    if peak is None or peak <= device.free_bytes:
        return
    case = case_of(plan.request, family, device, plan.load)
    need, free = gib(peak), gib(device.free_bytes)
    raise OutOfMemory(f"{family.title} needs about {need} and {device.torch_name} has {free} free: {fitting(case)}")


def fitting(case: Case, budget_bytes: int | None = None) -> str:
    """The largest smaller clip of the same aspect whose estimate fits, in words."""
    budget = case.device.free_bytes if budget_bytes is None else budget_bytes
    multiple, step = case.family.size_multiple, case.family.frame_step
    for percent in range(95, 4, -5):
        width = max(multiple, round(case.width * percent / 100 / multiple) * multiple)
        height = max(multiple, round(case.height * percent / 100 / multiple) * multiple)
        frames = max(1, (case.num_frames - 1) * percent // 100 // step * step + 1)
        for smaller in (replace(case, num_frames=frames), replace(case, width=width, height=height),
                        replace(case, width=width, height=height, num_frames=frames)):  # fmt: skip
            if _tokens(smaller) < _tokens(case) and (expected_bytes(smaller)[0] or 0) <= budget:
                return f"{smaller.width}x{smaller.height} with {smaller.num_frames} frames would fit"
    return "its weights alone do not fit here: choose a smaller model or a device with more memory"


def gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _tokens(case: Case) -> int:
    return families.tokens(case.family, case.width, case.height, case.num_frames)


def _tokens_of(row: Measurement, case: Case) -> int:
    return families.tokens(case.family, row.width, row.height, row.num_frames)
