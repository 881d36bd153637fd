"""The figures of the levers that keep the device busy, on full-size models with random weights, in one run.

    python tools/gpu/never_wait.py --out FOLDER                       # on a CUDA machine
    python tools/gpu/never_wait.py --out FOLDER --rehearse            # tiny, on the CPU: does the script itself work?
    python tools/gpu/never_wait.py --out FOLDER --rows hunyuan wan    # only rows whose names begin so

Each row compares settings of levers on one pipeline: every setting once untimed, then all of them in order and again
in the opposite order, so that whoever runs later is not favoured. Writes never_wait.json after every row, and
calls.jsonl after every call: a run that is cut short has told what it saw.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from full_size import SUBJECTS
from keeping import Story, free, kept, options_of

import undercrank
from undercrank.figures import floor_ms, kernel_table
from undercrank.lab import watched
from undercrank.levers import knobs
from undercrank.profiling import between_forwards, profiled
from undercrank.work import first_step, rates

OFF = dict.fromkeys(knobs(), "off")
"Stock: every lever off."


class Bench:
    """One pipeline on one device, and its calls under settings of levers."""

    journal: ClassVar[Path]
    "Every call goes here as it ends."

    def __init__(self, name: str, device: str, rehearse: bool) -> None:
        self.name, self.subject, self.device, self.rehearse = name, SUBJECTS[name], device, rehearse
        self.pipe = self.subject.pipeline(device, rehearse)

    def call(self, steps: int, levers: dict[str, str], **more: Any) -> dict[str, Any]:
        """One call: latents, step times, stalls, peak bytes, what the levers counted."""
        inputs = self.subject.inputs(self.pipe, self.device, min(steps, 3) if self.rehearse else steps, self.rehearse)
        with undercrank.accelerate(self.pipe, **(OFF | levers)) as run, torch.no_grad():
            begun = time.perf_counter()
            latents = self.pipe(**inputs | more).frames
            wall_s = time.perf_counter() - begun
        trace = run.trace
        assert trace is not None
        told = {"subject": self.name, "levers": levers, "more": {k: str(v) for k, v in more.items()}, "wall_s": wall_s}
        told |= {"step_ms": trace.step_ms, "stalls": trace.stalls, "peak_bytes": trace.peak_bytes}
        with self.journal.open("a") as file:
            file.write(json.dumps(told | {"counters": dict(run.rig.counters)}) + "\n")
        return {
            "latents": latents.detach().float().cpu(),
            "wall_s": wall_s,
            "step_ms": trace.step_ms,
            "denoise_s": trace.stage_s["denoise"],
            "stalls": trace.stalls,
            "stall_sites": trace.stall_sites,
            "peak_gib": (trace.peak_bytes or 0) / 2**30,
            "complaints": [c for receipt in run.receipts for c in receipt.complaints],
            "levers": [receipt.lever for receipt in run.receipts],
            "counters": dict(run.rig.counters),
        }

    def compare(self, steps: int, settings: dict[str, dict[str, str]], **more: Any) -> dict[str, Any]:
        """Every setting once untimed, then forward and backward; ratios to the first setting."""
        first = {
            name: kept(lambda levers=levers: self.call(steps, levers, **more)) for name, levers in settings.items()
        }
        failed = {name: run for name, run in first.items() if "failed" in run}
        settings = {name: levers for name, levers in settings.items() if name not in failed}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
        for name in (*settings, *reversed(settings)):
            runs[name].append(self.call(steps, settings[name], **more))
        stock = next(iter(settings))
        return failed | {
            name: {
                "step_ms": [round(ms, 2) for run in found for ms in run["step_ms"]],
                "median_step_ms": _median_step(found),
                "denoise_s": [round(run["denoise_s"], 4) for run in found],
                "ratio_to_first": [
                    round(a["denoise_s"] / b["denoise_s"], 4) for a, b in zip(runs[stock], found, strict=True)
                ],
                "median_ratio": _median_step(runs[stock]) / _median_step(found),
                "warm_up_s": first[name]["wall_s"] - found[0]["wall_s"],
                "stalls": [run["stalls"] for run in found],
                "stall_sites": found[-1]["stall_sites"],
                "peak_gib": found[-1]["peak_gib"],
                "levers": found[-1]["levers"],
                "complaints": found[-1]["complaints"] + first[name]["complaints"],
                "counters": found[-1]["counters"],
                "first_counters": first[name]["counters"],
                "equals_first": torch.equal(runs[stock][-1]["latents"], found[-1]["latents"]),
                "repeats": torch.equal(found[0]["latents"], found[-1]["latents"]),
                "relative_to_first": _relative(found[-1]["latents"], runs[stock][-1]["latents"]),
            }
            for name, found in runs.items()
        }

    def same(self, steps: int, a: dict[str, str], b: dict[str, str]) -> dict[str, Any]:
        """One call under each setting, twice under the second: are the latents equal?"""
        first, second, third = self.call(steps, a), self.call(steps, b), self.call(steps, b)
        return {
            "equal": torch.equal(first["latents"], second["latents"]),
            "second equal": torch.equal(first["latents"], third["latents"]),
            "denoise_s": [run["denoise_s"] for run in (first, second, third)],
            "peak_gib": [run["peak_gib"] for run in (first, second, third)],
            "stalls": [run["stalls"] for run in (first, second, third)],
            "complaints": second["complaints"] + third["complaints"],
            "counters": third["counters"],
        }

    def held(self, steps: int, settings: dict[str, dict[str, str]]) -> dict[str, Any]:
        """Levers stay on over three calls, as in a server: seconds of each loop, there and back."""
        loops: dict[str, list[list[float]]] = {name: [] for name in settings}
        for name in (*settings, *reversed(settings)):
            with undercrank.accelerate(self.pipe, **(OFF | settings[name])) as run, torch.no_grad():
                seen = []
                for _ in range(3):
                    self.pipe(
                        **self.subject.inputs(self.pipe, self.device, 3 if self.rehearse else steps, self.rehearse)
                    )
                    assert run.trace is not None
                    seen.append(round(run.trace.stage_s["denoise"], 4))
            loops[name].append(seen)
        return {name: {"loops_s": found} for name, found in loops.items()}

    def first_and_second(self, steps: int, levers: dict[str, str]) -> dict[str, Any]:
        """Seconds of the one step with which a load warms up, which compiles or finds what was compiled, and of a
        first and a second clip after it."""
        warming, first, second = (self.call(count, levers) for count in (1, steps, steps))
        return {
            "warming_s": warming["wall_s"],
            "wall_s": [first["wall_s"], second["wall_s"]],
            "ratio": first["wall_s"] / second["wall_s"],
            "ratio, warming counted": (warming["wall_s"] + first["wall_s"]) / second["wall_s"],
            "counters": warming["counters"],
        }

    def forward(self, levers: dict[str, str]) -> torch.Tensor:
        """What the denoiser returned in the one forward of a one-step call, in float32 on the host."""
        seen: list[torch.Tensor] = []
        hook = self.pipe.transformer.register_forward_hook(
            lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output.sample)
        )
        try:
            self.call(1, levers)
        finally:
            hook.remove()
        return seen[0].detach().float().cpu()

    def look(self, levers: dict[str, str], steps: int = 20, **more: Any) -> dict[str, Any]:
        """In runs of their own: the floor of a step at the rates of this device, waits, idle time, kernels."""
        inputs = self.subject.inputs(self.pipe, self.device, 3 if self.rehearse else steps, self.rehearse) | more
        call = lambda: self.pipe(**inputs)  # noqa: E731
        one_step = lambda: self.pipe(**inputs | {"num_inference_steps": 1})  # noqa: E731
        with undercrank.accelerate(self.pipe, **(OFF | levers)) as run, torch.no_grad():
            one_step()  # levers come on in the first call
            works = watched(run.rig, first_step, one_step)
            between = watched(run.rig, between_forwards, call)
            profile = watched(run.rig, profiled, call)
        found: dict[str, Any] = {
            "forwards": [{"gemm": w.gemm_flops, "attention": w.attention_flops, "conv": w.conv_flops} for w in works],
            "host_us_outside_the_denoiser": between.host_us,
        }
        if profile:
            seen, dtype = profile[0], str(self.subject.dtype).removeprefix("torch.")
            measured = rates(works[0], self.device, dtype)
            found |= {
                "floor_ms_of_a_step": sum(floor_ms(work, measured) for work in works),
                "rates": measured.to_dict(),
                "busy_ms_of_a_step": seen.busy_step_ms,
                "profile": seen.to_dict() | {"kernels": kernel_table(seen, top=25)},
            }
        return found


# --------------------------------------------------------------------------- rows


def cogvideox(device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    bench = Bench("cogvideox-2b", device, rehearse)
    dynamic = {"use_dynamic_cfg": True, "guidance_scale": 6.0}
    yield (
        "20 steps, dynamic guidance: host_sync",
        lambda: bench.compare(20, {"stock": {}, "host_sync": {"host_sync": "on"}}, **dynamic),
    )
    for name, steps in (("off", 8), ("on", 20)):
        yield (
            f"look, host_sync {name}",
            lambda name=name, steps=steps: bench.look({"host_sync": name}, steps, **dynamic),
        )
    yield "nothing copies back", lambda: _under_error_mode(bench, **dynamic)
    base = {"host_sync": "on"}
    settings = {
        "eager": base,
        "compiled": base | {"compile": "parity"},
        "compiled max": base | {"compile": "max"},
        "compiled, graphs": base | {"compile": "parity", "cuda_graph": "on"},
    }
    yield "4 steps: compile", lambda: bench.compare(4, settings, guidance_scale=6.0)
    yield "20 steps: graphs", lambda: bench.same(20, settings["compiled"], settings["compiled, graphs"])


def hunyuan_720p(device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield from _hunyuan("hunyuanvideo-1.5-720p", 2, device, rehearse)


def hunyuan_480p(device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield from _hunyuan("hunyuanvideo-1.5-480p", 4, device, rehearse)


def _hunyuan(name: str, steps: int, device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    bench = Bench(name, device, rehearse)
    trimmed = {"text_trim": "on", "host_sync": "on"}
    settings = {
        "stock": {},
        "trimmed": trimmed,
        "trimmed, compiled": trimmed | {"compile": "parity"},
        "trimmed, compiled plain": trimmed | {"compile": "plain"},
        "trimmed, compiled max": trimmed | {"compile": "max"},
    }
    if "720p" in name:
        del settings["trimmed, compiled plain"]  # its distance is a row of 480p
    yield "one forward a step", lambda: bench.compare(steps, settings)
    yield "look", lambda: bench.look(settings["trimmed, compiled max"], steps=3 * steps)
    if "480p" in name:
        graphs = settings["trimmed, compiled"] | {"cuda_graph": "on"}
        yield "20 steps: graphs", lambda: bench.same(20, settings["trimmed, compiled"], graphs)
        yield "distances of one forward", lambda: _distances(bench, settings)


def wan_14b(device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    bench = Bench("wan2.1-14b", device, rehearse)
    base = {"host_sync": "on"}
    settings = {"eager": base, "compiled": base | {"compile": "parity"}, "compiled max": base | {"compile": "max"}}
    yield "one forward a step", lambda: bench.compare(2, settings)
    yield "look", lambda: bench.look(settings["compiled max"], steps=6)


def small(device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    base = {"host_sync": "on"}
    settings = {
        "stock": {},
        "host_sync": base,
        "host_sync, graphs": base | {"cuda_graph": "on"},
        "host_sync, compiled": base | {"compile": "parity"},
        "host_sync, compiled, graphs": base | {"compile": "parity", "cuda_graph": "on"},
    }
    for name in ("wan2.1-1.3b", "ltx-video"):
        bench = Bench(name, device, rehearse)
        yield name, lambda bench=bench: bench.compare(20, settings)
        yield f"{name}, held", lambda bench=bench: bench.held(20, settings)


MASK = "1" * 9 + "001" * 3 + "01" * 6
"18 of 30 steps computed, nine at first and never more than two skipped in a row, as the quality preset would."


def step_cache(device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    bench = Bench("hunyuanvideo-1.5-720p", device, rehearse)
    levers = {"text_trim": "on", "host_sync": "on", "compile": "parity"}
    yield "30 steps, 18 computed", lambda: _skipping(bench, levers, MASK[:3] if rehearse else MASK)


def _skipping(bench: Bench, levers: dict[str, str], mask: str) -> dict[str, Any]:
    """Seconds of the loop with and without skipped steps, A B B A; a computed step against an uncached one."""
    bench.call(2, levers)
    cached = levers | {"transformer_cache": "mask", "transformer_cache_mask": mask}
    runs = [bench.call(len(mask), setting) for setting in (levers, cached, cached, levers)]
    plain, skipping = (runs[0], runs[3]), (runs[1], runs[2])
    step_ms = [statistics.median(ms for run in plain for ms in run["step_ms"])]
    of = lambda digit: [ms for run in skipping for ms, d in zip(run["step_ms"], mask, strict=False) if d == digit]  # noqa: E731
    step_ms += [statistics.median(of("1")), statistics.median(of("0") or [0.0])]
    share = mask.count("1") / len(mask)
    ratios = [b["denoise_s"] / a["denoise_s"] for a, b in zip(plain, skipping, strict=True)]
    return {
        "denoise_s": [run["denoise_s"] for run in runs],
        "over the uncached loop": ratios,
        "over its computed share": [ratio / share for ratio in ratios],
        "ms of a step: uncached, computed, skipped": step_ms,
        "stalls": [run["stalls"] for run in runs],
        "complaints": [c for run in runs for c in run["complaints"]],
        "peak_gib": [run["peak_gib"] for run in runs],
        "counters": skipping[-1]["counters"],
    }


def second_process(device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of use only after another run on this machine has left its compiled code behind."""
    bench = Bench("hunyuanvideo-1.5-480p", device, rehearse)
    levers = {"text_trim": "on", "host_sync": "on", "compile": "parity"}
    yield "30 steps, first and second call", lambda: bench.first_and_second(30, levers)


