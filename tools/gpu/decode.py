"""What the VAEs of full-size models cost to decode a film, as shipped and by each means of the lever `decode`.

    python tools/gpu/decode.py --out FOLDER                       # on a CUDA machine, about two minutes
    python tools/gpu/decode.py --out FOLDER --rehearse            # tiny, on the CPU: does the script itself work?
    python tools/gpu/decode.py --out FOLDER --rows hunyuan wan    # only rows whose names begin so

Random weights: times, bytes, and the distance to the same VAE as shipped. Every setting is run once untimed, then all
of them in order and again in the opposite order. Writes decode.json after every row, and calls.jsonl after every call:
a run that is cut short has told what it saw.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from keeping import Story, free, kept, options_of

from undercrank import families
from undercrank.levers.decode import Decode
from undercrank.rig import Rig


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to decode. lever None: as shipped."""

    lever: Decode | None = None
    channels_last: bool = False
    "The latents come pixel by pixel; a VAE that passes that on computes so."
    benchmark: bool = False
    "cuDNN tries its kernels on each shape and keeps the fastest."


STOCK = Setting()
STREAM = Setting(lever=Decode())
FUSED = Setting(lever=Decode(mode="fused"))


def _with(setting: Setting, **fields: Any) -> Setting:
    assert setting.lever is not None
    return replace(setting, lever=replace(setting.lever, **fields))


