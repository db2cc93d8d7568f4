"""`unfuse compare`: compare diffusers, undivided, with unfuse on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from unfuse.cli import show
from unfuse.cli.files import require_files
from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import COMPUTE, PLACING, Config, Json, parameter_options, setting_options
from unfuse.core.checking import check_bounds
from unfuse.core.errors import UsageError
from unfuse.core.modalities import modality_for
from unfuse.service.groups import Settings
from unfuse.service.loading import LoadingProgress
from unfuse.service.settings import ByteSize, LoadedSettings, load

if TYPE_CHECKING:
    from unfuse.service.comparison import ComparisonFigures, ComparisonProgress
    from unfuse.service.plan import ServingPlan

#: The most concurrent requests.
MOST_AT_ONCE = 10_000


@setting_options(*PLACING, *COMPUTE)
@parameter_options("size", "num_inference_steps", "num_frames")
def compare(
    flags: dict[str, Any],
    asked: dict[str, Any],
    terminal: Terminal,
    model: Annotated[str, typer.Argument(help="Model to compare: a name, folder or hub id.", metavar="MODEL")],
    levels: Annotated[
        str, typer.Option(help="Numbers of concurrent requests at which throughput is measured.")
    ] = "1,4,16",
    rounds: Annotated[int, typer.Option(help="Number of requests whose latency is measured.", min=1)] = 5,
    prompt: Annotated[str, typer.Option(help="Prompt of the requests.")] = "a red circle on white",
    image: Annotated[
        Path | None, typer.Option(help="Reference image, for a model that takes one. [default: none]")
    ] = None,
    batches: Annotated[
        str,
        typer.Option(
            help="Compare batches of these sizes, such as 2,4,8, with requests alone, in place of unfuse with "
            "diffusers. Names the first function that changes bytes. [default: none]",
            show_default=False,
        ),
    ] = "",
    config: Config = None,
    json: Json = False,
) -> None:
    """Compare unfuse with the undivided diffusers pipeline on this machine: speed, memory and results.

    The undivided pipeline runs with the number of CPU threads that is fastest for it, one request at a time, and ends
    before unfuse starts. Pictures are generated, with --frames a video. Every gain above 1 is in favour of unfuse.

    Example: unfuse compare unfuse/shapes --levels 1,4 --rounds 3
    """
    asked["prompt"] = prompt
    counts, batch_sizes = _parse_numbers("--levels", levels), _parse_numbers("--batches", batches) if batches else []
    check_bounds(asked, modality_for(asked))
    require_files([("--image", image)])
    terminal.open_log()

    from unfuse.service.comparison import with_duration
    from unfuse.service.options import plan_service, serve_options
    from unfuse.service.service import without_keys

    loaded = load({**flags, **terminal.flags, "serve.models": [model]}, config)
    plan = plan_service(serve_options(without_keys(loaded)))
    params = with_duration(plan.models[0].spec, asked, image)
    if batch_sizes:
        _print_batches(plan, params, image, batch_sizes, terminal, json)
        return
    comparison = _ComparisonOptions(plan, params, image, rounds, counts)
    undivided, split = _measure_both(comparison, loaded, terminal)
    _print_report(undivided, split, len(plan.workers), json)


@dataclass(frozen=True)
class _ComparisonOptions:
    """The requests of a comparison, and the plan of the workers."""

    #: The plan of unfuse. Its first model is compared.
    plan: ServingPlan

    #: The parameters of all requests.
    params: dict[str, Any]

    #: The reference image of all requests.
    image: Path | None

    #: The number of requests whose latency is measured.
    rounds: int

    #: The numbers of concurrent requests.
    counts: list[int]

    def progress(self, totals: Mapping[str, int], settings: Settings, terminal: Terminal) -> ComparisonProgress:
        """Return the progress of a comparison, and print the first estimate.

        `totals`: the number of requests of each side.
        """
        from unfuse.service.comparison import ComparisonProgress, predicted_s
        from unfuse.service.plan import host_resources

        return ComparisonProgress(
            totals, predicted_s(self.plan, self.params, host_resources(settings).costs), terminal.write_line
        )


def _measure_both(
    options: _ComparisonOptions, loaded: LoadedSettings, terminal: Terminal
) -> tuple[ComparisonFigures, ComparisonFigures]:
    """Measure diffusers, then unfuse, and return the figures of both."""
    from unfuse.service.comparison import ComparedPools, UndividedPipeline, measure, requests_of, threads_to_try
    from unfuse.service.service import private_pools

    requests = requests_of(options.rounds, options.counts)
    trials = 2 * len(threads_to_try(options.plan))
    progress = options.progress({"diffusers": requests + trials, "unfuse": requests}, loaded.settings, terminal)
    loading = LoadingProgress(loaded.settings.serve.models)
    terminal.on_record = loading.record
    # The undivided pipeline has exited before the workers start, so that neither takes memory or cores of the other.
    with progress_on(terminal, lambda: loading if loading.is_under_way else progress):
        with UndividedPipeline(options.plan, options.image, terminal.relay, progress.count_finished) as pipeline:
            progress.start_side("diffusers")
            undivided = measure(pipeline, options.params, options.rounds, options.counts)
        with private_pools(loaded, terminal, loading) as client:
            progress.start_side("unfuse")
            pools = ComparedPools(client, options.image, progress.count_finished)
            return undivided, measure(pools, options.params, options.rounds, options.counts)


def _parse_numbers(flag: str, text: str) -> list[int]:
    """Return the numbers in the value of a flag. Raises UsageError."""
    numbers = [number.strip() for number in text.split(",")]
    for number in numbers:
        if not (number.isdecimal() and 0 < int(number) <= MOST_AT_ONCE):
            raise UsageError(
                f"{flag} {text}: {number!r} is not a number from 1 to {MOST_AT_ONCE}; write it like 1,4,16"
            )
    return [int(number) for number in numbers]


def _print_batches(
    plan: ServingPlan, params: dict[str, Any], image: Path | None, sizes: list[int], terminal: Terminal, json: bool
) -> None:
    """Compare batches with requests alone, and print each result."""
    from unfuse.service.batch_comparison import compare_batches

    rows = [asdict(result) for result in compare_batches(plan, params, image, sizes, terminal.relay)]
    if json:
        show.as_json({"batches": rows})
        return
    readable = [row | {"size": row["size"] or "alone", "equal": "equal" if row["equal"] else "differs"} for row in rows]
    show.as_table(readable, ["stage", "size", "equal", "because_of"], "nothing was compared")


def _print_report(undivided: ComparisonFigures, split: ComparisonFigures, workers: int, json: bool) -> None:
    """Print the figures of both sides side by side, and the conclusion."""
    from unfuse.service.comparison import comparison_summary

    equal = sum(a == b for a, b in zip(undivided.digests, split.digests, strict=True))
    rows = [_row("latency of one request, s", undivided.latency, split.latency)]
    for count, rate in undivided.throughput.items():
        rows.append(_row(f"requests a second, {count} at once", rate, split.throughput[count], more_is_better=True))

    memory = [("largest process", undivided.largest, split.largest), ("all processes", undivided.memory, split.memory)]
    memory += [("GPU memory", undivided.gpu, split.gpu)] if undivided.gpu else []
    rows += [
        _row(name, ByteSize(undivided_bytes), ByteSize(split_bytes)) for name, undivided_bytes, split_bytes in memory
    ]

    conclusion = comparison_summary(undivided, split, workers)
    if json:
        show.as_json({"figures": rows, "requests": len(undivided.digests), "equal": equal, "verdict": conclusion})
        return
    show.as_table(rows, ["measure", "diffusers", "unfuse", "gain"], "nothing was measured")
    typer.echo(f"gain above 1: unfuse is better; {equal} of {len(undivided.digests)} requests are equal, byte for byte")
    typer.echo(conclusion)


def _row(name: str, undivided: float, split: float, *, more_is_better: bool = False) -> dict[str, Any]:
    """Return a row of the table.

    Its gain is above 1 if unfuse is better, and None if it cannot be computed.
    """
    better, worse = (split, undivided) if more_is_better else (undivided, split)
    return {"measure": name, "diffusers": undivided, "unfuse": split, "gain": better / worse if worse else None}
