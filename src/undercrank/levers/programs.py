"""Which program each forward of a run is to execute: decided before the loop, per branch and per expert.

`full` runs the blocks, `skip` adds the residual that is held, `measure` is `full` plus two numbers of how the residual
changes: a curve of the checkpoint, kept for the runs after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from undercrank import paths, ratios
from undercrank.ratios import Curve, Identity
from undercrank.rig import DENOISERS
from undercrank.schedules import Schedule

if TYPE_CHECKING:
    from undercrank.levers.stacks import Part
    from undercrank.rig import Rig

UNKNOWN = "unknown"
"The branch of a forward that could not be told from others: never skipped."

Maker = Callable[["Phase", "Curve | None"], "Schedule | None"]
"The schedule of a branch over a phase; None: it cannot be made without a curve, so measure."


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The steps of one denoiser: all of them, or an expert's share."""

    denoiser: str
    first: int
    levels: tuple[float, ...]
    "Noise at the start of each step, falling."
    total: int
    "Steps of the whole run."
    paths: Mapping[int, Schedule] = field(default_factory=dict)
    "Schedules that were searched for, for these weights and so many steps, by budget."

    @property
    def steps(self) -> int:
        return len(self.levels)


@dataclass(kw_only=True)
class _Measured:
    """Numbers on the device, read after the loop."""

    ratios: list[Any] = field(default_factory=list)
    drifts: list[Any] = field(default_factory=list)
    floor: Any = None
    tokens: int = 0


