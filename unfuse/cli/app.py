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
    """Print the version.

    Example: unfuse version --json
    """
    if json:
        show.as_json({"version": unfuse.__version__})
    else:
        typer.echo(f"unfuse {unfuse.__version__}")


#: The headings of `unfuse --help`.
GENERATING = "Generate"
SERVING = "Serve"
MODELS = "Models and machines"
WATCHING = "Watch a server"
ADMINISTRATION = "Keys and settings"

app = CommandRegistry(
    "Serve a generative model as stages, each from its own pool of workers.",
    example='unfuse generate "a red circle on white" -o circle.png',
    add_completion=True,
)
app.verb(heading=GENERATING)(generate.generate)
app.verb(heading=GENERATING)(chat.chat)
app.verb("info", server=True, heading=SERVING)(serve.serve)
app.verb("info", server=True, heading=SERVING)(worker.worker)
app.verb("info", server=True, heading=SERVING)(operator.operator)
app.verb(server=True, heading=MODELS)(models.pull)
app.add_typer(models.app, name="models", rich_help_panel=MODELS)
app.verb(server=True, heading=MODELS)(doctor.doctor)
app.verb(server=True, heading=MODELS)(compare.compare)
app.verb(server=True, heading=MODELS)(doctor.disk)
app.add_typer(requests.app, name="requests", rich_help_panel=WATCHING)
app.verb(heading=WATCHING)(models.workers)
app.verb(heading=WATCHING)(models.pools)
app.add_typer(dead.app, name="dead", rich_help_panel=WATCHING)
app.add_typer(keys.app, name="keys", rich_help_panel=ADMINISTRATION)
app.add_typer(config.app, name="config", rich_help_panel=ADMINISTRATION)
app.verb(heading=ADMINISTRATION)(version)
