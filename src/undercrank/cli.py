"""The command line: about ten lines a command, each calling one function below. torch is imported by what runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from undercrank import __version__, families
from undercrank.records import BadInput, Cancelled, Fidelity, NotFound, Plan, Request, RunFailed, UndercrankError
from undercrank.settings import settings

app = typer.Typer(
    name="undercrank",
    help="Make video with open diffusion models, as fast as the hardware allows, and know what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PromptArg = Annotated[str | None, typer.Argument(help="What the film shows.", show_default=False)]
Model = Annotated[str, typer.Option("--model", help="Family id, hub id or folder.")]
Negative = Annotated[str | None, typer.Option("--negative-prompt", help="What it must not show.")]
ImageFile = Annotated[str | None, typer.Option("--image", help="First frame, for models that take one.")]
Size = Annotated[str | None, typer.Option("--size", metavar="WxH", help="Pixels, e.g. 832x480.")]
Frames = Annotated[int | None, typer.Option("--frames", help="Number of frames.")]
Fps = Annotated[str | None, typer.Option("--fps", help="Frames a second, e.g. 16 or 24000/1001.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Denoising steps.")]
Guidance = Annotated[float | None, typer.Option("--guidance", help="Guidance scale; 1 or less: off.")]
SecondGuidance = Annotated[float | None, typer.Option("--guidance-2", help="Of the second expert, if there is one.")]
Shift = Annotated[float | None, typer.Option("--flow-shift", help="Shift of the noise schedule.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed makes the same film.")]
FidelityWord = Annotated[str, typer.Option("--fidelity", help="exact, faithful, quality, balanced or fast.")]
Levers = Annotated[list[str] | None, typer.Option("--lever", metavar="NAME=VALUE", help="auto, off, on or a setting.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
AllowDenied = Annotated[bool, typer.Option("--allow-denied", help="Use a setting that measured rows deny.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only errors.")]
Pickles = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled weights, which can run code.")]
LocalOnly = Annotated[bool, typer.Option("--local-files-only", help="Never ask the network for a model.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
DataFolder = Annotated[Path | None, typer.Option("--data", help="Folder of jobs and clips.", show_default=False)]
Database = Annotated[str | None, typer.Option("--db", metavar="URL", help="Job store; UNDERCRANK_DB when left out.")]
MaxJobs = Annotated[int | None, typer.Option("--max-jobs", min=1, help="Clips queued and running at a time.")]
MaxWork = Annotated[int | None, typer.Option("--max-work", min=1, help="Pixels x frames x steps of these together.")]


def console() -> None:
    """Entry point of the `undercrank` command: `main`, and then away at once.

    Taking torch's and transformers' modules apart takes the interpreter a second or more, which would make a cancel
    look deaf. Everything of ours has been closed by then, so there is nothing left to do but flush.
    """
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if "torch" not in sys.modules:
            raise
        with contextlib.suppress(BrokenPipeError):  # whoever read us has gone: nobody is left to be told
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """The command: every foreseen error is one line and an exit code. Ends in SystemExit."""
    # A daemon may start us with these closed; then nobody listens, and nothing may fail for that.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    with one_line_errors(debug="--debug" in sys.argv, as_json="--json" in sys.argv):
        app()


@app.command()
def generate(
    context: typer.Context,
    prompt: PromptArg = None, model: Model = "flipbook", negative_prompt: Negative = None, image: ImageFile = None,
    size: Size = None, frames: Frames = None, fps: Fps = None, steps: Steps = None, guidance: Guidance = None,
    guidance_2: SecondGuidance = None, flow_shift: Shift = None,
    seed: Seed = None, fidelity: FidelityWord = "faithful", lever: Levers = None, device: DeviceName = None,
    dtype: Dtype = None, allow_denied: AllowDenied = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The mp4 to write.")] = None,
    master: Annotated[Path | None, typer.Option(help="Also write a lossless .mkv.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report as .json.")] = None,
    repeat: Annotated[Path | None, typer.Option("--from", help="Repeat the recipe inside this file.")] = None,
    reference: Annotated[Path | None, typer.Option("--reference", help="A lossless film to measure it by.")] = None,
    as_json: AsJson = False, quiet: Quiet = False, allow_pickle: Pickles = False, local_files_only: LocalOnly = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Make a clip."""
    from undercrank import oneshot

    asked = _request(prompt, model, negative_prompt, image, size, frames, fps, steps, guidance, seed, fidelity, lever,
                     device, dtype)  # fmt: skip
    asked = replace(asked, guidance_scale_2=guidance_2, flow_shift=flow_shift, allow_denied=allow_denied)
    outputs = oneshot.Outputs.checked(output, master=master, report=report)
    oneshot.make_clip(
        asked,
        outputs,
        repeat=repeat,
        reference=reference,
        given=_given_options(context),
        allow_pickle=allow_pickle,
        local_files_only=local_files_only,
        as_json=as_json,
        quiet=quiet,
        on_cancellable=_stop_on_signal,
    )


