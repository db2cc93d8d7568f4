"""The folders of the package, each above those that it imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from tools.drawings.canvas import PAD, WIDTH, Drawing, text_width
from tools.house import floors, used

TITLE = "Layers of the package"
COLOURS = ("blue", "violet")
ROW, GAP = 40, 14
LEFT = 116  # where the layers begin: beside them is the arrow


def layers(uses: Mapping[str, Set[str]] | None = None) -> Drawing:
    """Draw a row for each layer. A folder imports only from rows below its own."""
    uses = used() if uses is None else uses
    rows = floors(uses)
    words = [f"{folder} imports {', '.join(sorted(uses[folder])) or 'nothing'}." for row in rows for folder in row]
    drawing = Drawing(TITLE, f"From top to bottom: {'; '.join(', '.join(row) for row in rows)}. {' '.join(words)}")
    top = float(PAD)
    for number, row in enumerate(rows):
        _row(drawing, row, top, COLOURS[number % len(COLOURS)])
        top += ROW + GAP
    drawing.height = top - GAP + PAD
    for number, word in enumerate(("imports", "point", "down")):
        drawing.text(PAD, PAD + 16 + 22 * number, "note", word)
    drawing.arrow([(PAD + 20, PAD + 78), (PAD + 20, drawing.height - PAD)], "grey")
    return drawing


def _row(drawing: Drawing, row: Sequence[str], top: float, colour: str) -> None:
    """Draw the folders of a layer side by side."""
    gap = 12
    widths = [text_width("name", folder) + 24 for folder in row]
    left = (LEFT + WIDTH - PAD - sum(widths) - gap * (len(row) - 1)) / 2
    if left < LEFT:
        raise ValueError(f"{TITLE}: a layer has too many folders: {', '.join(row)}")
    for folder, width in zip(row, widths, strict=True):
        drawing.box((left, top, left + width, top + ROW), colour, [("name", folder)])
        left += width + gap
