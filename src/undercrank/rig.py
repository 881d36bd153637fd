"""A loaded pipeline as levers see it, and the few seams that they may touch.

The seam of a run is the pipeline's own `progress_bar`: every video pipeline of diffusers opens one around its
denoising loop. Wrapped on the instance it tells the loop's start (with its length), each step and the end, also
when the end is an exception. The branch comes from the denoiser's `cache_context`, wrapped the same way.

Floor 1: no torch; a pipeline is used by its attributes only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from undercrank.records import Cancelled, Family
from undercrank.undo import appended, hooked, swap_attr

DENOISERS = ("transformer", "transformer_2", "unet")
"Components that are called in every step; the second one is the low-noise expert of two-expert models."


class _Here(threading.local):
    """What is true in this thread only: two branches may be computed at once, each in a thread of its own."""

    def __init__(self) -> None:
        self.branch: str | None = None
        self.where: Mapping[str, Any] = {}
        self.program: dict[str, Hashable] = {}
        self.counted: dict[str, int] = {}


class Rig:
    """One pipeline, its device, and the state of the run under way."""

    def __init__(self, pipe: Any, family: Family, device: str) -> None:
        self.pipe = pipe
        self.family = family
        self.device = device
        "Torch name of the device that denoises."
        self.at_start: list[Callable[[int], None]] = []
        "Called with the number of steps when the denoising loop begins."
        self.at_step: list[Callable[[int], None]] = []
        "Called with the index of the step that has just ended."
        self.at_end: list[Callable[[BaseException | None], None]] = []
        "Called when the loop ends, in reverse order of registration, with the exception that ended it, if any."
        self.at_frames: list[Callable[[Any], None]] = []
        "Called with each chunk of decoded frames BCFHW, in order, by a lever under which the VAE decodes in chunks."
        self.graph_passes: list[tuple[str, Callable[[Any], None]]] = []
        """(name, pass): called with each torch.fx.GraphModule that a lever is about to compile, to change it in
        place. Code compiled under other names is another program."""
        self.called = False
        "True from the entry of `pipe(...)` to its return."
        self.running = False
        "True inside the denoising loop of this pipeline: levers act only then."
        self.step_index = 0
        self.total_steps = 0
        self.replicas: list[Any] = []
        "Copies of the pipeline's denoisers that a lever keeps on another device, for as long as it is on."
        self.engaged: tuple[Hashable, ...] = ()
        "The levers that are on, as settings that can be compared."
        self.branch_calls: dict[str, int] = {}
        self.counters: dict[str, int] = {}
        "What levers counted in this call, by `lever.what`; their `verify` reads it."
        self.planned: dict[str, list[bool]] = {}
        "Of this call, by denoiser/branch: was each forward to be computed? Filled by a lever that skips."
        self.executed: dict[str, list[bool]] = {}
        "Of this call, by denoiser/branch: was each forward computed?"
        self.remarks: list[tuple[str, str]] = []
        "What levers have to say of this call, for the record: (lever, sentence)."
        self._skipped: set[int] = set()
        self._computed: set[int] = set()
        self._cancel_reason: str | None = None
        self._begun = False
        self._here = _Here()
        self._counting = threading.Lock()

    @property
    def primaries(self) -> list[Any]:
        """The pipeline's own denoisers: the primary, then experts."""
        found = [getattr(self.pipe, name, None) for name in DENOISERS]
        return [module for module in found if module is not None]

    @property
    def denoisers(self) -> list[Any]:
        """Primary, experts, then replicas of them; a lever on the model engages on each."""
        return [*self.primaries, *self.replicas]

    @property
    def branch(self) -> str | None:
        """The guidance branch that this thread computes, as the pipeline names it."""
        return self._here.branch

    @property
    def where(self) -> Mapping[str, Any]:
        """What the pipeline told of the branch besides its name, in this thread."""
        return self._here.where

    @property
    def program(self) -> dict[str, Hashable]:
        """What the forward under way in this thread is told by levers besides its arguments, by `lever.what`. Whoever
        records forwards keeps one recording for each."""
        return self._here.program

    @property
    def scheduler(self) -> Any:
        return self.pipe.scheduler

    def count(self, what: str, by: int = 1) -> None:
        counted = self._here.counted
        counted[what] = counted.get(what, 0) + by
        with self._counting:
            self.counters[what] = self.counters.get(what, 0) + by

    def counted_here(self, what: str) -> int:
        """What this thread has ever counted: for differences between two moments, whatever other threads count."""
        return self._here.counted.get(what, 0)

    def remark(self, lever: str, text: str) -> None:
        self.remarks.append((lever, text))

    def plan_program(self, key: str, *, computed: bool) -> None:
        """A forward of this denoiser/branch begins and is to be computed, or skipped."""
        self.planned.setdefault(key, []).append(computed)

    def ran_program(self, key: str, *, computed: bool) -> None:
        """The blocks of a forward ran, or its residual was added instead."""
        self.executed.setdefault(key, []).append(computed)
        (self._computed if computed else self._skipped).add(self.step_index)

    @property
    def skipped_steps(self) -> int:
        """Steps of this call in which every forward was skipped."""
        return len(self._skipped - self._computed)

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop the run within one step. Safe from another thread and from a signal handler."""
        self._cancel_reason = reason

    def forget_cancel(self) -> None:
        """A cancel that came when nothing was under way is not one of what comes next."""
        self._cancel_reason = None

    def check_cancelled(self) -> None:
        if self._cancel_reason is not None:
            raise Cancelled(self._cancel_reason)

    @contextmanager
    def call(self) -> Iterator[None]:
        """The extent of one `pipe(...)` call. A failed call performs the duties that diffusers leaves undone."""
        self.called = True
        self._cancel_reason = None
        self.branch_calls, self.counters, self.remarks = {}, {}, []
        self.planned, self.executed, self._skipped, self._computed = {}, {}, set(), set()
        try:
            yield
        except BaseException:
            self._tidy_after_failure()
            raise
        finally:
            self.called = False
            self._cancel_reason = None

    @contextmanager
    def seams(self) -> Iterator[None]:
        """Wrap `progress_bar`, each denoiser's `cache_context`, and the end of offloading; undone on leaving."""
        with ExitStack() as stack:
            bar = self.pipe.progress_bar
            stack.enter_context(swap_attr(self.pipe, "progress_bar", self._bar_maker(bar)))
            if hasattr(self.pipe, "maybe_free_model_hooks"):
                free = self._freer(self.pipe.maybe_free_model_hooks)
                stack.enter_context(swap_attr(self.pipe, "maybe_free_model_hooks", free))
            for module in self.primaries:
                stack.enter_context(steadied(module))
                if hasattr(module, "cache_context"):
                    context = self._context_maker(module.cache_context)
                    stack.enter_context(swap_attr(module, "cache_context", context))
            yield

    @contextmanager
    def with_replica(self, module: Any) -> Iterator[None]:
        """A copy of a denoiser takes part: levers engage on it, and it tells its branch to the thread that it is in."""
        with ExitStack() as stack:
            if hasattr(module, "cache_context"):
                context = self._context_maker(module.cache_context, is_replica=True)
                stack.enter_context(swap_attr(module, "cache_context", context))
            stack.enter_context(appended(self.replicas, module))
            yield

    def _bar_maker(self, original: Callable[..., Any]) -> Callable[..., Bar]:
        def progress_bar(iterable: Any = None, total: int | None = None) -> Bar:
            length = total if total is not None else len(iterable)
            return Bar(original(iterable=iterable, total=total), self, length)

        return progress_bar

    def _freer(self, original: Callable[[], None]) -> Callable[[], None]:
        """Under model offloading, at the end of a call, weights go back to the host and the hooks stay on.

        Stock takes the hooks off and puts them on again (diffusers 0.42.1, `enable_model_cpu_offload`), and with them
        goes what levers had put around a denoiser's forward since.
        """

        def maybe_free_model_hooks() -> None:
            with swap_attr(self.pipe, "enable_model_cpu_offload", lambda **_: None):
                original()
            self._send_home()

        return maybe_free_model_hooks

    def _send_home(self) -> None:
        """By the parts and not by the pipeline's list of hooks: a copy of it shares its parts, and has another list."""
        parts = getattr(self.pipe, "components", {}).values()
        moved = [(part, hook) for part in parts for hook in _hooks_of(part) if type(hook).__name__ == "CpuOffload"]
        for part, hook in moved:
            hook.init_hook(part)
        if moved:
            from diffusers.utils.torch_utils import empty_device_cache

            empty_device_cache(self.device.partition(":")[0])

    def _context_maker(self, original: Callable[..., Any], *, is_replica: bool = False) -> Callable[..., Any]:
        @contextmanager
        def cache_context(name: str, **where: Any) -> Iterator[None]:
            self.check_cancelled()  # half a step sooner than the bar: a step may take a minute
            here = self._here
            outer = here.branch, here.where
            with original(name, **where):
                here.branch, here.where = name, where
                if not is_replica:  # the pipeline's own context around this call has counted it
                    self.branch_calls[name] = self.branch_calls.get(name, 0) + 1
                try:
                    yield
                finally:
                    here.branch, here.where = outer

        return cache_context

    def _start(self, total: int) -> None:
        self.step_index, self.total_steps, self._begun = 0, total, True
        for callback in list(self.at_start):  # set-up copies belong before the loop, not into its count
            callback(total)
        self.running = True

    def _step(self, count: int) -> None:
        for _ in range(count):
            index = self.step_index
            self.step_index += 1
            for callback in list(self.at_step):
                callback(index)
        self.check_cancelled()

    def _end(self, error: BaseException | None) -> None:
        if not self._begun:
            return
        self._begun = self.running = False
        with ExitStack() as stack:  # every callback is called, also when one of them raises
            for callback in list(self.at_end):
                stack.callback(callback, error)

    def _tidy_after_failure(self) -> None:
        """What a stock pipeline forgets when a forward raises (seen in diffusers 0.42.1).

        The guider's hooks stay on the denoiser ("Hook with name ... already exists" in the next run), momentum
        of a guider stays, and offload hooks keep models on the device.
        """
        guider = getattr(self.pipe, "guider", None)
        if guider is not None:
            for module in self.denoisers:
                guider.cleanup_models(module)
            if getattr(guider, "momentum_buffer", None) is not None:
                guider.momentum_buffer = None
        if hasattr(self.pipe, "maybe_free_model_hooks"):
            self.pipe.maybe_free_model_hooks()


