"""`unfuse models`, `pull`, `workers` and `pools`: what a server serves, and which workers serve it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.arena.limits import readable_bytes
from unfuse.cli import connecting, show
from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import ApiKey, CommandRegistry, Config, Json, Server, setting_options
from unfuse.core.errors import ConfigError, InvalidParameter, PermanentError, TransientError
from unfuse.core.paths import expand_path
from unfuse.core.plan import StageSelector, roles_of
from unfuse.service.installed import missing_here
from unfuse.service.settings import DEFAULT, ByteSize, load

if TYPE_CHECKING:
    from unfuse.weights.hub import DownloadProgress


app = CommandRegistry(
    "Manage the models of a server, and list the models that this machine could serve.",
    example="unfuse models add /models/mine --name mine",
)

#: Seconds between two requests for the state of a loading model.
CHECK_INTERVAL_S = 0.5

Name = Annotated[str, typer.Argument(help="Name of the model, as listed by `models ls`.", metavar="NAME")]


@app.verb()
@app.usual
def ls(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the models that a server serves, and those that this machine could serve.

    The latter come with unfuse, are installed, or are in the cache of the hub. Any other folder, GGUF file or hub name
    of a listed family can be served too. They are listed only if the server packages are installed.

    Example: unfuse models ls --json
    """
    served: list[dict[str, Any]] = []
    can_serve = not missing_here()
    try:
        with connecting.client(server, api_key, config) as client:
            served = client.models()
    except TransientError as error:
        if load({"server": server}, config).origins["server"] != DEFAULT or not can_serve:
            raise
        typer.echo(str(error), err=True)

    names = {row["id"] for row in served}
    available = [row for row in here() if row["id"] not in names] if can_serve else []
    if json:
        show.as_json([*served, *available])
        return
    rows = [*({**row, "state": _state(row)} for row in served), *available]
    show.as_table(rows, ["id", "state", "default", "created", "owned_by"], "no model")
    if not can_serve:
        return

    from unfuse.models import served_classes

    typer.echo(f"families: {', '.join(served_classes())}")


@app.verb()
def add(
    terminal: Terminal,
    model: Annotated[
        str,
        typer.Argument(help="Folder or GGUF file on the server's machine, or a hub name.", metavar="MODEL"),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name for clients [default: hub name, or last part of the path]."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the model is ready.")] = True,
    server: Server = None,
    api_key: ApiKey = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Add a model to a running server, and wait until it is ready.

    Needs an admin key if API keys are configured. The server also serves the model after restarts, until it is removed.

    Example: unfuse models add /models/mine --name mine
    """
    path = expand_path(model)
    source = str(path.absolute()) if path.exists() else model
    with connecting.client(server, api_key, config) as client:
        added: dict[str, Any] = {}
        with progress_on(terminal, lambda: f"{added['id']}: {_waits_for(added)}" if added else f"inspecting {model}"):
            try:
                added = client.add_model(source, name)
            except InvalidParameter as error:
                if error.param == "model":
                    raise InvalidParameter(f"{model} cannot be added: {error}", error.param) from error
                raise
            while wait and added["state"] == "loading":
                time.sleep(CHECK_INTERVAL_S)
                added = client.model(added["id"])
    if wait and added["state"] != "ready":
        raise PermanentError(f"model {added['id']} cannot be served: {added['reason']}")
    show.as_json(added) if json else typer.echo(f"{added['id']} is {_state(added)}")


@app.verb()
def rm(name: Name, server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """Remove a model from a running server.

    Accepted requests are completed, new ones are refused.

    Example: unfuse models rm mine
    """
    with connecting.client(server, api_key, config) as client:
        removed = client.remove_model(name)
    if json:
        show.as_json(removed)
    else:
        typer.echo(f"{removed['id']} is removed; accepted requests will still be completed")


def _state(model: Mapping[str, Any]) -> str:
    """Return the state of a served model as text, with its progress or its reason."""
    state, progress = str(model["state"]), model.get("progress")
    if progress:
        size = (
            f" {readable_bytes(progress['done'])} of {readable_bytes(progress['total'])}" if progress["total"] else ""
        )
        return f"{progress['phase']}{size}"
    return f"{state}: {model['reason']}" if model.get("reason") else state


def _waits_for(model: Mapping[str, Any]) -> str:
    """Return the state of a model that is being added, as text."""
    # A server without workers of its own has no progress to report.
    is_elsewhere = model["state"] == "loading" and not model.get("progress")
    return "loading: its workers have not registered yet" if is_elsewhere else _state(model)


def here() -> Iterator[dict[str, Any]]:
    """Yield the models that this machine could serve, as rows for `models ls`.

    They are packaged with unfuse, installed, or at least partly in the hub cache.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    from unfuse.models import served_classes
    from unfuse.weights.folder import INDEX, ModelFolder
    from unfuse.weights.source import INSTALLED, PACKAGED, resolve_source

    for name in PACKAGED:
        yield {"id": name, "object": "model", "state": "built in"}
    for name in INSTALLED:
        with suppress(ConfigError):
            resolve_source(name)
            yield {"id": name, "object": "model", "state": "installed"}

    # A model that was cached in several revisions is listed once.
    cached: dict[str, str] = {}
    for index in sorted(Path(HF_HUB_CACHE).glob(f"models--*/snapshots/*/{INDEX}")):
        folder = ModelFolder(index.parent)
        with suppress(ConfigError):
            if folder.hub and folder.index().get("_class_name") in served_classes():
                cached[folder.hub[0]] = "in the hub cache"
    for name, state in cached.items():
        yield {"id": name, "object": "model", "state": state}


