"""`unfuse keys`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from unfuse.cli.options import Config
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import Verbs
from unfuse.service.settings import load

app = Verbs("The keys by which schedulers and workers know each other, and those of the HTTP API.")


@app.verb(server=True)
def new(folder: Annotated[Path, typer.Argument(help="Folder to write them to.", metavar="DIR")]) -> None:
    """Make keys, to be given to `serve` and `worker` as --keys DIR: with them, other machines can be reached.

    Copy scheduler.key to the machines of schedulers and worker.key to those of workers; each is a secret.
    """
    from unfuse.wire.keys import SIDES, make

    make(folder)
    for side in SIDES:
        typer.echo(str(folder / f"{side}.key"))


@app.verb(server=True)
def add(
    terminal: Terminal,
    name: Annotated[str, typer.Argument(help="Whose key it is: a tenant, which may have several.", metavar="NAME")],
    admin: Annotated[bool, typer.Option("--admin", help="It also opens workers, pools and others' requests.")] = False,
    read: Annotated[bool, typer.Option("--read", help="It asks for nothing, and only reads.")] = False,
    models: Annotated[str, typer.Option("--models", help="All it may ask for, like a,b.", metavar="NAMES")] = "",
    rate: Annotated[str, typer.Option("--rate", help="So many new requests, like 60/min.", metavar="N/TIME")] = "",
    concurrent: Annotated[int, typer.Option("--concurrent", help="So many at a time.", metavar="N", min=0)] = 0,
    file: Annotated[
        Path | None, typer.Option("--file", help="File of keys [default: api-keys in the data folder].", metavar="FILE")
    ] = None,
    config: Config = None,
) -> None:
    """Make a key of the HTTP API, add it to a file of keys, and print it. A server that has the file knows it soon."""
    from unfuse.server.keys import add as added

    said = {"admin": "yes" * admin, "read": "yes" * read, "models": models, "rate": rate}
    said["concurrent"] = str(concurrent or "")
    found = load(terminal.flags, config).settings
    given = [entry for entry in found.serve.api_key if os.path.isfile(entry)]
    place = file or Path(given[0] if given else Path(found.data_dir, "api-keys"))
    typer.echo(added(place, name, {field: value for field, value in said.items() if value}))
    terminal.say(
        f"it is in {place}: start the server with --api-key {place}; one that has the file knows it in seconds"
    )
