"""What a run holds beside its weights, by formula: reading the prompt, denoising, decoding. Without torch.

A formula counts tensors that are alive at once, in multiples of one that the stage is full of. The multiples were read
from measured peaks (`docs/evidence.md`, and the ledger's rows: the tests hold the formulas to them), and where a
decoder was not measured its row says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from undercrank import families
from undercrank.records import Case, Family, Lever, Record

STAGES = ("text", "denoise", "decode")
"In the order of a run."

ROLE_OF_STAGE = {"text": "text_encoder", "denoise": "transformer", "decode": "vae"}
"The component that computes in each."

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}

BASE = 2**27
"What a run on an accelerator holds whatever its size: work space of cuBLAS and cuDNN, embeddings, tables."

DENOISE_UNITS = 12
"""Tensors of (tokens x width) alive in a block: its input, normalised input, q, k, v, the attention's output, and a
feed-forward four times as wide before and after its activation."""

TEXT_UNITS = 20
"Tensors of (text tokens x width): some encoders keep the states of all layers. Small beside an encoder's weights."

TEXT_LAYERS = 350
"An encoder's parameters over its width squared, as of UMT5-XXL and Qwen2.5-VL-7B."

MASK_BYTES = 3.4
"For each pair of tokens, where stock builds a mask over all of them: the mask, and its copies for attention."

MASKED_TEXT = {"HunyuanVideo15Pipeline": 1000 + 256 + 729, "HunyuanVideo15ImageToVideoPipeline": 1000 + 256 + 729}
"Pipelines whose stock blocks build such a mask, and the places for text and picture that it covers too."

FILM_CHANNELS = 3


WAN_VAE = frozenset(
    {
        "WanPipeline",
        "WanImageToVideoPipeline",
        "SkyReelsV2Pipeline",
        "SkyReelsV2DiffusionForcingPipeline",
        "Cosmos2_5_PredictBasePipeline",
    }
)
"Pipelines whose VAE is loaded in float32 whatever the run's dtype, as its authors ask."


@dataclass(frozen=True, kw_only=True)
class Decoder(Record):
    """How a VAE decodes. One unit: the frames at once x pixels x `Family.vae_width` values."""

    units: float
    "Tensors of that size alive at once."
    frames: int | None
    "Decoded at once; None: the whole film."
    history: float = 0.0
    "Values of earlier frames that stay for each pixel of a frame, in multiples of `Family.vae_width`."
    is_measured: bool = False


WAN_LIKE = Decoder(units=8.5, frames=4, history=25.0, is_measured=True)
OTHER = Decoder(units=8.0, frames=None)
LTX = Decoder(units=5.5, frames=None, is_measured=True)
COGVIDEOX = Decoder(units=19.0, frames=8, history=27.0, is_measured=True)
"Its norms read the latents again, at the size of what they norm."
STREAM = Decoder(units=4.5, frames=5, history=23.0, is_measured=True)
"Under the lever `decode`: a first chunk of five frames."

DECODERS = {
    "HunyuanVideo15Pipeline": Decoder(units=7.0, frames=None, is_measured=True),
    "HunyuanVideo15ImageToVideoPipeline": Decoder(units=7.0, frames=None, is_measured=True),
    **dict.fromkeys(WAN_VAE, WAN_LIKE),
    "CogVideoXPipeline": COGVIDEOX,
    "CogVideoXImageToVideoPipeline": COGVIDEOX,
    "LTXPipeline": LTX,
    "LTXImageToVideoPipeline": LTX,
    "MochiPipeline": Decoder(units=9.0, frames=18, history=25.0),
    "HunyuanVideoPipeline": Decoder(units=8.0, frames=17),
    "HunyuanVideoImageToVideoPipeline": Decoder(units=8.0, frames=17),
    "Kandinsky5T2VPipeline": Decoder(units=8.0, frames=17),
    "Kandinsky5I2VPipeline": Decoder(units=8.0, frames=17),
}
"By pipeline class, as shipped."


def working(case: Case) -> dict[str, int]:
    """Bytes of each stage beside the weights, as shipped."""
    return {
        "text": text_bytes(case),
        "denoise": denoise_bytes(case),
        "decode": decode_bytes(case, decoder(case.family)),
    }


def decoder(family: Family) -> Decoder:
    return DECODERS.get(family.pipeline, OTHER)


def text_bytes(case: Case) -> int:
    tokens = (case.family.max_sequence_length or 1000) + MASKED_TEXT.get(case.family.pipeline, 0)
    width = math.isqrt(case.weights.get("text_encoder", 0) // _value(case) // TEXT_LAYERS)
    return _base(case) + _value(case) * tokens * width * TEXT_UNITS


def denoise_bytes(case: Case, *, is_masked: bool = True) -> int:
    """is_masked: False where the mask that stock builds is not built."""
    family = case.family
    texts = MASKED_TEXT.get(family.pipeline, 0)
    tokens = families.tokens(family, case.width, case.height, case.num_frames)
    places = tokens + max(texts, family.max_sequence_length or 0)
    films = 2 if family.branches == "batched" and case.guidance_scale > 1 else 1
    blocks = _value(case) * films * places * family.transformer_width * DENOISE_UNITS
    masks = int(MASK_BYTES * (tokens + texts) ** 2) if texts and is_masked else 0
    return _base(case) + blocks + masks


def decode_bytes(case: Case, how: Decoder, value_bytes: int | None = None) -> int:
    """The decoder's tensors, and the film twice: as it is put together, and as it is shown. value_bytes: of one value;
    None: as the product loads the VAE."""
    own = BYTES_PER_VALUE["float32"] if case.family.pipeline in WAN_VAE else _value(case)
    frames = case.num_frames if how.frames is None else min(case.num_frames, how.frames)
    frame = (value_bytes or own) * case.width * case.height
    decoder = int(frame * case.family.vae_width * (how.units * frames + how.history))
    return _base(case) + decoder + 2 * frame * FILM_CHANNELS * case.num_frames


def _base(case: Case) -> int:
    return 0 if case.device.kind == "cpu" else BASE


def _value(case: Case) -> int:
    return BYTES_PER_VALUE[case.dtype]


# --------------------------------------------------------------------------- what levers make of it


def dense(case: Case) -> Case:
    """The case with what its weights and stages take as shipped; `case.weights` is what the components take."""
    return replace(case, held=dict.fromkeys(STAGES, dict(case.weights)), working=working(case))


def under(case: Case, lever: Lever) -> Case:
    """The case with this lever on."""
    held = {
        stage: dict(lever.holds(replace(case, weights=weights, stage=stage))) for stage, weights in case.held.items()
    }
    return replace(
        case,
        engaged=(*case.engaged, lever.name),
        weights=dict(lever.holds(case)),
        held=held,
        working=dict(lever.works(case)),
    )


def peaks(case: Case) -> dict[str, int]:
    """Bytes of each stage: weights that are held then, and what it needs besides. Empty: the weights are unknown."""
    if not case.weights:
        return {}
    return {stage: sum(weights.values()) + case.working[stage] for stage, weights in case.held.items()}


def peak(case: Case) -> int:
    return max(peaks(case).values(), default=0)
