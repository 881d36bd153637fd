"""The recorded forwards of one denoiser: what tells one from another, their buffers, and who records them.

Imported inside cuda_graph's `engage` only, since it needs torch.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from undercrank.levers.gate import PROMPT_BOUND
from undercrank.levers.mirror import Mirror, recorded_for_one_prompt
from undercrank.levers.uploads import Uploads, is_on_host, unwatched
from undercrank.records import LeverRefused
from undercrank.tensors import version_of
from undercrank.undo import subclass

if TYPE_CHECKING:
    from undercrank.rig import Rig

aten = torch.ops.aten

SMALL = 64
"Elements of a host tensor whose values may tell one kind of call from another."

MET = 64
"Kinds of calls that are remembered after their first time, and values that were sent."


class Unfit(Exception):
    """A call that cannot be recorded; the message says why."""


def recorded(cls: Any, graphs: Graphs) -> type:
    """A subclass of the denoiser's class whose forward is the recorded one where there is one."""

    @functools.wraps(cls.forward)  # pipelines inspect its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return graphs.call(functools.partial(cls.forward, self), args, kwargs)

    return subclass(cls, forward=forward)


def compiled_blocks(denoiser: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Modules whose calls are compiled, and such a call with no mode of ours for the compiler to see."""
    for module in denoiser.modules():
        if (compiled := vars(module).get("_compiled_call_impl")) is not None:
            yield module, functools.partial(_called_unwatched, compiled)


def _called_unwatched(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with unwatched():
        return compiled(*args, **kwargs)


class Graphs:
    """The graphs of one denoiser, the least recently used one first."""

    def __init__(self, rig: Rig, denoiser: Any, recorder: Recorder, *, most: int, declined: str) -> None:
        self.rig, self.recorder, self.most, self.declined = rig, recorder, most, declined
        self._denoiser = denoiser
        self._title = type(denoiser).__name__
        self._device = torch.device(rig.device)
        self._is_prompt_bound = self._title in PROMPT_BOUND
        self._asks_hooks = getattr(rig.pipe, "guider", None) is not None
        self._kept: OrderedDict[Any, Graph] = OrderedDict()
        self._met: OrderedDict[Any, None] = OrderedDict()
        self._constants = Constants(rig.device)
        self._made_of: Any = None

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """First of its kind: as it is. Second: recorded and replayed. Later: replayed."""
        if not self.rig.running:
            return forward(*args, **kwargs)
        self.rig.count("cuda_graph.calls")
        given: list[torch.Tensor] = []
        try:
            key = self._key((args, kwargs), given)
        except Unfit as why:
            self.rig.count(f"{self.declined}{why}")
            return forward(*args, **kwargs)
        graph = self._kept.get(key)
        if graph is None and key not in self._met:
            self.rig.count("cuda_graph.firsts")
            _remember(self._met, key, MET)
            with self._constants.learning(), _uncached_autocast(self._device.type):
                return self.recorder.first(forward, args, kwargs)
        if graph is None:
            graph = self._record(key, forward, args, kwargs, given)
        self._kept.move_to_end(key)
        self.rig.count("cuda_graph.replays")
        for what, count in graph.counts.items():
            self.rig.count(what, count)
        return graph.replay(given)

    def begin(self, total: int) -> None:
        """Before a loop: weights, processors or adapters that are others than those recorded make graphs stale."""
        _check_unhooked(self._denoiser)
        made_of = _made_of(self._denoiser)
        if made_of != self._made_of:
            self.clear()
        self._made_of = made_of

    def end(self, error: BaseException | None) -> None:
        """After a loop: what a prompt decides is not kept for the next one."""
        if self._is_prompt_bound:
            self.clear()

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.base.nbytes for graph in self._kept.values() for buffer in graph.buffers)

    def clear(self) -> None:
        for graph in self._kept.values():
            graph.drop()
        self._kept.clear()
        self._met.clear()
        self._constants.known.clear()

    def _key(self, call: Any, given: list[torch.Tensor]) -> Any:
        """Everything that the forward's Python code could decide by."""
        if torch.is_grad_enabled():
            raise Unfit("gradients are recorded")
        kind = self._device.type
        found = _form(call, self._device, given)
        if self._is_prompt_bound and not self.rig.program.get("host_sync.places") and not _names_a_prompt(found):
            raise Unfit(f"{self._title} selects tokens by the prompt's mask, which only host_sync knows: host_sync=on")
        if self._asks_hooks and any(_is_hooked(module) for module in self._denoiser.modules()):
            raise Unfit("guidance hooks blocks in this branch")
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return found, self.rig.branch, tuple(self.rig.program.items()), autocast, torch.is_inference_mode_enabled()

    def _record(self, key: Any, forward: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Graph:
        if len(self._kept) >= self.most:
            self.rig.count("cuda_graph.dropped")
            self._kept.popitem(last=False)[1].drop()
        before = dict(self.rig.counters)
        buffers = [Buffer(tensor) for tensor in given]
        for buffer, tensor in zip(buffers, given, strict=True):
            buffer.fill(tensor)
        supply = iter([buffer.tensor for buffer in buffers])
        args, kwargs = _with_buffers((args, kwargs), self._device, supply)
        with ExitStack() as stack:
            stack.enter_context(_uncached_autocast(self._device.type))
            stack.enter_context(self._constants.giving())
            if self._is_prompt_bound:
                stack.enter_context(recorded_for_one_prompt())
            try:
                recording, found = self.recorder.record(functools.partial(forward, *args, **kwargs))
            except (torch.OutOfMemoryError, NotImplementedError):
                raise
            except RuntimeError as error:
                raise LeverRefused(
                    f"cuda_graph: {self._title} cannot be recorded: {str(error).splitlines()[0][:200]}; "
                    "leave it out with cuda_graph=off"
                ) from error
        # What was counted while recording happens at every replay; Python code does not run there to count it.
        counts = {what: count - before.get(what, 0) for what, count in self.rig.counters.items()}
        for what, count in counts.items():
            self.rig.count(what, -count)
        self.rig.count("cuda_graph.graphs")
        graph = Graph(
            recording=recording,
            buffers=buffers,
            found=found,
            counts={what: count for what, count in counts.items() if count},
            constants=list(self._constants.known.values()),
        )
        self._kept[key] = graph
        return graph


def _remember(seen: OrderedDict[Any, Any], key: Any, most: int, value: Any = None) -> None:
    seen[key] = value
    if len(seen) > most:
        seen.popitem(last=False)


class Graph:
    """One recorded forward: fill the buffers, replay, copy the results out."""

    def __init__(
        self,
        *,
        recording: Recording,
        buffers: list[Buffer],
        found: Any,
        counts: dict[str, int],
        constants: list[torch.Tensor],
    ) -> None:
        self.buffers, self.counts = buffers, counts
        self._recording = recording
        self._constants = constants  # the graph reads them where they lie: they must stay
        self._results, self._spec = tree_flatten(found)
        if strange := {type(r).__name__ for r in self._results if not isinstance(r, torch.Tensor | None)}:
            raise LeverRefused(f"cuda_graph: a forward that returns {', '.join(strange)} cannot be replayed")

    def replay(self, given: list[torch.Tensor]) -> Any:
        """Results are copies: the next replay, of this graph or of one that shares its memory, overwrites its own."""
        for buffer, tensor in zip(self.buffers, given, strict=True):
            buffer.fill(tensor)
        self._recording.replay()
        return tree_unflatten([r if r is None else r.clone() for r in self._results], self._spec)

    def drop(self) -> None:
        self._recording.drop()
        for held in (self.buffers, self._results, self._constants):
            held.clear()


class Buffer:
    """A tensor of the same shape and strides at an address that stays.

    Dimensions of stride 0 (`t.expand(batch)`) are kept as such: code was compiled for these strides.
    """

    def __init__(self, like: torch.Tensor) -> None:
        kept = [1 if step == 0 else size for size, step in zip(like.shape, like.stride(), strict=True)]
        with torch.inference_mode(False):
            self.base = torch.empty_strided(kept, like.stride(), dtype=like.dtype, device=like.device)
            self.tensor = self.base if kept == list(like.shape) else self.base.expand(like.shape)

    def fill(self, source: torch.Tensor) -> None:
        narrow = [slice(0, 1) if step == 0 else slice(None) for step in source.stride()]
        self.base.copy_(source[tuple(narrow)] if 0 in source.stride() else source)


class Constants(Uploads):
    """What a forward sends to the device: sent in the first call of a kind, and given from here while recording.

    A recorded copy from the host would read that memory again at each replay, long after it was freed.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.known: OrderedDict[Any, torch.Tensor] = OrderedDict()
        "By dtype, shape and bytes; the newest ones."
        self._gives = False

    @contextmanager
    def learning(self, gives: bool = False) -> Iterator[None]:
        if self.device.type == "cpu":  # there everything is on the host, and stays
            yield
            return
        self._gives = gives
        with self:
            yield

    def giving(self) -> AbstractContextManager[None]:
        return self.learning(gives=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copies that nobody waits for are copies too."""
        kwargs = kwargs or {}
        if func is torch.Tensor.to and kwargs.get("non_blocking") and is_on_host(args[0]):
            kwargs = {key: value for key, value in kwargs.items() if key != "non_blocking"}
        return super().__torch_function__(func, types, args, kwargs)

    def send(self, on_host: torch.Tensor) -> torch.Tensor:
        on_host = on_host.contiguous()
        key = on_host.dtype, tuple(on_host.shape), on_host.reshape(-1).view(torch.uint8).numpy().tobytes()
        if self._gives and key not in self.known:
            raise RuntimeError("it sends other values to the device at each call")
        if not self._gives:
            _remember(self.known, key, MET, super().send(on_host))
        return self.known[key].clone()  # a forward may write into what it has sent


# --------------------------------------------------------------------------- what tells calls apart


class Same:
    """Equal to another one of the same object, which it keeps alive: no other can take its place."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def _form(value: Any, device: torch.device, given: list[torch.Tensor]) -> Any:
    """What of the arguments Python code could decide by; the tensors that only kernels read go to `given`."""
    if _is_kept(value):
        return "prompt", Same(value.memo), version_of(value.on_device)
    if isinstance(value, torch.Tensor):
        return _form_of_tensor(value, device, given)
    if type(value) is dict:
        return "dict", tuple((key, _form(item, device, given)) for key, item in value.items())
    if type(value) is tuple or type(value) is list:
        return type(value), tuple(_form(item, device, given) for item in value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    raise Unfit(f"an argument is a {type(value).__name__}")


def _form_of_tensor(value: torch.Tensor, device: torch.device, given: list[torch.Tensor]) -> Any:
    value = value.lead if isinstance(value, Mirror) else value
    if value.device.type == device.type:
        given.append(value)
        return tuple(value.shape), value.stride(), value.dtype
    if value.device.type == "cpu" and value.numel() <= SMALL:
        return "host", tuple(value.shape), value.dtype, tuple(value.flatten().tolist())
    raise Unfit(f"a tensor of {value.numel()} elements is on {value.device.type}")


def _with_buffers(value: Any, device: torch.device, supply: Iterator[torch.Tensor]) -> Any:
    """The same arguments with the tensors of `supply` in place of those that `_form` took out, in its order."""
    if isinstance(value, torch.Tensor) and not _is_kept(value):
        value = value.lead if isinstance(value, Mirror) else value
        return next(supply) if value.device.type == device.type else value
    if type(value) is dict:
        return {key: _with_buffers(item, device, supply) for key, item in value.items()}
    if type(value) is tuple or type(value) is list:
        return type(value)(_with_buffers(item, device, supply) for item in value)
    return value


def _is_kept(value: Any) -> bool:
    """A mask that the forward reads: one graph serves this one only."""
    return isinstance(value, Mirror) and value.memo is not None


def _names_a_prompt(form: Any) -> bool:
    return isinstance(form, tuple) and (form[:1] == ("prompt",) or any(_names_a_prompt(part) for part in form))


def _is_hooked(module: Any) -> bool:
    registry = vars(module).get("_diffusers_hook")
    return registry is not None and bool(registry.hooks)


def _check_unhooked(denoiser: Any) -> None:
    """A replay calls no hook: offloading, a cache of diffusers or a hook of torch inside would be passed over."""
    for name, module in denoiser.named_modules():
        is_hooked = hasattr(module, "_hf_hook") or _is_hooked(module)
        if is_hooked or (name and (module._forward_hooks or module._forward_pre_hooks)):
            where = ".".join(filter(None, (type(denoiser).__name__, name)))
            raise LeverRefused(
                f"cuda_graph: {where} runs under a hook (a cache, offloading), which a replay would not call; "
                "remove the hook, or leave it out with cuda_graph=off"
            )


def _made_of(denoiser: Any) -> list[Any]:
    """Where the weights lie, and which code reads them: adapters, processors and their settings."""
    found: list[Any] = [tensor.data_ptr() for tensor in (*denoiser.parameters(), *denoiser.buffers())]
    for module in denoiser.modules():
        processor = getattr(module, "processor", None)
        found.append((type(module), Same(processor), getattr(processor, "_attention_backend", None)))
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):
            found.append((list(module.active_adapters), module.disable_adapters, dict(module.scaling)))
    return found


@contextmanager
def _uncached_autocast(kind: str) -> Iterator[None]:
    """Casts of weights are recorded too: autocast's cache of them is freed when its block ends."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
        yield


# --------------------------------------------------------------------------- who records


class Recording(Protocol):
    def replay(self) -> None: ...

    def drop(self) -> None: ...


class Recorder(Protocol):
    def first(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]: ...

    def pool_bytes(self) -> int: ...


@contextmanager
def recorder(name: str, device: str) -> Iterator[Recorder]:
    if name == "tape":
        yield Tapes(torch.device(device))
        return
    cuda = Cuda(torch.device(device))
    try:
        yield cuda
    finally:
        cuda.close()


_recording = threading.Lock()
"One at a time in a process: what captures share (cuBLAS handles, the allocator's state) bears no more."


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One for each device and for good: cuBLAS keeps a workspace for every stream that it ever worked on."""
    return torch.cuda.Stream(device)


class Cuda:
    """CUDA graphs of one rig.

    All of them share one pool of memory. Graphs that share memory may overwrite each other's values as soon as they
    run, which is harmless here: they run one after the other on one stream, and nothing of a graph is read after the
    copies that directly follow its own replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.stream = _side_stream(self.device)
        self.pool = torch.cuda.graph_pool_handle()
        self._pools = {tuple(self.pool)}
        self._live = 0
        "Recordings that hold the pool."
        self._has_recorded = False
        self._pool_bytes: int | None = None
        "Asked once after each recording."

    def first(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """On the side stream, where it will be recorded: what is chosen, compiled or allocated once is so now."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = forward(*args, **kwargs)
        current.wait_stream(self.stream)
        results, spec = tree_flatten(found)
        return tree_unflatten([r.clone() if isinstance(r, torch.Tensor) else r for r in results], spec)

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        graph = torch.cuda.CUDAGraph()
        if not self._live:
            self._renew_pool()
        with _recording:
            torch.cuda.synchronize(self.device)
            gc.collect()  # else a graph that is garbage could be destroyed while this one is recorded
            torch.cuda.empty_cache()  # while recording the allocator cannot do it
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self._has_recorded, self._pool_bytes = True, None
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    found = run()
                except BaseException:
                    self._abandon(graph)
                    raise
                graph.capture_end()
        self._live += 1
        return CudaRecording(graph, self._dropped), found

    def _dropped(self) -> None:
        self._live -= 1

    def _renew_pool(self) -> None:
        """A pool ends with its last graph: torch asserts that nobody records into it again (seen in torch 2.11)."""
        self.pool = torch.cuda.graph_pool_handle()
        self._pools = {tuple(self.pool)}

    def _abandon(self, graph: Any) -> None:
        """End a recording that failed. CUDA, too, says here that it failed: the first error is the one to tell.

        Its memory goes back with the pool; what is recorded next gets another one.
        """
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):  # says so if it has stopped already
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        self._pools.add(tuple(self.pool))

    def pool_bytes(self) -> int:
        """What the allocator holds for the graphs alone."""
        if self._pool_bytes is None:
            segments = torch.cuda.memory_snapshot() if self._has_recorded else []
            own = [segment for segment in segments if tuple(segment["segment_pool_id"]) in self._pools]
            self._pool_bytes = sum(segment["total_size"] for segment in own)
        return self._pool_bytes

    def close(self) -> None:
        if self._has_recorded:
            torch.cuda.empty_cache()


class CudaRecording:
    def __init__(self, graph: Any, dropped: Callable[[], None]) -> None:
        self._graph, self._dropped = graph, dropped

    def replay(self) -> None:
        self._graph.replay()

    def drop(self) -> None:
        self._graph.reset()
        self._dropped()


# --------------------------------------------------------------------------- without a GPU


class Tapes:
    """Operations on fixed tensors, recorded and done again without the Python code around them, as CUDA does it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def first(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def record(self, run: Callable[[], Any]) -> tuple[Recording, Any]:
        tape = Tape(self._device)
        with _recording, tape:
            found = run()
        for result in tree_flatten(found)[0]:
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                result.fill_(float("nan"))  # recording computes nothing: only a replay does
        return tape, found

    def pool_bytes(self) -> int:
        return 0


class Tape(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._done: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks stay compiled under it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._waits(func, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        found = func(*args, **kwargs)
        self._done.append((func, args, kwargs, found))
        return found

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        """What CUDA refuses while it records: reads of the device, and copies between it and the host."""
        if func in _READS:
            return self._is_here(args[0])
        if func is aten.index.Tensor:
            return any(self._is_here(index) and index.dtype is torch.bool for index in args[1])
        target = kwargs.get("device")
        if func is aten._to_copy.default and target is not None and not isinstance(args[0], Mirror):
            return torch.device(target).type != args[0].device.type
        return False

    def _is_here(self, value: Any) -> bool:
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, Mirror)
        return is_plain and bool(value.device.type == self._device.type)

    def replay(self) -> None:
        for func, args, kwargs, found in self._done:
            if func._schema.returns and all(part.alias_info is None for part in func._schema.returns):
                again = func(*args, **kwargs)
                for old, new in zip(tree_flatten(found)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, torch.Tensor) and old is not new:
                        old.copy_(new)
            elif func._schema.is_mutable:
                func(*args, **kwargs)

    def drop(self) -> None:
        self._done.clear()


_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default})
"Operations that copy back from the device, which CUDA refuses while it records."
