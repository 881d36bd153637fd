"""Two guidance branches at once: which call of a denoiser is which branch, who computes it, and where they meet.

Imported inside cfg_parallel's `engage` only, since it needs torch.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from undercrank.levers import replica
from undercrank.levers.mirror import Mirror
from undercrank.tensors import version_of
from undercrank.undo import subclass

if TYPE_CHECKING:
    from undercrank.rig import Rig

FIRST = frozenset({"cond", "pred_cond"})
"Names that pipelines give to the branch that they compute first."

BATCHED = frozenset(
    {
        "hidden_states",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "timestep",
        "sigma",
        "audio_hidden_states",
        "audio_encoder_hidden_states",
        "audio_encoder_attention_mask",
        "audio_timestep",
        "video_coords",
        "audio_coords",
    }
)
"Arguments of a denoiser that carry both branches, one after the other, in pipelines that compute them in one call."

SETTLED = 64
"Kinds of steps that are remembered as run through once, the newest ones."

MOVING = frozenset({"hidden_states", "timestep", "sigma", "audio_hidden_states", "audio_timestep"})
"Arguments that are others in every step; the rest is sent to the replica once in a run."


# --------------------------------------------------------------------------- the way between two devices


class Road:
    """From the primary's device to the replica's and back. Nobody's host waits for a device on it.

    On CUDA the replica works in a stream of its own, also where both are on one device; events put the two streams
    in order.
    """

    def __init__(self, here: torch.device, there: torch.device) -> None:
        self.here, self.there = here, there
        self.stream = torch.cuda.Stream(there) if there.type == "cuda" else None
        self._ahead = here.type == there.type == "cuda"  # elsewhere a copy that nobody waits for may be read too soon

    def send(self, value: Any) -> Any:
        """The same arguments over there; what is computed there from now on waits for what was asked of `here`."""
        if self.stream is not None and self.here.type == "cuda":
            self.stream.wait_stream(torch.cuda.current_stream(self.here))
        with self._over_there():
            return tree_map(self._sent, value)

    def fetch(self, value: Any) -> Any:
        """The same results over here."""
        with self._over_there():
            back = tree_map(lambda x: x.to(self.here, non_blocking=self._ahead) if _is_tensor(x) else x, value)
        self._meet()
        return back

    def fill(self, empty: list[torch.Tensor], found: list[torch.Tensor]) -> None:
        """Write results over there into tensors over here, which were handed out before there was anything in them."""
        with self._over_there():
            for target, source in zip(empty, found, strict=True):
                target.copy_(source, non_blocking=self._ahead)
        self._meet()

    def work(self) -> Any:
        """Entered by the thread that drives the replica."""
        return self._over_there()

    def _over_there(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _meet(self) -> None:
        if self.stream is not None and self.here.type == "cuda":
            torch.cuda.current_stream(self.here).wait_stream(self.stream)

    def _sent(self, value: Any) -> Any:
        return (
            value.to(self.there, non_blocking=self._ahead) if _is_tensor(value) and value.device == self.here else value
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# --------------------------------------------------------------------------- what one step looks like


@dataclass(frozen=True, kw_only=True)
class Held:
    """The first branch's call, kept until the second one comes: then it is known whether both may run at once."""

    args: Any
    kwargs: Any
    context: tuple[str, dict[str, Any]] | None
    kind: Hashable
    empty: list[torch.Tensor]
    "Handed out already; filled at the join."


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a denoiser returns for one kind of call: enough to hand it out before it is computed."""

    spec: Any
    leaves: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        return [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in self.leaves]


def form_of(found: Any) -> Form | None:
    """None: something besides tensors, which cannot be handed out empty."""
    leaves, spec = tree_flatten(found)
    if not all(_is_tensor(leaf) for leaf in leaves):
        return None
    return Form(spec=spec, leaves=tuple((tuple(x.shape), x.stride(), x.dtype) for x in leaves))


class Kinds:
    """What decides which code a call runs: shapes, flags, words, and how many tokens of each text are valid.

    A mask is read once per run and tensor: where padding is cut off, it decides the shapes inside the model.
    """

    def __init__(self) -> None:
        self._read: dict[Hashable, tuple[Any, Hashable]] = {}

    def forget(self) -> None:
        self._read.clear()

    def of(self, args: Any, kwargs: dict[str, Any]) -> Hashable:
        named = tuple((name, self._of(name, kwargs[name])) for name in sorted(kwargs))
        return tuple(self._of("", arg) for arg in args), named

    def _of(self, name: str, value: Any) -> Hashable:
        leaves, spec = tree_flatten(value)
        return str(spec), tuple(self._leaf(name, leaf) for leaf in leaves)

    def _leaf(self, name: str, leaf: Any) -> Hashable:
        if not _is_tensor(leaf):
            return leaf if isinstance(leaf, bool | int | str | None) else type(leaf).__name__
        shape = tuple(leaf.shape), leaf.stride(), str(leaf.dtype)
        return (*shape, self._valid(leaf)) if name.startswith("encoder_attention_mask") and leaf.ndim == 2 else shape

    def _valid(self, mask: torch.Tensor) -> Hashable:
        host = mask.on_host if isinstance(mask, Mirror) else mask
        place = host.data_ptr(), tuple(host.shape), version_of(host)
        if place not in self._read:
            self._read[place] = (
                host,
                tuple(host.bool().sum(dim=1).cpu().tolist()),
            )  # held, so that its place stays its own
        return self._read[place][1]


# --------------------------------------------------------------------------- one denoiser and its copy


class Pair:
    """A denoiser and its replica; every call of the denoiser comes through here."""

    def __init__(self, router: Router, primary: Any, twin: Any, index: int) -> None:
        self.router, self.primary, self.replica, self.index = router, primary, twin, index
        self.forms: OrderedDict[Hashable, Form] = OrderedDict()
        self._names = list(inspect.signature(type(primary).forward).parameters)[1:]

    def call(self, plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """plain: the call as it would be without a replica."""
        router = self.router
        if not router.is_on:
            return plain(*args, **kwargs)
        if router.is_batched:
            return self._split(plain, args, kwargs)
        if router.is_first(self, kwargs):
            return self._first(args, kwargs)
        return self._second(plain, args, kwargs)

    def _first(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Hand out an empty answer where its form is known; else have it computed now, over there."""
        router = self.router
        router.settle_late()
        kind = (self.index, router.kinds.of(args, kwargs))
        form = self.forms.get(kind)
        if form is None:
            router.running = router.submit(self, args, kwargs, router.context())
            found = router.wait()
            router.remember(self, kind, found)
            router.alone = kind
            return found
        empty = form.empty(router.road.here)
        router.held = self, Held(args=args, kwargs=kwargs, context=router.context(), kind=kind, empty=empty)
        return tree_unflatten(empty, form.spec)

    def _second(self, plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute it here, at the same time as the first where both are known; the two meet before it returns."""
        router = self.router
        first = router.held[1].kind if router.held else router.alone
        if first is None:
            return plain(*args, **kwargs)
        kind = (router.run_kind(), first, router.kinds.of(args, kwargs))
        is_settled = router.met(kind)
        if router.held and not is_settled:
            router.settle()
        if router.held:
            router.begin()
        found = plain(*args, **kwargs)
        router.settle()
        router.alone = None
        return found

    def _split(self, plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Both branches came in one call, the unconditional one first: one half each, and one answer of both."""
        router = self.router
        call = dict(zip(self._names, args, strict=False)) | kwargs
        batch = call["hidden_states"].shape[0]
        if batch % 2:
            return plain(*args, **kwargs)
        here, there = (_half(call, batch, index) for index in (0, 1))
        kind = (router.run_kind(), self.index, router.kinds.of((), here), router.kinds.of((), there))
        is_settled = router.met(kind)
        router.running = router.submit(self, (), there, router.context())
        if is_settled:
            router.rig.count("cfg_parallel.together")
            mine = plain(**here)
            return _joined(mine, router.wait())
        theirs = router.wait()
        return _joined(plain(**here), theirs)


def _half(call: dict[str, Any], batch: int, index: int) -> dict[str, Any]:
    def half(name: str, value: Any) -> Any:
        is_split = name in BATCHED and _is_tensor(value) and value.ndim and value.shape[0] == batch
        return value.chunk(2)[index] if is_split else value

    return {name: half(name, value) for name, value in call.items()}


def _joined(a: Any, b: Any) -> Any:
    (left, spec), (right, _) = tree_flatten(a), tree_flatten(b)
    return tree_unflatten([torch.cat(both) for both in zip(left, right, strict=True)], spec)


# --------------------------------------------------------------------------- one run after the other


class Router:
    """The replicas of one rig, the thread that drives them, and what is known of the steps that were run."""

    def __init__(self, rig: Rig, road: Road, *, named: bool, batched: bool) -> None:
        self.rig, self.road = rig, road
        self.is_batched, self._is_named = batched, named
        self.pairs: list[Pair] = []
        self.is_apart = False
        "For measurements: replicas are kept and not used, so that both ways can be timed in turn."
        self.kinds = Kinds()
        self.lost: str | None = None
        "Why there is no replica any more; None: there is."
        self.held: tuple[Pair, Held] | None = None
        self.alone: Hashable | None = None
        "Kind of the first branch's call of this step, where it was computed at once."
        self.running: Future[Any] | None = None
        self._settled: OrderedDict[Hashable, None] = OrderedDict()
        self._met: dict[Hashable, None] = {}
        self._text: int | None = None
        self._sent: dict[int, tuple[Any, int, Any]] = {}
        "Held with what was sent, so that an address stays that of the same tensor."
        self._is_on = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="undercrank-replica")

    # ------------------------------------------------------------------- the extent of a run

    @property
    def is_on(self) -> bool:
        """In the loop of this rig's own run, with a replica that is as the primary is."""
        return self._is_on and self.rig.running

    def begin_run(self, total: int) -> None:
        """Before each loop: is the replica still there, and still the same?"""
        self.end_run(None)
        self._is_on = not self.is_apart and self.lost is None and all(self._is_same(pair) for pair in self.pairs)
        if self.lost is not None:
            self.rig.count(f"cfg_parallel.lost: {self.lost}")

    def end_run(self, error: BaseException | None) -> None:
        """After each loop, however it ended, nothing is under way. A whole run settles what it went through."""
        self._drain()
        if error is None and self._is_on:
            for kind in self._met:
                self._settled[kind] = None
                self._settled.move_to_end(kind)
            while len(self._settled) > SETTLED:
                self._settled.popitem(last=False)
            self._tell()
        self._is_on, self.alone, self._text = False, None, None
        self._met.clear()
        self._sent.clear()
        self.kinds.forget()

    def _tell(self) -> None:
        """For the record: how much of the run was shared out."""
        seen = self.rig.counters
        routed, together = (seen.get(f"cfg_parallel.{what}", 0) for what in ("routed", "together"))
        if routed:
            rest = "" if together == routed else ", the others one after the other: steps of their kind were new"
            where = f"the replica on {self.road.there} computed one of the two branches"
            self.rig.remark("cfg_parallel", f"{where}; {together} of {routed} steps had both at once{rest}")

    def _drain(self) -> None:
        """Wait for what the replica is at, whatever comes of it: it must not run on into the next generation."""
        running, self.running, self.held = self.running, None, None
        if running is not None and not running.cancel():
            running.exception()

    def close(self) -> None:
        """No thread is left, and nothing here keeps a replica alive."""
        self._drain()
        self._worker.shutdown(wait=True)
        for pair in self.pairs:
            pair.primary = pair.replica = None
        self.pairs.clear()

    def _is_same(self, pair: Pair) -> bool:
        """Compare weights and adapters; bring the replica up to date where only values differ."""
        if replica.structure(pair.replica) != replica.structure(pair.primary):
            self.rig.count("cfg_parallel.differs")
            return False
        mine = replica.sums(pair.primary)
        try:
            if self._sums_over_there(pair) == mine and replica.has_same_adapters(pair.replica, pair.primary):
                return True
            with self.road.work():
                replica.update(pair.replica, pair.primary)
            self._settled.clear()
            self.rig.count("cfg_parallel.updated")
            return self._sums_over_there(pair) == mine
        except RuntimeError as error:  # a device that fell over fails at whatever is asked of it, also at this
            self.lost = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            return False

    def _sums_over_there(self, pair: Pair) -> list[int]:
        """By the worker: that shows that it works."""
        job = functools.partial(replica.sums, pair.replica)
        found: list[int] = self._worker.submit(self._in_worker, job).result()
        return found

    # ------------------------------------------------------------------- which branch is it?

    def is_first(self, pair: Pair, kwargs: dict[str, Any]) -> bool:
        """The branch that is computed first, in a step that will compute a second one."""
        if not _is_guided(self.rig.pipe):
            return False
        if self._is_named:
            return self.rig.branch in FIRST
        return self._is_first_text(kwargs)

    def _is_first_text(self, kwargs: dict[str, Any]) -> bool:
        """Where the pipeline names no branch: in each step the run's first text comes first. Both may be one tensor."""
        text = kwargs.get("encoder_hidden_states")
        if text is None or self.held is not None or self.alone is not None:  # the first of this step was here already
            return False
        self._text = text.data_ptr() if self._text is None else self._text
        return bool(text.data_ptr() == self._text)

    def context(self) -> tuple[str, dict[str, Any]] | None:
        """The pipeline's own `cache_context` of this call, to be entered on the replica too."""
        return None if self.rig.branch is None else (self.rig.branch, dict(self.rig.where))

    # ------------------------------------------------------------------- together or one after the other?

    def run_kind(self) -> Hashable:
        """What besides a call's arguments decides which code runs."""
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast(self.road.here.type)
        return self.rig.engaged, self.rig.total_steps, type(self.rig.scheduler).__name__, modes

    def met(self, kind: Hashable) -> bool:
        """Whether a whole run went through this kind of step with the replica before: else something may have to be
        compiled, and two threads must never do that at once."""
        self._met[kind] = None
        self.rig.count("cfg_parallel.routed")
        return kind in self._settled

    def remember(self, pair: Pair, kind: Hashable, found: Any) -> None:
        form = form_of(found)
        if form is not None:
            pair.forms[kind] = form
            if len(pair.forms) > SETTLED:
                pair.forms.popitem(last=False)

    def begin(self) -> None:
        """Start the first branch's call over there; the caller goes on with the second one here."""
        assert self.held is not None
        pair, held = self.held
        self.running = self.submit(pair, held.args, held.kwargs, held.context)
        self.rig.count("cfg_parallel.together")

    def settle(self) -> None:
        """Fill the answer that was handed out empty, if there is one."""
        if self.held is None:
            return
        if self.running is None:
            pair, held = self.held
            self.running = self.submit(pair, held.args, held.kwargs, held.context)
        found, _ = tree_flatten(self._result())
        self.road.fill(self.held[1].empty, found)
        self.held = None

    def settle_late(self) -> None:
        """The net: a step goes on although the second branch never came."""
        self.alone = None
        if self.held is not None:
            self.rig.count("cfg_parallel.late")
            self.settle()

    # ------------------------------------------------------------------- the worker

    def submit(self, pair: Pair, args: Any, kwargs: dict[str, Any], context: Any) -> Future[Any]:
        """The copy to the other device is asked for here and now, before the second branch's work queues up."""
        if not self.is_batched:  # else each step brings new halves
            same = {name: tree_map(self._constant, value) for name, value in kwargs.items() if name not in MOVING}
            kwargs = kwargs | same
        args, kwargs = self.road.send((args, kwargs))
        job = functools.partial(_compute, pair.replica, args, kwargs, context)
        return self._worker.submit(self._in_worker, functools.partial(_in_modes(self.road.here.type), job))

    def wait(self) -> Any:
        """What was computed over there, over here."""
        return self.road.fetch(self._result())

    def _result(self) -> Any:
        assert self.running is not None
        future, self.running = self.running, None
        try:
            return future.result()
        except BaseException:
            self.held = None
            raise

    def _in_worker(self, job: Callable[[], Any]) -> Any:
        with self.road.work():
            return job()

    def _constant(self, value: Any) -> Any:
        """A tensor that was sent before, over there: texts, masks and tables are the same ones in every step."""
        if not _is_tensor(value) or value.device != self.road.here or self.road.here == self.road.there:
            return value
        known = self._sent.get(id(value))
        if known is None or known[1] != version_of(value):
            known = self._sent[id(value)] = value, version_of(value), self.road.send(value)
        return known[2]


