"""Each metric: a value known by hand or from a well-kept library, and the direction: more damage, further away."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from undercrank import quality
from undercrank.metrics import METRICS
from undercrank.quality import EQUAL_DB, compare_frames, compare_latents, faults
from undercrank.records import BadInput

HAS = {name: importlib.util.find_spec(name) is not None for name in
       ("stlpips_pytorch", "flip_evaluator", "imageio_ffmpeg", "pytorch_msssim")}  # fmt: skip


def needs(package: str) -> Any:
    return pytest.mark.skipif(not HAS[package], reason=f"{package} is not installed")


def film(frames: int = 4, height: int = 192, width: int = 208, seed: int = 0) -> torch.Tensor:
    """A textured film that moves, F 3 H W in 0..1."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, height // 8, (width + frames * 8) // 8, generator=rng)
    wide = F.interpolate(coarse, size=(height, width + frames * 8), mode="bilinear", align_corners=False)[0]
    return torch.stack([wide[:, :, 3 * t : 3 * t + width] for t in range(frames)]) * 0.8 + 0.1


def noisy(a: torch.Tensor, amount: float, seed: int = 1) -> torch.Tensor:
    noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed))
    return (a + noise * amount / 255).clamp(0, 1)


def value(name: str, a: torch.Tensor, b: torch.Tensor) -> float:
    (distance,) = compare_frames(a, b, names=[name]).distances
    assert distance.value is not None, distance.note
    return distance.value


# --------------------------------------------------------------------------- known values


def test_psnr_and_the_largest_difference_by_hand() -> None:
    a = torch.full((2, 3, 4, 4), 100, dtype=torch.uint8)
    b = a.clone()
    b[1] += 5
    report = compare_frames(a, b, names=["max_abs", "psnr_db", "rel_l2"])
    by = {distance.metric: distance for distance in report.distances}
    assert by["max_abs"].value == pytest.approx(5, abs=1e-4) and by["max_abs"].curve == pytest.approx((0, 5), abs=1e-4)
    assert by["psnr_db"].value == pytest.approx(10 * math.log10(255**2 / 12.5), abs=1e-3)
    assert by["psnr_db"].curve == pytest.approx((EQUAL_DB, 10 * math.log10(255**2 / 25)), abs=1e-3)
    assert by["psnr_db"].worst == by["psnr_db"].curve[1]
    assert by["rel_l2"].value == pytest.approx(math.sqrt(25 / 2) / 100, rel=1e-5)


def test_temporal_difference_by_hand() -> None:
    a = torch.zeros(3, 3, 2, 2)
    a[1], a[2] = 0.5, 1.0
    b = torch.zeros(3, 3, 2, 2)
    b[1], b[2] = 0.5, 0.5  # the second step is missing: half of the motion's energy
    assert value("tdiff", a, b) == pytest.approx(math.sqrt(0.5))


def test_flicker_by_hand() -> None:
    a = torch.full((3, 3, 2, 2), 0.5)
    b = a.clone()
    b[1, 1] += 10 / 255  # green, on the middle frame: up once, down once
    assert value("flicker", a, b) == pytest.approx(0.7152 * 10, rel=1e-4)


def test_ssim_of_two_flat_films_is_its_luminance_term() -> None:
    a, b = torch.full((1, 3, 16, 16), 0.2), torch.full((1, 3, 16, 16), 0.6)
    assert value("ssim", a, b) == pytest.approx((2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4), rel=1e-5)


def test_ms_ssim_of_a_small_frame_uses_the_scales_that_fit_and_says_so() -> None:
    a = film(2, 64, 64)
    (distance,) = compare_frames(a, noisy(a, 5), names=["ms_ssim"]).distances
    assert distance.note == "3 of 5 scales: the frames are small"


@needs("pytorch_msssim")
@pytest.mark.parametrize("amount", [2.0, 20.0])
def test_ssim_and_ms_ssim_are_those_of_pytorch_msssim(amount: float) -> None:
    from pytorch_msssim import ms_ssim, ssim

    a = film(2)
    b = noisy(a, amount)
    assert value("ssim", a, b) == pytest.approx(float(ssim(b.double(), a.double(), data_range=1.0)), abs=1e-5)
    assert value("ms_ssim", a, b) == pytest.approx(float(ms_ssim(b.double(), a.double(), data_range=1.0)), abs=1e-5)