@setting_options("serve.revision", "worker.role", "worker.component")
def pull(
    flags: dict[str, Any],
    terminal: Terminal,
    models: Annotated[list[str], typer.Argument(help="Models to download: hub names, or short names of known models.")],
    config: Config = None,
    json: Json = False,
) -> None:
    """Download models from the hub before they are served.

    An interrupted download resumes where it stopped.

    A machine whose workers have only some roles needs only the weights of these roles (--role).

    Example: unfuse pull owner/model --role encoder
    """
    from unfuse.models import fetch

    settings = load({**flags, **terminal.flags}, config).settings
    selector = StageSelector(roles_of(settings.worker.role), settings.worker.component)
    terminal.open_log()
    rows: list[dict[str, Any]] = []
    reports: list[DownloadProgress] = []

    def status() -> str:
        return f"{reports[-1].model}: {reports[-1]}" if reports else f"inspecting {', '.join(models)}"

    with progress_on(terminal, status):
        for name in models:
            reports.clear()
            spec, folder = fetch(name, selector, revision=settings.serve.revision, on_progress=reports.append)
            if not any(selector.selects(stage) for stage in spec.pipeline.stages):
                roles = ", ".join(dict.fromkeys(stage.role for stage in spec.pipeline.stages))
                raise ConfigError(f"model {name} has no stage for --role and --component: its roles are {roles}")
            downloaded = reports[0].total - reports[0].done if reports else 0
            rows.append({"model": name, "brought": ByteSize(downloaded), "folder": str(folder)})
    show.listing(rows, ["model", "brought", "folder"], "no model", json)


#: The columns of `unfuse workers` and `unfuse pools`.
_WORKER_COLUMNS = ["id", "role", "node", "devices", "pid", "slots", "leased", "healthy", "seen_s", "ranks", "models"]
_POOL_COLUMNS = ["id", "state", "models", "workers", "slots", "leased", "waiting", "oldest_s"]


def workers(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the workers that are registered at a server.

    Example: unfuse workers --server http://127.0.0.1:8000
    """
    with connecting.client(server, api_key, config) as client:
        rows = client.workers()
    texts = [
        {"ranks": _rank_seconds(row.get("ranks", ())), "devices": [*map(_device_name, row.get("device_health", ()))]}
        for row in rows
    ]
    table_rows = rows if json else [row | text for row, text in zip(rows, texts, strict=True)]
    show.listing(table_rows, _WORKER_COLUMNS, "no worker is registered", json)
    nodes = {row["node"] for row in rows if row["healthy"]}
    if len(nodes) > 1 and not json:
        typer.echo(f"{sum(row['healthy'] for row in rows)} healthy workers on {len(nodes)} machines")
    for row in [] if json else rows:
        if reason := row.get("unhealthy_reason"):
            typer.echo(f"worker {row['id']} runs no tasks: {show.cell(reason)}")


def _device_name(device: Mapping[str, str]) -> str:
    """Return the index and the UUID of a device as text."""
    return f"{device['index']} {device['uuid']}".strip()


def _rank_seconds(ranks: Sequence[Mapping[str, float]]) -> str:
    """Return the seconds of each rank as text: computing + exchanging data with other ranks.

    The slowest rank has the least time of exchange, since the others wait for it.
    """
    return ", ".join(f"{rank['compute_s']:.1f}+{rank['exchange_s']:.1f}" for rank in ranks) or "–"


def pools(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the pools of a server, and the number of tasks that wait in each.

    Example: unfuse pools --json
    """
    with connecting.client(server, api_key, config) as client:
        rows = client.pools()
    show.listing(rows, _POOL_COLUMNS, "no pool: no model is served", json)