@app.command()
def plan(
    prompt: PromptArg = None, model: Model = "flipbook", negative_prompt: Negative = None, image: ImageFile = None,
    size: Size = None, frames: Frames = None, fps: Fps = None, steps: Steps = None, guidance: Guidance = None,
    guidance_2: SecondGuidance = None, flow_shift: Shift = None,
    seed: Seed = None, fidelity: FidelityWord = "faithful", lever: Levers = None, device: DeviceName = None,
    dtype: Dtype = None, allow_denied: AllowDenied = False, as_json: AsJson = False, allow_pickle: Pickles = False,
    local_files_only: LocalOnly = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Show what would be done, how long it would take and why, without loading anything."""
    from undercrank.ledger import read_ledger
    from undercrank.machine import this_machine
    from undercrank.planner import make_plan
    from undercrank.sources import which_model

    asked = _request(prompt, model, negative_prompt, image, size, frames, fps, steps, guidance, seed, fidelity, lever,
                     device, dtype)  # fmt: skip
    asked = replace(asked, guidance_scale_2=guidance_2, flow_shift=flow_shift, allow_denied=allow_denied)
    family, load = which_model(asked, allow_pickle=allow_pickle, local_files_only=local_files_only)
    decided = make_plan(asked, family=family, machine=this_machine(), ledger=read_ledger(), load=load)
    typer.echo(decided.to_json(indent=2) if as_json else _plan_in_words(decided))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A clip made by undercrank.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Print the recipe inside a clip."""
    from undercrank import oneshot

    typer.echo(oneshot.recipe_in_words(file, as_json=as_json))


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the models that are known by name."""
    from undercrank import screen

    if as_json:
        screen.print_json({"models": [row.to_dict() for row in families.FAMILIES]})
        return
    rows = [
        (f.id, f.task, f"{f.width}x{f.height}", str(f.num_frames), str(f.fps), str(f.num_inference_steps), f.repo)
        for f in families.FAMILIES
    ]
    screen.table(("model", "task", "size", "frames", "fps", "steps", "from"), rows)


@app.command()
def levers(as_json: AsJson = False) -> None:
    """List the levers, what they do to the film and what they cost."""
    from undercrank import screen
    from undercrank.levers import ORDER

    if as_json:
        screen.print_json({"levers": [{"name": lever.name, "about": lever.about()} for lever in ORDER]})
        return
    typer.echo("\n\n".join(lever.about() for lever in ORDER))


@app.command()
def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Check this machine: torch against the driver, memory, kernels, codecs; say what to run."""
    from undercrank import screen
    from undercrank.doctor import examine

    findings = examine()
    if as_json:
        screen.print_json({"findings": [finding.to_dict() for finding in findings]})
    else:
        typer.echo("\n".join(finding.line() for finding in findings))
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(5)


@app.command()
def audit(
    pipeline: Annotated[str | None, typer.Argument(metavar="CLASS", help="A pipeline class of diffusers.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=1000, help="Denoising steps.")] = 20,
    scheduler: Annotated[str | None, typer.Option("--scheduler", help="A scheduler class, not its own.")] = None,
    lever: Levers = None,
    everything: Annotated[bool, typer.Option("--all", help="Every class that can be built, with and without.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Show where the host waits for the device, in a tiny pipeline of that class, without a GPU."""
    from undercrank import audit as auditor
    from undercrank.words import as_wishes

    wishes = as_wishes(lever or [])
    if everything:
        auditor.show_all(steps=steps, as_json=as_json)
    elif pipeline is None:
        raise BadInput("audit what? Name a pipeline class, such as CogVideoXPipeline, or --all", field="pipeline")
    else:
        auditor.show_one(pipeline, steps=steps, scheduler=scheduler, wishes=wishes, as_json=as_json)


@app.command()
def bench(
    prompt: PromptArg = "a red ring moves left on a navy background", model: Model = "flipbook",
    a: Annotated[list[str] | None, typer.Option("--a", metavar="NAME=VALUE", help="Side A: fidelity, levers.")] = None,
    b: Annotated[list[str] | None, typer.Option("--b", metavar="NAME=VALUE", help="Side B: fidelity, levers.")] = None,
    companions: Annotated[bool, typer.Option("--companions", help="Each part of side B alone, then all.")] = False,
    pairs: Annotated[int, typer.Option("--pairs", help="Timed runs of each side, in the order A B B A.")] = 2,
    keep: Annotated[bool, typer.Option("--keep", help="Write the row into this machine's ledger.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="No untimed runs for floor, waits, kernels.")] = False,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", metavar="LEVER|KNOB=V,V", help="Compare settings, not two sides.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of a sweep's report.")] = Path("sweep"),
    prompts: Annotated[str | None, typer.Option("--prompts", help="File of a sweep's prompts, one a line.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Of a sweep: a film of each prompt with each.")] = "1",
    metric: Annotated[list[str] | None, typer.Option("--metric", help="Of a sweep: only this distance.")] = None,
    negative_prompt: Negative = None, image: ImageFile = None, size: Size = None, frames: Frames = None,
    steps: Steps = None, guidance: Guidance = None, seed: Seed = 1, fidelity: FidelityWord = "faithful",
    device: DeviceName = None, dtype: Dtype = None, allow_denied: AllowDenied = False, as_json: AsJson = False,
    allow_pickle: Pickles = False, local_files_only: LocalOnly = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Time levers against each other on the same seed, in both orders, and compare the films."""
    from undercrank import oneshot
    from undercrank.words import as_seeds, as_side

    asked = _request(prompt, model, negative_prompt, image, size, frames, None, steps, guidance, seed, fidelity, None,
                     device, dtype)  # fmt: skip
    asked = replace(asked, allow_denied=allow_denied)
    side_a, side_b = (
        replace(asked, fidelity=word, wishes=wishes)
        for word, wishes in (as_side(side or [], asked.fidelity) for side in (a, b))
    )
    if sweep and companions:
        raise BadInput("--sweep compares settings, --companions the parts of side B: take one", field="companions")
    if sweep:
        from undercrank.comparing import read_prompts, run_sweep

        run_sweep(
            side_a,
            swept=tuple(sweep),
            prompts=read_prompts(prompts),
            seeds=as_seeds(seeds),
            metrics=tuple(metric or ()),
            out=out,
            keep=keep,
            allow_pickle=allow_pickle,
            local_files_only=local_files_only,
            as_json=as_json,
            on_cancellable=_stop_on_signal,
        )
        return
    run: Callable[..., None] = oneshot.run_bench
    if companions:
        from undercrank.companions import run_companions as run
    run(
        side_a,
        side_b,
        pairs=pairs,
        keep=keep,
        look=not quick,
        allow_pickle=allow_pickle,
        local_files_only=local_files_only,
        as_json=as_json,
        on_cancellable=_stop_on_signal,
    )


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The reference: tensor, master or folder of PNG.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is measured against it.")],
    metric: Annotated[list[str] | None, typer.Option("--metric", help="Only this distance; again for more.")] = None,
    kind: Annotated[str, typer.Option("--kind", help="auto, frames or latents.")] = "auto",
    key: Annotated[str | None, typer.Option("--key", help="Which tensor of a file that holds several.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Say how far film B is from film A: tensors or lossless files, never an mp4."""
    from undercrank.comparing import check_question, show_comparison

    check_question(a, b, metrics=tuple(metric or ()), kind=kind)
    show_comparison(a, b, metrics=tuple(metric or ()), kind=kind, key=key, as_json=as_json)


@app.command()
def worker(
    data: Annotated[Path, typer.Option("--data", help="Folder of the clips and, without --db, of the job store.")],
    db: Annotated[str | None, typer.Option("--db", help="Job store; UNDERCRANK_DB when left out.")] = None,
    slot: Annotated[int, typer.Option("--slot", help="Which worker over this folder; no two have one at a time.")] = 0,
    device: DeviceName = None,
    resident: Annotated[int, typer.Option("--resident", help="Models held in memory at a time.")] = 1,
    warm: Annotated[str | None, typer.Option("--warm", help="A model to load before anybody asks for it.")] = None,
    parent: Annotated[int | None, typer.Option("--parent", help="Leave when this process is gone.")] = None,
    allow_pickle: Pickles = False,
    local_files_only: LocalOnly = False,
    debug: Debug = False,
) -> None:
    """Make the clips of a job store, one after the other, until told to leave."""
    from undercrank.oneshot import calm_threads

    with calm_threads():
        from undercrank.worker import Habits, work_for_ever
    habits = Habits(
        resident=resident,
        warm=warm,
        device=device,
        slot=slot,
        allow_pickle=allow_pickle,
        local_files_only=local_files_only,
    )
    work_for_ever(db, data, habits, parent=parent)


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="Family id, hub id or folder.")] = "flipbook",
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="What to film; again for more.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="A film of each prompt with each seed.")] = "1,2",
    verify_steps: Annotated[
        int, typer.Option("--verify-steps", min=1, max=1000, help="Steps for levers that are not lossy.")
    ] = 6,
    metric: Annotated[list[str] | None, typer.Option("--metric", help="Only this distance; again for more.")] = None,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Write rows into this machine's ledger.")] = True,
    negative_prompt: Negative = None, image: ImageFile = None, size: Size = None, frames: Frames = None,
    steps: Steps = None, guidance: Guidance = None, fidelity: FidelityWord = "faithful", lever: Levers = None,
    device: DeviceName = None, dtype: Dtype = None, as_json: AsJson = False, allow_pickle: Pickles = False,
    local_files_only: LocalOnly = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Hold each lever that is on to its promise, on this machine, at this shape; keep what was found."""
    from undercrank.comparing import run_verify
    from undercrank.words import as_seeds

    asked = _request(None, model, negative_prompt, image, size, frames, None, steps, guidance, 1, fidelity, lever,
                     device, dtype)  # fmt: skip
    run_verify(
        asked,
        prompts=tuple(prompt or ()),
        seeds=as_seeds(seeds),
        steps=verify_steps,
        metrics=tuple(metric or ()),
        keep=keep,
        allow_pickle=allow_pickle,
        local_files_only=local_files_only,
        as_json=as_json,
        on_cancellable=_stop_on_signal,
    )


@app.command()
def tune(
    model: Annotated[str, typer.Argument(help="Family id, hub id or folder.")] = "flipbook",
    budget: Annotated[float | None, typer.Option("--budget", help="The furthest from stock, by the metric.")] = None,
    target_speedup: Annotated[float | None, typer.Option("--target-speedup", help="Or: how many times faster.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="To end within, loading included.")] = 900,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="What to film; again for more.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="A film of each prompt with each seed.")] = "1",
    metric: Annotated[str | None, typer.Option("--metric", help="The distance; st_lpips_alex if left out.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what the ledger knows.")] = False,
    negative_prompt: Negative = None, image: ImageFile = None, size: Size = None, frames: Frames = None,
    steps: Steps = None, guidance: Guidance = None, fidelity: FidelityWord = "quality", lever: Levers = None,
    device: DeviceName = None, dtype: Dtype = None, as_json: AsJson = False, allow_pickle: Pickles = False,
    local_files_only: LocalOnly = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Measure what levers gain and cost on this machine, within a time; keep the rows; choose a plan."""
    from undercrank.comparing import run_tune
    from undercrank.words import as_seeds

    asked = _request(None, model, negative_prompt, image, size, frames, None, steps, guidance, 1, fidelity, lever,
                     device, dtype)  # fmt: skip
    run_tune(
        asked,
        metric=metric,
        budget=budget,
        target_speedup=target_speedup,
        seconds=seconds,
        prompts=tuple(prompt or ()),
        seeds=as_seeds(seeds),
        again=again,
        allow_pickle=allow_pickle,
        local_files_only=local_files_only,
        as_json=as_json,
        on_cancellable=_stop_on_signal,
    )


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Family id, hub id or folder.")] = "flipbook",
    prompt: Annotated[str | None, typer.Option("--prompt", help="What to film.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Then search which steps to skip; takes many runs.")] = False,
    search_films: Annotated[int, typer.Option("--search-films", min=1, help="Films to search on.")] = 4,
    negative_prompt: Negative = None, image: ImageFile = None, size: Size = None, frames: Frames = None,
    steps: Steps = None, guidance: Guidance = None, seed: Seed = None, lever: Levers = None,
    device: DeviceName = None, dtype: Dtype = None, as_json: AsJson = False, allow_pickle: Pickles = False,
    local_files_only: LocalOnly = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Measure a checkpoint for step_cache in one run that computes every step; keep what was found."""
    from undercrank.oneshot import calm_threads

    asked = _request(prompt, model, negative_prompt, image, size, frames, None, steps, guidance, seed, "faithful",
                     lever, device, dtype)  # fmt: skip
    with calm_threads():
        from undercrank.calibrate import run_calibrate

    run_calibrate(
        asked,
        search_films=search_films if search else 0,
        allow_pickle=allow_pickle,
        local_files_only=local_files_only,
        as_json=as_json,
        on_cancellable=_stop_on_signal,
    )


@app.command()
def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8200,
    data: DataFolder = None,
    db: Database = None,
    workers: Annotated[int, typer.Option("--workers", min=0, max=64, help="Processes that make clips.")] = 1,
    resident: Annotated[int, typer.Option("--resident", min=1, help="Models held in memory at a time.")] = 1,
    local_files_only: LocalOnly = False,
    allow_host: Annotated[list[str] | None, typer.Option("--allow-host", help="A name of this server.")] = None,
    keep_days: Annotated[float | None, typer.Option("--keep-days", min=0, help="Delete clips after so long.")] = None,
    max_jobs: MaxJobs = None,
    max_work: MaxWork = None,
    openapi: Annotated[bool, typer.Option("--openapi", help="Print the description of the API, and end.")] = False,
    debug: Debug = False,
) -> None:
    """Run the studio: a page and an API over a queue of clips."""
    _need_server()
    from undercrank.server import serve as server
    from undercrank.server.options import Options

    if openapi:
        typer.echo(server.openapi_text(), nl=False)
        return
    options = Options(
        data=str(data or settings().data), db=db or settings().db, host=host, port=port, workers=workers,
        resident=resident, local_files_only=local_files_only, hosts=tuple(allow_host or ()), keep_days=keep_days,
        max_jobs=max_jobs, max_cost=max_work,
    )  # fmt: skip
    server.serve(options, announce=typer.echo)


keys = typer.Typer(help="Make, list and revoke the keys that the studio asks for.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="Whose it is: their clips are theirs alone.")],
    data: DataFolder = None,
    db: Database = None,
    max_jobs: MaxJobs = None,
    max_work: MaxWork = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a key. It is shown once and stored as a hash."""
    _need_server()
    from undercrank.server import keyring

    typer.echo(keyring.create(_studio(data, db), name, max_jobs=max_jobs, max_work=max_work, as_json=as_json))


@keys.command("list")
def keys_list(data: DataFolder = None, db: Database = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show all keys; what opens the door is not shown."""
    _need_server()
    from undercrank.server import keyring

    keyring.show(_studio(data, db), as_json=as_json)


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `keys list` shows it.")],
    data: DataFolder = None,
    db: Database = None,
    debug: Debug = False,
) -> None:
    """Let a key open nothing from now on."""
    _need_server()
    from undercrank.server import keyring

    typer.echo(keyring.revoke(_studio(data, db), key_id))


webhooks = typer.Typer(help="Say who is told of clips that have ended.", no_args_is_help=True)
app.add_typer(webhooks, name="webhooks")


@webhooks.command("add")
def webhooks_add(
    name: Annotated[str, typer.Argument(help="Whose clips: the name of their keys, `local` without keys.")],
    url: Annotated[str, typer.Argument(help="Who is told: a public https address.")],
    data: DataFolder = None,
    db: Database = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tell an address of each clip that ends. Prints the secret that its messages are signed with."""
    _need_server()
    from undercrank.server import hooks

    typer.echo(hooks.add(_studio(data, db), name, url, as_json=as_json))


@webhooks.command("list")
def webhooks_list(data: DataFolder = None, db: Database = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show all webhooks, without their secrets."""
    _need_server()
    from undercrank.server import hooks

    hooks.show(_studio(data, db), as_json=as_json)


@webhooks.command("remove")
def webhooks_remove(
    webhook_id: Annotated[str, typer.Argument(metavar="ID", help="As `webhooks list` shows it.")],
    data: DataFolder = None,
    db: Database = None,
    debug: Debug = False,
) -> None:
    """Tell this address nothing from now on."""
    _need_server()
    from undercrank.server import hooks

    typer.echo(hooks.remove(_studio(data, db), webhook_id))


def _studio(data: Path | None, db: str | None) -> Any:
    from undercrank.server.options import Options

    return Options(data=str(data or settings().data), db=db or settings().db)


SERVER_PACKAGES = (
    "fastapi", "uvicorn", "pydantic", "python_multipart", "jinja2", "structlog", "prometheus_client", "sqlalchemy",
    "alembic",
)  # fmt: skip


def _need_server() -> None:
    """Raise NotFound with the line to type where the packages of the server are not installed."""
    if absent := [name for name in SERVER_PACKAGES if find_spec(name) is None]:
        raise NotFound(f"the studio needs packages that are not here ({', '.join(absent)}): {SERVER_INSTALL}")


SERVER_INSTALL = "pip install 'undercrank[server]'"


ledger_app = typer.Typer(help="List the measured rows that plans are made of.", invoke_without_command=True)
app.add_typer(ledger_app, name="ledger")


@ledger_app.callback()
def ledger(
    context: typer.Context,
    family: Annotated[str | None, typer.Option("--family", help="Rows of this model.")] = None,
    lever: Annotated[str | None, typer.Option("--lever", help="Rows of this lever; none: whole runs.")] = None,
    machine: Annotated[str | None, typer.Option("--machine", help="Rows whose machine or device holds this.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="measured here, measured, published, random.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the measured rows that plans are made of; `ledger show ID` explains one."""
    if context.invoked_subcommand is not None:
        return
    from undercrank import screen
    from undercrank.explaining import HEADINGS, as_table, none_fit, select
    from undercrank.ledger import read_ledger

    every = read_ledger().rows
    rows = select(every, family=family, lever=lever, machine=machine, source=source)
    if as_json:
        screen.print_json({"rows": [row.to_dict() for row in rows]})
    elif rows:
        screen.table(HEADINGS, as_table(rows))
    else:
        screen.say(none_fit(every))


@ledger_app.command("show")
def ledger_show(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of a row, or how it begins.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Explain one row in words."""
    from undercrank import screen
    from undercrank.explaining import find, in_words
    from undercrank.ledger import read_ledger

    row = find(read_ledger().rows, id)
    if as_json:
        screen.print_json({"row": row.to_dict()})
    else:
        typer.echo(in_words(row))


def _version(value: bool) -> None:
    if value:
        typer.echo(f"undercrank {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Make video with open diffusion models, as fast as the hardware allows, and know what it cost."""


# --------------------------------------------------------------------------- from words to a request


def _request(
    prompt: str | None, model: str, negative_prompt: str | None, image: str | None, size: str | None,
    frames: int | None, fps: str | None, steps: int | None, guidance: float | None, seed: int | None, fidelity: str,
    levers: list[str] | None, device: str | None, dtype: str | None,
) -> Request:  # fmt: skip
    from undercrank.words import as_fps, as_size, as_wishes

    width, height = as_size(size)
    return Request(
        prompt=prompt or "", negative_prompt=negative_prompt, model=model, image=image, width=width, height=height,
        num_frames=frames, fps=as_fps(fps), num_inference_steps=steps, guidance_scale=guidance, seed=seed,
        fidelity=Fidelity.of(fidelity), wishes=as_wishes(levers or []), device=device, dtype=dtype,
    )  # fmt: skip


def _given_options(context: typer.Context) -> frozenset[str]:
    """Names of the parameters that the person typed: with --from they win over the recipe's."""
    source = context.get_parameter_source
    return frozenset(name for name in context.params if (s := source(name)) is not None and s.name == "COMMANDLINE")


def _plan_in_words(plan: Plan) -> str:
    """The decisions, one line each, and what to expect."""
    from undercrank.screen import cited

    request, expected = plan.request, plan.expected
    lines = [
        f"{plan.load.family} from {plan.load.source}, {plan.load.dtype} on {plan.load.device}",
        f"{request.width}x{request.height}, {request.num_frames} frames at {request.fps} fps, "
        f"{request.num_inference_steps} steps, guidance {request.guidance_scale:g}, fidelity {request.fidelity.value}",
        f"promise: {plan.promise.value}",
        *(f"  {d.lever}: {d.chosen} ({d.status.value}) - {d.reason}{cited(d.evidence)}" for d in plan.decisions),
        f"time:   {_seconds(expected.seconds)} ({expected.seconds_basis})",
        f"memory: {_gib(expected.peak_bytes)} ({expected.memory_basis})",
        *(f"  {stage}: {_gib(count)}" for stage, count in expected.stage_peak_bytes.items()),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"about {value:.1f} s"


def _gib(value: int | None) -> str:
    return "unknown" if value is None else f"about {value / 2**30:.1f} GiB"


# --------------------------------------------------------------------------- errors and signals


@contextmanager
def one_line_errors(*, debug: bool, as_json: bool) -> Iterator[None]:
    """Foreseen errors as one line and their exit code; the traceback only with --debug."""
    try:
        yield
    except UndercrankError as error:
        _tell(error, debug=debug, as_json=as_json)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _tell(Cancelled("cancelled"), debug=debug, as_json=as_json)
        sys.exit(Cancelled.exit_code)
    except OSError as error:
        _tell(
            RunFailed(f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")), debug=debug, as_json=as_json
        )
        sys.exit(RunFailed.exit_code)


def _tell(error: UndercrankError, *, debug: bool, as_json: bool) -> None:
    if debug:
        traceback.print_exc()
    if as_json:
        from undercrank.screen import print_json

        field = getattr(error, "field", None)
        print_json({"event": "error", "code": error.code, "message": str(error), "field": field})
    else:
        print(f"undercrank: {error}", file=sys.stderr)


@contextmanager
def _stop_on_signal(cancel: Callable[[str], bool]) -> Iterator[None]:
    """The first Ctrl-C (or TERM) cancels within one step; a second one does not wait for that."""

    def first(number: int, frame: Any) -> None:
        signal.signal(number, signal.default_int_handler)
        if not cancel("cancelled"):  # no step is under way that would notice: a load or a decode ends by exception
            raise KeyboardInterrupt

    heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    kept = {number: signal.signal(number, first) for number in heeded}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    console()