# --------------------------------------------------------------------------- hooks that come and go


FLEETING = ("lazy_prefetch_group_offloading", "layer_execution_tracker")
"""Hooks by which diffusers follows the first forward under group offloading, and which it takes away then (0.42.1,
`hooks/group_offloading.py`). With a hook that lies outermost goes all that was put around it since."""

OUTERMOST = "undercrank_outermost"


class _Nothing:
    """A hook, as diffusers' registry knows one, that does nothing."""

    _is_stateful = False

    def initialize_hook(self, module: Any) -> Any:
        return module

    deinitalize_hook = initialize_hook

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        return output


@contextmanager
def steadied(module: Any) -> Iterator[None]:
    """On: no hook that will be taken away lies outermost in the module or in its parts. Off: as before."""
    with ExitStack() as stack:
        for registry in registries(module):
            if any(map(registry.get_hook, FLEETING)) and not registry.get_hook(OUTERMOST):
                stack.enter_context(hooked(registry, _Nothing(), OUTERMOST))
        yield


def _hooks_of(part: Any) -> tuple[Any, ...]:
    """Those of accelerate: one, or several in a row."""
    hook = getattr(part, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,)))


def registries(module: Any) -> list[Any]:
    """The hooks of a module and of its parts, as diffusers keeps them."""
    parts = module.modules() if hasattr(module, "modules") else ()
    return [vars(part)["_diffusers_hook"] for part in parts if "_diffusers_hook" in vars(part)]


class Bar:
    """A progress bar that also tells the rig where the run is. It stays a bar: bars nest and are iterated."""

    def __init__(self, bar: Any, rig: Rig, total: int) -> None:
        self._bar, self._rig, self._total = bar, rig, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)

    def __enter__(self) -> Bar:
        self._bar.__enter__()
        try:
            self._rig._start(self._total)
        except BaseException as error:  # a `with` whose entry fails never calls its exit
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Any:
        try:
            return self._bar.__exit__(kind, error, trace)
        finally:
            self._rig._end(error)

    def update(self, n: int = 1) -> Any:
        result = self._bar.update(n)
        self._rig._step(n)
        return result

    def __iter__(self) -> Iterator[Any]:
        """Pipelines that write `for t in self.progress_bar(timesteps)`."""
        self._rig._start(self._total)
        error: BaseException | None = None
        try:
            for item in self._bar:
                yield item
                self._rig._step(1)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._rig._end(error)
