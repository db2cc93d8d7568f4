"""`unfuse operator`: serve the DiffusionPipelines of a Kubernetes cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from unfuse import __version__
from unfuse.cli.terminal import Terminal
from unfuse.core.errors import UsageError


def operator(
    terminal: Terminal,
    namespace: Annotated[list[str] | None, typer.Option(help="Only this one; again for more.", metavar="NAME")] = None,
    image: Annotated[str, typer.Option(help="What runs where a pipeline names none.")] = f"unfuse:{__version__}",
    health: Annotated[str, typer.Option(help="Where a probe asks whether it lives.", metavar="HOST:PORT")] = "",
) -> None:
    """Have a Kubernetes cluster serve what its DiffusionPipelines say, by its DiffusionPools.

    What is served goes on without it. One of several works, the others wait; for a --namespace, run one alone.
    """
    import asyncio

    try:
        from unfuse.k8s.operator import operate
    except ModuleNotFoundError as error:
        raise UsageError(f"`unfuse operator` needs {error.name}: pip install 'unfuse[serve,operator]'") from error
    terminal.open_log()
    asyncio.run(operate(image, namespace or (), liveness_endpoint=f"http://{health}/health" if health else None))
