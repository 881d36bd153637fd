"""What a comparison reads: tensors, masters and PNG come back as they were; what is lossy or broken is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from undercrank import video
from undercrank.footage import read_footage
from undercrank.records import BadInput, NotFound

FRAMES_FHWC = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), dtype=np.uint8)
LATENTS = torch.randn(1, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0))


def write(folder: Path, name: str, tensor: torch.Tensor) -> Path:
    path = folder / name
    if path.suffix == ".npy":
        np.save(path, tensor.numpy())
    elif path.suffix == ".safetensors":
        save_file({"x": tensor}, path)
    else:
        torch.save(tensor, path)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".safetensors"])
def test_frames_and_latents_are_told_apart_by_their_axes(tmp_path: Path, suffix: str) -> None:
    film = read_footage(write(tmp_path, f"film{suffix}", torch.from_numpy(FRAMES_FHWC)))
    assert film.kind == "frames" and film.tensors[0].shape == (3, 3, 16, 24)
    assert torch.equal(film.tensors[0].permute(0, 2, 3, 1), torch.from_numpy(FRAMES_FHWC))
    latents = read_footage(write(tmp_path, f"latents{suffix}", LATENTS))
    assert latents.kind == "latents" and torch.equal(latents.tensors[0], LATENTS)


def test_frames_with_channels_second_are_frames(tmp_path: Path) -> None:
    film = read_footage(write(tmp_path, "film.pt", torch.rand(2, 3, 8, 8)))
    assert film.kind == "frames" and film.tensors[0].shape == (2, 3, 8, 8)


def test_six_axes_are_a_trajectory(tmp_path: Path) -> None:
    steps = read_footage(write(tmp_path, "steps.pt", torch.stack([LATENTS] * 5)))
    assert steps.kind == "latents" and len(steps.tensors) == 5


def test_a_kind_can_be_said(tmp_path: Path) -> None:
    path = write(tmp_path, "x.pt", torch.rand(2, 3, 8, 8))
    assert read_footage(path, kind="latents").kind == "latents"


def test_one_of_several_tensors_is_chosen_by_name(tmp_path: Path) -> None:
    path = tmp_path / "both.safetensors"
    save_file({"latents": LATENTS, "film": torch.from_numpy(FRAMES_FHWC)}, path)
    assert read_footage(path, key="film").kind == "frames"
    with pytest.raises(BadInput, match="holds 2 tensors .*film.*say which with --key"):
        read_footage(path)
    with pytest.raises(BadInput, match="--key"):
        read_footage(path, key="other")


def test_a_master_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = video.write_master(tmp_path / "clip.mkv", FRAMES_FHWC, fps=16, recipe={})
    assert torch.equal(read_footage(path).tensors[0].permute(0, 2, 3, 1), torch.from_numpy(FRAMES_FHWC))


def test_pictures_are_put_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / f"frame{number}.png")
    film = read_footage(tmp_path).tensors[0]
    assert film[:, 0, 0, 0].tolist() == [1, 9, 10] and film.shape == (3, 3, 6, 8)
    assert read_footage(tmp_path / "frame9.png").tensors[0].shape == (1, 3, 6, 8)


def test_pictures_of_two_sizes_are_no_film(tmp_path: Path) -> None:
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    with pytest.raises(BadInput, match="b.png is 8x8 and a.png is 8x6"):
        read_footage(tmp_path)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.webm", "clip.jpg", "CLIP.MOV"])
def test_a_lossy_file_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"whatever")
    with pytest.raises(BadInput, match="lossy: its compression moves pixels on its own.*--master"):
        read_footage(tmp_path / name)


def test_a_matroska_file_that_is_no_master_is_refused(tmp_path: Path) -> None:
    path = video.write_mp4(tmp_path / "clip.mp4", FRAMES_FHWC, fps=16, recipe={}).rename(tmp_path / "clip.mkv")
    with pytest.raises(BadInput, match="holds h264 in yuv420p, which does not keep"):
        read_footage(path)


class Code:
    def __reduce__(self) -> Any:
        return (print, ("this must never be printed",))


def test_code_inside_a_file_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Code()))
    torch.save(Code(), tmp_path / "evil2.pt")
    np.save(tmp_path / "evil.npy", np.array([Code()], dtype=object), allow_pickle=True)
    for name in ("evil.pt", "evil2.pt", "evil.npy"):
        with pytest.raises(BadInput, match="cannot be read"):
            read_footage(tmp_path / name)
    assert "never" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x.pt", "x.npy", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a tensor"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=f"{name} cannot be read"):
        read_footage(tmp_path / name)


def test_what_is_missing_empty_or_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no file"):
        read_footage(tmp_path / "none.pt")
    with pytest.raises(BadInput, match="holds no .png"):
        read_footage(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(BadInput, match="cannot be compared; give .pt"):
        read_footage(tmp_path / "x.txt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(BadInput, match="holds a list, not a tensor"):
        read_footage(tmp_path / "list.pt")
    write(tmp_path, "ints.pt", torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(BadInput, match="latents are floats"):
        read_footage(tmp_path / "ints.pt")
