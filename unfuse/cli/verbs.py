"""Verbs and their options: for settings, for parameters, and those about standard error that all verbs take.

Each setting and parameter is described once: in `groups`, in the media.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

import unfuse
from unfuse.cli.show import cell
from unfuse.cli.terminal import Terminal
from unfuse.core.errors import InvalidParameter, UsageError
from unfuse.core.modalities import IMAGE, VIDEO
from unfuse.core.parameters import Parameter as RequestParameter
from unfuse.service.installed import require_server
from unfuse.service.settings import FIELDS, REMOVED, ByteSize, SettingField, load

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
    shown = ByteSize(field.default) if field.unit == "byte" else field.default
    usual = "" if shown in ((), "") or shown is True else f" [default: {cell(shown)}]"
    flag = field.flag
    if isinstance(field.default, bool):
        flag += f"/--no-{flag.removeprefix('--')}"
    OFFERED.add(name)
    more.setdefault("metavar", _metavar(field))
    return typer.Option(flag, help=field.description + usual, show_default=False, rich_help_panel=_panel(name), **more)


def _metavar(field: SettingField) -> str | None:
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


TYPES = {"integer": int, "number": float, "flag": bool, "scaled": list[str]}
"""Types that the command line parses; all others are text."""

LINES = {one.name: one for medium in (IMAGE, VIDEO) for one in medium.parameters if one.offered}


def asks(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb a flag for each of these parameters (without names: all); it gets them as its argument `asked`."""
    lines = [LINES[name] for name in names] or LINES.values()
    return gathering("asked", {one.name: _argument(one) for one in lines})


def check_numbers(asked: Mapping[str, object]) -> None:
    """Raise InvalidParameter for a number that JSON does not have, such as NaN."""
    for name, value in asked.items():
        if isinstance(value, float) and not math.isfinite(value):
            flag = _flag(LINES[name])
            raise InvalidParameter(f"{flag} {value} is no number to multiply by: give one such as 5 or 7.5", flag)


def words_of(line: RequestParameter) -> str:
    """What `--help` says of a parameter: its words, its bounds, its default."""
    parts = [f"{line.description[:1].upper()}{line.description[1:]}."]
    parts += [f"[{line.bounds}]"] if line.bounds else []
    parts += [f"[default: {line.default}]"] if line.default not in (None, "") else []
    return " ".join(parts)


def _flag(line: RequestParameter) -> str:
    return line.flag or "--" + line.name.replace("_", "-")


