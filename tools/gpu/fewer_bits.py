"""What weights of fewer bits buy on full-size models with random weights: each companion alone, and all together.

    python tools/gpu/fewer_bits.py --out FOLDER --seconds 250         # on a CUDA machine, in one call of 300 s
    python tools/gpu/fewer_bits.py --out FOLDER --rehearse            # tiny, on the CPU: does the script itself work?
    python tools/gpu/fewer_bits.py --out FOLDER --rows wan            # only rows whose names begin so
    python tools/gpu/fewer_bits.py --out FOLDER --rows decode         # decoding in pieces; not among the rows otherwise

Rows come in the order of their worth. Each compares settings with `faithful` (text_trim, host_sync, compile=parity):
every setting once untimed, which compiles it cold, into an empty folder; then all in order and again in the opposite
order. The peak of a setting is given without the weights that only other settings need. Random weights: times, bytes,
relative errors, and no film. Writes fewer_bits.json after every row, and calls.jsonl after every call.
"""

from __future__ import annotations

import contextlib
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from full_size import SUBJECTS, Subject
from keeping import Story, free, kept, options_of
from torch._inductor.utils import fresh_cache

import undercrank
from undercrank.levers import formats, knobs
from undercrank.levers.formats import FORMATS, converted
from undercrank.undo import swap_attr

