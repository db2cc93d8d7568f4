"""`unfuse requests`: list, show and cancel requests."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unfuse.cli import connecting, show as shown
from unfuse.cli.verbs import ApiKey, CommandRegistry, Config, Json, Server

app = CommandRegistry(
    "List, show and cancel requests of a server.",
    example="unfuse requests ls --status failed",
)

#: The most characters of a prompt in a table.
PROMPT_CHARS = 40

Id = Annotated[str, typer.Argument(help="Id of the request.", metavar="ID")]
Limit = Annotated[int, typer.Option(help="Maximum number of requests.", min=1, max=1000)]
Wide = Annotated[
    bool, typer.Option("--wide", help="Also show the tenant, device seconds, cost and the beginning of the prompt.")
]
After = Annotated[str | None, typer.Option(help="Start after the request with this ID. [default: none]", metavar="ID")]


@app.verb()
def ls(
    status: Annotated[str | None, typer.Option(help="List only requests with this status. [default: all]")] = None,
    limit: Limit = 100,
    after: After = None,
    wide: Wide = False,
    server: Server = None,
    api_key: ApiKey = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """List requests, newest first, finished ones included.

    Example: unfuse requests ls --status failed
    """
    with connecting.client(server, api_key, config) as client:
        rows = client.requests(status=status, limit=limit, after=after)
    columns = ["id", "status", "stage", "step", "steps", "model", "created_at"]
    if wide and not json:
        columns += ["tenant", "seconds", "money", "prompt"]
        rows = [row | _wide(row) for row in rows]
    shown.listing(rows, columns, "no request", json)


@app.verb()
def show(id: Id, server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """Show one request with its stages.

    Example: unfuse requests show req_0123456789abcdef --json
    """
    with connecting.client(server, api_key, config) as client:
        print_request(client.request(id).view, json)


@app.verb()
def cancel(id: Id, server: Server = None, api_key: ApiKey = None, config: Config = None, json: Json = False) -> None:
    """Cancel a request; its running stages stop at the next step.

    Example: unfuse requests cancel req_0123456789abcdef
    """
    with connecting.client(server, api_key, config) as client:
        print_request(client.request(id).cancel(), json)


def _wide(request: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that --wide adds to a request."""
    prompt = " ".join((request["prompt"] or "").split())
    return {
        "seconds": float(sum(request["cost"]["device_s"].values())),
        "money": _money(request["cost"]["money"]),
        "prompt": prompt if len(prompt) <= PROMPT_CHARS else prompt[: PROMPT_CHARS - 1] + "…",
    }


def _money(amount: float | None) -> str | None:
    """Return an amount of money as text, or None.

    It has up to six digits after the point, since a picture often costs less than a thousandth.
    """
    return None if amount is None else f"{amount:.6f}".rstrip("0").rstrip(".")


def _cost(cost: dict[str, Any]) -> str:
    """Return the cost of a request as text: seconds by device, money, and predicted seconds."""
    devices = [f"{shown.cell(float(seconds))} s of {device}" for device, seconds in cost["device_s"].items()]
    money = [] if cost["money"] is None else [f"money {_money(cost['money'])}"]
    return ", ".join([*(devices or ["nothing used"]), *money, f"predicted {shown.cell(float(cost['predicted_s']))} s"])


def print_request(request: dict[str, Any], json: bool) -> None:
    """Print one request, as JSON or as text with a table of its stages."""
    if json:
        shown.as_json(request)
        return

    fields = request | ({"cost": _cost(request["cost"])} if request.get("cost") else {})
    for name, value in fields.items():
        if name not in ("stages", "result", "error", "object"):
            typer.echo(f"{name:15} {shown.cell(shown.format_value(name, value))}")

    if request.get("error"):
        error = request["error"]
        stage = f" (stage {error['stage']})" if error.get("stage") else ""
        typer.echo(f"{'error':15} {error.get('code')}: {error.get('message')}{stage}")
        for line in (request["error"].get("evidence") or "").splitlines():
            typer.echo(f"{'evidence':15} {line}")
    for file in request.get("result") or ():
        details = "flagged" if file.get("flagged") else f"{file['content_type']}, {file['bytes']} bytes"
        typer.echo(f"{'result':15} {file['url']} ({details})")

    typer.echo()
    retry_columns = ["failures", "crashes", "device_failures", "recomputes"]
    columns = ["name", "status", "worker", "attempt", *retry_columns, "vae", "queued_s", "run_s"]
    shown.as_table(request.get("stages") or [], columns, "no stage yet")
