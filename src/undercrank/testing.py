"""Tiny random pipelines of every family, and the proof that a pipeline is as it was found. For tests.

    pipe = tiny_pipeline("cogvideox-2b")
    latents = pipe(**tiny_inputs(pipe)).frames

A tiny pipeline has the class, the scheduler, the encoders, the tokenizers and the VAE of the row, with small
random weights: it runs from a prompt in a fraction of a second on one core and downloads nothing. Its pictures
mean nothing. `seed` decides every weight, bit for bit, and the global random state is left as it was.

Text and image encoders are the real classes (T5, UMT5, ByT5, CLIP, Llama, LLaVA, Qwen2.5-VL, Gemma 3, SigLIP) at
a small size. Tokenizers are byte-level BPE, trained in memory on a few lines, wrapped in
`PreTrainedTokenizerFast` with the real one's special tokens: any text has an encoding.

What is not as in the checkpoints, and why:

- Qwen2VLProcessor (Kandinsky) is `_TextOnly`, a tokenizer that takes its arguments: the video half of the real one
  needs torchvision, and text is all that the pipeline gives it.
- The safety checker (Cosmos) is `_NoGuardrail`: the real one is another package with large models.
- The Cosmos transformer takes no padding mask: it would resize it with torchvision.
- HunyuanVideo-1.5 keeps 128 + 32 text tokens and 9 of the picture, not 1000 + 256 and 729: attributes of the
  pipeline, where other families take the number as an argument.
- Layers that start at zero get random weights, or whole blocks would do nothing.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline  # by its file: elsewhere it needs OpenCV
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video as hunyuan
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video as hunyuan_i2v
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from undercrank import families
from undercrank.records import BadInput, Family, NotFound
from undercrank.rig import DENOISERS

PROMPT = "a red ball rolls left"

_CORPUS = (
    PROMPT,
    "a blue box moves right, a green cat walks on the grass, blurry, low quality, static, ugly",
    hunyuan.DEFAULT_PROMPT_TEMPLATE["template"],
    hunyuan_i2v.DEFAULT_PROMPT_TEMPLATE["template"],
    *["system\n\nuser\n\nassistant\n\n"] * 20,
)
_VOCABULARY = 450
"""Large enough that a pipeline's long template leaves room for the prompt, small enough that it is not shorter than
the fixed number of tokens which the pipeline then cuts off (95 in HunyuanVideo, 108 in 1.5, 128 in Kandinsky)."""

# --------------------------------------------------------------------------- tokenizers

_SPECIAL: dict[str, dict[str, str]] = {
    "t5": {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    "clip": {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "llama": {"pad_token": "<pad>", "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    "qwen": {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    "gemma": {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"},
}
"The tokens with a role, in the order of their ids, 0 first."
_MARKS: dict[str, tuple[str, ...]] = {
    "llama": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"),
    "qwen": ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
}
"Other tokens that are never split."
_ENDS: dict[str, str] = {
    "t5": "$A </s>",
    "clip": "<|startoftext|> $A <|endoftext|>",
    "llama": "<|begin_of_text|> $A",
    "qwen": "$A",
    "gemma": "<bos> $A",
}
"What the tokenizer puts around a text."
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"Qwen's way of writing a conversation, as far as pipelines use it."


def _special_tokens(kind: str) -> list[str]:
    return list(dict.fromkeys((*_SPECIAL[kind].values(), *_MARKS.get(kind, ()))))


@cache
def _bpe(kind: str) -> str:
    """The tokenizer as JSON: training takes tens of milliseconds, a copy none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = _special_tokens(kind)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    pairs = [(token, tokenizer.token_to_id(token)) for token in special]
    tokenizer.post_processor = processors.TemplateProcessing(single=_ENDS[kind], special_tokens=pairs)
    return tokenizer.to_str()


def _tokenizer(kind: str, **options: Any) -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(_bpe(kind))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL[kind], **options)


def _token_id(kind: str, token: str) -> int:
    return _special_tokens(kind).index(token)


# --------------------------------------------------------------------------- encoders of a condition

_SIDE = 64
"Pixels of a side: on the lattice of every family that has one."
_TEXT_WIDTH = 32
_LAYERS = 3
"Blocks of a denoiser: a first, a last and one between, as caches and offloaders see them."


def _t5(cls: type = transformers.T5EncoderModel, width: int = _TEXT_WIDTH, vocab: int = _VOCABULARY) -> nn.Module:
    config_class = cls.config_class  # type: ignore[attr-defined]
    config = config_class(
        vocab_size=vocab,
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=32,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    return cls(config)


def _umt5() -> nn.Module:
    return _t5(transformers.UMT5EncoderModel)


def _clip_text() -> nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_TEXT_WIDTH,
        intermediate_size=2 * _TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=_token_id("clip", "<|startoftext|>"),
        eos_token_id=_token_id("clip", "<|endoftext|>"),
        pad_token_id=_token_id("clip", "<|endoftext|>"),
    )
    return transformers.CLIPTextModel(config)


_DECODER: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _TEXT_WIDTH,
    "intermediate_size": 2 * _TEXT_WIDTH,
    "num_hidden_layers": 3,  # pipelines take the third hidden state from the end
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"The shape of a small decoder-only language model, by the names that Llama, Qwen and Gemma share."


