"""Two films, or two latents -> their distances, with units and direction; and what is wrong with a film by itself.

Distances are taken on tensors and lossless files, never on an mp4: compression moves pixels on its own. Each metric
of `metrics.py` is one function here. Those that need a package or weights (extra `undercrank[metrics]`) say why they
were not computed where these are missing; nothing stands in for them. This is the only module that touches them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from undercrank.metrics import METRICS
from undercrank.records import BadInput, Distance, FidelityReport
from undercrank.settings import settings

CHUNK_PIXELS = 8 * 480 * 832
"Frames are taken in groups of about so many pixels, so that a long film is never held in floats at once."
EQUAL_DB = 150.0
"Stands for the infinite PSNR of equal frames; no two different uint8 films of up to 10^10 values come near it."
BLACK_BELOW = 8
"A frame whose brightest value (of 255) is below this is black."
LUMA = (0.2126, 0.7152, 0.0722)  # BT.709


class NotComputed(Exception):
    """This metric has no value here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Reference A and film B, F 3 H W each: uint8, or floats in 0..1."""

    a_FCHW: torch.Tensor
    b_FCHW: torch.Tensor
    device: str = "cpu"

    @property
    def frames(self) -> int:
        return len(self.a_FCHW)

    @property
    def height(self) -> int:
        return int(self.a_FCHW.shape[2])

    @property
    def width(self) -> int:
        return int(self.a_FCHW.shape[3])

    def chunks(self, *, overlap: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Groups of frames as floats in 0..1 on the device. overlap 1: each group begins with the last of the one
        before."""
        size = max(1 + overlap, CHUNK_PIXELS // (self.height * self.width))
        for start in range(0, max(1, self.frames - overlap), size - overlap):
            part = slice(start, start + size)
            yield _unit(self.a_FCHW[part], self.device), _unit(self.b_FCHW[part], self.device)

    def per_frame(self, measure: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[float]:
        with torch.inference_mode():
            return [value for a, b in self.chunks() for value in measure(a, b).double().tolist()]


def compare_frames(
    a_FCHW: torch.Tensor,
    b_FCHW: torch.Tensor,
    *,
    names: Iterable[str] | None = None,
    a: str = "A",
    b: str = "B",
    device: str = "cpu",
) -> FidelityReport:
    """How far the film B is from its reference A. Both F 3 H W, uint8 or floats in 0..1, of one shape.

    names: metrics to take, all of those for frames when None. Raises BadInput where no distance is defined: other
    shapes, no frames, values that are not finite or not in 0..1.
    """
    refuse_unequal_shapes(a_FCHW, b_FCHW, a, b)
    for name, film in ((a, a_FCHW), (b, b_FCHW)):
        refuse_bad_frames(film, name)
    pair = Pair(a_FCHW=a_FCHW, b_FCHW=b_FCHW, device=device)
    wanted = [name for name in (names or METRICS) if METRICS[name].of == "frames"]
    frames, _, height, width = a_FCHW.shape
    return FidelityReport(
        a=a,
        b=b,
        kind="frames",
        shape=(frames, height, width, 3),
        identical=is_identical(a_FCHW, b_FCHW),
        distances=tuple(_distance(name, pair) for name in wanted),
        faults=faults(b_FCHW),
    )


def compare_latents(
    a: Iterable[torch.Tensor], b: Iterable[torch.Tensor], *, a_name: str = "A", b_name: str = "B"
) -> FidelityReport:
    """How far one trajectory of latents is from another: one tensor a step, the last one the result. Any one shape.

    The value is that of the last step; the curve has one value for each.
    """
    pairs = list(zip(a, b, strict=True))
    if not pairs:
        raise BadInput("no latents to compare: give at least one tensor")
    for step, (x, y) in enumerate(pairs):
        refuse_unequal_shapes(x, y, a_name, b_name)
        for name, tensor in ((a_name, x), (b_name, y)):
            _refuse_non_finite(tensor, name if len(pairs) == 1 else f"{name}, step {step + 1}")
    curves = {
        "latent_rel": [relative_error(x, y) for x, y in pairs],
        "latent_max_abs": [float((x.double() - y.double()).abs().max()) for x, y in pairs],
    }
    return FidelityReport(
        a=a_name,
        b=b_name,
        kind="latents",
        shape=tuple(pairs[-1][0].shape),
        identical=all(is_identical(x, y) for x, y in pairs),
        distances=tuple(distance_of(name, curve[-1], curve) for name, curve in curves.items()),
    )


def distance_of(name: str, value: float | None, curve: Iterable[float] = (), note: str = "") -> Distance:
    """A value of that metric with its unit, direction and worst place."""
    metric, along = METRICS[name], tuple(curve)
    worst = metric.furthest(list(along)) if along else None
    return Distance(
        metric=name, value=value, unit=metric.unit, closer=metric.closer, worst=worst, curve=along, note=note
    )


def is_identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b.to(a.device))


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||b - a|| / ||a||, in double precision; of two zeros 0. Raises NotComputed where only A is zero."""
    difference, size = float((b.double() - a.double()).norm()), float(a.double().norm())
    if size == 0 and difference > 0:
        raise NotComputed("A is zero everywhere: a ratio to it has no meaning")
    return difference / size if size else 0.0


# --------------------------------------------------------------------------- one function a metric


def _distance(name: str, pair: Pair) -> Distance:
    try:
        return FRAME_METRICS[name](pair)
    except NotComputed as reason:
        return distance_of(name, None, note=f"not computed: {reason}")


def _max_abs(pair: Pair) -> Distance:
    curve = pair.per_frame(lambda a, b: (a - b).abs().amax((1, 2, 3)) * 255)
    return distance_of("max_abs", max(curve), curve)


def _rel_l2(pair: Pair) -> Distance:
    size = pair.per_frame(lambda a, b: a.square().double().sum((1, 2, 3)))
    error = pair.per_frame(lambda a, b: (b - a).square().double().sum((1, 2, 3)))
    if sum(size) == 0 and sum(error) > 0:
        raise NotComputed("A is black everywhere: a ratio to it has no meaning")
    mean = sum(size) / len(size) or 1.0
    return distance_of("rel_l2", math.sqrt(sum(error) / len(error) / mean), [math.sqrt(e / mean) for e in error])


def _psnr_db(pair: Pair) -> Distance:
    """Of the whole film's mean square; the curve is that of each frame."""
    errors = pair.per_frame(lambda a, b: (a - b).square().double().mean((1, 2, 3)))
    value = _decibel(sum(errors) / len(errors))
    note = f"equal frames: {EQUAL_DB:g} stands for infinite" if value == EQUAL_DB else ""
    return distance_of("psnr_db", value, map(_decibel, errors), note)


def _decibel(mean_square: float) -> float:
    return EQUAL_DB if mean_square == 0 else min(EQUAL_DB, -10 * math.log10(mean_square))


def _ssim(pair: Pair) -> Distance:
    """Wang et al. 2004: 11x11 Gaussian of sigma 1.5, K 0.01 and 0.03, the mean over RGB and the inner pixels."""
    _refuse_small(pair, _WINDOW, "SSIM's window")
    return _mean_of_frames("ssim", pair, lambda a, b: _ssim_and_contrast(a, b)[0].mean(1))


def _ms_ssim(pair: Pair) -> Distance:
    """Wang et al. 2003: five scales; of a small frame as many as its side allows, their weights made to sum to 1."""
    _refuse_small(pair, _WINDOW, "MS-SSIM's window")
    side = min(pair.height, pair.width)
    scales = max(n for n in range(1, 6) if side // 2 ** (n - 1) >= _WINDOW)
    weights = [weight / sum(_MS_WEIGHTS[:scales]) for weight in _MS_WEIGHTS[:scales]]
    note = "" if scales == 5 else f"{scales} of 5 scales: the frames are small"
    return _mean_of_frames("ms_ssim", pair, functools.partial(_multi_scale, weights=weights), note)


def _tdiff(pair: Pair) -> Distance:
    """||(b[t+1] - b[t]) - (a[t+1] - a[t])|| / ||a[t+1] - a[t]||, over the film."""
    _refuse_one_frame(pair)
    motion, error = [], []
    for a, b in pair.chunks(overlap=1):
        da, db = a.diff(dim=0).double(), b.diff(dim=0).double()
        motion += da.square().sum((1, 2, 3)).tolist()
        error += (db - da).square().sum((1, 2, 3)).tolist()
    if sum(motion) == 0:
        if sum(error) == 0:
            return distance_of("tdiff", 0.0, [0.0] * len(error))
        raise NotComputed("A stands still: motion relative to it has no meaning")
    mean = sum(motion) / len(motion)
    return distance_of("tdiff", math.sqrt(sum(error) / sum(motion)), [math.sqrt(e / mean) for e in error])


def _flicker(pair: Pair) -> Distance:
    """The mean over t of |(Lb[t+1] - Lb[t]) - (La[t+1] - La[t])|, L the mean luma (BT.709) of a frame, of 255."""
    _refuse_one_frame(pair)
    luma = torch.tensor(LUMA, dtype=torch.float64, device=pair.device)
    a = np.array(pair.per_frame(lambda a, b: a.double().mean((2, 3)) @ luma))
    b = np.array(pair.per_frame(lambda a, b: b.double().mean((2, 3)) @ luma))
    curve = np.abs(np.diff(b) - np.diff(a)) * 255
    return distance_of("flicker", float(curve.mean()), curve.tolist())


def _st_lpips_alex(pair: Pair) -> Distance:
    """Shift-tolerant LPIPS (Ghildyal and Liu 2022), from the weights of the wheel stlpips-pytorch 0.0.2."""
    net = _st_lpips_net(pair.device)
    enlarge = min(pair.height, pair.width) <= 128
    note = "frames enlarged x2: the net sees little at this size" if enlarge else ""
    return _mean_of_frames("st_lpips_alex", pair, lambda a, b: net(_twice(a, enlarge), _twice(b, enlarge)), note)


def _lpips(pair: Pair) -> Distance:
    """LPIPS (Zhang et al. 2018), AlexNet, version 0.1: backbone from a file that you have, heads of the wheel lpips."""
    net = _lpips_net(pair.device)
    _refuse_small(pair, 32, "AlexNet")
    return _mean_of_frames("lpips", pair, net)


def _flip(pair: Pair) -> Distance:
    """FLIP for standard range (Andersson et al. 2020), by the package flip-evaluator, at its default distance."""
    if importlib.util.find_spec("flip_evaluator") is None:
        raise NotComputed("the package flip-evaluator is not here: pip install 'undercrank[metrics]'")
    import flip_evaluator

    def one(frame_CHW: torch.Tensor) -> np.ndarray:
        return np.ascontiguousarray(frame_CHW.permute(1, 2, 0).float().cpu().numpy())

    def flip(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        values = [
            flip_evaluator.evaluate(one(x), one(y), "LDR", applyMagma=False)[1] for x, y in zip(a, b, strict=True)
        ]
        return torch.tensor(values)

    return _mean_of_frames("flip", pair, flip)


def _vmaf(pair: Pair) -> Distance:
    """VMAF v0.6.1 by libvmaf, in the ffmpeg program that the package imageio-ffmpeg brings (GPL, run as a process)."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise NotComputed("the package imageio-ffmpeg is not here: pip install 'undercrank[metrics]'")
    import imageio_ffmpeg

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("b.rgb", "a.rgb")]
        for file, film in zip(files, (pair.b_FCHW, pair.a_FCHW), strict=True):
            with file.open("wb") as out:
                for frame_CHW in film:
                    out.write(_eight_bit(frame_CHW).permute(1, 2, 0).contiguous().cpu().numpy().tobytes())
        return _run_vmaf(imageio_ffmpeg.get_ffmpeg_exe(), files, Path(folder) / "vmaf.json", pair)


FRAME_METRICS: dict[str, Callable[[Pair], Distance]] = {
    "max_abs": _max_abs,
    "rel_l2": _rel_l2,
    "psnr_db": _psnr_db,
    "ssim": _ssim,
    "ms_ssim": _ms_ssim,
    "tdiff": _tdiff,
    "flicker": _flicker,
    "st_lpips_alex": _st_lpips_alex,
    "lpips": _lpips,
    "flip": _flip,
    "vmaf": _vmaf,
}


def _mean_of_frames(
    name: str, pair: Pair, measure: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], note: str = ""
) -> Distance:
    curve = pair.per_frame(measure)
    return distance_of(name, sum(curve) / len(curve), curve, note)


def _refuse_small(pair: Pair, side: int, what: str) -> None:
    if min(pair.height, pair.width) < side:
        raise NotComputed(f"{pair.width}x{pair.height} is smaller than {what} of {side} pixels")


def _refuse_one_frame(pair: Pair) -> None:
    if pair.frames < 2:
        raise NotComputed("one frame has no motion")


# --------------------------------------------------------------------------- how: SSIM


_WINDOW = 11
_MS_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def _ssim_and_contrast(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SSIM and its contrast-structure part, one value each for every frame and colour of N 3 H W."""
    a, b = a.double(), b.double()  # a variance is a small difference of large numbers
    mean_a, mean_b = _blurred(a), _blurred(b)
    var_a, var_b = _blurred(a * a) - mean_a**2, _blurred(b * b) - mean_b**2
    covariance = _blurred(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    contrast = (2 * covariance + c2) / (var_a + var_b + c2)
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return (luminance * contrast).mean((2, 3)), contrast.mean((2, 3))


def _multi_scale(a: torch.Tensor, b: torch.Tensor, *, weights: list[float]) -> torch.Tensor:
    value = torch.ones(a.shape[:2], device=a.device, dtype=torch.float64)
    for scale, weight in enumerate(weights):
        ssim, contrast = _ssim_and_contrast(a, b)
        part = ssim if scale == len(weights) - 1 else contrast
        value = value * part.clamp(min=0) ** weight
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return value.mean(1)


def _blurred(x: torch.Tensor) -> torch.Tensor:
    """Under the Gaussian window, where it lies wholly inside the frame."""
    at = torch.arange(_WINDOW, dtype=x.dtype, device=x.device) - _WINDOW // 2
    line = torch.exp(-(at**2) / (2 * 1.5**2))
    line = (line / line.sum()).expand(x.shape[1], 1, 1, -1)
    rows = F.conv2d(x, line, groups=x.shape[1])
    return F.conv2d(rows, line.transpose(2, 3), groups=x.shape[1])


# --------------------------------------------------------------------------- how: perceptual nets


class _Perceptual(nn.Module):
    """Features of both films layer by layer, each pixel's vector scaled to length 1; weighted squared difference."""

    def __init__(self, slices: list[nn.Sequential], heads: list[torch.Tensor]) -> None:
        super().__init__()
        self.slices = nn.ModuleList(slices)
        self.heads = nn.ParameterList(heads)
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1))
        self.requires_grad_(False).eval()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """N 3 H W in 0..1 each -> N distances."""
        x = (torch.cat([a, b]) * 2 - 1 - self.shift) / self.scale
        total = torch.zeros(len(a), device=a.device)
        for layers, head in zip(self.slices, self.heads, strict=True):
            x = layers(x)
            unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
            total = total + F.conv2d((unit[: len(a)] - unit[len(a) :]) ** 2, head).mean((1, 2, 3))
        return total


class _BlurPool(nn.Module):
    """Half the size after a 3x3 binomial blur; padded by 2, as ST-LPIPS was trained."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0])
        kernel = line[:, None] * line[None]
        self.register_buffer("kernel", (kernel / kernel.sum()).expand(channels, 1, 3, 3).clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, (2,) * 4, mode="reflect"), self.kernel, stride=2, groups=x.shape[1])


ST_LPIPS_SHA256 = "b356b382f96010f77d085ee8343ecd9fd322d0a56e8de2b2d0549fafcad8b9ee"
LPIPS_HEADS_SHA256 = "df73285e35b22355a2df87cdb6b70b343713b667eddbda73e1977e0c860835c0"
ALEXNET = "alexnet-owt-7be5be79.pth"
"torchvision's AlexNet of ImageNet; the digits in the name are the first of its SHA-256."


@functools.cache
def _st_lpips_net(device: str) -> _Perceptual:
    """Only the weights of the wheel are read: one file of its code is CC BY-NC-SA, and it needs torchvision."""
    file = _file_in("stlpips_pytorch", "weights/vST0.0/alex_shift_tolerant.pth")
    if file is None:
        raise NotComputed("the package stlpips-pytorch is not here: pip install 'undercrank[metrics]'")
    weights = _weights(file, ST_LPIPS_SHA256)
    conv, relu, cuts = nn.Conv2d, nn.ReLU, ((0, 3), (3, 7), (7, 11), (11, 13), (13, 15))
    layers = [
        conv(3, 64, 11, padding=2), _BlurPool(64), relu(),
        nn.MaxPool2d(3, 1), _BlurPool(64), conv(64, 192, 5, padding=2), relu(),
        nn.MaxPool2d(3, 1), _BlurPool(192), conv(192, 384, 3, padding=1), relu(),
        conv(384, 256, 3, padding=1), relu(),
        conv(256, 256, 3, padding=1), relu(),
    ]  # fmt: skip
    net = _Perceptual(
        [nn.Sequential(*layers[start:end]) for start, end in cuts],
        [weights[f"lin{index}.model.1.weight"] for index in range(5)],
    )
    own = {}
    for name, tensor in weights.items():
        if name.startswith("net.slice") and not name.endswith("filt"):
            part, index, what = name.removeprefix("net.slice").split(".")
            own[f"{int(part) - 1}.{int(index) - cuts[int(part) - 1][0]}.{what}"] = tensor
    net.slices.load_state_dict(own, strict=True)
    return net.to(device)


def _lpips_net(device: str) -> _Perceptual:
    heads = _file_in("lpips", "weights/v0.1/alex.pth")
    if heads is None:
        raise NotComputed("the linear heads are not here: pip install --no-deps lpips")
    backbone = settings().lpips_backbone or Path(torch.hub.get_dir()) / "checkpoints" / ALEXNET
    if not backbone.is_file():
        raise NotComputed(
            f"AlexNet's weights are not here: put torchvision's {ALEXNET} at {backbone}, "
            "or name the file in UNDERCRANK_LPIPS_BACKBONE"
        )
    return _lpips_net_from(backbone, heads, device)


@functools.cache
def _lpips_net_from(backbone: Path, heads: Path, device: str) -> _Perceptual:
    return alex_lpips(
        _weights(backbone, ALEXNET.removesuffix(".pth").rpartition("-")[2]), _weights(heads, LPIPS_HEADS_SHA256)
    ).to(device)


def alex_lpips(backbone: dict[str, torch.Tensor], heads: dict[str, torch.Tensor]) -> _Perceptual:
    """LPIPS from torchvision's AlexNet (`features.0.weight`, ...) and the heads of the wheel lpips (`lin0...`)."""
    conv, relu, pool = nn.Conv2d, nn.ReLU, nn.MaxPool2d
    layers = [
        conv(3, 64, 11, stride=4, padding=2), relu(),
        pool(3, 2), conv(64, 192, 5, padding=2), relu(),
        pool(3, 2), conv(192, 384, 3, padding=1), relu(),
        conv(384, 256, 3, padding=1), relu(),
        conv(256, 256, 3, padding=1), relu(),
    ]  # fmt: skip
    features = nn.Sequential(*layers)
    features.load_state_dict({k.removeprefix("features."): v for k, v in backbone.items() if k.startswith("features.")})
    cuts = (0, 2, 5, 8, 10, 12)
    slices = [features[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    return _Perceptual(slices, [heads[f"lin{index}.model.1.weight"] for index in range(5)])


def _file_in(package: str, path: str) -> Path | None:
    """A data file of an installed package, which is not imported for it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / path
    return file if file.is_file() else None


def _weights(file: Path, digest: str) -> dict[str, torch.Tensor]:
    """Tensors of a .pth whose SHA-256 begins with `digest`; no code of it is run."""
    found = sha256(file.read_bytes()).hexdigest()
    if not found.startswith(digest):
        raise NotComputed(
            f"{file} is not the file that is meant: its SHA-256 begins with {found[:8]}, not {digest[:8]}"
        )
    return torch.load(file, map_location="cpu", weights_only=True)


def _twice(x: torch.Tensor, enlarge: bool) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False) if enlarge else x


# --------------------------------------------------------------------------- how: VMAF


def _run_vmaf(program: str, files: list[Path], log: Path, pair: Pair) -> Distance:
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{pair.width}x{pair.height}", "-r", "25", "-i"]
    inputs = [word for file in files for word in (*raw, str(file))]
    yuv = "scale=out_color_matrix=bt709:out_range=tv,format=yuv420p"
    graph = f"[0:v]{yuv}[b];[1:v]{yuv}[a];[b][a]libvmaf=log_fmt=json:log_path={log.name}"
    command = [program, "-hide_banner", "-loglevel", "error", *inputs, "-lavfi", graph, "-f", "null", "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=log.parent, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise NotComputed(f"{Path(program).name} failed: {lines[0][:120] if lines else done.returncode}")
    curve = [frame["metrics"]["vmaf"] for frame in json.loads(log.read_text())["frames"]]
    return distance_of("vmaf", sum(curve) / len(curve), curve)


# --------------------------------------------------------------------------- what is wrong with a film by itself


def faults(frames_FCHW: torch.Tensor) -> tuple[str, ...]:
    """Frozen, black and non-finite frames, in words; () for a film with none. Frames are counted from 1."""
    float_frames = frames_FCHW.is_floating_point()
    bad = [i for i, f in enumerate(frames_FCHW, 1) if float_frames and not bool(torch.isfinite(f).all())]
    limit = BLACK_BELOW / 255 if float_frames else BLACK_BELOW
    black = [i for i, f in enumerate(frames_FCHW, 1) if i not in bad and float(f.max()) < limit]
    neighbours = zip(frames_FCHW, frames_FCHW[1:], strict=False)
    frozen = [i for i, (x, y) in enumerate(neighbours, 2) if torch.equal(x, y)]
    found = [
        f"not finite: {_frames_in_words(bad)}" if bad else "",
        f"black: {_frames_in_words(black)}" if black else "",
        f"frozen (equal to the one before): {_frames_in_words(frozen)}" if frozen else "",
    ]
    return tuple(words for words in found if words)


def _frames_in_words(numbers: list[int]) -> str:
    """[3, 4, 5, 9] -> "frames 3-5, 9"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'frame' if len(numbers) == 1 else 'frames'} {words}"


# --------------------------------------------------------------------------- what cannot be compared


def refuse_unequal_shapes(a: torch.Tensor, b: torch.Tensor, a_name: str, b_name: str) -> None:
    if a.shape == b.shape:
        return
    frames = a.ndim == b.ndim == 4 and a.shape[1] == b.shape[1] == 3
    if not frames:
        raise BadInput(f"{a_name} has shape {tuple(a.shape)}, {b_name} {tuple(b.shape)}: give two of one shape")
    if len(a) != len(b):
        raise BadInput(f"{a_name} has {len(a)} frames, {b_name} has {len(b)}: compare clips of one request, or cut one")
    sizes = [f"{film.shape[3]}x{film.shape[2]}" for film in (a, b)]
    raise BadInput(
        f"{a_name} is {sizes[0]}, {b_name} is {sizes[1]}: compare clips of one size; scaling would be measured"
    )


def refuse_bad_frames(frames_FCHW: torch.Tensor, name: str) -> None:
    if frames_FCHW.ndim != 4 or frames_FCHW.shape[1] != 3:
        raise BadInput(f"{name} has shape {tuple(frames_FCHW.shape)}: a film is F 3 H W or F H W 3")
    if 0 in frames_FCHW.shape:
        raise BadInput(f"{name} is empty, shape {tuple(frames_FCHW.shape)}: give at least one frame")
    if frames_FCHW.dtype == torch.uint8:
        return
    if not frames_FCHW.is_floating_point():
        raise BadInput(f"{name} holds {_dtype_word(frames_FCHW)}: frames are uint8, or floats in 0..1")
    _refuse_non_finite(frames_FCHW, name)
    low, high = float(frames_FCHW.min()), float(frames_FCHW.max())
    if low < -_SLACK or high > 1 + _SLACK:
        raise BadInput(
            f"{name} holds values from {low:.4g} to {high:.4g}: frames in floats are 0..1; say --kind latents if these "
            "are latents"
        )


_SLACK = 1e-3  # rounding in a decoder


def _refuse_non_finite(tensor: torch.Tensor, name: str) -> None:
    if tensor.numel() == 0:
        raise BadInput(f"{name} is empty, shape {tuple(tensor.shape)}: there is nothing to compare")
    finite = torch.isfinite(tensor)
    if bool(finite.all()):
        return
    first = int((~finite.reshape(len(tensor), -1).all(1) if tensor.ndim else ~finite.reshape(1)).nonzero()[0])
    raise BadInput(
        f"{name} holds {int((~finite).sum())} values that are NaN or infinite, the first in frame or item {first + 1}: "
        "the run overflowed and has no distance to anything; make it again in bfloat16 or float32"
    )


def _dtype_word(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _unit(frames: torch.Tensor, device: str) -> torch.Tensor:
    moved = frames.to(device)
    return moved.float() / 255 if moved.dtype == torch.uint8 else moved.float()


def _eight_bit(frame: torch.Tensor) -> torch.Tensor:
    return frame if frame.dtype == torch.uint8 else (frame.float() * 255).round().clamp(0, 255).to(torch.uint8)


def as_FCHW(frames_FHWC: Any) -> torch.Tensor:
    """A clip's `frames_FHWC` (numpy, uint8) as the metrics take it; not copied."""
    return torch.from_numpy(np.ascontiguousarray(frames_FHWC)).permute(0, 3, 1, 2)
