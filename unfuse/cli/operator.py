"""`unfuse operator`: serve the DiffusionPipelines of a Kubernetes cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from unfuse import __version__
from unfuse.cli.terminal import Terminal
from unfuse.core.errors import UsageError


def operator(
    terminal: Terminal,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace to watch; may be repeated [default: all].", metavar="NAME")
    ] = None,
    image: Annotated[
        str,
        typer.Option(help="Container image for pipelines that set none. [default: unfuse:VERSION]", show_default=False),
    ] = f"unfuse:{__version__}",
    health: Annotated[
        str, typer.Option(help="Address at which liveness probes are answered. [default: none]", metavar="HOST:PORT")
    ] = "",
) -> None:
    """Run the Kubernetes operator for DiffusionPipelines and DiffusionPools.

    Pods that serve requests do not depend on it. One of several operators is active, the others wait; with
    --namespace, run only one.

    Example: unfuse operator --namespace unfuse
    """
    import asyncio

    try:
        from unfuse.k8s.operator import run_operator
    except ModuleNotFoundError as error:
        raise UsageError(f"`unfuse operator` needs {error.name}: pip install 'unfuse[serve,operator]'") from error
    terminal.open_log()
    asyncio.run(run_operator(image, namespace or (), liveness_endpoint=f"http://{health}/health" if health else None))
