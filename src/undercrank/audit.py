"""Host stalls of any diffusers pipeline, found without a GPU.

The pipeline runs with real arithmetic on the CPU behind a *logical* device: each tensor "on the device" is a
wrapper that claims to live on a Python-registered device, and a dispatch mode that sees every operation notes
those that would block the host on a real accelerator: scalar reads, data-dependent shapes, boolean-mask
indexing, blocking copies either way, `equal`, error checks of linear algebra.

`audit_class("CogVideoXPipeline")` builds a tiny pipeline of the class first; `stalls(pipe, inputs)` takes one at hand.
Two audited runs are bit-equal, so an audit also shows that a lever moves no numbers. What it cannot see:
`device.type == "cuda"` branches, custom kernels, allocator stalls; `non_blocking` uploads count as such.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from undercrank.engine import accelerate, family_of_pipeline
from undercrank.levers import knobs
from undercrank.records import BadInput, Record, RunFailed, UndercrankError
from undercrank.rig import Rig
from undercrank.screen import print_json, table
from undercrank.undo import swap_item

DEVICE = "undercrank_audit"
Wishes = tuple[tuple[str, str], ...]
aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Site(Record):
    """One line of code that waits for the device."""

    file: str
    line: int
    cause: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Stalls(Record):
    """The stalls of one run, inside its denoising loop."""

    steps: int
    in_loop: int
    outside: int
    sites: tuple[Site, ...] = field(default=())

    @property
    def per_step(self) -> float:
        return self.in_loop / max(1, self.steps)


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What `undercrank audit` found in one pipeline class, and what the plan said of each lever that was asked for."""

    pipeline: str
    scheduler: str
    stalls: Stalls
    decisions: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        found = self.stalls
        return {
            "pipeline": self.pipeline,
            "scheduler": self.scheduler,
            "steps": found.steps,
            "in_loop": found.in_loop,
            "per_step": found.per_step,
            "sites": [{"file": s.file, "line": s.line, "count": s.count, "cause": s.cause} for s in found.sites],
        }


def audit_class(name: str, *, steps: int = 20, scheduler: str | None = None, levers: Wishes = ()) -> Audited:
    """The stalls of a tiny random pipeline of that diffusers class.

    Raises BadInput for a class, a scheduler or a lever that does not exist, NotFound for a pipeline that cannot be
    built small, LeverRefused, and RunFailed where the pipeline does not run with what was asked.
    """
    wishes = dict(levers)
    if len(wishes) < len(levers):
        raise BadInput("a lever is given twice", field="lever")
    with quiet_libraries():
        from undercrank.testing import tiny_inputs, tiny_pipeline_of

        pipe = tiny_pipeline_of(name, scheduler=scheduler)
        inputs = tiny_inputs(pipe, steps=steps)
        if "dynamic_cfg" in family_of_pipeline(pipe).traits:
            inputs |= {"use_dynamic_cfg": True, "guidance_scale": 6.0}
        said: list[str] = []
        try:
            found, _ = stalls_and_result(pipe, inputs, told=said.extend, **wishes)
        except UndercrankError:
            raise
        except Exception as error:
            words = str(error).strip().partition("\n")[0][:200]
            where = f"{name} with {type(pipe.scheduler).__name__}, {steps} steps"
            raise RunFailed(f"{where}, does not run: {type(error).__name__}: {words}") from error
    return Audited(pipeline=name, scheduler=type(pipe.scheduler).__name__, stalls=found, decisions=tuple(said))


def show_one(name: str, *, steps: int, scheduler: str | None, wishes: Wishes, as_json: bool) -> None:
    """`undercrank audit CLASS`."""
    done = audit_class(name, steps=steps, scheduler=scheduler, levers=wishes)
    if as_json:
        print_json(done.to_json())
        return
    found = done.stalls
    print(f"{done.pipeline}, {done.scheduler}, {found.steps} steps: {_count(found)}")
    if found.sites:
        rows = [(str(site.count), f"{site.file}:{site.line}", site.cause) for site in found.sites]
        table(("count", "line", "cause"), rows)
    for line in done.decisions:
        print(line)