def _llama_config() -> Any:
    return transformers.LlamaConfig(**_DECODER, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def _llama() -> nn.Module:
    return transformers.LlamaModel(_llama_config())


def _llava() -> nn.Module:
    """576 image tokens, as in the real one: the pipeline's template has the number."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=48,
        patch_size=2,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=_llama_config(),
        image_token_index=_token_id("llama", "<image>"),
        pad_token_id=0,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _qwen_config() -> Any:
    ends = {"pad_token_id": 0, "eos_token_id": _token_id("qwen", "<|im_end|>"), "bos_token_id": None}
    sections = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    return transformers.Qwen2_5_VLConfig(
        text_config={**_DECODER, "rope_parameters": sections, **ends},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": _TEXT_WIDTH,
            "fullatt_block_indexes": [0],
        },
        **{f"{name}_token_id": _token_id("qwen", f"<|{mark}|>") for name, mark in _QWEN_MARKS},
    )


_QWEN_MARKS = (
    ("image", "image_pad"),
    ("video", "video_pad"),
    ("vision_start", "vision_start"),
    ("vision_end", "vision_end"),
)


def _qwen_text() -> nn.Module:
    return transformers.Qwen2_5_VLTextModel(_qwen_config().text_config)


def _qwen() -> nn.Module:
    return transformers.Qwen2_5_VLForConditionalGeneration(_qwen_config())


def _gemma() -> nn.Module:
    config = transformers.Gemma3Config(
        text_config={**_DECODER, "head_dim": 16, "sliding_window": 64, "pad_token_id": 0},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        },
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _siglip() -> nn.Module:
    config = transformers.SiglipVisionConfig(
        hidden_size=_TEXT_WIDTH,
        intermediate_size=2 * _TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=48,
        patch_size=16,
    )
    return transformers.SiglipVisionModel(config)


def _clip_vision(cls: type = transformers.CLIPVisionModel, width: int = 32, pixels: int = 32) -> nn.Module:
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=pixels,
        patch_size=pixels // 2,
        projection_dim=width,
    )
    return cls(config)


# The PIL backends by name: the default ones need torchvision and complain of its absence.
def _clip_images(pixels: int = 32) -> Any:
    side = {"height": pixels, "width": pixels}
    return transformers.CLIPImageProcessorPil(size=side, crop_size=side)


def _siglip_images() -> Any:
    return transformers.SiglipImageProcessorPil(size={"height": 48, "width": 48})


# --------------------------------------------------------------------------- Wan


_WAN_SHAPE: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": _TEXT_WIDTH,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": _LAYERS,
    "rope_max_seq_len": 64,
}


def _wan_transformer(**options: Any) -> nn.Module:
    return diffusers.WanTransformer3DModel(**{**_WAN_SHAPE, **options})


def _wan_vae(family: Family) -> nn.Module:
    shape: dict[str, Any] = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    if family.spatial_stride == 16:  # Wan 2.2's VAE: residual, on patches of 2 x 2 pixels
        shape |= {
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
        }
    return diffusers.AutoencoderKLWan(z_dim=16, temperal_downsample=[False, True, True], **shape)


def _unipc(flow_shift: float) -> Any:
    """The scheduler that the Wan and SkyReels repositories ship."""
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )


def _experts(family: Family, **options: Any) -> dict[str, nn.Module]:
    names = ["transformer", "transformer_2"] if "two_experts" in family.traits else ["transformer"]
    return {name: _wan_transformer(**options) for name in names}


def _wan(family: Family) -> DiffusionPipeline:
    flow_shift = 3.0 if family.repo.startswith("package:") else 5.0
    return diffusers.WanPipeline(
        tokenizer=_tokenizer("t5"),
        text_encoder=_umt5(),
        vae=_wan_vae(family),
        scheduler=_unipc(flow_shift),
        boundary_ratio=0.875 if "two_experts" in family.traits else None,
        expand_timesteps="expand_timesteps" in family.traits,
        **_experts(family),
    )


def _wan_i2v(family: Family) -> DiffusionPipeline:
    two = "two_experts" in family.traits
    seen: dict[str, Any] = {} if two else {"image_dim": 32, "added_kv_proj_dim": 24}
    return diffusers.WanImageToVideoPipeline(
        tokenizer=_tokenizer("t5"),
        text_encoder=_umt5(),
        image_encoder=None if two else _clip_vision(),
        image_processor=None if two else _clip_images(),
        vae=_wan_vae(family),
        scheduler=_unipc(5.0),
        boundary_ratio=0.9 if two else None,
        **_experts(family, in_channels=36, **seen),
    )


# --------------------------------------------------------------------------- CogVideoX


def _is_2b(family: Family) -> bool:
    """CogVideoX-2b differs in kind: sine positions and DDIM, where the others have rotary ones and DPM."""
    return family.transformer_params < 2_000_000_000


def _cog_transformer(family: Family, channels: int) -> nn.Module:
    later = family.patch[0] == 2  # CogVideoX 1.5
    wide, high = _size(family)
    concatenated = bool(family.traits & {"image_input", "control_input"})
    options: dict[str, Any] = {"patch_size_t": 2, "patch_bias": False} if later else {}
    if later and concatenated:
        options["ofs_embed_dim"] = 16
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=channels * (2 if concatenated else 1),
        out_channels=channels,
        time_embed_dim=16,
        text_embed_dim=_TEXT_WIDTH,
        num_layers=_LAYERS,
        sample_width=wide // 8,
        sample_height=high // 8,
        sample_frames=_frames(family),
        max_text_seq_length=family.max_sequence_length or 226,
        spatial_interpolation_scale=1.0,
        use_rotary_positional_embeddings=not _is_2b(family),
        use_learned_positional_embeddings="one_size" in family.traits,
        **options,
    )


def _cog_scheduler(family: Family) -> Any:
    if "control_input" in family.traits:
        return diffusers.DDIMScheduler(prediction_type="v_prediction", timestep_spacing="trailing")
    cls = diffusers.CogVideoXDDIMScheduler if _is_2b(family) else diffusers.CogVideoXDPMScheduler
    return cls(prediction_type="v_prediction", timestep_spacing="trailing")


def _cog(family: Family) -> DiffusionPipeline:
    return getattr(diffusers, family.pipeline)(
        tokenizer=_tokenizer("t5"),
        text_encoder=_t5(),
        vae=diffusers.AutoencoderKLCogVideoX(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
        ),
        transformer=_cog_transformer(family, channels=4),
        scheduler=_cog_scheduler(family),
    )


# --------------------------------------------------------------------------- SkyReels


def _skyreels(family: Family) -> DiffusionPipeline:
    small = family.transformer_width == 1536  # the 1.3B is told the frame rate
    return getattr(diffusers, family.pipeline)(
        tokenizer=_tokenizer("t5"),
        text_encoder=_umt5(),
        transformer=diffusers.SkyReelsV2Transformer3DModel(**_WAN_SHAPE, inject_sample_info=small),
        vae=_wan_vae(family),
        scheduler=_unipc(8.0),
    )


# --------------------------------------------------------------------------- HunyuanVideo

_HV15_TOKENS = 128
_HV15_GLYPHS = 32


def _hv15(family: Family) -> DiffusionPipeline:
    """Its text lengths and the number of picture tokens are attributes of the pipeline: smaller here."""
    looks = "image_input" in family.traits
    seen: dict[str, Any] = {"image_encoder": _siglip(), "feature_extractor": _siglip_images()} if looks else {}
    pipe = getattr(diffusers, family.pipeline)(
        text_encoder=_qwen_text(),
        tokenizer=_tokenizer("qwen", chat_template=_CHAT),
        text_encoder_2=_t5(width=16, vocab=384),
        tokenizer_2=transformers.ByT5Tokenizer(),
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=_LAYERS,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=_TEXT_WIDTH,
            text_embed_2_dim=16,
            image_embed_dim=_TEXT_WIDTH,
            rope_axes_dim=(4, 6, 6),
            target_size=_SIDE,
            task_type=family.task,
        ),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(32, 32, 32, 32, 32), layers_per_block=1
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=family.guidance_scale),
        **seen,
    )
    pipe.tokenizer_max_length = _HV15_TOKENS
    pipe.tokenizer_2_max_length = _HV15_GLYPHS
    pipe.vision_num_semantic_tokens = 9
    return pipe


def _hunyuan_vae() -> nn.Module:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )


_HUNYUAN_SHAPE: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": _LAYERS,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": _TEXT_WIDTH,
    "pooled_projection_dim": _TEXT_WIDTH,
    "rope_axes_dim": (4, 6, 6),
}


def _hunyuan_transformer(**options: Any) -> nn.Module:
    return diffusers.HunyuanVideoTransformer3DModel(**{**_HUNYUAN_SHAPE, **options})


def _hunyuan(family: Family) -> DiffusionPipeline:
    looks = "image_input" in family.traits
    seen: dict[str, Any] = {"image_processor": _clip_images(48)} if looks else {}
    return getattr(diffusers, family.pipeline)(
        text_encoder=_llava() if looks else _llama(),
        tokenizer=_tokenizer("llama"),
        text_encoder_2=_clip_text(),
        tokenizer_2=_tokenizer("clip", model_max_length=77),
        transformer=_hunyuan_transformer(image_condition_type="token_replace" if looks else None),
        vae=_hunyuan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        **seen,
    )


# --------------------------------------------------------------------------- LTX, Mochi


def _ltx_scheduler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )


def _ltx(family: Family) -> DiffusionPipeline:
    return getattr(diffusers, family.pipeline)(
        tokenizer=_tokenizer("t5"),
        text_encoder=_t5(),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=_LAYERS,
            caption_channels=_TEXT_WIDTH,
        ),
        scheduler=_ltx_scheduler(),
    )


def _ltx2_transformer() -> nn.Module:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=_LAYERS,
        caption_channels=_TEXT_WIDTH,
    )


def _ltx2_vae() -> nn.Module:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(16, 32, 64),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )


def _ltx2_sound() -> dict[str, nn.Module]:
    """The audio VAE (2 latent channels on 2 mel bins: 4 channels for the transformer) and the vocoder."""
    return {
        "audio_vae": diffusers.AutoencoderKLLTX2Audio(
            base_channels=4,
            output_channels=2,
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            latent_channels=2,
            resolution=32,
            mel_bins=8,
        ),
        "vocoder": LTX2Vocoder(
            in_channels=16,
            hidden_channels=32,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=16000,
        ),
    }


def _ltx2(family: Family) -> DiffusionPipeline:
    connectors = LTX2TextConnectors(
        caption_channels=_TEXT_WIDTH,
        text_proj_in_factor=_DECODER["num_hidden_layers"] + 1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
    )
    return getattr(diffusers, family.pipeline)(
        scheduler=_ltx_scheduler(),
        vae=_ltx2_vae(),
        text_encoder=_gemma(),
        tokenizer=_tokenizer("gemma"),
        connectors=connectors,
        transformer=_ltx2_transformer(),
        **_ltx2_sound(),
    )


def _mochi(family: Family) -> DiffusionPipeline:
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=diffusers.AutoencoderKLMochi(
            latent_channels=12,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=_t5(),
        tokenizer=_tokenizer("t5"),
        transformer=diffusers.MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=_LAYERS,
            pooled_projection_dim=16,
            text_embed_dim=_TEXT_WIDTH,
            time_embed_dim=16,
        ),
    )


# --------------------------------------------------------------------------- Cosmos, Kandinsky


class _NoGuardrail:
    """Stands for cosmos_guardrail, a separate package with its own large models: passes everything."""

    def to(self, device: Any) -> _NoGuardrail:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def _cosmos(family: Family) -> DiffusionPipeline:
    return diffusers.Cosmos2_5_PredictBasePipeline(
        text_encoder=_qwen(),
        tokenizer=_tokenizer("qwen", chat_template=_CHAT),
        transformer=diffusers.CosmosTransformer3DModel(
            in_channels=17,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=_LAYERS,
            mlp_ratio=2.0,
            text_embed_dim=_TEXT_WIDTH,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
            rope_scale=(1.0, 3.0, 3.0),
            extra_pos_embed_type=None,
            concat_padding_mask=False,  # the transformer resizes the mask with torchvision
            use_crossattn_projection=True,
            crossattn_proj_in_channels=_TEXT_WIDTH * _DECODER["num_hidden_layers"],
            encoder_hidden_states_channels=_TEXT_WIDTH,
        ),
        vae=_wan_vae(family),
        scheduler=diffusers.UniPCMultistepScheduler(
            use_karras_sigmas=True,
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
            sigma_max=200.0,
            sigma_min=0.01,
        ),
        safety_checker=_NoGuardrail(),
    )


class _TextOnly(transformers.PreTrainedTokenizerFast):
    """Stands for Qwen2VLProcessor, whose video half needs torchvision: takes its arguments, reads the text."""

    def __call__(self, text: Any = None, images: None = None, videos: None = None, **options: Any) -> Any:
        return super().__call__(text, **options)


def _kandinsky(family: Family) -> DiffusionPipeline:
    tokenizer = Tokenizer.from_str(_bpe("qwen"))
    return getattr(diffusers, family.pipeline)(
        transformer=diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=_TEXT_WIDTH,
            in_text_dim2=_TEXT_WIDTH,
            time_dim=16,
            model_dim=32,
            ff_dim=64,
            num_text_blocks=1,
            num_visual_blocks=_LAYERS,
            axes_dims=(4, 6, 6),
            visual_cond=True,
        ),
        vae=_hunyuan_vae(),
        text_encoder=_qwen(),
        tokenizer=_TextOnly(tokenizer_object=tokenizer, **_SPECIAL["qwen"]),
        text_encoder_2=_clip_text(),
        tokenizer_2=_tokenizer("clip", model_max_length=77),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


# --------------------------------------------------------------------------- classes that are no family's


def _flow(shift: float = 5.0) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)


def _autoencoder(levels: int = 4) -> nn.Module:
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels}
    return diffusers.AutoencoderKL(block_out_channels=[8] * levels, norm_num_groups=2, latent_channels=4, **kinds)


def _of_wan(cls: str, transformer: nn.Module, scheduler: Any, **more: Any) -> DiffusionPipeline:
    return getattr(diffusers, cls)(
        tokenizer=_tokenizer("t5"),
        text_encoder=_umt5(),
        transformer=transformer,
        vae=_wan_vae(families.family("wan2.1-1.3b")),
        scheduler=scheduler,
        **more,
    )


_SEEING = {"in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 24}
"What a Wan transformer that is given a picture takes besides."


def _eyes() -> dict[str, Any]:
    return {"image_encoder": _clip_vision(), "image_processor": _clip_images()}


def _wan_vace() -> DiffusionPipeline:
    transformer = diffusers.WanVACETransformer3DModel(**_WAN_SHAPE, vace_layers=[0, 2], vace_in_channels=96)
    return _of_wan("WanVACEPipeline", transformer, _unipc(5.0))


def _wan_animate() -> DiffusionPipeline:
    transformer = diffusers.WanAnimateTransformer3DModel(
        **{**_WAN_SHAPE, **_SEEING},
        latent_channels=16,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=_LAYERS,
    )
    return _of_wan("WanAnimatePipeline", transformer, _unipc(5.0), **_eyes())


def _chronoedit() -> DiffusionPipeline:
    transformer = diffusers.ChronoEditTransformer3DModel(**{**_WAN_SHAPE, **_SEEING}, rope_temporal_skip_len=8)
    return _of_wan("ChronoEditPipeline", transformer, _flow(), **_eyes())


def _anyflow() -> DiffusionPipeline:
    transformer = diffusers.AnyFlowTransformer3DModel(**_WAN_SHAPE)
    return _of_wan("AnyFlowPipeline", transformer, diffusers.FlowMapEulerDiscreteScheduler(shift=5.0))


def _skyreels_seeing() -> DiffusionPipeline:
    transformer = diffusers.SkyReelsV2Transformer3DModel(**{**_WAN_SHAPE, **_SEEING})
    eyes = {
        "image_encoder": _clip_vision(transformers.CLIPVisionModelWithProjection),
        "image_processor": _clip_images(),
    }
    return _of_wan("SkyReelsV2ImageToVideoPipeline", transformer, _unipc(5.0), **eyes)


def _skyreels_forcing(cls: str) -> DiffusionPipeline:
    return _of_wan(cls, diffusers.SkyReelsV2Transformer3DModel(**_WAN_SHAPE, inject_sample_info=True), _unipc(8.0))


def _hunyuan_skyreels() -> DiffusionPipeline:
    base = _hunyuan(families.family("hunyuanvideo"))
    parts = {**base.components, "transformer": _hunyuan_transformer(in_channels=8)}
    return diffusers.HunyuanSkyreelsImageToVideoPipeline(**parts)


def _ltx_condition() -> DiffusionPipeline:
    return diffusers.LTXConditionPipeline(**{**_ltx(families.family("ltx-video")).components, "scheduler": _flow(1.0)})


def _allegro() -> DiffusionPipeline:
    return diffusers.AllegroPipeline(
        tokenizer=_tokenizer("t5"),
        text_encoder=_t5(),
        vae=diffusers.AutoencoderKLAllegro(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2),
        transformer=diffusers.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=_LAYERS,
            cross_attention_dim=24,
            sample_width=_SIDE // 8,
            sample_height=_SIDE // 8,
            sample_frames=8,
            caption_channels=_TEXT_WIDTH,
        ),
        scheduler=diffusers.EulerAncestralDiscreteScheduler(beta_schedule="scaled_linear"),
    )


def _latte() -> DiffusionPipeline:
    return diffusers.LattePipeline(
        tokenizer=_tokenizer("t5"),
        text_encoder=_t5(),
        vae=_autoencoder(),
        transformer=diffusers.LatteTransformer3DModel(
            sample_size=_SIDE // 8,
            patch_size=2,
            num_layers=2,
            num_attention_heads=3,
            attention_head_dim=8,
            cross_attention_dim=24,
            in_channels=4,
            out_channels=8,
            caption_channels=_TEXT_WIDTH,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            video_length=4,
        ),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )


def _consisid() -> DiffusionPipeline:
    base = _cog(families.family("cogvideox-5b"))
    transformer = diffusers.ConsisIDTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=8,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=_TEXT_WIDTH,
        num_layers=_LAYERS,
        sample_width=_SIDE // 8,
        sample_height=_SIDE // 8,
        sample_frames=9,
        max_text_seq_length=16,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_interval=1,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
        LFE_id_dim=4,
        LFE_vit_dim=4,
        LFE_depth=5,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=1,
        LFE_num_querie=2,
        LFE_output_dim=21,  # two thirds of the width
        LFE_ff_mult=1,
        LFE_num_scale=1,
    )
    return ConsisIDPipeline(**{**base.components, "transformer": transformer})


def _motif() -> DiffusionPipeline:
    """Its encoder is T5Gemma 2's in the checkpoint: a T5 gives the pipeline the same things."""
    return diffusers.MotifVideoPipeline(
        scheduler=_flow(),
        vae=_wan_vae(families.family("wan2.1-1.3b")),
        text_encoder=_t5(),
        tokenizer=_tokenizer("gemma"),
        transformer=diffusers.MotifVideoTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=_TEXT_WIDTH,
            rope_axes_dim=(4, 6, 6),
        ),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=5.0),
    )


