"""`unfuse config`."""

from __future__ import annotations

import re
from typing import Any

import typer

from unfuse.cli import show as shown
from unfuse.cli.options import Config, Json
from unfuse.cli.settings import FIELDS, Field, Settings, Size, load

app = typer.Typer(no_args_is_help=True, help="What is set, and where.")

HIDDEN = "********"

PASSWORD = re.compile(r"(://[^/@\s]*:)[^/@\s]*@")
"""What follows the user in an address, of Redis or another store."""


@app.callback()
def group() -> None:
    """What is set, and where."""


@app.command()
def show(config: Config = None, json: Json = False) -> None:
    """List every setting with its value and where the value comes from."""
    loaded = load(config=config)
    rows = [
        {
            "setting": name,
            "value": _value(field, loaded.settings),
            "from": loaded.origins[name],
            "environment": field.variable,
        }
        for name, field in FIELDS.items()
    ]
    if json:
        shown.as_json(rows)
    else:
        shown.as_table(rows, ["setting", "value", "from"], "no settings")


def _value(field: Field, settings: Settings) -> Any:
    value: Any = settings
    for part in field.name.split("."):
        value = getattr(value, part)
    if field.in_bytes:
        return Size(value)
    if field.secret and value:
        return HIDDEN
    return PASSWORD.sub(rf"\1{HIDDEN}@", value) if isinstance(value, str) else value
