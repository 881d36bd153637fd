"""One clip from the command line: check the outputs, make it, write it, remember how long it took.

torch is imported only once the request has been checked: a slip in an option is answered at once.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undercrank import screen
from undercrank.ledger import append, read_ledger
from undercrank.machine import this_machine
from undercrank.metrics import fidelity_in_words
from undercrank.planner import make_plan, refuse_if_too_big
from undercrank.records import BadInput, Measurement, NotFound, Plan, Report, Request, RunFailed
from undercrank.settings import settings
from undercrank.sources import which_model
from undercrank.undo import swap_env
from undercrank.video import appears_whole, printable, read_recipe, safe_stem

if TYPE_CHECKING:
    from undercrank.engine import Clip, Engine
    from undercrank.lab import Lab

OnCancellable = Callable[[Callable[[str], bool]], AbstractContextManager[None]]

OPTIONS = {
    "prompt": "prompt", "model": "model", "negative_prompt": "negative_prompt", "image": "image",
    "frames": "num_frames", "fps": "fps", "steps": "num_inference_steps", "guidance": "guidance_scale",
    "guidance_2": "guidance_scale_2", "flow_shift": "flow_shift", "seed": "seed", "fidelity": "fidelity",
    "lever": "wishes", "device": "device", "dtype": "dtype", "allow_denied": "allow_denied",
}  # fmt: skip
"Command-line parameter -> field of the Request; `size` fills two."


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where the results go; checked before anything is loaded."""

    clip: Path | None
    master: Path | None
    report: Path | None

    @classmethod
    def checked(cls, clip: Path | None, *, master: Path | None, report: Path | None) -> Outputs:
        for path, suffix, option in ((clip, ".mp4", "-o"), (master, ".mkv", "--master"), (report, ".json", "--report")):
            if path is not None:
                _check_target(path, suffix, option)
        if clip is None:
            _check_folder(Path.cwd(), "-o")
        return cls(clip=clip, master=master, report=report)


def make_clip(
    asked: Request,
    outputs: Outputs,
    *,
    repeat: Path | None,
    reference: Path | None = None,
    given: frozenset[str],
    allow_pickle: bool,
    local_files_only: bool,
    as_json: bool,
    quiet: bool,
    on_cancellable: OnCancellable,
) -> None:
    """Make, write, report. Raises the errors of the engine; OSError where a file cannot be written."""
    recipe = _recipe(repeat) if repeat else None
    request = _repeated(recipe, asked, given) if recipe else asked
    if not recipe and "prompt" not in given:
        raise BadInput('what shall the film show? undercrank generate "a red ball rolls left"', field="prompt")
    plan = _plan(request, allow_pickle, local_files_only)
    _check_space(outputs, plan)
    beside_reference = _beside(reference, plan) if reference else None
    _tell_plan(plan, as_json=as_json, quiet=quiet)

    with (
        screen.showing(as_json=as_json, quiet=quiet) as show,
        _engine_class()(allow_pickle=allow_pickle, local_files_only=local_files_only, encode_ahead=True) as engine,
        on_cancellable(engine.cancel),
    ):
        clip = engine.generate(request, listener=show)
        if beside_reference:
            clip = beside_reference(clip)

        def show_or_stop(event: Any) -> None:
            show(event)
            engine.check_cancelled()

        file = _write(clip, outputs, show_or_stop)
    remember(clip.report)
    _tell_result(clip.report, file, recipe, notes_before=plan.notes, as_json=as_json, quiet=quiet)


def _beside(reference: Path, plan: Plan) -> Callable[[Clip], Clip]:
    """Read the reference now, so that a wrong one is told of before anything is made."""
    with calm_threads():
        from undercrank.references import beside_reference, read_reference

    footage, floor = read_reference(reference, plan), read_ledger().floor_for(plan)
    return lambda clip: beside_reference(clip, footage, floor)


def run_bench(
    a: Request,
    b: Request,
    *,
    pairs: int,
    keep: bool,
    look: bool,
    allow_pickle: bool,
    local_files_only: bool,
    as_json: bool,
    on_cancellable: OnCancellable,
) -> None:
    """Time A against B and print what was seen. Raises the errors of the engine and of `bench.compare`."""
    from undercrank.bench import compare, in_words

    for request in (a, b):
        _plan(request, allow_pickle, local_files_only)
    with (
        _engine_class()(allow_pickle=allow_pickle, local_files_only=local_files_only) as engine,
        on_cancellable(engine.cancel),
    ):
        from undercrank.references import compare_clips

        comparison, rows = compare(
            engine.generate,
            a,
            b,
            pairs=pairs,
            lab=_lab(engine) if look else None,
            judge=lambda x, y: compare_clips(x, y, read_ledger().floor_for(x.report.plan)),
        )
    if keep:
        for row in rows:
            append(row)
    if as_json:
        screen.print_json({"event": "done", "comparison": comparison.to_dict(), "rows": [r.to_dict() for r in rows]})
    else:
        screen.put(in_words(comparison))


