"""Hostile, odd and ordinary pictures. Expected values are computed from arrays, not by the module under test."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from undercrank import images
from undercrank.images import BadImage, fit, notes, open_image
from undercrank.records import BadInput

RAMP = np.linspace(0, 255, 256).round().astype(np.uint8).reshape(8, 32)
TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # how a camera stores an upright picture
    1: lambda upright: upright,
    2: np.fliplr,
    3: lambda upright: np.rot90(upright, 2),
    4: np.flipud,
    5: lambda upright: upright.transpose(1, 0, 2),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: np.rot90(upright, 2).transpose(1, 0, 2),
    8: lambda upright: np.rot90(upright, 3),
}


def encoded(picture: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def corners(width: int = 48, height: int = 32) -> np.ndarray:
    """An upright picture whose four quarters differ."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[: height // 2, : width // 2] = [250, 10, 10]
    picture[: height // 2, width // 2 :] = [10, 250, 10]
    picture[height // 2 :, : width // 2] = [10, 10, 250]
    return picture


def png(width: int, height: int, *, bits: int = 8, color: int = 0, chunks: bytes = b"", data: bytes = b"") -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunks + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def pixels(source: Any) -> np.ndarray:
    image = open_image(source)
    assert image.mode == "RGB"
    return np.asarray(image)


# ---------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("make", ["png", "little-endian tiff", "big-endian tiff", "mode I", "array"])
def test_16_bit_grey_equals_its_8_bit_version(make: str, tmp_path: Path) -> None:
    wide = RAMP.astype(np.uint16) * 257
    source: Any = {
        "png": lambda: encoded(Image.fromarray(wide), "PNG"),
        "little-endian tiff": lambda: encoded(Image.fromarray(wide), "TIFF"),
        "big-endian tiff": lambda: encoded(Image.frombytes("I;16B", (32, 8), wide.astype(">u2").tobytes()), "TIFF"),
        "mode I": lambda: Image.fromarray(wide.astype(np.int32)),
        "array": lambda: wide,
    }[make]()
    assert np.array_equal(pixels(source), np.repeat(RAMP[..., None], 3, 2))


def test_16_bit_grey_is_rounded_to_the_nearest_of_8_bits() -> None:
    assert pixels(np.array([[0, 128, 129, 385, 386, 65535]], np.uint16))[0, :, 0].tolist() == [0, 0, 1, 1, 2, 255]


def test_16_bit_colour_is_within_one_of_its_8_bit_version() -> None:
    wide = (np.repeat(RAMP[..., None], 3, 2).astype(">u2") * 257).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    assert np.abs(pixels(png(32, 8, bits=16, color=2, data=rows)).astype(int) - RAMP[..., None]).max() <= 1


def test_a_transparent_16_bit_grey_is_white() -> None:
    rows = b"\0" + np.array([0, 1000, 65535, 1000], ">u2").tobytes()
    body = b"tRNS" + struct.pack(">H", 1000)
    chunk = struct.pack(">I", 2) + body + struct.pack(">I", zlib.crc32(body))
    assert pixels(png(4, 1, bits=16, chunks=chunk, data=rows))[0, :, 0].tolist() == [0, 255, 255, 255]


@pytest.mark.parametrize("value", [-1, 70_000])
def test_grey_values_beyond_16_bits_are_refused(value: int) -> None:
    with pytest.raises(BadImage, match="16 bits"):
        open_image(Image.fromarray(np.full((2, 2), value, np.int32)))


# ---------------------------------------------------------------- rotation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("way", ["path", "bytes", "PIL", "PNG", "WEBP", "TIFF"])
def test_a_turned_photo_is_used_upright(orientation: int, way: str, tmp_path: Path) -> None:
    upright = corners()
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(TURNS[orientation](upright)))
    format = way if way in images.FORMATS else "JPEG"
    options = {"lossless": True} if format == "WEBP" else {"quality": 95, "subsampling": 0} if format == "JPEG" else {}
    data = encoded(stored, format, exif=exif, **options)
    (tmp_path / "photo").write_bytes(data)
    source: Any = {"path": tmp_path / "photo", "PIL": Image.open(io.BytesIO(data))}.get(way, data)
    assert np.abs(pixels(source).astype(int) - upright).max() <= 12
    if format != "TIFF":  # Pillow turns a TIFF by itself, while loading
        assert any("upright" in note for note in notes(open_image(source))) == (orientation != 1)


def test_opening_twice_turns_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    once = open_image(encoded(Image.fromarray(corners()), "PNG", exif=exif))
    twice = open_image(once)
    assert np.array_equal(np.asarray(once), np.asarray(twice))
    assert notes(once) == notes(twice) != ()


# ---------------------------------------------------------------- transparency


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_colours_hidden_under_transparency_stay_hidden(format: str) -> None:
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 0] = 255
    rgba[0, 0, 3] = 255
    rgba[3, 3, 3] = 128
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    image = open_image(encoded(Image.fromarray(rgba), format, **options))
    assert image.getpixel((0, 0)) == (255, 0, 0)
    assert image.getpixel((3, 3)) == (255, 127, 127)
    assert image.getpixel((1, 1)) == images.BACKGROUND == (255, 255, 255)
    assert notes(image) == ("composited on white where transparent",)


