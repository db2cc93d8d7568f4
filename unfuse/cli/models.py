"""`unfuse models`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from unfuse.cli import connecting, show
from unfuse.cli.options import ApiKey, Config, Json, Server
from unfuse.core.errors import ConfigError, TransientError
from unfuse.service.installed import missing_here
from unfuse.service.settings import DEFAULT, load


def models(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the models that a server serves, and those that could be served from here.

    The latter come with unfuse, are installed, or lie in the hub library's cache; so could any folder, GGUF file or hub
    name of a family listed. Without the packages of a server there are none.
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
    could = [row for row in here() if row["id"] not in names] if can_serve else []
    rows = [{**row, "state": "served"} for row in served] + could
    if json:
        show.as_json(rows)
        return
    show.as_table(rows, ["id", "state", "created", "owned_by"], "no model")
    if not can_serve:
        return
    from unfuse.models import served_classes

    typer.echo(f"families: {', '.join(served_classes())}")


def here() -> Iterator[dict[str, Any]]:
    """Models that are packaged, installed, or at least partly in the hub library's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from unfuse.models import served_classes
    from unfuse.models.folder import INDEX, ModelFolder
    from unfuse.models.source import INSTALLED, PACKAGED, resolve_source

    for name in PACKAGED:
        yield {"id": name, "object": "model", "state": "built in"}
    for name in INSTALLED:
        with suppress(ConfigError):
            resolve_source(name)
            yield {"id": name, "object": "model", "state": "installed"}
    cached: dict[str, str] = {}
    for index in sorted(Path(HF_HUB_CACHE).glob(f"models--*/snapshots/*/{INDEX}")):
        folder = ModelFolder(index.parent)
        with suppress(ConfigError):
            if folder.hub and folder.index().get("_class_name") in served_classes():
                cached[folder.hub[0]] = "in the hub cache"
    for name, state in cached.items():
        yield {"id": name, "object": "model", "state": state}
