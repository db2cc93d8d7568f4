"""Writes the drawings of the documentation into docs/images."""

from tools.drawings import DRAWINGS, FOLDER

for name, draw in DRAWINGS.items():
    FOLDER.joinpath(f"{name}.svg").write_text(draw().svg())
