"""All verbs of the command. A verb imports its heavy modules only when it runs."""

from __future__ import annotations

import typer

import unfuse
from unfuse.cli import (
    chat,
    compare,
    config,
    dead,
    doctor,
    generate,
    keys,
    models,
    operator,
    requests,
    serve,
    show,
    worker,
)
from unfuse.cli.verbs import CommandRegistry, Json


def version(json: Json = False) -> None:
    """Print the version."""
    if json:
        show.as_json({"version": unfuse.__version__})
    else:
        typer.echo(f"unfuse {unfuse.__version__}")


app = CommandRegistry("Serve a generative model as stages, each from its own pool of workers.", add_completion=True)
app.verb()(generate.generate)
app.verb()(chat.chat)
app.verb("info", server=True)(serve.serve)
app.verb("info", server=True)(worker.worker)
app.verb(server=True)(models.pull)
app.add_typer(models.app, name="models")
app.add_typer(requests.app, name="requests")
app.add_typer(dead.app, name="dead")
app.verb()(models.workers)
app.verb()(models.pools)
app.verb(server=True)(doctor.doctor)
app.verb(server=True)(compare.compare)
app.verb(server=True)(doctor.disk)
app.verb("info", server=True)(operator.operator)
app.add_typer(keys.app, name="keys")
app.add_typer(config.app, name="config")
app.verb()(version)