def test_grey_with_transparency_is_composited_too() -> None:
    grey_alpha = Image.merge("LA", [Image.new("L", (2, 1), 10), Image.fromarray(np.array([[0, 255]], np.uint8))])
    assert pixels(encoded(grey_alpha, "PNG"))[0, :, 0].tolist() == [255, 10]


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_is_white(mode: str) -> None:
    picture = Image.new("RGB", (2, 1), (0, 0, 0))
    picture.putpixel((1, 0), (200, 200, 200))
    converted = picture.convert(mode, palette=Image.Palette.ADAPTIVE) if mode == "P" else picture.convert(mode)
    key = converted.getpixel((0, 0))
    assert pixels(encoded(converted, "PNG", transparency=key))[0, :, 0].tolist() == [255, 200]


def test_an_opaque_picture_with_an_alpha_channel_is_only_itself() -> None:
    image = open_image(Image.fromarray(corners()).convert("RGBA"))
    assert np.array_equal(np.asarray(image), corners())
    assert notes(image) == ()


# ---------------------------------------------------------------- grey, arrays, tensors


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(Image.fromarray(RAMP), id="PIL L"),
        pytest.param(encoded(Image.fromarray(RAMP), "PNG"), id="PNG"),
        pytest.param(encoded(Image.fromarray(RAMP), "BMP"), id="BMP"),
        pytest.param(RAMP, id="HxW"),
        pytest.param(RAMP[..., None], id="HxWx1"),
        pytest.param(RAMP / 255, id="float64"),
        pytest.param((RAMP / 255).astype(np.float16), id="float16"),
        pytest.param(np.repeat(RAMP[..., None], 3, 2), id="HxWx3"),
        pytest.param(np.dstack([RAMP, RAMP, RAMP, np.full_like(RAMP, 255)]), id="HxWx4"),
        pytest.param(torch.from_numpy(RAMP), id="torch HxW"),
        pytest.param(torch.from_numpy(RAMP / 255)[None], id="torch 1xHxW"),
        pytest.param(torch.from_numpy(RAMP)[None].repeat(3, 1, 1).float().div(255), id="torch 3xHxW"),
        pytest.param(torch.from_numpy(RAMP)[..., None].repeat(1, 1, 3), id="torch HxWx3"),
        pytest.param(Image.fromarray((RAMP / 255).astype(np.float32)), id="PIL F"),
        pytest.param(np.asfortranarray(RAMP), id="columns first in memory"),
    ],
)
def test_grey_in_any_form_equals_its_rgb_copy(source: Any) -> None:
    assert np.array_equal(pixels(source), np.repeat(RAMP[..., None], 3, 2))


