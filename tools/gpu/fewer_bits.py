"""What weights of fewer bits buy on full-size models with random weights, and what decoding in pieces costs.

    python tools/gpu/fewer_bits.py --out FOLDER                       # on a CUDA machine
    python tools/gpu/fewer_bits.py --out FOLDER --rehearse            # tiny, on the CPU: does the script itself work?
    python tools/gpu/fewer_bits.py --out FOLDER --only wan2.1-14b     # only rows whose names hold this

Dense and quantised denoisers are there at the same time and are timed in turn, A B B A; the peak of each is given
without the other one's weights. Random weights: times, bytes, relative errors, and no film. Writes fewer_bits.json
after every row.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from full_size import SUBJECTS, Subject
from keeping import kept

import undercrank
from undercrank.levers import formats, knobs
from undercrank.levers.formats import FORMATS, converted
from undercrank.machine import this_machine

OFF = dict.fromkeys(knobs(), "off")
FAITHFUL = {"host_sync": "on", "compile": "on"}
EAGER = {"host_sync": "on"}
MODELS = {"hunyuanvideo-1.5-720p": {"text_trim": "on"}, "wan2.1-14b": {}}
"Subject, and what is on besides."
STEPS = 4
"Timed steps of a call; the first of them is left out."


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if options.rehearse else "cuda"
    if options.rehearse:
        formats.LEAST_FEATURES = {False: 16, True: 16}  # type: ignore[assignment] # tiny models have no wide layers
        formats.ALIGNMENT = 8
    story: dict[str, Any] = {"machine": this_machine().to_dict(), "torch": torch.__version__}
    for name, work in _rows(device, options.rehearse):
        if options.only and not any(each in name for each in options.only):
            continue
        begun = time.perf_counter()
        story[name] = kept(work) | {"took_s": round(time.perf_counter() - begun, 1)}
        print(name, json.dumps(story[name])[:2000], flush=True)
        (options.out / "fewer_bits.json").write_text(json.dumps(story, indent=1))
        _free()


def _rows(device: str, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "fp8 rows", lambda: narrow_products(device)
    for name, more in MODELS.items():
        for word in ("fp8", "fp8_ffn", "int8"):
            yield f"{name} transformer={word}", partial(denoisers, SUBJECTS[name], word, more, device, rehearse)
        yield f"{name} floor", partial(floor, SUBJECTS[name], more, device, rehearse)
        yield f"{name} transformer=fp8 vae=fp8", partial(together, SUBJECTS[name], more, device, rehearse)
        yield f"{name} vae=fp8", partial(vae_formats, SUBJECTS[name], device, rehearse)
    for name in ENCODERS:
        for word in ("fp8", "fp8_dynamic", "int8"):
            yield f"{name} text_encoder={word}", partial(text_encoders, name, word, device, rehearse)
    yield "hunyuanvideo-1.5-720p decode", partial(decodes, SUBJECTS["hunyuanvideo-1.5-720p"], device, rehearse)


# --------------------------------------------------------------------------- denoisers


def denoisers(subject: Subject, word: str, more: dict[str, str], device: str, rehearse: bool) -> dict[str, Any]:
    """Dense against quantised: ms a step, peak, bytes, compile seconds, error of one forward and of the latents."""
    dense, narrow = subject.pipeline(device, rehearse), subject.pipeline(device, rehearse)
    formats.convert(narrow.transformer, "transformer", FORMATS["transformer", word], device=device)
    sizes = {"dense": _bytes(dense), word: _bytes(narrow)}
    found: dict[str, Any] = {
        "layers": len(converted(narrow.transformer)),
        "weights_gb": {name: round(size / 1e9, 2) for name, size in sizes.items()},
        "relative_error_of_a_forward": _relative(
            _forward(subject, narrow, more, device, rehearse), _forward(subject, dense, more, device, rehearse)
        ),
    }
    for title, levers in {"eager": EAGER | more, "compiled": FAITHFUL | more}.items():
        levers = levers if not rehearse else more
        call = partial(_call, subject, levers=levers, device=device, rehearse=rehearse)
        first = {"dense": call(dense), word: call(narrow)}
        runs = {"dense": [call(dense)], word: [call(narrow), call(narrow)]}
        runs["dense"].append(call(dense))
        step_ms = {name: statistics.median(ms for run in each for ms in run["step_ms"]) for name, each in runs.items()}
        found[title] = {
            "step_ms": {name: round(ms, 1) for name, ms in step_ms.items()},
            "half_range_ms": {
                name: _half_range([ms for run in each for ms in run["step_ms"]]) for name, each in runs.items()
            },
            "gain": round(step_ms["dense"] / step_ms[word], 4),
            "peak_gb_alone": {
                name: round((runs[name][0]["peak_bytes"] - sum(sizes.values()) + sizes[name]) / 1e9, 2) for name in runs
            },
            "compile_s": {name: round(run["compile_ms"] / 1000, 1) for name, run in first.items()},
            "graphs": {name: run["graphs"] for name, run in first.items()},
            "relative_distance_of_latents": _relative(runs[word][0]["latents"], runs["dense"][0]["latents"]),
            "repeats": torch.equal(runs[word][0]["latents"], runs[word][1]["latents"]),
            "finite": bool(torch.isfinite(runs[word][0]["latents"]).all()),
            "complaints": first[word]["complaints"],
        }  # fmt: skip
    return found


def together(subject: Subject, more: dict[str, str], device: str, rehearse: bool) -> dict[str, Any]:
    """Whole calls, decoding included: seconds and peak of each alone. The text comes as embeddings in both."""
    dense, narrow = subject.pipeline(device, rehearse), subject.pipeline(device, rehearse)
    formats.convert(narrow.transformer, "transformer", FORMATS["transformer", "fp8"], device=device)
    formats.convert(narrow.vae, "vae", FORMATS["vae", "fp8"], device=device)
    sizes = {"dense": _bytes(dense), "fp8": _bytes(narrow)}
    pipes, levers = {"dense": dense, "fp8": narrow}, more if rehearse else FAITHFUL | more
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pipes}
    for name in ("dense", "fp8", "dense", "fp8", "fp8", "dense"):  # the first of each compiles, and is left out
        runs[name].append(_call(subject, pipes[name], levers, device, rehearse, output_type="pt"))
    return {
        name: {
            "wall_s": [round(run["wall_s"], 3) for run in each[1:]],
            "peak_gb_alone": round((each[-1]["peak_bytes"] - sum(sizes.values()) + sizes[name]) / 1e9, 2),
            "weights_gb": round(sizes[name] / 1e9, 2),
        }
        for name, each in runs.items()
    }


def floor(subject: Subject, more: dict[str, str], device: str, rehearse: bool) -> dict[str, Any]:
    """How far dense runs are from each other that differ in rounding alone."""
    pipe = subject.pipeline(device, rehearse)
    others = {"compile=on": {"compile": "on"}, "compile=plain": {"compile": "plain"}}
    others |= {"attention_backend=efficient": {"attention_backend": "efficient"}}
    if rehearse:
        others = {"host_sync=on": {"host_sync": "on"}}
    stock = _call(subject, pipe, more, device, rehearse)["latents"]
    forward = _forward(subject, pipe, more, device, rehearse)
    return {
        name: {
            "latents": _relative(_call(subject, pipe, more | levers, device, rehearse)["latents"], stock),
            "forward": _relative(_forward(subject, pipe, more | levers, device, rehearse), forward),
        }
        for name, levers in others.items()
    }


def _call(
    subject: Subject, pipe: Any, levers: dict[str, str], device: str, rehearse: bool, **call: Any
) -> dict[str, Any]:
    inputs = subject.inputs(pipe, device, 3 if rehearse else STEPS + 1, rehearse) | call
    with undercrank.accelerate(pipe, **(OFF | levers)) as run, torch.no_grad():
        begun = time.perf_counter()
        latents = pipe(**inputs).frames.detach().float().cpu()
        wall_s = time.perf_counter() - begun
    assert run.trace is not None
    return {
        "latents": latents,
        "wall_s": wall_s,
        "step_ms": run.trace.step_ms[1:],
        "peak_bytes": run.trace.peak_bytes or 0,
        "compile_ms": run.trace.counters.get("compile.ms", 0),
        "graphs": run.trace.counters.get("compile.graphs", 0),
        "complaints": [text for receipt in run.receipts for text in receipt.complaints],
    }


def _forward(subject: Subject, pipe: Any, levers: dict[str, str], device: str, rehearse: bool) -> torch.Tensor:
    """What the denoiser returns in the first forward of a call."""
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output.sample).float().cpu())

    hook = pipe.transformer.register_forward_hook(keep)
    try:
        _call(subject, pipe, levers, device, rehearse)
    finally:
        hook.remove()
    return seen[0]


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


# --------------------------------------------------------------------------- companions


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


def text_encoders(name: str, word: str, device: str, rehearse: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            dense, tokens, vocabulary = ENCODERS[name](rehearse)
    finally:
        torch.set_default_dtype(torch.float32)
    dense = dense.eval().requires_grad_(False)
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    encode = partial(_timed, lambda: dense(ids).last_hidden_state.float(), device, 5)
    before, stock = encode()
    before["weights_gb"] = round(_weights(dense) / 1e9, 2)
    formats.convert(dense, "text_encoder", FORMATS["text_encoder", word], device=device)
    after, moved = encode()
    after["weights_gb"] = round(_weights(dense) / 1e9, 2)
    cosine = torch.nn.functional.cosine_similarity(stock[0], moved[0], dim=-1)
    return {
        "dense": before, word: after, "layers": len(converted(dense)), "relative_error": _relative(moved, stock),
        "least_cosine_of_a_token": float(cosine.min()), "gain": round(before["ms"] / after["ms"], 3),
    }  # fmt: skip


def vae_formats(subject: Subject, device: str, rehearse: bool) -> dict[str, Any]:
    pipe = subject.pipeline(device, rehearse)
    latents = _latents(subject, pipe, device, rehearse)
    pipe.transformer = None
    _free()
    before, stock = _timed(lambda: _decoded(pipe.vae, latents), device, 2)
    before["weights_gb"] = round(_weights(pipe.vae) / 1e9, 2)
    formats.convert(pipe.vae, "vae", FORMATS["vae", "fp8"], device=device)
    after, moved = _timed(lambda: _decoded(pipe.vae, latents), device, 2)
    after["weights_gb"] = round(_weights(pipe.vae) / 1e9, 2)
    return {"dense": before, "fp8": after, "relative_error": _relative(moved, stock)}


# --------------------------------------------------------------------------- decoding in pieces


def decodes(subject: Subject, device: str, rehearse: bool) -> dict[str, Any]:
    """As shipped; diffusers' tiles; chunks of latent frames with context before them; each beside the first."""
    pipe = subject.pipeline(device, rehearse)
    vae, latents = pipe.vae, _latents(subject, pipe, device, rehearse)
    pipe.transformer = None
    _free()
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
    story = {"ms": round(statistics.median(times), 2), "half_range_ms": _half_range(times), "n": runs}
    return story | {"peak_gb": round(peak / 1e9, 2)}, result


def _half_range(values: list[float]) -> float:
    return round((max(values) - min(values)) / 2, 2)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _bytes(pipe: Any) -> int:
    return sum(_weights(part) for part in pipe.components.values() if isinstance(part, torch.nn.Module))


def _weights(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names hold this")
    return parser.parse_args()


if __name__ == "__main__":
    main()
