"""Published pipelines at full size with random weights, in seconds and with no download.

Random weights say nothing about a film: only times, stalls, bytes, equality and rounding are read from them. Prompts
come as embeddings, so that no text encoder has to be built: a prompt of 60 tokens in the places that the model keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from undercrank import families
from undercrank.testing import tiny_inputs, tiny_pipeline

PROMPT_TOKENS = 60


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One published model: how it is built, what a call of it is given, and the dtype that it is published in."""

    family: str
    build: Callable[[], Any]
    texts: Callable[[], dict[str, Any]]
    width: int
    height: int
    num_frames: int
    dtype: torch.dtype = torch.bfloat16

    def pipeline(self, device: str, rehearse: bool = False) -> Any:
        """The pipeline on the device; `rehearse`: the tiny one of its family, to see that a script works."""
        if rehearse:
            pipe = tiny_pipeline(self.family)
        else:
            torch.manual_seed(0)
            torch.set_default_dtype(self.dtype)
            try:
                with torch.device(device):
                    pipe = self.build()
            finally:
                torch.set_default_dtype(torch.float32)
            pipe.register_to_config(_name_or_path=families.family(self.family).repo)
            for part in pipe.components.values():
                if isinstance(part, torch.nn.Module):
                    _widen(part.eval().requires_grad_(False))
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def inputs(self, pipe: Any, device: str, steps: int, rehearse: bool = False) -> dict[str, Any]:
        """The keyword arguments of one call that returns latents. Guidance is off: one forward a step.

        What is drawn is rounded to the published dtype, then given in the denoiser's: a float32 run of the same
        model starts from the very same numbers.
        """
        if rehearse:
            return tiny_inputs(pipe, steps=steps) | {"output_type": "latent"}
        texts = {
            name: value.to(self.dtype).to(device, pipe.transformer.dtype)
            if value.is_floating_point()
            else value.to(device)
            for name, value in self.texts().items()
        }
        texts["latents"] = self._noise_of(pipe).to(self.dtype).to(device, pipe.transformer.dtype)
        shape = {"width": self.width, "height": self.height, "num_frames": self.num_frames}
        given = {"num_inference_steps": steps, "output_type": "latent"}
        guidance = {} if hasattr(pipe, "guider") else {"guidance_scale": 1.0}
        return texts | shape | given | guidance

    def _noise_of(self, pipe: Any) -> torch.Tensor:
        """In the layout that the pipeline's `latents` argument has."""
        row = families.family(self.family)
        frames, rows, columns = families.latent_shape(row, self.width, self.height, self.num_frames)
        channels = pipe.vae.config.latent_channels if "latent_channels" in pipe.vae.config else pipe.vae.config.z_dim
        if type(pipe).__name__ == "CogVideoXPipeline":
            return _noise(1, frames, channels, rows, columns)
        if type(pipe).__name__ == "LTXPipeline":
            return _noise(1, frames * rows * columns, channels)
        return _noise(1, channels, frames, rows, columns)


def _scheduler(name: str, **settings: Any) -> Any:
    """Its tables in float32 on the host, as a loaded pipeline has them."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return getattr(diffusers, name)(**settings)
    finally:
        torch.set_default_dtype(dtype)


def _widen(module: torch.nn.Module) -> None:
    """What a loader leaves in float32 whatever the dtype asked for."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, weight in module.named_parameters():
        if kept & set(name.split(".")):
            weight.data = weight.data.float()


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(7))


def _mask(places: int, valid: int) -> torch.Tensor:
    return (torch.arange(places) < valid).long()[None]


def _hunyuan15() -> Any:
    return diffusers.HunyuanVideo15Pipeline(
        tokenizer=None,
        tokenizer_2=None,
        text_encoder=None,
        text_encoder_2=None,
        transformer=diffusers.HunyuanVideo15Transformer3DModel(task_type="t2v"),
        vae=diffusers.AutoencoderKLHunyuanVideo15(),
        scheduler=_scheduler("FlowMatchEulerDiscreteScheduler", shift=5.0),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=1.0),
    )


def _hunyuan15_texts() -> dict[str, Any]:
    """Nothing in quotation marks: the second encoder's places are all padding."""
    return {
        "prompt_embeds": _noise(1, 1000, 3584),
        "prompt_embeds_mask": _mask(1000, PROMPT_TOKENS),
        "prompt_embeds_2": _noise(1, 256, 1472),
        "prompt_embeds_mask_2": _mask(256, 0),
    }


def _wan(**sizes: int) -> Any:
    return diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=diffusers.WanTransformer3DModel(**sizes),
        vae=diffusers.AutoencoderKLWan(),
        scheduler=_scheduler(
            "UniPCMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def _wan_texts() -> dict[str, Any]:
    return {"prompt_embeds": _noise(1, 512, 4096), "negative_prompt_embeds": _noise(1, 512, 4096)}


def _cogvideox() -> Any:
    return diffusers.CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=diffusers.CogVideoXTransformer3DModel(),
        vae=diffusers.AutoencoderKLCogVideoX(),
        scheduler=_scheduler(
            "CogVideoXDDIMScheduler",
            snr_shift_scale=3.0,
            rescale_betas_zero_snr=True,
            prediction_type="v_prediction",
            timestep_spacing="trailing",
            set_alpha_to_one=True,
        ),
    )


def _cogvideox_texts() -> dict[str, Any]:
    return {"prompt_embeds": _noise(1, 226, 4096), "negative_prompt_embeds": _noise(1, 226, 4096)}


def _ltx() -> Any:
    return diffusers.LTXPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=diffusers.LTXVideoTransformer3DModel(),
        vae=diffusers.AutoencoderKLLTXVideo(),
        scheduler=_scheduler(
            "FlowMatchEulerDiscreteScheduler",
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
        ),
    )


def _ltx_texts() -> dict[str, Any]:
    return {
        "prompt_embeds": _noise(1, 128, 4096),
        "prompt_attention_mask": _mask(128, PROMPT_TOKENS),
        "negative_prompt_embeds": _noise(1, 128, 4096),
        "negative_prompt_attention_mask": _mask(128, 4),
    }


SUBJECTS = {
    "cogvideox-2b": Subject(
        family="cogvideox-2b", build=_cogvideox, texts=_cogvideox_texts,
        width=720, height=480, num_frames=49, dtype=torch.float16,
    ),
    "hunyuanvideo-1.5-720p": Subject(
        family="hunyuanvideo-1.5-720p", build=_hunyuan15, texts=_hunyuan15_texts, width=1280, height=720, num_frames=33,
    ),
    "hunyuanvideo-1.5-480p": Subject(
        family="hunyuanvideo-1.5-480p", build=_hunyuan15, texts=_hunyuan15_texts, width=848, height=480, num_frames=33,
    ),
    "wan2.1-14b": Subject(
        family="wan2.1-14b", build=_wan, texts=_wan_texts, width=832, height=480, num_frames=81,
    ),
    "wan2.1-1.3b": Subject(
        family="wan2.1-1.3b", texts=_wan_texts, width=416, height=240, num_frames=17,
        build=lambda: _wan(num_attention_heads=12, ffn_dim=8960, num_layers=30),
    ),
    "ltx-video": Subject(
        family="ltx-video", build=_ltx, texts=_ltx_texts, width=384, height=256, num_frames=25,
    ),
}  # fmt: skip
