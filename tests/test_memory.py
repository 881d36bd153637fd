"""The formulas of memory, held to peaks that were measured on a GPU, and to what must hold of any."""

from dataclasses import replace

import pytest

from undercrank import families, memory
from undercrank.ledger import read_ledger as shipped
from undercrank.levers.decode import Decode
from undercrank.levers.offload import Offload
from undercrank.levers.text_trim import TextTrim
from undercrank.planner import case_of, load_spec, resolve, under
from undercrank.records import Case, Device, Lever, Machine, Request

GPU = Device(kind="cuda", name="NVIDIA H200", capability=(9, 0), total_bytes=2**40, free_bytes=2**40)
MACHINE = Machine(name="m", devices=(GPU,), cpu_count=1)
WITHIN = 0.10


def case(model: str, width: int, height: int, num_frames: int, **fields: object) -> Case:
    family = families.family(model)
    asked = Request(
        model=model, width=width, height=height, num_frames=num_frames,
        image="cat.png" if "image_input" in family.traits else None, **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    resolved, _ = resolve(asked, family, GPU)
    return case_of(resolved, family, MACHINE, GPU, load_spec(family))


def without(case: Case, *roles: str) -> Case:
    """The pipelines that were measured were given embeddings, and had no text encoder."""
    return memory.dense(replace(case, weights={role: n for role, n in case.weights.items() if role not in roles}))


def close(estimate: int, measured: float) -> bool:
    return abs(estimate - measured) <= WITHIN * measured


def row(id: str) -> int:
    found = next(row for row in shipped().rows if row.id == id)
    assert found.peak_bytes
    return found.peak_bytes


def test_denoising_of_cogvideox_2b_is_what_was_measured() -> None:
    denoise = memory.peaks(without(case("cogvideox-2b", 720, 480, 49), "text_encoder"))["denoise"]
    assert close(denoise, row("d091105883dd")) and close(denoise, row("fd8d71687031"))


def test_denoising_of_wan_1_3b_is_what_was_measured() -> None:
    denoise = memory.peaks(without(case("wan2.1-1.3b", 416, 240, 17), "text_encoder"))["denoise"]
    assert close(denoise, row("a30301bba091"))


def test_denoising_of_hunyuanvideo_15_at_720p_is_what_was_measured_with_its_mask_and_without() -> None:
    stock = without(case("hunyuanvideo-1.5-720p", 1280, 720, 33), "text_encoder")
    assert close(memory.peaks(stock)["denoise"], 23.2 * 2**30)  # docs/evidence.md
    assert close(memory.peaks(under(stock, [TextTrim()]))["denoise"], 19.0 * 2**30)


def test_a_whole_run_of_hunyuanvideo_15_at_480p_peaks_in_its_decode_as_was_measured() -> None:
    peaks = memory.peaks(case("hunyuanvideo-1.5-480p", 848, 480, 33))
    assert max(peaks, key=lambda stage: peaks[stage]) == "decode"
    assert close(peaks["decode"], row("h200-hunyuanvideo-1.5-480p-run"))


@pytest.mark.parametrize(
    ("model", "size", "measured"),
    [("hunyuanvideo-1.5-720p", (1280, 720, 33), 58.3e9), ("wan2.1-14b", (832, 480, 81), 5.2e9)],
)
def test_a_vae_alone_decodes_in_what_was_measured_in_bfloat16(
    model: str, size: tuple[int, int, int], measured: float
) -> None:
    alone = without(case(model, *size), "text_encoder", "transformer")
    assert close(alone.weights["vae"] + memory.decode_bytes(alone, memory.decoder(alone.family), 2), measured)


STREAMED: tuple[Lever, ...] = (TextTrim(), Decode())


@pytest.mark.parametrize(
    ("model", "size", "levers", "denoise_gib", "decode_gib"),
    [
        ("hunyuanvideo-1.5-720p", (1280, 720, 33), (), 23.203, 69.616),
        ("hunyuanvideo-1.5-720p", (1280, 720, 33), STREAMED, 19.451, 28.300),
        ("hunyuanvideo-1.5-480p", (848, 480, 33), (), 19.350, 40.759),
        ("hunyuanvideo-1.5-480p", (848, 480, 33), STREAMED, 18.597, 22.509),
        ("wan2.1-14b", (832, 480, 81), (), 30.545, 31.433),
        ("wan2.1-14b", (832, 480, 81), (Decode(),), 30.546, 30.605),
        ("cogvideox-2b", (720, 480, 49), (), 4.676, 18.642),
        ("cogvideox-2b", (480, 320, 25), (), 4.095, 10.459),  # nothing was fitted to this size
        ("ltx-video", (768, 512, 161), (), 4.942, 10.374),
        ("ltx-video", (704, 480, 97), (), 4.703, 7.523),  # nor to this
    ],
)
def test_the_peaks_of_a_run_with_denoiser_and_vae_resident_are_what_was_measured(
    model: str, size: tuple[int, int, int], levers: tuple[Lever, ...], denoise_gib: float, decode_gib: float
) -> None:
    """docs/evidence.md, "Memory, stage by stage"; guidance off, the VAE in the run's dtype. What decoding takes is held
    to the measured peak without the weights, which would hide it."""
    stock = without(case(model, *size, guidance_scale=1.0), "text_encoder")
    engaged = under(stock, levers)
    how = memory.STREAM if Decode() in levers else memory.decoder(stock.family)
    weights = sum(stock.weights.values())
    assert close(memory.peaks(engaged)["denoise"], denoise_gib * 2**30)
    assert memory.decode_bytes(engaged, how, 2) == pytest.approx(decode_gib * 2**30 - weights, rel=0.05)


def test_a_vae_that_is_kept_in_float32_is_counted_so() -> None:
    wan, hunyuan = case("wan2.1-14b", 832, 480, 81), case("hunyuanvideo-1.5-720p", 832, 480, 81)
    for each, value_bytes in ((wan, 4), (hunyuan, 2)):
        how = memory.decoder(each.family)
        assert each.working["decode"] == memory.decode_bytes(each, how, value_bytes)


def test_decoding_in_chunks_takes_less_than_15_gb_for_33_frames_and_little_more_for_121() -> None:
    short, long = (
        without(case("hunyuanvideo-1.5-720p", 1280, 720, frames), "text_encoder", "transformer") for frames in (33, 121)
    )
    chunked = [memory.peaks(under(each, [Decode()]))["decode"] for each in (short, long)]
    assert chunked[0] < 15e9 and chunked[1] - chunked[0] < 1.5e9
    assert memory.peaks(long)["decode"] > 3 * memory.peaks(short)["decode"] / 1.1


@pytest.mark.parametrize("model", [row.id for row in families.FAMILIES if "video_input" not in row.traits])
def test_every_family_has_three_stages_and_each_holds_the_weights(model: str) -> None:
    family = families.family(model)
    peaks = memory.peaks(case(model, family.width, family.height, family.num_frames))
    assert tuple(peaks) == memory.STAGES
    weights = family.transformer_params + family.text_encoder_params + family.vae_params
    assert all(count > weights * 2 for count in peaks.values())


def test_offload_holds_in_a_stage_what_computes_in_it() -> None:
    dense = case("wan2.2-a14b", 832, 480, 81)
    held = under(dense, [Offload(mode="model")]).held
    assert held["text"] == {**dict.fromkeys(dense.weights, 0), "text_encoder": dense.weights["text_encoder"]}
    assert held["denoise"]["transformer"] == dense.weights["transformer"] // 2  # one of its two experts
    assert held["decode"]["vae"] == dense.weights["vae"] and held["decode"]["transformer"] == 0


def test_of_a_model_of_unknown_size_nothing_is_said() -> None:
    unknown = replace(case("wan2.1-14b", 832, 480, 81), weights={})
    assert memory.peaks(memory.dense(unknown)) == {}
