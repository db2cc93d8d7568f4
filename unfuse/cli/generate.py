"""`unfuse generate`: generate pictures or a video from a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.cli import show
from unfuse.cli.connecting import client_of
from unfuse.cli.files import argument_of, kind_of, require_files, save
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import COMPUTE, PLACING, ApiKey, Config, Json, check_numbers, parameter_options, setting_options
from unfuse.core.checking import check_bounds
from unfuse.core.errors import InvalidParameter
from unfuse.core.modalities import IMAGE, VIDEO, modality_for
from unfuse.core.parameters import nth_seed
from unfuse.service.logs import escape_control
from unfuse.service.settings import LoadedSettings, load

if TYPE_CHECKING:
    from unfuse.client import Result
    from unfuse.service.plan import ServingPlan


StartPictures = Annotated[
    list[Path] | None,
    typer.Option("--image", help="Picture to start from; may be repeated. [default: none]", metavar="FILE"),
]
Mask = Annotated[
    Path | None,
    typer.Option(
        "--mask",
        help="Picture of the same size as --image, whose transparent parts are redrawn. [default: none]",
        metavar="FILE",
    ),
]
LastFrame = Annotated[
    Path | None,
    typer.Option(
        "--last-frame", help="Last frame of a video, whose first frame is --image. [default: none]", metavar="FILE"
    ),
]


@setting_options(*PLACING, *COMPUTE, "serve.loras")
@parameter_options()
def generate(
    flags: dict[str, Any],
    asked: dict[str, Any],
    terminal: Terminal,
    prompt: Annotated[
        str, typer.Argument(help="Prompt of the picture or video; - reads it from standard input.", metavar="PROMPT")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            help="Model to use: a name, folder or hub id. [default: that of the server, else unfuse/shapes]",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="A .png, .jpg or .webp file (several are NAME-0.png, NAME-1.png, …), an .mp4 video, "
            "or NAME-%04d.png for each of its frames. An existing file is kept: the new one is NAME-2.png.",
        ),
    ] = Path("out.png"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    image: StartPictures = None,
    mask: Mask = None,
    last_frame: LastFrame = None,
    server: Annotated[
        str | None,
        typer.Option(help="Server to use, also by UNFUSE_SERVER; by default, workers start for this request only."),
    ] = None,
    api_key: ApiKey = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Generate pictures or a video from a prompt.

    Parameters that are not set have the model's own defaults. Ctrl-C cancels the request, keeps the pictures that are
    finished, and stops the workers that the command started.

    Example: unfuse generate "a red circle on white" -o circle.png --seed 1
    """
    format, video = kind_of(output, overwrite)
    if not video and (modality_for(asked) is VIDEO or "fps" in asked):
        raise InvalidParameter(f"-o {output}: frames need a name such as NAME.mp4 or NAME-%04d.png", "output")
    require_files([*(("--image", file) for file in image or ()), ("--mask", mask), ("--last-frame", last_frame)])
    check_numbers(asked)
    asked |= {"prompt": argument_of(prompt, terminal), "model": model, "output_format": format}
    check_bounds(asked, VIDEO if video else IMAGE)
    asked |= {"image": image or None, "mask": mask, "last_frame": last_frame, "video": video}
    params = {name: value for name, value in asked.items() if value is not None}
    count = asked.get("n", 1)

    flags |= {**terminal.flags, "server": server, "api_key": api_key, "serve.models": [model] if model else None}
    result, is_complete = _run_request(load(flags, config), terminal, params)

    has_several = count > 1 and not video
    output = output.with_stem(f"{output.stem}-%d") if has_several else output
    files = save(result, output, overwrite)
    _print_report(result, files, terminal, video, json)
    if files and files[0] not in result.files_at(output):
        terminal.write_line(f"{output} exists, so the new file is {files[0]}; --overwrite replaces existing files")
    if not is_complete:
        terminal.write_line(f"interrupted: kept {len(files)}{f' of {count}' * has_several}, cancelled the rest")
        raise KeyboardInterrupt


def _run_request(loaded: LoadedSettings, terminal: Terminal, arguments: dict[str, Any]) -> tuple[Result, bool]:
    """Run a request, and return its result, and whether the result is complete.

    An interrupt cancels the request. The result then has the files that were finished.
    """

    def check(plan: ServingPlan) -> None:
        from unfuse.service.options import check_first_model

        check_first_model(plan, arguments, loaded.settings.serve.loras)

    with client_of(loaded, terminal, check) as (client, progress):
        request = client.submit(**arguments)
        try:
            terminal.write_line(f"request {request.id}")
            if hint := request.view.get("hint"):
                terminal.write_line(escape_control(str(hint)))
            for event in request.events():
                progress.show(event)
            return request.result(), True
        except KeyboardInterrupt:
            return request.stop(), False


def _print_report(result: Result, files: list[Path], terminal: Terminal, video: bool, json: bool) -> None:
    """Print the files with their seeds, and the seconds of each stage."""
    if json:
        names = [str(file) for file in files]
        flagged = {"flagged": result.flagged} if result.flagged else {}
        show.as_json({"id": result.id, "seed": result.seed, "files": names, "timings": result.timings} | flagged)
        return
    for stage, seconds in result.timings.items():
        if not any(seconds.values()):
            continue
        columns = "  ".join(f"{name.removesuffix('_s')} {value:7.3f} s" for name, value in seconds.items())
        terminal.write_line(f"{stage:16} {columns}")
    for index, file in zip(result.indexes, files, strict=True):
        typer.echo(f"{file} (seed {nth_seed(result.seed, index * (not video))})")
    for index in result.flagged:
        seed = nth_seed(result.seed, index)
        terminal.write_line(f"picture {index} (seed {seed}) is left out: the model's safety checker flagged it")
