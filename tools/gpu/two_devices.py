"""Two guidance branches on one device and on two, on full-size models with random weights, and what fails on purpose.

    python tools/gpu/two_devices.py --out FOLDER                            # two CUDA devices
    python tools/gpu/two_devices.py --out FOLDER --subjects wan2.1-14b --stacks eager compiled
    python tools/gpu/two_devices.py --out FOLDER --there cuda:0             # both on one: streams, no gain expected
    python tools/gpu/two_devices.py --out FOLDER --rehearse                 # tiny, the CPU twice: does it work?
    python tools/gpu/two_devices.py --out FOLDER --subjects flipbook --home cpu --there cpu --faults none

A: one branch after the other, on the first device; the replica is there and idle. B: both at once. Each side runs
untimed until nothing is compiled any more, then A B B A. Writes two_devices.json after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from full_size import SUBJECTS
from keeping import kept

from undercrank import families
from undercrank.levers.cfg_parallel import CfgParallel
from undercrank.levers.compile import Compile
from undercrank.levers.host_sync import HostSync
from undercrank.levers.step_cache import StepCache
from undercrank.levers.text_trim import TextTrim
from undercrank.machine import this_machine
from undercrank.records import Cancelled, LeverRefused
from undercrank.rig import Rig
from undercrank.trace import Tracer

DEFAULT = ("hunyuanvideo-1.5-720p", "hunyuanvideo-1.5-480p", "wan2.1-14b", "cogvideox-2b")
STACKS = ("eager", "compiled", "eager, cached", "compiled, cached")
GIB, MIB = 2**30, 2**20
NEGATIVE_TOKENS = 8


class Subject:
    """One model and its calls under guidance."""

    def __init__(self, name: str, home: str, steps: int, rehearse: bool) -> None:
        self.name, self.home, self.steps, self.rehearse = name, home, steps, rehearse
        self.row = families.family(name)
        self.pipe = _flipbook() if name == "flipbook" else SUBJECTS[name].pipeline(home, rehearse)
        self.rig = Rig(self.pipe, self.row, home)
        if hasattr(self.pipe, "guider") and not rehearse:
            self.pipe.guider = diffusers.ClassifierFreeGuidance(guidance_scale=6.0)

    def inputs(self, steps: int, **more: Any) -> dict[str, Any]:
        if self.name == "flipbook":
            given = {
                "prompt": "a red ball rolls left", "negative_prompt": "", "width": 128, "height": 128, "num_frames": 17,
                "num_inference_steps": steps, "output_type": "latent", "max_sequence_length": 64,
                "generator": torch.Generator().manual_seed(0), "guidance_scale": self.row.guidance_scale,
            }  # fmt: skip
            return given | more
        given = SUBJECTS[self.name].inputs(self.pipe, self.home, steps, self.rehearse)
        if self.rehearse:
            return given | more
        if not hasattr(self.pipe, "guider"):
            given["guidance_scale"] = self.row.guidance_scale
        for name in [name for name in given if name.startswith("prompt_")]:
            given.setdefault(f"negative_{name}", _negative(given[name]))
        return given | more

    def levers(self, stack: str) -> list[Any]:
        """Beside cfg_parallel, in ORDER."""
        found: list[Any] = [TextTrim()] if "hunyuan" in self.name else []
        if "cached" in stack:
            found.append(StepCache(cache="mask", mask=self.mask))
        if "compiled" in stack:
            found.append(Compile(backend="eager") if self.rehearse else Compile())
        return [*found, HostSync()]

    @property
    def mask(self) -> str:
        """Two of five steps are skipped, none of the first third: about what the quality preset does."""
        first = math.ceil(0.3 * self.steps)
        return "".join("1" if i < first or i == self.steps - 1 or (i - first) % 5 in (0, 2, 4) else "0"
                       for i in range(self.steps))  # fmt: skip

    def call(self, filled: Any, side: str, steps: int | None = None, **more: Any) -> dict[str, Any]:
        """One call: latents, seconds, stalls, peak bytes of each device, what was shared out."""
        filled.router.is_apart = side == "A"
        devices = _cuda(self.home, filled.device)
        for device in devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        tracer, begun = Tracer(self.rig), time.perf_counter()
        with self.rig.call(), tracer.watching(), torch.no_grad():
            latents = self.pipe(**self.inputs(steps or self.steps, **more))[0]
        trace = tracer.trace()
        return {
            "latents": latents.detach().cpu(),
            "wall_s": time.perf_counter() - begun,
            "loop_s": trace.stage_s["denoise"],
            "step_ms": list(trace.step_ms),
            "stalls": trace.stalls,
            "stall_sites": trace.stall_sites,
            "peak_gib": {device: torch.cuda.max_memory_allocated(device) / GIB for device in devices},
            "counters": dict(self.rig.counters),
        }


def _flipbook() -> Any:
    from importlib import resources

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(resources.files("undercrank") / "flipbook"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _negative(positive: torch.Tensor) -> torch.Tensor:
    """A shorter text: half as loud, and of its mask only the first places."""
    if positive.is_floating_point():
        return positive * 0.5
    return positive * (torch.arange(positive.shape[1], device=positive.device) < NEGATIVE_TOKENS)


def _cuda(*devices: str) -> list[str]:
    return sorted({device for device in devices if device.startswith("cuda")})


# --------------------------------------------------------------------------- one row


def measure(subject: Subject, stack: str, there: str) -> dict[str, Any]:
    """A and B in turn under one stack of levers."""
    twins, others = CfgParallel(device=there), subject.levers(stack)
    with contextlib.ExitStack() as on:
        on.enter_context(subject.rig.seams())
        filled = on.enter_context(twins.engage(subject.rig))
        for lever in others:
            on.enter_context(lever.engage(subject.rig))
        warm = {side: [subject.call(filled, side) for _ in range(2)] for side in "AB"}
        runs: dict[str, list[dict[str, Any]]] = {"A": [], "B": []}
        complaints: dict[str, list[str]] = {}
        for side in "ABBA":
            runs[side].append(subject.call(filled, side))
            checked = [twins, *others] if side == "B" else others
            complaints[side] = [c for lever in checked for c in lever.verify(subject.rig, None)]
        one_step = (
            {side: subject.call(filled, side, steps=1)["latents"] for side in "AB"} if "cach" not in stack else {}
        )
        busy = {side: busy_share(lambda side=side: subject.call(filled, side)) for side in "AB"}
    a, b = runs["A"], runs["B"]
    return {
        "levers": [type(lever).__name__ for lever in (twins, *others)],
        "steps": subject.steps,
        "replica_fill_s": filled.fill_s,
        "replica_gib": filled.fill_bytes / GIB,
        "replica_on": filled.device,
        "loop_s": {side: [run["loop_s"] for run in found] for side, found in runs.items()},
        "step_ms": {side: [round(ms, 2) for run in found for ms in run["step_ms"]] for side, found in runs.items()},
        "pair_ratios": [x["loop_s"] / y["loop_s"] for x, y in zip(a, b, strict=True)],
        "ratio": statistics.median(x["loop_s"] for x in a) / statistics.median(y["loop_s"] for y in b),
        "first_runs_s": {side: [run["wall_s"] for run in found] for side, found in warm.items()},
        "stalls": {side: [run["stalls"] for run in found] for side, found in runs.items()},
        "stall_sites": {side: found[-1]["stall_sites"] for side, found in runs.items()},
        "peak_gib": {side: found[-1]["peak_gib"] for side, found in runs.items()},
        "busy_share": busy,
        "at_once": b[-1]["counters"].get("cfg_parallel.together", 0),
        "counters": {side: found[-1]["counters"] for side, found in runs.items()},
        "repeats": {side: torch.equal(found[0]["latents"], found[-1]["latents"]) for side, found in runs.items()},
        "first_B_equals_A": torch.equal(warm["B"][0]["latents"], a[0]["latents"]),
        "drift": drift(a[0]["latents"], b[0]["latents"]),
        "drift_of_one_step": drift(one_step["A"], one_step["B"]) if one_step else None,
        "complaints": complaints,
    }  # fmt: skip


def drift(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    """How far b is from a: equal bit for bit or not, in steps of the last place of their dtype, and relative."""
    if torch.equal(a, b):
        return {"equal": True, "dtype": str(a.dtype)}
    apart = (_places(a) - _places(b)).abs()
    return {
        "equal": False,
        "dtype": str(a.dtype),
        "max_ulps": int(apart.max()),
        "median_ulps": float(apart.double().median()),
        "share_unequal": float((apart > 0).double().mean()),
        "max_abs": float((a.float() - b.float()).abs().max()),
        "relative": float((a.double() - b.double()).norm() / a.double().norm()),
        "finite": bool(torch.isfinite(a).all() and torch.isfinite(b).all()),
    }


def _places(values: torch.Tensor) -> torch.Tensor:
    """Floats as integers in their order, neighbours one apart."""
    words = {2: torch.int16, 4: torch.int32}[values.element_size()]
    bits = values.contiguous().view(words).long()
    return torch.where(bits < 0, torch.iinfo(words).min - bits, bits)


def busy_share(call: Callable[[], Any]) -> dict[str, float] | None:
    """Of the time from the first kernel to the last: the share in which each device had one running."""
    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.setdefault(event.device_index, []).append((event.time_range.start, event.time_range.end))
    if not spans:
        return None
    whole = max(e for found in spans.values() for _, e in found) - min(s for found in spans.values() for s, _ in found)
    return {f"cuda:{index}": _covered(sorted(found)) / whole for index, found in sorted(spans.items())}


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --------------------------------------------------------------------------- what fails on purpose


class Faults:
    """Each fault once, then a film that must equal the one before. True, or what was wrong."""

    def __init__(self, subject: Subject, there: str) -> None:
        self.subject, self.there, self.rig = subject, there, subject.rig
        self.twins = CfgParallel(device=there)

    def all(self) -> dict[str, Any]:
        names = [name for name in dir(self) if name.startswith("fault_")]
        return {name.removeprefix("fault_").replace("_", " "): kept(getattr(self, name)) for name in names}

    @contextlib.contextmanager
    def on(self) -> Iterator[Any]:
        with self.rig.seams(), self.twins.engage(self.rig) as filled:
            self.filled = filled
            yield filled

    def film(self, side: str = "B", **more: Any) -> torch.Tensor:
        return self.subject.call(self.filled, side, **more)["latents"]

    @property
    def at_once(self) -> int:
        return self.rig.counters.get("cfg_parallel.together", 0)

    def whole_again(self, stock: torch.Tensor) -> Any:
        equal = torch.equal(self.film(), stock)
        return True if equal and self.at_once else f"equal {equal}, at once {self.at_once}"

    def fails(self, module: Any, error: type[BaseException], act: Callable[[], Any]) -> Any:
        """`act` happens in the second forward of `module`; the run ends with `error`; the next one is whole."""
        with self.on():
            self.film()
            stock = self.film()
            with _second_forward(module(), act):
                try:
                    self.film()
                    return f"no {error.__name__} was raised"
                except error:
                    pass
            return self.whole_again(stock)

    def fault_worker_raises(self) -> Any:
        return self.fails(lambda: self.rig.replicas[0], ZeroDivisionError, lambda: 1 // 0)

    def fault_primary_raises(self) -> Any:
        return self.fails(lambda: self.rig.primaries[0], ZeroDivisionError, lambda: 1 // 0)

    def fault_cancel_between_branches(self) -> Any:
        return self.fails(lambda: self.rig.replicas[0], Cancelled, self.rig.cancel)

    def fault_cancel_in_step_3(self) -> Any:
        with self.on():
            self.film()
            stock = self.film()
            stop = lambda index: self.rig.cancel() if index == 2 else None  # noqa: E731
            self.rig.at_step.append(stop)
            try:
                self.film()
                return "was not cancelled"
            except Cancelled:
                pass
            finally:
                self.rig.at_step.remove(stop)
            return self.whole_again(stock)

    def fault_guidance_1_settles_nothing(self) -> Any:
        if hasattr(self.subject.pipe, "guider"):
            return "not run: its guidance is no argument"
        with self.on():
            self.film(guidance_scale=1.0)
            stock = self.film(side="A")
            first = self.film()
            if self.at_once or not torch.equal(first, stock):
                return f"at once {self.at_once}, equal {torch.equal(first, stock)}"
            return self.whole_again(stock)

    def fault_weights_changed_in_place(self) -> Any:
        weight = next(self.rig.primaries[0].parameters())
        with self.on():
            self.film()
            weight.data.add_(0.25)
            changed = self.film(side="A")
            if not torch.equal(self.film(), changed) or not self.rig.counters.get("cfg_parallel.updated"):
                return "the replica was not brought up to date"
            found = self.whole_again(changed)
            weight.data.sub_(0.25)
            return found

    def fault_replica_finds_no_memory(self) -> Any:
        if not self.there.startswith("cuda"):
            return "not run: needs CUDA"
        before = torch.cuda.memory_allocated(self.there)
        with _hogged(self.there, leave=256 * MIB):
            try:
                with self.on():
                    return "was engaged without room"
            except LeverRefused as refused:
                said = str(refused)
        left = torch.cuda.memory_allocated(self.there) - before
        return said if left < 64 * MIB and "GiB free, replica needs" in said else f"{left} bytes left: {said}"

    def fault_replica_runs_out_of_memory(self) -> Any:
        if not self.there.startswith("cuda"):
            return "not run: needs CUDA"
        with self.on():
            self.film()
            stock = self.film()
            with _hogged(self.there, leave=8 * MIB):
                try:
                    self.film()
                    return "did not run out"
                except torch.OutOfMemoryError:
                    pass
            return self.whole_again(stock)

    def fault_leaving_twice(self) -> Any:
        devices, threads = _cuda(self.subject.home, self.there), threading.active_count()
        for _ in range(2):
            before = {device: torch.cuda.memory_allocated(device) for device in devices}
            with self.on():
                self.film()
                self.film()
            left = {device: torch.cuda.memory_allocated(device) - before[device] for device in devices}
            if any(extra > 64 * MIB for extra in left.values()) or threading.active_count() != threads:
                return f"left {left} bytes, {threading.active_count() - threads} threads"
        return True


@contextlib.contextmanager
def _second_forward(module: Any, act: Callable[[], Any]) -> Iterator[None]:
    stock, count = module.forward, iter(range(10_000))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if next(count) == 1:
            act()
        return stock(*args, **kwargs)

    with patch.object(module, "forward", forward):
        yield


@contextlib.contextmanager
def _hogged(device: str, leave: int) -> Iterator[None]:
    """Hold all memory of a device but this much."""
    torch.cuda.empty_cache()
    held = []
    for size in (8 * GIB, GIB, 64 * MIB, 8 * MIB):
        while torch.cuda.mem_get_info(device)[0] - size > leave:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------- the script


def in_words(name: str, found: Any) -> str:
    if not isinstance(found, dict) or "failed" in found:
        return f"{name}: {found if not isinstance(found, dict) else found['failed']}"
    seconds = {side: ", ".join(f"{s:.3f}" for s in found["loop_s"][side]) for side in "AB"}
    drifted = found["drift"]
    film = "latents equal, bit for bit" if drifted["equal"] else (
        f"latents differ: at most {drifted['max_ulps']} ulps of {drifted['dtype']}, relative {drifted['relative']:.2e}"
    )  # fmt: skip
    return (
        f"{name}: A {seconds['A']} s, B {seconds['B']} s, {found['ratio']:.3f}x; {film}; at once {found['at_once']} of "
        f"{found['steps']}; stalls {found['stalls']}; replica {found['replica_gib']:.2f} GiB in "
        f"{found['replica_fill_s']:.2f} s on {found['replica_on']}; peak {found['peak_gib']}; "
        f"busy {found['busy_share']}; complaints {found['complaints']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--subjects", nargs="*", default=DEFAULT, choices=[*SUBJECTS, "flipbook"])
    parser.add_argument("--stacks", nargs="*", default=STACKS, choices=STACKS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--home", default="cuda:0")
    parser.add_argument("--there", default="cuda:1")
    parser.add_argument("--faults", default="wan2.1-1.3b", help="the model that faults are tried on, or none")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    if asked.rehearse:
        asked.home = asked.there = "cpu"
    if asked.home == "cpu":
        torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": this_machine().to_dict(), "rows": {}, "faults": {}}

    def write() -> None:
        (asked.out / "two_devices.json").write_text(json.dumps(report, indent=1, default=str), encoding="utf-8")

    for name in asked.subjects:
        subject = Subject(name, asked.home, asked.steps, asked.rehearse)
        is_batched = subject.row.branches == "batched"
        for stack in asked.stacks:
            if is_batched and "cached" in stack:
                continue  # refused by the levers: one call is both branches
            found = report["rows"][f"{name}, {stack}"] = kept(lambda s=subject, k=stack: measure(s, k, asked.there))
            print(in_words(f"{name}, {stack}", found), flush=True)
            write()
        del subject
    if asked.faults != "none":
        faults = Faults(Subject(asked.faults, asked.home, asked.steps, asked.rehearse), asked.there)
        report["faults"] = faults.all()
        for name, found in report["faults"].items():
            print(f"fault, {name}: {found if not isinstance(found, dict) else found['failed']}", flush=True)
    write()


if __name__ == "__main__":
    main()
