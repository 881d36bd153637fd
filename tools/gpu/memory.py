"""Peak bytes of each stage of full-size models against the formulas of `undercrank plan`, and runs inside 22 GiB.

    python tools/gpu/memory.py --out FOLDER                         # on a CUDA machine, about 200 s
    python tools/gpu/memory.py --out FOLDER --rows stages           # the formulas alone, about 70 s
    python tools/gpu/memory.py --out FOLDER --rows capped           # the runs inside 22 GiB alone, about 150 s
    python tools/gpu/memory.py --out FOLDER --rehearse              # tiny, on the CPU: does the script itself work?

Random weights, prompts as embeddings; text encoders are built apart, from their published sizes. Writes memory.json
after every row, and calls.jsonl after every call: a run that is cut short has told what it saw.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from full_size import SUBJECTS
from keeping import Story, free, kept, options_of

from undercrank import families, memory
from undercrank.levers import formats
from undercrank.levers.compile import Compile
from undercrank.levers.decode import Decode
from undercrank.levers.formats import FORMATS, convert
from undercrank.levers.host_sync import HostSync
from undercrank.levers.offload import Offload
from undercrank.levers.text_trim import TextTrim
from undercrank.machine import this_machine
from undercrank.planner import case_of, load_spec, resolve, under
from undercrank.records import Case, Lever, Request
from undercrank.rig import Rig

GIB = 2**30
CAP = 22 * GIB

STAGED: dict[str, tuple[Lever, ...]] = {
    "hunyuanvideo-1.5-720p": (TextTrim(), Decode()),
    "hunyuanvideo-1.5-480p": (TextTrim(), Decode()),
    "wan2.1-14b": (Decode(),),
    "cogvideox-2b": (),
    "ltx-video": (),
}
"Model -> the levers under which it is measured besides stock."

SIZES: dict[str, tuple[dict[str, int], ...]] = {
    "cogvideox-2b": ({}, {"width": 480, "height": 320, "num_frames": 25}),
    "ltx-video": (
        {"width": 768, "height": 512, "num_frames": 161},
        {"width": 704, "height": 480, "num_frames": 97},
    ),
}
"""Model -> the sizes that it is measured at, if not that of `full_size`: one that people ask for, and another one,
to which nobody fitted a formula."""

CAPPED: dict[str, tuple[Lever, ...]] = {
    "hunyuanvideo-1.5-720p": (TextTrim(), HostSync()),
    "wan2.1-14b": (HostSync(),),
}
"Model -> the levers that are on in both, resident and capped."


FLOAT8 = frozenset({"wan2.1-14b"})
WHOLE = frozenset({"hunyuanvideo-1.5-720p"})
"Models whose denoiser fits into 22 GiB in one piece: it is compiled there, beside a resident one that is compiled too."


def _umt5() -> Any:
    sizes = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 256384}
    return transformers.UMT5EncoderModel(transformers.UMT5Config(feed_forward_proj="gated-gelu", **sizes))


def _t5() -> Any:
    sizes = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 32128}
    return transformers.T5EncoderModel(transformers.T5Config(feed_forward_proj="gated-gelu", **sizes))


ENCODERS = {"wan2.1-14b": (_umt5, 512), "cogvideox-2b": (_t5, 226)}
"Model -> its text encoder, and the tokens that it is given."


class Bench:
    """One model on one device, measured stage by stage."""

    def __init__(self, name: str, device: str, rehearse: bool, journal: Path, size: dict[str, int]) -> None:
        self.name, self.device, self.rehearse, self.journal = name, device, rehearse, journal
        self.subject = replace(SUBJECTS[name], **size)
        self.pipe = self.subject.pipeline(device, rehearse)
        self.family = families.family(name)

    def case(self, levers: tuple[Lever, ...] = ()) -> Case:
        """As `undercrank plan` sees it, without a text encoder, as the pipeline here is."""
        machine, subject = this_machine(), self.subject
        size = {"width": subject.width, "height": subject.height, "num_frames": subject.num_frames}
        asked = Request(model=self.name, guidance_scale=1.0, dtype=str(subject.dtype).removeprefix("torch."), **size)
        device = replace(machine.devices[0], kind="cuda")
        resolved, _ = resolve(asked, self.family, device)
        case = case_of(resolved, self.family, machine, device, load_spec(self.family))
        weights = {role: count for role, count in case.weights.items() if role != "text_encoder"}
        case = under(memory.dense(replace(case, weights=weights)), levers)
        how = memory.STREAM if any(isinstance(lever, Decode) for lever in levers) else memory.decoder(self.family)
        value_bytes = memory.BYTES_PER_VALUE[case.dtype]  # the VAE too is in the published dtype here
        return replace(case, working={**case.working, "decode": memory.decode_bytes(case, how, value_bytes)})

    def stages(self, levers: tuple[Lever, ...]) -> dict[str, Any]:
        """Estimate, measured, ratio, of denoising and of decoding; everything resident, as the estimate has it."""
        expected = memory.peaks(self.case(levers))
        with self.under(levers):
            measured = {"denoise": self._measured("denoise", self.denoise)}
            measured["decode"] = self._measured("decode", self.decode)
        return {stage: _row(expected[stage], peak) for stage, peak in measured.items()}

    @contextmanager
    def under(self, levers: tuple[Lever, ...]) -> Iterator[Rig]:
        rig = Rig(self.pipe, self.family, self.device)
        with ExitStack() as stack:
            stack.enter_context(rig.seams())
            for lever in levers:
                stack.enter_context(lever.engage(rig))
            self.rig = rig
            yield rig

    def denoise(self, steps: int = 2) -> float:
        """Seconds of a loop of so many steps that ends in latents."""
        inputs = self.subject.inputs(self.pipe, self.device, steps, self.rehearse)
        begun = time.perf_counter()
        with self.rig.call(), torch.no_grad():
            self.pipe(**inputs)
        self._wait()
        return time.perf_counter() - begun

    def decode(self) -> float:
        """Seconds of one decode of noise, up to frames in 0..1."""
        config, subject = self.pipe.vae.config, self.subject
        channels = config.latent_channels if "latent_channels" in config else config.z_dim
        size = families.latent_shape(self.family, subject.width, subject.height, subject.num_frames)
        z = torch.randn(1, channels, *((3, 3, 5) if self.rehearse else size), device=self.device)
        begun = time.perf_counter()
        with torch.no_grad():
            film = self.pipe.vae.decode(z.to(self.pipe.vae.dtype), return_dict=False)[0]
            self.pipe.video_processor.postprocess_video(film, output_type="pt")
        self._wait()
        return time.perf_counter() - begun

    def _measured(self, what: str, call: Callable[[], float]) -> int:
        self._reset()
        seconds = call()
        peak = self._peak()
        self.tell(what=what, peak_bytes=peak, seconds=seconds, levers=list(map(str, self.rig.engaged)))
        return peak

    def capped(self, levers: tuple[Lever, ...]) -> dict[str, Any]:
        """Seconds a step and of a decode: resident without a cap, then by groups inside 22 GiB; there also whole and
        compiled, or resident in float8, for models that can be had so."""
        story: dict[str, Any] = {}
        with self.under((*levers, Decode())):
            story["resident"] = self._timed()
        compiled = Compile(backend="eager") if self.rehearse else Compile()
        if self.name in WHOLE:
            with self.under((Decode(), *levers, compiled)):
                story["resident, compiled"] = self._timed()
        self._home()
        if self.name in WHOLE:
            with self._cap(), self.under((Decode(), Offload(mode="model"), *levers, compiled)):
                story["whole, compiled, 22 GiB"] = kept(self._timed)
            self._home()
        with self._cap(), self.under((Decode(), Offload(mode="group"), *levers)):
            story["group, 22 GiB"] = kept(self._timed)
        self._home()
        if self.name in FLOAT8:
            story["float8, resident, 22 GiB"] = kept(lambda: self._float8((*levers, compiled)))
        resident = story["resident"]
        for found in story.values():
            if "failed" not in found:
                found["over_resident"] = {
                    stage: round(found[stage] / resident[stage], 4) for stage in ("step_s", "decode_s")
                }
        return story

    def _float8(self, levers: tuple[Lever, ...]) -> dict[str, Any]:
        """For the memory alone: whether its film may be shown is a matter of the ledger. Compiled: eagerly, an input
        that is quantised lies there four times over in float32."""
        with self._cap():
            for name, part in self.pipe.components.items():
                if isinstance(part, torch.nn.Module):
                    if name == "transformer":
                        convert(part, name, FORMATS["transformer", "fp8"], device=self.device, narrow=self.rehearse)
                    part.to(self.device)
            with self.under((Decode(), *levers)):
                return self._timed()

    def _timed(self) -> dict[str, Any]:
        """A loop of one step, then one of two that is timed, and two decodes; peaks of both stages."""
        self.denoise(1)
        self._reset()
        steps = 2
        step_s, denoise_peak = self.denoise(steps) / steps, self._peak()
        self.decode()
        self._reset()
        decode_s, decode_peak = self.decode(), self._peak()
        found = {
            "step_s": step_s,
            "decode_s": decode_s,
            "denoise_gib": denoise_peak / GIB,
            "decode_gib": decode_peak / GIB,
        }
        self.tell(**found)
        return {name: round(value, 4) for name, value in found.items()}

    def _home(self) -> None:
        """All weights on the host."""
        for part in self.pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.to("cpu")
        self._reset()

    @contextmanager
    def _cap(self) -> Iterator[None]:
        if self.device == "cpu":
            yield
            return
        self._reset()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def tell(self, **what: Any) -> None:
        with self.journal.open("a") as file:
            file.write(json.dumps({"model": self.name, **what}) + "\n")

    def _reset(self) -> None:
        gc.collect()
        if self.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _peak(self) -> int:
        return 0 if self.device == "cpu" else torch.cuda.max_memory_allocated()

    def text(self) -> dict[str, Any]:
        """The text encoder alone: its weights and one prompt, against the formula for the same."""
        build, tokens = ENCODERS[self.name]
        self.pipe = self.rig = None
        self._reset()
        torch.set_default_dtype(self.subject.dtype)
        try:
            with torch.device(self.device):
                encoder = build().eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
        self._reset()
        with torch.no_grad():
            encoder(torch.ones(1, tokens, dtype=torch.long, device=self.device))
        self._wait()
        peak = self._peak()
        case = self.case()
        weights = {"text_encoder": self.family.text_encoder_params * memory.BYTES_PER_VALUE[case.dtype]}
        found = _row(memory.peaks(memory.dense(replace(case, weights=weights)))["text"], peak)
        self.tell(what="text", **found)
        return found


def _row(estimate: int, measured: int) -> dict[str, Any]:
    ratio = round(estimate / measured, 4) if measured else None
    return {"estimate_gib": round(estimate / GIB, 3), "measured_gib": round(measured / GIB, 3), "ratio": ratio}


def _rows(rehearse: bool, device: str, journal: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name of a row and what it does; one model at a time lies on the device."""

    def bench(name: str, **size: int) -> Bench:
        return Bench(name, device, rehearse, journal, size)

    for name, levers in STAGED.items():
        for size in SIZES.get(name, ({},)):
            title = " ".join(["stages:", name, *map(str, size.values())])
            yield title, lambda name=name, size=size, levers=levers: _staged(bench(name, **size), levers)
    for name, levers in CAPPED.items():
        yield f"capped: {name}", lambda name=name, levers=levers: bench(name).capped(levers)


def _staged(bench: Bench, levers: tuple[Lever, ...]) -> dict[str, Any]:
    story: dict[str, Any] = {"stock": kept(lambda: bench.stages(()))}
    if levers:
        story[", ".join(lever.name for lever in levers)] = kept(lambda: bench.stages(levers))
    if bench.name in ENCODERS and not bench.rehearse:
        story["text"] = kept(bench.text)
    return story


def main() -> None:
    options = options_of(__doc__).parse_args()
    story, device = Story(options.out / "memory.json", options.seconds), "cpu" if options.rehearse else "cuda"
    if options.rehearse:
        formats.LEAST_FEATURES = {False: 16, True: 16}  # type: ignore[assignment] # tiny models have no wide layers
        formats.ALIGNMENT = 8
    for name, work in _rows(options.rehearse, device, options.out / "calls.jsonl"):
        if options.rows and not any(name.startswith(start) for start in options.rows):
            continue
        if story.has_time_for(name):
            story.tell(name, work)
            free()


if __name__ == "__main__":
    main()
