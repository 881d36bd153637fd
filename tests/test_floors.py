"""Imports go down the floors, packages come in by their doors, and answers without a model cost no torch."""

from __future__ import annotations

import ast
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import undercrank

ROOT = Path(undercrank.__file__).parent
FILES = {
    ".".join(("undercrank", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
"Module name -> file."

FLOORS = {
    0: ("undercrank", "records", "undo"),
    1: (
        "beside",
        "settings",
        "words",
        "families",
        "figures",
        "machine",
        "ledger",
        "lines",
        "memory",
        "metrics",
        "prompts",
        "rig",
        "tensors",
        "schedules",
        "ratios",
        "paths",
        "jobs",
        "jobs.database",
        "jobs.keys",
        "jobs.migrations",
        "jobs.migrations.m0001_first",
        "jobs.migrations.m0002_loading",
        "jobs.nouns",
        "jobs.outbox",
        "jobs.queue",
        "jobs.registry",
        "jobs.watch",
    ),
    2: (
        "fetching",
        "fleet",
        "shelf",
        "webhooks",
        "levers",
        "levers.attention",
        "levers.branches",
        "levers.causal",
        "levers.caches",
        "levers.cfg_parallel",
        "levers.compile",
        "levers.cuda_graph",
        "levers.decode",
        "levers.epilogue",
        "levers.fewbits",
        "levers.formats",
        "levers.gate",
        "levers.graphs",
        "levers.host_sync",
        "levers.mirror",
        "levers.mochi",
        "levers.offload",
        "levers.programs",
        "levers.prompt_cache",
        "levers.quantize",
        "levers.stacks",
        "levers.step_cache",
        "levers.trials",
        "levers.replica",
        "levers.text_trim",
        "levers.unipc",
        "levers.uploads",
    ),
    3: ("planner", "sources"),
    4: (
        "load",
        "trace",
        "work",
        "profiling",
        "video",
        "frames",
        "images",
        "screen",
        "doctor",
        "quality",
        "footage",
        "preview",
        "explaining",
    ),
    5: ("engine",),
    6: (
        "audit",
        "bench",
        "calibrate",
        "searching",
        "chart",
        "companions",
        "comparing",
        "fidelity",
        "lab",
        "oneshot",
        "references",
        "report",
        "rounding",
        "sweep",
        "takes",
        "testing",
        "tune",
        "worker",
    ),
    7: (
        "server",
        "server.schemas",
        "server.doors",
        "server.auth",
        "server.meters",
        "server.logs",
        "server.bodies",
        "server.pictures",
        "server.studio",
        "server.files",
        "server.shown",
        "server.events",
        "server.videos",
        "server.models",
        "server.insight",
        "server.health",
        "server.pages",
        "server.openapi",
        "server.app",
        "server.options",
        "server.process",
        "server.keyring",
        "server.hooks",
        "server.serve",
    ),
    8: ("cli",),
    9: ("__main__",),
}
FLOOR_OF = {
    name if name == "undercrank" else f"undercrank.{name}": floor for floor, names in FLOORS.items() for name in names
}
SAME_FLOOR = {
    ("machine", "settings"),  # which GPUs are visible
    ("memory", "families"),
    ("ledger", "lines"),
    ("paths", "lines"),
    ("ratios", "lines"),
    ("ledger", "settings"),  # where the user's rows are
    ("jobs", "jobs.database"),  # the parts of the store
    ("jobs", "jobs.keys"),
    ("jobs", "jobs.nouns"),
    ("jobs", "jobs.outbox"),
    ("jobs", "jobs.queue"),
    ("jobs", "jobs.registry"),
    ("jobs", "jobs.watch"),
    ("jobs.database", "jobs.nouns"),
    ("jobs.database", "jobs.watch"),
    ("jobs.keys", "jobs.database"),
    ("jobs.keys", "jobs.nouns"),
    ("jobs.outbox", "jobs.database"),
    ("jobs.outbox", "jobs.nouns"),
    ("jobs.queue", "jobs.database"),
    ("jobs.queue", "jobs.nouns"),
    ("jobs.queue", "jobs.outbox"),
    ("jobs.queue", "jobs.watch"),
    ("jobs.registry", "jobs.database"),
    ("jobs.registry", "jobs.nouns"),
    ("fleet", "shelf"),  # files of deleted jobs
    ("fleet", "webhooks"),  # messages to them are a part of the housekeeping
    ("ledger", "ratios"),  # which checkpoints were measured here
    ("ledger", "paths"),  # and which were searched
    ("ratios", "settings"),  # where the user's curves are
    ("ratios", "schedules"),
    ("calibrate", "rounding"),
    ("calibrate", "searching"),
    ("paths", "settings"),
    ("paths", "schedules"),
    ("levers.trials", "levers.programs"),  # a search of step_cache's schedules
    ("levers.trials", "levers.stacks"),
    ("levers", "levers.host_sync"),  # ORDER
    ("levers", "levers.attention"),
    ("levers", "levers.step_cache"),
    ("levers.step_cache", "levers.caches"),  # four files of one lever
    ("levers.step_cache", "levers.programs"),
    ("levers.step_cache", "levers.stacks"),
    ("levers.caches", "levers.stacks"),
    ("levers", "levers.cfg_parallel"),
    ("levers", "levers.quantize"),
    ("levers", "levers.offload"),
    ("levers.quantize", "levers.formats"),  # three files of one lever
    ("levers.formats", "levers.fewbits"),
    ("levers.offload", "levers.formats"),  # which of them can be moved block by block
    ("levers", "levers.compile"),
    ("levers", "levers.cuda_graph"),
    ("levers.cuda_graph", "levers.graphs"),  # two files of one lever
    ("levers.graphs", "levers.gate"),  # which models select tokens by a mask
    ("levers.graphs", "levers.mirror"),  # masks that a graph keeps
    ("levers.graphs", "levers.uploads"),  # what a forward sends is sent once
    ("levers", "levers.text_trim"),
    ("levers", "levers.prompt_cache"),
    ("levers.prompt_cache", "levers.offload"),  # how weights are sent to the device for a call
    ("levers", "levers.decode"),
    ("levers.decode", "levers.causal"),  # while it is on
    ("levers.compile", "levers.epilogue"),  # part of one mode
    ("levers.host_sync", "levers.mirror"),  # two files of one lever
    ("levers.host_sync", "levers.unipc"),
    ("levers.host_sync", "levers.gate"),
    ("levers.host_sync", "levers.uploads"),
    ("levers.cfg_parallel", "levers.branches"),  # three files of one lever
    ("levers.cfg_parallel", "levers.replica"),
    ("levers.branches", "levers.replica"),
    ("levers.branches", "levers.mirror"),  # a mask's host twin tells how many tokens are valid
    ("levers.gate", "levers.mirror"),
    ("levers.gate", "levers.mochi"),
    ("levers.mochi", "levers.mirror"),
    ("levers.gate", "levers.uploads"),
    ("levers.uploads", "levers.mirror"),
    ("levers.unipc", "levers.mirror"),
    ("sources", "planner"),  # the load of a family
    ("load", "trace"),  # progress events
    ("video", "images"),  # arrays to pixels
    ("preview", "video"),  # a file appears whole
    ("worker", "oneshot"),  # the times of a run are remembered
    ("oneshot", "bench"),  # one comparison from the command line
    ("oneshot", "lab"),  # and its untimed runs
    ("profiling", "work"),  # the wrapper around forwards
    ("profiling", "trace"),  # which waits are our own
    ("audit", "testing"),  # the tiny pipeline of a class
    ("rounding", "takes"),  # films that differ in rounding alone
    ("calibrate", "oneshot"),  # how a signal cancels
    ("fidelity", "rounding"),  # the floor beside a verdict
    ("fidelity", "takes"),
    ("fidelity", "bench"),  # what a ledger row of a run holds
    ("sweep", "bench"),  # what a ledger row of a run holds
    ("sweep", "fidelity"),  # which films, and which not
    ("sweep", "rounding"),
    ("sweep", "takes"),
    ("chart", "rounding"),  # the floor is drawn
    ("chart", "sweep"),
    ("report", "chart"),
    ("report", "rounding"),
    ("report", "sweep"),
    ("report", "takes"),
    ("references", "bench"),  # what is compared of a clip
    ("oneshot", "references"),  # a clip that is measured against another
    ("companions", "bench"),
    ("companions", "oneshot"),  # how the engine is imported there
    ("companions", "lab"),
    ("companions", "references"),
    ("comparing", "report"),
    ("comparing", "sweep"),
    ("comparing", "tune"),
    ("tune", "fidelity"),  # which films, and which not
    ("tune", "rounding"),
    ("tune", "sweep"),  # settings on films beside the stock ones
    ("tune", "takes"),
    ("comparing", "fidelity"),  # verify, on the command line
    ("comparing", "oneshot"),  # how the engine is imported there
    ("frames", "images"),
    ("frames", "video"),  # what encodes them
    ("footage", "images"),  # PNG in
    ("footage", "video"),  # masters in
    ("doctor", "video"),  # which codecs there are
}
"(importer, imported): neighbours that may know each other, one way only."
STEPS = FLOORS[7]
"Inside server/ the list itself is in order: a module may know those before it."

TORCH = {"torch", "diffusers", "transformers"}
TORCH_FROM_THE_START = {
    "levers.branches", "levers.causal", "levers.epilogue", "levers.gate", "levers.graphs", "levers.mirror",
    "levers.mochi",
    "levers.replica", "levers.unipc",
    "levers.uploads", "load", "trace", "work", "profiling", "engine", "audit", "lab", "testing", "quality",
    "footage", "preview", "worker",
    "takes", "rounding", "fidelity", "calibrate", "searching", "frames",
    "levers.caches", "levers.programs", "levers.stacks", "levers.trials", "levers.fewbits",
}  # fmt: skip
DOORS = {
    "av": {"video"},
    "PIL": {"images", "video", "testing"},  # testing draws the picture that image models are given
    "psutil": {"machine"},
    "pynvml": {"machine"},
    "rich": {"screen"},
    "typer": {"cli"},
    "huggingface_hub": {"fetching", "sources"},
    "torchao": {"levers.formats"},
    "sqlalchemy": {
        "jobs.database",
        "jobs.keys",
        "jobs.outbox",
        "jobs.queue",
        "jobs.registry",
        "jobs.migrations.m0001_first",
        "jobs.migrations.m0002_loading",
    },
    "alembic": {"jobs.database", "jobs.migrations.m0001_first", "jobs.migrations.m0002_loading"},
    "flip_evaluator": {"quality"},
    "imageio_ffmpeg": {"quality"},
    "fastapi": {step for step in STEPS if step.startswith("server.")},
    "starlette": {step for step in STEPS if step.startswith("server.")},
    "pydantic": {"server.schemas", "server.openapi"},
    "uvicorn": {"server.process"},
    "structlog": {"server.logs"},
    "prometheus_client": {"server.meters"},
}
READS_ENVIRONMENT = {
    "settings",
    "undo",
    "testing",  # compares the whole environment before and after a run
}
CHANGES_OBJECTS = {
    "undo",
    "records",  # a frozen record completes itself while it is made
    "levers.host_sync",  # the scheduler's own __setattr__, in a subclass that the lever gave it
    "levers.unipc",  # its own copies of the scheduler, thrown away before the loop
}


def short(module: str) -> str:
    return module.removeprefix("undercrank.")


def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def nodes(node: ast.AST, *, functions: bool = True) -> Iterator[ast.AST]:
    """Every node below, but for what is under `if TYPE_CHECKING:` and, if asked, what is inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from nodes(other, functions=functions)
            continue
        if not functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from nodes(child, functions=functions)


def imported(module: str, *, functions: bool = True) -> set[str]:
    """Full names of the modules that a module imports."""
    found = set()
    for node in nodes(tree(module), functions=functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else str(node.module) for name in names}
    return found


def packages(module: str, *, functions: bool = True) -> set[str]:
    return {name.partition(".")[0] for name in imported(module, functions=functions)}


def test_every_module_has_a_floor_and_every_floor_its_modules() -> None:
    homeless = sorted(set(FILES) - set(FLOOR_OF))
    assert not homeless, f"give it a floor: {', '.join(homeless)}"
    gone = sorted(set(FLOOR_OF) - set(FILES))
    assert not gone, f"gone, take its floor away: {', '.join(gone)}"


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down_the_floors(module: str) -> None:
    floor = FLOOR_OF.get(module)
    assert floor is not None, f"give it a floor: {module}"
    for other in imported(module):
        if other.partition(".")[0] != "undercrank":
            continue
        assert other in FLOOR_OF, f"{module} imports {other}, which has no floor: give it a floor"
        below = FLOOR_OF[other] < floor
        beside = (short(module), short(other)) in SAME_FLOOR or is_a_step_down(short(module), short(other))
        assert below or beside, f"{module} (floor {floor}) imports {other} (floor {FLOOR_OF[other]})"


def is_a_step_down(module: str, other: str) -> bool:
    return module in STEPS and other in STEPS and STEPS.index(other) < STEPS.index(module)


def test_every_pair_of_neighbours_is_on_one_floor_and_still_needed() -> None:
    pairs = {(short(module), short(other)) for module in FILES for other in imported(module)}
    assert pairs >= SAME_FLOOR, f"no longer needed: {SAME_FLOOR - pairs}"
    for importer, other in SAME_FLOOR:
        assert FLOOR_OF[f"undercrank.{importer}"] == FLOOR_OF[f"undercrank.{other}"]
        assert (other, importer) not in SAME_FLOOR


def test_modules_are_imported_by_computed_names_in_two_places_only() -> None:
    """`undercrank.NAME` on first use, and the library that a model names; elsewhere imports can be read."""
    calls = {
        short(module)
        for module in FILES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
    }
    assert calls <= {"undercrank", "load"}


def test_the_package_itself_imports_nothing_of_its_own() -> None:
    assert not {name for name in imported("undercrank") if name.startswith("undercrank")}


@pytest.mark.parametrize("module", FILES)
def test_torch_is_imported_at_once_only_where_nothing_works_without(module: str) -> None:
    found = packages(module, functions=False) & TORCH
    assert not found or short(module) in TORCH_FROM_THE_START, f"{module} imports {found}: do it inside the function"


@pytest.mark.parametrize("package", DOORS)
def test_every_package_comes_in_by_its_door(package: str) -> None:
    users = {short(module) for module in FILES if package in packages(module)}
    assert users <= DOORS[package], f"{package} has its doors in {DOORS[package]}"
    assert users, f"nobody uses {package} any more: take its door away"


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return bool({alias.name for alias in node.names} & {"environ", "getenv", "putenv"})
    return False


@pytest.mark.parametrize("module", FILES)
def test_the_environment_is_read_in_one_place_and_changed_in_another(module: str) -> None:
    if short(module) not in READS_ENVIRONMENT:
        assert not any(reads_environment(node) for node in ast.walk(tree(module)))


def changes_an_object(node: ast.AST) -> bool:
    """setattr, object.__setattr__, `x.__class__ = `, `x.__dict__[...] = `, and their deletions."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name in ("setattr", "delattr") or name.endswith((".__setattr__", ".__delattr__"))
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return node.attr in ("__class__", "__dict__")
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        owner = ast.unparse(node.value)
        return owner.endswith(".__dict__") or owner.startswith("vars(")
    return False


@pytest.mark.parametrize("module", FILES)
def test_objects_of_others_are_changed_in_one_place_only(module: str) -> None:
    if short(module) not in CHANGES_OBJECTS:
        lines = [node.lineno for node in ast.walk(tree(module)) if changes_an_object(node)]  # type: ignore[attr-defined]
        assert not lines, f"{module}, lines {lines}: use undo"


def test_the_lists_of_exceptions_are_needed() -> None:
    for listed, check in ((READS_ENVIRONMENT, reads_environment), (CHANGES_OBJECTS, changes_an_object)):
        users = {short(module) for module in FILES if any(check(node) for node in ast.walk(tree(module)))}
        assert users == listed


# --------------------------------------------------------------------------- in a process of its own


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    environment.pop("PYTHONWARNINGS", None)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


WITHOUT_TORCH = sorted(
    module
    for module, floor in FLOOR_OF.items()
    if floor in (0, 1, 2, 3, 7) and short(module) not in TORCH_FROM_THE_START
)

IMPORT_ALL = """
import os, sys, threading
from importlib import import_module
before = dict(os.environ)
for name in sys.argv[1:]:
    import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch"
    assert dict(os.environ) == before, f"{name} changes the environment"
    assert threading.active_count() == 1, f"{name} starts a thread"
"""


def test_the_lower_floors_are_imported_without_torch_and_without_side_effects() -> None:
    done = python(IMPORT_ALL, *WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


RUN = """
import json, sys
from undercrank import cli
sys.argv = ["undercrank", *sys.argv[1:]]
code = 0
try:
    cli.main()
except SystemExit as stop:
    code = stop.code or 0
print(json.dumps({"code": code, "loaded": sorted({"torch", "diffusers", "transformers", "av"} & set(sys.modules))}))
"""

QUICK = [("--help",), ("plan", "x", "--json"), ("models",)]


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_an_answer_without_a_model_is_given_without_torch(arguments: tuple[str, ...]) -> None:
    done = python(RUN, *arguments)
    *answer, last = done.stdout.splitlines()
    assert json.loads(last) == {"code": 0, "loaded": []}, done.stderr
    assert len(answer) > 5


LIBRARIES = "import typer, psutil, pynvml, importlib.metadata"


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_an_answer_without_a_model_costs_little_more_than_its_libraries(arguments: tuple[str, ...]) -> None:
    """In seconds of CPU, beside the same machine's cost of importing the libraries: 0.3 s against 0.1 s when quiet."""

    def cpu_seconds(code: str, *given: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python(code, *given).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seen = []
    for _ in range(5):
        seen.append(cpu_seconds("import undercrank.cli as cli; cli.main()", *arguments) / cpu_seconds(LIBRARIES))
        if seen[-1] < 3.5:
            return
    pytest.fail(f"{' '.join(arguments)} cost {', '.join(f'{ratio:.1f}x' for ratio in seen)} of its libraries")
