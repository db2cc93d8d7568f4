"""An SVG drawing of boxes, texts and arrows for light and dark pages, which refuses texts that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import combinations, pairwise

WIDTH = 720
PAD = 24
LINE = 22  # pixels between two lines of text

#: Colours as (on a light page, on a dark page). Every text is drawn in INKS on one of FILLS.
INKS = {"ink": ("#1b1f24", "#e8eaed"), "quiet": ("#454d5a", "#bcc2cb")}
FILLS = {
    "panel": ("#ffffff", "#16181b"),
    "grey": ("#f0f2f5", "#24282e"),
    "blue": ("#e3edfb", "#1c2d45"),
    "green": ("#e0f3e6", "#193324"),
    "amber": ("#fdf0d3", "#3b2f14"),
    "violet": ("#efe6fb", "#2e2442"),
    "rose": ("#fce6ea", "#42212a"),
}
STROKES = {
    "panel-line": ("#d0d5dd", "#3c424b"),
    "lane-line": ("#aab2bf", "#626b78"),
    "grey-line": ("#6b7482", "#98a1ae"),
    "blue-line": ("#2467b8", "#73abf0"),
    "green-line": ("#2a7d52", "#63c28c"),
    "amber-line": ("#9a6410", "#e2b254"),
    "violet-line": ("#7446bd", "#b797f0"),
    "rose-line": ("#b3324f", "#f08ba0"),
}

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

#: By class of text: size in pixels, widest mean character in em (of the fonts that browsers choose), and CSS.
TEXTS = {
    "title": (16, 0.63, f"font: 600 16px {SANS}; fill: var(--ink)"),
    "name": (16, 0.61, f"font: 600 16px {MONO}; fill: var(--ink)"),
    "code": (15, 0.61, f"font: 15px {MONO}; fill: var(--ink)"),
    "plain": (16, 0.57, f"font: 16px {SANS}; fill: var(--ink)"),
    "note": (14, 0.57, f"font: 14px {SANS}; fill: var(--quiet)"),
    "small": (14, 0.61, f"font: 14px {MONO}; fill: var(--quiet)"),
}

Point = tuple[float, float]
Area = tuple[float, float, float, float]  # left, top, right, bottom


def text_width(kind: str, text: str) -> float:
    """The most pixels that a text takes."""
    size, em, _ = TEXTS[kind]
    return len(text) * size * em


def wrapped(kind: str, text: str, width: float) -> list[str]:
    """The lines of a text, each of which fits into the width."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(kind, longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line for line in lines if line]


def crosses(start: Point, end: Point, area: Area) -> bool:
    """Whether a horizontal or vertical line meets an area."""
    left, right = sorted((start[0], end[0]))
    top, bottom = sorted((start[1], end[1]))
    return left < area[2] and right > area[0] and top < area[3] and bottom > area[1]


