"""The table of model families: one row of facts per checkpoint, and the questions that the facts answer.

Can this size be made? How many tokens is it? Was the checkpoint trained on it? Nothing here needs torch: a
request is judged before any weight is read.

Sources of a row: the pipeline's own `__call__` defaults and examples in diffusers 0.42.1, the class's
published configuration, the model card. Parameter counts were counted from the configurations, on the meta
device: `transformer_params` is the sum over all experts, `text_encoder_params` the sum over every encoder
of a condition (text and image). 0 means unknown. `size_multiple` is VAE stride x patch, which is sometimes
stricter than the pipeline's own check: CogVideoX and Mochi accept multiples of 8 and then fail in the run, Wan 2.2 TI2V
accepts multiples of 16 and HunyuanVideo-1.5 anything, and both make a smaller clip than asked for.

Traits: any_aspect (trained on an area rather than on a shape), audio, cache_context (the pipeline names its
branches), control_input, diffusion_forcing, dynamic_cfg (takes `use_dynamic_cfg`), embedded_guidance (the scale is an
input of the denoiser: one call a step), expand_timesteps, flow_shift (its scheduler's shift can be set), guider (the
scale lives in `pipe.guider`), image_input, no_callback (takes no `callback_on_step_end`), one_size (runs at its
trained sizes only), size_from_image (takes no width and height), narrow (no layer is 512 features wide both ways),
toy_domain (its note is said before each run), two_experts, video_input.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import replace
from fractions import Fraction

from undercrank.records import BadInput, Family, shown

MAX_SIDE = 8192
"Longest side in pixels that is taken for a wish rather than for a slip."
MAX_FRAMES = 10_001
"Longest clip, for the same reason: seven minutes at 24 frames a second."

_RENAMED = {"thudm": "zai-org"}
"Hub organisations that moved: both names find the row."


def _buckets(base: int, multiple: int = 16, most: float = 4.0) -> tuple[tuple[int, int], ...]:
    """HunyuanVideo-1.5's list of trained sizes: every shape of about base x base pixels, on the lattice."""
    area = round((base / multiple) ** 2)
    sizes, wide, high = [], area, 1
    while wide > 0:
        if max(wide, high) / min(wide, high) <= most:
            sizes.append((wide * multiple, high * multiple))
        if (high + 1) * wide <= area:
            high += 1
        else:
            wide -= 1
    return tuple(sizes)


