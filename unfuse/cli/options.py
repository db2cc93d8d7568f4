"""Options that several verbs share. Each setting's description, flag and default are written once, in `groups`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from unfuse.cli.show import cell
from unfuse.service.settings import FIELDS, Field, Size

KEYWORD_ONLY = Parameter.KEYWORD_ONLY
MADE, LOGGING, CLIENTS, KEPT, WORKERS, MACHINES, COMPUTING, QUEUEING, EXPERT = (
    "What to make", "Standard error", "Clients", "What is kept, and where", "Workers", "Between machines", "Computing",
    "Who waits, and for what", "Expert",
)  # fmt: skip

PANELS: dict[str, tuple[str, ...]] = {
    MADE: (),
    CLIENTS: (
        "serve.host", "serve.port", "serve.api_key", "serve.open_metrics", "serve.served_model_name", "serve.revision",
        "serve.loras", "serve.strict_params", "serve.on_disconnect", "serve.allowed_", "serve.trusted_",
        "serve.public_url",
    ),
    KEPT: (
        "serve.queue", "serve.queue_wait", "serve.results", "serve.store", "serve.durable", "serve.durable_stages",
        "serve.checkpoint",
        "serve.encoder_cache", "serve.reuse_results", "data_dir",
    ),
    WORKERS: (
        "serve.workers", "serve.place", "serve.slots", "serve.launcher", "serve.asleep", "arena.bytes", "kv.bytes",
        "lease.", "worker.",
    ),
    MACHINES: (
        "serve.listen", "insecure_listen", "keys", "transfer.", "serve.encode", "worker.listen", "worker.scheduler",
        "worker.node",
    ),
    COMPUTING: ("compute.", "serve.feature_cache"),
    QUEUEING: (
        "serve.max_", "serve.order", "serve.drain_timeout", "serve.image_timeout",
        "serve.video_timeout", "serve.wake_limit",
    ),
    LOGGING: ("log.",),
    EXPERT: ("serve.dispatch", "compute.loop", "compute.collective_s"),
}  # fmt: skip
"""The heading of a setting in `--help`, by the beginning of its name; the longest match counts."""

OFFERED: set[str] = set()  # settings that some verb has a flag for
COMPUTE = tuple(name for name in FIELDS if name.startswith("compute."))  # how compute processes work

PLACING = (
    "serve.workers", "serve.place", "serve.device_memory", "worker.max_loaded_models", "arena.bytes", "kv.bytes",
)  # fmt: skip
"""Which workers run where, beside how they compute."""


def option_of(name: str, **more: Any) -> Any:
    """The option of the setting with that dotted name; it is None unless the flag is given."""
    field = FIELDS[name]
    shown = Size(field.default) if field.unit == "byte" else field.default
    usual = "" if shown in ((), "") or shown is True else f" [default: {cell(shown)}]"
    flag = field.flag
    if isinstance(field.default, bool):
        flag += f"/--no-{flag.removeprefix('--')}"
    OFFERED.add(name)
    more.setdefault("metavar", _metavar(field))
    return typer.Option(flag, help=field.description + usual, show_default=False, rich_help_panel=_panel(name), **more)


def _metavar(field: Field) -> str | None:
    """What stands for a value in `--help`; None is for the choices, or nothing, as the type has it."""
    kind = get_args(field.type)[0]
    if get_origin(kind) is tuple:
        return "TEXT (repeatable)"
    if field.unit == "second":
        return "TIME"
    return "SIZE" if field.unit == "byte" else {str: "TEXT", int: "N", float: "NUMBER"}.get(kind)


def parameter_of(name: str) -> Parameter:
    """The option of a setting as a verb's signature has it."""
    keyword, kind = name.replace(".", "_"), _typed(name) | None
    return Parameter(keyword, KEYWORD_ONLY, default=None, annotation=Annotated[kind, option_of(name)])


def _panel(name: str) -> str | None:
    fits = {start: panel for panel, starts in PANELS.items() for start in starts if name.startswith(start)}
    return fits[max(fits, key=len)] if fits else None


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb an option for each of these settings; it gets them as its argument `flags`, for `load`."""
    return gathering("flags", {name: parameter_of(name) for name in names})


def gathering(into: str, options: Mapping[str, Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb these options; those that are given arrive, by these names, as its argument `into`."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        parameters = [found.replace(kind=KEYWORD_ONLY) for found in signature.parameters.values()]
        parameters = [found for found in parameters if found.name != into] + [*options.values()]

        @wraps(verb)
        def called(**given: Any) -> None:
            found = {name: given.pop(option.name) for name, option in options.items()}
            given[into] = {name: value for name, value in found.items() if value not in (None, [])}
            verb(**given)

        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def _typed(name: str) -> Any:
    """The type of a setting as the command line has it: lists for tuples, and text for what only `load` reads."""
    kind = get_args(FIELDS[name].type)[0]
    if get_origin(kind) is tuple:
        return list[str]
    return str if FIELDS[name].unit else kind


Json = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.", rich_help_panel=LOGGING)
]
Config = Annotated[Path | None, typer.Option("--config", help="Settings file, such as unfuse.toml.", metavar="FILE")]
Server = Annotated[str | None, option_of("server", metavar="URL")]
ApiKey = Annotated[str | None, option_of("api_key", metavar="KEY")]
