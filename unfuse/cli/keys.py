"""`unfuse keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unfuse.cli.verbs import Verbs

app = Verbs("The keys by which schedulers and workers know each other.")


@app.verb()
def new(folder: Annotated[Path, typer.Argument(help="Folder to write them to.", metavar="DIR")]) -> None:
    """Make keys, to be given to `serve` and `worker` as --keys DIR: with them, other machines can be reached.

    Copy scheduler.key to the machines of schedulers and worker.key to those of workers; each is a secret.
    """
    from unfuse.wire.keys import SIDES, make

    make(folder)
    for side in SIDES:
        typer.echo(str(folder / f"{side}.key"))