@needs("pytorch_msssim")
def test_ms_ssim_of_fewer_scales_is_that_of_pytorch_msssim_with_the_same_weights() -> None:
    from pytorch_msssim import ms_ssim

    a = film(2).double()
    b = noisy(a.float(), 10).double()
    weights = [weight / 0.8667 for weight in quality._MS_WEIGHTS[:4]]
    theirs = ms_ssim(b, a, data_range=1.0, weights=weights)
    assert float(quality._multi_scale(a, b, weights=weights).mean()) == pytest.approx(float(theirs), abs=1e-6)


@needs("stlpips_pytorch")
def test_st_lpips_keeps_the_value_that_its_own_package_gives() -> None:
    a = film(1, 160, 160)
    assert value("st_lpips_alex", a, noisy(a, 10)) == pytest.approx(GOLDEN_ST_LPIPS, rel=1e-3)


GOLDEN_ST_LPIPS = 0.0497428
"By `stlpips_pytorch.stlpips.LPIPS` itself, of these two films; equal to the last bit."


def test_lpips_is_its_published_formula() -> None:
    """With random weights, against the formula written out: there is no true backbone to be had without a network."""
    rng = torch.Generator().manual_seed(3)
    shapes = {0: (64, 3, 11, 11), 3: (192, 64, 5, 5), 6: (384, 192, 3, 3), 8: (256, 384, 3, 3), 10: (256, 256, 3, 3)}
    backbone = {
        f"features.{i}.weight": torch.randn(s, generator=rng) / math.sqrt(s[1] * s[2] * s[3]) for i, s in shapes.items()
    }
    backbone |= {f"features.{i}.bias": torch.zeros(s[0]) for i, s in shapes.items()}
    heads = {f"lin{n}.model.1.weight": torch.rand(1, s[0], 1, 1, generator=rng) for n, s in enumerate(shapes.values())}
    a = film(1, 64, 64)
    b = noisy(a, 20)

    def features(x: torch.Tensor) -> list[torch.Tensor]:
        x = (2 * x - 1 - torch.tensor([-0.030, -0.088, -0.188])[:, None, None]) / torch.tensor([0.458, 0.448, 0.450])[
            :, None, None
        ]
        found = []
        for index, (stride, padding) in zip(shapes, ((4, 2), (1, 2), (1, 1), (1, 1), (1, 1)), strict=True):
            x = F.relu(F.conv2d(x, backbone[f"features.{index}.weight"], stride=stride, padding=padding))
            found.append(x / x.norm(dim=1, keepdim=True))
            x = F.max_pool2d(x, 3, 2) if index in (0, 3) else x
        return found

    pairs = zip(features(a), features(b), heads.values(), strict=True)
    wanted = sum(float(((x - y) ** 2 * head).sum(1).mean()) for x, y, head in pairs)
    assert float(quality.alex_lpips(backbone, heads)(a, b)) == pytest.approx(wanted, rel=1e-4)


def test_lpips_without_its_weights_says_which_file_goes_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quality, "_file_in", lambda package, path: tmp_path / "heads.pth")
    monkeypatch.setenv("UNDERCRANK_LPIPS_BACKBONE", str(tmp_path / "alexnet.pth"))
    a = film(1, 64, 64)
    (distance,) = compare_frames(a, a, names=["lpips"]).distances
    assert distance.value is None and str(tmp_path / "alexnet.pth") in distance.note
    (tmp_path / "alexnet.pth").write_bytes(b"something else")
    (distance,) = compare_frames(a, a, names=["lpips"]).distances
    assert distance.value is None and "SHA-256" in distance.note


@needs("flip_evaluator")
def test_flip_is_that_of_its_package() -> None:
    import flip_evaluator

    a = film(1, 48, 64)
    b = noisy(a, 20)
    x, y = (each[0].permute(1, 2, 0).contiguous().numpy() for each in (a, b))
    assert value("flip", a, b) == pytest.approx(flip_evaluator.evaluate(x, y, "LDR")[1], rel=1e-5)


# --------------------------------------------------------------------------- direction

