"""`unfuse doctor` and `unfuse disk`: check this machine, its schedulers, models and disks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer
from msgspec.structs import asdict

from unfuse.arena.limits import readable_bytes
from unfuse.cli import show
from unfuse.cli.serve import print_memory
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import COMPUTE, PLACING, Config, Json, setting_options
from unfuse.planning.placement import NO_DEVICE
from unfuse.service.groups import Settings
from unfuse.service.settings import ByteSize, load

if TYPE_CHECKING:
    from unfuse.planning.machine import Machine
    from unfuse.service.plan import PlannedModel, ServingPlan


Clean = Annotated[
    bool,
    typer.Option("--clean", help="Remove files and sockets that dead processes left on this machine, and list them."),
]


@setting_options(
    "serve.revision", "insecure_listen", "worker.scheduler", "keys", "worker.memory_limit", *PLACING, *COMPUTE
)
def doctor(
    flags: dict[str, Any],
    terminal: Terminal,
    models: Annotated[list[str] | None, typer.Argument(help="Models to inspect.", metavar="MODEL")] = None,
    clean: Clean = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Show this machine's resources, the needs of models, and how `serve` would place them.

    Also shows whether to split the models at all.

    Reads files and headers only, no weights. With --scheduler it checks instead whether workers of this machine can use
    that scheduler. --device-memory may name devices that this machine does not have: then the plan is for a machine
    with exactly these devices.

    Example: unfuse doctor unfuse/shapes --device-memory cuda:0=24GiB
    """
    from unfuse.planning.machine import devices_to_size, inspect_machine
    from unfuse.service.addresses import running, transfers
    from unfuse.service.disk import clean as remove_leftovers
    from unfuse.service.plan import device_memory, host_resources, plan_models, worker_plan
    from unfuse.weights.fingerprints import FINGERPRINTS

    terminal.open_log()
    loaded = load({**flags, **terminal.flags}, config)
    FINGERPRINTS.cache_in(Path(loaded.settings.data_dir))
    if "worker.scheduler" in flags:
        show_checks(loaded.settings, json)

    serve = loaded.settings.serve
    machine = inspect_machine((serve.port, *_ports(serve.listen)))
    devices, is_here = devices_to_size(device_memory(loaded.settings))
    removed = remove_leftovers(loaded.settings) if clean else []
    if clean and not json:
        show.as_table(removed, ["what", "path", "bytes"], "nothing to clean: no dead process left anything here")
        return

    if not json:
        print_machine(machine)
        print_installation(loaded.settings)

    plan = None
    if models:
        plan = plan_models(
            models, serve.revision, worker_plan(loaded.settings), devices, host_resources(loaded.settings)
        )

    if json:
        facts = {
            "machine": msgspec.to_builtins(machine, str_keys=True),
            "transfers": transfers(loaded.settings.transfer),
            "servers": running(loaded.settings.run_dir),
            "insecure_listen": loaded.settings.insecure_listen,
            "planned_for": {device.name: device.free for device in devices},
            "is_this_machine": is_here,
            **({"removed": removed} if clean else {}),
        }
        show.as_json({**facts, **(_plan_facts(plan, loaded.settings.data_dir) if plan else {})})
        return

    if not is_here:
        other_devices = ", ".join(f"{device.name} {readable_bytes(device.free)}" for device in devices)
        typer.echo(f"{'planned for':12} another machine: {other_devices}")
    if plan:
        _print_plan(plan, loaded.settings.data_dir)


def _ports(addresses: Iterable[str]) -> list[int]:
    """Return the ports of the TCP addresses among these."""
    ports = (address.rpartition(":")[2] for address in addresses if address.startswith("tcp://"))
    return [int(port) for port in ports if port.isdecimal()]


def _plan_facts(plan: ServingPlan, data_dir: str) -> dict[str, Any]:
    """Return the description of a plan for JSON output."""
    from unfuse.service.batching_report import batching_rows
    from unfuse.service.report import layout_rows, split_gains, split_recommendation

    return {
        "models": {model.spec.name: _components(model) for model in plan.models},
        "placement": plan.rows(),
        "memory": plan.memory(),
        "refusal": plan.refusal or None,
        "undivided": {
            model.spec.name: model.spec.undivided_reason for model in plan.models if model.spec.undivided_reason
        },
        "layouts": layout_rows(plan),
        "batches": batching_rows(plan, data_dir),
        "gains": [gain for gain, _ in split_gains(plan)],
        "verdict": split_recommendation(plan),
    }


