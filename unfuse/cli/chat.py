"""`unfuse chat`: a conversation with a language model."""

from __future__ import annotations

import mimetypes
import time
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.cli.connecting import client_of
from unfuse.cli.exit_codes import exit_code
from unfuse.cli.files import argument_of, is_terminal, json_of, lines_of_stdin, require_files
from unfuse.cli.terminal import ProgressDisplay, Terminal
from unfuse.cli.verbs import COMPUTE, PLACING, ApiKey, Config, setting_options
from unfuse.core.errors import InvalidParameter, Overloaded, PermanentError, UnfuseError, UnknownModel
from unfuse.service.loading import LoadingProgress
from unfuse.service.settings import load

if TYPE_CHECKING:
    from unfuse.client import Client
    from unfuse.client.client import Chat

#: Seconds between two checks whether the workers are ready.
CHECK_INTERVAL_S = 0.2

#: The most bytes of a picture. In base64 it is a third longer, and servers accept 32 MiB.
MAX_IMAGE = 24 << 20


Model = Annotated[
    str | None,
    typer.Option("-m", "--model", help="Model to use: a name, folder or hub id. [default: that of the server]"),
]
System = Annotated[str | None, typer.Option("--system", help="System prompt. [default: none]", metavar="TEXT")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", help="Maximum number of tokens of an answer. [default: up to the context length]", min=1
    ),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Sampling temperature; 0 is greedy. [default: the model's]", min=0)
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Seed of the answers; -1 selects a random one. [default: random]")
]
Pictures = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", help="Picture to send with the first message; may be repeated. [default: none]", metavar="FILE"
    ),
]


@setting_options(*PLACING, *COMPUTE)
def chat(
    flags: dict[str, Any],
    terminal: Terminal,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Message; - reads it from standard input. Without it, each line of standard input is a message.",
            metavar="TEXT",
        ),
    ] = None,
    model: Model = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    image: Pictures = None,
    schema: Annotated[
        Path | None, typer.Option(help="JSON schema that answers must match. [default: none]", metavar="FILE")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Server to use, also by UNFUSE_SERVER; by default, workers start for this chat only."),
    ] = None,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Chat with a language model.

    Answers are shown while they are generated. The end of input ends the conversation.

    A line that is refused, or is not UTF-8, is left out of the conversation, which continues. If lines come from a file
    or a pipe, the exit code is then that of the first refusal.

    Example: unfuse chat -m smollm2 "What is the capital of France?"
    """
    require_files([("--image", file) for file in image or ()])
    flags |= {**terminal.flags, "server": server, "api_key": api_key, "serve.models": [model] if model else None}
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    params: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if schema:
        params["response_format"] = {"type": "json_schema", "json_schema": {"schema": json_of(schema)}}

    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    image_parts = [_image_part(file) for file in image or ()]
    lines = lines_of_stdin() if prompt is None else iter([argument_of(prompt, terminal)])
    first_refusal: UnfuseError | None = None
    with client_of(load(flags, config), terminal) as (client, progress):
        if prompt is None and is_terminal():
            _wait_until_loaded(client, progress)
        for line in lines:
            try:
                if isinstance(line, InvalidParameter):
                    raise line
                content = [*image_parts, {"type": "text", "text": line}] if image_parts else line
                message = {"role": "user", "content": content}
                answer = _print_answer(client.chat([*messages, message], **params), progress, strict=schema is not None)
            except (InvalidParameter, PermanentError, Overloaded) as error:
                is_final = isinstance(error, UnknownModel) or (isinstance(error, Overloaded) and not is_terminal())
                if prompt is not None or is_final:
                    raise
                progress.close()
                terminal.write(f"{error}\n")
                first_refusal = first_refusal or error
                continue
            messages += [message, answer]
            image_parts = []  # only the first message has them

    if first_refusal and not is_terminal():
        raise typer.Exit(exit_code(first_refusal))


def _wait_until_loaded(client: Client, progress: ProgressDisplay) -> None:
    """Show progress until private workers have loaded, and then close it.

    Otherwise the display would draw over the line that a user types. Raises TransientError if the workers cannot start.
    """
    while isinstance(progress.status(), LoadingProgress) and str(progress.status()):
        client.get("/health")  # raises if the workers could not start
        time.sleep(CHECK_INTERVAL_S)
    progress.close()


def _image_part(file: Path) -> dict[str, Any]:
    """Return the content part of a message with this picture as a data URL.

    Raises InvalidParameter for a file of more than MAX_IMAGE bytes, OSError if the file cannot be read.
    """
    if file.stat().st_size > MAX_IMAGE:
        raise InvalidParameter(f"--image {file} is larger than {MAX_IMAGE >> 20} MiB: give a smaller file", "image")
    kind = mimetypes.guess_type(file.name)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{b64encode(file.read_bytes()).decode()}"}}


def _print_answer(answer: Chat, progress: ProgressDisplay, *, strict: bool) -> dict[str, Any]:
    """Print an answer as it streams, and return its message.

    `strict`: whether the answer must match a schema, so that it is useless if it is cut.

    Raises PermanentError if a strict answer ran out of tokens.
    """
    for delta in answer:
        if delta and answer.text == delta:  # the first text, before which progress is shown
            progress.close()
        typer.echo(delta, nl=False)
    typer.echo()
    if strict and answer.finish_reason == "length":
        raise PermanentError("the answer ran out of tokens before it matched --schema: raise --max-tokens")
    return answer.message
