"""`unfuse compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.cli import show
from unfuse.cli.options import COMPUTE, PLACING, Config, Json, takes
from unfuse.cli.parameter_flags import asks
from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import Terminal
from unfuse.core.checking import check_bounds
from unfuse.core.media import medium_for
from unfuse.service.settings import load
from unfuse.service.size import Size

if TYPE_CHECKING:
    from unfuse.service.comparison import Figures

LAYOUTS = "Measure instead what one worker of all stages gives, two, and so on, for --workers auto to choose by."


@takes(*PLACING, *COMPUTE)
@asks("size", "num_inference_steps", "num_frames")
def compare(
    flags: dict[str, Any],
    asked: dict[str, Any],
    terminal: Terminal,
    model: Annotated[str, typer.Argument(help="Model to compare: a name, folder or hub id.", metavar="MODEL")],
    levels: Annotated[str, typer.Option(help="How many requests at once, for throughput.")] = "1,4,16",
    rounds: Annotated[int, typer.Option(help="Requests whose latency is measured.", min=1)] = 5,
    prompt: Annotated[str, typer.Option(help="What to show.")] = "a red circle on white",
    image: Annotated[Path | None, typer.Option(help="Reference image, for a model that takes one.")] = None,
    layouts: Annotated[bool, typer.Option("--layouts", help=LAYOUTS)] = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Run diffusers undivided, then unfuse, on this machine: which is faster, which is smaller, and do they agree.

    The undivided pipeline gets as many CPU threads as suit it best and takes requests one by one; it ends before
    unfuse starts. Pictures are made unless --frames are asked for.

    What --layouts finds is kept in the data folder, and `serve` goes by it. With other threads, bytes may be others.
    """
    asked["prompt"] = prompt
    check_bounds(asked, medium_for(asked))
    terminal.open_log()
    told = {**flags, **terminal.flags, "serve.models": [model]}
    loaded = load(told, config)
    from unfuse.service.comparison import Pipeline, Pools, measure, measure_layouts, most_at_once, sized
    from unfuse.service.local import own_pools
    from unfuse.service.options import options
    from unfuse.service.resources import means
    from unfuse.service.service import plan

    planned = plan(options(loaded))
    card, counts = planned.models[0].card, [int(level) for level in levels.split(",")]
    asked = sized(card, asked, image)

    def most_with(workers: str) -> float:
        with (
            progress_on(terminal, lambda: f"measuring {workers}"),
            own_pools(load({**told, "serve.workers": workers}, config), terminal) as client,
        ):
            return most_at_once(Pools(client, image), card, asked, rounds, max(counts))

    if layouts:
        rates = measure_layouts(planned, means(loaded.settings), most_with)
        rows = [{"layout": workers, "requests a second": rate} for workers, rate in rates.items()]
        show.listing(rows, ["layout", "requests a second"], "nothing was measured", json)
        return
    with (
        progress_on(terminal, lambda: "measuring diffusers, undivided"),
        Pipeline(planned, image, terminal.relay) as pipeline,
    ):
        whole = measure(pipeline, card, asked, rounds, counts)
    with progress_on(terminal, lambda: "measuring unfuse"), own_pools(loaded, terminal) as client:
        split = measure(Pools(client, image), card, asked, rounds, counts)
    _report(whole, split, json)


def _report(whole: Figures, split: Figures, json: bool) -> None:
    same = sum(a == b for a, b in zip(whole.digests, split.digests, strict=True))
    figures = [("latency of one, s", whole.latency, split.latency)]
    figures += [(f"requests a second, {n} at once", whole.throughput[n], split.throughput[n]) for n in whole.throughput]
    memory = [("largest process", whole.largest, split.largest), ("all processes", whole.memory, split.memory)]
    memory += [("GPU memory", whole.gpu, split.gpu)] if whole.gpu else []
    rows = [{"measure": name, "diffusers": a, "unfuse": b, "ratio": b / a} for name, a, b in figures]
    rows += [{"measure": name, "diffusers": Size(a), "unfuse": Size(b), "ratio": b / a} for name, a, b in memory]
    if json:
        show.as_json({"figures": rows, "requests": len(whole.digests), "equal": same})
        return
    show.as_table(rows, ["measure", "diffusers", "unfuse", "ratio"], "nothing was measured")
    typer.echo(f"{same} of {len(whole.digests)} requests equal, byte for byte")
