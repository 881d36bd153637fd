"""Pictures in: what a user hands over becomes one upright 8-bit RGB picture, or a refusal with its reason.

The one rule for sizes is `fit`: scale to cover, crop the centre. Nothing is ever stretched.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from undercrank.records import BadInput

MAX_PIXELS = 64_000_000
MAX_BYTES = 64 * 2**20
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
BACKGROUND = (255, 255, 255)
UNIT_SLACK = 1e-3  # how far rounding may leave 0..1; below half a step of 1/255, so no clipping is needed


class BadImage(BadInput):
    """The picture cannot be used; the message says why and what to do, in one line."""

    def __init__(self, message: str, *, field: str | None = "image") -> None:
        super().__init__(message, field=field)


# ---------------------------------------------------------------- the two calls


def open_image(source: Any) -> Image.Image:
    """Any picture as a new, upright RGB `PIL.Image`; the source is not changed.

    source: a path; the bytes of a file; a `PIL.Image`; a numpy array or torch tensor HxW, HxWx1, HxWx3 or
    HxWx4 (a tensor may also be CxHxW) of uint8, uint16 or floats in 0..1.

    EXIF rotation is applied. 16-bit grey is scaled to 8 bits. Transparency is composited on white
    (`BACKGROUND`). Of an animation the first frame is taken. `notes(image)` lists what was done. Colour
    profiles are not applied.

    Raises BadImage: not PNG, JPEG, WebP, TIFF or BMP (by content, not by name); above `MAX_BYTES` or
    `MAX_PIXELS`; cut short, broken or empty; not finite or outside 0..1.
    """
    said = list(notes(source)) if isinstance(source, Image.Image) else []
    picture = _eight_bit(_upright(_decoded(source), said))
    image = _on_background(picture, said)
    image.info = {_NOTES: tuple(said)}
    return image


def plain(width: int, height: int) -> Image.Image:
    """One grey all over."""
    return Image.new("RGB", (width, height), (128, 128, 128))


def notes(image: Image.Image) -> tuple[str, ...]:
    """What `open_image` and `fit` did to this picture, in words; empty when nothing."""
    said = image.info.get(_NOTES)
    return said if isinstance(said, tuple) else ()


_NOTES = "undercrank_notes"


def fit(image: Image.Image, width: int, height: int) -> Image.Image:
    """The picture at exactly width x height pixels: scaled (Lanczos) until it covers, centre-cropped.

    A circle stays round. A picture that has the size already comes back unchanged, pixel for pixel.
    """
    if image.size == (width, height):
        return image
    fitted = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    said = f"scaled and centre-cropped from {image.width}x{image.height} to {width}x{height}"
    fitted.info = {_NOTES: (*notes(image), said)}
    return fitted


# ---------------------------------------------------------------- from source to PIL


def _decoded(source: Any) -> Image.Image:
    if isinstance(source, Image.Image):
        return _loaded(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return _from_bytes(bytes(source))
    if isinstance(source, str | os.PathLike):
        return _from_bytes(_read(Path(source)))
    if hasattr(source, "shape") and hasattr(source, "dtype"):
        return _from_array(as_numpy(source), is_tensor=hasattr(source, "detach"))
    raise BadImage(f"a {type(source).__name__} is no picture: give a path, bytes, a PIL image or an array")


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)  # not by stat: a pipe or a device has no size to ask for
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadImage(f"cannot read the picture {os.fspath(path)!r}: {reason}") from error


def _from_bytes(data: bytes) -> Image.Image:
    if not data:
        raise BadImage("the picture is empty (0 bytes): save or upload it again")
    if len(data) > MAX_BYTES:
        raise BadImage(f"the picture is larger than {MAX_BYTES >> 20} MiB: save it smaller, or as JPEG")
    with _refusing():
        return _loaded(Image.open(io.BytesIO(data), formats=FORMATS))


def _loaded(picture: Image.Image) -> Image.Image:
    _refuse_size(*picture.size)  # a file that was only opened has read its header and no pixel yet
    with _refusing():
        picture.load()
    return picture


@contextmanager
def _refusing() -> Iterator[None]:
    """Whatever Pillow raises, as a BadImage."""
    try:
        yield
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage(f"no picture that can be read here: save it as one of {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(f"more than {MAX_PIXELS // 10**6} megapixels: scale the picture down") from error
    except Exception as error:  # a decoder fed with hostile bytes raises whatever it trips over
        raise BadImage(f"the picture is broken or cut short ({error}): save or upload it again") from error


def _refuse_size(width: int, height: int) -> None:
    if not width or not height:
        raise BadImage(f"the picture has no pixels ({width}x{height})")
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width}x{height}: more than {MAX_PIXELS // 10**6} megapixels, scale it down")


# ---------------------------------------------------------------- from arrays


def as_numpy(array: Any) -> np.ndarray:
    """A numpy array, or a torch tensor of any device and dtype, as numpy; half precision becomes float32."""
    if not hasattr(array, "detach"):
        return np.asarray(array)
    tensor = array.detach().cpu()
    if tensor.is_floating_point() and str(tensor.dtype) != "torch.float64":
        tensor = tensor.float()  # numpy has no bfloat16
    return np.asarray(tensor.numpy())


def unit_to_uint8(unit: np.ndarray) -> np.ndarray:
    """Floats in 0..1 as uint8: x * 255, rounded half to even. Raises ValueError saying what is wrong.

    Up to `UNIT_SLACK` outside 0..1 is rounding noise and rounds to 0 or 255. Anything further follows another
    convention (-1..1, 0..255), and clipping it would make a plausible, wrong picture: refused.
    """
    lowest, highest = float(unit.min()), float(unit.max())  # NaN wins both
    if not (np.isfinite(lowest) and np.isfinite(highest)):
        raise ValueError("holds values that are not finite (NaN or infinite)")
    if lowest < -UNIT_SLACK or highest > 1 + UNIT_SLACK:
        raise ValueError(f"holds values in {lowest:g}..{highest:g}, not 0..1 (-1..1? rescale first)")
    at_least_single = np.promote_types(unit.dtype, np.float32)  # half precision is too coarse for x * 255
    return np.asarray(np.rint(unit.astype(at_least_single, copy=False) * 255), dtype=np.uint8)


def _from_array(array: np.ndarray, *, is_tensor: bool) -> Image.Image:
    picture_HWC = _channels_last(array, is_tensor=is_tensor)
    _refuse_size(picture_HWC.shape[1], picture_HWC.shape[0])
    squeezed = picture_HWC[..., 0] if picture_HWC.shape[2] == 1 else picture_HWC
    return Image.fromarray(np.ascontiguousarray(_array_to_uint8(squeezed)))


def _channels_last(array: np.ndarray, *, is_tensor: bool) -> np.ndarray:
    if array.ndim == 2:
        return array[..., None]
    if array.ndim == 3 and array.shape[2] in (1, 3, 4):
        return array
    if array.ndim == 3 and is_tensor and array.shape[0] in (1, 3, 4):
        return array.transpose(1, 2, 0)
    raise BadImage(f"an array of shape {array.shape} is no picture: give HxW, HxWx1, HxWx3 or HxWx4")


def _array_to_uint8(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.uint16:
        return _sixteen_to_eight(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise BadImage(f"an array of {array.dtype} is no picture: give uint8, uint16 or floats in 0..1")
    try:
        return unit_to_uint8(array)
    except ValueError as error:
        raise BadImage(f"the picture {error}") from error


# ---------------------------------------------------------------- upright, 8 bits, opaque


def _upright(picture: Image.Image, said: list[str]) -> Image.Image:
    """A copy of the current frame, turned as the camera meant it."""
    with _refusing():
        num_frames = getattr(picture, "n_frames", 1)
        orientation = picture.getexif().get(0x0112, 1)
        if num_frames > 1:
            said.append(f"took frame {picture.tell() + 1} of {num_frames}")
        if orientation in range(2, 9):
            said.append(f"turned upright (EXIF orientation {orientation})")
        return ImageOps.exif_transpose(picture)


def _eight_bit(picture: Image.Image) -> Image.Image:
    if picture.mode == "F":
        return Image.fromarray(_array_to_uint8(np.asarray(picture)))
    if picture.mode != "I" and not picture.mode.startswith("I;16"):
        return picture
    grey = np.asarray(picture).astype(np.int64)
    if grey.min() < 0 or grey.max() > 65535:
        raise BadImage(f"grey values {grey.min()}..{grey.max()} do not fit 16 bits: save it with 8 or 16")
    eight = Image.fromarray(_sixteen_to_eight(grey))
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        eight.putalpha(Image.fromarray(np.where(grey == transparent, 0, 255).astype(np.uint8)))
    return eight


def _sixteen_to_eight(wide: np.ndarray) -> np.ndarray:
    """0..65535 to 0..255 by scaling: 65535 / 257 is 255."""
    return np.rint(wide / 257).astype(np.uint8)


def _on_background(picture: Image.Image, said: list[str]) -> Image.Image:
    with _refusing():
        if not picture.has_transparency_data:
            return picture.convert("RGB")
        layer = picture.convert("RGBA")
        if layer.getchannel("A").getextrema() != (255, 255):
            said.append("composited on white where transparent")
        ground = Image.new("RGBA", layer.size, (*BACKGROUND, 255))
        return Image.alpha_composite(ground, layer).convert("RGB")
