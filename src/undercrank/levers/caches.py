"""The caches behind step_cache: schedules decided before the loop, First Block Cache and EasyCache.

A residual is what the stack of blocks adds to each of its streams. A skipped step adds the newest one instead of
running the blocks. All state belongs to one run: it is dropped at its start and at its end, however that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from undercrank.levers.stacks import Part, Stack
from undercrank.records import LeverRefused

if TYPE_CHECKING:
    from undercrank.levers.programs import Programs
    from undercrank.rig import Rig


class Residuals:
    """What the stack added in the newest computed step, by branch: buffers that stay in place while shapes do.

    Two experts never run in the same step, so that they share a branch's buffers; `owner` says whose they hold.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, list[torch.Tensor | None]] = {}
        self._owner: dict[str, str] = {}
        self.is_tuple = False

    def forget(self) -> None:
        """Nothing is held any more; the buffers' memory stays for the next run."""
        self._owner.clear()

    def held(self, part: Part, branch: str) -> list[torch.Tensor | None] | None:
        return self._buffers[branch] if self._owner.get(branch) == part.name else None

    def own(self, part: Part, branch: str) -> None:
        """What is kept of the branch is of this denoiser and of this step."""
        self._owner[branch] = part.name

    def addresses(self, branch: str) -> tuple[int, ...]:
        """Where the branch's buffers lie."""
        return tuple(buffer.data_ptr() for buffer in self._buffers.get(branch, ()) if buffer is not None)

    def keep(self, branch: str, inputs: list[Any], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        self.is_tuple = isinstance(output, tuple)
        old = self._buffers.get(branch, [])
        self._buffers[branch] = [_difference(out, given, into) for out, given, into in _padded(outputs, inputs, old)]

    def added(self, part: Part, branch: str, inputs: list[Any]) -> Any:
        """What the stack is taken to return for these inputs."""
        residuals = self.held(part, branch)
        assert residuals is not None, f"nothing is held for {part.name}, {branch}"
        outputs = tuple(
            given if residual is None else given + residual for given, residual in zip(inputs, residuals, strict=False)
        )
        return outputs if self.is_tuple else outputs[0]

    @property
    def held_bytes(self) -> int:
        return sum(b.numel() * b.element_size() for buffers in self._buffers.values() for b in buffers if b is not None)


def _padded(outputs: tuple[Any, ...], inputs: list[Any], old: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    for place, output in enumerate(outputs):
        yield output, _at(inputs, place), _at(old, place)


def _at(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _difference(output: Any, given: Any, into: Any) -> torch.Tensor | None:
    """output - given, into the old buffer where that still fits; None where a stream is missing or changes shape."""
    if output is None or given is None or output.shape != given.shape:
        return None
    if _fits(into, output):
        return torch.sub(output, given, out=into)
    return torch.sub(output, given)


def _fits(buffer: Any, like: torch.Tensor) -> bool:
    if buffer is None or (buffer.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return bool(buffer.shape == like.shape and buffer.dtype == like.dtype and buffer.device == like.device)


# --------------------------------------------------------------------------- schedules


FULLS, SKIPS = "step_cache.fulls", "step_cache.skips"
"Counters of stacks that ran and of stacks that were skipped, counted where it happens."


@contextmanager
def told(rig: Rig, programs: Programs, part: Part, branch: str, **program: Hashable) -> Iterator[None]:
    """A forward about which this is told; afterwards, what ran is noted. Its Python code need not have run: a recorded
    forward counts, at each replay, what was counted in the recording."""
    before = [rig.counted_here(what) for what in (FULLS, SKIPS)]
    rig.program.update({f"step_cache.{what}": value for what, value in program.items()})
    try:
        yield
    finally:
        for what in program:
            del rig.program[f"step_cache.{what}"]
    fulls, skips = (rig.counted_here(what) - old for what, old in zip((FULLS, SKIPS), before, strict=True))
    if fulls or skips:
        programs.ran(part, branch, computed=fulls > 0)


class Scheduled:
    """Runs or skips the stack as a schedule says that was made before the loop. Nothing is read from the device."""

    def __init__(self, rig: Rig, programs: Programs) -> None:
        self._rig, self._programs = rig, programs
        self.residuals = Residuals()
        self._branch = ""
        self._program = "full"
        self._inputs: list[Any] = []
        self._first: tuple[tuple[str, int], torch.Tensor] | None = None
        "In a run that measures: how the first branch of the step changed."

    def forget(self) -> None:
        self.residuals.forget()
        self._inputs, self._first = [], None

    def forward(self, part: Part, call: dict[str, Any], run: Callable[[], Any]) -> Any:
        self._branch = self._programs.branch_of(part, call)
        self._program = self._programs.program(part, self._branch)
        program = f"measure {self._rig.step_index}" if self._program == "measure" else self._program  # never recorded
        residual = self.residuals.addresses(self._branch)
        try:
            with told(self._rig, self._programs, part, self._branch, program=program, residual=residual):
                output = run()
        finally:
            self._inputs = []
        if self._program != "skip":
            self.residuals.own(part, self._branch)
        if self._program == "measure" and self._programs.is_middle(part):
            self._programs.rounded(part, self._branch, _moved(output, part.again(_nudged(call))))
        return output

    def blocks(self, part: Part, stack: Stack) -> Iterator[Any]:
        if self._program == "skip":
            return iter((partial(self._skip, part),) if part.is_first(stack) else ())
        blocks = stack.real
        if part.is_first(stack):
            blocks[0] = partial(self._head, part, blocks[0])
        if part.is_last(stack):
            blocks[-1] = partial(self._tail, part, blocks[-1])
        return iter(blocks)

    def _head(self, part: Part, block: Any, *args: Any, **kwargs: Any) -> Any:
        self._inputs = part.given(args, kwargs)
        return block(*args, **kwargs)

    def _tail(self, part: Part, block: Any, *args: Any, **kwargs: Any) -> Any:
        output = block(*args, **kwargs)
        if self._program == "measure":
            self._measure(part, output)
        self.residuals.keep(self._branch, self._inputs, output)
        self._inputs = []
        self._rig.count(FULLS)
        return output

    def _skip(self, part: Part, *args: Any, **kwargs: Any) -> Any:
        self._rig.count(SKIPS)
        return self.residuals.added(part, self._branch, part.given(args, kwargs))

    def _measure(self, part: Part, output: Any) -> None:
        """Before the old residual is overwritten: how it differs from the new one, as numbers on the device."""
        video = output[0] if isinstance(output, tuple) else output
        residual = video - self._inputs[0]
        held = self.residuals.held(part, self._branch)
        before = held[0] if held and held[0] is not None and held[0].shape == residual.shape else None
        change = torch.zeros_like(residual) if before is None else residual - before
        apart, is_last = self._apart(part, change)
        self._programs.measured(
            part,
            self._branch,
            ratio=torch.ones((), device=video.device) if before is None else _ratio(residual, before),
            drift=_drift(change, apart, self._programs.guidance, video),
            is_last=is_last,
            tokens=int(video.shape[-2]),
        )

    def _apart(self, part: Part, change: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """By how much both branches of guidance change differently: halves of a batch, or this forward and the step's
        first one. Guidance multiplies it, where what they have in common counts once."""
        if self._programs.is_batched and change.shape[0] % 2 == 0:
            first, second = change.chunk(2)
            return (first - second).repeat(2, *[1] * (change.ndim - 1)), True
        key = (part.name, self._rig.step_index)
        if self._first is None or self._first[0] != key or self._first[1].shape != change.shape:
            self._first = (key, change)
            return None, False
        return change - self._first[1], True


def _nudged(call: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with latents larger by one unit in the last place of the text's dtype, or of their own."""
    latents, text = call["hidden_states"], call.get("encoder_hidden_states")
    coarse = text.dtype if isinstance(text, torch.Tensor) and text.is_floating_point() else latents.dtype
    return call | {"hidden_states": latents * (1 + torch.finfo(coarse).eps)}


def _moved(output: Any, other: Any) -> torch.Tensor:
    a, b = (made if isinstance(made, torch.Tensor) else made[0] for made in (output, other))
    return (a.float() - b.float()).norm() / a.float().norm()


def _ratio(residual: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of |r| / |r before|, as MagCache has it."""
    return (_length(residual) / (_length(before) + 1e-8)).mean()


def _drift(change: torch.Tensor, apart: torch.Tensor | None, guidance: float, output: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of (|change| + guidance |change apart|) / |output|: no guided sum of branches moves further."""
    moved = _length(change) if apart is None else _length(change) + guidance * _length(apart)
    return (moved / (_length(output) + 1e-8)).mean()


def _length(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32)


# --------------------------------------------------------------------------- First Block Cache


class FirstBlock:
    """Runs the first block, and the rest only where its residual has moved since the newest computed step.

    The rule of First Block Cache (ParaAttention, and diffusers): mean |change| over mean |residual before|. One read
    of the device in each forward.
    """

    def __init__(self, rig: Rig, programs: Programs, threshold: float) -> None:
        self._rig, self._programs, self._threshold = rig, programs, threshold
        self.residuals = Residuals()
        self._moved: dict[tuple[str, str], torch.Tensor] = {}
        self._branch = ""
        self._outputs: list[Any] = []
        self._computes = True

    def forget(self) -> None:
        self.residuals.forget()
        self._moved.clear()
        self._outputs = []

    def forward(self, part: Part, call: dict[str, Any], run: Callable[[], Any]) -> Any:
        self._branch = self._programs.branch_of(part, call)
        program = f"decides {self._rig.step_index}"  # never recorded
        try:
            with told(self._rig, self._programs, part, self._branch, program=program):
                output = run()
        finally:
            self._outputs = []
        if self._computes:
            self.residuals.own(part, self._branch)
        return output

    def blocks(self, part: Part, stack: Stack) -> Iterator[Any]:
        blocks = stack.real
        if part.is_first(stack):
            yield partial(self._head, part, blocks.pop(0))
            if not self._computes:
                yield partial(self._skip, part)
            elif not blocks and part.is_last(stack):  # a stack of one block has nothing left to skip
                self._rig.count(FULLS)
        if self._computes and blocks:
            if part.is_last(stack):
                blocks[-1] = partial(self._tail, part, blocks[-1])
            yield from blocks

    def _head(self, part: Part, block: Any, *args: Any, **kwargs: Any) -> Any:
        given = part.given(args, kwargs)[0]
        output = block(*args, **kwargs)
        self._outputs = list(output) if isinstance(output, tuple) else [output]
        self._computes = self._has_moved(part, self._outputs[0] - given)
        return output

    def _has_moved(self, part: Part, residual: torch.Tensor) -> bool:
        key = (part.name, self._branch)
        before = self._moved.get(key)
        is_known = before is not None and self.residuals.held(part, self._branch) is not None
        if is_known and before is not None and before.shape == residual.shape:
            self._rig.count("step_cache.reads")
            if (residual - before).abs().mean() / before.abs().mean() <= self._threshold:  # waits for the device
                return False
        self._moved[key] = residual
        return True

    def _tail(self, part: Part, block: Any, *args: Any, **kwargs: Any) -> Any:
        output = block(*args, **kwargs)
        self.residuals.keep(self._branch, self._outputs, output)
        self._rig.count(FULLS)
        return output

    def _skip(self, part: Part, *args: Any, **kwargs: Any) -> Any:
        self._rig.count(SKIPS)
        return self.residuals.added(part, self._branch, self._outputs)


# --------------------------------------------------------------------------- EasyCache


class Easy:
    """Skips whole forwards while the expected change of the output, added up, stays small.

    The rule of EasyCache (arXiv 2507.02860): the output moves with the latents at a rate that the newest two computed
    steps tell; a skipped forward returns the latents plus what the newest computed one added. The first branch of a
    step decides for all of them. One read of the device a step.
    """

    def __init__(self, rig: Rig, programs: Programs, threshold: float, retention: float) -> None:
        self._rig, self._programs, self._threshold, self._retention = rig, programs, threshold, retention
        self.residuals = Residuals()
        self.forget()

    def forget(self) -> None:
        self._kept: dict[tuple[str, str], _Forward] = {}
        self._leader: tuple[str, str] | None = None
        self._step, self._skips = -1, False
        self._before: torch.Tensor | None = None
        self._rate: torch.Tensor | None = None
        self._error: torch.Tensor | float = 0.0

    def blocks(self, part: Part, stack: Stack) -> Iterator[Any]:
        return iter(stack.real)

    def forward(self, part: Part, call: dict[str, Any], run: Callable[[], Any]) -> Any:
        branch = self._programs.branch_of(part, call)
        key, latents = (part.name, branch), call["hidden_states"]
        if self._step != self._rig.step_index:
            self._decide(key, latents)
        skips = self._skips and key in self._kept
        output = self._kept[key].reused(latents) if skips else run()
        if not skips:
            self._keep(key, latents, output)
        self._programs.ran(part, branch, computed=not skips)
        return output

    def _decide(self, key: tuple[str, str], latents: torch.Tensor) -> None:
        """Once a step, in its first forward."""
        self._step, total = self._rig.step_index, self._rig.total_steps
        if key != self._leader:  # the first step, or another expert's first
            self._leader, self._rate = key, None
        is_fixed = self._step < max(1, int(self._retention * total + 0.5)) or self._step == total - 1
        self._skips = not is_fixed and self._is_still(key, latents)
        if not self._skips:
            self._error = 0.0
        self._before = latents.clone()

    def _is_still(self, key: tuple[str, str], latents: torch.Tensor) -> bool:
        if self._rate is None or self._before is None:
            return False
        moved = self._rate * (latents - self._before).abs().mean() / self._kept[key].made.abs().mean()
        self._error = self._error + moved
        self._rig.count("step_cache.reads")
        return bool(self._error < self._threshold)  # waits for the device

    def _keep(self, key: tuple[str, str], latents: torch.Tensor, output: Any) -> None:
        new, old = _Forward(latents, output), self._kept.get(key)
        if key == self._leader and old is not None:
            self._rate = (new.made - old.made).abs().mean() / (new.given - old.given).abs().mean()
        self._kept[key] = new


class _Forward:
    """A computed forward: the latents that it was given, and what it made of them."""

    def __init__(self, given: torch.Tensor, output: Any) -> None:
        made = output if isinstance(output, torch.Tensor) else output[0]
        more = not isinstance(output, torch.Tensor) and len(output) > 1
        if more or made.shape != given.shape:
            raise LeverRefused(
                "transformer_cache=easycache: this model's output has not the shape of its latents; "
                "choose transformer_cache=magcache or fbcache"
            )
        self.given, self.made, self._like = given.clone(), made.clone(), type(output)

    def reused(self, latents: torch.Tensor) -> Any:
        made = latents + (self.made - self.given)
        if issubclass(self._like, torch.Tensor):
            return made
        return (made,) if self._like is tuple else self._like(sample=made)