CAUSAL = {
    "stock": STOCK,
    "stream": STREAM,
    "stream, channels first": _with(STREAM, channels_last=False),
    "fused": FUSED,
    "fused, 2 latent frames": _with(FUSED, latent_frames=2),
    "fused, benchmark": replace(FUSED, benchmark=True),
}
WAN = {name: setting for name, setting in CAUSAL.items() if name != "fused, benchmark"} | {
    "fused, 4 latent frames": _with(FUSED, latent_frames=4),
    "fused, benchmark": replace(FUSED, benchmark=True),
}
FEW = {name: CAUSAL[name] for name in ("stock", "stream", "fused")}
OTHERS = {
    "stock": STOCK,
    "channels last": Setting(channels_last=True),
    "benchmark": Setting(benchmark=True),
    "channels last, benchmark": Setting(channels_last=True, benchmark=True),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One VAE at one shape, and the ways to decode that are compared; the first is the reference."""

    family: str
    build: Callable[[], Any]
    tiny: Callable[[], Any]
    width: int
    height: int
    num_frames: int
    settings: dict[str, Setting]
    dtype: torch.dtype = torch.bfloat16
    profiled: tuple[str, ...] = ()
    "Settings whose kernels are listed."
    against_float32: bool = False
    "Instead of times: how far each setting is from the same decode in float32."


def _hunyuan_tiny() -> Any:
    widths = (32, 32, 32, 32, 32)
    return diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=widths, layers_per_block=1)


def _wan_tiny() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, z_dim=16)


def _ltx_tiny() -> Any:
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )


def _cogvideox_tiny() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
    )


HUNYUAN = Row(
    family="hunyuanvideo-1.5-720p", build=diffusers.AutoencoderKLHunyuanVideo15, tiny=_hunyuan_tiny,
    width=1280, height=720, num_frames=33, settings=CAUSAL, profiled=("stock", "stream", "fused"),
)  # fmt: skip
ROWS = {  # Wan in float32 is as the product loads it
    "hunyuan 720p": HUNYUAN,
    "wan 480p": Row(
        family="wan2.1-14b", build=diffusers.AutoencoderKLWan, tiny=_wan_tiny,
        width=832, height=480, num_frames=81, settings=WAN, profiled=("stock", "fused"),
    ),
    "hunyuan 480p": replace(HUNYUAN, width=848, height=480, settings=FEW, profiled=()),
    "hunyuan 480p, 9 frames, float32": replace(
        HUNYUAN, width=848, height=480, num_frames=9, settings=FEW, profiled=(), against_float32=True
    ),
    "wan 480p, float32": Row(
        family="wan2.1-14b", build=diffusers.AutoencoderKLWan, tiny=_wan_tiny, dtype=torch.float32,
        width=832, height=480, num_frames=81, settings=FEW,
    ),
    "ltx": Row(
        family="ltx-video", build=diffusers.AutoencoderKLLTXVideo, tiny=_ltx_tiny,
        width=768, height=512, num_frames=161, settings=OTHERS, profiled=("stock",),
    ),
    "cogvideox": Row(
        family="cogvideox-2b", build=diffusers.AutoencoderKLCogVideoX, tiny=_cogvideox_tiny, dtype=torch.float16,
        width=720, height=480, num_frames=49, settings={k: OTHERS[k] for k in ("stock", "channels last", "benchmark")},
        profiled=("stock",),
    ),
}  # fmt: skip


class Bench:
    """One VAE on one device, the latents of one film, and its decodes."""

    def __init__(self, name: str, device: str, rehearse: bool, journal: Path) -> None:
        self.name, self.row, self.device, self.journal = name, ROWS[name], device, journal
        torch.manual_seed(0)
        torch.set_default_dtype(self.row.dtype)
        try:
            with torch.device(device):
                self.vae = (self.row.tiny if rehearse else self.row.build)().eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
        self.rig = Rig(SimpleNamespace(vae=self.vae), families.family(self.row.family), device)
        self.z_BCTHW = self._latents(rehearse).to(device, self.row.dtype)

    def _latents(self, rehearse: bool) -> torch.Tensor:
        row, config = families.family(self.row.family), self.vae.config
        channels = config.latent_channels if "latent_channels" in config else config.z_dim
        size = families.latent_shape(row, self.row.width, self.row.height, self.row.num_frames)
        return torch.randn(1, channels, *((3, 3, 5) if rehearse else size), generator=torch.Generator().manual_seed(7))

    def decode(self, name: str, setting: Setting) -> dict[str, Any]:
        """One decode: milliseconds, bytes over those at rest, and the film on the device."""
        z = self.z_BCTHW
        if setting.channels_last:
            z = z.contiguous(memory_format=torch.channels_last_3d)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(setting.lever.engage(self.rig) if setting.lever else nullcontext())
            # Its `flags` would switch cuDNN off unless told otherwise.
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=setting.benchmark))
            resting = self._rest()
            begun = time.perf_counter()
            film = self.vae.decode(z, return_dict=False)[0]
            self._wait()
            ms = (time.perf_counter() - begun) * 1000
        found = {"ms": round(ms, 2), "peak_bytes": self._peak() - resting, "resting_bytes": resting}
        told = {"row": self.name, "setting": name, **found, "counters": dict(self.rig.counters)}
        with self.journal.open("a") as file:
            file.write(json.dumps(told) + "\n")
        return found | {"film": film}

    def compare(self) -> dict[str, Any]:
        """Every setting once untimed and held against the first one's film, then forward and backward."""
        settings, reference = dict(self.row.settings), None
        story: dict[str, Any] = {"shape": list(self.z_BCTHW.shape), "dtype": str(self.row.dtype)}
        for name, setting in self.row.settings.items():
            self.rig.counters.clear()
            first = kept(lambda name=name, setting=setting: self.decode(name, setting))
            film = first.pop("film", None)
            if film is None:
                story[name] = first
                del settings[name]
                continue
            reference = film if reference is None else reference
            story[name] = {"first_ms": first["ms"]} | _distance(film, reference)
            if self.rig.counters.get("decode.strangers"):
                story[name]["complaint"] = "decoded as shipped"
            film = None
        reference = None
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
        for name in (*settings, *reversed(settings)):
            found = self.decode(name, settings[name])
            del found["film"]
            runs[name].append(found)
        stock = [run["ms"] for run in runs[next(iter(settings))]]
        for name, found in runs.items():
            ms = [run["ms"] for run in found]
            story[name] |= {
                "ms": ms,
                "median_ms": statistics.median(ms),
                "peak_gib": round(max(run["peak_bytes"] for run in found) / 2**30, 3),
                "resting_gib": round(found[0]["resting_bytes"] / 2**30, 3),
                "over_stock": [round(a / b, 4) for a, b in zip(ms, stock, strict=True)],
            }
        return story

    def float32(self) -> dict[str, Any]:
        """How far each setting is from the first lever's decode in float32, which no setting rounds like."""
        films = {name: self.decode(name, setting).pop("film") for name, setting in self.row.settings.items()}
        films = {name: film.float().cpu() for name, film in films.items()}
        self.vae.float()
        self.z_BCTHW = self.z_BCTHW.float()
        reference = self.decode("float32", STREAM).pop("film").cpu()
        return {name: _distance(film, reference) for name, film in films.items()}

    def kernels(self, name: str) -> dict[str, Any]:
        """Where the time goes: kernels by their total, of one decode."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device != "cpu":
            activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.decode(f"{name}, profiled", self.row.settings[name])
        rows = [
            {"name": each.key[:110], "ms": round(each.self_device_time_total / 1000, 2), "count": each.count}
            for each in profile.key_averages()
        ]
        return {"kernels": sorted(rows, key=lambda row: -row["ms"])[:16]}

    def _rest(self) -> int:
        gc.collect()
        if self.device == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _peak(self) -> int:
        return 0 if self.device == "cpu" else torch.cuda.max_memory_allocated()


def _distance(film: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    """Largest difference of one value (the scale is -1..1), and the relative one; frame by frame, for their floats."""
    largest = squares = total = 0.0
    for a, b in zip(film.unbind(2), reference.unbind(2), strict=True):
        gap = a.float() - b.float()
        largest = max(largest, float(gap.abs().max()))
        squares, total = squares + float(gap.square().sum()), total + float(b.float().square().sum())
    return {"max_abs": largest, "relative": (squares / total) ** 0.5, "largest_value": float(reference.abs().max())}


def _works(bench: Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
    if bench.row.against_float32:
        yield bench.name, bench.float32
        return
    yield bench.name, bench.compare
    for name in bench.row.profiled:
        yield f"{bench.name}: kernels, {name}", lambda name=name: bench.kernels(name)


def main() -> None:
    options = options_of(__doc__).parse_args()
    story, device = Story(options.out / "decode.json", options.seconds), "cpu" if options.rehearse else "cuda"
    for row in ROWS:
        if options.rows and not any(row.startswith(start) for start in options.rows):
            continue
        if not story.has_time_for(row):
            continue
        bench = Bench(row, device, options.rehearse, options.out / "calls.jsonl")
        for name, work in _works(bench):
            story.tell(name, work)
        bench = name = work = None  # else the last VAE lies in the next one's rest
        free()


if __name__ == "__main__":
    main()