def _sana_video() -> DiffusionPipeline:
    text = transformers.Gemma2Config(**_DECODER, head_dim=16, sliding_window=64, pad_token_id=0)
    return diffusers.SanaVideoPipeline(
        tokenizer=_tokenizer("gemma"),
        text_encoder=transformers.Gemma2Model(text),
        vae=_wan_vae(families.family("wan2.1-1.3b")),
        transformer=diffusers.SanaVideoTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=_LAYERS,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=_TEXT_WIDTH,
            sample_size=8,
            rope_max_seq_len=32,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            use_flow_sigmas=True, flow_shift=8.0, prediction_type="flow_prediction"
        ),
    )


def _svd() -> DiffusionPipeline:
    return diffusers.StableVideoDiffusionPipeline(
        vae=diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32, 32, 32), down_block_types=("DownEncoderBlock2D",) * 4
        ),
        image_encoder=_clip_vision(transformers.CLIPVisionModelWithProjection, pixels=224),  # the pipeline's own number
        unet=diffusers.UNetSpatioTemporalConditionModel(
            sample_size=_SIDE // 8,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            layers_per_block=1,
            cross_attention_dim=32,
            num_attention_heads=4,
            addition_time_embed_dim=32,
            projection_class_embeddings_input_dim=96,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            sigma_max=700.0,
            sigma_min=0.002,
            steps_offset=1,
            timestep_type="continuous",
            use_karras_sigmas=True,
        ),
        feature_extractor=_clip_images(),
    )