DAMAGED = [name for name, metric in METRICS.items() if metric.of == "frames" and name != "lpips"]
PACKAGE = {"st_lpips_alex": "stlpips_pytorch", "flip": "flip_evaluator", "vmaf": "imageio_ffmpeg"}


@pytest.mark.parametrize("name", DAMAGED)
def test_more_damage_is_further_away(name: str) -> None:
    if name in PACKAGE and not HAS[PACKAGE[name]]:
        pytest.skip(f"{PACKAGE[name]} is not installed")
    a = film()
    if name == "flicker":
        lift = torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None, None, None] / 255
        damaged = [a + lift * amount for amount in (0, 2, 5, 12)]
    elif name == "vmaf":  # it flatters noise: blur it
        damaged = [a, *(F.avg_pool2d(a, size, 1, size // 2) for size in (5, 9, 15))]
    else:
        damaged = [noisy(a, amount) if amount else a for amount in (0, 2, 5, 12)]
    values = [value(name, a, b) for b in damaged]
    metric = METRICS[name]
    assert all(metric.further(far, near) for near, far in zip(values, values[1:], strict=False)), values


@pytest.mark.parametrize(
    ("name", "equal"),
    [
        ("max_abs", 0),
        ("rel_l2", 0),
        ("psnr_db", EQUAL_DB),
        ("ssim", 1),
        ("ms_ssim", 1),
        ("tdiff", 0),
        ("flicker", 0),
    ],
)
def test_equal_films_are_as_near_as_can_be(name: str, equal: float) -> None:
    a = film()
    report = compare_frames(a, a.clone(), names=[name])
    assert report.identical
    assert report.distances[0].value == pytest.approx(equal, abs=1e-6)


def test_every_metric_of_frames_has_its_function_and_its_unit() -> None:
    assert set(quality.FRAME_METRICS) == {name for name, metric in METRICS.items() if metric.of == "frames"}
    assert all(metric.unit and metric.closer in ("lower", "higher") and metric.sees for metric in METRICS.values())


def test_a_long_film_in_groups_has_the_values_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    a = film(7, 32, 32)
    b = noisy(a, 9)
    names = ["psnr_db", "ssim", "tdiff", "flicker", "rel_l2"]
    whole = compare_frames(a, b, names=names).distances
    monkeypatch.setattr(quality, "CHUNK_PIXELS", 3 * 32 * 32)
    for one, other in zip(whole, compare_frames(a, b, names=names).distances, strict=True):
        assert one.curve == pytest.approx(other.curve, rel=1e-6) and one.value == pytest.approx(other.value)


def test_eight_bit_frames_and_the_same_in_floats_are_equally_far() -> None:
    a, b = ((x * 255).round().to(torch.uint8) for x in (film(2), noisy(film(2), 6)))
    for name in ("psnr_db", "ssim"):
        assert value(name, a, b) == pytest.approx(value(name, a.float() / 255, b.float() / 255), rel=1e-5)


# --------------------------------------------------------------------------- latents


def test_latents_are_compared_step_by_step() -> None:
    a = [torch.full((1, 4, 2, 3, 3), 2.0) for _ in range(3)]
    b = [x + 0.1 * step for step, x in enumerate(a)]
    report = compare_latents(a, b)
    by = {distance.metric: distance for distance in report.distances}
    assert (
        by["latent_rel"].curve == pytest.approx((0, 0.05, 0.1), abs=1e-6)
        and by["latent_rel"].value == by["latent_rel"].worst
    )
    assert by["latent_max_abs"].value == pytest.approx(0.2, rel=1e-5)
    assert not report.identical and compare_latents(a, a).identical


def test_latents_of_another_dtype_are_not_identical_to_the_bit() -> None:
    a = torch.ones(1, 2, 2)
    assert not compare_latents([a], [a.bfloat16()]).identical


# --------------------------------------------------------------------------- faults of a film


def test_frozen_black_and_non_finite_frames_are_found() -> None:
    a = film(6, 16, 16)
    a[2] = a[1]
    a[3] = 0
    a[5, 0, 0, 0] = math.nan
    assert faults(a) == ("not finite: frame 6", "black: frame 4", "frozen (equal to the one before): frame 3")
    assert faults(film(3, 16, 16)) == ()


def test_numbers_of_frames_are_put_together() -> None:
    assert quality._frames_in_words([3, 4, 5, 9]) == "frames 3-5, 9"


def test_a_film_that_stands_still_is_told_of_in_the_comparison() -> None:
    a = (film(4, 16, 16) * 255).to(torch.uint8)
    report = compare_frames(a, a[:1].expand(4, -1, -1, -1), names=["psnr_db"])
    assert report.faults == ("frozen (equal to the one before): frames 2-4",)


# --------------------------------------------------------------------------- what cannot be compared

GOOD = film(3, 16, 16)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (GOOD, film(3, 16, 32), "A is 16x16, B is 32x16: .*one size"),
        (GOOD, film(2, 16, 16), "A has 3 frames, B has 2: .*cut one"),
        (GOOD[:0], GOOD[:0], "empty"),
        (GOOD, torch.full_like(GOOD, math.nan), "B holds .* NaN or infinite, the first in frame or item 1.*bfloat16"),
        (GOOD * 2, GOOD * 2, "0..1; say --kind latents"),
        ((GOOD * 255).to(torch.int32), (GOOD * 255).to(torch.int32), "uint8, or floats"),
        (GOOD[:, :2], GOOD[:, :2], "F 3 H W"),
    ],
    ids=["size", "count", "empty", "nan", "range", "dtype", "channels"],
)
def test_what_has_no_distance_is_refused_with_its_remedy(a: torch.Tensor, b: torch.Tensor, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        compare_frames(a, b)


def test_one_frame_has_every_distance_but_those_of_motion() -> None:
    a = film(1, 32, 32)
    report = compare_frames(a, noisy(a, 3), names=["psnr_db", "ssim", "tdiff", "flicker"])
    by = {distance.metric: distance for distance in report.distances}
    assert by["psnr_db"].value and by["ssim"].value
    assert (
        by["tdiff"].value is None and by["tdiff"].note == "not computed: one frame has no motion" == by["flicker"].note
    )


def test_a_frame_smaller_than_the_window_has_no_ssim_but_a_psnr() -> None:
    a = film(2, 8, 8)
    report = compare_frames(a, noisy(a, 3), names=["ssim", "ms_ssim", "psnr_db"])
    assert [distance.value is None for distance in report.distances] == [True, True, False]


def test_a_reference_that_stands_still_has_no_relative_motion() -> None:
    still = GOOD[:1].expand(3, -1, -1, -1)
    (distance,) = compare_frames(still, GOOD, names=["tdiff"]).distances
    assert distance.value is None and "stands still" in distance.note
    assert value("tdiff", still, still) == 0


def test_latents_that_are_not_finite_are_refused() -> None:
    a = torch.ones(1, 4, 2, 2)
    with pytest.raises(BadInput, match="B, step 2 holds 1 values that are NaN"):
        compare_latents([a, a], [a, torch.where(torch.arange(16).view(1, 4, 2, 2) == 3, math.inf, a)])


@pytest.mark.parametrize("name", ["st_lpips_alex", "flip", "vmaf"])
def test_a_missing_package_is_named_and_nothing_stands_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    quality._st_lpips_net.cache_clear()
    (distance,) = compare_frames(GOOD, GOOD, names=[name]).distances
    assert distance.value is None and "pip install 'undercrank[metrics]'" in distance.note


@needs("stlpips_pytorch")
def test_weights_that_were_changed_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.pth"
    file.write_bytes(b"not these")
    monkeypatch.setattr(quality, "_file_in", lambda package, path: file)
    quality._st_lpips_net.cache_clear()
    (distance,) = compare_frames(GOOD, GOOD, names=["st_lpips_alex"]).distances
    assert distance.value is None and hashlib.sha256(b"not these").hexdigest()[:8] in distance.note


def test_a_clip_s_own_frames_are_taken_as_they_are() -> None:
    frames_FHWC = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    frames_FCHW = quality.as_FCHW(frames_FHWC)
    assert frames_FCHW.shape == (2, 3, 4, 5) and frames_FCHW[1, 2, 3, 4] == frames_FHWC[1, 3, 4, 2]