def _lab(engine: Engine) -> Lab:
    from undercrank.lab import Lab

    return Lab(engine)


def _engine_class() -> type[Engine]:
    with calm_threads():
        from undercrank.engine import Engine

        return Engine


@contextmanager
def calm_threads() -> Iterator[None]:
    """Import torch in this block: its CPU threads then soon sleep while they wait for each other.

    OpenMP reads how long they spin once, when it is loaded. Its default is long: on a machine whose cores have other
    work too, a clip takes twenty times as long. flipbook on two cores, ms a step (8 steps, one run each), idle and with
    one core busy: default 205 and over 4000; spinning a thousand times 241 and 457; not at all 273 and 410.
    """
    with ExitStack() as stack:
        if settings().omp_wait_policy is None:
            stack.enter_context(swap_env("OMP_WAIT_POLICY", "PASSIVE"))
            stack.enter_context(swap_env("GOMP_SPINCOUNT", "1000"))
        yield


# --------------------------------------------------------------------------- before


def _recipe(file: Path) -> dict[str, Any]:
    """The recipe of a clip, by its shape: anybody may have written the file."""
    if not file.exists():
        raise NotFound(f"there is no file {file}")
    recipe = read_recipe(file)
    parts = {"request": dict, "plan": dict, "machine": dict, "trace": dict, "notes": list}
    plan = recipe.get("plan")
    decisions = plan.get("decisions") if isinstance(plan, dict) else None
    is_ours = all(isinstance(recipe.get(name), kind) for name, kind in parts.items()) and isinstance(decisions, list)
    if not is_ours or not all(isinstance(d, dict) and {"lever", "chosen", "reason"} <= set(d) for d in decisions or ()):
        raise BadInput(f"{file}: the recipe inside is not one of undercrank's", field="from")
    return recipe


def _plan(request: Request, allow_pickle: bool, local_files_only: bool) -> Plan:
    family, load = which_model(request, allow_pickle=allow_pickle, local_files_only=local_files_only)
    machine = this_machine()
    plan = make_plan(request, family=family, machine=machine, ledger=read_ledger(), load=load)
    refuse_if_too_big(plan, family, machine, machine.device(plan.load.device))
    return plan


def _repeated(recipe: Mapping[str, Any], asked: Request, given: frozenset[str]) -> Request:
    """The recipe's request; what the person typed wins."""
    try:
        request = Request.from_dict(recipe["request"])
    except (KeyError, TypeError) as error:
        raise BadInput("the recipe in this file is not one of undercrank's", field="from") from error
    typed = {field: getattr(asked, field) for option, field in OPTIONS.items() if option in given}
    if "size" in given:
        typed |= {"width": asked.width, "height": asked.height}
    return replace(request, **typed)


def _check_target(path: Path, suffix: str, option: str) -> None:
    if path.suffix.lower() != suffix:
        raise BadInput(
            f"{option} {path}: the name must end in {suffix}, such as {path.stem or 'clip'}{suffix}", field=option
        )
    if path.is_dir():
        raise BadInput(f"{option} {path}: is a folder; name a file in it", field=option)
    _check_folder(path.absolute().parent, option)


def _check_folder(folder: Path, option: str) -> None:
    if not folder.is_dir():
        raise BadInput(f"{option}: there is no folder {folder}; make it with mkdir -p", field=option)
    if not os.access(folder, os.W_OK):
        raise BadInput(f"{option}: the folder {folder} is read-only; choose another", field=option)


def _check_space(outputs: Outputs, plan: Plan) -> None:
    """Refuse before the run what would surely fail after it: an mp4 needs at the very least a bit per pixel."""
    assert plan.request.width and plan.request.height and plan.request.num_frames
    needed = plan.request.width * plan.request.height * plan.request.num_frames // 100 + 4096
    folder = (outputs.clip or Path.cwd() / "clip.mp4").absolute().parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunFailed(f"the disk is full: {folder} has {free} bytes free, the clip needs about {needed}")


# --------------------------------------------------------------------------- after


