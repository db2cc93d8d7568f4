"""Procedural scenes and the captions that name them: one shape, two shapes and how they stand, one shape moving.

These drawings are the whole training set of the built-in model. Everything is drawn from a numpy Generator,
so a seed gives the same pictures again. `checker.py` judges pictures and shares no code with this file.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Point = tuple[float, float]
Rgb = tuple[int, int, int]
Pair = tuple[str, str]  # colour, shape

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
RELATIONS: dict[str, Point] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
DIRECTIONS: dict[str, Point] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

HELD_OUT: tuple[Pair, ...] = (("green", "star"), ("purple", "ring"), ("yellow", "triangle"), ("orange", "square"))
"""Drawn in no training scene of any kind; only scores ask for them."""
TRAINED: tuple[Pair, ...] = tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in HELD_OUT)

SIZE = 128  # pixels; scenes are fractions of the side and can be drawn at any size
FRAMES = 9
UNIT = 1 / 64  # the radii, gaps and margins below are in 64ths of the side
RADII = (12.0, 20.0)
PAIR_RADII = (10.0, 14.0)
GAP, ASIDE = 4.0, 5.0  # least space between two shapes along their axis; most distance of their centres across it
TRAVEL = (0.3, 0.5)  # fractions of the side that a moving shape covers
JITTER = 6  # levels by which a colour may differ from its name's colour, each channel
OVERSAMPLE = 4  # scenes are drawn this much larger and averaged down, which smooths the edges


@dataclass(frozen=True)
class Thing:
    """One shape. `x`, `y` (the centre) and `radius` are fractions of the picture's side."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    fill: Rgb


@dataclass(frozen=True)
class Scene:
    """One or two shapes on a ground; `path` is how far the shapes move in a clip, in fractions of the side."""

    things: tuple[Thing, ...]
    ground: str
    paper: Rgb
    relation: str = ""
    direction: str = ""
    path: Point = (0.0, 0.0)

    @property
    def caption(self) -> str:
        """The words the model is trained on, such as `an orange ring left of a red star on gray`."""
        first, *others = [(thing.colour, thing.shape) for thing in self.things]
        if others:
            return relation_caption(first, self.relation, others[0], self.ground)
        return motion_caption(first, self.direction, self.ground) if self.direction else caption(first, self.ground)


def named(pair: Pair) -> str:
    """`a|an COLOUR SHAPE`."""
    return f"{'an' if pair[0][0] in 'aeiou' else 'a'} {pair[0]} {pair[1]}"


def caption(pair: Pair, ground: str) -> str:
    """`a|an COLOUR SHAPE on GROUND`."""
    return f"{named(pair)} on {ground}"


def relation_caption(first: Pair, relation: str, second: Pair, ground: str) -> str:
    """`a|an C1 S1 left of|right of|above|below a|an C2 S2 on GROUND`."""
    return f"{named(first)} {relation} {named(second)} on {ground}"


def motion_caption(pair: Pair, direction: str, ground: str) -> str:
    """`a|an COLOUR SHAPE moving left|right|up|down on GROUND`."""
    return f"{named(pair)} moving {direction} on {ground}"


def random_single(rng: np.random.Generator, pairs: Sequence[Pair] = TRAINED) -> Scene:
    """A shape of `pairs` on a ground, wholly inside the picture."""
    radius = rng.uniform(*RADII) * UNIT
    x, y = rng.uniform(radius + UNIT, 1 - radius - UNIT, size=2)
    ground, paper = _ground(rng)
    return Scene((_thing(rng, _one_of(rng, pairs), x, y, radius),), ground, paper)


def random_relation(rng: np.random.Generator, pairs: Sequence[Pair] = TRAINED) -> Scene:
    """Two different shapes, apart along one axis and nearly level across it."""
    first = _one_of(rng, pairs)
    second = _one_of(rng, [pair for pair in TRAINED if pair != first])
    relation = str(rng.choice(list(RELATIONS)))
    along, across = _places(rng, radii := rng.uniform(*PAIR_RADII, size=2) * UNIT)
    ahead, sideways = RELATIONS[relation]
    if ahead + sideways > 0:
        along = 1 - along
    centres = np.stack([along, across] if ahead else [across, along], axis=1)
    ground, paper = _ground(rng)
    given = zip((first, second), centres, radii, strict=True)
    return Scene(tuple(_thing(rng, pair, x, y, r) for pair, (x, y), r in given), ground, paper, relation)


def random_motion(rng: np.random.Generator, pairs: Sequence[Pair] = TRAINED) -> Scene:
    """A shape that moves straight along one axis, inside the picture all the way."""
    radius = rng.uniform(*RADII) * UNIT
    low, high = radius + UNIT, 1 - radius - UNIT
    travel = rng.uniform(TRAVEL[0], min(TRAVEL[1], high - low))
    start, across = rng.uniform(low, high - travel), rng.uniform(low, high)
    direction = str(rng.choice(list(DIRECTIONS)))
    ahead, sideways = DIRECTIONS[direction]
    along = start if ahead + sideways > 0 else 1 - start
    x, y = (along, across) if ahead else (across, along)
    ground, paper = _ground(rng)
    thing = _thing(rng, _one_of(rng, pairs), x, y, radius)
    return Scene((thing,), ground, paper, direction=direction, path=(ahead * travel, sideways * travel))


