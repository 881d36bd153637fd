"""flipbook's networks, all of them plain diffusers and transformers classes, and a fast way to train the autoencoder.

``AutoencoderKLWan`` runs a clip in chunks of four frames with a feature cache, which is right for long films and slow
for training: 33 frames are nine passes of small kernels.  ``encode_clip`` and ``decode_clip`` below compute the very
same function on the whole clip at once; ``tests/test_flipbook.py`` compares the two.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanResample,
    WanResidualBlock,
    patchify,
    unpatchify,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

import world

LATENT_CHANNELS = 16
VOCABULARY = 640
TEXT_LENGTH = 64


@dataclass(frozen=True)
class Sizes:
    """Widths of the three networks.  The defaults make 14.6 million parameters, 29.3 MB in half precision."""

    encoder_base: int = 16
    decoder_base: int = 24
    heads: int = 4
    head_width: int = 64
    layers: int = 10
    ffn_width: int = 768
    text_width: int = 256
    text_layers: int = 2


SMALL = Sizes(8, 8, heads=2, head_width=32, layers=2, ffn_width=64, text_width=64, text_layers=1)


def build_vae(sizes: Sizes = Sizes()) -> AutoencoderKLWan:
    """8 times smaller in space, 4 in time; the pixels are first folded 2 x 2 into 12 channels, as in Wan 2.2."""
    vae = AutoencoderKLWan(
        base_dim=sizes.encoder_base, decoder_base_dim=sizes.decoder_base, z_dim=LATENT_CHANNELS, dim_mult=[1, 2, 4],
        num_res_blocks=1, temperal_downsample=[True, True], patch_size=2, in_channels=12, out_channels=12,
        latents_mean=[0.0] * LATENT_CHANNELS, latents_std=[1.0] * LATENT_CHANNELS,
        scale_factor_spatial=8, scale_factor_temporal=4,
    )  # fmt: skip
    _start_as_an_image_autoencoder(vae)
    return vae


@torch.no_grad()
def _start_as_an_image_autoencoder(vae: AutoencoderKLWan) -> None:
    """Start with time kernels that only copy or average frames, so single frames can be learnt first and cheaply.

    A model trained on single frames then already reconstructs slow clips, and training on clips starts from there
    instead of from noise in the taps that single frames never touch.
    """
    for module in vae.modules():
        if isinstance(module, WanResample):
            if module.mode == "downsample3d":
                module.time_conv.weight.zero_()
                module.time_conv.weight[:, :, 1:, 0, 0] = 0.5 * torch.eye(module.dim)[:, :, None]
                module.time_conv.bias.zero_()
            elif module.mode == "upsample3d":
                module.time_conv.weight.zero_()
                module.time_conv.weight[:, :, 2, 0, 0] = torch.eye(module.dim).repeat(2, 1)
                module.time_conv.bias.zero_()
        elif isinstance(module, torch.nn.Conv3d) and module.kernel_size == (3, 3, 3):
            module.weight[:, :, :2] = 0
    vae.quant_conv.weight[LATENT_CHANNELS:] *= 0.1
    vae.quant_conv.bias[LATENT_CHANNELS:] = -5.0  # log variance: begin with little noise


def build_transformer(sizes: Sizes = Sizes()) -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=sizes.heads, attention_head_dim=sizes.head_width,
        in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, text_dim=sizes.text_width, freq_dim=128,
        ffn_dim=sizes.ffn_width, num_layers=sizes.layers, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=128,
    )  # fmt: skip
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def build_text_encoder(sizes: Sizes = Sizes()) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=VOCABULARY, d_model=sizes.text_width, d_kv=64, d_ff=2 * sizes.text_width,
        num_layers=sizes.text_layers, num_heads=4, is_encoder_decoder=False, pad_token_id=0, eos_token_id=1,
        dropout_rate=0.0,
    )  # fmt: skip
    return UMT5EncoderModel(config)


def build_scheduler() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )


def build_tokenizer(seed: int = 7) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any Unicode text has a code, learnt from captions of this world."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "</s>", "<unk>"], min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(world.captions(world.sample_scenes(6000, seed, "any"), seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return wrap_tokenizer(tokenizer)


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512,
        padding_side="right",
    )  # fmt: skip


# ------------------------------------------------------------------------------------- the autoencoder, clip at once
#
# Frames are kept as images, ``x_NCHW`` with N = batch x time in channels-last memory, and a causal 3 x 3 x 3
# convolution is one 2-D convolution over each frame stacked with its two predecessors (zeros before the first).


def encode_clip(vae: AutoencoderKLWan, frames_BCTHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``vae._encode`` without its chunk loop: mean and log variance of the latents, each [B, 16, t, h, w]."""
    x_NCHW, frames = _to_images(patchify(frames_BCTHW, patch_size=2))
    encoder = vae.encoder
    x_NCHW = _conv(encoder.conv_in, x_NCHW, frames)
    for layer in encoder.down_blocks:
        if isinstance(layer, WanResample):
            x_NCHW, frames = _halve(layer, x_NCHW, frames)
        else:
            x_NCHW = _residual(layer, x_NCHW, frames)
    x_NCHW = _middle(encoder.mid_block, x_NCHW, frames)
    x_NCHW = _conv(encoder.conv_out, F.silu(_norm(encoder.norm_out, x_NCHW)), frames)
    moments_BCTHW = _to_clips(_conv(vae.quant_conv, x_NCHW, frames), frames).float()
    mean_BCTHW, log_variance_BCTHW = moments_BCTHW.chunk(2, dim=1)
    return mean_BCTHW, log_variance_BCTHW


