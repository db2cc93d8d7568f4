"""Procedural scenes: one coloured shape on a plain ground, and the caption that names it.

These drawings are the whole training set of the built-in model. Everything is drawn from a numpy Generator,
so a seed gives the same pictures again. `checker.py` judges pictures and shares no code with this file.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Point = tuple[float, float]
Rgb = tuple[int, int, int]

COLOURS: dict[str, Rgb] = {
    "red": (215, 25, 35),
    "green": (30, 165, 60),
    "blue": (35, 75, 230),
    "yellow": (250, 225, 30),
    "purple": (150, 40, 190),
    "orange": (255, 135, 10),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
GROUNDS: dict[str, Rgb] = {"white": (255, 255, 255), "black": (0, 0, 0), "gray": (128, 128, 128)}

SIZE = 64  # pixels; the radii below are for this size and scale with the picture
MIN_RADIUS, MAX_RADIUS = 12.0, 20.0
JITTER = 6  # levels by which a colour may differ from its name's colour, each channel
OVERSAMPLE = 4  # scenes are drawn this much larger and averaged down, which smooths the edges


@dataclass(frozen=True)
class Scene:
    """One shape on a ground. `x`, `y` (the centre) and `radius` are fractions of the picture's side."""

    colour: str
    shape: str
    ground: str
    x: float
    y: float
    radius: float
    fill: Rgb
    paper: Rgb

    @property
    def caption(self) -> str:
        """The words the model is trained on, such as `an orange ring on gray`."""
        return caption(self.colour, self.shape, self.ground)


def caption(colour: str, shape: str, ground: str) -> str:
    """`a|an COLOUR SHAPE on GROUND`."""
    article = "an" if colour[0] in "aeiou" else "a"
    return f"{article} {colour} {shape} on {ground}"


def every_caption() -> list[str]:
    """All 108 captions, in a fixed order."""
    return [caption(c, s, g) for c in COLOURS for s in SHAPES for g in GROUNDS]


def random_scene(rng: np.random.Generator) -> Scene:
    """A scene drawn uniformly over the words, with the shape wholly inside the picture."""
    colour = str(rng.choice(list(COLOURS)))
    ground = str(rng.choice(list(GROUNDS)))
    radius = rng.uniform(MIN_RADIUS, MAX_RADIUS) / SIZE
    x, y = rng.uniform(radius + 1 / SIZE, 1 - radius - 1 / SIZE, size=2)
    return Scene(
        colour=colour,
        shape=str(rng.choice(SHAPES)),
        ground=ground,
        x=float(x),
        y=float(y),
        radius=float(radius),
        fill=_jitter(COLOURS[colour], rng),
        paper=_jitter(GROUNDS[ground], rng),
    )


def draw(scene: Scene, size: int = SIZE) -> np.ndarray:
    """The scene as a picture, (size, size, 3) uint8."""
    side = size * OVERSAMPLE
    picture = Image.new("RGB", (side, side), scene.paper)
    _draw_shape(ImageDraw.Draw(picture), scene, side)
    return np.asarray(picture.reduce(OVERSAMPLE))


def random_clip(rng: np.random.Generator, frames: int = 5, size: int = SIZE) -> tuple[np.ndarray, str]:
    """A shape gliding in a straight line inside the picture, (frames, size, size, 3) uint8; its caption."""
    start = random_scene(rng)
    margin = start.radius + 1 / SIZE
    x, y = rng.uniform(margin, 1 - margin, size=2)
    reach = min(1.0, 0.05 * (frames - 1) / max(1e-6, math.hypot(x - start.x, y - start.y)))
    shares = [reach * i / (frames - 1) for i in range(frames)]
    return np.stack([draw(_moved(start, x, y, share), size) for share in shares]), start.caption


def pictures(count: int, seed: int, size: int = SIZE) -> tuple[np.ndarray, list[str]]:
    """`count` scenes as (count, size, size, 3) uint8, and their captions."""
    scenes = list(_stream(count, seed))
    return np.stack([draw(scene, size) for scene in scenes]), [scene.caption for scene in scenes]


def clips(count: int, seed: int, frames: int = 5, size: int = SIZE) -> tuple[np.ndarray, list[str]]:
    """`count` clips as (count, frames, size, size, 3) uint8, and their captions."""
    rng = np.random.default_rng(seed)
    drawn = [random_clip(rng, frames, size) for _ in range(count)]
    return np.stack([clip for clip, _ in drawn]), [caption for _, caption in drawn]


def _stream(count: int, seed: int) -> Iterator[Scene]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield random_scene(rng)


def _moved(scene: Scene, x: float, y: float, share: float) -> Scene:
    """`scene` with its centre moved by `share` of the way to (x, y)."""
    moved_x, moved_y = scene.x + share * (x - scene.x), scene.y + share * (y - scene.y)
    return Scene(scene.colour, scene.shape, scene.ground, moved_x, moved_y, scene.radius, scene.fill, scene.paper)


def _jitter(colour: Rgb, rng: np.random.Generator) -> Rgb:
    shifted = np.clip(np.array(colour) + rng.integers(-JITTER, JITTER + 1, size=3), 0, 255)
    return int(shifted[0]), int(shifted[1]), int(shifted[2])


def _draw_shape(pen: ImageDraw.ImageDraw, scene: Scene, side: int) -> None:
    x, y, radius = scene.x * side, scene.y * side, scene.radius * side
    match scene.shape:
        case "circle":
            pen.ellipse(_box(x, y, radius), fill=scene.fill)
        case "ring":
            pen.ellipse(_box(x, y, radius), fill=scene.fill)
            pen.ellipse(_box(x, y, radius * 0.55), fill=scene.paper)
        case "square":
            pen.rectangle(_box(x, y, radius * 0.82), fill=scene.fill)
        case "cross":
            pen.rectangle((x - radius, y - radius * 0.3, x + radius, y + radius * 0.3), fill=scene.fill)
            pen.rectangle((x - radius * 0.3, y - radius, x + radius * 0.3, y + radius), fill=scene.fill)
        case "triangle":
            pen.polygon(_corners(x, y, [radius] * 3), fill=scene.fill)
        case "star":
            pen.polygon(_corners(x, y, [radius, radius * 0.42] * 5), fill=scene.fill)
        case unknown:
            raise ValueError(f"no shape is called {unknown!r}; the shapes are {', '.join(SHAPES)}")


def _box(x: float, y: float, radius: float) -> tuple[float, float, float, float]:
    return x - radius, y - radius, x + radius, y + radius


def _corners(x: float, y: float, radii: list[float]) -> list[Point]:
    """Points at equal angles round (x, y), the first straight up, at the given distances."""
    angles = [2 * math.pi * i / len(radii) - math.pi / 2 for i in range(len(radii))]
    return [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
