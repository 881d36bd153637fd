"""Frames leave the device as uint8, chunk by chunk, and a file encoded meanwhile is the file encoded afterwards."""

import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from undercrank import frames, video
from undercrank.engine import Engine
from undercrank.families import family
from undercrank.records import Request
from undercrank.rig import Rig
from undercrank.testing import tiny_pipeline

SMALL = Request(
    prompt="a red ball rolls left", width=64, height=64, num_frames=9, num_inference_steps=2, seed=3,
    wishes=(("decode", "stream"),),
)  # fmt: skip


def film(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(5, 3, 6, 10, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_frames_are_rounded_on_the_device_as_on_the_host(dtype: torch.dtype) -> None:
    shown = film(dtype)
    shown[0, 0, 0, :3] = torch.tensor([0.5 / 255, 1.5 / 255, 1.0])
    assert np.array_equal(frames.from_device(shown), video.as_uint8(shown))


def test_a_film_that_is_not_of_numbers_is_refused_by_its_frame() -> None:
    shown = film()
    shown[2, 1, 3, 4] = float("nan")
    with pytest.raises(video.BadFrames, match="frame 2"):
        frames.from_device(shown)
    with pytest.raises(video.BadFrames, match=r"-1\.\.1"):
        frames.from_device(film() * 2 - 1)


def test_what_is_no_tensor_goes_as_it_went() -> None:
    clip = np.zeros((2, 4, 6, 3), np.uint8)
    assert frames.from_device(clip) is clip


def written(path: Path, clip: np.ndarray, **more: Any) -> bytes:
    return video.write_mp4(path, clip, fps=12, recipe={"seed": 1}, title="a fox", **more).read_bytes()


@pytest.mark.parametrize("sizes", [(9,), (1, 4, 4), (5, 4)], ids=str)
def test_a_file_encoded_ahead_has_the_same_bytes(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    clip = np.random.default_rng(0).integers(0, 255, (9, 32, 48, 3), np.uint8)
    with video.encoding(12) as encoder:
        for begin, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
            encoder.put(lambda part=clip[begin : begin + size]: part)
    assert encoder.encoded is not None
    afterwards, ahead = written(tmp_path / "a.mp4", clip), written(tmp_path / "b.mp4", clip, encoded=encoder.encoded)
    assert ahead == afterwards
    assert written(tmp_path / "c.mp4", clip, encoded=encoder.encoded) == afterwards  # and a second time


def test_what_was_encoded_for_another_rate_or_quality_is_not_used(tmp_path: Path) -> None:
    clip = np.random.default_rng(0).integers(0, 255, (3, 32, 32, 3), np.uint8)
    with video.encoding(24) as encoder:
        encoder.put(lambda: clip)
    assert written(tmp_path / "a.mp4", clip, encoded=encoder.encoded) == written(tmp_path / "b.mp4", clip)
    with video.encoding(12) as encoder:
        encoder.put(lambda: clip)
    same = [written(tmp_path / "c.mp4", clip, crf=30, encoded=each) for each in (encoder.encoded, None)]
    assert same[0] == same[1]


def encoders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "undercrank-encoder"]


def test_the_thread_ends_with_the_block_whatever_happens() -> None:
    with video.encoding(12) as encoder:
        assert encoders()
    assert not encoders() and encoder.encoded is None
    with pytest.raises(ZeroDivisionError), video.encoding(12) as encoder:
        encoder.put(lambda: np.zeros((1, 8, 8, 3), np.uint8))
        raise ZeroDivisionError
    assert not encoders() and encoder.encoded is None


def test_a_chunk_that_fails_costs_the_head_start_only() -> None:
    def broken() -> np.ndarray:
        raise OSError("no")

    with video.encoding(12) as encoder:
        for _ in range(5):
            encoder.put(broken)
    assert encoder.encoded is None and not encoders()


def test_whoever_brings_frames_waits_for_a_slow_encoder() -> None:
    """At most so many chunks wait: here one is being encoded, and the rest of what was put fills the queue."""
    go, brought = threading.Event(), []

    def slow() -> np.ndarray:
        go.wait(30)
        return np.zeros((1, 8, 8, 3), np.uint8)

    def bring(encoder: video.Encoder) -> None:
        for index in range(6):
            encoder.put(slow)
            brought.append(index)

    with video.encoding(12) as encoder:
        thread = threading.Thread(target=bring, args=(encoder,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and len(brought) <= 1 + video.FRAMES_WAIT
        go.set()
        thread.join()
    assert encoder.encoded is not None and len(encoder.encoded.packets) == 6


def test_a_clip_made_with_a_head_start_is_the_clip_made_without(tmp_path: Path) -> None:
    with Engine(encode_ahead=True) as engine:
        ahead = engine.generate(SMALL)
    with Engine() as engine:
        plain = engine.generate(SMALL)
    assert ahead.encoded is not None and len(ahead.encoded.packets) == 9 and plain.encoded is None
    assert np.array_equal(ahead.frames_FHWC, plain.frames_FHWC) and not encoders()
    assert "encode" in ahead.report.trace.stage_s and "encode" not in plain.report.trace.stage_s
    files = [
        video.write_mp4(tmp_path / f"{name}.mp4", clip.frames_FHWC, fps=clip.fps, recipe={}, encoded=clip.encoded)
        for name, clip in (("ahead", ahead), ("plain", plain))
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(video.read_frames(ahead.save(tmp_path / "saved.mp4"))) == 9


def test_frames_that_a_pipeline_changes_after_the_decode_are_not_used() -> None:
    rig = Rig(tiny_pipeline("wan2.1-1.3b"), family("wan2.1-1.3b"), "cpu")
    decoded = torch.rand(1, 3, 5, 8, 8) * 2 - 1
    shown = rig.pipe.video_processor.postprocess_video(decoded, output_type="pt")[0]

    def encoded_if_shown(change: Callable[[torch.Tensor], torch.Tensor]) -> video.Encoded | None:
        with video.encoding(Fraction(12)) as encoder:
            ahead = frames.Ahead(rig, encoder)
            with ahead.watching():
                for callback in rig.at_frames:
                    callback(decoded)
            ahead.check(change(shown))
        return encoder.encoded

    assert encoded_if_shown(lambda film: film) is not None
    assert encoded_if_shown(lambda film: film.flip(0)) is None
    assert encoded_if_shown(lambda film: film[:4]) is None
    assert rig.at_frames == []