def _animatediff(cls: str = "AnimateDiffPipeline", channels: int = 4) -> DiffusionPipeline:
    return getattr(diffusers, cls)(
        vae=_autoencoder(),
        text_encoder=_clip_text(),
        tokenizer=_tokenizer("clip", model_max_length=77),
        unet=diffusers.UNet2DConditionModel(
            sample_size=_SIDE // 8,
            in_channels=channels,
            block_out_channels=(8, 8),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=_TEXT_WIDTH,
            attention_head_dim=4,
            norm_num_groups=2,
        ),
        motion_adapter=diffusers.MotionAdapter(
            block_out_channels=(8, 8), motion_layers_per_block=1, motion_norm_num_groups=2, motion_num_attention_heads=2
        ),
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )


def _easyanimate() -> DiffusionPipeline:
    down, up = ["SpatialDownBlock3D"], ["SpatialUpBlock3D"]
    return diffusers.EasyAnimatePipeline(
        vae=diffusers.AutoencoderKLMagvit(
            latent_channels=4,
            block_out_channels=[8, 8, 8, 8],
            down_block_types=down + ["SpatialTemporalDownBlock3D"] * 3,
            up_block_types=up + ["SpatialTemporalUpBlock3D"] * 3,
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
        ),
        text_encoder=_qwen(),
        tokenizer=_tokenizer("qwen", chat_template=_CHAT),
        transformer=diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            patch_size=2,
            time_embed_dim=16,
            text_embed_dim=_TEXT_WIDTH,
            num_layers=_LAYERS,
            mmdit_layers=_LAYERS,
            sample_width=_SIDE // 8,
            sample_height=_SIDE // 8,
        ),
        scheduler=_flow(),
    )


