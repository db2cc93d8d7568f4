"""`unfuse chat`."""

from __future__ import annotations

import mimetypes
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.cli.connecting import client_of
from unfuse.cli.files import json_of
from unfuse.cli.options import COMPUTE, PLACING, ApiKey, Config, takes
from unfuse.cli.terminal import Progress, Terminal
from unfuse.core.errors import InvalidParameter, PermanentError
from unfuse.service.settings import load

if TYPE_CHECKING:
    from unfuse.client.chat import Chat


@takes(*PLACING, *COMPUTE)
def chat(
    flags: dict[str, Any],
    terminal: Terminal,
    prompt: Annotated[
        str | None, typer.Argument(help="What to say; without it, lines are read.", metavar="TEXT")
    ] = None,
    model: Annotated[str | None, typer.Option("-m", "--model", help="Model to use: a name, folder or hub id.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all else.", metavar="TEXT")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="How freely to draw; 0: the likeliest.", min=0)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the answers; -1: a random one.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="Picture to show with the first line; may be repeated.", metavar="FILE")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="JSON schema that answers are to have.", metavar="FILE")] = None,
    server: Annotated[
        str | None, typer.Option(help="Server to ask; without one, here or set, workers start for this chat alone.")
    ] = None,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Talk with a language model. Answers are shown as they come; the end of input ends the conversation."""
    flags |= {**terminal.flags, "server": server, "api_key": api_key, "serve.models": [model] if model else None}
    given = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if schema:
        asked["response_format"] = {"type": "json_schema", "json_schema": {"schema": json_of(schema)}}
    said: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    pictures = [_image_part(file) for file in image or ()]
    goes_on = prompt is None and sys.stdin.isatty()
    with client_of(load(flags, config), terminal) as (client, progress):
        for line in [prompt] if prompt is not None else _lines():
            content = [*pictures, {"type": "text", "text": line}] if pictures else line
            asks = {"role": "user", "content": content}
            try:
                answer = _answered(client.chat([*said, asks], **asked), progress, whole=schema is not None)
            except (InvalidParameter, PermanentError) as error:
                if not goes_on:
                    raise
                terminal.write(f"{error}\n")
                continue
            said += [asks, answer]
            pictures = []


def _image_part(file: Path) -> dict[str, Any]:
    """Return the content part with a picture as a data URL. Raises OSError if the file cannot be read."""
    kind = mimetypes.guess_type(file.name)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{b64encode(file.read_bytes()).decode()}"}}


def _answered(answer: Chat, progress: Progress, *, whole: bool) -> dict[str, Any]:
    """Print an answer as it streams, and return its message.

    Raises PermanentError if the answer must be `whole` and ran out of tokens.
    """
    for part in answer:
        if part and answer.text == part:
            progress.close()
        typer.echo(part, nl=False)
    typer.echo()
    if whole and answer.finish_reason == "length":
        raise PermanentError("the answer ran out of tokens before it matched --schema: raise --max-tokens")
    return answer.message


def _lines() -> Iterator[str]:
    """Yield the user's lines, without empty ones. Raises InvalidParameter for bytes that are not UTF-8."""
    asks = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(asks).strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            message = f"standard input is not UTF-8 ({error.reason} at byte {error.start}): convert it, as by iconv"
            raise InvalidParameter(message) from error
        if line:
            yield line
