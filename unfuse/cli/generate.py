"""`unfuse generate`."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.cli import show
from unfuse.cli.files import kind_of
from unfuse.cli.options import COMPUTE, PLACING, ApiKey, Config, Json, takes
from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import Terminal
from unfuse.core.errors import InvalidParameter
from unfuse.service.loading import Loading
from unfuse.service.settings import DEFAULT, Loaded, load

if TYPE_CHECKING:
    from unfuse.client import Client, Result


@takes(*PLACING, *COMPUTE, "serve.loras")
def generate(
    flags: dict[str, Any],
    terminal: Terminal,
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

    What is left out is the model's own default. Ctrl-C cancels the request, keeps the pictures that are finished, and
    ends the workers it started.
    """
    form, video = kind_of(output)
    if not video and (frames not in (None, 1) or fps):
        raise InvalidParameter(f"-o {output}: frames need a name such as NAME.mp4 or NAME-%04d.png", "output")
    if image is not None and not image.is_file():
        raise InvalidParameter(f"--image {image}: there is no such file", "image")
    _finite("--guidance", guidance)
    _finite("--lora-scale", lora_scale)
    asked = {
        "prompt": prompt, "model": model, "size": size, "num_inference_steps": steps, "seed": seed,
        "guidance_scale": guidance, "negative_prompt": negative, "n": number, "output_format": form,
        "num_frames": frames, "fps": fps, "image": image, "video": video, "lora": lora, "lora_scale": lora_scale,
    }  # fmt: skip
    flags |= {**terminal.flags, "server": server, "api_key": api_key, "serve.models": [model] if model else None}
    result, whole = _made(load(flags, config), terminal, {key: one for key, one in asked.items() if one is not None})
    several = number > 1 and not video
    files = result.save(output.with_stem(f"{output.stem}-%d") if several else output) if result.data else []
    _report(result, files, terminal, video, json)
    if not whole:
        terminal.say(f"interrupted: kept {len(files)}{f' of {number}' * several}, cancelled the rest")
        raise KeyboardInterrupt


def _finite(flag: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise InvalidParameter(f"{flag} {value} is no number to multiply by: give one such as 5 or 7.5", flag)


def _made(loaded: Loaded, terminal: Terminal, asked: dict[str, Any]) -> tuple[Result, bool]:
    """What came of asking for this, and whether that is all of it: an interrupt leaves what was finished."""
    loading = Loading(loaded.settings.serve.models)
    terminal.heard = loading.hear
    terminal.open_log()
    server = "" if loaded.origins["server"] == DEFAULT else loaded.settings.server
    status = f"waiting for {server}" if server else loading
    with progress_on(terminal, lambda: status) as progress, _client(loaded, terminal, loading, server) as client:
        request = client.submit(**asked)
        try:
            terminal.say(f"request {request.id}")
            for event in request.events():
                progress.show(event)
            return request.result(), True
        except KeyboardInterrupt:
            return request.stop(), False


def _client(loaded: Loaded, terminal: Terminal, loading: Loading, server: str) -> AbstractContextManager[Client]:
    """The server that was named, or workers of our own for as long as they are needed."""
    if server:
        from unfuse.client import connect

        return connect(server, loaded.settings.api_key)
    from unfuse.service.local import own_pools

    return own_pools(loaded, terminal, loading)


def _report(result: Result, files: list[Path], terminal: Terminal, video: bool, json: bool) -> None:
    """Say which files there are and where the time went."""
    if json:
        names = [str(file) for file in files]
        show.as_json({"id": result.id, "seed": result.seed, "files": names, "timings": result.timings})
        return
    for stage, seconds in result.timings.items():
        if not any(seconds.values()):
            continue
        parts = "  ".join(f"{name.removesuffix('_s')} {value:7.3f} s" for name, value in seconds.items())
        terminal.say(f"{stage:16} {parts}")
    for index, file in zip(result.indexes, files, strict=True):
        typer.echo(f"{file} (seed {result.seed + index * (not video)})")
