"""`unfuse workers` and `unfuse pools`."""

from __future__ import annotations

from unfuse.cli import reach, show
from unfuse.cli.options import ApiKey, Config, Json, Server


def workers(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the workers that are registered at a server."""
    with reach.client(server, api_key, config) as client:
        rows = client.workers()
    if json:
        show.as_json(rows)
    else:
        show.as_table(rows, ["id", "role", "node", "pid", "slots", "leased", "models"], "no worker is registered")


def pools(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the pools of a server, and how much waits in each."""
    with reach.client(server, api_key, config) as client:
        rows = client.pools()
    if json:
        show.as_json(rows)
    else:
        show.as_table(rows, ["id", "models", "workers", "slots", "waiting"], "no pool: no model is served")
