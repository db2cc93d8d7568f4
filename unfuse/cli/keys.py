"""`unfuse keys`: make and list API keys, and the keys of schedulers and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unfuse.cli import show
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import CommandRegistry, Config, Json
from unfuse.service.settings import load

app = CommandRegistry(
    "Manage API keys, and create the keys by which schedulers and workers authenticate each other (`new`).",
    example="unfuse keys add anna --rate 60/min",
)

File = Annotated[
    Path | None,
    typer.Option(
        "--file", help="Key file [default: the first --api-keys, else api-keys in the data folder].", metavar="FILE"
    ),
]


@app.verb(server=True)
def new(folder: Annotated[Path, typer.Argument(help="Folder to write the keys to.", metavar="DIR")]) -> None:
    """Create the keys with which `serve` and `worker` reach other machines.

    Pass the folder to both as --keys DIR.

    Copy scheduler.key to the machines of schedulers and worker.key to those of workers; each is a secret.

    Example: unfuse keys new /etc/unfuse/keys
    """
    from unfuse.wire.keys import SIDES, create_keys

    create_keys(folder)
    for side in SIDES:
        typer.echo(str(folder / f"{side}.key"))


@app.verb(server=True)
def add(
    terminal: Terminal,
    name: Annotated[str, typer.Argument(help="Tenant of the key; a tenant may have several keys.", metavar="NAME")],
    admin: Annotated[
        bool,
        typer.Option(
            "--admin", help="Allow listing workers and the requests of all tenants, and adding and removing models."
        ),
    ] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Make the key read-only, with access to all of /metrics.")
    ] = False,
    models: Annotated[
        str, typer.Option("--models", help="Models that the key may use, like a,b [default: all].", metavar="NAMES")
    ] = "",
    rate: Annotated[
        str,
        typer.Option("--rate", help="Maximum rate of new requests, like 60/min. [default: no limit]", metavar="N/TIME"),
    ] = "",
    concurrent: Annotated[
        int,
        typer.Option("--concurrent", help="Maximum number of active requests; 0 sets no limit.", metavar="N", min=0),
    ] = 0,
    file: File = None,
    config: Config = None,
) -> None:
    """Create an API key, print it once, and add its hash to a key file.

    A server that has the file accepts the key within seconds.

    Example: unfuse keys add anna --rate 60/min --concurrent 4
    """
    from unfuse.edge.keys import add_key

    fields = {"admin": "yes" * admin, "read": "yes" * read, "models": models, "rate": rate}
    fields["concurrent"] = str(concurrent or "")
    key_file = _key_file(terminal, file, config)
    typer.echo(add_key(key_file, name, {field: value for field, value in fields.items() if value}))
    terminal.write_line(
        f"this key is not shown again, because the file has only its hash; start a server with --api-keys {key_file}; "
        "a server that already uses this file accepts the key within seconds"
    )


@app.verb(server=True)
def ls(terminal: Terminal, file: File = None, config: Config = None, json: Json = False) -> None:
    """List the names, limits and first hash digits of the keys in a key file.

    Example: unfuse keys ls --file keys.txt
    """
    from unfuse.edge.keys import LISTED_DIGITS, rows_of

    key_file = _key_file(terminal, file, config)
    rows = [
        {
            "name": entry.name,
            "hash": entry.digest.hex()[:LISTED_DIGITS],
            "admin": key.admin,
            "read": key.read_only,
            "models": None if key.models is None else sorted(key.models),
            "rate": dict(field.split("=", 1) for field in entry.fields).get("rate"),
            "concurrent": key.limits.concurrent or None,
            "stored_as": "plain text" if entry.plain else "hash",
        }
        for entry, key in rows_of(key_file)
    ]
    columns = ["name", "hash", "admin", "read", "models", "rate", "concurrent", "stored_as"]
    show.listing(rows, columns, f"no key in {key_file}", json)


@app.verb(server=True)
def rm(
    terminal: Terminal,
    which: Annotated[
        str, typer.Argument(help="A name, or the first digits of a hash in `keys ls`.", metavar="NAME|HASH")
    ],
    file: File = None,
    config: Config = None,
) -> None:
    """Remove keys from a key file, by name or by hash.

    A name removes all of its keys, a hash only the key with that hash.

    A server that has the file ends their calls within seconds. Their requests continue.

    Example: unfuse keys rm anna
    """
    from unfuse.edge.keys import LISTED_DIGITS, remove_keys

    key_file = _key_file(terminal, file, config)
    for entry in remove_keys(key_file, which):
        typer.echo(f"{entry.name} {entry.digest.hex()[:LISTED_DIGITS]}")
    terminal.write_line(f"removed from {key_file}")


@app.verb(server=True)
def hash(terminal: Terminal, file: Annotated[Path, typer.Argument(help="Key file.", metavar="FILE")]) -> None:
    """Replace plain keys in a key file by their hashes.

    The keys stay valid; their calls continue.

    Example: unfuse keys hash keys.txt
    """
    from unfuse.edge.keys import hash_keys

    count, short_keys = hash_keys(file)
    outcome = f"replaced {count} plain keys by their hashes" if count != 1 else "replaced its plain key by its hash"
    terminal.write_line(f"{file}: {outcome}" if count else f"{file} has no plain key")
    if short_keys:
        terminal.write_line(
            f"short keys can be guessed from their hashes: make new ones for {', '.join(dict.fromkeys(short_keys))} by "
            "`unfuse keys add NAME`, and remove the old ones"
        )


def _key_file(terminal: Terminal, file: Path | None, config: Path | None) -> Path:
    """Return the key file: `file`, or the first `--api-keys`, or the default one."""
    settings = load(terminal.flags, config).settings
    return file or Path(next(iter(settings.serve.api_keys), "") or Path(settings.data_dir, "api-keys"))
