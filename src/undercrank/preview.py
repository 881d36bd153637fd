"""A look at the film while it is being denoised: latents to colours by one small matrix, never a decode.

A VAE's latents hold the picture at an eighth of its size; a linear map from their channels to red, green and blue is
enough to see what becomes of it. The map is not a table of ours: it is fitted (least squares) to the first clip that a
model makes here, whose latents and frames are both at hand, and kept in the data folder; flipbook's comes with the
package. Nothing here makes the device wait: a picture is copied to pinned memory and sent when it has arrived.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undercrank.records import Record
from undercrank.rig import Rig
from undercrank.video import appears_whole, safe_stem

EVERY_S = 0.5
"The least time between two pictures."
SHARE = 0.01
"Of the host's time, at most so much goes into pictures: after a dear one the next waits longer."
MAX_ROWS = 20_000
"Latent pixels that the fit looks at."


@dataclass(frozen=True, kw_only=True)
class Colours(Record):
    """How one model's latents look: rgb = weights @ latent + bias, in 0..1."""

    weights: tuple[tuple[float, ...], ...]
    "3 rows (red, green, blue), a column for each latent channel."
    bias: tuple[float, ...]

    @classmethod
    def of(cls, model: str, data: Path) -> Colours | None:
        """Those learned here, else those that come with the package; None: not known yet."""
        own = _kept(data, model)
        if own.is_file():
            return cls.from_json(own.read_text(encoding="utf-8"))
        shipped = json.loads((resources.files("undercrank") / "colours.json").read_text(encoding="utf-8"))
        return cls.from_dict(shipped[model]) if model in shipped else None

    @classmethod
    def fit(cls, latents_CTHW: torch.Tensor, frames_FHWC: np.ndarray) -> Colours:
        """The map under which these latents look most like these frames (uint8), in squared error."""
        channels, T, H, W = latents_CTHW.shape
        stride = (len(frames_FHWC) - 1) // max(1, T - 1)
        middles = [0 if t == 0 else (t - 1) * stride + 1 + stride // 2 for t in range(T)]
        seen = torch.from_numpy(frames_FHWC[np.minimum(middles, len(frames_FHWC) - 1)]).permute(0, 3, 1, 2)
        rgb = torch.nn.functional.adaptive_avg_pool2d(seen.float() / 255, (H, W)).permute(0, 2, 3, 1).reshape(-1, 3)
        rows = latents_CTHW.float().cpu().permute(1, 2, 3, 0).reshape(-1, channels)
        every = -(-len(rows) // MAX_ROWS)
        with_one = torch.cat([rows[::every], torch.ones(len(rows[::every]), 1)], dim=1)
        solution = torch.linalg.lstsq(with_one, rgb[::every], driver="gelsd").solution.T
        return cls(weights=tuple(map(tuple, solution[:, :-1].tolist())), bias=tuple(solution[:, -1].tolist()))

    def keep(self, model: str, data: Path) -> None:
        """For the next clip of this model."""
        file = _kept(data, model)
        file.parent.mkdir(parents=True, exist_ok=True)
        with appears_whole(file) as part:
            part.write_text(self.to_json(), encoding="utf-8")


def _kept(data: Path, model: str) -> Path:
    return data / "colours" / f"{safe_stem(model)}.json"


class Previewer:
    """Looks at the latents of one run (`Engine.generate(on_latents=previewer.see)`) and publishes pictures of them."""

    def __init__(
        self,
        colours: Colours | None,
        publish: Callable[[int, np.ndarray], None],
        *,
        grid_THW: tuple[int, int, int] | None = None,
        every_s: float = EVERY_S,
        share: float = SHARE,
    ) -> None:
        """publish: takes the number of the step and a picture, H W 3 uint8, as large as the latents.

        grid_THW: the shape of latents that come packed as a sequence.
        """
        self.colours = colours
        self._publish, self._grid, self._every_s, self._share = publish, grid_THW, every_s, share
        self._latents: torch.Tensor | None = None
        self._maps: tuple[torch.Tensor, torch.Tensor] | None = None
        self._under_way: tuple[int, torch.Tensor, Any] | None = None
        self._not_before = 0.0

    def see(self, rig: Rig, index: int, latents: torch.Tensor) -> None:
        """After step `index`. Latents of a shape that is not known here are passed over."""
        now_CTHW = as_CTHW(latents, _channels(rig), self._grid)
        before_CTHW, self._latents = self._latents, now_CTHW
        self._send()
        begun = time.monotonic()
        is_time = begun >= self._not_before and self._under_way is None
        if now_CTHW is None or self.colours is None or not is_time:
            return
        middle = now_CTHW.shape[1] // 2
        before_CHW = None if before_CTHW is None else before_CTHW[:, middle]
        latents_CHW = _denoised(rig, index, before_CHW, now_CTHW[:, middle])
        self._begin(index + 1, self._picture(latents_CHW, self.colours))
        self._send()
        self._not_before = begun + max(self._every_s, (time.monotonic() - begun) / self._share)

    def learn(self, frames_FHWC: np.ndarray) -> Colours | None:
        """The colours of this model, if they were not known before and can be told from this clip."""
        if self.colours is not None or self._latents is None:
            return None
        self.colours = Colours.fit(self._latents, frames_FHWC)
        return self.colours

    def _picture(self, latents_CHW: torch.Tensor, colours: Colours) -> torch.Tensor:
        """H W 3 uint8, on the device."""
        if self._maps is None:
            self._maps = (_moved(colours.weights, latents_CHW.device), _moved(colours.bias, latents_CHW.device))
        weights, bias = self._maps
        rgb_HW3 = torch.einsum("chw,rc->hwr", latents_CHW.float(), weights) + bias
        return (rgb_HW3.clamp(0, 1) * 255).to(torch.uint8)

    def _begin(self, step: int, picture: torch.Tensor) -> None:
        if picture.device.type != "cuda":
            self._under_way = (step, picture, None)
            return
        arrived = torch.empty(picture.shape, dtype=picture.dtype, pin_memory=True)
        arrived.copy_(picture, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way = (step, arrived, event)

    def _send(self) -> None:
        """Publish the picture under way, if it is there."""
        if self._under_way is None:
            return
        step, picture, event = self._under_way
        if event is None or event.query():
            self._under_way = None
            self._publish(step, picture.cpu().numpy())


def as_CTHW(latents: torch.Tensor, channels: int | None, grid_THW: tuple[int, int, int] | None) -> torch.Tensor | None:
    """The first of a batch, channels first; None where the shape says nothing that is known here."""
    if latents.ndim == 5 and channels in (None, latents.shape[1]):
        return latents[0]
    if latents.ndim == 5 and latents.shape[2] == channels:  # CogVideoX: frames first
        return latents[0].transpose(0, 1)
    if latents.ndim == 3 and grid_THW and latents.shape[1:] == (grid_THW[0] * grid_THW[1] * grid_THW[2], channels):
        return latents[0].T.reshape(-1, *grid_THW)  # LTX: a sequence
    return None


def _channels(rig: Rig) -> int | None:
    config = getattr(getattr(rig.pipe, "vae", None), "config", None)
    return getattr(config, "z_dim", None) or getattr(config, "latent_channels", None)


def _denoised(rig: Rig, index: int, before: torch.Tensor | None, now: torch.Tensor) -> torch.Tensor:
    """Where a straight line through the last two latents leads at sigma 0 (flow matching); else the latents as they
    are, noise included. Sigmas are read only where that makes nobody wait."""
    sigmas = getattr(rig.scheduler, "sigmas", None)
    if before is None or sigmas is None or not _is_flow(rig.scheduler) or index + 1 >= len(sigmas):
        return now
    if sigmas.device.type != "cpu" and type(sigmas) is torch.Tensor:
        return now
    earlier, later = float(sigmas[index]), float(sigmas[index + 1])
    if earlier == later:
        return now
    return now.float() - later * (now.float() - before.float()) / (later - earlier)


def _is_flow(scheduler: Any) -> bool:
    config = scheduler.config
    return (
        type(scheduler).__name__.startswith("FlowMatch") or getattr(config, "prediction_type", "") == "flow_prediction"
    )


def _moved(values: Any, device: torch.device) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