def _argument(line: RequestParameter) -> Parameter:
    flag, kind = _flag(line), TYPES.get(line.kind, str)
    names = f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag
    option = typer.Option(names, help=words_of(line), metavar=line.metavar or None, rich_help_panel=MADE)
    return Parameter(line.name, KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


ARGUMENTS, OPTIONS = "Arguments", "Options"

SYNONYMS = {"list": "ls", "get": "show", "describe": "show", "delete": "rm", "remove": "rm", "create": "add"}
"""Words that other commands have for what is another verb here."""


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unfuse {unfuse.__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", is_eager=True, callback=_tell_version, help="Say which version this is, and end.")
QUIET = typer.Option("-q", "--quiet", help="Write only errors to standard error.", rich_help_panel=LOGGING)
SHARED = (
    Parameter("context", KEYWORD_ONLY, annotation=typer.Context),
    parameter_of("log.level"),
    parameter_of("log.format"),
    Parameter("quiet", KEYWORD_ONLY, default=False, annotation=Annotated[bool, QUIET]),
    Parameter("version", KEYWORD_ONLY, default=False, annotation=Annotated[bool, VERSION]),
)


class PanelCommand(TyperCommand):
    """A verb whose options stand under headings in its help, in the order of PANELS."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises UsageError for a removed flag, with what replaces it."""
        for flag in (written.partition("=")[0] for written in takewhile(lambda written: written != "--", args)):
            if flag in REMOVED:
                raise UsageError(f"{flag} is not a flag any more; {REMOVED[flag]}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: [], **{name: [] for name in PANELS}}
        for found in self.get_params(ctx):
            usual = ARGUMENTS if found.param_type_name == "argument" else OPTIONS
            if record := found.get_help_record(ctx):
                sections[getattr(found, "rich_help_panel", None) or usual].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class CommandGroup(TyperGroup):
    """Verbs whose help lists the whole sentence of each, and that know other words for some."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that is called. Raises UsageError for another word, with the verb."""
        meant = SYNONYMS.get(args[0]) if args and args[0] not in self.commands else None
        if meant in self.commands:
            raise UsageError(f"`{ctx.command_path} {args[0]}` is no verb: did you mean `{ctx.command_path} {meant}`?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, verb.get_short_help_str(sys.maxsize)) for name, verb in verbs if verb and not verb.hidden]
            )


class CommandRegistry(typer.Typer):
    """Verbs, each of which has the options on standard error; one that asks for a `terminal` is given it."""

    def __init__(self, help: str, **more: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"]}
        super().__init__(
            help=help, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
            context_settings=settings, cls=CommandGroup, **more,
        )  # fmt: skip
        self.callback()(_with_signature(_keep, SHARED))

    def usual(self, function: Callable[..., None]) -> Callable[..., None]:
        """Make a function the verb that runs where none is named."""
        self.info.no_args_is_help = False
        self.callback(invoke_without_command=True)(_with_usual(function, "warning"))
        return function

    def verb(
        self, usual: str = "warning", *, server: bool = False
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Make a function a verb that logs from level `usual` on; a `server` one needs what a server has installed."""

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            self.command(cls=PanelCommand)(_with_terminal(function, usual, server))
            return function

        return decorate


def _with_usual(function: Callable[..., None], usual: str) -> Callable[..., None]:
    """Return the callback of a group that runs this verb where none is named.

    Options before another verb, which would have no effect, raise UsageError.
    """
    run, shared = _with_terminal(function, usual, server=False), {one.name for one in SHARED}

    def called(**given: Any) -> None:
        context: typer.Context = given["context"]
        if context.invoked_subcommand is None:
            run(**given)
            return
        _keep(**{name: given.pop(name) for name in shared})
        if said := [name for name, value in given.items() if value]:
            verb, flag = f"{context.command_path} {context.invoked_subcommand}", f"--{said[0].replace('_', '-')}"
            raise UsageError(f"{flag} has no effect there: write {verb} {flag}")

    return _with_signature(called, [*inspect.signature(run).parameters.values()])


def _keep(context: typer.Context, log_level: str | None, log_format: str | None, quiet: bool, version: bool) -> None:
    """Keep the options about standard error for the verb, whether they come before or after its name."""
    said = {"log.level": log_level, "log.format": log_format, "quiet": quiet or None}
    context.obj = {**(context.obj or {}), **{name: value for name, value in said.items() if value is not None}}


def _with_terminal(function: Callable[..., None], usual: str, server: bool) -> Callable[..., None]:
    signature = inspect.signature(function, eval_str=True)

    @wraps(function)
    def called(**given: Any) -> None:
        context: typer.Context = given["context"]
        if server:
            require_server(f"`{context.command_path}`")
        _keep(**{shared.name: given.pop(shared.name) for shared in SHARED})
        if "terminal" in signature.parameters:
            flags = {name: value for name, value in context.obj.items() if name in FIELDS}
            log = load(flags, given.get("config")).settings.log
            given["terminal"] = Terminal(log, usual, quiet="quiet" in context.obj, flags=flags)
        function(**given)

    own = (found.replace(kind=KEYWORD_ONLY) for name, found in signature.parameters.items() if name != "terminal")
    return _with_signature(called, (*own, *SHARED))


def _with_signature(function: Callable[..., None], parameters: Sequence[Parameter]) -> Callable[..., None]:
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function