def show_all(*, steps: int, as_json: bool) -> None:
    """`undercrank audit --all`: each class without and with host_sync, and the lines that the lever leaves."""
    from undercrank.levers.host_sync import LEFT

    with quiet_libraries():
        from undercrank.testing import tiny_classes
    both = [_with_and_without(name, steps) for name in tiny_classes()]
    if as_json:
        left = [{"file": file, "line": line, "reason": reason} for file, line, reason in LEFT]
        print_json({"pipelines": [{**stock, "host_sync": ours} for stock, ours in both], "left": left})
        return
    rows = [
        (stock["pipeline"], stock["scheduler"], str(stock["in_loop"]), str(ours["in_loop"])) for stock, ours in both
    ]
    table(("pipeline", "scheduler", "stalls", "with host_sync"), rows, title=f"In the loop, {steps} steps")
    table(("line that host_sync leaves", "why"), [(f"{file}:{line}", reason) for file, line, reason in LEFT])


def _with_and_without(name: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    stock, ours = (audit_class(name, steps=steps, levers=levers) for levers in ((), (("host_sync", "on"),)))
    return stock.to_json(), ours.to_json()


def _count(found: Stalls) -> str:
    if not found.in_loop:
        return "nothing in the loop waits for the device"
    return f"{found.in_loop} stalls in the loop, {found.per_step:.3g} a step"


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without what libraries say of tiny pipelines (prompts cut off, deprecated arguments)."""
    import diffusers
    import transformers

    loggers = [library.utils.logging for library in (diffusers, transformers)]
    kept = [logger.get_verbosity() for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.set_verbosity_error()
        try:
            yield
        finally:
            for logger, level in zip(loggers, kept, strict=True):
                logger.set_verbosity(level)


@contextmanager
def logical_device(pipe: Any) -> Iterator[Auditor]:
    """The pipeline's modules live on the logical device inside the block; yields the auditor that watches it.

    Tensors that belong to the device (latents) are read after the block with `Auditor.to_cpu`.
    """
    _register_device()
    auditor = Auditor()
    with ExitStack() as stack:
        stack.enter_context(_Factories())
        stack.enter_context(auditor)
        for module in _modules(pipe):
            _move(module, auditor, stack)
        yield auditor


def stalls(pipe: Any, inputs: Mapping[str, Any], **levers: Any) -> Stalls:
    """Run `pipe(**inputs)` on the logical device and count what would block inside its denoising loop.

    levers: as for `accelerate` (`host_sync="auto"`), any other is off; none: the stock pipeline. Raises what the
    pipeline raises. The pipeline is left as it was found.
    """
    return stalls_and_result(pipe, inputs, **levers)[0]


def stalls_and_result(
    pipe: Any, inputs: Mapping[str, Any], told: Callable[[list[str]], None] | None = None, **levers: Any
) -> tuple[Stalls, Any]:
    """The stalls, and what the pipeline returned (`.frames`), on the CPU: equal for two runs that compute the same.

    told: is given one line for each lever that the run decided about.
    """
    with ExitStack() as stack:
        auditor = stack.enter_context(logical_device(pipe))
        others = {knob: "off" for knob in knobs()}  # what was not asked for stays out of the count
        run = stack.enter_context(accelerate(pipe, **{**others, **levers})) if levers else None
        if run is not None:
            rig = run.rig
        else:
            rig = Rig(pipe, family_of_pipeline(pipe), f"{DEVICE}:0")
            stack.enter_context(rig.seams())
        auditor.in_loop = lambda: rig.running
        with torch.no_grad():
            frames = auditor.to_cpu(pipe(**inputs).frames)
        if told is not None and run is not None and run.plan is not None:
            told([f"{d.lever}: {d.chosen} - {d.reason}" for d in run.plan.decisions if d.lever in levers])
        return auditor.found(rig.total_steps), frames


class LogicalTensor(torch.Tensor):
    """Claims to be on the logical device; `cpu_side` holds its values, `auditor` watches it."""

    cpu_side: torch.Tensor
    auditor: Auditor

    @staticmethod
    def __new__(cls, cpu_side: torch.Tensor, auditor: Auditor) -> LogicalTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            cpu_side.size(),
            strides=cpu_side.stride(),
            storage_offset=cpu_side.storage_offset(),
            dtype=cpu_side.dtype,
            layout=cpu_side.layout,
            device=torch.device(DEVICE, 0),
            requires_grad=False,
        )
        self.cpu_side, self.auditor = cpu_side, auditor
        return self

    def __repr__(self, **_: Any) -> str:
        return f"LogicalTensor({self.cpu_side!r})"

    # `torch.Tensor([x])` asks with the dispatcher switched off.
    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __index__(self) -> int:
        return self._read().__index__()

    def __bool__(self) -> bool:
        return bool(self._read())

    def _read(self) -> torch.Tensor:
        self.auditor.note("scalar read")
        return self.cpu_side

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached below another wrapper: a Mirror has been unwrapped, and the mode has stepped aside for it."""
        if _foreign(types):
            return NotImplemented
        seen = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LogicalTensor))
        return seen.auditor.run(func, args, kwargs or {})