def test_a_bfloat16_tensor_is_taken() -> None:
    assert pixels(torch.full((3, 2, 2), 0.5, dtype=torch.bfloat16)).tolist() == [[[128] * 3] * 2] * 2


def test_black_and_white_and_cmyk_become_rgb() -> None:
    assert pixels(Image.new("1", (2, 2), 1)).min() == 255
    assert pixels(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG")).min() > 250


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_become_bytes_by_their_exact_value(dtype: type) -> None:
    unit = np.linspace(-9e-4, 1 + 9e-4, 5001).astype(dtype)
    wanted = np.rint(np.clip(unit.astype(np.float64), 0, 1) * 255)
    ties = np.abs(unit.astype(np.float64) * 255 % 1 - 0.5) < 1e-4  # single precision may round a near-tie
    assert np.array_equal(images.unit_to_uint8(unit)[~ties], wanted[~ties])


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.full((2, 2), np.nan), "not finite"),
        (np.full((2, 2), np.inf), "not finite"),
        (np.full((2, 2, 3), -1.0), "rescale first"),
        (np.full((2, 2, 3), 200.0), "rescale first"),
        (np.zeros((2, 2), np.int64), "int64"),
        (np.zeros((2, 2), bool), "bool"),
        (np.zeros((3, 2, 2), np.uint8), "shape"),
        (np.zeros((2, 2, 2), np.uint8), "shape"),
        (np.zeros((1, 3, 4, 4)), "shape"),
        (np.zeros((0, 4)), "no pixels"),
        (np.zeros(4), "shape"),
    ],
)
def test_an_array_that_is_no_picture_is_refused_with_the_reason(array: np.ndarray, reason: str) -> None:
    with pytest.raises(BadImage, match=reason):
        open_image(array)


@pytest.mark.parametrize("source", [None, 7, {"path": "x"}, object()])
def test_what_is_no_picture_at_all_is_refused(source: Any) -> None:
    with pytest.raises(BadImage, match="is no picture"):
        open_image(source)


def test_the_source_is_never_changed() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    source = Image.open(io.BytesIO(encoded(Image.fromarray(corners()).convert("RGBA"), "PNG", exif=exif)))
    before = source.size, source.mode, dict(source.info)
    opened = open_image(source)
    opened.putpixel((0, 0), (1, 2, 3))
    assert (source.size, source.mode, dict(source.info)) == before
    plain = Image.fromarray(corners())
    open_image(plain).putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(np.asarray(plain), corners())


# ---------------------------------------------------------------- hostile files


def test_a_refusal_is_a_bad_input_that_names_the_image() -> None:
    with pytest.raises(BadInput) as refused:
        open_image(b"")
    assert refused.value.field == "image"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "BMP"])
def test_a_picture_cut_short_is_refused(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), format)
    for kept in (0.0, 0.01, 0.3, 0.6, 0.9):
        with pytest.raises(BadImage):
            open_image(data[: int(len(data) * kept)])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"no picture", id="text"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", id="svg"),
        pytest.param(encoded(Image.new("RGB", (4, 4)), "GIF"), id="gif"),
        pytest.param(encoded(Image.new("RGB", (4, 4)), "PPM"), id="ppm"),
        pytest.param(encoded(Image.new("RGB", (4, 4)), "EPS"), id="eps"),
        pytest.param(encoded(Image.new("RGB", (4, 4)), "ICO"), id="ico"),
    ],
)
def test_other_kinds_of_file_are_refused_by_content(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(data)
    with pytest.raises(BadImage, match="save it as one of PNG, JPEG"):
        open_image(tmp_path / "photo.png")


@pytest.mark.parametrize(("width", "height"), [(8001, 8000), (10_000, 10_000), (60_000, 60_000)])
def test_a_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    with pytest.raises(BadImage, match="megapixels"):
        open_image(png(width, height))


def test_a_bomb_of_a_picture_object_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(BadImage, match="megapixels"):
        open_image(Image.open(io.BytesIO(png(8001, 8000))))


def test_too_many_bytes_are_refused_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "photo.png", "wb") as file:
        file.truncate(200 * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(BadImage, match="64 MiB"):
            open_image(tmp_path / "photo.png")
        assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    with pytest.raises(BadImage, match="MiB"):
        open_image(b"x" * 11)


@pytest.mark.parametrize("name", ["none.png", "", "a\0b.png", "x" * 300])
def test_a_path_that_cannot_be_read_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="cannot read") as refused:
        open_image(str(tmp_path / name))
    assert "\n" not in str(refused.value)


