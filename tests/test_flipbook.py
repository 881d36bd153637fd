"""flipbook as shipped, and the code that made it: what the folder promises, and what its training set leaves out."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "src" / "undercrank" / "flipbook"
TOOLS = ROOT / "tools" / "flipbook"
TOOL_MODULES = ("world", "models", "optim", "train_vae", "judge", "evaluate")


@pytest.fixture(scope="module")
def pipeline() -> DiffusionPipeline:
    loaded = DiffusionPipeline.from_pretrained(FOLDER, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def tools() -> Iterator[SimpleNamespace]:
    """The modules of tools/flipbook, which are scripts beside each other and no package."""
    sys.path.insert(0, str(TOOLS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in TOOL_MODULES})
    sys.path.remove(str(TOOLS))
    for name in TOOL_MODULES:
        sys.modules.pop(name, None)


def generate(pipeline: DiffusionPipeline, prompt: str, steps: int, size: tuple[int, int, int]) -> torch.Tensor:
    frames, height, width = size
    return pipeline(
        prompt, negative_prompt="", height=height, width=width, num_frames=frames, num_inference_steps=steps,
        guidance_scale=5.0, max_sequence_length=64, generator=torch.Generator().manual_seed(3), output_type="pt",
    ).frames[0]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the folder


def test_the_folder_fits_the_package() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors")) <= 32e6
    assert (FOLDER / "README.md").is_file()
    assert "Apache License, Version 2.0" in (FOLDER / "LICENSE").read_text()


def test_the_defaults_are_what_the_model_was_trained_for() -> None:
    assert json.loads((FOLDER / "generation_defaults.json").read_text()) == {
        "height": 128, "width": 128, "num_frames": 33, "fps": 16, "num_inference_steps": 25, "guidance_scale": 5.0,
        "max_sequence_length": 64, "negative_prompt": "",
    }  # fmt: skip


def test_plain_diffusers_loads_it(pipeline: DiffusionPipeline) -> None:
    classes = {name: type(part).__name__ for name, part in pipeline.components.items() if part is not None}
    assert type(pipeline).__name__ == "WanPipeline"
    assert classes["transformer"] == "WanTransformer3DModel"
    assert classes["vae"] == "AutoencoderKLWan"
    assert classes["text_encoder"] == "UMT5EncoderModel"
    assert classes["scheduler"] == "UniPCMultistepScheduler"
    assert pipeline.scheduler.config.prediction_type == "flow_prediction"
    assert pipeline.scheduler.config.flow_shift == 3.0
    assert {part.dtype for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder)} == {torch.float32}


def test_both_files_name_a_tokenizer_class_that_every_transformers_has() -> None:
    index = json.loads((FOLDER / "model_index.json").read_text())
    assert index["tokenizer"] == ["transformers", "PreTrainedTokenizerFast"]
    config = json.loads((FOLDER / "tokenizer" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(
    "text", ["", "a red ring", "Ünïcode, ÅNGSTRÖM", "赤い輪が左へ", "🎈🏳️‍🌈", "\x00\x7f\ufffd", "\U0010ffff"]
)
def test_any_text_has_tokens(pipeline: DiffusionPipeline, text: str) -> None:
    ids = pipeline.tokenizer(text).input_ids
    assert pipeline.tokenizer.unk_token_id not in ids
    assert ids[-1] == pipeline.tokenizer.eos_token_id
    assert max(ids) < pipeline.text_encoder.config.vocab_size


# ---------------------------------------------------------------------------------------------------------- its clips


def test_the_same_seed_makes_the_same_finite_clip(pipeline: DiffusionPipeline) -> None:
    once, twice = (generate(pipeline, "a blue square grows", 2, (9, 64, 64)) for _ in range(2))
    assert once.shape == (9, 3, 64, 64)
    assert torch.isfinite(once).all()
    assert torch.equal(once, twice)


@pytest.mark.parametrize("size", [(5, 96, 160), (9, 160, 96), (1, 128, 128), (13, 64, 48)])
def test_other_sizes_and_lengths_run(pipeline: DiffusionPipeline, size: tuple[int, int, int]) -> None:
    clip = generate(pipeline, "a green star bounces on a black background", 1, size)
    assert clip.shape == (size[0], 3, *size[1:])
    assert torch.isfinite(clip).all()


@pytest.mark.slow
def test_a_red_circle_on_black_is_red_in_the_middle_and_black_in_the_corners(pipeline: DiffusionPipeline) -> None:
    clip_TCHW = generate(pipeline, "a red circle stays still on a black background", 8, (9, 128, 128))
    red, green, blue = clip_TCHW[:, :, 56:72, 56:72].mean((0, 2, 3)).tolist()
    assert red > 0.7
    assert max(green, blue) < 0.3
    corners = clip_TCHW[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.max() < 0.2


# ----------------------------------------------------------------------------------------------- the world it learnt


def test_training_never_shows_a_held_out_or_an_invisible_pair(tools: SimpleNamespace) -> None:
    scenes = tools.world.sample_scenes(20_000, seed=5)
    pairs = {(names["shape"], names["colour"]) for names in map(scenes.names, range(len(scenes)))}
    moves = {(names["motion"], names["shape"]) for names in map(scenes.names, range(len(scenes)))}
    assert not pairs & set(tools.world.HELD_OUT_SHAPE_COLOUR)
    assert not moves & {*tools.world.HELD_OUT_MOTION_SHAPE, *tools.world.INVISIBLE_MOTION_SHAPE}
    assert len(pairs) == 6 * 8 - 6, "every other pair is shown"
    assert len(moves) == 9 * 6 - 3 - 2


def test_held_out_scenes_are_held_out_and_visible(tools: SimpleNamespace) -> None:
    codes = tools.world.sample_scenes(2_000, seed=5, split="held_out").codes
    assert tools.world.is_held_out(codes).all()
    assert tools.world.is_visible(codes).all()


def test_the_same_seed_is_the_same_training_set(tools: SimpleNamespace) -> None:
    first, second = (tools.world.sample_scenes(50, seed=9) for _ in range(2))
    assert tools.world.captions(first, 1) == tools.world.captions(second, 1)
    assert torch.equal(tools.world.render(first[:2], 16, 16), tools.world.render(second[:2], 16, 16))


def test_a_complete_caption_names_what_is_drawn(tools: SimpleNamespace) -> None:
    world = tools.world
    scenes = world.sample_scenes(500, seed=2, split="any")
    for row, caption in enumerate(world.captions(scenes, 2, world.complete)):
        names = scenes.names(row)
        assert names["colour"] in caption
        assert names["background"] in caption
        assert any(word in caption for word in world.SHAPE_WORDS[names["shape"]])
        assert any(word in caption for word in world.MOTION_WORDS[names["motion"]])


def test_things_move_as_their_captions_say(tools: SimpleNamespace) -> None:
    """The centre and the area of what is not background, at the first and the last frame of 64 scenes."""
    scenes = tools.world.sample_scenes(64, seed=3)
    clip_BCTHW = tools.world.render(scenes, 32, 32, torch.tensor([[0.0, 1.0]]).expand(64, 2))
    palette = torch.tensor(list(tools.world.COLOURS.values())) * 2 - 1
    paint_BC111 = palette[scenes.codes["colour"]][:, :, None, None, None]
    grounds = torch.tensor(list(tools.world.BACKGROUNDS.values())) * 2 - 1
    ground_BC111 = grounds[scenes.codes["background"]][:, :, None, None, None]
    thing_BTHW = ((clip_BCTHW - paint_BC111).norm(dim=1) < (clip_BCTHW - ground_BC111).norm(dim=1)).float()
    place = torch.linspace(-1, 1, 32)
    area_BT = thing_BTHW.sum((2, 3))
    right = ((thing_BTHW.sum(2) * place).sum(2) / area_BT).diff(dim=1)[:, 0]
    down = ((thing_BTHW.sum(3) * place).sum(2) / area_BT).diff(dim=1)[:, 0]
    larger = area_BT[:, 1] / area_BT[:, 0]
    expected = {
        "left": right < -0.7, "right": right > 0.7, "up": down < -0.7, "down": down > 0.7,
        "grows": larger > 3, "shrinks": larger < 0.4, "still": (right.abs() + down.abs() < 0.01),
    }  # fmt: skip
    for row in range(64):
        motion = scenes.names(row)["motion"]
        assert motion not in expected or expected[motion][row], scenes.names(row)


# ------------------------------------------------------------------------------------------- its training and figures


@pytest.mark.parametrize("frames", [1, 5, 17])
def test_the_whole_clip_autoencoder_is_the_chunked_one(
    pipeline: DiffusionPipeline, tools: SimpleNamespace, frames: int
) -> None:
    clip = torch.rand(1, 3, frames, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        mean, log_variance = tools.models.encode_clip(pipeline.vae, clip)
        chunked = pipeline.vae._encode(clip)
        decoded = tools.models.decode_clip(pipeline.vae, mean).clamp(-1, 1)
        chunked_decoded = pipeline.vae.decode(mean, return_dict=False)[0]
    torch.testing.assert_close(torch.cat([mean, log_variance], 1), chunked, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(decoded, chunked_decoded, atol=1e-3, rtol=1e-4)


def test_muon_makes_matrices_nearly_orthogonal(tools: SimpleNamespace) -> None:
    matrices = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(tools.optim.orthogonalise(matrices).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_wilsons_interval(tools: SimpleNamespace) -> None:
    assert tools.evaluate.share(90, 100) == pytest.approx([0.9, 0.8256, 0.9448], abs=1e-4)


def test_the_document_shows_the_committed_figures_and_every_gate_is_met(tools: SimpleNamespace) -> None:
    text, passed = tools.evaluate.report(json.loads((TOOLS / "evaluation.json").read_text()))
    assert passed
    assert text.strip() in (ROOT / "docs" / "flipbook.md").read_text()


def test_the_judge_knows_renders(tools: SimpleNamespace) -> None:
    judge = tools.models.load_weights(tools.judge.build_judge(), TOOLS / "judge.safetensors").eval()
    scenes = tools.world.sample_scenes(12, seed=77, split="any")
    seen = judge(tools.judge.watched_frames(scenes))
    right = torch.stack([seen[name].argmax(1) == scenes.codes[name] for name in tools.world.JUDGED])
    assert right.float().mean() > 0.97
