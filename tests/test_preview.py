"""Previews: colours fitted to a clip, latents of several shapes, pictures that cost next to nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from undercrank.engine import Engine
from undercrank.preview import Colours, Previewer, _denoised, as_CTHW
from undercrank.records import Request


def rig(channels: int = 4, scheduler: Any = None) -> Any:
    scheduler = scheduler or SimpleNamespace(config=SimpleNamespace())
    return SimpleNamespace(
        pipe=SimpleNamespace(vae=SimpleNamespace(config=SimpleNamespace(z_dim=channels))), scheduler=scheduler
    )


def clip_and_latents(seed: int = 0) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """9 frames of 32x32, whose latents (3 of 4x4) are a linear map of their colours; the map."""
    generator = torch.Generator().manual_seed(seed)
    rgb_T3HW = torch.rand(3, 3, 4, 4, generator=generator)
    mixing = torch.randn(4, 3, generator=generator)
    latents_CTHW = torch.einsum("cr,trhw->cthw", mixing, rgb_T3HW) + 0.5
    frames = rgb_T3HW.repeat_interleave(8, 2).repeat_interleave(8, 3).permute(0, 2, 3, 1)
    frames_FHWC = (frames[[0, 1, 1, 1, 1, 2, 2, 2, 2]] * 255).round().to(torch.uint8).numpy()
    return frames_FHWC, latents_CTHW, rgb_T3HW


def test_colours_are_found_again_from_a_clip_and_its_latents() -> None:
    frames_FHWC, latents_CTHW, rgb_T3HW = clip_and_latents()
    colours = Colours.fit(latents_CTHW, frames_FHWC)
    seen = torch.einsum("cthw,rc->trhw", latents_CTHW, torch.tensor(colours.weights))
    seen += torch.tensor(colours.bias).view(1, 3, 1, 1)
    assert (seen - rgb_T3HW).abs().max() < 0.01


def test_what_was_learned_is_kept_for_the_next_clip_and_not_learned_again(tmp_path: Path) -> None:
    frames_FHWC, latents_CTHW, _ = clip_and_latents()
    assert Colours.of("org/model:x", tmp_path) is None
    pictures: list[int] = []
    previewer = Previewer(None, lambda step, picture: pictures.append(step))
    previewer.see(rig(), 0, latents_CTHW[None])
    colours = previewer.learn(frames_FHWC)
    assert colours is not None and previewer.learn(frames_FHWC) is None and pictures == []
    colours.keep("org/model:x", tmp_path)
    assert Colours.of("org/model:x", tmp_path) == colours
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["colours"]


def test_the_colours_of_flipbook_come_with_the_package(tmp_path: Path) -> None:
    colours = Colours.of("flipbook", tmp_path)
    assert colours is not None and [len(row) for row in colours.weights] == [16, 16, 16] and len(colours.bias) == 3


def test_a_picture_is_the_middle_frame_as_large_as_the_latents() -> None:
    frames_FHWC, latents_CTHW, rgb_T3HW = clip_and_latents()
    seen: list[tuple[int, np.ndarray]] = []
    colours = Colours.fit(latents_CTHW, frames_FHWC)
    previewer = Previewer(colours, lambda step, picture: seen.append((step, picture)), every_s=0.0, share=1e9)
    previewer.see(rig(), 2, latents_CTHW[None])
    ((step, picture_HWC),) = seen
    assert step == 3 and picture_HWC.dtype == np.uint8 and picture_HWC.shape == (4, 4, 3)
    assert np.abs(picture_HWC / 255 - rgb_T3HW[1].permute(1, 2, 0).numpy()).max() < 0.02


def test_pictures_keep_their_distance_in_time() -> None:
    _, latents_CTHW, _ = clip_and_latents()
    seen: list[int] = []
    colours = Colours(weights=((1.0, 0.0, 0.0, 0.0),) * 3, bias=(0.0,) * 3)
    previewer = Previewer(colours, lambda step, picture: seen.append(step), every_s=60.0)
    for index in range(5):
        previewer.see(rig(), index, latents_CTHW[None])
    assert seen == [1]


@pytest.mark.parametrize(("shape", "grid"), [((2, 4, 3, 6, 5), None), ((2, 3, 4, 6, 5), None), ((2, 90, 4), (3, 6, 5))])
def test_latents_are_told_by_their_shape(shape: tuple[int, ...], grid: tuple[int, int, int] | None) -> None:
    latents = as_CTHW(torch.zeros(shape), 4, grid)
    assert latents is not None and latents.shape == (4, 3, 6, 5)


@pytest.mark.parametrize("shape", [(2, 91, 4), (2, 90, 5), (4, 6, 5), (1, 5, 5, 6, 5)])
def test_latents_of_an_unknown_shape_have_no_preview(shape: tuple[int, ...]) -> None:
    assert as_CTHW(torch.zeros(shape), 4, (3, 6, 5)) is None
    colours = Colours(weights=((0.0,) * 4,) * 3, bias=(0.0,) * 3)
    previewer = Previewer(colours, lambda *_: pytest.fail("a picture of what?"), grid_THW=(3, 6, 5))
    previewer.see(rig(), 0, torch.zeros(shape))
    assert Previewer(None, lambda *_: None).learn(np.zeros((1, 8, 8, 3), np.uint8)) is None


def test_packed_latents_are_unpacked_in_their_order() -> None:
    latents_CTHW = torch.arange(4 * 3 * 6 * 5.0).reshape(4, 3, 6, 5)
    packed = latents_CTHW.flatten(1).T[None]
    found = as_CTHW(packed, 4, (3, 6, 5))
    assert found is not None and torch.equal(found, latents_CTHW)


def test_a_straight_line_of_flow_matching_is_followed_to_its_end() -> None:
    clean, noise = torch.full((4, 2, 2), 0.25), torch.ones(4, 2, 2)
    sigmas = torch.tensor([0.9, 0.6, 0.0])
    scheduler = SimpleNamespace(config=SimpleNamespace(prediction_type="flow_prediction"), sigmas=sigmas)
    before, now = (1 - 0.9) * clean + 0.9 * noise, (1 - 0.6) * clean + 0.6 * noise
    assert torch.allclose(_denoised(rig(scheduler=scheduler), 0, before, now), clean, atol=1e-5)
    assert _denoised(rig(), 0, before, now) is now
    assert _denoised(rig(scheduler=scheduler), 0, None, now) is now


def test_a_run_with_previews_makes_the_same_film_as_one_without() -> None:
    request = Request(prompt="a red ball rolls left", width=64, height=64, num_frames=5, num_inference_steps=3, seed=7)
    pictures: list[np.ndarray] = []
    with Engine() as engine:
        plain = engine.generate(request)
        previewer = Previewer(
            Colours.of("flipbook", Path("/nowhere")), lambda s, p: pictures.append(p), every_s=0.0, share=1e9
        )
        watched = engine.generate(request, on_latents=previewer.see)
    assert watched.report.frames_hash == plain.report.frames_hash
    assert len(pictures) == 3 and {picture.shape for picture in pictures} == {(8, 8, 3)}
    middle = plain.frames_FHWC[2].reshape(8, 8, 8, 8, 3).mean((1, 3)) / 255
    assert np.abs(pictures[-1] / 255 - middle).mean() < 0.2