def _components(model: PlannedModel) -> list[dict[str, Any]]:
    """Return a table row for each component of a model."""
    return [
        msgspec.structs.asdict(component) | {"files": ByteSize(component.files), "memory": ByteSize(component.memory)}
        for component in model.components.values()
    ]


def _print_plan(plan: ServingPlan, data_dir: str) -> None:
    """Print a plan: components, placement, layouts, batches, gains and recommendation."""
    from unfuse.service.batching_report import batching_rows
    from unfuse.service.report import layout_rows, prediction_basis, split_gains, split_recommendation

    for model in plan.models:
        typer.echo(f"\n{model.spec.name}")
        show.as_table(_components(model), ["name", "kind", "parameters", "files", "dtype", "memory"], "no components")
        if model.spec.undivided_reason:
            typer.echo(f"{model.spec.name} is not split: {model.spec.undivided_reason}")

    typer.echo()
    if plan.refusal:
        typer.echo(f"serve would refuse: {plan.refusal}")
        if plan.refusal.startswith(NO_DEVICE):
            device = plan.refusal.removeprefix(NO_DEVICE).split()[0]
            typer.echo(f"to plan for a machine that has it, set its memory, as by --device-memory {device}=24GiB")
    else:
        if plan.layouts:
            typer.echo(plan.layouts.reason)
        print_memory(plan, typer.echo)

    typer.echo()
    if plan.layouts:
        show.as_table(layout_rows(plan), ["layout", "rate", "refusal"], "no layout")
        typer.echo(f"{prediction_basis(plan)}\n")
    show.as_table(batching_rows(plan, data_dir), ["pool", "batching", "not_from", "time"], "no stage")
    typer.echo(
        "time: what a request takes in the largest batch that was compared here, divided by what it takes alone\n"
    )
    for gain, _ in split_gains(plan):
        typer.echo(f"gain: {gain}")
    if plan.refusal or not plan.layouts:
        typer.echo(split_recommendation(plan))


def show_checks(settings: Settings, json: bool) -> NoReturn:
    """Print whether workers of this machine can use the schedulers of the settings, and exit.

    The exit code is 1 if a check fails, else 0.
    """
    from unfuse.service.worker import checks

    results = asyncio.run(checks(settings))
    if json:
        show.as_json({"checks": [asdict(result) for result in results]})
    else:
        for result in results:
            typer.echo(f"{result.what:12} {'ok' if result.ok else 'FAILS':6} {result.says}")
    raise typer.Exit(int(not all(result.ok for result in results)))


def print_machine(machine: Machine) -> None:
    """Print the system, processors, memory, GPUs, libraries and ports of this machine."""
    gpus = ", ".join(
        f"{gpu.name} ({readable_bytes(gpu.free)} of {readable_bytes(gpu.memory)} free"
        f"{'' if gpu.has_bfloat16 else ', no bfloat16'})"
        for gpu in machine.gpus
    )
    facts = {
        "system": f"{machine.system}, Python {machine.python}",
        "processors": f"{machine.cpus:g}",
        "memory": f"{readable_bytes(machine.memory)}, {readable_bytes(machine.available)} available",
        "GPUs": gpus or "none: computing on the CPU",
        **({"WARNING": machine.gpu_problem} if machine.gpu_problem else {}),
        "libraries": ", ".join(f"{name} {version or 'MISSING'}" for name, version in machine.libraries.items()),
        "ports": ", ".join(f"{port} {'free' if free else 'IN USE'}" for port, free in machine.ports.items()),
    }
    for name, fact in facts.items():
        typer.echo(f"{name:12} {fact}")


def print_installation(settings: Settings) -> None:
    """Print this user's servers on this machine, and the state of each transfer engine."""
    from unfuse.service.addresses import EXPOSURE_RISK, running, transfers

    typer.echo(f"{'servers':12} {', '.join(running(settings.run_dir)) or 'none of this user runs here'}")
    if settings.insecure_listen:
        typer.echo(f"{'WARNING':12} workers connect over TCP without keys: {EXPOSURE_RISK}")
    for name, state in transfers(settings.transfer).items():
        typer.echo(f"{'transfers':12} {name}: {state}")


def disk(terminal: Terminal, config: Config = None, json: Json = False) -> None:
    """Show the disk use of results, queue, copies and models, and what may be deleted.

    Data that is not on this machine is listed without its size.

    Example: unfuse disk --json
    """
    from unfuse.service.disk import disk_use

    rows = disk_use(load(terminal.flags, config).settings)
    if json:
        show.as_json(rows)
        return
    readable = [row | {"bytes": "elsewhere" if row["bytes"] is None else ByteSize(row["bytes"])} for row in rows]
    show.as_table(readable, ["what", "bytes", "files", "path", "may go"], "nothing")
