"""Names what a picture shows: the colour, the shape and the ground, or says that it cannot.

It judges the built-in model, so it shares nothing with the drawing in `scenes.py`: it has its own colours,
and its shapes are inequalities over coordinates instead of polygons.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

UNKNOWN = "unknown"
MIN_CONTRAST = 50.0  # RGB distance between shape and ground below which a picture shows nothing
MIN_OVERLAP = 0.6  # intersection over union with the best template below which a shape has no name

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


@dataclass(frozen=True)
class Verdict:
    """What a picture shows; a part that cannot be told is `unknown`. `overlap` is the shape's, 0 to 1."""

    colour: str
    shape: str
    ground: str
    overlap: float

    def names(self, caption: str) -> tuple[bool, bool, bool]:
        """Whether colour, shape and ground are those of `a|an COLOUR SHAPE on GROUND`."""
        _, colour, shape, _, ground = caption.split()
        return self.colour == colour, self.shape == shape, self.ground == ground


def judge(picture: np.ndarray) -> Verdict:
    """Name what an (H, W, 3) uint8 picture shows."""
    pixels = _smooth(picture.astype(np.float64))
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    paper = np.median(border, axis=0)
    ground = _nearest(paper, GROUNDS)
    distance = np.linalg.norm(pixels - paper, axis=-1)
    strong = np.quantile(distance, 0.98)
    if strong < MIN_CONTRAST:
        return Verdict(UNKNOWN, UNKNOWN, ground, 0.0)
    fill = np.median(pixels[distance >= 0.8 * strong], axis=0)
    shape, overlap = _name_shape(_covered(pixels, paper, fill))
    return Verdict(_nearest(fill, COLOURS), shape, ground, overlap)


def _smooth(pixels: np.ndarray) -> np.ndarray:
    """A 1-2-1 blur both ways, which keeps noise from making specks of shape."""
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    return (rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / 4


def _nearest(colour: np.ndarray, names: dict[str, tuple[int, int, int]]) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(colour - np.array(names[name]))))


def _covered(pixels: np.ndarray, paper: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """(H, W) bool: where a pixel lies nearer to the shape's colour than to the ground's."""
    return np.linalg.norm(pixels - fill, axis=-1) < np.linalg.norm(pixels - paper, axis=-1)


def _name_shape(mask: np.ndarray) -> tuple[str, float]:
    """The shape whose template, fitted to the mask's extent, overlaps it most, and the overlap."""
    near = _trimmed(mask)
    overlaps = {name: _best_overlap(near, inside, extent) for name, (inside, extent) in TEMPLATES.items()}
    best = max(overlaps, key=lambda name: overlaps[name])
    return (best if overlaps[best] >= MIN_OVERLAP else UNKNOWN), overlaps[best]


def _trimmed(mask: np.ndarray) -> np.ndarray:
    """The mask without the empty picture round it, but with room for a template to stick out."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    inner = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return np.pad(inner, max(inner.shape) // 5)


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
