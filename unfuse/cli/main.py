"""The command `unfuse`. Verbs are light to import: what a verb needs, it imports when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from unfuse.cli import compare, config, dead, doctor, generate, keys, models, requests, serve, version, worker, workers
from unfuse.core.errors import InvalidParameter, Overloaded, TransientError, UnfuseError

app = typer.Typer(
    help="Serve a generative model as stages, each from its own pool of workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(serve.serve)
app.command()(worker.worker)
app.command()(models.models)
app.add_typer(requests.app, name="requests")
app.add_typer(dead.app, name="dead")
app.command()(workers.workers)
app.command()(workers.pools)
app.command()(doctor.doctor)
app.command()(compare.compare)
app.add_typer(keys.app, name="keys")
app.add_typer(config.app, name="config")
app.command()(version.version)

FAILED, USAGE, REFUSED = 1, 2, 3
"""Exit codes beside 0 and 130, which is an interrupt's."""


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a command line and exit; an error of ours is one line on standard error."""
    try:
        app(arguments, prog_name="unfuse")
    except UnfuseError as error:
        typer.echo(f"unfuse: {error}", err=True)
        sys.exit(exit_code(error))
    sys.exit(0)


def exit_code(error: UnfuseError) -> int:
    """What an error means to a script: 2 asked wrongly, 3 worth trying again later, 1 anything else."""
    if isinstance(error, InvalidParameter):
        return USAGE
    return REFUSED if isinstance(error, Overloaded | TransientError) else FAILED


def main() -> NoReturn:
    """The entry point of the command."""
    run(sys.argv[1:])