def _compute(denoiser: Any, args: Any, kwargs: Any, context: tuple[str, dict[str, Any]] | None) -> Any:
    with denoiser.cache_context(context[0], **context[1]) if context else nullcontext():
        return denoiser(*args, **kwargs)


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _in_modes(kind: str) -> Callable[[Callable[[], Any]], Any]:
    """Gradients, inference mode and autocast belong to a thread: the caller's, for a job of another one."""
    grad, inference, (is_on, dtype, cache) = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast(kind)

    def run(job: Callable[[], Any]) -> Any:
        cast = torch.autocast(kind, dtype=dtype, cache_enabled=cache) if is_on else nullcontext()
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), cast:
            return job()

    return run


def _is_guided(pipe: Any) -> bool:
    """Whether this very step will compute a second branch, as the pipeline itself decides it."""
    guider = getattr(pipe, "guider", None)
    if guider is not None:
        return guider.num_conditions > 1
    if hasattr(pipe, "do_classifier_free_guidance"):
        return bool(pipe.do_classifier_free_guidance)
    return pipe.guidance_scale > 1


# --------------------------------------------------------------------------- where it is put


def routed(cls: Any, pair: Pair) -> type:
    """A subclass of the denoiser's class whose calls come through the pair."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return pair.call(functools.partial(cls.__call__, self), args, kwargs)

    return subclass(cls, __call__=__call__)


def netted(cls: Any, router: Router) -> type:
    """A subclass of the scheduler's class before whose steps every branch is filled. Copies of a scheduler keep it."""

    @functools.wraps(cls.step)  # pipelines inspect its signature
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        router.settle_late()
        return cls.step(self, *args, **kwargs)

    return subclass(cls, step=step)
