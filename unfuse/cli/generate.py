"""`unfuse generate`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.cli import logs, show
from unfuse.cli.options import COMPUTE, ApiKey, Config, Json, takes
from unfuse.cli.own import own_pools
from unfuse.cli.serve import PLACING
from unfuse.cli.settings import DEFAULT, Loaded, load
from unfuse.core.errors import InvalidParameter

if TYPE_CHECKING:
    from rich.console import Console

    from unfuse.client import Client, Result

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".mp4": "mp4"}


@takes(*PLACING, *COMPUTE, "serve.loras")
def generate(
    flags: dict[str, Any],
    prompt: Annotated[str, typer.Argument(help="What the picture should show.", metavar="PROMPT")],
    model: Annotated[str | None, typer.Option("-m", "--model", help="Model to use: a name, folder or hub id.")] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="A .png, .jpg or .webp file (several are NAME-0.png, NAME-1.png, …), an .mp4 video, "
            "or NAME-%04d.png for each of its frames.",
        ),
    ] = Path("out.png"),
    size: Annotated[str | None, typer.Option(help="Width and height in pixels.", metavar="WxH")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first picture; drawn, and told, if left out.")] = None,
    guidance: Annotated[float | None, typer.Option(help="How strongly to follow the prompt.")] = None,
    negative: Annotated[str | None, typer.Option(help="What the picture should not show.")] = None,
    frames: Annotated[int | None, typer.Option(help="Length of a video, in frames.")] = None,
    fps: Annotated[int | None, typer.Option(help="Frames a second of a video.")] = None,
    image: Annotated[Path | None, typer.Option(help="Picture to start from.", metavar="FILE")] = None,
    lora: Annotated[str | None, typer.Option(help="Adapter to use, by its name in --loras.", metavar="NAME")] = None,
    lora_scale: Annotated[float | None, typer.Option(help="How strong the adapter is; 1 if left out.")] = None,
    number: Annotated[int, typer.Option("-n", help="How many pictures; each further one has the next seed.")] = 1,
    server: Annotated[
        str | None, typer.Option(help="Server to ask; without one, here or set, workers start for this request alone.")
    ] = None,
    api_key: ApiKey = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Make pictures of a prompt, or a video.

    What is left out is the model's own default. Ctrl-C cancels the request and ends the workers it started.
    """
    form, video = _kind(output)
    if not video and (frames not in (None, 1) or fps):
        raise InvalidParameter(f"-o {output}: frames need a name such as NAME.mp4 or NAME-%04d.png", "output")
    if image is not None and not image.is_file():
        raise InvalidParameter(f"--image {image}: there is no such file", "image")
    flags = {**flags, "server": server, "api_key": api_key, "serve.models": [model] if model else None}
    asked = {
        "model": model, "size": size, "num_inference_steps": steps, "seed": seed, "guidance_scale": guidance,
        "negative_prompt": negative, "n": number, "output_format": form, "num_frames": frames, "fps": fps,
        "image": image, "video": video, "lora": lora, "lora_scale": lora_scale,
    }  # fmt: skip
    from rich.console import Console

    logs.to_stderr(logs.WARNING)
    console = Console(stderr=True)
    with _client(load(flags, config), console) as client:
        result = _watch(client, console, prompt, {name: value for name, value in asked.items() if value is not None})
    _report(result, result.save(output), console, video, json)


def _kind(output: Path) -> tuple[str, bool]:
    """The format that a file's name asks for, and whether it is that of a video. Raises InvalidParameter."""
    from unfuse.client.result import NUMBERED

    form, numbered = FORMATS.get(output.suffix.lower()), NUMBERED.search(output.name) is not None
    if form is None or (numbered and form != "png"):
        raise InvalidParameter(f"-o {output}: the name must end in one of {', '.join(FORMATS)}", "output")
    if not output.parent.is_dir():
        raise InvalidParameter(f"-o {output}: there is no folder {output.parent}", "output")
    return form, form == "mp4" or numbered


def _client(loaded: Loaded, console: Console) -> AbstractContextManager[Client]:
    """The server that was named, or workers of our own for as long as they are needed."""
    settings = loaded.settings
    if loaded.origins["server"] != DEFAULT:
        from unfuse.client import connect

        return connect(settings.server, settings.api_key)
    console.print(f"starting workers for {', '.join(settings.serve.models)}", markup=False, highlight=False)
    return own_pools(loaded)


def _watch(client: Client, console: Console, prompt: str, asked: dict[str, Any]) -> Result:
    """Ask, show what happens, and return what came of it; an interrupt cancels the request."""
    from unfuse.cli.progress import StageBars

    request = client.submit(prompt, **asked)
    try:
        console.print(f"request {request.id}", markup=False, highlight=False)
        with StageBars(console) as bars:
            for event in request.events():
                bars.show(event)
        return request.result()
    except KeyboardInterrupt:
        request.cancel()
        raise


def _report(result: Result, files: list[Path], console: Console, video: bool, json: bool) -> None:
    """Say which files there are and where the time went."""
    if json:
        names = [str(file) for file in files]
        show.as_json({"id": result.id, "seed": result.seed, "files": names, "timings": result.timings})
        return
    for stage, seconds in result.timings.items():
        parts = "  ".join(f"{name.removesuffix('_s')} {value:7.3f} s" for name, value in seconds.items())
        console.print(f"{stage:16} {parts}", markup=False, highlight=False)
    for index, file in enumerate(files):
        typer.echo(f"{file} (seed {result.seed + index * (not video)})")