def _again(cls: str, base: DiffusionPipeline, **other: Any) -> DiffusionPipeline:
    """Another class of the same parts, but for some."""
    return getattr(diffusers, cls)(**{**base.components, **other})


_UNET_3D: dict[str, Any] = {
    "sample_size": _SIDE // 8,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "layers_per_block": 1,
    "cross_attention_dim": _TEXT_WIDTH,
    "norm_num_groups": 2,
    "attention_head_dim": 4,
}


def _of_clip(cls: str, unet: nn.Module, **more: Any) -> DiffusionPipeline:
    return getattr(diffusers, cls)(
        vae=_autoencoder(),
        text_encoder=_clip_text(),
        tokenizer=_tokenizer("clip", model_max_length=77),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        **more,
    )


def _framepack() -> DiffusionPipeline:
    transformer = diffusers.HunyuanVideoFramepackTransformer3DModel(
        **_HUNYUAN_SHAPE, has_image_proj=True, image_proj_dim=_TEXT_WIDTH, has_clean_x_embedder=True
    )
    eyes = {"image_encoder": _siglip(), "feature_extractor": _siglip_images()}
    base = _hunyuan(families.family("hunyuanvideo"))
    return _again("HunyuanVideoFramepackPipeline", base, transformer=transformer, **eyes)


def _cosmos_1(cls: str, channels: int) -> DiffusionPipeline:
    widths = {"encoder_block_out_channels": (8, 8, 8, 8), "decode_block_out_channels": (8, 8, 8, 8)}
    return getattr(diffusers, cls)(
        text_encoder=_t5(),
        tokenizer=_tokenizer("t5"),
        transformer=diffusers.CosmosTransformer3DModel(
            in_channels=channels,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=_TEXT_WIDTH,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
            concat_padding_mask=False,  # the transformer resizes the mask with torchvision
            extra_pos_embed_type="learnable",
        ),
        vae=diffusers.AutoencoderKLCosmos(
            latent_channels=4, attention_resolutions=(8,), resolution=_SIDE, num_layers=1, patch_size=4, **widths
        ),
        scheduler=diffusers.EDMEulerScheduler(
            sigma_data=0.5, sigma_schedule="karras", prediction_type="epsilon", final_sigmas_type="sigma_min"
        ),
        safety_checker=_NoGuardrail(),
    )


def _pictures(count: int = 5, side: int = _SIDE) -> list[Any]:
    return [_picture(index).resize((side, side)) for index in range(count)]


# --------------------------------------------------------------------------- the public part

BUILDERS: dict[str, Callable[[Family], DiffusionPipeline]] = {
    "WanPipeline": _wan,
    "WanImageToVideoPipeline": _wan_i2v,
    "CogVideoXPipeline": _cog,
    "CogVideoXImageToVideoPipeline": _cog,
    "CogVideoXVideoToVideoPipeline": _cog,
    "CogVideoXFunControlPipeline": _cog,
    "SkyReelsV2Pipeline": _skyreels,
    "SkyReelsV2DiffusionForcingPipeline": _skyreels,
    "HunyuanVideo15Pipeline": _hv15,
    "HunyuanVideo15ImageToVideoPipeline": _hv15,
    "HunyuanVideoPipeline": _hunyuan,
    "HunyuanVideoImageToVideoPipeline": _hunyuan,
    "LTXPipeline": _ltx,
    "LTXImageToVideoPipeline": _ltx,
    "LTX2Pipeline": _ltx2,
    "LTX2ImageToVideoPipeline": _ltx2,
    "MochiPipeline": _mochi,
    "Cosmos2_5_PredictBasePipeline": _cosmos,
    "Kandinsky5T2VPipeline": _kandinsky,
    "Kandinsky5I2VPipeline": _kandinsky,
}
"From the name of a pipeline class to what builds a tiny one for a row."