class Auditor(TorchDispatchMode):
    """Runs every operation on the CPU and notes those that would block the host."""

    def __init__(self) -> None:
        super().__init__()
        self.events: Counter[tuple[bool, str, int, str]] = Counter()
        self.in_loop: Any = lambda: False

    def found(self, steps: int) -> Stalls:
        counts = Counter({key[1:]: n for key, n in self.events.items() if key[0]})
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        sites = tuple(Site(file=f, line=line, cause=cause, count=n) for (f, line, cause), n in ordered)
        outside = sum(n for key, n in self.events.items() if not key[0])
        return Stalls(steps=steps, in_loop=sum(counts.values()), outside=outside, sites=sites)

    @staticmethod
    def to_cpu(value: Any) -> Any:
        return tree_map(lambda x: x.cpu_side if isinstance(x, LogicalTensor) else x, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _foreign(types):
            return NotImplemented  # another wrapper (a Mirror) unwraps itself first and comes back
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        cause = _blocking(func, args, kwargs)
        if cause:
            self.note(cause)
        return _run_on_cpu(func, args, kwargs, self)

    def note(self, cause: str) -> None:
        file, line = _caller()
        self.events[(bool(self.in_loop()), file, line, cause)] += 1


# --------------------------------------------------------------------------- what blocks

_READS = {aten._local_scalar_dense.default: "scalar read", aten.equal.default: "equal"}
_SHAPES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


def _blocking(func: Any, args: Any, kwargs: Any) -> str | None:
    """The cause for which this operation would block, or None."""
    if func is aten._to_copy.default:
        return _blocking_copy(args[0], kwargs)
    if not any(isinstance(leaf, LogicalTensor) for leaf in tree_leaves((args, kwargs))):
        return None
    if func in _READS:
        return _READS[func]
    if func in _SHAPES:
        return f"data-dependent shape ({func.__name__.split('.')[0]})"
    if func in _INDEXING:
        return _blocking_index(args)
    if func is aten.copy_.default and isinstance(args[0], LogicalTensor) != isinstance(args[1], LogicalTensor):
        non_blocking = len(args) > 2 and args[2]
        return None if non_blocking else "blocking copy"
    if func is aten._linalg_check_errors.default:
        return "error check of linear algebra"
    return None


def _blocking_copy(source: torch.Tensor, kwargs: Any) -> str | None:
    target = kwargs.get("device")
    if target is None or kwargs.get("non_blocking"):
        return None
    to_device = torch.device(target).type == DEVICE
    if isinstance(source, LogicalTensor):
        return None if to_device else "copy to the host"
    return "upload" if to_device else None


def _blocking_index(args: Any) -> str | None:
    for index in args[1]:
        if isinstance(index, LogicalTensor) and index.dtype in (torch.bool, torch.uint8):
            return "boolean-mask indexing"
        if index is not None and not isinstance(index, LogicalTensor) and isinstance(args[0], LogicalTensor):
            return "upload of an index"
    return None


def _caller() -> tuple[str, int]:
    """The innermost frame outside torch and undercrank: the line that a reader would mend."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/undercrank/" not in name:
            return _short(name), frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "?", 0


def _short(name: str) -> str:
    """The path from the package on: site-packages' own prefix says nothing."""
    return name.rsplit("/site-packages/", 1)[-1]


# --------------------------------------------------------------------------- the logical device


def _run_on_cpu(func: Any, args: Any, kwargs: Any, auditor: Auditor) -> Any:
    on_device = any(isinstance(leaf, LogicalTensor) for leaf in tree_leaves((args, kwargs)))
    target = kwargs.get("device")
    to_device = target is not None and torch.device(target).type == DEVICE
    wraps = to_device or (on_device and target is None)
    if target is not None:
        kwargs = {**kwargs, "device": "cpu"}
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": False}
    result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    if _in_place(func):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map(lambda value: _wrap(value, auditor), result) if wraps else result


def _in_place(func: Any) -> bool:
    name = func.__name__.split(".")[0]
    return func is aten.copy_.default or (name.endswith("_") and not name.startswith("_"))


def _unwrap(value: Any) -> Any:
    if isinstance(value, LogicalTensor):
        return value.cpu_side
    if isinstance(value, torch.device) and value.type == DEVICE:
        return torch.device("cpu")
    return value


def _wrap(value: Any, auditor: Auditor) -> Any:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, LogicalTensor)
    return LogicalTensor(value, auditor) if is_plain else value


