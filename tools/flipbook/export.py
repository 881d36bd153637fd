"""Put the trained parts together as a folder that ``DiffusionPipeline.from_pretrained`` loads.

    python export.py --parts build/flipbook --to src/undercrank/flipbook

Files that a person writes (README.md, LICENSE) stay where they are; everything else in the folder is made here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import WanPipeline

import models
import world
from train_dit import load_tokenizer

GENERATION_DEFAULTS = {
    "height": world.SIDE, "width": world.SIDE, "num_frames": world.FRAMES, "fps": world.FRAMES_PER_SECOND,
    "num_inference_steps": 25, "guidance_scale": 5.0, "max_sequence_length": models.TEXT_LENGTH, "negative_prompt": "",
}  # fmt: skip


def assemble(parts: Path, sizes: models.Sizes) -> WanPipeline:
    vae = models.load_weights(models.build_vae(sizes), parts / "vae.safetensors")
    statistics = json.loads((parts / "latents.json").read_text())
    vae.register_to_config(latents_mean=statistics["mean"], latents_std=statistics["std"])
    return WanPipeline(
        tokenizer=load_tokenizer(parts),
        text_encoder=models.load_weights(models.build_text_encoder(sizes), parts / "text_encoder.safetensors"),
        transformer=models.load_weights(models.build_transformer(sizes), parts / "transformer.safetensors"),
        vae=vae,
        scheduler=models.build_scheduler(),
    )


def export(pipeline: WanPipeline, folder: Path) -> None:
    pipeline.to(torch.float16).save_pretrained(folder)
    # transformers 5 writes a class name that only transformers 5 knows.
    rewrite(folder / "model_index.json", tokenizer=["transformers", "PreTrainedTokenizerFast"])
    rewrite(folder / "tokenizer" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    # Stored in half precision, loaded in full unless asked otherwise, like the other parts.
    rewrite(folder / "text_encoder" / "config.json", dtype="float32")
    (folder / "generation_defaults.json").write_text(json.dumps(GENERATION_DEFAULTS, indent=2) + "\n")


def rewrite(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="parts trained with --small")
    args = parser.parse_args()
    export(assemble(args.parts, models.SMALL if args.small else models.Sizes()), args.to)
    weights = sum(path.stat().st_size for path in args.to.rglob("*.safetensors"))
    print(f"{args.to}: {weights / 1e6:.2f} MB of weights")


if __name__ == "__main__":
    main()
