"""Films and latents from files, for comparison: tensors, lossless masters, folders of PNG. A lossy file is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undercrank import images, video
from undercrank.records import BadInput, NotFound

TENSORS = (".pt", ".pth", ".npy", ".safetensors")
LOSSY = (".mp4", ".mov", ".webm", ".gif", ".webp", ".jpg", ".jpeg", ".avi")
LOSSLESS_RGB = {"ffv1": ("bgr0", "bgra", "gbrp", "rgb24")}
"Codec -> pixel formats that keep every 8-bit value of red, green and blue."
TAKES = ".pt, .npy and .safetensors, .mkv masters (`generate --master`), a .png or a folder of .png"


@dataclass(frozen=True, kw_only=True)
class Footage:
    """What a file held. kind frames: one tensor F 3 H W. kind latents: one tensor a step."""

    name: str
    kind: str
    tensors: tuple[torch.Tensor, ...]


def read_footage(path: Path, *, kind: str = "auto", key: str | None = None) -> Footage:
    """Read one side of a comparison.

    kind: frames, latents, or auto: four axes of which the last or the second is 3 are frames, all else is latents.
    Latents of six axes are a trajectory, a step each. key: which tensor of a file that holds several.
    Raises NotFound, BadInput (lossy, empty, unknown, pickled code).
    """
    if not path.exists():
        raise NotFound(f"there is no file {path}")
    suffix = path.suffix.lower()
    if path.is_dir() or suffix == ".png":
        return _frames(path, _pictures(path))
    if suffix in TENSORS:
        return _sorted_out(path, _tensor(path, suffix, key), kind)
    if suffix in LOSSY:
        raise BadInput(
            f"{path.name} is lossy: its compression moves pixels on its own, and that would be measured. Compare "
            "masters (undercrank generate --master clip.mkv) or tensors"
        )
    if suffix == ".mkv":
        return _frames(path, _master(path))
    raise BadInput(f"{path.name}: cannot be compared; give {TAKES}")


def _frames(path: Path, frames_FHWC: np.ndarray) -> Footage:
    frames_FCHW = torch.from_numpy(frames_FHWC).permute(0, 3, 1, 2)
    return Footage(name=path.name, kind="frames", tensors=(frames_FCHW,))


def _master(path: Path) -> np.ndarray:
    info = video.probe(path)
    if info.pix_fmt not in LOSSLESS_RGB.get(info.codec, ()):
        raise BadInput(
            f"{path.name} holds {info.codec} in {info.pix_fmt}, which does not keep every value of "
            "red, green and blue: compare masters (undercrank generate --master clip.mkv) or tensors"
        )
    return video.read_frames(path)


def _pictures(path: Path) -> np.ndarray:
    """PNG files in the order of the numbers in their names."""
    files = sorted(path.glob("*.png"), key=_natural) if path.is_dir() else [path]
    if not files:
        raise BadInput(f"{path} holds no .png: give {TAKES}")
    frames = [np.asarray(images.open_image(file)) for file in files]
    for file, frame in zip(files, frames, strict=True):
        if frame.shape != frames[0].shape:
            size, first = (f"{each.shape[1]}x{each.shape[0]}" for each in (frame, frames[0]))
            raise BadInput(f"{file.name} is {size} and {files[0].name} is {first}: frames of one film have one size")
    return np.stack(frames)


def _natural(file: Path) -> list[tuple[int, int, str]]:
    parts = re.findall(r"\d+|\D+", file.stem)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _tensor(path: Path, suffix: str, key: str | None) -> torch.Tensor:
    try:
        found = _read(path, suffix)
    except BadInput:
        raise
    except Exception as error:  # the readers raise whatever a broken file makes them raise; all of it means this
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path.name} cannot be read as {suffix}: {first[:160]}") from error
    if isinstance(found, dict):
        return _one_of(found, path, key)
    if not isinstance(found, torch.Tensor):
        raise BadInput(f"{path.name} holds a {type(found).__name__}, not a tensor: save the tensor itself")
    return found


def _read(path: Path, suffix: str) -> Any:
    if suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array))
    if suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _one_of(tensors: dict[str, Any], path: Path, key: str | None) -> torch.Tensor:
    named = {str(name): value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    if key is None and len(named) == 1:
        return next(iter(named.values()))
    if key in named:
        return named[key]
    have = ", ".join(list(named)[:8]) or "none"
    raise BadInput(f"{path.name} holds {len(named)} tensors ({have}): say which with --key", field="key")


def _sorted_out(path: Path, tensor: torch.Tensor, kind: str) -> Footage:
    looks_like_frames = tensor.ndim == 4 and 3 in (tensor.shape[3], tensor.shape[1])
    if kind == "frames" or (kind == "auto" and looks_like_frames):
        if tensor.ndim == 4 and tensor.shape[3] == 3:
            tensor = tensor.permute(0, 3, 1, 2)
        return Footage(name=path.name, kind="frames", tensors=(tensor,))
    if not tensor.is_floating_point():
        word = str(tensor.dtype).removeprefix("torch.")
        raise BadInput(f"{path.name} holds {word} of shape {tuple(tensor.shape)}: latents are floats, frames F H W 3")
    return Footage(name=path.name, kind="latents", tensors=tuple(tensor) if tensor.ndim == 6 else (tensor,))