def _both(*sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Each size lying and standing."""
    return tuple(dict.fromkeys(shape for w, h in sizes for shape in ((w, h), (h, w))))


_WAN_NEGATIVE = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, "
    "overall gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, "
    "poorly drawn hands, poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, "
    "still picture, messy background, three legs, many people in the background, walking backwards"
)
_COSMOS_NEGATIVE = (
    "The video captures a series of frames showing ugly scenes, static with no motion, motion blur, "
    "over-saturation, shaky footage, low resolution, grainy texture, pixelated images, poorly lit areas, "
    "underexposed and overexposed scenes, poor color balance, washed out colors, choppy sequences, "
    "jerky movements, low frame rate, artifacting, color banding, unnatural transitions, "
    "outdated special effects, fake elements, unconvincing visuals, poorly edited content, jump cuts, "
    "visual noise, and flickering. Overall, the video is of poor quality."
)
_KANDINSKY_NEGATIVE = (
    "Static, 2D cartoon, cartoon, 2d animation, paintings, images, worst quality, low quality, ugly, "
    "deformed, walking backwards"
)
_LTX_NEGATIVE = "worst quality, inconsistent motion, blurry, jittery, distorted"

# --------------------------------------------------------------------------- Wan and what is built on it

_WAN = Family(
    id="wan2.1-14b",
    title="Wan 2.1 14B",
    repo="Wan-AI/Wan2.1-T2V-14B-Diffusers",
    pipeline="WanPipeline",
    task="t2v",
    size_multiple=16,
    frame_step=4,
    width=1280,
    height=720,
    num_frames=81,
    fps=Fraction(16),
    num_inference_steps=50,
    guidance_scale=5.0,
    max_sequence_length=512,
    negative_prompt=_WAN_NEGATIVE,
    trained_sizes=_both((1280, 720), (832, 480)),
    max_trained_frames=81,
    branch_names=("cond", "uncond"),
    traits=frozenset({"cache_context", "flow_shift"}),
    transformer_params=14_288_491_584,
    text_encoder_params=5_680_910_336,
    vae_params=126_892_531,
    transformer_width=5120,
    note="The authors set the scheduler's flow_shift to 5.0 for 720p and 3.0 for 480p, and keep the VAE in float32.",
)
_CLIP_H = 630_766_080
_WAN_I2V = replace(
    _WAN,
    pipeline="WanImageToVideoPipeline",
    task="i2v",
    traits=_WAN.traits | {"image_input", "any_aspect"},
    transformer_params=16_394_878_784,
    text_encoder_params=_WAN.text_encoder_params + _CLIP_H,
)
_A14B = replace(
    _WAN,
    num_inference_steps=40,
    guidance_scale=4.0,
    traits=_WAN.traits | {"two_experts"},
    transformer_params=2 * 14_288_491_584,
)
_FLIPBOOK = replace(
    _WAN,
    id="flipbook",
    title="flipbook",
    repo="package:flipbook",
    width=128,
    height=128,
    num_frames=33,
    num_inference_steps=25,
    max_sequence_length=64,
    negative_prompt=None,
    trained_sizes=((128, 128), (160, 96), (96, 160)),
    max_trained_frames=33,
    dtype="float32",
    transformer_params=9_900_000,
    text_encoder_params=1_480_000,
    vae_params=3_270_000,
    transformer_width=256,
    vae_width=6,
    traits=_WAN.traits | {"toy_domain", "narrow"},
    note="flipbook knows shapes, colours, backgrounds and motions; any other prompt is answered by the nearest "
    "thing it knows",
)
_SKYREELS = replace(
    _WAN,
    id="skyreels-v2-14b",
    title="SkyReels-V2 14B",
    repo="Skywork/SkyReels-V2-T2V-14B-540P-Diffusers",
    pipeline="SkyReelsV2Pipeline",
    width=960,
    height=544,
    num_frames=97,
    fps=Fraction(24),
    guidance_scale=6.0,
    negative_prompt=None,
    trained_sizes=((960, 544),),
    max_trained_frames=97,
    note="The authors set flow_shift to 8.0. The -720P- repository is for 1280x720, 121 frames.",
)
_SKYREELS_DF = replace(
    _SKYREELS,
    id="skyreels-v2-14b-df",
    title="SkyReels-V2 14B diffusion forcing",
    repo="Skywork/SkyReels-V2-DF-14B-540P-Diffusers",
    pipeline="SkyReelsV2DiffusionForcingPipeline",
    num_inference_steps=30,
    max_trained_frames=None,
    traits=_SKYREELS.traits | {"diffusion_forcing"},
    note="Longer than 97 frames works in overlapping windows: pass overlap_history. With ar_step > 0 "
    "the loop has more iterations than num_inference_steps. Counted without sample-info "
    "embeddings.",
)

_WAN_ROWS = (
    _FLIPBOOK,
    replace(
        _WAN,
        id="wan2.1-1.3b",
        title="Wan 2.1 1.3B",
        repo="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        width=832,
        height=480,
        trained_sizes=_both((832, 480)),
        transformer_params=1_418_996_800,
        transformer_width=1536,
        note="The authors set the scheduler's flow_shift to 3.0 for 480p, and keep the VAE in float32.",
    ),
    _WAN,
    replace(
        _WAN_I2V,
        id="wan2.1-14b-480p-i2v",
        title="Wan 2.1 14B 480p I2V",
        repo="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        width=832,
        height=480,
        trained_sizes=_both((832, 480)),
    ),
    replace(
        _WAN_I2V,
        id="wan2.1-14b-720p-i2v",
        title="Wan 2.1 14B 720p I2V",
        repo="Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        trained_sizes=_both((1280, 720)),
    ),
    replace(
        _WAN,
        id="wan2.2-ti2v-5b",
        title="Wan 2.2 TI2V 5B",
        repo="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        size_multiple=32,
        height=704,
        num_frames=121,
        fps=Fraction(24),
        trained_sizes=_both((1280, 704)),
        max_trained_frames=121,
        traits=_WAN.traits | {"expand_timesteps"},
        transformer_params=4_999_787_712,
        vae_params=704_688_668,
        transformer_width=3072,
        vae_width=64,
        spatial_stride=16,
        note="720p means 704 rows here: its VAE shrinks by 16, so sizes are multiples of 32. The same"
        " weights do image-to-video in WanImageToVideoPipeline.",
    ),
    replace(
        _A14B,
        id="wan2.2-a14b",
        title="Wan 2.2 A14B",
        repo="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        note="Two experts, one per part of the noise range (boundary_ratio 0.875); the authors use a "
        "guidance of 3.0 for the second one (guidance_scale_2).",
    ),
    replace(
        _A14B,
        id="wan2.2-a14b-i2v",
        title="Wan 2.2 A14B I2V",
        repo="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        pipeline="WanImageToVideoPipeline",
        task="i2v",
        guidance_scale=3.5,
        traits=_A14B.traits | {"image_input", "any_aspect"},
        transformer_params=2 * 14_288_901_184,
        note="Two experts (boundary_ratio 0.9), no image encoder: the picture enters through the latents.",
    ),
    replace(
        _SKYREELS_DF,
        id="skyreels-v2-1.3b",
        title="SkyReels-V2 1.3B diffusion forcing",
        repo="Skywork/SkyReels-V2-DF-1.3B-540P-Diffusers",
        transformer_params=1_435_525_696,
        transformer_width=1536,
        note="The only 1.3B text-to-video repository in diffusers layout is the diffusion-forcing one. "
        + _SKYREELS_DF.note.partition(" Counted")[0],
    ),
    _SKYREELS,
    _SKYREELS_DF,
)

# --------------------------------------------------------------------------- HunyuanVideo

_HV15 = Family(
    id="hunyuanvideo-1.5-480p",
    title="HunyuanVideo-1.5 480p",
    repo="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    pipeline="HunyuanVideo15Pipeline",
    task="t2v",
    size_multiple=16,
    frame_step=4,
    width=848,
    height=480,
    num_frames=121,
    fps=Fraction(24),
    num_inference_steps=50,
    guidance_scale=6.0,
    trained_sizes=_buckets(640),
    max_trained_frames=241,
    branches="guider",
    branch_names=("pred_cond", "pred_uncond"),
    traits=frozenset({"cache_context", "flow_shift", "guider", "no_callback"}),
    transformer_cache_quality="quality",
    transformer_params=8_326_608_160,
    text_encoder_params=7_070_619_136 + 219_314_944,
    vae_params=1_260_634_115,
    transformer_width=2048,
    vae_width=128,
    spatial_stride=16,
    patch=(1, 1, 1),
    note="The guidance scale lives in pipe.guider; the pipeline takes neither guidance_scale nor a "
    "callback. 1000 + 256 text tokens, fixed.",
)
_HV15_I2V = replace(
    _HV15,
    pipeline="HunyuanVideo15ImageToVideoPipeline",
    task="i2v",
    traits=_HV15.traits | {"image_input", "size_from_image"},
    text_encoder_params=_HV15.text_encoder_params + 428_225_600,
    note="The size is that of the trained list which is nearest to the picture's shape: no width and height.",
)
_HV = Family(
    id="hunyuanvideo",
    title="HunyuanVideo",
    repo="hunyuanvideo-community/HunyuanVideo",
    pipeline="HunyuanVideoPipeline",
    task="t2v",
    size_multiple=16,
    frame_step=4,
    width=1280,
    height=720,
    num_frames=129,
    fps=Fraction(24),
    num_inference_steps=50,
    guidance_scale=6.0,
    max_sequence_length=256,
    trained_sizes=_both((1280, 720), (1104, 832), (960, 960), (960, 544), (832, 624), (720, 720)),
    max_trained_frames=129,
    branches="single",
    branch_names=("cond", "uncond"),
    traits=frozenset({"cache_context", "embedded_guidance", "flow_shift"}),
    transformer_params=12_821_012_544,
    text_encoder_params=7_505_186_816 + 123_060_480,
    vae_params=246_478_803,
    transformer_width=3072,
    vae_width=128,
    note="Guidance is an input of the denoiser; the second branch runs only with true_cfg_scale > 1.",
)

_HUNYUAN_ROWS = (
    _HV15,
    replace(
        _HV15,
        id="hunyuanvideo-1.5-720p",
        title="HunyuanVideo-1.5 720p",
        repo="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        width=1280,
        height=720,
        trained_sizes=_buckets(960),
    ),
    replace(
        _HV15_I2V,
        id="hunyuanvideo-1.5-480p-i2v",
        title="HunyuanVideo-1.5 480p I2V",
        repo="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
    ),
    replace(
        _HV15_I2V,
        id="hunyuanvideo-1.5-720p-i2v",
        title="HunyuanVideo-1.5 720p I2V",
        repo="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
        width=1280,
        height=720,
        trained_sizes=_buckets(960),
    ),
    _HV,
    replace(
        _HV,
        id="hunyuanvideo-i2v",
        title="HunyuanVideo I2V",
        repo="hunyuanvideo-community/HunyuanVideo-I2V",
        pipeline="HunyuanVideoImageToVideoPipeline",
        task="i2v",
        branch_names=(),
        traits=frozenset({"embedded_guidance", "flow_shift", "image_input"}),
        text_encoder_params=8_355_272_704 + 123_060_480,
        note="Names no branches; a second call runs only with true_cfg_scale > 1. The -33ch "
        "repository is a different model without embedded guidance.",
    ),
)

# --------------------------------------------------------------------------- LTX

_LTX = Family(
    id="ltx-video",
    title="LTX-Video",
    repo="Lightricks/LTX-Video",
    pipeline="LTXPipeline",
    task="t2v",
    size_multiple=32,
    frame_step=8,
    width=704,
    height=480,
    num_frames=161,
    fps=Fraction(25),
    num_inference_steps=50,
    guidance_scale=3.0,
    max_sequence_length=128,
    negative_prompt=_LTX_NEGATIVE,
    max_trained_frames=257,
    branches="batched",
    branch_names=("cond_uncond",),
    traits=frozenset({"cache_context"}),
    transformer_params=1_923_385_472,
    text_encoder_params=4_762_310_656,
    vae_params=419_193_649,
    transformer_width=2048,
    vae_width=8,
    temporal_stride=8,
    spatial_stride=32,
    patch=(1, 1, 1),
    note="The authors promise most below 1280x720 and 257 frames.",
)
_LTX2 = replace(
    _LTX,
    id="ltx-2",
    title="LTX-2",
    repo="Lightricks/LTX-2",
    pipeline="LTX2Pipeline",
    width=768,
    height=512,
    num_frames=121,
    fps=Fraction(24),
    num_inference_steps=30,
    max_sequence_length=1024,
    max_trained_frames=None,
    branch_names=("cond_uncond", "uncond_stg", "uncond_modality"),
    traits=frozenset({"cache_context", "audio"}),
    transformer_params=18_876_174_592,
    text_encoder_params=12_202_563_392,
    vae_params=1_222_479_601,
    transformer_width=4096,
    vae_width=8,
    note="Makes sound too. By the pipeline's defaults each step has three calls: both CFG branches in"
    " one, then a perturbed one (stg_scale) and one without the other modality (modality_scale).",
)

_LTX_ROWS = (
    _LTX,
    replace(
        _LTX,
        id="ltx-video-i2v",
        title="LTX-Video I2V",
        pipeline="LTXImageToVideoPipeline",
        task="i2v",
        traits=_LTX.traits | {"image_input"},
    ),
    _LTX2,
    replace(
        _LTX2,
        id="ltx-2-i2v",
        title="LTX-2 I2V",
        pipeline="LTX2ImageToVideoPipeline",
        task="i2v",
        traits=_LTX2.traits | {"image_input"},
    ),
)

# --------------------------------------------------------------------------- CogVideoX

_COG = Family(
    id="cogvideox-5b",
    title="CogVideoX 5B",
    repo="zai-org/CogVideoX-5b",
    pipeline="CogVideoXPipeline",
    task="t2v",
    size_multiple=16,
    frame_step=8,
    width=720,
    height=480,
    num_frames=49,
    fps=Fraction(8),
    num_inference_steps=50,
    guidance_scale=6.0,
    max_sequence_length=226,
    trained_sizes=((720, 480),),
    max_trained_frames=49,
    branches="batched",
    branch_names=("cond_uncond",),
    traits=frozenset({"cache_context", "dynamic_cfg"}),
    transformer_params=5_570_283_072,
    text_encoder_params=4_762_310_656,
    vae_params=215_583_907,
    transformer_width=3072,
    vae_width=128,
    note="The VAE decodes latent frames two by two, and only an odd number gives back the frames asked for: the "
    "pipeline takes 5 frames and returns 8.",
)
_COG15 = replace(
    _COG,
    id="cogvideox-1.5-5b",
    title="CogVideoX 1.5 5B",
    repo="zai-org/CogVideoX1.5-5B",
    width=1360,
    height=768,
    num_frames=81,
    fps=Fraction(16),
    trained_sizes=((1360, 768),),
    max_trained_frames=161,
    transformer_params=5_570_676_352,
    patch=(2, 2, 2),
    note="The authors ask for 16k+1 frames. An odd number of latent frames is padded, and the surplus dropped "
    "before decoding.",
)

_COG_ROWS = (
    replace(
        _COG,
        id="cogvideox-2b",
        title="CogVideoX 2B",
        repo="zai-org/CogVideoX-2b",
        dtype="float16",
        transformer_params=1_693_783_872,
        transformer_width=1920,
        note="Its scheduler is DDIM, the larger ones' is DPM. " + _COG.note,
    ),
    _COG,
    replace(
        _COG,
        id="cogvideox-5b-i2v",
        title="CogVideoX 5B I2V",
        repo="zai-org/CogVideoX-5b-I2V",
        pipeline="CogVideoXImageToVideoPipeline",
        task="i2v",
        traits=_COG.traits | {"image_input", "one_size"},
        transformer_params=5_570_479_680,
        note="Its positions are learned, for 720x480 and 49 frames: another size is an error in the run, another "
        "length runs on computed positions. " + _COG.note,
    ),
    replace(
        _COG,
        id="cogvideox-5b-v2v",
        title="CogVideoX 5B V2V",
        pipeline="CogVideoXVideoToVideoPipeline",
        task="v2v",
        traits=_COG.traits | {"video_input"},
        note="The length is the input video's; strength < 1 shortens the loop. " + _COG.note,
    ),
    replace(
        _COG,
        id="cogvideox-5b-control",
        title="CogVideoX-Fun 5B Control",
        repo="alibaba-pai/CogVideoX-Fun-V1.1-5b-Pose",
        pipeline="CogVideoXFunControlPipeline",
        task="control",
        trained_sizes=(),
        traits=_COG.traits | {"control_input", "video_input"},
        transformer_params=5_570_479_680,
        note="The length is the control video's. Trained at several sizes, of which no list is published.",
    ),
    _COG15,
    replace(
        _COG15,
        id="cogvideox-1.5-5b-i2v",
        title="CogVideoX 1.5 5B I2V",
        repo="zai-org/CogVideoX1.5-5B-I2V",
        pipeline="CogVideoXImageToVideoPipeline",
        task="i2v",
        trained_sizes=_both(*((side, 768) for side in range(1360, 767, -16))),
        traits=_COG15.traits | {"image_input"},
        transformer_params=5_571_594_880,
        note="Trained with the short side 768 and the long one up to 1360. " + _COG15.note,
    ),
)

# --------------------------------------------------------------------------- others

_KANDINSKY = Family(
    id="kandinsky5-lite",
    title="Kandinsky 5.0 Lite",
    repo="kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
    pipeline="Kandinsky5T2VPipeline",
    task="t2v",
    size_multiple=16,
    frame_step=4,
    width=768,
    height=512,
    num_frames=121,
    fps=Fraction(24),
    num_inference_steps=50,
    guidance_scale=5.0,
    max_sequence_length=512,
    negative_prompt=_KANDINSKY_NEGATIVE,
    trained_sizes=((768, 512), (512, 768), (512, 512)),
    max_trained_frames=121,
    transformer_params=2_007_702_848,
    text_encoder_params=8_292_166_656 + 123_060_480,
    vae_params=246_478_803,
    transformer_width=1792,
    note="Names no branches. The 10 s repositories use sparse attention and need multiples of 128.",
)

_OTHER_ROWS = (
    Family(
        id="mochi",
        title="Mochi 1",
        repo="genmo/mochi-1-preview",
        pipeline="MochiPipeline",
        task="t2v",
        size_multiple=16,
        frame_step=6,
        width=848,
        height=480,
        num_frames=85,
        fps=Fraction(30),
        num_inference_steps=64,
        guidance_scale=4.5,
        max_sequence_length=256,
        trained_sizes=((848, 480),),
        max_trained_frames=163,
        branches="batched",
        branch_names=("cond_uncond",),
        traits=frozenset({"cache_context"}),
        transformer_params=10_027_677_744,
        text_encoder_params=4_762_310_656,
        vae_params=459_748_611,
        transformer_width=3072,
        temporal_stride=6,
        note="The pipeline's own default is 19 frames.",
    ),
    Family(
        id="cosmos-2.5-2b",
        title="Cosmos Predict 2.5 2B",
        repo="nvidia/Cosmos-Predict2.5-2B",
        pipeline="Cosmos2_5_PredictBasePipeline",
        task="t2v",
        size_multiple=16,
        frame_step=4,
        width=1280,
        height=704,
        num_frames=93,
        fps=Fraction(16),
        num_inference_steps=36,
        guidance_scale=7.0,
        max_sequence_length=512,
        negative_prompt=_COSMOS_NEGATIVE,
        trained_sizes=((1280, 704),),
        max_trained_frames=93,
        transformer_params=2_059_174_912,
        text_encoder_params=8_292_166_656,
        vae_params=126_892_531,
        transformer_width=2048,
        note="The diffusers layout is on the revision diffusers/base/post-trained. The pipeline also "
        "takes an image or a video, needs torchvision, and by default the cosmos_guardrail "
        "package.",
    ),
    _KANDINSKY,
    replace(
        _KANDINSKY,
        id="kandinsky5-lite-i2v",
        title="Kandinsky 5.0 Lite I2V",
        repo="kandinskylab/Kandinsky-5.0-I2V-Lite-5s-Diffusers",
        pipeline="Kandinsky5I2VPipeline",
        task="i2v",
        traits=frozenset({"image_input"}),
        note="It takes statistics of the fifth latent frame onwards: clips of fewer than 17 frames are NaN.",
    ),
)

FAMILIES: tuple[Family, ...] = (*_WAN_ROWS, *_HUNYUAN_ROWS, *_LTX_ROWS, *_COG_ROWS, *_OTHER_ROWS)
"Every row. Where several share a repository or a pipeline class, the first is the general one."

# --------------------------------------------------------------------------- looking up


def _key(name: str) -> str:
    owner, slash, rest = name.strip().lower().partition("/")
    return _RENAMED.get(owner, owner) + slash + rest


def find(name: str) -> Family | None:
    """The row of that id or hub repository, in any case of letters; None where there is none."""
    key = _key(name)
    return next((f for f in FAMILIES if key in (f.id, f.repo.lower())), None)


def family(name: str) -> Family:
    """The row of that id or hub repository; refuses an unknown name with the three nearest ids."""
    row = find(name)
    if row is not None:
        return row
    ids = {f.id: f.id for f in FAMILIES} | {f.repo.lower(): f.id for f in FAMILIES if "/" in name}
    near = difflib.get_close_matches(_key(name), ids, n=3, cutoff=0.0)
    raise BadInput(f"unknown model {name!r}: nearest are {', '.join(ids[n] for n in near)}", field="model")


def of_pipeline(class_name: str, repo: str | None = None) -> Family | None:
    """The best row for a live pipeline: same class, and the same repository or folder name where one has it.

    A repository that no row has gets the first row of the class: its lattice holds, its defaults may not.
    """
    rows = [f for f in FAMILIES if f.pipeline == class_name]
    key = _key(repo or "").rstrip("/")
    for f in rows:
        if key and key.rpartition("/")[2] == f.repo.lower().rpartition("/")[2]:
            return f
    hub = [f for f in rows if not f.repo.startswith("package:")]
    return next(iter(hub or rows), None)


# --------------------------------------------------------------------------- sizes and lengths


def _whole(value: object, field: str, at_most: int) -> int:
    """`value` as a count, or a refusal. A bool and a float are no counts, though they compare like one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{field}={repr(value)[:60]}: must be a whole number", field=field)
    if value < 1:
        raise BadInput(f"{field}={shown(value)}: must be at least 1", field=field)
    if value > at_most:
        raise BadInput(f"{field}={shown(value)}: at most {at_most}", field=field)
    return value


def _nearest(value: int, step: int, least: int, at_most: int) -> tuple[int, int]:
    """The points least + k * step around a value, within bounds; equal where the value is one."""
    most = least + (at_most - least) // step * step
    low = least + (value - least) // step * step
    high = low if low == value else low + step
    if low < least:
        return (least, least + step)
    if high > most:
        return (most - step, most)
    return (low, high)


def nearest_sizes(family: Family, width: int, height: int) -> tuple[tuple[int, int], ...]:
    """The valid (width, height) next below and next above; one alone where the asked size is valid.

    Of a family that runs at its trained sizes only: those.
    """
    if "one_size" in family.traits:
        return family.trained_sizes
    wide = _nearest(width, family.size_multiple, family.size_multiple, MAX_SIDE)
    high = _nearest(height, family.size_multiple, family.size_multiple, MAX_SIDE)
    return tuple(dict.fromkeys(zip(wide, high, strict=True)))


_LEAST_FRAMES = {"Kandinsky5I2VPipeline": 17}
"It takes statistics of the fifth latent frame onwards: shorter clips are NaN."


def least_frames(family: Family) -> int:
    """The shortest clip that the pipeline can make."""
    return _LEAST_FRAMES.get(family.pipeline, 1)


def nearest_frames(family: Family, num_frames: int) -> tuple[int, ...]:
    """The valid lengths next below and next above; one alone where the asked length is valid."""
    return tuple(dict.fromkeys(_nearest(num_frames, family.frame_step, least_frames(family), MAX_FRAMES)))


def check_size(family: Family, width: int, height: int) -> None:
    """Refuses a size off the family's lattice, with the rule and the two nearest valid sizes.

    The rule is VAE stride x patch. Sides are at most `MAX_SIDE` pixels.
    """
    _whole(width, "width", MAX_SIDE)
    _whole(height, "height", MAX_SIDE)
    if "one_size" in family.traits and (width, height) not in family.trained_sizes:
        near = " or ".join(f"{w}x{h}" for w, h in family.trained_sizes)
        raise BadInput(f"{width}x{height}: {family.title} runs at its trained size only: {near}", field="size")
    multiple = family.size_multiple
    wrong = [name for name, side in (("width", width), ("height", height)) if side % multiple]
    if wrong:
        near = " or ".join(f"{w}x{h}" for w, h in nearest_sizes(family, width, height))
        text = f"{width}x{height}: {family.title} needs multiples of {multiple}: {near}"
        raise BadInput(text, field=wrong[0] if len(wrong) == 1 else "size")


_LEAST_STEPS = {
    "LTXPipeline": 2,  # one sigma cannot be stretched to the terminal one: an IndexError, or NaN
    "LTXImageToVideoPipeline": 2,
    "LTX2Pipeline": 2,
    "LTX2ImageToVideoPipeline": 2,
    "MochiPipeline": 2,  # half of the steps are linear, and none of one is a ZeroDivisionError
    "CogVideoXVideoToVideoPipeline": 2,  # strength 0.8 of one step is no step: a clip of no frames
}
MAX_STEPS = 1000
"The training steps of every scheduler in the table."


def least_steps(family: Family) -> int:
    """The fewest denoising steps that the pipeline can run."""
    return _LEAST_STEPS.get(family.pipeline, 1)


def check_steps(family: Family, num_inference_steps: int) -> None:
    """Refuses a number of steps that the family's scheduler or pipeline cannot run; at most `MAX_STEPS`."""
    least, steps = least_steps(family), num_inference_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or not least <= steps <= MAX_STEPS:
        text = f"{shown(steps)} steps: {family.title} takes a whole number from {least} to {MAX_STEPS}"
        raise BadInput(f"{text}; {family.num_inference_steps} are usual", field="num_inference_steps")


def check_frames(family: Family, num_frames: int) -> None:
    """Refuses a length off frame_step * k + 1, with the two nearest valid ones, or above `MAX_FRAMES`."""
    _whole(num_frames, "num_frames", MAX_FRAMES)
    step, least = family.frame_step, least_frames(family)
    if num_frames < least or (num_frames - 1) % step:
        near = " or ".join(str(n) for n in nearest_frames(family, num_frames))
        rule = f"a multiple of {step}, plus 1" + (f", from {least} on" if least > 1 else "")
        raise BadInput(f"{num_frames} frames: {family.title} needs {rule}: {near}", field="num_frames")


def latent_shape(family: Family, width: int, height: int, num_frames: int) -> tuple[int, int, int]:
    """Latent (frames, rows, columns) of a valid clip, before any padding to whole patches."""
    stride = family.spatial_stride
    return ((num_frames - 1) // family.temporal_stride + 1, height // stride, width // stride)


def tokens(family: Family, width: int, height: int, num_frames: int) -> int:
    """Video tokens in one forward of the denoiser: neither text nor audio."""
    latent = latent_shape(family, width, height, num_frames)
    return math.prod(math.ceil(side / patch) for side, patch in zip(latent, family.patch, strict=True))


# --------------------------------------------------------------------------- what it was trained on


def off_track(family: Family, width: int, height: int, num_frames: int) -> str | None:
    """The warning for a clip that the checkpoint was not trained on; None where it was or nobody knows."""
    doubts = []
    if not _trained_size(family, width, height):
        near = _some_sizes(family, width, height)
        doubts.append(f"{width}x{height} is not among the sizes it was trained on ({near})")
    if family.max_trained_frames is not None and num_frames > family.max_trained_frames:
        doubts.append(f"{num_frames} frames are more than the {family.max_trained_frames} it was trained on")
    if not doubts:
        return None
    return f"{family.title}: {'; '.join(doubts)}. It runs, but stripes, repeats or nonsense are likely."


def _trained_size(family: Family, width: int, height: int) -> bool:
    sizes = family.trained_sizes
    if not sizes or (width, height) in sizes:
        return True
    if "any_aspect" not in family.traits:
        return False
    # The authors fit the picture's shape into a trained area and round down: up to a tenth is lost.
    return any(0.9 * w * h <= width * height <= w * h for w, h in sizes)


def _some_sizes(family: Family, width: int, height: int, most: int = 4) -> str:
    """The trained sizes nearest to the asked one: HunyuanVideo-1.5 alone has 121."""

    def distance(size: tuple[int, int]) -> float:
        return math.hypot(math.log(size[0] / width), math.log(size[1] / height))

    near = sorted(family.trained_sizes, key=distance)[:most]
    rest = len(family.trained_sizes) - len(near)
    return ", ".join(f"{w}x{h}" for w, h in near) + (f" and {rest} more" if rest else "")
