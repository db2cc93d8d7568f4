"""Names what a picture or a clip shows: its shapes, how two of them stand, where one moves; or says that it cannot.

It judges the built-in model, so it shares nothing with the drawing in `scenes.py`: it has its own colours and its own
reading of captions, and its shapes are inequalities over coordinates instead of polygons.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

UNKNOWN = "unknown"
MIN_CONTRAST = 45.0  # RGB distance between shape and ground below which a picture shows nothing
MIN_OVERLAP = 0.6  # intersection over union with the best template below which a shape has no name
MIN_AREA = 0.006  # fraction of the picture below which an area is a speck
SECOND_COLOUR = 0.15  # share of an area's inner pixels from which on it is two shapes that touch
MIN_TRAVEL = 0.1  # fraction of the side below which nothing has moved
DETAIL = 48  # pixels: larger shapes are averaged down before they are compared with templates

COLOURS = {
    "red": (215, 25, 35),
    "green": (30, 165, 60),
    "blue": (35, 75, 230),
    "yellow": (250, 225, 30),
    "purple": (150, 40, 190),
    "orange": (255, 135, 10),
}
GROUNDS = {"white": (255, 255, 255), "black": (0, 0, 0), "gray": (128, 128, 128)}

Extent = tuple[float, float, float, float]  # left, right, top, bottom of a shape of radius 1
Inside = Callable[[np.ndarray, np.ndarray], np.ndarray]

CAPTION = re.compile(
    r"an? (?P<colour>\w+) (?P<shape>\w+)"
    r"(?: (?P<relation>left of|right of|above|below) an? (?P<colour2>\w+) (?P<shape2>\w+)"
    r"| moving (?P<direction>left|right|up|down))? on (?P<ground>\w+)"
)


@dataclass(frozen=True)
class Thing:
    """One shape that was seen, its centre in fractions of the picture. `overlap` is with its template, 0 to 1."""

    colour: str
    shape: str
    x: float
    y: float
    overlap: float

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Seen:
    """What a picture shows; a part that cannot be told is `unknown`."""

    ground: str
    things: tuple[Thing, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.things)) or 'nothing'} on {self.ground}"


def check(frames: np.ndarray, caption: str) -> dict[str, bool]:
    """Which parts of a caption (T, H, W, 3) uint8 frames show: by name, whether each is right.

    One shape: `colour`, `shape`, `ground`; all of them are wrong where there are more or fewer shapes.
    Two: `first`, `second`, `relation`, `ground`. Moving: those of one shape, in every frame, and `direction`.
    A caption of a shape that moves, with one frame, is a caption of that shape.
    """
    asked = CAPTION.fullmatch(caption)
    if asked is None:
        raise ValueError(f"{caption!r} is not a caption that can be checked")
    seen = [observe(frame) for frame in frames]
    if asked["relation"]:
        return _check_pair(seen[0], asked)
    single = [_check_single(one, asked) for one in seen]
    parts = {name: all(frame[name] for frame in single) for name in single[0]}
    if asked["direction"] and len(seen) > 1:
        parts["direction"] = _direction(seen) == asked["direction"]
    return parts


def describe(frames: np.ndarray) -> str:
    """What (T, H, W, 3) uint8 frames show, in words: the first and, where it differs, the last, and the direction."""
    first, last = observe(frames[0]), observe(frames[-1])
    moved = f", moving {_direction([first, last])}" if len(frames) > 1 else ""
    return f"{first}{moved}{'' if str(first) == str(last) else f', in the end {last}'}"


def observe(picture: np.ndarray) -> Seen:
    """Name what an (H, W, 3) uint8 picture shows, the largest thing first."""
    pixels = _smooth(picture.astype(np.float64))
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    paper = np.median(border, axis=0)
    distance = np.linalg.norm(pixels - paper, axis=-1)
    strong = distance > max(MIN_CONTRAST, 0.35 * np.quantile(distance, 0.99))
    parts = [part for area in _areas(strong) for part in _by_colour(pixels, area)]
    things = [_name(pixels, paper, part) for part in sorted(parts, key=np.count_nonzero, reverse=True)]
    return Seen(_nearest(paper, GROUNDS), tuple(things))


def _check_single(seen: Seen, asked: re.Match[str]) -> dict[str, bool]:
    alone = len(seen.things) == 1
    return {
        "colour": alone and seen.things[0].colour == asked["colour"],
        "shape": alone and seen.things[0].shape == asked["shape"],
        "ground": seen.ground == asked["ground"],
    }


def _check_pair(seen: Seen, asked: re.Match[str]) -> dict[str, bool]:
    """The two shapes in the order that fits best; the relation holds only between the two that were asked for."""
    wanted = f"{asked['colour']} {asked['shape']}", f"{asked['colour2']} {asked['shape2']}"
    ground = seen.ground == asked["ground"]
    if len(seen.things) != 2:
        there = [wanted[i] in map(str, seen.things) and len(seen.things) < 2 for i in (0, 1)]
        return {"first": there[0], "second": there[1], "relation": False, "ground": ground}
    orders = [seen.things, seen.things[::-1]]
    first, second = max(orders, key=lambda pair: sum(str(a) == b for a, b in zip(pair, wanted, strict=True)))
    right = str(first) == wanted[0], str(second) == wanted[1]
    stands = all(right) and _relation(first, second) == asked["relation"]
    return {"first": right[0], "second": right[1], "relation": stands, "ground": ground}


def _relation(first: Thing, second: Thing) -> str:
    """How the first stands to the second, along the axis on which they are further apart."""
    x, y = first.x - second.x, first.y - second.y
    if abs(x) > abs(y):
        return "left of" if x < 0 else "right of"
    return "above" if y < 0 else "below"


def _direction(seen: list[Seen]) -> str:
    """Where the largest thing of the first picture is in the last; `unknown` where it hardly moved or is gone."""
    if not seen[0].things or not seen[-1].things:
        return UNKNOWN
    x = seen[-1].things[0].x - seen[0].things[0].x
    y = seen[-1].things[0].y - seen[0].things[0].y
    if max(abs(x), abs(y)) < MIN_TRAVEL or min(abs(x), abs(y)) > max(abs(x), abs(y)) / 2:
        return UNKNOWN
    if abs(x) > abs(y):
        return "left" if x < 0 else "right"
    return "up" if y < 0 else "down"


def _smooth(pixels: np.ndarray) -> np.ndarray:
    """A 1-2-1 blur both ways, which keeps noise from making specks of shape."""
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    return (rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / 4


def _nearest(colour: np.ndarray, names: dict[str, tuple[int, int, int]]) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(colour - np.array(names[name]))))


def _areas(mask: np.ndarray) -> list[np.ndarray]:
    """The connected areas of an (H, W) bool mask as masks, without specks.

    Every pixel takes the largest number among its neighbours and the number of the pixel so numbered, until none has
    a larger one; then an area's pixels all have the number of its last.
    """
    numbers = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(numbers, 1)
        near = np.max([padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:], numbers], axis=0)
        near = np.where(mask, near, 0)
        spread = np.where(mask, numbers.ravel()[near - 1], 0)
        spread = np.maximum(near, spread)
        if np.array_equal(spread, numbers):
            break
        numbers = spread
    found, sizes = np.unique(numbers[mask], return_counts=True)
    return [numbers == number for number, size in zip(found, sizes, strict=True) if size >= MIN_AREA * mask.size]


def _by_colour(pixels: np.ndarray, area: np.ndarray) -> list[np.ndarray]:
    """An area as one mask or, where two shapes of different colours touch, as two.

    A colour counts by its pixels away from every edge: along an edge any two colours mix into others.
    """
    palette = np.array(list(COLOURS.values()))
    names = np.linalg.norm(pixels[:, :, None] - palette, axis=-1).argmin(axis=-1)
    cores = [_eroded(_eroded(area & (names == index))) for index in range(len(palette))]
    counts = [np.count_nonzero(core) for core in cores]
    second, first = np.argsort(counts)[-2:]
    if counts[second] < max(SECOND_COLOUR * sum(counts), MIN_AREA / 4 * area.size):
        return [area]
    fills = [np.median(pixels[cores[index]], axis=0) for index in (first, second)]
    nearer = np.linalg.norm(pixels - fills[0], axis=-1) < np.linalg.norm(pixels - fills[1], axis=-1)
    return [area & nearer, area & ~nearer]


def _eroded(mask: np.ndarray) -> np.ndarray:
    """The mask without the pixels that have a neighbour outside."""
    padded = np.pad(mask, 1)
    return mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]


def _name(pixels: np.ndarray, paper: np.ndarray, area: np.ndarray) -> Thing:
    """The colour and shape of one area, whose edge is where its colour and the ground's are equally far."""
    distance = np.linalg.norm(pixels - paper, axis=-1)
    fill = np.median(pixels[area & (distance >= 0.8 * np.quantile(distance[area], 0.9))], axis=0)
    mask = area & (np.linalg.norm(pixels - fill, axis=-1) < distance)
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    inner = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    shape, overlap = _name_shape(inner)
    x, y = (columns[0] + columns[-1]) / 2 / mask.shape[1], (rows[0] + rows[-1]) / 2 / mask.shape[0]
    return Thing(_nearest(fill, COLOURS), shape, float(x), float(y), overlap)