def _write(clip: Clip, outputs: Outputs, listener: Any) -> Path:
    request = clip.report.request
    default = _unused(Path(f"{safe_stem(request.prompt)}-{request.seed}.mp4"))
    begun = time.perf_counter()
    file = clip.save(outputs.clip or default, listener=listener)
    if outputs.master:
        clip.save_master(outputs.master)
    if outputs.report:
        trace = clip.report.trace
        stage_s = {**trace.stage_s, "encode": trace.stage_s.get("encode", 0.0) + time.perf_counter() - begun}
        report = replace(clip.report, trace=replace(trace, stage_s=stage_s))
        with appears_whole(outputs.report) as part:
            part.write_text(report.to_json(indent=2) + "\n", encoding="utf-8")
    return file


def _unused(path: Path) -> Path:
    """A name that we made up must not replace an earlier film."""
    candidates = [path, *(path.with_stem(f"{path.stem}-{number}") for number in range(2, 10_000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def remember(report: Report) -> None:
    """A row of this run's times in the user's own ledger: the next plan knows what to expect."""
    row = _row_of(report)
    try:
        append(row)
    except OSError as error:  # a read-only home must not cost the clip; it is said, the figure is in the report
        screen.say(f"note: the times of this run could not be kept: {error}")


def _row_of(report: Report) -> Measurement:
    from undercrank.bench import row_of

    steps = sorted(report.trace.step_ms)
    return row_of(
        report,
        lever=None,
        n=1,
        step_ms=steps[len(steps) // 2] if steps else None,
        spread_ms=(steps[-1] - steps[0]) / 2 if steps else None,
        total_s=sum(seconds for stage, seconds in report.trace.stage_s.items() if stage != "load"),
        peak_bytes=report.trace.peak_bytes,
        note=f"levers: {', '.join(receipt.lever for receipt in report.receipts) or 'none'}",
    )


# --------------------------------------------------------------------------- said


def _tell_plan(plan: Plan, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        screen.print_json({"event": "plan", "plan": plan.to_dict()})
    elif not quiet:
        for note in plan.notes:
            screen.say(f"note: {note}")
        on = ", ".join(f"{d.lever}" for d in plan.decisions if d.status == "applied") or "none"
        screen.say(
            f"{plan.load.family}, {plan.load.dtype} on {plan.load.device}; levers: {on}; promise: {plan.promise.value}"
        )


def _tell_result(
    report: Report,
    file: Path,
    recipe: Mapping[str, Any] | None,
    *,
    notes_before: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    if as_json:
        screen.print_json({"event": "done", "file": str(file), "report": report.to_dict()})
        return
    if quiet:
        return
    for note in report.notes:
        if note not in notes_before:
            screen.say(f"note: {note}")
    for line in fidelity_in_words(report.fidelity) if report.fidelity else ():
        screen.say(line)
    if recipe is not None:
        screen.say(_compared(recipe, report))
    screen.put(str(file))


def _compared(recipe: Mapping[str, Any], report: Report) -> str:
    """Is it the same film? If not, what differs."""
    if recipe.get("frames_hash") == report.frames_hash:
        return "the same frames as in the recipe, bit for bit"
    reasons = []
    if recipe.get("model_fingerprint") != report.model_fingerprint:
        reasons.append("other weights")
    if recipe.get("machine", {}).get("name") != report.machine.name:
        reasons.append("another machine")
    if recipe.get("machine", {}).get("packages") != report.machine.packages:
        reasons.append("other package versions")
    if recipe.get("trace", {}).get("cpu_threads") != report.trace.cpu_threads:
        reasons.append("another number of CPU threads")
    if recipe.get("request") != report.request.to_dict():
        reasons.append("changed settings")
    return f"not the same frames as in the recipe: {', '.join(reasons) or 'no difference in the recipe explains it'}"


def recipe_in_words(file: Path, *, as_json: bool) -> str:
    """What `undercrank show` prints."""
    recipe = _recipe(file)
    if as_json:
        return json.dumps(recipe, indent=2)
    request, plan = recipe["request"], recipe["plan"]
    lines = [f"{key}: {request[key]}" for key in request if request[key] not in (None, [], "")]
    lines += [f"{d['lever']}: {d['chosen']} - {d['reason']}" for d in plan.get("decisions", [])]
    lines += [f"note: {note}" for note in recipe.get("notes", [])]
    stages = recipe["trace"].get("stage_s")
    seconds = stages.items() if isinstance(stages, dict) else ()
    lines.append("seconds: " + ", ".join(f"{stage} {s:.1f}" for stage, s in seconds if isinstance(s, float)))
    lines += [f"{key}: {recipe.get(key)}" for key in ("model_fingerprint", "frames_hash", "undercrank")]
    return "\n".join(printable(line) for line in lines)  # a prompt from elsewhere must not steer the terminal
