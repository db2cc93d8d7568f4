"""`unfuse pull`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.cli import show
from unfuse.cli.options import Config, Json, takes
from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import Terminal
from unfuse.core.errors import ConfigError
from unfuse.core.plan import Choice, roles_of
from unfuse.service.settings import Size, load

if TYPE_CHECKING:
    from unfuse.weights.hub import Brought


@takes("serve.revision", "worker.role", "worker.component")
def pull(
    flags: dict[str, Any],
    terminal: Terminal,
    models: Annotated[list[str], typer.Argument(help="Models to bring: hub names, or known ones in short.")],
    config: Config = None,
    json: Json = False,
) -> None:
    """Bring models from the hub before they are served; what was stopped goes on where it was.

    A machine whose workers have some roles only needs the weights of these.
    """
    from unfuse.models import fetch

    settings = load({**flags, **terminal.flags}, config).settings
    choice = Choice(roles_of(settings.worker.role), settings.worker.component)
    terminal.open_log()
    rows: list[dict[str, Any]] = []
    heard: list[Brought] = []

    def status() -> str:
        return f"{heard[-1].model}: {heard[-1]}" if heard else f"looking into {', '.join(models)}"

    with progress_on(terminal, status):
        for name in models:
            heard.clear()
            card, folder = fetch(name, choice, revision=settings.serve.revision, tell=heard.append)
            if not any(choice.takes(stage) for stage in card.pipeline.stages):
                roles = ", ".join(dict.fromkeys(stage.role for stage in card.pipeline.stages))
                raise ConfigError(f"no stage of model {name} is what --role and --component say: its roles are {roles}")
            brought = heard[0].total - heard[0].done if heard else 0
            rows.append({"model": name, "brought": Size(brought), "folder": str(folder)})
    show.listing(rows, ["model", "brought", "folder"], "no model", json)