KINDS: dict[str, Callable[..., Scene]] = {
    "single": random_single,
    "relation": random_relation,
    "motion": random_motion,
}


def scenes(kind: str, count: int, seed: int, pairs: Sequence[Pair] = TRAINED) -> list[Scene]:
    """`count` scenes of a kind, drawn uniformly over the words."""
    rng = np.random.default_rng(seed)
    return [KINDS[kind](rng, pairs) for _ in range(count)]


def draw(scene: Scene, size: int = SIZE, share: float = 0.0) -> np.ndarray:
    """The scene after `share` of its path as a picture, (size, size, 3) uint8."""
    side = size * OVERSAMPLE
    picture = Image.new("RGB", (side, side), scene.paper)
    for thing in scene.things:
        x, y = (thing.x + share * scene.path[0]) * side, (thing.y + share * scene.path[1]) * side
        _draw_shape(ImageDraw.Draw(picture), thing, x, y, thing.radius * side, scene.paper)
    return np.asarray(picture.reduce(OVERSAMPLE))


def draw_clip(scene: Scene, frames: int = FRAMES, size: int = SIZE) -> np.ndarray:
    """The scene moving along its path, (frames, size, size, 3) uint8."""
    return np.stack([draw(scene, size, i / max(1, frames - 1)) for i in range(frames)])


def pictures(kind: str, count: int, seed: int, size: int = SIZE) -> tuple[np.ndarray, list[str]]:
    """`count` scenes as (count, size, size, 3) uint8, and their captions."""
    drawn = scenes(kind, count, seed)
    return np.stack([draw(scene, size) for scene in drawn]), [scene.caption for scene in drawn]


def clips(count: int, seed: int, frames: int = FRAMES, size: int = SIZE) -> tuple[np.ndarray, list[str]]:
    """`count` clips of moving shapes as (count, frames, size, size, 3) uint8, and their captions."""
    drawn = scenes("motion", count, seed)
    return np.stack([draw_clip(scene, frames, size) for scene in drawn]), [scene.caption for scene in drawn]


def _one_of(rng: np.random.Generator, pairs: Sequence[Pair]) -> Pair:
    return pairs[int(rng.integers(len(pairs)))]


def _ground(rng: np.random.Generator) -> tuple[str, Rgb]:
    name = str(rng.choice(list(GROUNDS)))
    return name, _jitter(GROUNDS[name], rng)


def _thing(rng: np.random.Generator, pair: Pair, x: float, y: float, radius: float) -> Thing:
    return Thing(*pair, float(x), float(y), float(radius), _jitter(COLOURS[pair[0]], rng))


def _places(rng: np.random.Generator, radii: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of two centres along an axis, the first one's smaller, and across it."""
    margins = radii + UNIT
    apart = radii.sum() + GAP * UNIT
    first = rng.uniform(margins[0], 1 - margins[1] - apart)
    second = rng.uniform(first + apart, 1 - margins[1])
    level = rng.uniform(margins.max(), 1 - margins.max())
    across = np.clip(level + rng.uniform(-0.5, 0.5, size=2) * ASIDE * UNIT, margins, 1 - margins)
    return np.array([first, second]), across


def _jitter(colour: Rgb, rng: np.random.Generator) -> Rgb:
    shifted = np.clip(np.array(colour) + rng.integers(-JITTER, JITTER + 1, size=3), 0, 255)
    return int(shifted[0]), int(shifted[1]), int(shifted[2])


def _draw_shape(pen: ImageDraw.ImageDraw, thing: Thing, x: float, y: float, radius: float, paper: Rgb) -> None:
    match thing.shape:
        case "circle":
            pen.ellipse(_box(x, y, radius), fill=thing.fill)
        case "ring":
            pen.ellipse(_box(x, y, radius), fill=thing.fill)
            pen.ellipse(_box(x, y, radius * 0.55), fill=paper)
        case "square":
            pen.rectangle(_box(x, y, radius * 0.82), fill=thing.fill)
        case "cross":
            pen.rectangle((x - radius, y - radius * 0.3, x + radius, y + radius * 0.3), fill=thing.fill)
            pen.rectangle((x - radius * 0.3, y - radius, x + radius * 0.3, y + radius), fill=thing.fill)
        case "triangle":
            pen.polygon(_corners(x, y, [radius] * 3), fill=thing.fill)
        case "star":
            pen.polygon(_corners(x, y, [radius, radius * 0.42] * 5), fill=thing.fill)
        case unknown:
            raise ValueError(f"no shape is called {unknown!r}; the shapes are {', '.join(SHAPES)}")


def _box(x: float, y: float, radius: float) -> tuple[float, float, float, float]:
    return x - radius, y - radius, x + radius, y + radius


def _corners(x: float, y: float, radii: list[float]) -> list[Point]:
    """Points at equal angles round (x, y), the first straight up, at the given distances."""
    angles = [2 * math.pi * i / len(radii) - math.pi / 2 for i in range(len(radii))]
    return [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