def _foreign(types: Any) -> bool:
    known = (LogicalTensor, torch.nn.Parameter)
    return any(kind is not torch.Tensor and not issubclass(kind, known) for kind in types)


class _Factories(TorchFunctionMode):
    """`torch.tensor(x, device=...)` and `table[[0, -1]]` build on the host and upload: make both halves visible."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == DEVICE:
            host = {key: value for key, value in kwargs.items() if key != "device"}
            if isinstance(args[0], torch.Tensor):
                return args[0].to(device, **host)
            return func(*args, **host).to(device)
        if func is torch.Tensor.__getitem__ and isinstance(args[0], LogicalTensor):
            return func(args[0], _shown(args[1], args[0].device))
        return func(*args, **kwargs)


def _shown(index: Any, device: torch.device) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    shown = tuple(torch.tensor(part).to(device) if isinstance(part, list) else part for part in parts)
    return shown if isinstance(index, tuple) else shown[0]


_LIBRARY: list[Any] = []
"Kept alive: a registration ends with its library."


@functools.cache
def _register_device() -> None:
    """Once per process: torch lets a process name one such device."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Backend(_DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16, torch.float32]

        def empty_cache(self) -> None:
            pass

        def synchronize(self, *_: Any) -> None:
            pass

        def manual_seed(self, *_: Any) -> None:
            pass

    _setup_privateuseone_for_python_backend(DEVICE, backend_module=Backend())
    # Inside `torch.autocast` nothing is cast: models that ask for it cast to the precision which they have here.
    _LIBRARY.append(torch.library.Library("_", "IMPL", "AutocastPrivateUse1"))
    _LIBRARY[0].fallback(torch.library.fallthrough_kernel)


def _modules(pipe: Any) -> list[torch.nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def _move(module: torch.nn.Module, auditor: Auditor, stack: ExitStack) -> None:
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                wrapped = torch.nn.Parameter(LogicalTensor(parameter.data, auditor), requires_grad=False)
                stack.enter_context(swap_item(part._parameters, name, wrapped))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                stack.enter_context(swap_item(part._buffers, name, LogicalTensor(buffer, auditor)))