def _name_shape(inner: np.ndarray) -> tuple[str, float]:
    """The shape whose template, fitted to a mask's extent, overlaps it most, and the overlap."""
    coarse = _coarse(inner)
    near = np.pad(coarse, max(coarse.shape) // 5)  # room for a template to stick out
    overlaps = {name: _best_overlap(near, inside, extent) for name, (inside, extent) in TEMPLATES.items()}
    best = max(overlaps, key=lambda name: overlaps[name])
    return (best if overlaps[best] >= MIN_OVERLAP else UNKNOWN), overlaps[best]


def _coarse(mask: np.ndarray) -> np.ndarray:
    """The mask averaged down by a whole factor, so that it has at most DETAIL pixels a side."""
    factor = -(-max(mask.shape) // DETAIL)
    if factor == 1:
        return mask
    height, width = (-(-side // factor) * factor for side in mask.shape)
    padded = np.pad(mask, ((0, height - mask.shape[0]), (0, width - mask.shape[1])))
    return padded.reshape(height // factor, factor, width // factor, factor).mean(axis=(1, 3)) >= 0.5


def _best_overlap(mask: np.ndarray, inside: Inside, extent: Extent) -> float:
    rows, columns = np.arange(mask.shape[0])[:, None], np.arange(mask.shape[1])[None, :]
    best = 0.0
    for x, y, radius in _fits(mask, extent):
        template = inside((columns - x) / radius, (rows - y) / radius)
        union = np.count_nonzero(mask | template)
        best = max(best, np.count_nonzero(mask & template) / union)
    return best


def _fits(mask: np.ndarray, extent: Extent) -> Iterator[tuple[float, float, float]]:
    """Centres and radii, in pixels, that lay a template of `extent` over the mask's, and near it."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    left, right, top, bottom = extent
    width, height = columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1
    fitted = (width / (right - left) + height / (bottom - top)) / 2
    x = (columns[0] + columns[-1]) / 2 - fitted * (left + right) / 2
    y = (rows[0] + rows[-1]) / 2 - fitted * (top + bottom) / 2
    for stretch in (0.9, 0.97, 1.04, 1.11, 1.18):  # above 1 for tips that a blur has eaten
        for nudge_x in (-0.05, 0.0, 0.05):
            for nudge_y in (-0.05, 0.0, 0.05):
                yield x + nudge_x * fitted, y + nudge_y * fitted, stretch * fitted


def _circle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x * x + y * y <= 1


def _ring(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _circle(x, y) & (x * x + y * y >= 0.55**2)


def _square(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(abs(x), abs(y)) <= 1


def _cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _square(x, y) & (np.minimum(abs(x), abs(y)) <= 0.3)


def _triangle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Equilateral, one corner up: below the two sides and above the base."""
    return (y <= 0.5) & (np.sqrt(3) * abs(x) - y <= 1)


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Five points, one up. Folded into a tenth of the circle, where its edge is one straight line."""
    angle = np.abs((np.arctan2(x, -y) + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    along, across = np.hypot(x, y) * np.cos(angle), np.hypot(x, y) * np.sin(angle)
    notch_along, notch_across = 0.42 * np.cos(np.pi / 5), 0.42 * np.sin(np.pi / 5)
    return (along - 1) * notch_across + across * (1 - notch_along) <= 0


UNIT = (-1.0, 1.0, -1.0, 1.0)
TEMPLATES: dict[str, tuple[Inside, Extent]] = {
    "circle": (_circle, UNIT),
    "square": (_square, UNIT),
    "triangle": (_triangle, (-np.sqrt(3) / 2, np.sqrt(3) / 2, -1.0, 0.5)),
    "star": (_star, (-np.sin(0.4 * np.pi), np.sin(0.4 * np.pi), -1.0, np.cos(0.2 * np.pi))),
    "cross": (_cross, UNIT),
    "ring": (_ring, UNIT),
}