@dataclass
class Drawing:
    """One drawing. All lines are horizontal or vertical, so that it can check that none crosses a text."""

    title: str
    description: str
    height: float = 0
    width: float = WIDTH
    parts: list[str] = field(default_factory=list)
    texts: list[tuple[str, Area]] = field(default_factory=list)
    lines: list[tuple[Point, Point]] = field(default_factory=list)

    def rect(self, area: Area, colour: str, *, dashed: bool = False, radius: int = 8, border: float = 1.5) -> None:
        """Draw a rectangle. One in the colour of the panel is a frame around others."""
        line = "lane" if colour == "panel" else colour
        left, top, right, bottom = area
        dashes = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}" rx="{radius}" '
            f'fill="var(--{colour})" stroke="var(--{line}-line)" stroke-width="{border:g}"{dashes}/>'
        )

    def text(self, x: float, y: float, kind: str, text: str, anchor: str = "start") -> None:
        """Draw a line of text on the base line y."""
        size, width = TEXTS[kind][0], text_width(kind, text)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if left < 0 or left + width > self.width:
            raise ValueError(f"{self.title}: {text!r} leaves the drawing")
        self.texts.append((text, (left, y - size * 0.8, left + width, y + size * 0.25)))
        anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}"{anchored}>{escape(text, quote=False)}</text>')

    def box(
        self, area: Area, colour: str, lines: Sequence[tuple[str, str]], *, dashed: bool = False, border: float = 1.5
    ) -> None:
        """Draw a rectangle with lines of text, each as (kind, text), in its middle."""
        left, top, right, bottom = area
        self.rect(area, colour, dashed=dashed, border=border)
        baseline = (top + bottom) / 2 - (len(lines) - 1) * LINE / 2 + 5
        if len(lines) * LINE > bottom - top:
            raise ValueError(f"{self.title}: the box of {lines[0][1]!r} is too low")
        for number, (kind, text) in enumerate(lines):
            if text_width(kind, text) > right - left - 8:
                raise ValueError(f"{self.title}: {text!r} does not fit into {right - left:g} pixels")
            self.text((left + right) / 2, baseline + number * LINE, kind, text, "middle")

    def line(self, points: Sequence[Point], colour: str = "grey", *, dashed: bool = False, width: float = 1.75) -> None:
        """Draw a line through points, without an arrow head."""
        self.lines += pairwise(points)
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dashes = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="var(--{colour}-line)" stroke-width="{width:g}"{dashes}/>'
        )

    def arrow(self, points: Sequence[Point], colour: str = "grey", *, dashed: bool = False) -> None:
        """Draw a line through points with an arrow head at its end."""
        (x, y), (before_x, before_y) = points[-1], points[-2]
        across, along = (x > before_x) - (x < before_x), (y > before_y) - (y < before_y)
        self.line([*points[:-1], (x - 8 * across, y - 8 * along)], colour, dashed=dashed)
        corners = [
            (x, y),
            (x - 10 * across + 5 * along, y - 10 * along + 5 * across),
            (x - 10 * across - 5 * along, y - 10 * along - 5 * across),
        ]
        shape = " ".join(f"{left:g},{top:g}" for left, top in corners)
        self.parts.append(f'<polygon points="{shape}" fill="var(--{colour}-line)"/>')

    def dot(self, x: float, y: float, colour: str, radius: float = 4) -> None:
        """Draw a filled circle."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="var(--{colour}-line)"/>')

    def faults(self) -> Iterator[str]:
        """Texts that overlap, or that a line crosses."""
        for (text, one), (other, two) in combinations(self.texts, 2):
            if one[0] < two[2] and one[2] > two[0] and one[1] < two[3] and one[3] > two[1]:
                yield f"{text!r} and {other!r} overlap"
        for text, area in self.texts:
            if any(crosses(start, end, area) for start, end in self.lines):
                yield f"a line crosses {text!r}"

    def svg(self) -> str:
        """The file. Raises ValueError for faults."""
        if faults := list(self.faults()):
            raise ValueError(f"{self.title}: {'; '.join(faults)}")
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
                f'width="{self.width:g}" height="{self.height:g}" role="img" aria-labelledby="title description">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="description">{escape(self.description)}</desc>',
                "<!-- drawn by `python -m tools.drawings` -->",
                f"<style>\n{_styles()}</style>",
                f'<rect x="0.5" y="0.5" width="{self.width - 1:g}" height="{self.height - 1:g}" rx="10" '
                'fill="var(--panel)" stroke="var(--panel-line)"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def _styles() -> str:
    """The colours of both kinds of pages, and the classes of texts."""
    colours = INKS | FILLS | STROKES
    light, dark = ("; ".join(f"--{name}: {pair[page]}" for name, pair in colours.items()) for page in (0, 1))
    classes = "".join(f".{name} {{ {css} }}\n" for name, (_, _, css) in TEXTS.items())
    return f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n{classes}"
