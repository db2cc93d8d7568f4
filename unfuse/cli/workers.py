"""`unfuse workers` and `unfuse pools`."""

from __future__ import annotations

from unfuse.cli import connecting, show
from unfuse.cli.options import ApiKey, Config, Json, Server

_WORKER = ["id", "role", "node", "pid", "slots", "leased", "healthy", "seen_s", "models"]
_POOL = ["id", "state", "models", "workers", "slots", "leased", "waiting", "oldest_s"]


def workers(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the workers that are registered at a server."""
    with connecting.client(server, api_key, config) as client:
        rows = client.workers()
    show.listing(rows, _WORKER, "no worker is registered", json)


def pools(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the pools of a server, and how much waits in each."""
    with connecting.client(server, api_key, config) as client:
        rows = client.pools()
    show.listing(rows, _POOL, "no pool: no model is served", json)