class Programs:
    """The programs of one run of a rig, made at its start; what ran, and what was measured."""

    def __init__(self, rig: Rig, make: Maker) -> None:
        self._rig, self._make = rig, make
        self.forget()

    def forget(self) -> None:
        """Nothing of one run reaches the next."""
        self._phases: dict[str, Phase] = {}
        self._identities: dict[str, tuple[str, str]] = {}
        self._curves: tuple[Curve, ...] = ()
        self._schedules: dict[tuple[str, str], Schedule | None] = {}
        self._latest: dict[tuple[str, str], int] = {}
        self._measured: dict[tuple[str, str], _Measured] = {}
        self._branches = Branches(self._rig)

    def start(self, total: int) -> None:
        """Before the loop: waiting for the device is free here."""
        self.forget()
        self._phases = phases(self._rig, total)
        self._curves = ratios.read_curves()
        self._identities = {name: self._identity(name) for name in self._phases}
        known = paths.read_paths()
        self._phases = {name: self._with_paths(phase, known) for name, phase in self._phases.items()}

    @property
    def starts(self) -> tuple[int, ...]:
        """Steps at which a denoiser begins."""
        return tuple(phase.first for phase in self._phases.values() if phase.steps)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Budgets for which a path is known of every denoiser of this run."""
        known = [set(phase.paths) for phase in self._phases.values() if phase.steps]
        return tuple(sorted(set.intersection(*known))) if known else ()

    def _with_paths(self, phase: Phase, known: tuple[paths.Path, ...]) -> Phase:
        if phase.steps != phase.total:
            return phase  # a path is of all steps of a run
        weights, dtype = self._identities[phase.denoiser]
        found = paths.find(
            known,
            checkpoint=weights,
            dtype=dtype,
            scheduler=scheduler_title(self._rig.scheduler),
            denoiser=phase.denoiser,
            levels=phase.levels,
        )
        return replace(phase, paths=found)

    def _identity(self, name: str) -> tuple[str, str]:
        module = getattr(self._rig.pipe, name)
        return checkpoint(module), str(getattr(module, "dtype", "")).removeprefix("torch.")

    # ----------------------------------------------------------------------- a forward

    def program(self, part: Part, branch: str) -> str:
        """full, skip or measure, for the forward that now begins."""
        key, step = (part.name, branch), self._rig.step_index
        if key not in self._schedules:
            phase = self._phases[part.name]
            self._schedules[key] = self._make(phase, self._curve(part.name, branch, phase.steps))
        schedule, phase = self._schedules[key], self._phases[part.name]
        was_called = self._latest.get(key) == step - 1  # a branch that was away for a step has nothing fresh to reuse
        self._latest[key] = step
        if schedule is None:
            program = "measure"
            self._rig.count("step_cache.measuring")
        else:
            place = step - phase.first
            skips = 0 <= place < len(schedule) and not schedule[place] and was_called and self._branches.are_known
            program = "skip" if skips else "full"
        self._rig.plan_program(_title(key), computed=program != "skip")
        return program

    def ran(self, part: Part, branch: str, *, computed: bool) -> None:
        self._rig.ran_program(_title((part.name, branch)), computed=computed)

    def branch_of(self, part: Part, call: dict[str, Any]) -> str:
        return self._branches.name(call.get("encoder_hidden_states"))

    # ----------------------------------------------------------------------- curves

    def _curve(self, name: str, branch: str, steps: int) -> Curve | None:
        weights, dtype = self._identities[name]
        identity = Identity(
            checkpoint=weights,
            dtype=dtype,
            scheduler=scheduler_title(self._rig.scheduler),
            denoiser=name,
            branch=branch,
        )
        return ratios.find(self._curves, identity, steps)

    def measured(self, part: Part, branch: str, *, ratio: Any, drift: Any, is_last: bool, tokens: int) -> None:
        """is_last: the drift holds all branches of the step, and stands for those before it too."""
        record = self._measured.setdefault((part.name, branch), _Measured())
        record.ratios.append(ratio)
        record.drifts.append(drift)
        record.tokens = tokens
        for (name, _), other in self._measured.items() if is_last else ():
            if name == part.name and len(other.drifts) == len(record.drifts):
                other.drifts[-1] = drift

    @property
    def is_batched(self) -> bool:
        return self._rig.family.branches == "batched"

    @property
    def guidance(self) -> float:
        """The scale of this run, wherever the pipeline keeps it."""
        for holder in (getattr(self._rig.pipe, "guider", None), self._rig.pipe):
            scale = getattr(holder, "guidance_scale", None)
            if isinstance(scale, int | float):
                return float(scale)
        return self._rig.family.guidance_scale

    def is_middle(self, part: Part) -> bool:
        phase = self._phases[part.name]
        return self._rig.step_index == phase.first + phase.steps // 2

    def rounded(self, part: Part, branch: str, floor: Any) -> None:
        self._measured.setdefault((part.name, branch), _Measured()).floor = floor

    def finish(self, error: BaseException | None) -> None:
        """After the loop: read what was measured and keep it, if the run was whole; then forget the run."""
        try:
            if error is None and self._measured:
                self._keep_curves()
        finally:
            self.forget()

    def _keep_curves(self) -> None:
        curves: list[Curve] = []
        for (name, branch), record in self._measured.items():
            phase = self._phases[name]
            if len(record.ratios) != phase.steps:
                continue  # a branch that was away for some steps
            changes = torch.stack([torch.stack(record.ratios), torch.stack(record.drifts)]).double().cpu()
            if not bool(torch.isfinite(changes).all()) or not bool((changes[0] > 0).all()):
                continue
            curves.append(self._as_curve(phase, branch, changes.tolist(), record))
        if not curves or not self._branches.are_known:
            self._rig.remark("step_cache", "computed every step to measure it, but got no whole and finite curve of it")
            return
        ratios.append(curves)
        self._rig.count("step_cache.curves", len(curves))
        self._rig.remark(
            "step_cache",
            f"nothing was known of these weights ({', '.join(curve.branch for curve in curves)}): computed every step "
            "and measured it; the next run skips",
        )

    def _as_curve(self, phase: Phase, branch: str, changes: Sequence[list[float]], record: _Measured) -> Curve:
        weights, dtype = self._identities[phase.denoiser]
        repo, revision = origin(self._rig.pipe)
        return Curve(
            source=ratios.HERE,
            checkpoint=weights,
            family=self._rig.family.id,
            repo=repo,
            revision=revision,
            dtype=dtype,
            scheduler=scheduler_title(self._rig.scheduler),
            denoiser=phase.denoiser,
            branch=branch,
            levels=phase.levels,
            ratios=tuple(changes[0]),
            drifts=tuple(changes[1]),
            floor=None if record.floor is None else float(record.floor),
            tokens=record.tokens,
        )


class Branches:
    """The name of each forward's branch: the pipeline's own, or else a number by the text that it is given.

    An unnamed branch gives one tensor in every step, and no other branch gives it. The tensors are held, so that no
    other can come to lie at their address. A text that comes late, or twice in a step, is not understood: then the
    branches are unknown for the rest of the run, and everything is computed.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._texts: list[Any] = []
        self._step: int | None = None
        self._seen: set[int] = set()
        self.are_known = True

    def name(self, text: Any) -> str:
        if self._rig.branch is not None:
            return self._rig.branch
        if self._step != self._rig.step_index:
            self._step, self._seen = self._rig.step_index, set()
        place = next((i for i, known in enumerate(self._texts) if _is_same(known, text)), None)
        if place is None and self._step == 0:
            self._texts.append(text)
            place = len(self._texts) - 1
        if place is None or place in self._seen:
            self.are_known = False
            self._rig.count("step_cache.unnamed")
            return UNKNOWN
        self._seen.add(place)
        return f"branch {place + 1}"


