"""The first clip on a GPU: flipbook and a full-size HunyuanVideo-1.5 with random weights through the same Engine.

    python tools/gpu/first_clip.py --out FOLDER           # on a CUDA machine
    python tools/gpu/first_clip.py --out FOLDER --rehearse # tiny, on the CPU, to see that the script itself works

Writes first_clip.json: machine, versions, and one row per run with its stalls by line, step times, peak bytes and
frames hash. Random weights say nothing about the film: only times, stalls and equality are read from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from keeping import kept

import undercrank
from undercrank.engine import Clip, Engine
from undercrank.machine import this_machine
from undercrank.records import Request
from undercrank.testing import tiny_inputs, tiny_pipeline


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if options.rehearse else "cuda"
    rows = {
        "machine": lambda: this_machine().to_dict(),
        "flipbook": lambda: flipbook(options.rehearse, device, options.out),
        **{f"accelerate {name}": _accelerated(name, device) for name in ("cogvideox-2b", "wan2.1-1.3b")},
        "hunyuanvideo-1.5-480p": lambda: hunyuan(options.rehearse, device),
    }
    story: dict[str, Any] = {}
    for name, work in rows.items():
        story[name] = kept(work)
        print(name, json.dumps(story[name])[:3000], flush=True)
        (options.out / "first_clip.json").write_text(json.dumps(story, indent=1))


def flipbook(rehearse: bool, device: str, out: Path) -> dict[str, Any]:
    """Five clips: host_sync on twice and off twice, the same seed; the frames must be the same four times."""
    asked = Request(prompt="a red ring moves left on a navy background", seed=1, device=device)
    if rehearse:
        asked = replace(asked, width=64, height=64, num_frames=5, num_inference_steps=3)
    with Engine() as engine:
        engine.generate(asked)  # warms up: kernels are chosen in the first run
        runs = {}
        for name, wish in (("on 1", "on"), ("off 1", "off"), ("off 2", "off"), ("on 2", "on")):
            runs[name] = engine.generate(replace(asked, wishes=(("host_sync", wish),)))
        runs["on 1"].save(out / "flipbook.mp4")
    hashes = {clip.report.frames_hash for clip in runs.values()}
    return {"same_frames": len(hashes) == 1, **{name: _row(clip) for name, clip in runs.items()}}


def hunyuan(rehearse: bool, device: str) -> dict[str, Any]:
    """Two steps of the 8.3 B model at 480p, 33 frames, through `Engine(pipe=...)`."""
    begun = time.perf_counter()
    pipe = tiny_pipeline("hunyuanvideo-1.5-480p") if rehearse else full_size_hunyuan(device)
    pipe.set_progress_bar_config(disable=True)
    built_s = time.perf_counter() - begun
    asked = Request(prompt="a red ball", model="hunyuanvideo-1.5-480p", seed=1, num_frames=33, num_inference_steps=2)
    if rehearse:
        asked = replace(asked, width=64, height=64, num_frames=5)
    parameters = sum(p.numel() for p in pipe.transformer.parameters())
    with Engine(pipe=pipe) as engine:
        first, second = engine.generate(asked), engine.generate(asked)
    return {
        "transformer_parameters": parameters,
        "built_s": built_s,
        "same_frames": first.report.frames_hash == second.report.frames_hash,
        "first": _row(first),
        "second": _row(second),
    }


def full_size_hunyuan(device: str) -> Any:
    """The published sizes of denoiser and autoencoder (the classes' defaults) and of the Qwen2.5-VL text model.

    Tokenizers are those of `undercrank.testing`, so the vocabulary is smaller; the text length is the published one.
    """
    import diffusers
    import transformers

    from undercrank import testing

    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            text = transformers.Qwen2_5_VLTextConfig(
                hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                num_key_value_heads=4, vocab_size=1000, pad_token_id=0,
                rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
            )  # fmt: skip
            parts = {
                "text_encoder": transformers.Qwen2_5_VLTextModel(text),
                "text_encoder_2": testing._t5(width=1472, vocab=384),
                "transformer": diffusers.HunyuanVideo15Transformer3DModel(task_type="t2v"),
                "vae": diffusers.AutoencoderKLHunyuanVideo15(),
            }
        finally:
            torch.set_default_dtype(torch.float32)
    return diffusers.HunyuanVideo15Pipeline(
        tokenizer=testing._tokenizer("qwen", chat_template=testing._CHAT),
        tokenizer_2=transformers.ByT5Tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        **{name: part.eval().requires_grad_(False) for name, part in parts.items()},
    )


def _accelerated(name: str, device: str) -> Callable[[], dict[str, Any]]:
    """A tiny pipeline on the device, stock and under `accelerate`: latents equal, CUDA's own count of stalls."""

    def work() -> dict[str, Any]:
        pipe = tiny_pipeline(name).to(device)
        pipe.set_progress_bar_config(disable=True)
        inputs = {"steps": 20} | ({"use_dynamic_cfg": True} if "cog" in name else {})
        found: dict[str, Any] = {}
        latents = {}
        for wish in ("off", "on"):
            with undercrank.accelerate(pipe, host_sync=wish) as run, torch.no_grad():
                pipe(**tiny_inputs(pipe, **inputs))  # warms up
                latents[wish] = pipe(**tiny_inputs(pipe, **inputs)).frames
            trace = run.trace
            assert trace is not None
            found[wish] = {"stalls": trace.stalls, "sites": trace.stall_sites, "step_ms": _spread(trace.step_ms)}
        return {"latents_equal": torch.equal(latents["off"], latents["on"]), **found}

    return work


def _row(clip: Clip) -> dict[str, Any]:
    report, trace = clip.report, clip.report.trace
    return {
        "frames_hash": report.frames_hash,
        "shape_FHWC": list(clip.frames_FHWC.shape),
        "levers": [receipt.lever for receipt in report.receipts],
        "complaints": [c for receipt in report.receipts for c in receipt.complaints],
        "stage_s": {k: round(v, 4) for k, v in trace.stage_s.items()},
        "step_ms": _spread(trace.step_ms),
        "stalls": trace.stalls,
        "stall_sites": trace.stall_sites,
        "peak_gib": round((trace.peak_bytes or 0) / 2**30, 3),
        "dtype": report.plan.load.dtype,
    }


def _spread(values: tuple[float, ...]) -> dict[str, float]:
    return {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
