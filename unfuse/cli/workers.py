"""`unfuse workers` and `unfuse pools`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from unfuse.cli import connecting, show
from unfuse.cli.verbs import ApiKey, Config, Json, Server

_WORKER = ["id", "role", "node", "pid", "slots", "leased", "healthy", "seen_s", "ranks", "models"]
_POOL = ["id", "state", "models", "workers", "slots", "leased", "waiting", "oldest_s"]


def workers(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the workers that are registered at a server."""
    with connecting.client(server, api_key, config) as client:
        rows = client.workers()
    said = rows if json else [{**row, "ranks": _spent(row.get("ranks", ()))} for row in rows]
    show.listing(said, _WORKER, "no worker is registered", json)
    machines = {row["node"] for row in rows if row["healthy"]}
    if len(machines) > 1 and not json:
        typer.echo(f"{sum(row['healthy'] for row in rows)} healthy workers on {len(machines)} machines")


def _spent(ranks: Sequence[Mapping[str, float]]) -> str:
    """Of each rank the seconds that it computed, and those that it waited for others: a slow one waits least."""
    return ", ".join(f"{rank['compute_s']:.1f}+{rank['exchange_s']:.1f}" for rank in ranks) or "–"


def pools(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the pools of a server, and how much waits in each."""
    with connecting.client(server, api_key, config) as client:
        rows = client.pools()
    show.listing(rows, _POOL, "no pool: no model is served", json)
