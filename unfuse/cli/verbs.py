"""The options about standard error that all verbs take, before or after their name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter
from itertools import takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import unfuse
from unfuse.cli.options import KEYWORD_ONLY, LOGGING, PANELS, parameter_of
from unfuse.cli.terminal import Terminal
from unfuse.core.errors import UsageError
from unfuse.service.installed import require_server
from unfuse.service.settings import FIELDS, REMOVED, load

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


class Headed(TyperCommand):
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


class Listed(TyperGroup):
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


class Verbs(typer.Typer):
    """Verbs, each of which has the options on standard error; one that asks for a `terminal` is given it."""

    def __init__(self, help: str, **more: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"]}
        super().__init__(
            help=help, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
            context_settings=settings, cls=Listed, **more,
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
            self.command(cls=Headed)(_with_terminal(function, usual, server))
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
