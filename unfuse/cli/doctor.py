"""`unfuse doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from unfuse.cli import show
from unfuse.cli.components import components
from unfuse.cli.machine import Machine, look
from unfuse.cli.options import Config, Json
from unfuse.cli.settings import load


def doctor(
    models: Annotated[list[str] | None, typer.Argument(help="Models to look into.", metavar="MODEL")] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what dead processes left behind.")] = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Say what this machine has and what models need.

    Reads files and headers only; no weights are loaded.
    """
    settings = load(config=config).settings
    port = int(settings.serve.listen.rpartition(":")[2])
    machine = look((settings.serve.port, port))
    weights = {name: _components(name) for name in models or []}
    if json:
        show.as_json({"machine": msgspec.to_builtins(machine, str_keys=True), "models": weights})
        return
    if clean:
        typer.echo("nothing to clean: tensors live in memory that ends with its last process")
    _print_machine(machine)
    for name, rows in weights.items():
        _print_model(name, rows, machine)


def _components(name: str) -> list[dict[str, Any]]:
    from unfuse.models import resolve_source

    return [msgspec.structs.asdict(component) for component in components(Path(resolve_source(name)))]


def _print_machine(machine: Machine) -> None:
    limit = "" if machine.limit is None else f", limited to {show.size(machine.limit)} by the control group"
    gpus = ", ".join(f"{gpu.name} ({show.size(gpu.memory)})" for gpu in machine.gpus)
    facts = {
        "system": f"{machine.system}, Python {machine.python}",
        "processors": f"{machine.cpus:g}",
        "memory": f"{show.size(machine.memory)}, {show.size(machine.available)} available{limit}",
        "GPUs": gpus or "none: computing on the CPU",
        "libraries": ", ".join(f"{name} {version or 'MISSING'}" for name, version in machine.libraries.items()),
        "ports": ", ".join(f"{port} {'free' if free else 'IN USE'}" for port, free in machine.ports.items()),
    }
    for name, fact in facts.items():
        typer.echo(f"{name:12} {fact}")


def _print_model(name: str, rows: list[dict[str, Any]], machine: Machine) -> None:
    typer.echo(f"\n{name}")
    table = [{**row, "weights": show.size(row["bytes"]), "dtypes": list(row["dtypes"])} for row in rows]
    show.as_table(table, ["name", "kind", "weights", "parameters", "dtypes"], "no components")
    total = sum(row["bytes"] for row in rows)
    verdict = "fit" if total <= machine.available else "DO NOT FIT"
    typer.echo(f"weights {show.size(total)} in all: they {verdict} in the {show.size(machine.available)} available")