def _is_same(known: Any, text: Any) -> bool:
    if known is None or text is None:
        return known is text
    return bool(known.data_ptr() == text.data_ptr() and known.shape == text.shape)


def _title(key: tuple[str, str]) -> str:
    return "/".join(key)


# --------------------------------------------------------------------------- what is known before the loop


def phases(rig: Rig, total: int) -> dict[str, Phase]:
    """Which steps are whose. Two experts share them at the pipeline's boundary, by timestep, as Wan 2.2 does."""
    names = [name for name in DENOISERS if getattr(rig.pipe, name, None) is not None]
    training = float(getattr(rig.scheduler.config, "num_train_timesteps", None) or 1000)
    timesteps = _timesteps(rig, total) or [training * (1 - i / total) for i in range(total)]
    boundary = (getattr(rig.pipe.config, "boundary_ratio", None) or 0) if len(names) > 1 else 0
    early = sum(t >= boundary * training for t in timesteps)
    shares = {names[0]: range(early)} | {name: range(early, total) for name in names[1:2]}
    return {
        name: Phase(denoiser=name, first=share.start, levels=tuple(timesteps[i] / training for i in share), total=total)
        for name, share in shares.items()
    }


def _timesteps(rig: Rig, total: int) -> list[float]:
    """Those of the loop, which may begin late (video to video); none where each frame has its own."""
    timesteps = rig.scheduler.timesteps
    if timesteps is None or timesteps.ndim != 1 or len(timesteps) < total:
        return []
    return [float(t) for t in timesteps[-total:].tolist()]


def scheduler_title(scheduler: Any) -> str:
    """What of a scheduler shapes its schedule. Flow-matching Euler has the shift in force beside its configuration."""
    known = {**scheduler.config, "_shift": vars(scheduler).get("_shift")}
    shift = next((known[name] for name in ("_shift", "flow_shift", "shift") if known.get(name) is not None), None)
    name = type(scheduler).__name__
    return name if shift is None else f"{name}, shift {shift:g}"


def origin(pipe: Any) -> tuple[str, str | None]:
    """The repository or folder that a pipeline says it came from, and the revision where its path tells."""
    where = str(getattr(pipe, "name_or_path", None) or pipe.config.get("_name_or_path") or "")
    _, found, revision = where.partition("/snapshots/")
    return where, (revision.split("/")[0] if found else None)


def checkpoint(module: Any) -> str:
    """A fingerprint of weights as they lie in memory: a few values of each, its name and its shape.

    LoRA, a fused adapter or another quantisation make another one. One read of the device.
    """
    digest, values = hashlib.sha256(), []
    for name, weight in (*module.named_parameters(), *module.named_buffers()):  # quantised weights are buffers
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if type(weight.data) is torch.Tensor and weight.is_floating_point() and weight.device.type != "meta":
            values.append(weight.detach().reshape(-1)[:: max(1, weight.numel() // 4)][:4].float())
    if values:
        digest.update(torch.cat([v.to(values[0].device) for v in values]).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