Inputs = Callable[[], dict[str, Any]]
OTHERS: dict[str, tuple[Callable[[], DiffusionPipeline], Inputs]] = {
    "WanVACEPipeline": (_wan_vace, dict),
    "WanVideoToVideoPipeline": (
        lambda: _of_wan("WanVideoToVideoPipeline", _wan_transformer(), _unipc(3.0)),
        lambda: {"video": _pictures()},
    ),
    "WanAnimatePipeline": (
        _wan_animate,
        lambda: {
            "image": _picture(),
            "pose_video": _pictures(),
            "face_video": _pictures(side=16),
            "segment_frame_length": 5,
        },
    ),
    "ChronoEditPipeline": (_chronoedit, lambda: {"image": _picture()}),
    "AnyFlowPipeline": (_anyflow, dict),
    "SkyReelsV2ImageToVideoPipeline": (_skyreels_seeing, lambda: {"image": _picture()}),
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": (
        lambda: _skyreels_forcing("SkyReelsV2DiffusionForcingImageToVideoPipeline"),
        lambda: {"image": _picture(), "num_frames": 9},
    ),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": (
        lambda: _skyreels_forcing("SkyReelsV2DiffusionForcingVideoToVideoPipeline"),
        lambda: {"video": _pictures(), "num_frames": 9, "overlap_history": 1, "base_num_frames": 9},
    ),
    "HunyuanSkyreelsImageToVideoPipeline": (_hunyuan_skyreels, lambda: {"image": _picture(), "true_cfg_scale": 2.0}),
    "LTXConditionPipeline": (_ltx_condition, lambda: {"image": _picture(), "num_frames": 9}),
    "AllegroPipeline": (_allegro, lambda: {"clean_caption": False, "num_frames": 8}),
    "LattePipeline": (_latte, lambda: {"clean_caption": False, "video_length": 4}),
    "ConsisIDPipeline": (
        _consisid,
        lambda: {
            "image": _picture(),
            "num_frames": 9,
            "id_cond": torch.ones(1, 4),
            "id_vit_hidden": [torch.ones(1, 2, 4)],
            "max_sequence_length": 16,
        },
    ),
    "MotifVideoPipeline": (_motif, dict),
    "SanaVideoPipeline": (
        _sana_video,
        lambda: {"frames": 9, "use_resolution_binning": False, "complex_human_instruction": None},
    ),
    "StableVideoDiffusionPipeline": (_svd, lambda: {"image": _picture(), "num_frames": 2}),
    "AnimateDiffPipeline": (_animatediff, lambda: {"num_frames": 4}),
    "EasyAnimatePipeline": (_easyanimate, dict),
    "SanaImageToVideoPipeline": (
        lambda: _again("SanaImageToVideoPipeline", _sana_video(), scheduler=_flow(8.0)),
        lambda: {"image": _picture(), "frames": 9, "use_resolution_binning": False, "complex_human_instruction": None},
    ),
    "LucyEditPipeline": (
        lambda: _of_wan("LucyEditPipeline", _wan_transformer(in_channels=32), _flow(), expand_timesteps=True),
        lambda: {"video": _pictures()},
    ),
    "LTX2ConditionPipeline": (
        lambda: _again("LTX2ConditionPipeline", _ltx2(families.family("ltx-2"))),
        lambda: {"num_frames": 9, "spatio_temporal_guidance_blocks": [1], "max_sequence_length": 256},
    ),
    "HunyuanVideoFramepackPipeline": (
        _framepack,
        lambda: {"image": _picture(), "num_frames": 9, "latent_window_size": 3, "max_sequence_length": 256},
    ),
    "AnimateDiffVideoToVideoPipeline": (
        lambda: _animatediff("AnimateDiffVideoToVideoPipeline"),
        lambda: {"video": _pictures(4)},
    ),
    "PIAPipeline": (lambda: _animatediff("PIAPipeline", channels=9), lambda: {"image": _picture(), "num_frames": 4}),
    "TextToVideoSDPipeline": (
        lambda: _of_clip("TextToVideoSDPipeline", diffusers.UNet3DConditionModel(**_UNET_3D)),
        lambda: {"num_frames": 4},
    ),
    "CosmosTextToWorldPipeline": (lambda: _cosmos_1("CosmosTextToWorldPipeline", 4), lambda: {"num_frames": 9}),
    "CosmosVideoToWorldPipeline": (
        lambda: _cosmos_1("CosmosVideoToWorldPipeline", 5),
        lambda: {"image": _picture(), "num_frames": 9},
    ),
}
"Classes that no row has: what builds a tiny one, and what its call is given besides the usual."


def tiny_pipeline(family: str | Family, seed: int = 0, *, scheduler: str | None = None) -> DiffusionPipeline:
    """A small random pipeline of that row, ready to run from a prompt. `scheduler`: another class by name."""
    row = family if isinstance(family, Family) else families.family(family)
    return _built(lambda: BUILDERS[row.pipeline](row), seed, scheduler)


def _built(build: Callable[[], DiffusionPipeline], seed: int, scheduler: str | None) -> DiffusionPipeline:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = build()
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                _waken(part.eval())
    if scheduler is not None:
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_pipeline_of(class_name: str, seed: int = 0, *, scheduler: str | None = None) -> DiffusionPipeline:
    """A small random pipeline of a diffusers class, by the class's name.

    Raises BadInput for an unknown class or scheduler, with the nearest names, and NotFound, with the missing
    component, for a class that nobody has taught this module to build.
    """
    _known_class(class_name, "Pipeline")
    if scheduler is not None:
        _known_class(scheduler, "Scheduler")
    row = families.of_pipeline(class_name)
    if class_name in OTHERS:
        return _built(OTHERS[class_name][0], seed, scheduler)
    if row is None:
        raise NotFound(f"{class_name} cannot be built from small configs: {_missing(class_name)}")
    return tiny_pipeline(row, seed, scheduler=scheduler)


def tiny_classes() -> list[str]:
    """Names of the pipeline classes that can be built here."""
    return sorted({*BUILDERS, *OTHERS})


def _known_class(name: str, kind: str) -> None:
    known = [other for other in dir(diffusers) if other.endswith(kind)]
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.5) or get_close_matches(name + kind, known, n=3, cutoff=0.3)
        raise BadInput(
            f"diffusers has no {kind.lower()} {name[:60]!r}: nearest are {', '.join(near)}", field=kind.lower()
        )


def _missing(class_name: str) -> str:
    """Which components of a class have no small config here."""
    hints = inspect.signature(getattr(diffusers, class_name).__init__).parameters.values()
    modules = [p for p in hints if p.name not in ("self", "scheduler") and p.annotation is not p.empty]
    named = {p.name: str(getattr(p.annotation, "__name__", p.annotation)).rpartition(".")[2] for p in modules}
    missing = [f"{name} ({kind})" for name, kind in named.items() if name in DENOISERS]
    return f"no small config for its {' and '.join(missing or [f'{n} ({k})' for n, k in named.items()])}"


