"""What `unfuse doctor` prints of this machine, and of its way to a scheduler."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

import typer
from msgspec.structs import asdict

from unfuse.arena.limits import readable_bytes
from unfuse.cli import show
from unfuse.service.groups import Settings

if TYPE_CHECKING:
    from unfuse.planning.machine import Machine


def show_checks(settings: Settings, json: bool) -> NoReturn:
    """Print whether this machine's workers could work for the schedulers, and exit: with 1 if they could not."""
    from unfuse.service.worker import checks

    found = asyncio.run(checks(settings))
    if json:
        show.as_json({"checks": [asdict(check) for check in found]})
    else:
        for check in found:
            typer.echo(f"{check.what:12} {'ok' if check.ok else 'FAILS':6} {check.says}")
    raise typer.Exit(int(not all(check.ok for check in found)))


def print_machine(machine: Machine) -> None:
    """Print what this machine has."""
    gpus = ", ".join(
        f"{gpu.name} ({readable_bytes(gpu.free)} of {readable_bytes(gpu.memory)} free)" for gpu in machine.gpus
    )
    facts = {
        "system": f"{machine.system}, Python {machine.python}",
        "processors": f"{machine.cpus:g}",
        "memory": f"{readable_bytes(machine.memory)}, {readable_bytes(machine.available)} available",
        "GPUs": gpus or "none: computing on the CPU",
        "libraries": ", ".join(f"{name} {version or 'MISSING'}" for name, version in machine.libraries.items()),
        "ports": ", ".join(f"{port} {'free' if free else 'IN USE'}" for port, free in machine.ports.items()),
    }
    for name, fact in facts.items():
        typer.echo(f"{name:12} {fact}")


def print_installation(settings: Settings) -> None:
    """Print which servers run here, and how workers and tensors come in."""
    from unfuse.service.addresses import AT_RISK, running, transfers

    typer.echo(f"{'servers':12} {', '.join(running(settings.run_dir)) or 'none of this user runs here'}")
    if settings.insecure_listen:
        typer.echo(f"{'WARNING':12} workers come in over TCP without keys: {AT_RISK}")
    for name, state in transfers(settings.transfer).items():
        typer.echo(f"{'transfers':12} {name}: {state}")
