"""Files are read back by PyAV or by their bytes, so that a wrong writer and a wrong reader cannot agree."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from undercrank import video
from undercrank.records import BadInput
from undercrank.video import BadFrames, NoRecipe, NotVideo

PATCHES = np.array(
    [
        [255, 0, 0],
        [0, 255, 0],
        [0, 0, 255],
        [255, 255, 255],
        [0, 0, 0],
        [128, 128, 128],
        [200, 30, 90],
        [12, 180, 240],
    ],
    np.uint8,
)
HARD_PROMPT = "一个红球 \U0001f3c0 مرحبا / : \0 \ud800 end."
WRITERS = [
    pytest.param(video.write_mp4, "mp4", id="mp4"),
    pytest.param(video.write_master, "mkv", id="master"),
]


def noise(num_frames: int = 3, width: int = 32, height: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def patches(num_frames: int = 2, side: int = 16) -> np.ndarray:
    row = np.repeat(np.repeat(PATCHES[None], side, 0), side, 1)
    return np.repeat(row[None], num_frames, 0)


def top_level_boxes(path: Path) -> list[str]:
    data, position, names = path.read_bytes(), 0, []
    while position < len(data):
        size = int.from_bytes(data[position : position + 4])
        names.append(data[position + 4 : position + 8].decode())
        position += size
    return names


# ---------------------------------------------------------------- frames


def test_a_picture_for_a_look_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame_HWC = np.full((8, 12, 3), 200, np.uint8)
    file = video.write_picture(tmp_path / "live.jpg", frame_HWC)
    with Image.open(file) as picture:
        assert (picture.format, picture.size) == ("JPEG", (12, 8))
        assert abs(int(np.asarray(picture).mean()) - 200) <= 2

    def fails(*_: object) -> None:
        raise OSError("no space")

    before = file.read_bytes()
    monkeypatch.setattr(video.os, "replace", fails)
    with pytest.raises(OSError):
        video.write_picture(file, frame_HWC // 2)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_uint8_frames_pass_unchanged_and_uncopied() -> None:
    frames = noise()
    assert video.as_uint8(frames) is frames


def test_floats_are_scaled_by_255_and_rounded_half_to_even() -> None:
    halves = np.array([0.5, 1.5, 2.5, 253.5, 254.5]) / 255
    clip = np.repeat(halves[None, None, :, None], 3, axis=3)
    assert video.as_uint8(clip)[0, 0, :, 0].tolist() == [0, 2, 2, 254, 254]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_byte_survives_the_way_through_floats(dtype: type) -> None:
    frames = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    assert np.array_equal(video.as_uint8((frames / 255).astype(dtype)), frames)


def test_a_torch_clip_is_the_same_with_channels_first_or_last() -> None:
    frames = noise()
    channels_first = torch.from_numpy(frames).permute(0, 3, 1, 2)
    assert np.array_equal(video.as_uint8(channels_first), frames)
    assert np.array_equal(video.as_uint8(channels_first.float() / 255), frames)
    assert np.array_equal(video.as_uint8(torch.from_numpy(frames)), frames)


def test_a_bfloat16_clip_that_wants_a_gradient_is_taken() -> None:
    clip = torch.full((1, 3, 4, 4), 0.5, dtype=torch.bfloat16, requires_grad=True)
    assert video.as_uint8(clip).tolist() == np.full((1, 4, 4, 3), 128).tolist()


def test_a_list_of_pictures_is_a_clip() -> None:
    frames = noise()
    assert np.array_equal(video.as_uint8([Image.fromarray(frame) for frame in frames]), frames)


def test_rounding_noise_around_zero_and_one_is_no_error() -> None:
    assert video.as_uint8(np.full((1, 2, 2, 3), -5e-4)).max() == 0
    assert video.as_uint8(np.full((1, 2, 2, 3), 1 + 5e-4)).min() == 255


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("as_clip", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_value_that_is_not_finite_is_refused_with_its_frame(bad: float, as_clip: Callable[..., Any]) -> None:
    clip = np.zeros((5, 4, 4, 3), np.float32)
    clip[3, 1, 2, 0] = bad
    with pytest.raises(BadFrames, match=r"frame 3 .*not finite"):
        video.as_uint8(as_clip(clip))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param(np.full((2, 4, 4, 3), -1.0), r"frame 0 .*-1\.\.1\? rescale first", id="minus one to one"),
        pytest.param(np.full((2, 4, 4, 3), 200.0), "frame 0 .*rescale first", id="bytes as floats"),
        pytest.param(np.zeros((0, 4, 4, 3), np.uint8), "zero frames", id="no frames"),
        pytest.param([], "zero frames", id="empty list"),
        pytest.param(np.zeros((2, 0, 4, 3), np.uint8), "zero rows", id="no rows"),
        pytest.param(np.zeros((2, 4, 4, 4), np.uint8), "4 channels", id="alpha"),
        pytest.param(np.zeros((2, 4, 4, 1), np.float32), "1 channels", id="grey"),
        pytest.param(np.zeros((4, 4, 3), np.uint8), "no clip F,H,W,3", id="one picture"),
        pytest.param(np.zeros((1, 2, 4, 4, 3), np.uint8), "no clip F,H,W,3", id="batch"),
        pytest.param(np.zeros((2, 4, 4, 3), np.int64), "int64", id="wide integers"),
        pytest.param("clip.mp4", "a str is no clip", id="a name"),
        pytest.param(7, "int is no clip", id="a number"),
        pytest.param([Image.new("RGBA", (4, 4))], "frame 0 is a RGBA picture", id="alpha picture"),
        pytest.param([Image.new("RGB", (4, 4)), Image.new("RGB", (4, 6))], "frame 1 has shape", id="two sizes"),
    ],
)
def test_what_is_no_clip_is_refused_with_the_reason(frames: Any, reason: str) -> None:
    with pytest.raises(BadFrames, match=reason):
        video.as_uint8(frames)


def test_the_hash_sees_every_pixel_and_the_shape() -> None:
    frames = noise(2, 4, 4)
    changed = frames.copy()
    changed[-1, -1, -1, -1] ^= 1
    hashes = {video.frames_hash(clip) for clip in (frames, changed, frames.reshape(2, 2, 8, 3), frames[:1])}
    assert len(hashes) == 4


def test_the_hash_is_of_values_and_stays_what_it_was() -> None:
    frames = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    assert video.frames_hash(frames) == "cdf7c35a1173da4e77b581713c8f829aad9e865cc75115df0f9aa37a76b4ce78"
    assert (
        video.frames_hash(np.asfortranarray(frames))
        == "cdf7c35a1173da4e77b581713c8f829aad9e865cc75115df0f9aa37a76b4ce78"
    )


def test_only_a_uint8_clip_has_a_hash() -> None:
    with pytest.raises(BadFrames, match="float64"):
        video.frames_hash(np.zeros((1, 2, 2, 3)))


# ---------------------------------------------------------------- what the mp4 is


def test_the_mp4_is_h264_yuv420p_with_all_four_colour_tags(tmp_path: Path) -> None:
    path = video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={})
    with av.open(str(path)) as file:
        context = file.streams.video[0].codec_context
        assert (context.codec.name, context.pix_fmt, context.profile) == ("h264", "yuv420p", "High")
        assert (context.color_range, context.colorspace, context.color_primaries, context.color_trc) == (
            1,
            1,
            1,
            1,
        )


def test_the_index_stands_before_the_pictures_so_that_a_page_can_start_at_once(tmp_path: Path) -> None:
    boxes = top_level_boxes(video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={}))
    assert boxes.index("moov") < boxes.index("mdat")


def test_colours_are_converted_by_bt709_to_within_one_code(tmp_path: Path) -> None:
    path = video.write_mp4(tmp_path / "clip.mp4", patches(), fps=8, recipe={}, crf=1)
    with av.open(str(path)) as file:
        planes = next(file.decode(video=0)).to_ndarray()
    red, green, blue = (PATCHES / 255).T
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    wanted = [16 + 219 * luma, 128 + 224 * (blue - luma) / 1.8556, 128 + 224 * (red - luma) / 1.5748]
    y, u, v = planes[:16], planes[16:20].reshape(8, 64), planes[20:].reshape(8, 64)
    stored = [y[8, 8::16], u[4, 4::8], v[4, 4::8]]
    assert np.abs(np.array(stored) - np.array(wanted)).max() <= 1.01


@pytest.mark.parametrize(("width", "height"), [(128, 16), (128, 720)], ids=["small", "of 720 rows"])
def test_flat_colours_come_back_within_three(width: int, height: int, tmp_path: Path) -> None:
    frames = np.repeat(patches(1)[:, :1], height, axis=1)
    path = video.write_mp4(tmp_path / "clip.mp4", frames, fps=8, recipe={})
    back = video.read_frames(path)[0, height // 2, 8::16].astype(int)
    assert back.shape == (width // 16, 3)
    assert np.abs(back - PATCHES).max() <= 3


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda frames: frames, id="uint8"),
        pytest.param(lambda frames: frames / 255, id="floats"),
        pytest.param(lambda frames: torch.from_numpy(frames).permute(0, 3, 1, 2) / 255, id="torch"),
        pytest.param(lambda frames: [Image.fromarray(frame) for frame in frames], id="pictures"),
    ],
)
def test_every_kind_of_frames_makes_the_same_film(make: Callable[[np.ndarray], Any], tmp_path: Path) -> None:
    frames = patches()
    path = video.write_mp4(tmp_path / "clip.mp4", make(frames), fps=8, recipe={})
    assert np.abs(video.read_frames(path).mean((0, 1, 2)) - frames.mean((0, 1, 2))).max() < 2


@pytest.mark.parametrize(("width", "height"), [(640, 360), (40, 24), (34, 46), (936, 8)])
def test_an_even_size_is_kept_to_the_pixel(width: int, height: int, tmp_path: Path) -> None:
    path = video.write_mp4(tmp_path / "clip.mp4", noise(1, width, height), fps=8, recipe={"seed": 7})
    info = video.probe(path)
    assert (info.width, info.height) == (width, height)
    assert video.read_recipe(path) == {"seed": 7}
    assert video.read_frames(path).shape == (1, height, width, 3)


@pytest.mark.parametrize(("width", "height"), [(33, 47), (33, 48), (34, 47), (1, 1)])
def test_an_odd_size_is_padded_by_its_edge_and_the_crop_recorded(width: int, height: int, tmp_path: Path) -> None:
    frames = np.zeros((1, height, width, 3), np.uint8)
    frames[:, :, -1] = frames[:, -1] = 255
    path = video.write_mp4(tmp_path / "clip.mp4", frames, fps=8, recipe={"seed": 7}, crf=1)
    with av.open(str(path)) as file:
        stored = next(file.decode(video=0)).to_ndarray(format="gray")
    assert stored.shape == (height + height % 2, width + width % 2)
    assert stored[-1].min() > 250
    assert stored[:, -1].min() > 250
    assert video.read_recipe(path) == {"seed": 7, "crop": {"width": width, "height": height}}
    assert np.abs(video.read_frames(path).astype(int) - frames).max() < 8


def test_a_recipe_used_again_does_not_carry_the_crop_of_another_clip(tmp_path: Path) -> None:
    old = {"seed": 7, "crop": {"width": 1, "height": 1}}
    for write, name in ((video.write_mp4, "a.mp4"), (video.write_master, "a.mkv")):
        assert video.read_recipe(write(tmp_path / name, noise(), fps=8, recipe=old)) == {"seed": 7}
    assert old["crop"] == {"width": 1, "height": 1}


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
@pytest.mark.parametrize("num_frames", [1, 3])
@pytest.mark.parametrize(
    "fps", [Fraction(24000, 1001), Fraction(30000, 1001), 8, Fraction(15, 2), Fraction(25, 1)], ids=str
)
def test_the_frame_rate_and_count_are_exact(
    write: Callable[..., Path], suffix: str, num_frames: int, fps: Fraction | int, tmp_path: Path
) -> None:
    info = video.probe(write(tmp_path / f"clip.{suffix}", noise(num_frames), fps=fps, recipe={}))
    assert (info.fps, info.num_frames) == (fps, num_frames)
    assert info.duration_s == pytest.approx(num_frames / fps)


def test_the_mp4_lasts_exactly_its_frames(tmp_path: Path) -> None:
    path = video.write_mp4(tmp_path / "clip.mp4", noise(9), fps=Fraction(24000, 1001), recipe={})
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        assert stream.duration * stream.time_base == 9 * Fraction(1001, 24000)


@pytest.mark.parametrize("fps", [0, -8, 23.976, Fraction(1, 2_000_000), float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(fps: Any) -> None:
    with pytest.raises(BadInput) as refused:
        video.exact_fps(fps)
    assert refused.value.field == "fps"


@pytest.mark.parametrize("crf", [0, 52])
def test_a_quality_that_browsers_do_not_play_is_refused(crf: int, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="crf"):
        video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={}, crf=crf)


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
def test_the_same_input_gives_the_same_bytes(write: Callable[..., Path], suffix: str, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.{suffix}", noise(4), fps=8, recipe={"seed": 7}, title="t") for name in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_more_threads_than_one_are_not_used_because_they_change_the_bytes() -> None:
    assert video._h264(16).codec_options["threads"] == video._ffv1().codec_options["threads"] == "1"


# ---------------------------------------------------------------- the recipe


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
def test_any_prompt_survives_in_the_recipe(write: Callable[..., Path], suffix: str, tmp_path: Path) -> None:
    recipe = {
        "prompt": HARD_PROMPT * 20,
        "seed": 7,
        "nested": {"list": [1, 2.5, None, True]},
        "big": "x" * 10**6,
    }
    path = write(tmp_path / f"clip.{suffix}", noise(), fps=8, recipe=recipe, title=HARD_PROMPT, comment="你好")
    assert video.read_recipe(path) == recipe


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
def test_title_comment_and_recipe_are_plain_tags_for_other_tools(
    write: Callable[..., Path], suffix: str, tmp_path: Path
) -> None:
    path = write(tmp_path / f"c.{suffix}", noise(), fps=8, recipe={"p": "红球"}, title="a\0b\ud800", comment="你好")
    with av.open(str(path)) as file:
        tags = {key.lower(): value for key, value in file.metadata.items()}
    assert (tags["title"], tags["comment"], tags["recipe"]) == ("a\ufffdb\ufffd", "你好", '{"p": "红球"}')


@pytest.mark.parametrize("recipe", [{"loss": float("nan")}, {"path": Path("x")}])
def test_a_recipe_that_is_no_json_is_refused_before_anything_is_written(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError)):
        video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe=recipe)
    assert not list(tmp_path.iterdir())


def foreign_mp4(path: Path, tags: dict[str, str], *, format: str = "mp4") -> Path:
    """What a tool writes that knows nothing of us: BT.601 mathematics, no colour tags."""
    with av.open(str(path), "w", format=format, options={"movflags": "use_metadata_tags"}) as file:
        file.metadata.update(tags)
        stream = file.add_stream("libx264", rate=8, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 128, 16, "yuv420p"
        for frame in patches():
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return path


@pytest.mark.parametrize("tags", [{}, {"recipe": "not json"}, {"recipe": "[1]"}], ids=["none", "text", "list"])
def test_a_film_without_a_recipe_says_so(tags: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NoRecipe, match=r"clip\.mp4"):
        video.read_recipe(foreign_mp4(tmp_path / "clip.mp4", tags))


@pytest.mark.parametrize(
    "content",
    [b"", b"not a film", b"#EXTM3U\n#EXTINF:1,\nclip.mp4\n", b"ffconcat version 1.0\nfile clip.mp4\n"],
    ids=["empty", "text", "playlist", "concat"],
)
def test_what_is_no_film_is_refused_even_if_it_names_one(content: bytes, tmp_path: Path) -> None:
    video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={"seed": 7})
    (tmp_path / "fake.mp4").write_bytes(content)
    with pytest.raises(NoRecipe):
        video.read_recipe(tmp_path / "fake.mp4")
    for read in (video.probe, video.read_frames):
        with pytest.raises(NotVideo):
            read(tmp_path / "fake.mp4")


def test_a_playlist_is_refused_even_under_its_own_name(tmp_path: Path) -> None:
    foreign_mp4(tmp_path / "clip.ts", {}, format="mpegts")
    playlist = tmp_path / "list.m3u8"
    playlist.write_text("#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:0.25,\nclip.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(NotVideo):
        video.read_frames(playlist)


def test_a_film_whose_tags_are_no_text_is_still_read(tmp_path: Path) -> None:
    path = video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={"seed": 7}, title="ZZZZ")
    path.write_bytes(path.read_bytes().replace(b"ZZZZ", b"\xff\xfe\xc3("))
    assert video.read_recipe(path) == {"seed": 7}


def test_a_missing_film_is_a_missing_file(tmp_path: Path) -> None:
    for read in (video.probe, video.read_frames, video.read_recipe):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none.mp4")


def test_a_film_of_another_tool_is_read_by_its_own_colours(tmp_path: Path) -> None:
    back = video.read_frames(foreign_mp4(tmp_path / "clip.mp4", {}))
    assert np.abs(back[0, 8, 8::16].astype(int) - PATCHES).max() <= 4


# ---------------------------------------------------------------- the master


@pytest.mark.parametrize(("width", "height"), [(47, 33), (64, 48), (1, 1), (481, 27)])
def test_a_master_has_every_pixel_at_any_size(width: int, height: int, tmp_path: Path) -> None:
    frames = noise(3, width, height)
    path = video.write_master(tmp_path / "clip.mkv", frames, fps=Fraction(24000, 1001), recipe={"seed": 7})
    info = video.probe(path)
    assert (info.width, info.height, info.codec, info.pix_fmt) == (width, height, "ffv1", "bgr0")
    assert np.array_equal(video.read_frames(path), frames)
    assert video.read_recipe(path) == {"seed": 7}


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.9])
def test_a_film_that_was_cut_short_is_refused(
    write: Callable[..., Path], suffix: str, kept: float, tmp_path: Path
) -> None:
    path = write(tmp_path / f"clip.{suffix}", noise(6, 64, 64), fps=8, recipe={})
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(NotVideo):
        video.read_frames(path)


def test_a_master_in_which_a_byte_has_changed_is_refused(tmp_path: Path) -> None:
    path = video.write_master(tmp_path / "clip.mkv", noise(6, 64, 64), fps=8, recipe={})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(NotVideo, match="damaged"):
        video.read_frames(path)


# ---------------------------------------------------------------- a file is whole or absent


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
def test_while_it_is_written_a_film_has_only_a_hidden_name(
    write: Callable[..., Path], suffix: str, tmp_path: Path
) -> None:
    path, seen = tmp_path / f"clip.{suffix}", []
    write(path, noise(), fps=8, recipe={}, on_frame=lambda n: seen.append((n, os.listdir(tmp_path))))
    assert [n for n, _ in seen] == [1, 2, 3]
    for _, (name,) in seen:
        assert name.startswith(".clip.")
        assert name.endswith(f".part.{suffix}")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(("write", "suffix"), WRITERS)
def test_a_stopped_write_leaves_the_old_film_and_nothing_else(
    write: Callable[..., Path], suffix: str, error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / f"clip.{suffix}"
    path.write_bytes(b"the old film")

    def stop(num_frames: int) -> None:
        if num_frames == 2:
            raise error

    with pytest.raises(error):
        write(path, noise(), fps=8, recipe={}, on_frame=stop)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(path.name, b"the old film")]


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, numpy as np; from undercrank import video\n"
        "kill = lambda n: n == 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "video.write_mp4(sys.argv[1], np.zeros((3, 16, 16, 3), np.uint8), fps=8, recipe={}, on_frame=kill)"
    )
    ended = subprocess.run([sys.executable, "-c", script, tmp_path / "clip.mp4"], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert all(entry.name.startswith(".") for entry in tmp_path.iterdir())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="tells files from folders by /proc")
def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        calls.append(f"fsync {kind}")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        calls.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={})
    wanted = ["fsync file", "replace clip.mp4", "fsync folder"]
    assert calls == wanted


def test_a_failed_rename_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "no", str(target))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("no/such/folder/clip.mp4", errno.ENOENT),
        ("file/clip.mp4", errno.ENOTDIR),
        ("x" * 252 + ".mp4", errno.ENAMETOOLONG),
    ],
    ids=["missing folder", "file as folder", "name too long"],
)
def test_an_impossible_name_fails_before_the_first_frame(name: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    encoded: list[int] = []
    with pytest.raises(OSError, check=lambda error: error.errno == code):
        video.write_mp4(tmp_path / name, noise(), fps=8, recipe={}, on_frame=encoded.append)
    assert not encoded
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_is_not_replaced_by_a_film(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").mkdir()
    encoded: list[int] = []
    with pytest.raises(IsADirectoryError):
        video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={}, on_frame=encoded.append)
    assert not encoded
    assert os.listdir(tmp_path) == ["clip.mp4"]


@pytest.mark.skipif(os.name != "posix" or not hasattr(os, "geteuid"), reason="needs permission bits")
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_a_permission_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={})
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("name", ["a:b %03d.mp4", "-x.mp4", "红球 \U0001f3c0.mp4", "file:clip.mp4", "x" * 250 + ".mp4"])
def test_odd_but_legal_names_are_only_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert video.read_recipe(video.write_mp4(name, noise(), fps=8, recipe={"seed": 7})) == {"seed": 7}
    assert os.listdir(tmp_path) == [name]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder] if mount else ["false"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(("write", "suffix"), WRITERS)
def test_a_full_disk_is_enospc_and_leaves_nothing(write: Callable[..., Path], suffix: str, small_disk: Path) -> None:
    path = small_disk / f"clip.{suffix}"
    with pytest.raises(OSError, match=path.name, check=lambda error: error.errno == errno.ENOSPC):
        write(path, noise(9, 128, 128), fps=8, recipe={})
    assert not list(small_disk.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="needs setrlimit")
@pytest.mark.parametrize(("write", "suffix"), WRITERS)
@pytest.mark.parametrize("missing_bytes", [1, 40, 5000])
def test_a_write_that_fails_at_the_very_end_is_an_error_too(
    write: Callable[..., Path], suffix: str, missing_bytes: int, tmp_path: Path
) -> None:
    import resource

    path = tmp_path / f"clip.{suffix}"
    size_bytes = write(path, noise(3, 64, 64), fps=8, recipe={}).stat().st_size
    path.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes - missing_bytes, before[1]))
    try:
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EFBIG):
            write(path, noise(3, 64, 64), fps=8, recipe={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arrived", [2, None])
def test_a_frame_that_does_not_arrive_is_an_error(
    arrived: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = video._encode

    def lossy(part: Path, clip_FHWC: np.ndarray, *rest: Any) -> None:
        if arrived is None:
            part.write_bytes(b"")
        else:
            encode(part, clip_FHWC[:arrived], *rest)

    monkeypatch.setattr(video, "_encode", lossy)
    with pytest.raises(OSError, match=f"{arrived or 0} of 3 frames"):
        video.write_mp4(tmp_path / "clip.mp4", noise(), fps=8, recipe={})
    assert not list(tmp_path.iterdir())


def test_frames_that_are_not_finite_never_become_a_file(tmp_path: Path) -> None:
    clip = np.full((3, 16, 16, 3), np.nan, np.float32)
    for write, name in (
        (video.write_mp4, "a.mp4"),
        (video.write_master, "a.mkv"),
        (video.write_webp, "a.webp"),
    ):
        extra = {} if write is video.write_webp else {"recipe": {}}
        with pytest.raises(BadFrames, match="frame 0"):
            write(tmp_path / name, clip, fps=8, **extra)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- previews


def test_the_preview_is_animated_and_keeps_time(tmp_path: Path) -> None:
    path = video.write_webp(tmp_path / "clip.webp", noise(7, 64, 32), fps=Fraction(15, 2), max_width=32)
    with Image.open(path) as picture:
        assert (picture.n_frames, picture.size, picture.format, picture.info["loop"]) == (
            7,
            (32, 16),
            "WEBP",
            0,
        )
        durations_ms = []
        for index in range(7):
            picture.seek(index)
            picture.load()
            durations_ms.append(picture.info["duration"])
    assert durations_ms == video.frame_durations_ms(7, Fraction(15, 2))


def test_the_preview_never_drifts_from_the_film() -> None:
    assert sum(video.frame_durations_ms(2400, Fraction(24000, 1001))) == 100_100
    assert video.frame_durations_ms(3, Fraction(15, 2)) == [133, 134, 133]


def test_a_preview_is_never_made_larger(tmp_path: Path) -> None:
    with Image.open(video.write_webp(tmp_path / "clip.webp", noise(1, 20, 10), fps=8)) as picture:
        assert picture.size == (20, 10)


@pytest.mark.parametrize("index", [0, 2, -1])
def test_a_thumbnail_is_the_frame_asked_for(index: int, tmp_path: Path) -> None:
    frames = noise(3)
    with Image.open(video.write_thumbnail(tmp_path / "clip.png", frames, index=index)) as picture:
        assert picture.format == "PNG"
        assert np.array_equal(np.asarray(picture), frames[index])


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("a red ball rolls left", "a-red-ball-rolls-left"),
        ("", "video"),
        ("...", "video"),
        ("\0\ud800", "video"),
        (".hidden", "hidden"),
        ("../../etc/passwd", "etc-passwd"),
        ('a/b\\c:d*e?f"g<h>i|j\0k', "a-b-c-d-e-f-g-h-i-j-k"),
        ("-rf ~", "rf"),
        ("the end. ", "the-end"),
        ("CON", "_CON"),
        ("nul.txt", "_nul.txt"),
        ("com¹", "_com¹"),
        ("console", "console"),
        ("红球 滚动", "红球-滚动"),
        ("a \U0001f3c0 ball", "a-\U0001f3c0-ball"),
        ("مرحبا بالعالم", "مرحبا-بالعالم"),
        ("safe\u202egpj.exe", "safegpj.exe"),
        ("e\u0301", "\u00e9"),
        ("100% “done”", "100-done"),
    ],
)
def test_a_prompt_becomes_a_readable_name(prompt: str, stem: str) -> None:
    assert video.safe_stem(prompt) == stem


def test_a_long_chinese_prompt_is_cut_between_characters() -> None:
    assert video.safe_stem("球" * 120) == "球" * 26
    assert video.safe_stem("球" * 120, 255) == "球" * 85
    assert video.safe_stem("a red. ball", 8) == "a-red.-b"
    assert video.safe_stem("a reds. ball", 8) == "a-reds"


def test_a_name_cut_down_to_a_reserved_word_is_mended() -> None:
    assert video.safe_stem("con.1234 5678", 8) == "_con.123"
    assert video.safe_stem("lpt1    .....", 8) == "_lpt1"


def test_too_small_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        video.safe_stem("x", 7)


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.characters(exclude_categories=[])) | st.text('.-_ /:\0CONconPRN1\ud800"', max_size=12),
    st.integers(8, 255),
)
def test_any_text_becomes_a_name_that_every_system_takes(prompt: str, limit_bytes: int) -> None:
    stem = video.safe_stem(prompt, limit_bytes)
    assert 0 < len(stem.encode()) <= limit_bytes
    assert stem[0] not in ".-~ "
    assert stem[-1] not in ". "
    assert not set(stem) & set('/\\:*?"<>|')
    assert stem.isprintable()
    assert stem.split(".")[0].upper() not in {"CON", "PRN", "AUX", "NUL", "COM1", "LPT9"}
    assert video.safe_stem(stem, limit_bytes) == stem or stem.startswith("_")


@settings(max_examples=20, deadline=None)
@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_name_a_real_file(tmp_path_factory: pytest.TempPathFactory, prompt: str) -> None:
    path = tmp_path_factory.mktemp("names") / f"{video.safe_stem(prompt)}.json"
    path.write_text(json.dumps(prompt))
    assert os.listdir(path.parent) == [path.name]


def test_the_doctor_hears_of_a_missing_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert video.missing_codecs() == []
    monkeypatch.setattr(av, "codecs_available", {"ffv1"})
    assert video.missing_codecs() == ["libx264"]


def test_reading_and_writing_films_needs_no_torch() -> None:
    script = "import sys, undercrank.video; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