OFF = dict.fromkeys(knobs(), "off")
FAITHFUL = {"host_sync": "on", "compile": "parity", "decode": "stream"}
STEPS = 2
"Timed forwards of a call; guidance is off, so that each is one step."
TOKENS = "tokens"
"In a setting: how they lie. The patches' convolution leaves them by columns, and every block keeps them so."
AGAIN = "dense again"
EVERYTHING = "transformer=fp8 text_encoder=fp8 vae=fp8"
Rows = Iterator[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A subject, its text encoder, and what is on besides."""

    subject: str
    encoder: str
    more: dict[str, str] = field(default_factory=dict)


MODELS = {
    "hunyuan 720p": Model(
        subject="hunyuanvideo-1.5-720p", encoder="qwen2.5-vl-7b text", more={"text_trim": "on"}
    ),
    "wan 14b": Model(subject="wan2.1-14b", encoder="umt5-xxl"),
}  # fmt: skip


class Bench:
    """One model with dense parts and parts of fewer bits side by side; its calls, and what each of them showed."""

    journal: ClassVar[Path]
    "Every call goes here as it ends."

    def __init__(self, name: str, device: str, rehearse: bool) -> None:
        self.name, self.device, self.rehearse, self.model = name, device, rehearse, MODELS[name]
        self.subject: Subject = SUBJECTS[self.model.subject]
        self.pipe = self.subject.pipeline(device, rehearse)
        self.levers = OFF | ({} if rehearse else FAITHFUL) | self.model.more
        encoder, self.ids = _encoder(self.model.encoder, device, rehearse)
        self.parts: dict[tuple[str, str], Any] = {
            ("transformer", "dense"): self.pipe.transformer, ("vae", "dense"): self.pipe.vae,
            ("text_encoder", "dense"): encoder,
        }  # fmt: skip
        self.forwards: dict[str, torch.Tensor] = {}
        "By setting: the first forward of its first call, in float32 on the host."
        self.compile: dict[str, dict[str, Any]] = {}
        "By setting: seconds and graphs of its first call."

    # ----------------------------------------------------------------------- parts

    def part(self, role: str, word: str) -> Any:
        """The component in this format, made from the dense one when it is first asked for."""
        if (role, word) not in self.parts:
            other = copy.deepcopy(self.parts[role, "dense"])
            if word != AGAIN:
                formats.convert(other, role, FORMATS[role, word], device=self.device)
            self.parts[role, word] = other
        return self.parts[role, word]

    def drop(self, *words: tuple[str, str]) -> None:
        for each in words:
            self.parts.pop(each, None)
        free()

    def bytes(self, setting: dict[str, str], *, of: tuple[str, ...]) -> int:
        return sum(_weights(self.part(role, setting.get(role, "dense"))) for role in of)

    # ----------------------------------------------------------------------- calls

    def compare(
        self,
        settings: dict[str, dict[str, str]],
        work: Callable[[str], dict[str, Any]],
        of: tuple[str, ...],
        *,
        is_warm: bool = False,
    ) -> dict[str, Any]:
        """Settings (role -> word) against the first: times there and back, ratios, peak of each alone."""
        for setting in settings.values():
            for role, word in setting.items():
                if role != TOKENS:
                    self.part(role, word)
        first = {} if is_warm else {name: kept(lambda name=name: work(name)) for name in settings}
        failed = {name: run for name, run in first.items() if "failed" in run}
        names = [name for name in settings if name not in failed]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for name in (*names, *reversed(names)):
            runs[name].append(work(name))
        ms = {name: [each for run in found for each in run["ms"]] for name, found in runs.items()}
        return failed | {
            name: {
                "ms": [round(each, 2) for each in ms[name]],
                "median_ms": round(statistics.median(ms[name]), 2),
                "gain": [
                    round(statistics.median(a["ms"]) / statistics.median(b["ms"]), 4)
                    for a, b in zip(runs[names[0]], runs[name], strict=True)
                ],
                "weights_gb": round(self.bytes(settings[name], of=of) / 1e9, 2),
                "peak_gb": self._peak_gb(runs[name], settings[name], of),
            }
            for name in names
        }

    def _peak_gb(self, runs: list[dict[str, Any]], setting: dict[str, str], of: tuple[str, ...]) -> float:
        """Largest of the runs, with the weights of this setting and of no other."""
        above = max(run["peak_bytes"] - run["held_bytes"] for run in runs)
        return round((above + self.bytes(setting, of=of)) / 1e9, 2)

    def call(self, name: str, setting: dict[str, str], steps: int = STEPS, **more: Any) -> dict[str, Any]:
        """One call of the pipeline. The first one of a setting compiles it, in one step, and keeps its forward."""
        is_first = name not in self.forwards
        with contextlib.ExitStack() as stack:
            for role in ("transformer", "vae"):
                stack.enter_context(_given(self.pipe, role, self.part(role, setting.get(role, "dense"))))
            if setting.get(TOKENS) == "rows":
                stack.enter_context(_tokens_by_rows(self.pipe.transformer))
            # Only now: the inputs come in the type of the denoiser that is called.
            inputs = self.subject.inputs(self.pipe, self.device, 1 if is_first else steps, self.rehearse) | more
            seen = stack.enter_context(_first_forward(self.pipe.transformer)) if is_first else []
            if is_first:
                stack.enter_context(fresh_cache(delete=False))
            run = stack.enter_context(undercrank.accelerate(self.pipe, **self.levers))
            stack.enter_context(torch.no_grad())
            held = self._reset_peak()
            begun = time.perf_counter()
            self.pipe(**inputs)
            wall_s = time.perf_counter() - begun
        assert run.trace is not None
        found = {
            "ms": run.trace.step_ms,
            "wall_s": round(wall_s, 3),
            "held_bytes": held,
            "peak_bytes": run.trace.peak_bytes or 0,
            "complaints": [c for receipt in run.receipts for c in receipt.complaints],
        }
        if is_first:
            self.forwards[name] = seen[0]
            self.compile[name] = {key: run.rig.counters.get(f"compile.{key}", 0) for key in ("ms", "graphs")}
        self._tell({"setting": name, "first": is_first, **found, "counters": dict(run.rig.counters)})
        return found

    def timed(self, title: str, work: Callable[[], Any]) -> dict[str, Any]:
        """One piece of work that is no call of the pipeline."""
        held = self._reset_peak()
        begun = time.perf_counter()
        work()
        if self.device == "cuda":
            torch.cuda.synchronize()
        ms = (time.perf_counter() - begun) * 1000
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        found = {"ms": [ms], "held_bytes": held, "peak_bytes": peak}
        self._tell({"setting": title, **found})
        return found

    def _reset_peak(self) -> int:
        if self.device != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _tell(self, told: dict[str, Any]) -> None:
        with self.journal.open("a") as file:
            file.write(json.dumps({"model": self.name, **told}) + "\n")

    # ----------------------------------------------------------------------- rows

    def denoisers(self, *words: str) -> dict[str, Any]:
        """Forwards of the denoiser in these formats against the dense one, and how far the first one is from its."""
        settings: dict[str, dict[str, str]] = {f"transformer={word}": {"transformer": word} for word in words}
        return self._denoisers({"faithful": {}} | settings)

    def layouts(self) -> dict[str, Any]:
        """The same with the tokens laid by rows before the first block; in copies, whose code is compiled for it."""
        words = {"tokens by rows": AGAIN, "transformer=fp8, tokens by rows": "fp8"}
        self.drop(*(("transformer", word) for word in words.values()))
        return self._denoisers(
            {"faithful": {}} | {name: {TOKENS: "rows", "transformer": word} for name, word in words.items()}
        )

    def _denoisers(self, settings: dict[str, dict[str, str]]) -> dict[str, Any]:
        found = self.compare(settings, lambda name: self.call(name, settings[name]), ("transformer",))
        for name in settings:
            if name in found and "failed" not in found[name]:
                found[name] |= {
                    "one_forward": _relative(self.forwards[name], self.forwards["faithful"]),
                    "finite": bool(torch.isfinite(self.forwards[name]).all()),
                    "compile_s": round(self.compile[name]["ms"] / 1000, 1),
                    "graphs": self.compile[name]["graphs"],
                    "layers": len(converted(self.part("transformer", settings[name].get("transformer", "dense")))),
                }
        return found

    def floor(self) -> dict[str, Any]:
        """Of one forward: faithful, and every setting seen so far, against the dense model in float32, eager."""
        setting = {"transformer": "dense"}
        if "faithful" not in self.forwards:
            self.call("faithful", {})
        wide = copy.deepcopy(self.pipe.transformer).float()
        try:
            with (
                swap_attr(self, "levers", self.levers | {"compile": "off"}),
                swap_attr(self, "parts", dict(self.parts)),
            ):
                self.parts["transformer", "dense"] = wide
                self.call("float32", setting)
        finally:
            del wide
            free()
        return {name: _relative(seen, self.forwards["float32"]) for name, seen in self.forwards.items()}

    def decodings(self) -> dict[str, Any]:
        latents = _latents(self.subject, self.pipe, self.device, self.rehearse)
        settings: dict[str, dict[str, str]] = {"faithful": {}, "vae=fp8": {"vae": "fp8"}}
        frames: dict[str, torch.Tensor] = {}

        def work(name: str) -> dict[str, Any]:
            vae = self.part("vae", settings[name].get("vae", "dense"))
            with torch.no_grad():
                return self.timed(
                    f"decode, {name}", lambda: frames.update({name: vae.decode(latents.to(vae.dtype))[0]})
                )

        found = self.compare(settings, work, ("vae",))
        if "vae=fp8" in frames:
            found["vae=fp8"]["relative_error"] = _relative(frames["vae=fp8"].float(), frames["faithful"].float())
        return found

    def encodings(self) -> dict[str, Any]:
        words = ("fp8", "fp8_dynamic", "int8")
        settings = {"faithful": {}} | {f"text_encoder={word}": {"text_encoder": word} for word in words}
        states: dict[str, torch.Tensor] = {}

        def work(name: str) -> dict[str, Any]:
            encoder = self.part("text_encoder", settings[name].get("text_encoder", "dense"))
            with torch.no_grad():
                return self.timed(
                    f"encode, {name}", lambda: states.update({name: encoder(self.ids).last_hidden_state.float().cpu()})
                )

        found = self.compare(settings, work, ("text_encoder",))
        for name in (name for name in states if "failed" not in found[name]):
            cosine = torch.nn.functional.cosine_similarity(states["faithful"][0], states[name][0], dim=-1)
            found[name] |= {
                "relative_error": _relative(states[name], states["faithful"]),
                "least_cosine_of_a_token": float(cosine.min()),
            }
        self.drop(("text_encoder", "fp8_dynamic"), ("text_encoder", "int8"))
        return found

    def together(self) -> dict[str, Any]:
        """Whole calls with the encoding of a prompt before and the decoding after, all parts held: seconds, peak."""
        roles = ("transformer", "text_encoder", "vae")
        settings: dict[str, dict[str, str]] = {"faithful": {}, EVERYTHING: dict.fromkeys(roles, "fp8")}

        def work(name: str) -> dict[str, Any]:
            setting = settings[name]
            denoiser = f"transformer={setting['transformer']}" if "transformer" in setting else "faithful"
            with torch.no_grad():
                begun = time.perf_counter()
                self.part("text_encoder", setting.get("text_encoder", "dense"))(self.ids).last_hidden_state.cpu()
                encode_s = time.perf_counter() - begun
            run = self.call(denoiser, setting, output_type="pt")
            return run | {"ms": [(encode_s + run["wall_s"]) * 1000]}

        is_warm = {"faithful", "transformer=fp8"} <= set(self.forwards)
        return self.compare(settings, work, roles, is_warm=is_warm)


@contextlib.contextmanager
def _given(pipe: Any, name: str, part: Any) -> Iterator[None]:
    """The pipeline with another component, in its list of components too."""
    stock = getattr(pipe, name)
    pipe.register_modules(**{name: part})
    try:
        yield
    finally:
        pipe.register_modules(**{name: stock})


@contextlib.contextmanager
def _tokens_by_rows(denoiser: Any) -> Iterator[None]:
    """Channels last out of the first convolution: flattened and turned, each token is a row."""
    patches = next(module for module in denoiser.modules() if isinstance(module, torch.nn.Conv3d))
    stock = patches.forward
    with swap_attr(patches, "forward", lambda x: stock(x).contiguous(memory_format=torch.channels_last_3d)):
        yield


@contextlib.contextmanager
def _first_forward(denoiser: Any) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        if not seen:
            seen.append((output[0] if isinstance(output, tuple) else output.sample).detach().float().cpu())

    hook = denoiser.register_forward_hook(keep)
    try:
        yield seen
    finally:
        hook.remove()


# --------------------------------------------------------------------------- text encoders


ENCODERS: dict[str, Callable[[bool], tuple[Any, int, int]]] = {
    "umt5-xxl": lambda tiny: (
        transformers.UMT5EncoderModel(
            transformers.UMT5Config(
                vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
                feed_forward_proj="gated-gelu",
            )
            if not tiny
            else transformers.UMT5Config(
                vocab_size=99, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
            )
        ),
        512,
        256384 if not tiny else 99,
    ),
    "qwen2.5-vl-7b text": lambda tiny: (
        transformers.Qwen2Model(
            transformers.Qwen2Config(
                vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                num_attention_heads=28, num_key_value_heads=4,
            )
            if not tiny
            else transformers.Qwen2Config(
                vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1,
            )
        ),
        1108,
        152064 if not tiny else 99,
    ),
}  # fmt: skip
"Text encoders by their published sizes: Wan's, and the language part of HunyuanVideo-1.5's; tokens, vocabulary."


def _encoder(name: str, device: str, rehearse: bool) -> tuple[Any, torch.Tensor]:
    """The encoder with random weights, and the tokens of a prompt, 1 L."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            encoder, tokens, vocabulary = ENCODERS[name](rehearse)
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    return encoder.eval().requires_grad_(False), ids


# --------------------------------------------------------------------------- products and compiling


def narrow_products(device: str) -> dict[str, Any]:
    """Which numbers of rows a product of float8 with row-wise scales takes on this device, unpadded; and its speed."""
    from undercrank.levers.fewbits import by_row

    weight, scale = by_row(torch.randn(512, 512, device=device), torch.float8_e4m3fn)
    taken = {}
    for count in (1, 7, 8, 12, 16, 24, 32, 56, 60, 64, 32760, 32460):
        rows, row_scale = by_row(torch.randn(count, 512, device=device), torch.float8_e4m3fn)
        try:
            torch._scaled_mm(rows, weight.t(), scale_a=row_scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
            taken[str(count)] = "taken"
        except RuntimeError as error:
            taken[str(count)] = str(error).splitlines()[0][:200]
    return {"rows": taken, "products": {str(shape): _product(*shape, device) for shape in _shapes(device)}}


def _shapes(device: str) -> list[tuple[int, int, int]]:
    """(rows, inputs, outputs) of Wan 2.1 14B at 480p and 81 frames."""
    return [(64, 64, 64)] if device == "cpu" else [(32760, 5120, 5120), (32760, 5120, 13824), (32760, 13824, 5120)]


def _product(rows: int, inputs: int, outputs: int, device: str) -> dict[str, Any]:
    """Milliseconds of one product in bfloat16, in float8 with both ways to sum, and of quantising the input."""
    from undercrank.levers.fewbits import by_row

    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    (a, scale_a), (b, scale_b) = by_row(x, torch.float8_e4m3fn), by_row(weight, torch.float8_e4m3fn)

    def narrow(fast: bool) -> torch.Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    stock_ms, stock = _timed(lambda: x @ weight.t(), device, 10)
    found = {"bfloat16": stock_ms}
    for title, work in {
        "float8 fast sums": lambda: narrow(True),
        "float8 long sums": lambda: narrow(False),
    }.items():
        story, result = _timed(work, device, 10)
        found[title] = story | {"relative_error": _relative(result.float(), stock.float())}
    found["quantising the input, eager"], _ = _timed(lambda: by_row(x, torch.float8_e4m3fn)[0], device, 10)
    return found


def compiling(device: str, rehearse: bool) -> dict[str, Any]:
    """Four blocks, cold, there and back."""
    from compile_time import ratios

    return ratios(device, ["fp8"], **({"backend": "eager"} if rehearse else {}))


# --------------------------------------------------------------------------- decoding in pieces


def decodes(subject: Subject, device: str, rehearse: bool) -> dict[str, Any]:
    """As shipped; diffusers' tiles; chunks of latent frames with context before them; each beside the first."""
    pipe = subject.pipeline(device, rehearse)
    vae, latents = pipe.vae, _latents(subject, pipe, device, rehearse)
    pipe.transformer = None
    free()
    story, stock = _timed(lambda: _decoded(vae, latents), device, 2)
    found = {"as shipped": story}
    stride = vae.config.spatial_compression_ratio
    sizes, overlaps = ((256,), (0.25,)) if rehearse else ((256, 384, 512, 768), (0.25, 0.125))
    for size in sizes:
        for overlap in overlaps:
            vae.enable_tiling(size, size, size // stride, size // stride, overlap)
            found[f"tiles of {size}, overlap {overlap}"] = kept(lambda: _beside(vae, latents, stock, device))
            vae.disable_tiling()
    lengths, contexts = ((2,), (0, 2)) if rehearse else ((1, 2, 4), (0, 1, 2, 4))
    for frames in lengths:
        for context in contexts:
            work = partial(_in_chunks, vae, latents, frames, context)
            found[f"chunks of {frames} after {context}"] = kept(lambda work=work: _against(work, stock, device))
    vae.enable_tiling(512, 512, 512 // stride, 512 // stride, 0.125)
    work = partial(_in_chunks, vae, latents, 2, 2)
    found["tiles of 512, chunks of 2 after 2"] = kept(lambda: _against(work, stock, device))
    vae.disable_tiling()
    for layer in vae.modules():
        if isinstance(layer, torch.nn.Conv3d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last_3d)
    found["channels last"] = kept(lambda: _beside(vae, latents, stock, device))
    return found


def _in_chunks(vae: Any, latents_BCTHW: torch.Tensor, frames: int, context: int) -> torch.Tensor:
    """The decoder looks back only: a chunk is decoded with `context` latent frames before it, and what they make is
    dropped. The first latent frame makes one frame, each further one `stride`."""
    stride = vae.config.temporal_compression_ratio
    pieces = []
    for start in range(0, latents_BCTHW.shape[2], frames):
        first = max(0, start - context)
        piece = _decoded(vae, latents_BCTHW[:, :, first : start + frames])
        before = start - first
        if start == 0:
            pieces.append(piece)
        elif before == 0:
            # Nothing before it: its first latent frame makes one frame, shown for all that it stands for.
            pieces.append(torch.cat([piece[:, :, :1].repeat_interleave(stride, dim=2), piece[:, :, 1:]], dim=2))
        else:
            pieces.append(piece[:, :, 1 + stride * (before - 1) :])
    return torch.cat(pieces, dim=2)


def _beside(vae: Any, latents: torch.Tensor, stock: torch.Tensor, device: str) -> dict[str, Any]:
    return _against(lambda: _decoded(vae, latents), stock, device)


def _against(work: Callable[[], torch.Tensor], stock: torch.Tensor, device: str) -> dict[str, Any]:
    story, frames = _timed(work, device, 2)
    difference = (frames - stock).abs()
    return story | {"max_abs_difference": float(difference.max()), "mean_abs_difference": float(difference.mean())}


def _decoded(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Frames B C T H W in -1..1 on the host."""
    return vae.decode(latents.to(vae.dtype), return_dict=False)[0].float().cpu()


def _latents(subject: Subject, pipe: Any, device: str, rehearse: bool) -> torch.Tensor:
    if rehearse:
        channels = pipe.vae.config.latent_channels if "latent_channels" in pipe.vae.config else pipe.vae.config.z_dim
        return torch.randn(1, channels, 5, 4, 4, device=device)
    return subject._noise_of(pipe).to(device)


# --------------------------------------------------------------------------- the rows


def _rows(device: str, rehearse: bool) -> Rows:
    """In the order of their worth, with the seconds that each should take on one H200."""
    benches: dict[str, Bench] = {}

    def bench(name: str) -> Bench:
        if name not in benches:
            benches[name] = Bench(name, device, rehearse)
        return benches[name]

    yield "products", lambda: narrow_products(device)  # 5
    for name in MODELS:
        yield f"{name}: transformer=fp8", lambda name=name: bench(name).denoisers("fp8")  # 55; 70
        yield f"{name}: text encoder", lambda name=name: bench(name).encodings()  # 8; 8
        yield f"{name}: vae=fp8", lambda name=name: bench(name).decodings()  # 20; 12
        yield f"{name}: together", lambda name=name: bench(name).together()  # 22; 29
        if name in benches:  # what only they needed
            benches[name].drop(*((role, "fp8") for role in ("transformer", "text_encoder", "vae")))
            benches[name].drop(("text_encoder", "dense"))
    for name in MODELS:
        yield f"{name}: transformer=fp8_ffn, int8", lambda name=name: bench(name).denoisers("fp8_ffn", "int8")  # 50; 60
        if name in benches:
            benches[name].drop(*(("transformer", word) for word in ("fp8_ffn", "int8")))
    for name in MODELS:
        yield f"{name}: layouts", lambda name=name: bench(name).layouts()  # 50; 60
        if name in benches:
            benches[name].drop(*(("transformer", word) for word in (AGAIN, "fp8")))
    for name in reversed(MODELS):
        yield f"{name}: floor of one forward", lambda name=name: bench(name).floor()  # 45; 25
    yield "compile", lambda: compiling(device, rehearse)  # 90
    decoded = SUBJECTS["hunyuanvideo-1.5-720p"]
    yield "decode", partial(decodes, decoded, device, rehearse)  # 120


NAMED_ONLY = "decode"
"Begun only where --rows names it."


def main() -> None:
    options = options_of(__doc__).parse_args()
    story, device = Story(options.out / "fewer_bits.json", options.seconds), "cpu" if options.rehearse else "cuda"
    Bench.journal = options.out / "calls.jsonl"
    if options.rehearse:
        formats.LEAST_FEATURES = {False: 16, True: 16}  # type: ignore[assignment] # tiny models have no wide layers
        formats.ALIGNMENT = 8
    else:
        _warm_up(device)
    for name, work in _rows(device, options.rehearse):
        if not any(name.startswith(start) for start in options.rows) if options.rows else name == NAMED_ONLY:
            continue
        if story.has_time_for(name):
            story.tell(name, work)
            free()


def _warm_up(device: str) -> None:
    """The first compile of a process also imports the compiler and starts its workers."""
    torch.compile(lambda x: torch.nn.functional.layer_norm(x, (64,)).sin())(torch.randn(64, 64, device=device))


# --------------------------------------------------------------------------- how


def _timed(work: Callable[[], torch.Tensor], device: str, runs: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Once untimed, then `runs` times: median ms, half of their range, peak GB."""
    cuda = device.startswith("cuda")
    times = []
    with torch.no_grad():
        result = work()
        for _ in range(runs):
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1000)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    story = {"ms": round(statistics.median(times), 2), "half_range_ms": round((max(times) - min(times)) / 2, 2)}
    return story | {"n": runs, "peak_gb": round(peak / 1e9, 2)}, result


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _weights(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


if __name__ == "__main__":
    main()
