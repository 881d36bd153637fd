"""The world flipbook is trained on: one lit, coloured shape that moves in one way before a background.

Everything is drawn here, from integer attribute codes and a few random numbers, so a training set is a seed.
Pure torch: the same functions run on a CPU and on a GPU.  Pixel tensors are named by their axes, for example
``frames_BCTHW``: batch, colour channel, time, height, width; pixel values are in [-1, 1].
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

FRAMES_PER_SECOND = 16
FRAMES = 33  # two seconds of motion, and 4k + 1 as the autoencoder's time lattice wants it
SIDE = 128

SHAPES = ("circle", "square", "triangle", "ring", "cross", "star")
COLOURS = {
    "red": (0.90, 0.12, 0.14), "green": (0.12, 0.72, 0.22), "blue": (0.14, 0.30, 0.92), "yellow": (0.96, 0.86, 0.14),
    "purple": (0.58, 0.18, 0.80), "orange": (0.98, 0.55, 0.10), "cyan": (0.10, 0.82, 0.86), "white": (0.96, 0.96, 0.96),
}  # fmt: skip
BACKGROUNDS = {
    "black": (0.03, 0.03, 0.04), "gray": (0.45, 0.45, 0.47), "navy": (0.06, 0.08, 0.28),
    "green": (0.16, 0.38, 0.14), "sand": (0.76, 0.66, 0.46),
}  # fmt: skip
TEXTURES = ("plain", "striped", "checkered")
MOTIONS = ("left", "right", "up", "down", "spins", "grows", "shrinks", "bounces", "still")
SIZES = {"small": 0.26, "medium": 0.36, "large": 0.48}  # radius, where half the shorter side of the frame is 1

ATTRIBUTES = {
    "shape": SHAPES, "colour": tuple(COLOURS), "background": tuple(BACKGROUNDS), "texture": TEXTURES,
    "motion": MOTIONS, "size": tuple(SIZES),
}  # fmt: skip
JUDGED = ("colour", "shape", "background", "motion")

# Pairs that training never shows; the evaluation asks for them separately.
HELD_OUT_SHAPE_COLOUR = (
    ("star", "blue"), ("ring", "red"), ("triangle", "yellow"),
    ("square", "cyan"), ("circle", "purple"), ("cross", "green"),
)  # fmt: skip
HELD_OUT_MOTION_SHAPE = (("left", "cross"), ("spins", "square"), ("bounces", "triangle"))
# Pairs that nobody could tell apart on the screen, so they are never drawn nor asked for.
INVISIBLE_COLOUR_BACKGROUND = (("white", "sand"), ("yellow", "sand"), ("green", "green"), ("blue", "navy"))
INVISIBLE_MOTION_SHAPE = (("spins", "circle"), ("spins", "ring"))

JITTERS = ("x", "y", "scale", "reach", "turn", "brightness", "phase_x", "phase_y")


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes: one integer code per attribute and one number in [-1, 1] per jitter, each of shape [B]."""

    codes: dict[str, torch.Tensor]
    jitters: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.codes["shape"])

    def __getitem__(self, index) -> Scenes:
        return Scenes({k: v[index] for k, v in self.codes.items()}, {k: v[index] for k, v in self.jitters.items()})

    def to(self, device) -> Scenes:
        codes = {k: v.to(device) for k, v in self.codes.items()}
        return Scenes(codes, {k: v.to(device) for k, v in self.jitters.items()})

    def names(self, row: int) -> dict[str, str]:
        return {name: values[int(self.codes[name][row])] for name, values in ATTRIBUTES.items()}


def sample_scenes(count: int, seed: int, split: str = "seen") -> Scenes:
    """Draw ``count`` scenes on the CPU: ``split`` is "seen" (training's own), "held_out" or "any"."""
    generator = torch.Generator().manual_seed(seed)
    wanted = {"seen": lambda c: ~is_held_out(c), "held_out": is_held_out, "any": lambda c: c["shape"] >= 0}[split]
    kept: list[dict[str, torch.Tensor]] = []
    while sum(len(codes["shape"]) for codes in kept) < count:
        codes = _draw_codes(max(2 * count, 64), generator)
        keep = is_visible(codes) & wanted(codes)
        kept.append({name: code[keep] for name, code in codes.items()})
    codes = {name: torch.cat([part[name] for part in kept])[:count] for name in ATTRIBUTES}
    jitters = {name: torch.rand(count, generator=generator) * 2 - 1 for name in JITTERS}
    return Scenes(codes, jitters)


