"""`unfuse requests`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unfuse.cli import reach, show as shown
from unfuse.cli.options import ApiKey, Config, Json, Server

app = typer.Typer(no_args_is_help=True, help="What was asked of a server.")

Id = Annotated[str, typer.Argument(help="Id of the request.", metavar="ID")]


@app.command()
def ls(
    status: Annotated[str | None, typer.Option(help="Only requests of this status.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many.", min=1, max=1000)] = 100,
    after: Annotated[str | None, typer.Option(help="Start behind the request of this id.", metavar="ID")] = None,
    server: Server = None,
    api_key: ApiKey = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """List requests, newest first, finished ones included."""
    with reach.client(server, api_key, config) as client:
        rows = client.requests(status=status, limit=limit, after=after)
    if json:
        shown.as_json(rows)
    else:
        rows = [{**row, "created": shown.when(row.get("created_at"))} for row in rows]
        shown.as_table(rows, ["id", "status", "stage", "step", "steps", "model", "created"], "no request")


@app.command()
def show(id: Id, server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """Show one request with its stages."""
    with reach.client(server, api_key, config) as client:
        _print(client.request(id).view, json)


@app.command()
def cancel(id: Id, server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """Cancel a request; what runs of it stops at the next step."""
    with reach.client(server, api_key, config) as client:
        _print(client.request(id).cancel(), json)


def _print(request: dict[str, Any], json: bool) -> None:
    if json:
        shown.as_json(request)
        return
    for name, value in request.items():
        if name not in ("stages", "result", "error", "object"):
            typer.echo(f"{name:15} {shown.cell(shown.when(value) if name.endswith('_at') else value)}")
    if request.get("error"):
        typer.echo(f"{'error':15} {request['error'].get('message')}")
    for file in request.get("result") or ():
        typer.echo(f"{'result':15} {file['url']} ({file['content_type']}, {file['bytes']} bytes)")
    typer.echo()
    shown.as_table(request.get("stages") or [], ["name", "worker", "attempt", "queued_s", "run_s"], "no stage yet")