def decode_clip(vae: AutoencoderKLWan, latents_BCTHW: torch.Tensor) -> torch.Tensor:
    """``vae._decode`` without its chunk loop and without its clamp to [-1, 1], which would stop gradients."""
    x_NCHW, frames = _to_images(latents_BCTHW)
    decoder = vae.decoder
    x_NCHW = _conv(decoder.conv_in, _conv(vae.post_quant_conv, x_NCHW, frames), frames)
    x_NCHW = _middle(decoder.mid_block, x_NCHW, frames)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x_NCHW = _residual(resnet, x_NCHW, frames)
        if block.upsamplers is not None:
            x_NCHW, frames = _double(block.upsamplers[0], x_NCHW, frames)
    x_NCHW = _conv(decoder.conv_out, F.silu(_norm(decoder.norm_out, x_NCHW)), frames)
    return unpatchify(_to_clips(x_NCHW, frames), patch_size=2).float()


def _to_images(x_BCTHW: torch.Tensor) -> tuple[torch.Tensor, int]:
    frames = x_BCTHW.shape[2]
    return x_BCTHW.transpose(1, 2).flatten(0, 1).contiguous(memory_format=torch.channels_last), frames


def _to_clips(x_NCHW: torch.Tensor, frames: int) -> torch.Tensor:
    return x_NCHW.unflatten(0, (-1, frames)).transpose(1, 2)


def _with_history(x_NCHW: torch.Tensor, frames: int) -> torch.Tensor:
    """Each frame's channels after those of the frame two before and one before it: [N, 3 C, H, W]."""
    x_BTCHW = x_NCHW.unflatten(0, (-1, frames))
    padded = F.pad(x_BTCHW, (0, 0, 0, 0, 0, 0, 2, 0))
    stacked = torch.cat([padded[:, :frames], padded[:, 1 : frames + 1], x_BTCHW], dim=2)
    return stacked.flatten(0, 1).contiguous(memory_format=torch.channels_last)


def _conv(conv: torch.nn.Conv3d, x_NCHW: torch.Tensor, frames: int) -> torch.Tensor:
    """A causal convolution, kernel (1 or 3) x k x k."""
    pad = conv.kernel_size[-1] // 2
    if conv.kernel_size[0] == 1 or frames == 1:  # a single frame has only zeros behind it
        return F.conv2d(x_NCHW, conv.weight[:, :, -1], conv.bias, padding=pad)
    weight = conv.weight.transpose(1, 2).flatten(1, 2)  # [out, time x in, k, k], as _with_history stacks
    return F.conv2d(_with_history(x_NCHW, frames), weight, conv.bias, padding=pad)


def _norm(norm, x_NCHW: torch.Tensor) -> torch.Tensor:
    gain = (norm.gamma.flatten() * norm.scale)[:, None, None]
    return F.normalize(x_NCHW.float(), dim=1).to(x_NCHW.dtype) * gain.to(x_NCHW.dtype)


