"""Options that several verbs share. What a setting is for and its default are said once, in `settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from unfuse.cli.settings import FIELDS, Size
from unfuse.cli.show import cell

KEYWORD_ONLY = Parameter.KEYWORD_ONLY
FLAGS = {"arena.bytes": "--arena"}
"""Flags that are not called as the last part of their setting's name."""

COMPUTE = tuple(name for name in FIELDS if name.startswith("compute."))
"""How compute processes work, for every verb that starts some."""


def setting(name: str, **more: Any) -> Any:
    """The option of the setting with that dotted name; it is None unless the flag is given."""
    field = FIELDS[name]
    shown = Size(field.default) if field.in_bytes else field.default
    default = "" if shown in ((), "") or shown is True else f" [default: {cell(shown)}]"
    flag = FLAGS.get(name, f"--{name.rpartition('.')[2].replace('_', '-')}")
    if isinstance(field.default, bool):
        flag += f"/--no-{flag.removeprefix('--')}"
    return typer.Option(flag, help=field.description + default, show_default=False, **more)


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb an option for each of these settings; all of them arrive as its argument `flags`, for `load`."""

    keywords = {name.replace(".", "_"): name for name in names}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        parameters = [found.replace(kind=KEYWORD_ONLY) for found in signature.parameters.values()]
        parameters = [found for found in parameters if found.name != "flags"] + [
            Parameter(keyword, KEYWORD_ONLY, default=None, annotation=Annotated[_typed(name) | None, setting(name)])
            for keyword, name in keywords.items()
        ]

        @wraps(verb)
        def called(**given: Any) -> None:
            found = {name: given.pop(keyword) for keyword, name in keywords.items()}
            verb(flags={name: value for name, value in found.items() if value not in (None, [])}, **given)

        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def _typed(name: str) -> Any:
    """The type of a setting as the command line has it: lists for tuples, and text for what only `load` reads."""
    kind = get_args(FIELDS[name].type)[0]
    if get_origin(kind) is tuple:
        return list[str]
    return str if FIELDS[name].in_bytes else kind


Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Config = Annotated[Path | None, typer.Option("--config", help="Settings file, such as unfuse.toml.", metavar="FILE")]
Server = Annotated[str | None, setting("server", metavar="URL")]
ApiKey = Annotated[str | None, setting("api_key", metavar="KEY")]