def _waken(module: nn.Module) -> None:
    """Gives random weights to layers that start at zero, as Kandinsky's modulation: their blocks do nothing."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1 and not weight.any():
                weight.normal_(std=0.02)


def tiny_inputs(
    pipe_or_family: DiffusionPipeline | str | Family, *, steps: int = 4, seed: int = 0, **overrides: Any
) -> dict[str, Any]:
    """Arguments for `pipe(**...)`: a prompt, guidance, 64x64, two latent frames, latents out, a generator.

    `overrides` replace or add arguments. Each call makes a new CPU generator: two calls are two equal runs.
    """
    if type(pipe_or_family).__name__ in OTHERS:
        return {**_other_inputs(type(pipe_or_family), steps, seed), **overrides}
    row = _row(pipe_or_family)
    width, height = _size(row)
    kwargs: dict[str, Any] = {
        "prompt": PROMPT,
        "negative_prompt": "blurry",
        "num_inference_steps": steps,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(seed),
        "width": width,
        "height": height,
        "num_frames": _frames(row),
        "guidance_scale": row.guidance_scale,
    }
    for trait, change in _BY_TRAIT.items():
        if trait in row.traits:
            change(kwargs, row)
    if row.max_sequence_length is not None:
        kwargs["max_sequence_length"] = row.max_sequence_length
    return {**kwargs, **overrides}


def _other_inputs(cls: type, steps: int, seed: int) -> dict[str, Any]:
    """The usual arguments, as far as the class takes them, and its own."""
    usual = {
        "prompt": PROMPT,
        "negative_prompt": "blurry",
        "num_inference_steps": steps,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(seed),
        "width": _SIDE,
        "height": _SIDE,
        "num_frames": 5,
        "guidance_scale": 5.0,
        "max_sequence_length": 32,
    }
    takes = inspect.signature(cls.__call__).parameters
    return {name: value for name, value in usual.items() if name in takes} | OTHERS[cls.__name__][1]()


def _row(pipe_or_family: DiffusionPipeline | str | Family) -> Family:
    if isinstance(pipe_or_family, Family):
        return pipe_or_family
    if isinstance(pipe_or_family, str):
        return families.family(pipe_or_family)
    row = families.of_pipeline(type(pipe_or_family).__name__)
    if row is None:
        raise LookupError(f"no family has the pipeline {type(pipe_or_family).__name__}")
    return row


def _size(row: Family) -> tuple[int, int]:
    """64x64, or the one size that the family knows."""
    return row.trained_sizes[0] if "one_size" in row.traits else (_SIDE, _SIDE)


def _frames(row: Family) -> int:
    """The shortest clip of at least two latent frames."""
    return max(families.least_frames(row), row.frame_step + 1)


def _picture(index: int = 0) -> Any:
    """A small picture; `index` moves it, for videos."""
    from PIL import Image  # noqa: TID251 - pipelines take pictures, and this one is drawn here

    ramp = Image.linear_gradient("L").resize((_SIDE, _SIDE)).rotate(30 * index)
    return Image.merge("RGB", (ramp, ramp.rotate(90), ramp.rotate(180)))


def _with_image(kwargs: dict[str, Any], row: Family) -> None:
    kwargs["image"] = _picture()


def _with_video(kwargs: dict[str, Any], row: Family) -> None:
    name = "control_video" if "control_input" in row.traits else "video"
    kwargs[name] = [_picture(i) for i in range(kwargs.pop("num_frames"))]


def _without(*names: str) -> Callable[[dict[str, Any], Family], None]:
    def drop(kwargs: dict[str, Any], row: Family) -> None:
        for name in names:
            del kwargs[name]

    return drop


def _with_sound(kwargs: dict[str, Any], row: Family) -> None:
    kwargs["spatio_temporal_guidance_blocks"] = [1]  # by default the 28th block: there are three


_BY_TRAIT: dict[str, Callable[[dict[str, Any], Family], None]] = {
    "image_input": _with_image,
    "video_input": _with_video,
    "size_from_image": _without("width", "height"),
    "guider": _without("guidance_scale"),
    "embedded_guidance": _without("negative_prompt"),
    "audio": _with_sound,
}
"How a trait changes the arguments of a call."


def tiny_folder(family: str | Family, path: str | Path, seed: int = 0) -> Path:
    """Saves a tiny pipeline in diffusers layout, loadable by `from_pretrained`."""
    return saved(tiny_pipeline(family, seed), Path(path))


def saved(pipe: DiffusionPipeline, folder: Path) -> Path:
    pipe.save_pretrained(folder)
    # transformers 5 calls its fast tokenizer TokenizersBackend; the old name loads everywhere.
    for file in (folder / "model_index.json", *folder.glob("*/tokenizer_config.json")):
        file.write_text(file.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    return folder


# --------------------------------------------------------------------------- as it was found


class _Itself:
    """An object by identity. It keeps the object, so that its address is not given to another one meanwhile."""

    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)

    def __repr__(self) -> str:
        name = getattr(self.it, "__qualname__", type(self.it).__name__)
        return f"{name} at {id(self.it):#x}"


def fingerprint(pipe: DiffusionPipeline) -> dict[str, Any]:
    """Everything about a pipeline and this process that a lever could leave changed, by dotted name.

    Of every module, of the scheduler, the guider, the tokenizers and the pipeline itself: the class and its
    own functions, the attributes (plain values as they are; functions and modules by identity; tensors by
    type, dtype, device and shape; containers and diffusers' objects all the way down), hooks, children,
    parameters and buffers (identity, version). Of the process: torch's flags, environment, threads.
    Compare one pipeline with itself: before and after, or after a stock run (which leaves traces of its own)
    and after another.
    """
    found: dict[str, Any] = {}
    parts = frozenset(id(part) for part in pipe.components.values())
    for name, part in {"pipe": pipe, **pipe.components}.items():
        for sub, obj in _objects(part):
            _describe_object(".".join(filter(None, (name, sub))), obj, found, parts)
    return found | _process()


TOUCHED = (
    "torch",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "safetensors.torch",
    "huggingface_hub.file_download",
    "transformers.core_model_loading",
    "transformers.modeling_utils",
    "transformers.utils.logging",
    "diffusers.hooks.hooks",
    "diffusers.models.attention_dispatch",
    "diffusers.models.model_loading_utils",
    "diffusers.models.modeling_utils",
    "diffusers.pipelines.pipeline_utils",
    "diffusers.utils.logging",
)
"Modules of others in which a load, a lever or a run replaces something, or might."


def fingerprint_of_process() -> dict[str, Any]:
    """Everything that a load could leave changed when no pipeline is left to look at, by dotted name.

    Names of the modules in `TOUCHED` and functions of their classes, by identity; torch's flags, environment, threads.
    Modules that are imported between two fingerprints are no difference. Compare with `differences`.
    """
    found: dict[str, Any] = {}
    for module in filter(None, map(sys.modules.get, TOUCHED)):
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):
                continue
            found[f"{module.__name__}.{name}"] = value if isinstance(value, _PLAIN) else _Itself(value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                found[f"{module.__name__}.{name} functions"] = _functions(value)
    return found | _process()


def _process() -> dict[str, Any]:
    found = {f"torch: {name}": value for name, value in _torch_flags()}
    found |= {f"environment: {k}": v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return found | {f"thread: {t.name} {t.ident}": True for t in _threads()}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What changed between two fingerprints of one pipeline, one line each; [] means: as it was found."""
    gone = [f"{name}: gone (was {before[name]!r})" for name in before.keys() - after.keys()]
    new = [f"{name}: new ({after[name]!r})" for name in after.keys() - before.keys()]
    both = before.keys() & after.keys()
    changed = [f"{n}: {before[n]!r} -> {after[n]!r}" for n in both if _differ(before[n], after[n])]
    return sorted(gone + new + changed)


def _differ(a: Any, b: Any) -> bool:
    return type(a) is not type(b) or (a != b and not (a != a and b != b))  # nan is as it was


def _threads() -> list[threading.Thread]:
    """tqdm starts its monitor with the first bar, even a disabled one: nobody's leftover."""
    return [t for t in threading.enumerate() if type(t).__name__ != "TMonitor"]


def _objects(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, nn.Module):
        yield from part.named_modules()
    elif hasattr(part, "__dict__"):
        yield "", part


_TABLES = ("_parameters", "_buffers", "_modules")


def _describe_object(path: str, obj: Any, found: dict[str, Any], parts: frozenset[int]) -> None:
    found[f"{path} class"] = _Itself(type(obj))
    for cls in type(obj).__mro__:
        if cls.__module__.partition(".")[0] in ("diffusers", "transformers", "undercrank"):
            found.setdefault(f"{cls.__module__}.{cls.__qualname__} ({id(cls)}) functions", _functions(cls))
    seen = {id(obj)}
    for name, value in vars(obj).items():
        if id(value) in parts:  # the pipeline's own references: described under their own names
            found[f"{path}.{name}"] = _Itself(value)
        elif name not in _TABLES or not isinstance(obj, nn.Module):
            _describe(f"{path}.{name}", value, found, seen)
    if isinstance(obj, nn.Module):
        found[f"{path} children"] = {name: _Itself(child) for name, child in obj._modules.items()}
        for table in (obj._parameters, obj._buffers):
            found |= {f"{path}.{n} tensor": _weight(t) for n, t in table.items() if t is not None}


def _functions(cls: type) -> dict[str, _Itself]:
    return {n: _Itself(f) for n, f in vars(cls).items() if callable(f) or isinstance(f, property | classmethod)}


def _weight(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return (_Itself(tensor), type(tensor).__name__, str(tensor.device), tensor.dtype, tuple(tensor.shape), version)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), Fraction, torch.dtype, torch.device, Path)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type, nn.Module, property)