def _residual(block: WanResidualBlock, x_NCHW: torch.Tensor, frames: int) -> torch.Tensor:
    shortcut = block.conv_shortcut
    kept = x_NCHW if isinstance(shortcut, torch.nn.Identity) else _conv(shortcut, x_NCHW, frames)
    x_NCHW = _conv(block.conv1, F.silu(_norm(block.norm1, x_NCHW)), frames)
    return kept + _conv(block.conv2, F.silu(_norm(block.norm2, x_NCHW)), frames)


def _middle(block, x_NCHW: torch.Tensor, frames: int) -> torch.Tensor:
    x_NCHW = _residual(block.resnets[0], x_NCHW, frames)
    x_NCHW = _attend(block.attentions[0], x_NCHW)
    return _residual(block.resnets[1], x_NCHW, frames)


def _attend(block: WanAttentionBlock, x_NCHW: torch.Tensor) -> torch.Tensor:
    """One head over the pixels of each frame; frames do not see each other here."""
    qkv = block.to_qkv(_norm(block.norm, x_NCHW)).flatten(2).transpose(1, 2)[:, None]
    query, key, value = (part.contiguous() for part in qkv.chunk(3, dim=-1))
    seen = F.scaled_dot_product_attention(query, key, value)[:, 0].transpose(1, 2)
    return x_NCHW + block.proj(seen.reshape(x_NCHW.shape).contiguous(memory_format=torch.channels_last))


def _halve(layer: WanResample, x_NCHW: torch.Tensor, frames: int) -> tuple[torch.Tensor, int]:
    """Half the size in space; in time the first frame stays and each later pair becomes one frame."""
    x_NCHW = layer.resample[1](F.pad(x_NCHW, (0, 1, 0, 1)))
    if frames == 1:
        return x_NCHW, 1
    x_BTCHW = x_NCHW.unflatten(0, (-1, frames))
    triples = torch.cat([x_BTCHW[:, 0:-2:2], x_BTCHW[:, 1:-1:2], x_BTCHW[:, 2::2]], dim=2)
    weight = layer.time_conv.weight.transpose(1, 2).flatten(1, 2)
    triples_NCHW = triples.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    pairs = F.conv2d(triples_NCHW, weight, layer.time_conv.bias).unflatten(0, (-1, frames // 2))
    return torch.cat([x_BTCHW[:, :1], pairs], dim=1).flatten(0, 1), 1 + frames // 2


def _double(layer: WanResample, x_NCHW: torch.Tensor, frames: int) -> tuple[torch.Tensor, int]:
    """Double the size in space; in time the first frame stays and each later frame becomes two.

    The later frames see zeros, not the first frame, as their past: the chunked original starts its cache after it.
    """
    if frames > 1:
        x_BTCHW = x_NCHW.unflatten(0, (-1, frames))
        later_NCHW = _with_history(x_BTCHW[:, 1:].flatten(0, 1), frames - 1)
        weight = layer.time_conv.weight.transpose(1, 2).flatten(1, 2)
        twice = F.conv2d(later_NCHW, weight, layer.time_conv.bias)  # [N, 2 C, H, W]: both new frames of each old one
        twice_BTCHW = twice.unflatten(1, (2, -1)).flatten(0, 1).unflatten(0, (-1, 2 * (frames - 1)))
        frames = 2 * frames - 1
        x_NCHW = torch.cat([x_BTCHW[:, :1], twice_BTCHW], dim=1).flatten(0, 1)
    larger = F.interpolate(x_NCHW, scale_factor=2.0, mode="nearest-exact")
    return layer.resample[1](larger.contiguous(memory_format=torch.channels_last)), frames


# ------------------------------------------------------------------------------------------------ files between stages


def save_weights(module: torch.nn.Module, path: Path, **metadata: str) -> None:
    """Half precision, as shipped: every stage hands on exactly what a user will load."""
    weights = {name: w.detach().to("cpu", torch.float16).contiguous() for name, w in module.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(path), metadata=metadata or None)


def load_weights(module: torch.nn.Module, path: Path) -> torch.nn.Module:
    module.load_state_dict({name: w.float() for name, w in load_file(str(path)).items()})
    return module


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True  # shapes hardly change while training, so let it choose the fastest kernels
    torch._dynamo.config.suppress_errors = True  # where compilation fails, go on uncompiled
