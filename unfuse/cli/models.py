"""`unfuse models`."""

from __future__ import annotations

from unfuse.cli import reach, show
from unfuse.cli.options import ApiKey, Config, Json, Server


def models(server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """List the models a server serves."""
    with reach.client(server, api_key, config) as client:
        rows = client.models()
    if json:
        show.as_json(rows)
    else:
        rows = [{**row, "created": show.when(row.get("created"))} for row in rows]
        show.as_table(rows, ["id", "created", "owned_by"], "no model is served: its workers have not registered yet")
