"""`unfuse dead`: list, show, delete and retry dead letters."""

from __future__ import annotations

import typer

from unfuse.cli import connecting, requests, show as shown
from unfuse.cli.requests import After, Id, Limit
from unfuse.cli.verbs import ApiKey, CommandRegistry, Config, Json, Server

app = CommandRegistry(
    "List, show, delete and retry dead letters, which are requests that failed too often.",
    example="unfuse dead show req_0123456789abcdef",
)


@app.verb()
def ls(
    limit: Limit = 100,
    after: After = None,
    server: Server = None,
    api_key: ApiKey = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """List unreadable records of the queue, and dead requests, newest first.

    Example: unfuse dead ls
    """
    with connecting.client(server, api_key, config) as client:
        rows = client.dead(limit, after)
    columns = ["id", "completed_at", "stage", "code", "message", "model"]
    shown.listing(rows if json else [row | row["error"] for row in rows], columns, "no dead letters", json)


@app.verb()
def show(id: Id, server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """Show one dead request with its error and the evidence.

    The evidence is a traceback, or the last lines of the log of a process that died.

    Example: unfuse dead show req_0123456789abcdef
    """
    with connecting.client(server, api_key, config) as client:
        requests.print_request(client.get(f"/v1/dead/{id}"), json)


@app.verb()
def rm(id: Id, server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """Delete a dead request, or an unreadable record.

    Example: unfuse dead rm req_0123456789abcdef
    """
    with connecting.client(server, api_key, config) as client:
        client.forget_dead(id)
    shown.as_json({"id": id, "deleted": True}) if json else typer.echo(f"{id} is deleted")


@app.verb()
def retry(id: Id, server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """Retry a dead request as a new request, and print the new one.

    Example: unfuse dead retry req_0123456789abcdef
    """
    with connecting.client(server, api_key, config) as client:
        requests.print_request(client.retry(id).view, json)