def _draw_codes(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    codes = {n: torch.randint(len(values), (count,), generator=generator) for n, values in ATTRIBUTES.items()}
    plain = torch.rand(count, generator=generator) < 0.4  # plain backgrounds are the common case in captions
    codes["texture"] = torch.where(plain, 0, codes["texture"])
    return codes


def is_held_out(codes: dict[str, torch.Tensor]) -> torch.Tensor:
    return _any_pair(codes, "shape", "colour", HELD_OUT_SHAPE_COLOUR) | _any_pair(
        codes, "motion", "shape", HELD_OUT_MOTION_SHAPE
    )


def is_visible(codes: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = _any_pair(codes, "colour", "background", INVISIBLE_COLOUR_BACKGROUND)
    return ~(hidden | _any_pair(codes, "motion", "shape", INVISIBLE_MOTION_SHAPE))


def _any_pair(codes: dict[str, torch.Tensor], first: str, second: str, pairs) -> torch.Tensor:
    found = torch.zeros_like(codes[first], dtype=torch.bool)
    for one, two in pairs:
        found |= (codes[first] == ATTRIBUTES[first].index(one)) & (codes[second] == ATTRIBUTES[second].index(two))
    return found


# --------------------------------------------------------------------------------------------------------- captions

SHAPE_WORDS = {
    "circle": ("circle", "circle", "ball", "disc"), "square": ("square", "square", "box"), "triangle": ("triangle",),
    "ring": ("ring", "ring", "hoop"), "cross": ("cross", "cross", "plus"), "star": ("star",),
}  # fmt: skip
MOTION_WORDS = {
    "left": ("moves left", "moves left", "moves to the left", "slides left", "rolls left", "goes left"),
    "right": ("moves right", "moves right", "moves to the right", "slides right", "rolls right", "goes right"),
    "up": ("moves up", "moves up", "goes up", "rises", "floats up"),
    "down": ("moves down", "moves down", "goes down", "falls", "sinks"),
    "spins": ("spins", "spins", "rotates", "turns"),
    "grows": ("grows", "grows", "gets bigger", "expands"),
    "shrinks": ("shrinks", "shrinks", "gets smaller"),
    "bounces": ("bounces", "bounces", "bounces up and down", "jumps"),
    "still": ("stays still", "stays still", "is still", "does not move"),
}


@dataclass(frozen=True)
class CaptionStyle:
    """How often a caption leaves something out.  ``complete`` (below) never does: it is what the evaluation asks."""

    no_background: float = 0.12
    no_motion: float = 0.05
    no_colour: float = 0.04
    no_size: float = 0.10
    prefix: float = 0.10
    full_stop: float = 0.10


complete = CaptionStyle(no_background=0, no_motion=0, no_colour=0, no_size=0)


def caption(names: dict[str, str], rng: random.Random, style: CaptionStyle = CaptionStyle()) -> str:
    thing = _thing(names, rng, style)
    motion = "" if rng.random() < style.no_motion else rng.choice(MOTION_WORDS[names["motion"]])
    ground = "" if rng.random() < style.no_background else _ground(names, rng)
    sentence = _sentence(thing, motion, ground, rng)
    if rng.random() < style.prefix:
        sentence = "a video of " + sentence
    return sentence + ("." if rng.random() < style.full_stop else "")


def _thing(names: dict[str, str], rng: random.Random, style: CaptionStyle) -> str:
    size = "" if names["size"] == "medium" or rng.random() < style.no_size else names["size"]
    colour = "" if rng.random() < style.no_colour else names["colour"]
    words = [word for word in (size, colour, rng.choice(SHAPE_WORDS[names["shape"]])) if word]
    return " ".join(["an" if words[0][0] in "aeiou" else "a", *words])


def _ground(names: dict[str, str], rng: random.Random) -> str:
    pattern = "" if names["texture"] == "plain" else names["texture"] + " "
    if names["background"] == "green" and rng.random() < 0.5:
        return f"a {pattern}green field"
    return f"a {pattern}{names['background']} background"


def _sentence(thing: str, motion: str, ground: str, rng: random.Random) -> str:
    moving = f"{thing} {motion}".strip()
    if not ground:
        return moving
    orders = [f"{moving} on {ground}", f"{moving} on {ground}", f"{moving}, {ground}", f"on {ground}, {moving}"]
    if motion:
        orders.append(f"{thing} on {ground} {motion}")
    return rng.choice(orders)


def captions(scenes: Scenes, seed: int, style: CaptionStyle = CaptionStyle()) -> list[str]:
    rng = random.Random(seed)
    return [caption(scenes.names(row), rng, style) for row in range(len(scenes))]


# --------------------------------------------------------------------------------------------------------- renderer


def clip_times(frames: int, device="cpu") -> torch.Tensor:
    """Motion time of each frame.  Speed does not depend on the length: 17 frames are the first half of 33."""
    return (torch.arange(frames, device=device) / (FRAMES - 1)).clamp(max=1)


@torch.no_grad()
def render(scenes: Scenes, height: int = SIDE, width: int = SIDE, times_BT: torch.Tensor | None = None) -> torch.Tensor:
    """Draw the scenes at the given motion times (default: a whole clip) as ``frames_BCTHW`` in [-1, 1]."""
    device = scenes.codes["shape"].device
    if times_BT is None:
        times_BT = clip_times(FRAMES, device).expand(len(scenes), FRAMES)
    x_W, y_H, pixel = _axes(height, width, device)
    pose = _pose(scenes, times_BT, x_W[-1] + pixel / 2, y_H[-1] + pixel / 2)
    dx_BTHW = (x_W - pose["x"][..., None, None]).expand(-1, -1, height, width)
    dy_BTHW = (y_H[:, None] - pose["y"][..., None, None]).expand(-1, -1, height, width)
    cover_BTHW = _coverage(scenes, dx_BTHW, dy_BTHW, pose, pixel)
    light_BTHW = (1.08 - 0.25 * (dx_BTHW + dy_BTHW)).clamp(0.75, 1.15) * (1 + 0.05 * _column(scenes, "brightness"))
    palette = torch.tensor(list(COLOURS.values()), device=device)
    paint_BC111 = palette[scenes.codes["colour"]][:, :, None, None, None]
    object_BCTHW = (paint_BC111 * light_BTHW[:, None]).clamp(0, 1)
    ground_BC1HW = _ground_pixels(scenes, x_W, y_H)[:, :, None]
    return torch.lerp(ground_BC1HW.expand_as(object_BCTHW), object_BCTHW, cover_BTHW[:, None]).clamp(0, 1) * 2 - 1


def _axes(height: int, width: int, device) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Pixel centres, where half the shorter side is 1, and the size of a pixel in that unit."""
    pixel = 2 / min(height, width)
    x_W = (torch.arange(width, device=device) + 0.5) * pixel - width * pixel / 2
    y_H = (torch.arange(height, device=device) + 0.5) * pixel - height * pixel / 2
    return x_W, y_H, pixel


def _column(scenes: Scenes, jitter: str) -> torch.Tensor:
    return scenes.jitters[jitter][:, None, None, None]


def _pose(scenes: Scenes, times_BT: torch.Tensor, half_width, half_height) -> dict[str, torch.Tensor]:
    """Where the object is, how large and how far turned, each [B, T]."""
    motion_B1 = scenes.codes["motion"][:, None]

    def doing(*names: str) -> torch.Tensor:
        return sum((motion_B1 == MOTIONS.index(name)) for name in names).float()

    x_B1, y_B1, reach_B1, turn_B1 = (scenes.jitters[name][:, None] for name in ("x", "y", "reach", "turn"))
    sideways, upright, bouncing = doing("left", "right"), doing("up", "down"), doing("bounces")
    centred = 1 - sideways - upright - bouncing
    travel = (0.50 + 0.05 * reach_B1) * (1 - 2 * times_BT)  # from the start at +travel to the end at -travel
    hop = 0.42 - (0.85 + 0.05 * reach_B1) * torch.sin(2 * math.pi * times_BT).abs()
    x = x_B1 * (0.05 * sideways + 0.30 * (upright + bouncing) + 0.12 * centred)
    y = y_B1 * (0.05 * upright + 0.30 * sideways + 0.12 * centred)
    x = x + travel * (doing("left") - doing("right"))
    y = y + travel * (doing("up") - doing("down")) + bouncing * hop
    swell = 1 + 0.9 * (times_BT - 0.5) * (doing("grows") - doing("shrinks"))
    shift = doing("grows", "shrinks") * -0.05
    radii = torch.tensor(list(SIZES.values()), device=times_BT.device)
    radius = radii[scenes.codes["size"]][:, None] * (1 + 0.06 * scenes.jitters["scale"][:, None]) * (swell + shift)
    angle = doing("spins") * (math.pi * (1 + 0.1 * turn_B1) * times_BT)
    return {"x": x * half_width, "y": y * half_height, "radius": radius, "angle": angle}


def _coverage(scenes: Scenes, dx_BTHW, dy_BTHW, pose: dict[str, torch.Tensor], pixel: float) -> torch.Tensor:
    """How much of each pixel the object covers: 0 to 1, soft over one pixel at the edge."""
    cos, sin = pose["angle"].cos()[..., None, None], pose["angle"].sin()[..., None, None]
    x, y = dx_BTHW * cos + dy_BTHW * sin, dy_BTHW * cos - dx_BTHW * sin
    radius = pose["radius"][..., None, None]
    shape_B111 = scenes.codes["shape"][:, None, None, None]
    distance = torch.full_like(x, 1e3)
    for code, name in enumerate(SHAPES):
        distance = torch.where(shape_B111 == code, SIGNED_DISTANCES[name](x, y, radius), distance)
    return (0.5 - distance / pixel).clamp(0, 1)


def _circle(x, y, r):
    return torch.hypot(x, y) - r


def _square(x, y, r):
    return torch.maximum(x.abs(), y.abs()) - 0.85 * r


def _triangle(x, y, r):
    slope = math.sqrt(3.0) * x.abs()
    return torch.maximum(y, (slope - y) / 2) - 0.55 * r


def _ring(x, y, r):
    return (torch.hypot(x, y) - 0.8 * r).abs() - 0.22 * r


def _cross(x, y, r):
    x, y = x.abs(), y.abs()
    return torch.minimum(torch.maximum(x - 0.32 * r, y - r), torch.maximum(x - r, y - 0.32 * r))


def _star(x, y, r):
    """Five points, one up: fold the plane into one tenth and measure to the edge from tip to notch."""
    sector = 2 * math.pi / 5
    angle = (torch.atan2(x, -y) + sector / 2).remainder(sector) - sector / 2
    length = torch.hypot(x, y)
    across, along = length * angle.sin().abs(), length * angle.cos()
    notch_across, notch_along = 0.45 * math.sin(sector / 2), 0.45 * math.cos(sector / 2)
    edge = math.hypot(notch_across, 1 - notch_along)
    return (across * (1 - notch_along) + (along - r) * notch_across) / edge


SIGNED_DISTANCES = {
    "circle": _circle, "square": _square, "triangle": _triangle, "ring": _ring, "cross": _cross, "star": _star,
}  # fmt: skip


def _ground_pixels(scenes: Scenes, x_W: torch.Tensor, y_H: torch.Tensor) -> torch.Tensor:
    """The background, [B, C, H, W] in 0 to 1: a colour, a pattern with a random phase, slightly lighter at the top."""
    texture_B11 = scenes.codes["texture"][:, None, None]
    wave_x = torch.sin(x_W * 3 * math.pi + math.pi * scenes.jitters["phase_x"][:, None, None])
    wave_y = torch.sin(y_H[:, None] * 3 * math.pi + math.pi * scenes.jitters["phase_y"][:, None, None])
    stripes = (4 * wave_x).clamp(-1, 1) + 0 * wave_y
    checks = (6 * wave_x * wave_y).clamp(-1, 1)
    pattern = torch.where(texture_B11 == 1, stripes, checks) * (texture_B11 > 0)
    shade_BHW = 0.09 * pattern - 0.05 * y_H[:, None]
    palette = torch.tensor(list(BACKGROUNDS.values()), device=x_W.device)
    return palette[scenes.codes["background"]][:, :, None, None] + shade_BHW[:, None]