def test_a_picture_of_no_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()
    with pytest.raises(BadImage, match="empty"):
        open_image(tmp_path / "photo.png")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "TIFF", "BMP"]), st.randoms(use_true_random=False))
def test_a_corrupted_file_is_a_picture_or_a_refusal_and_nothing_else(format: str, random: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = bytearray(encoded(Image.fromarray(corners(16, 12)), format, exif=exif))
    for _ in range(random.randint(1, 6)):
        data[random.randrange(len(data))] = random.randrange(256)
    try:
        assert open_image(bytes(data)).mode == "RGB"
    except BadImage as refused:
        assert "\n" not in str(refused)


# ---------------------------------------------------------------- animations


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken_and_said(format: str) -> None:
    first, second = Image.new("RGB", (8, 8), (250, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 250))
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second], **options)
    image = open_image(data)
    assert image.getpixel((4, 4)) == (250, 0, 0)
    assert notes(image) == ("took frame 1 of 2",)


# ---------------------------------------------------------------- fit


@pytest.mark.parametrize(("width", "height"), [(90, 160), (160, 90), (100, 100), (33, 47)])
@pytest.mark.parametrize("source_size", [(640, 360), (360, 640), (64, 36)])
def test_a_circle_stays_round_and_in_the_middle(source_size: tuple[int, int], width: int, height: int) -> None:
    picture = Image.new("RGB", source_size)
    radius = min(source_size) * 0.3
    middle = source_size[0] / 2 - 0.5, source_size[1] / 2 - 0.5
    ImageDraw.Draw(picture).circle(middle, radius, fill=(255, 255, 255))
    fitted = fit(picture, width, height)
    inside = np.asarray(fitted)[..., 0] > 127
    scale = max(width / source_size[0], height / source_size[1])
    assert fitted.size == (width, height)
    columns, rows = inside.any(0), inside.any(1)
    middle_column = inside[:, width // 2].sum()
    middle_row = inside[height // 2].sum()
    assert abs(middle_column - min(height, 2 * radius * scale)) <= 2 + scale
    assert abs(middle_row - min(width, 2 * radius * scale)) <= 2 + scale
    assert abs(columns.argmax() - columns[::-1].argmax()) <= 1 + scale
    assert abs(rows.argmax() - rows[::-1].argmax()) <= 1 + scale


def test_a_picture_of_the_right_size_is_untouched() -> None:
    picture = open_image(corners())
    assert fit(picture, 48, 32) is picture


def test_fit_says_what_it_did_after_what_was_done_before() -> None:
    picture = open_image(np.dstack([corners(), np.zeros((32, 48), np.uint8)]))
    assert notes(fit(picture, 16, 16)) == (
        "composited on white where transparent",
        "scaled and centre-cropped from 48x32 to 16x16",
    )


def test_fine_stripes_scale_down_to_grey_and_not_to_false_stripes() -> None:
    stripes = np.zeros((400, 400, 3), np.uint8)
    stripes[:, ::2] = 255
    assert np.ptp(np.asarray(fit(Image.fromarray(stripes), 130, 130))[5:-5, 5:-5].astype(int)) < 25


def test_notes_of_a_foreign_picture_are_none_even_if_it_claims_some() -> None:
    picture = Image.new("RGB", (1, 1))
    picture.info["undercrank_notes"] = "forged"
    assert notes(picture) == ()