def _describe(path: str, value: Any, found: dict[str, Any], seen: set[int]) -> None:
    """Records one attribute, and what is inside it."""
    if isinstance(value, _PLAIN):
        found[path] = value
    elif isinstance(value, torch.Tensor):
        found[path] = (type(value).__name__, value.dtype, str(value.device), tuple(value.shape))
    elif isinstance(value, types.MethodType):
        found[path] = ("method", _Itself(value.__func__), _Itself(value.__self__))
    elif isinstance(value, _CODE) or callable(value):
        found[path] = _Itself(value)
    elif id(value) in seen:
        found[path] = (type(value).__name__, "seen above")
    else:
        seen.add(id(value))
        inside = _inside(value)
        found[path] = (type(value).__name__, len(inside))
        for name, item in inside.items():
            _describe(f"{path}.{name}", item, found, seen)


def _inside(value: Any) -> dict[str, Any]:
    """The parts of a container or of an object of diffusers or ours; nothing of a stranger."""
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): item for index, item in enumerate(value)}
    if isinstance(value, set | frozenset):
        return {str(item): True for item in value}
    ours = type(value).__module__.partition(".")[0] in ("diffusers", "undercrank")
    return dict(getattr(value, "__dict__", {})) if ours else {}


def _torch_flags() -> Iterator[tuple[str, Any]]:
    yield "default dtype", torch.get_default_dtype()
    yield "default device", str(torch.get_default_device())
    yield "grad", torch.is_grad_enabled()
    yield "inference mode", torch.is_inference_mode_enabled()
    yield "autocast", tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    yield "deterministic", torch.are_deterministic_algorithms_enabled()
    yield "deterministic warns only", torch.is_deterministic_algorithms_warn_only_enabled()
    yield "threads", torch.get_num_threads()
    for name in ("enabled", "benchmark", "deterministic"):
        yield f"cudnn {name}", getattr(torch.backends.cudnn, name)
    # Not allow_tf32: reading it raises once somebody has set the newer fp32_precision.
    for name, part in (("matmul", torch.backends.cuda.matmul), ("convolution", torch.backends.cudnn.conv)):
        yield f"{name} float32 precision", part.fp32_precision
    for name in ("fp16", "bf16"):
        flag = f"allow_{name}_reduced_precision_reduction"
        yield flag, getattr(torch.backends.cuda.matmul, flag)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        yield f"attention {name}", getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
    if torch.cuda.is_available():
        yield "sync debug mode", torch.cuda.get_sync_debug_mode()
    # Compiler settings exist once somebody compiled; reading them must not import a compiler.
    for module, name in _COMPILER_FLAGS:
        if module in sys.modules:
            yield f"{module}.{name}", getattr(sys.modules[module], name)


_COMPILER_FLAGS = (
    ("torch._inductor.config", "emulate_precision_casts"),
    ("torch._dynamo.config", "recompile_limit"),
    ("torch._dynamo.config", "suppress_errors"),
    ("torch._dynamo.config", "caching_precompile"),
)
