"""Frames on their way from the device: uint8 before they leave it, and chunk by chunk where the decoder gives chunks.

What is rounded on the device is rounded as on the host: x * 255 in float32, half to even.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from undercrank import video
from undercrank.images import UNIT_SLACK
from undercrank.rig import Rig
from undercrank.undo import appended


def from_device(film: Any) -> np.ndarray:
    """One film as frames_FHWC uint8. film: what a pipeline shows with `output_type="pt"`, F 3 H W in 0..1; anything
    else goes as `video.as_uint8` takes it. Raises BadFrames."""
    if not isinstance(film, torch.Tensor) or film.ndim != 4 or film.shape[1] != 3 or not film.numel():
        return video.as_uint8(film)
    frames_FHWC, is_good = _as_uint8(film)
    if not bool(is_good):
        return video.as_uint8(film)  # which names the first bad frame
    return np.asarray(frames_FHWC.cpu().numpy())


def _as_uint8(unit_FCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Frame by frame, so that floats are held for one only: the frames, and whether all values are in 0..1 (a flag that
    stays on the device)."""
    frames, height, width = (unit_FCHW.shape[i] for i in (0, 2, 3))
    frames_FHWC = torch.empty((frames, height, width, 3), dtype=torch.uint8, device=unit_FCHW.device)
    flags = []
    for place, frame_CHW in zip(frames_FHWC, unit_FCHW, strict=True):
        wide = frame_CHW.permute(1, 2, 0).to(torch.promote_types(frame_CHW.dtype, torch.float32))
        flags.append(torch.all((wide >= -UNIT_SLACK) & (wide <= 1 + UNIT_SLACK)))  # NaN is neither
        place.copy_((wide * 255).round())
    return frames_FHWC, torch.stack(flags).all()


class Ahead:
    """Frames that are encoded while later ones are decoded. They count only if the film is made of them."""

    def __init__(self, rig: Rig, encoder: video.Encoder) -> None:
        self._rig, self._encoder = rig, encoder
        self._seen: list[torch.Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with appended(self._rig.at_frames, self.see):
            yield

    def see(self, chunk_BCFHW: torch.Tensor) -> None:
        """A chunk of decoded frames, of the first film of the batch, in -1..1: made uint8, copied and encoded while the
        device goes on."""
        shown = self._rig.pipe.video_processor.postprocess_video(chunk_BCFHW[:1], output_type="pt")
        frames_FHWC, _ = _as_uint8(shown[0])
        self._seen.append(frames_FHWC)
        self._encoder.put(_copying(frames_FHWC))

    def check(self, film: Any) -> None:
        """Forget what was encoded if the film is another one: a pipeline may change frames after the decode."""
        whole = _as_uint8(film)[0] if self._seen and isinstance(film, torch.Tensor) else None
        same = whole is not None and torch.equal(torch.cat(self._seen), whole)
        self._seen.clear()
        if not same:
            self._encoder.forget()


def _copying(frames_FHWC: torch.Tensor) -> Any:
    """A call that waits for the copy, begun now, and returns the frames on the host."""
    if frames_FHWC.device.type != "cuda":
        return frames_FHWC.numpy
    host = torch.empty(frames_FHWC.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(frames_FHWC, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> np.ndarray:
        copied.synchronize()
        return np.asarray(host.numpy())

    return wait
