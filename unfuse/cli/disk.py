"""`unfuse disk`."""

from __future__ import annotations

from unfuse.cli import show
from unfuse.cli.options import Config, Json
from unfuse.cli.terminal import Terminal
from unfuse.service.settings import Size, load


def disk(terminal: Terminal, config: Config = None, json: Json = False) -> None:
    """Show what results, queue, copies and models take on this machine's disks, and what of it may go."""
    from unfuse.service.disk import disk_use

    rows = disk_use(load(terminal.flags, config).settings)
    if json:
        show.as_json(rows)
        return
    shown = [row | {"bytes": "elsewhere" if row["bytes"] is None else Size(row["bytes"])} for row in rows]
    show.as_table(shown, ["what", "bytes", "files", "path", "may go"], "nothing")
