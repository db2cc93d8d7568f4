"""Options that several verbs share. What a setting is for and its default are said once, in `settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unfuse.cli.settings import FIELDS
from unfuse.cli.show import cell


def setting(name: str, *flags: str, **more: Any) -> Any:
    """The option of the setting with that dotted name; it is None unless the flag is given."""
    field = FIELDS[name]
    default = "" if field.default in ((), "") or field.default is True else f" [default: {cell(field.default)}]"
    flags = flags or (f"--{name.rpartition('.')[2].replace('_', '-')}",)
    return typer.Option(*flags, help=field.description + default, show_default=False, **more)


Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Config = Annotated[Path | None, typer.Option("--config", help="Settings file, such as unfuse.toml.", metavar="FILE")]
Server = Annotated[str | None, setting("server", metavar="URL")]
ApiKey = Annotated[str | None, setting("api_key", metavar="KEY")]
