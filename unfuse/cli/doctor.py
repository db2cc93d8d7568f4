"""`unfuse doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from unfuse.arena.limits import readable_bytes
from unfuse.cli import show
from unfuse.cli.options import COMPUTE, PLACING, Config, Json, takes
from unfuse.cli.serve import tell
from unfuse.service import leftovers
from unfuse.service.settings import load
from unfuse.service.size import Size

if TYPE_CHECKING:
    from unfuse.service.machine import Machine
    from unfuse.service.plan import Model, Plan


@takes("serve.revision", "insecure_listen", "worker.memory_limit", *PLACING, *COMPUTE)
def doctor(
    flags: dict[str, Any],
    models: Annotated[list[str] | None, typer.Argument(help="Models to look into.", metavar="MODEL")] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what dead processes left on this machine, and say what.")
    ] = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Say what this machine has, what models need, where `serve` would put them, and whether to split them at all.

    Reads files and headers only; no weights are loaded.
    """
    from unfuse.service.addresses import AT_RISK, running
    from unfuse.service.machine import devices, look
    from unfuse.service.plan import plan_for, wanted
    from unfuse.service.resources import device_memory, means
    from unfuse.service.transfers import transfers

    loaded = load(flags, config)
    serve = loaded.settings.serve
    ports = [int(port) for address in serve.listen if (port := address.rpartition(":")[2]).isdecimal()]
    machine = look((serve.port, *ports))
    found = None
    if models:
        usable = devices(device_memory(loaded.settings))
        found = plan_for(models, serve.revision, wanted(loaded.settings), usable, means(loaded.settings))
    removed = leftovers.clean(loaded.settings) if clean else []
    if json:
        facts = {
            "machine": msgspec.to_builtins(machine, str_keys=True),
            "transfers": transfers(loaded.settings.transfer),
            "servers": running(loaded.settings.run_dir),
            "insecure_listen": loaded.settings.insecure_listen,
            **({"removed": [msgspec.structs.asdict(one) for one in removed]} if clean else {}),
        }
        show.as_json({**facts, **(_report(found, loaded.settings.data_dir) if found else {})})
        return
    if clean:
        rows = [msgspec.structs.asdict(one) for one in removed]
        show.as_table(rows, ["what", "path", "bytes"], "nothing to clean: no dead process left anything here")
        return
    _print_machine(machine)
    typer.echo(f"{'servers':12} {', '.join(running(loaded.settings.run_dir)) or 'none of this user runs here'}")
    if loaded.settings.insecure_listen:
        typer.echo(f"{'WARNING':12} workers come in over TCP without keys: {AT_RISK}")
    for name, state in transfers(loaded.settings.transfer).items():
        typer.echo(f"{'transfers':12} {name}: {state}")
    if found:
        _print_plan(found, loaded.settings.data_dir)


def _report(plan: Plan, data_dir: str) -> dict[str, Any]:
    from unfuse.service.advice import gains, layouts_of, verdict

    return {
        "models": {model.card.name: _components(model) for model in plan.models},
        "placement": plan.rows(),
        "memory": plan.memory(),
        "refusal": plan.refusal or None,
        "layouts": layouts_of(plan),
        "batches": _batches(plan, data_dir),
        "gains": [gain for gain, _ in gains(plan)],
        "verdict": verdict(plan),
    }


def _batches(plan: Plan, data_dir: str) -> list[dict[str, Any]]:
    from unfuse.service.advice import batches_of
    from unfuse.worker.exactness import Exactness
    from unfuse.worker.options import EXACTNESS

    return batches_of(plan, Exactness(Path(data_dir, EXACTNESS)).all())


def _components(model: Model) -> list[dict[str, Any]]:
    return [
        msgspec.structs.asdict(component) | {"files": Size(component.files), "memory": Size(component.memory)}
        for component in model.components.values()
    ]


def _print_machine(machine: Machine) -> None:
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


def _print_plan(plan: Plan, data_dir: str) -> None:
    from unfuse.service.advice import gains, layouts_of, verdict

    for model in plan.models:
        typer.echo(f"\n{model.card.name}")
        show.as_table(_components(model), ["name", "kind", "parameters", "files", "dtype", "memory"], "no components")
    typer.echo()
    if plan.refusal:
        typer.echo(f"serve would refuse: {plan.refusal}")
    else:
        tell(plan, typer.echo)
    typer.echo()
    if plan.layouts:
        show.as_table(layouts_of(plan), ["layout", "rate", "gave", "refusal"], "no layout")
        typer.echo()
    if batches := _batches(plan, data_dir):
        show.as_table(batches, ["pool", "exact_to", "not_from", "because_of"], "nothing was compared")
        typer.echo()
    for gain, _ in gains(plan):
        typer.echo(f"gain: {gain}")
    if plan.refusal or not plan.layouts:
        typer.echo(verdict(plan))
