"""`unfuse version`."""

from __future__ import annotations

import typer

import unfuse
from unfuse.cli import show
from unfuse.cli.options import Json


def version(json: Json = False) -> None:
    """Print the version."""
    if json:
        show.as_json({"version": unfuse.__version__})
    else:
        typer.echo(f"unfuse {unfuse.__version__}")
