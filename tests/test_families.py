"""The table of families: every row against diffusers' source, and the words of every refusal."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict as cosmos
from diffusers.pipelines.hunyuan_video1_5 import image_processor as hv15
from hypothesis import given
from hypothesis import strategies as st

from undercrank.families import (
    FAMILIES,
    MAX_FRAMES,
    MAX_SIDE,
    check_frames,
    check_size,
    check_steps,
    family,
    find,
    latent_shape,
    least_frames,
    nearest_frames,
    nearest_sizes,
    of_pipeline,
    off_track,
    tokens,
)
from undercrank.records import BadInput, Family

ROWS = pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.id)
TRAITS = {
    *("any_aspect", "audio", "cache_context", "control_input", "diffusion_forcing", "dynamic_cfg"),
    *(
        "embedded_guidance",
        "expand_timesteps",
        "flow_shift",
        "guider",
        "image_input",
        "narrow",
        "no_callback",
        "one_size",
        "toy_domain",
    ),
    *("size_from_image", "two_experts", "video_input"),
}


def call_of(row: Family) -> inspect.Signature:
    return inspect.signature(getattr(diffusers, row.pipeline).__call__)


# --------------------------------------------------------------------------- the rows


def test_ids_are_unique_and_lower_case() -> None:
    ids = [row.id for row in FAMILIES]
    assert len(set(ids)) == len(ids)
    assert all(name == name.lower() for name in ids)
    assert all(row.repo.count("/") == 1 or row.repo == "package:flipbook" for row in FAMILIES)


@ROWS
def test_defaults_obey_the_rows_own_rules(row: Family) -> None:
    check_size(row, row.width, row.height)
    check_frames(row, row.num_frames)
    check_steps(row, row.num_inference_steps)
    assert off_track(row, row.width, row.height, row.num_frames) is None
    for width, height in row.trained_sizes:
        check_size(row, width, height)


@ROWS
def test_words_are_from_the_known_sets(row: Family) -> None:
    assert row.task in ("t2v", "i2v", "v2v", "control")
    assert row.branches in ("sequential", "batched", "guider", "single")
    assert row.dtype in ("bfloat16", "float16", "float32")
    assert row.traits <= TRAITS
    assert row.size_multiple == row.spatial_stride * row.patch[1] == row.spatial_stride * row.patch[2]
    assert row.frame_step % row.temporal_stride == 0
    assert min(row.transformer_params, row.text_encoder_params, row.vae_params, row.transformer_width) > 0


@ROWS
def test_branch_names_are_those_of_the_source_in_call_order(row: Family) -> None:
    source = inspect.getsource(getattr(diffusers, row.pipeline).__call__)
    names = tuple(re.findall(r'cache_context\(\s*"(\w+)"', source))
    if row.branches == "guider":
        assert "cache_context(context_name" in source
        names = tuple(diffusers.ClassifierFreeGuidance._input_predictions)
    assert row.branch_names == names
    assert ("cache_context" in row.traits) == bool(names)


@ROWS
def test_arguments_of_the_pipeline_are_those_that_the_traits_promise(row: Family) -> None:
    takes = call_of(row).parameters
    assert ("max_sequence_length" in takes) == (row.max_sequence_length is not None)
    assert ("guidance_scale" not in takes) == ("guider" in row.traits)
    assert ("callback_on_step_end" not in takes) == ("no_callback" in row.traits)
    assert ("width" not in takes) == ("size_from_image" in row.traits)
    assert ("use_dynamic_cfg" in takes) == ("dynamic_cfg" in row.traits)
    assert ("num_frames" not in takes) == ("video_input" in row.traits)
    assert ("control_video" in takes) == ("control_input" in row.traits)
    assert "image" in takes or "image_input" not in row.traits


@ROWS
def test_text_length_is_the_pipelines_own_default(row: Family) -> None:
    if row.id != "flipbook" and row.max_sequence_length is not None:
        assert call_of(row).parameters["max_sequence_length"].default == row.max_sequence_length


def test_negative_prompts_that_pipelines_supply_are_copied_word_for_word() -> None:
    assert family("cosmos-2.5-2b").negative_prompt == cosmos.DEFAULT_NEGATIVE_PROMPT
    text = family("kandinsky5-lite").negative_prompt
    for name in ("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline"):
        assert f'negative_prompt = "{text}"' in inspect.getsource(getattr(diffusers, name).__call__)


@pytest.mark.parametrize(("name", "base"), [("hunyuanvideo-1.5-480p", 640), ("hunyuanvideo-1.5-720p", 960)])
def test_hunyuanvideo_15_sizes_are_the_pipelines_list(name: str, base: int) -> None:
    row = family(name)
    assert list(row.trained_sizes) == hv15.generate_crop_size_list(base_size=base, patch_size=16)
    processor = hv15.HunyuanVideo15ImageProcessor(vae_scale_factor=16)
    assert processor.calculate_default_height_width(9, 16, base) == (row.height, row.width)


@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("wan2.1-14b", "WanTransformer3DModel", {}),
        ("wan2.1-1.3b", "WanTransformer3DModel", {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}),
        ("hunyuanvideo-1.5-480p", "HunyuanVideo15Transformer3DModel", {}),
        ("hunyuanvideo", "HunyuanVideoTransformer3DModel", {}),
        ("ltx-video", "LTXVideoTransformer3DModel", {}),
        ("ltx-2", "LTX2VideoTransformer3DModel", {}),
        ("cogvideox-2b", "CogVideoXTransformer3DModel", {}),
        ("mochi", "MochiTransformer3DModel", {}),
    ],
)
def test_parameters_are_counted_from_the_configuration(name: str, model: str, options: dict[str, int]) -> None:
    with torch.device("meta"):
        module = getattr(diffusers, model)(**options)
    config, row = module.config, family(name)
    assert sum(weight.numel() for weight in module.parameters()) == row.transformer_params
    assert config.num_attention_heads * config.attention_head_dim == row.transformer_width


def test_the_table_needs_no_torch() -> None:
    code = "import undercrank.families, sys; sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------- looking up


@ROWS
def test_every_row_is_found_by_id_and_by_repository(row: Family) -> None:
    assert family(row.id) is row
    assert family(f" {row.id.upper()} ") is row
    assert family(row.repo.upper()).repo == row.repo


def test_moved_organisations_are_found_by_both_names() -> None:
    assert family("THUDM/CogVideoX-2b") is family("zai-org/CogVideoX-2b") is family("cogvideox-2b")


@pytest.mark.parametrize("name", ["wan2.1-1.4b", "Wan-AI/Wan2.1-T2V-15B", "", "xyz"])
def test_an_unknown_model_is_refused_with_three_near_ones(name: str) -> None:
    assert find(name) is None
    with pytest.raises(BadInput, match="unknown model") as caught:
        family(name)
    assert caught.value.field == "model"
    near = str(caught.value).partition("nearest are ")[2].split(", ")
    assert len(near) == 3 and all(find(n) for n in near)


def test_near_names_are_near() -> None:
    with pytest.raises(BadInput, match="wan2.1-1.3b"):
        family("wan2.1-1.4b")


@ROWS
def test_a_live_pipeline_finds_its_row(row: Family) -> None:
    found = of_pipeline(row.pipeline, row.repo)
    assert found is not None
    assert (found.pipeline, found.repo) == (row.pipeline, row.repo)
    assert of_pipeline(row.pipeline, f"/models/{row.repo.rpartition('/')[2]}/") is found


def test_a_pipeline_from_elsewhere_gets_the_general_row_of_its_class() -> None:
    assert of_pipeline("WanPipeline") is family("wan2.1-1.3b")
    assert of_pipeline("WanPipeline", "me/my-finetune") is family("wan2.1-1.3b")
    assert of_pipeline("CogVideoXVideoToVideoPipeline") is family("cogvideox-5b-v2v")
    assert of_pipeline("StableDiffusionPipeline") is None


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("name", "size", "field", "words"),
    [
        ("wan2.1-1.3b", (705, 480), "width", "705x480: Wan 2.1 1.3B needs multiples of 16: 704x480 or 720x480"),
        ("wan2.1-1.3b", (640, 360), "height", "640x352 or 640x368"),
        ("wan2.1-1.3b", (360, 640), "width", "352x640 or 368x640"),
        ("wan2.1-1.3b", (705, 481), "size", "704x480 or 720x496"),
        ("wan2.1-1.3b", (8, 8), "size", "16x16 or 32x32"),
        ("wan2.1-14b", (1920, 1080), "height", "1920x1072 or 1920x1088"),
        ("wan2.2-ti2v-5b", (1280, 720), "height", "multiples of 32: 1280x704 or 1280x736"),
        ("ltx-video", (960, 540), "height", "multiples of 32: 960x512 or 960x544"),
        ("cogvideox-2b", (728, 480), "width", "multiples of 16: 720x480 or 736x480"),
        ("mochi", (848, 488), "height", "multiples of 16: 848x480 or 848x496"),
        ("cogvideox-5b-i2v", (848, 480), "size", "848x480: CogVideoX 5B I2V runs at its trained size only: 720x480"),
        ("wan2.1-1.3b", (0, 32), "width", "width=0: must be at least 1"),
        ("wan2.1-1.3b", (32, -16), "height", "height=-16: must be at least 1"),
        ("wan2.1-1.3b", (True, 32), "width", "width=True: must be a whole number"),
        ("wan2.1-1.3b", ("832", 480), "width", "width='832': must be a whole number"),
        ("wan2.1-1.3b", (832, 480.0), "height", "height=480.0: must be a whole number"),
        ("wan2.1-1.3b", (None, 480), "width", "width=None: must be a whole number"),
        ("wan2.1-1.3b", (8208, 480), "width", "width=8208: at most 8192"),
    ],
)
def test_a_wrong_size_is_refused_with_the_rule_and_two_valid_ones(
    name: str, size: tuple[int, int], field: str, words: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(words)) as caught:
        check_size(family(name), *size)
    assert caught.value.field == field


@ROWS
def test_half_a_multiple_off_is_refused_wide_and_tall(row: Family) -> None:
    half = row.size_multiple // 2
    for width, height in ((row.width + half, row.height), (row.width, row.height + half)):
        words = "trained size only" if "one_size" in row.traits else f"multiples of {row.size_multiple}"
        with pytest.raises(BadInput, match=words):
            check_size(row, width, height)


@given(st.sampled_from(FAMILIES), st.integers(1, MAX_SIDE), st.integers(1, MAX_SIDE))
def test_nearest_sizes_are_valid_and_around_the_asked_one(row: Family, width: int, height: int) -> None:
    sizes = nearest_sizes(row, width, height)
    for size in sizes:
        check_size(row, *size)
    if "one_size" in row.traits:
        assert sizes == row.trained_sizes
        return
    multiple = row.size_multiple
    if sizes == ((width, height),):
        return
    (low_w, low_h), (high_w, high_h) = sizes
    for asked, low, high in ((width, low_w, high_w), (height, low_h, high_h)):
        assert high - low in (0, multiple)
        assert low <= asked <= high or asked < multiple or asked > MAX_SIDE - multiple


# --------------------------------------------------------------------------- lengths and steps


@pytest.mark.parametrize(
    ("name", "num_frames", "words"),
    [
        ("wan2.1-1.3b", 82, "82 frames: Wan 2.1 1.3B needs a multiple of 4, plus 1: 81 or 85"),
        ("wan2.1-1.3b", 6, "5 or 9"),
        ("wan2.1-1.3b", 2, "1 or 5"),
        ("wan2.1-1.3b", 0, "num_frames=0: must be at least 1"),
        ("wan2.1-1.3b", -3, "num_frames=-3: must be at least 1"),
        ("wan2.1-1.3b", 2.5, "num_frames=2.5: must be a whole number"),
        ("wan2.1-1.3b", "81", "num_frames='81': must be a whole number"),
        ("wan2.1-1.3b", True, "num_frames=True: must be a whole number"),
        ("wan2.1-1.3b", None, "num_frames=None: must be a whole number"),
        ("wan2.1-1.3b", 10**9, "at most 10001"),
        ("ltx-video", 24, "a multiple of 8, plus 1: 17 or 25"),
        ("cogvideox-2b", 53, "a multiple of 8, plus 1: 49 or 57"),
        ("mochi", 84, "a multiple of 6, plus 1: 79 or 85"),
        ("kandinsky5-lite-i2v", 13, "plus 1, from 17 on: 17 or 21"),
    ],
)
def test_a_wrong_length_is_refused_with_the_rule_and_two_valid_ones(name: str, num_frames: int, words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)) as caught:
        check_frames(family(name), num_frames)
    assert caught.value.field == "num_frames"


def test_one_frame_is_a_clip() -> None:
    check_frames(family("wan2.1-1.3b"), 1)


@given(st.sampled_from(FAMILIES), st.integers(1, MAX_FRAMES))
def test_nearest_lengths_are_valid_and_around_the_asked_one(row: Family, num_frames: int) -> None:
    lengths = nearest_frames(row, num_frames)
    for length in lengths:
        check_frames(row, length)
    if lengths == (num_frames,):
        return
    low, high = lengths
    assert high - low == row.frame_step
    edge = num_frames < least_frames(row) or num_frames > MAX_FRAMES - row.frame_step
    assert low < num_frames < high or edge


@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [
        ("ltx-video", 1, "1 steps: LTX-Video takes a whole number from 2 to 1000"),
        ("mochi", 1, "from 2 to 1000"),
        ("wan2.1-1.3b", 0, "0 steps: Wan 2.1 1.3B takes a whole number from 1 to 1000; 50 are usual"),
        ("wan2.1-1.3b", 1001, "from 1 to 1000"),
        ("wan2.1-1.3b", 4.0, "4.0 steps"),
    ],
)
def test_a_wrong_number_of_steps_is_refused(name: str, steps: int, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        check_steps(family(name), steps)
    assert caught.value.field == "num_inference_steps"


# --------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("name", "latent", "count"),
    [
        ("flipbook", (9, 16, 16), 576),
        ("wan2.1-1.3b", (21, 60, 104), 32_760),
        ("wan2.1-14b", (21, 90, 160), 75_600),
        ("wan2.2-ti2v-5b", (31, 44, 80), 27_280),
        ("hunyuanvideo-1.5-720p", (31, 45, 80), 111_600),
        ("ltx-video", (21, 15, 22), 6_930),
        ("cogvideox-2b", (13, 60, 90), 17_550),
        ("cogvideox-1.5-5b", (21, 96, 170), 44_880),  # 21 latent frames are padded to 22, two to a token
    ],
)
def test_tokens_of_the_default_clip(name: str, latent: tuple[int, int, int], count: int) -> None:
    row = family(name)
    assert latent_shape(row, row.width, row.height, row.num_frames) == latent
    assert tokens(row, row.width, row.height, row.num_frames) == count


# --------------------------------------------------------------------------- off the trained track


def test_an_untrained_size_or_length_gets_a_visible_warning() -> None:
    said = off_track(family("wan2.1-1.3b"), 640, 368, 97)
    assert said is not None
    assert "640x368 is not among the sizes it was trained on (832x480, 480x832)" in said
    assert "97 frames are more than the 81 it was trained on" in said


def test_a_long_list_of_sizes_is_cut_to_the_nearest() -> None:
    said = off_track(family("hunyuanvideo-1.5-480p"), 640, 368, 121)
    assert said is not None and "and 117 more" in said


def test_a_family_trained_on_an_area_takes_every_shape_of_it() -> None:
    row = family("wan2.1-14b-480p-i2v")
    assert off_track(row, 624, 624, 81) is None  # 624 x 624 is 97.5 % of 832 x 480
    assert off_track(row, 1280, 720, 81) is not None
    assert off_track(row, 320, 320, 81) is not None


def test_a_family_without_a_list_is_not_warned_about_sizes() -> None:
    assert off_track(family("ltx-video"), 960, 544, 97) is None
    assert off_track(family("ltx-video"), 960, 544, 265) is not None


def test_flipbooks_row_says_what_its_folder_says() -> None:
    row = family("flipbook")
    folder = Path(str(resources.files("undercrank") / "flipbook"))
    defaults = json.loads((folder / "generation_defaults.json").read_text())
    assert {name: getattr(row, name) for name in defaults if name not in ("fps", "negative_prompt")} == {
        name: value for name, value in defaults.items() if name not in ("fps", "negative_prompt")
    }
    assert row.fps == defaults["fps"] and (row.negative_prompt or "") == defaults["negative_prompt"]