GROUPS = {
    "hunyuan 720p": hunyuan_720p,
    "hunyuan 480p": hunyuan_480p,
    "wan 14b": wan_14b,
    "small": small,
    "cogvideox": cogvideox,
    "step cache": step_cache,
    "second process": second_process,
}


def _under_error_mode(bench: Bench, **more: Any) -> dict[str, Any]:
    """CUDA raises at any copy back between the second step and the end of the loop."""
    if bench.device == "cpu":
        return {"skipped": "needs CUDA"}
    inputs = bench.subject.inputs(bench.pipe, bench.device, 20)
    with undercrank.accelerate(bench.pipe, **(OFF | {"host_sync": "on"})) as run, torch.no_grad():
        bench.pipe(**inputs | more)
        run.rig.at_step.append(lambda index: torch.cuda.set_sync_debug_mode("error") if index == 1 else None)
        run.rig.at_end.append(lambda error: torch.cuda.set_sync_debug_mode("default"))
        try:
            bench.pipe(**inputs | more)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"raised": False}


def _distances(bench: Bench, settings: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Relative error of one forward against stock in the run's dtype and against float32."""
    outputs = {name: bench.forward(levers) for name, levers in settings.items()}
    bench.pipe.transformer.float()
    outputs["trimmed float32"] = bench.forward(settings["trimmed"])
    bench.pipe.transformer.to(bench.subject.dtype)
    against = {name: outputs[name] for name in ("stock", "trimmed float32")}
    return {
        name: {f"against {other}": _relative(output, reference) for other, reference in against.items()}
        for name, output in outputs.items()
    }


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _median_step(runs: list[dict[str, Any]]) -> float:
    return statistics.median(ms for run in runs for ms in run["step_ms"])


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names hold this")
    options = parser.parse_args()
    story, device = Story(options.out / "never_wait.json", options.seconds), "cpu" if options.rehearse else "cuda"
    Bench.journal = options.out / "calls.jsonl"
    for group, rows in GROUPS.items():
        if not any(group.startswith(start) for start in options.rows or set(GROUPS) - {"second process"}):
            continue
        for name, work in _kept_rows(rows, device, options.rehearse):
            wanted = not options.only or any(each in name for each in options.only)
            if wanted and story.has_time_for(f"{group}: {name}"):
                story.tell(f"{group}: {name}", work)
        name = work = None  # else the last row keeps its model on the device, and in the next one's peak
        free()


def _kept_rows(rows: Any, device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    try:
        yield from rows(device, rehearse)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        yield "build", lambda: {"failed": message}


if __name__ == "__main__":
    main()
