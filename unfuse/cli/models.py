"""`unfuse models`."""

from __future__ import annotations

from unfuse.cli import reach, show
from unfuse.cli.options import ApiKey, Config, Json, Server


def models(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the models a server serves."""
    with reach.client(server, api_key, config) as client:
        rows = client.models()
    empty = "no model is served: its workers have not registered yet"
    show.listing(rows, ["id", "created", "owned_by"], empty, json)
