"""Define verbs and their options: settings, request parameters, and shared ones for logging.

Options are derived from the descriptions of settings in `service.groups` and of parameters in the modalities.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import defaultdict
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

#: The headings of options in `--help`.
GENERATION_PANEL = "Generation"
LOGGING = "Output and logging"
CLIENTS = "Clients"
STORAGE_PANEL = "Storage"
WORKERS = "Workers"
MACHINES = "Multiple machines"
COMPUTING = "Computing"
QUEUEING = "Queueing and limits"
EXPERT = "Expert"

#: The prefixes of the names of settings under each heading. The longest prefix that matches selects the heading.
PANELS: dict[str, tuple[str, ...]] = {
    GENERATION_PANEL: (),
    CLIENTS: (
        "serve.host",
        "serve.port",
        "serve.api_key",
        "serve.open_metrics",
        "serve.served_model_name",
        "serve.revision",
        "serve.loras",
        "serve.strict_params",
        "serve.on_disconnect",
        "serve.allowed_",
        "serve.trusted_",
        "serve.public_url",
    ),
    STORAGE_PANEL: (
        "serve.queue",
        "serve.queue_wait",
        "serve.results",
        "serve.store",
        "serve.durable",
        "serve.durable_stages",
        "serve.checkpoint",
        "serve.encoder_cache",
        "serve.reuse_results",
        "data_dir",
    ),
    WORKERS: (
        "serve.workers",
        "serve.place",
        "serve.slots",
        "serve.launcher",
        "serve.scale_to_zero",
        "arena.bytes",
        "kv.bytes",
        "lease.",
        "worker.",
    ),
    MACHINES: (
        "serve.listen",
        "insecure_listen",
        "keys",
        "transfer.",
        "serve.encode",
        "worker.listen",
        "worker.scheduler",
        "worker.node",
    ),
    COMPUTING: ("compute.", "serve.feature_cache"),
    QUEUEING: (
        "serve.max_",
        "serve.order",
        "serve.drain_timeout",
        "serve.image_timeout",
        "serve.video_timeout",
        "serve.cold_start_timeout",
    ),
    LOGGING: ("log.",),
    EXPERT: tuple(name for name, field in FIELDS.items() if field.level == "expert"),
}

#: The settings that some verb has a flag for. Filled while verbs are defined.
OFFERED: set[str] = set()

#: The settings of compute processes.
COMPUTE = tuple(name for name in FIELDS if name.startswith("compute."))

#: The settings of the layout: which workers run on which devices, with how much memory.
PLACING = (
    "serve.workers",
    "serve.place",
    "serve.device_memory",
    "worker.max_loaded_models",
    "arena.bytes",
    "kv.bytes",
)


def option_of(name: str, **typer_options: Any) -> Any:
    """Return the option for a setting. Its value is None unless the flag is used.

    `name`: the dotted name of the setting.
    `typer_options`: further arguments of `typer.Option`.
    """
    field = FIELDS[name]
    suffix = _default_suffix(field)
    flag = field.flag
    if isinstance(field.default, bool):
        flag += f"/--no-{flag.removeprefix('--')}"
    OFFERED.add(name)
    typer_options.setdefault("metavar", _metavar(field))
    return typer.Option(
        flag, help=field.description + suffix, show_default=False, rich_help_panel=_panel(name), **typer_options
    )


def _default_suffix(field: SettingField) -> str:
    """Return the default as the end of a help text.

    It is "" if the description already names the default.
    """
    if field.default in ((), ""):
        return "" if "default" in field.description else " [default: none]"
    return f" [default: {cell(ByteSize(field.default) if field.unit == 'byte' else field.default)}]"


def _metavar(field: SettingField) -> str | None:
    """Return the placeholder of a value in `--help`.

    With None, typer derives it from the type: it shows the choices of a Literal.
    """
    value_type = get_args(field.type)[0]
    if get_origin(value_type) is tuple:
        return "TEXT (repeatable)"
    if field.unit == "second":
        return "TIME"
    return "SIZE" if field.unit == "byte" else {str: "TEXT", int: "N", float: "NUMBER"}.get(value_type)


def parameter_of(name: str) -> Parameter:
    """Return the option for a setting as a parameter of a verb's signature."""
    keyword, value_type = name.replace(".", "_"), _cli_type(name) | None
    return Parameter(keyword, KEYWORD_ONLY, default=None, annotation=Annotated[value_type, option_of(name)])


def _panel(name: str) -> str | None:
    """Return the heading of a setting in `--help`, or None."""
    matches = {prefix: panel for panel, prefixes in PANELS.items() for prefix in prefixes if name.startswith(prefix)}
    return matches[max(matches, key=len)] if matches else None


def setting_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds an option for each of these settings to a verb.

    The verb gets the values of the used options by dotted name, as its argument `flags`.
    """
    return with_options("flags", {name: parameter_of(name) for name in names})


def with_options(
    argument_name: str, options: Mapping[str, Parameter]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds options to a verb.

    The verb gets the values of the used options by name, as its argument `argument_name`.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        parameters = [parameter.replace(kind=KEYWORD_ONLY) for parameter in signature.parameters.values()]
        parameters = [parameter for parameter in parameters if parameter.name != argument_name] + [*options.values()]

        @wraps(verb)
        def wrapper(**arguments: Any) -> None:
            values = {name: arguments.pop(option.name) for name, option in options.items()}
            arguments[argument_name] = {name: value for name, value in values.items() if value not in (None, [])}
            verb(**arguments)

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _cli_type(name: str) -> Any:
    """Return the type of a setting's option: lists for tuples, text for units."""
    value_type = get_args(FIELDS[name].type)[0]
    if get_origin(value_type) is tuple:
        return list[str]
    return str if FIELDS[name].unit else value_type


Json = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.", rich_help_panel=LOGGING)
]
Config = Annotated[
    Path | None, typer.Option("--config", help="Settings file, such as unfuse.toml. [default: none]", metavar="FILE")
]
Server = Annotated[str | None, option_of("server", metavar="URL")]
ApiKey = Annotated[str | None, option_of("api_key", metavar="KEY")]


#: The types of parameters that the command line parses, by kind. All other kinds are text.
TYPES = {"integer": int, "number": float, "flag": bool, "scaled": list[str]}

#: What applies if a parameter without a default is not set, by kind.
DEFAULTS = defaultdict(lambda: "the model's", scaled="none", form="none")

#: The parameters of picture and video requests that have a flag, by name.
LINES = {parameter.name: parameter for medium in (IMAGE, VIDEO) for parameter in medium.parameters if parameter.offered}


def parameter_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds options for request parameters to a verb.

    `names`: the names of the parameters; without any, all are added.

    The verb gets the values of the used options by name, as its argument `asked`.
    """
    parameters = [LINES[name] for name in names] or LINES.values()
    return with_options("asked", {parameter.name: _option_parameter(parameter) for parameter in parameters})


def check_numbers(arguments: Mapping[str, object]) -> None:
    """Raise InvalidParameter for a number that JSON does not have, such as NaN."""
    for name, value in arguments.items():
        if isinstance(value, float) and not math.isfinite(value):
            flag = _flag(LINES[name])
            raise InvalidParameter(f"{flag} {value} is not a finite number: set one such as 5 or 7.5", flag)


def parameter_help(parameter: RequestParameter) -> str:
    """Return the help text of a parameter: its description, bounds and default."""
    parts = [f"{parameter.description[:1].upper()}{parameter.description[1:]}."]
    parts += [f"[{parameter.bounds}]"] if parameter.bounds else []
    if "default" not in parameter.description:
        has_default = parameter.default not in (None, "")
        parts.append(f"[default: {parameter.default if has_default else DEFAULTS[parameter.kind]}]")
    return " ".join(parts)


def _flag(parameter: RequestParameter) -> str:
    """Return the flag of a request parameter."""
    return parameter.flag or "--" + parameter.name.replace("_", "-")


def _option_parameter(parameter: RequestParameter) -> Parameter:
    """Return the option for a request parameter as a parameter of a verb's signature."""
    flag = _flag(parameter)
    value_type = TYPES.get(parameter.kind, str)
    flags = f"{flag}/--no-{flag.removeprefix('--')}" if value_type is bool else flag
    option = typer.Option(
        flags, help=parameter_help(parameter), metavar=parameter.metavar or None, rich_help_panel=GENERATION_PANEL
    )
    return Parameter(parameter.name, KEYWORD_ONLY, default=None, annotation=Annotated[value_type | None, option])


#: The headings of arguments, and of options that are under no heading of PANELS.
ARGUMENTS = "Arguments"
OPTIONS = "Options"

#: The verb by the name that other command lines have for it.
SYNONYMS = {"list": "ls", "get": "show", "describe": "show", "delete": "rm", "remove": "rm", "create": "add"}


def _print_version(is_used: bool) -> None:
    """Print the version and exit, if the flag `--version` is used."""
    if is_used:
        typer.echo(f"unfuse {unfuse.__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
QUIET = typer.Option("-q", "--quiet", help="Write only errors to standard error.", rich_help_panel=LOGGING)


def is_expert(option: Any) -> bool:
    """Return whether an option is in the help only with `--help-all`."""
    return getattr(option, "rich_help_panel", None) == EXPERT


#: The key of a context whose help lists expert settings.
SHOWS_EXPERT_SETTINGS = "unfuse.expert"


def _print_full_help(context: typer.Context, is_used: bool) -> None:
    """Print the help with expert settings and exit, if the flag `--help-all` is used."""
    if is_used:
        context.meta[SHOWS_EXPERT_SETTINGS] = True
        typer.echo(context.get_help())
        raise typer.Exit


FULL_HELP = typer.Option(
    "--help-all",
    is_eager=True,
    callback=_print_full_help,
    help="Show this message with expert settings and exit.",
)

#: The option that all verbs have besides SHARED. Its callback prints, so a verb does not get its value.
FULL_HELP_PARAMETER = Parameter("help_all", KEYWORD_ONLY, default=False, annotation=Annotated[bool, FULL_HELP])


#: The options that all verbs and groups have.
SHARED = (
    Parameter("context", KEYWORD_ONLY, annotation=typer.Context),
    parameter_of("log.level"),
    parameter_of("log.format"),
    Parameter("quiet", KEYWORD_ONLY, default=False, annotation=Annotated[bool, QUIET]),
    Parameter("version", KEYWORD_ONLY, default=False, annotation=Annotated[bool, VERSION]),
)


class ExampleEpilog:
    """A command whose help ends with an example."""

    epilog: str | None

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example in one line, which a reader can copy."""
        if self.epilog:
            with formatter.section("Example"):
                formatter.write(f"  {self.epilog}\n")


def split_example(docstring: str | None) -> tuple[str, str]:
    """Split a docstring into its description and its example.

    The example is the command in the last paragraph, `Example: COMMAND`, or "".
    """
    description, _, example = inspect.cleandoc(docstring or "").partition("\n\nExample: ")
    return description, example


class PanelCommand(ExampleEpilog, TyperCommand):
    """A command whose help lists its options under headings, in the order of PANELS.

    Expert settings are listed by `--help-all` only.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError, which names the replacement, for a removed flag."""
        for flag in (argument.partition("=")[0] for argument in takewhile(lambda argument: argument != "--", args)):
            if flag in REMOVED:
                raise UsageError(f"{flag} is not a flag any more; {REMOVED[flag]}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help on arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: [], **{name: [] for name in PANELS}}
        parameters = self.get_params(ctx)
        has_expert_settings = any(map(is_expert, parameters))
        for parameter in parameters:
            default_title = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
            if is_expert(parameter) and SHOWS_EXPERT_SETTINGS not in ctx.meta:
                continue
            if parameter.name == FULL_HELP_PARAMETER.name and not has_expert_settings:
                continue
            if record := parameter.get_help_record(ctx):
                sections[getattr(parameter, "rich_help_panel", None) or default_title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class CommandGroup(ExampleEpilog, TyperGroup):
    """A group of verbs with headings in its help.

    It suggests the right verb for a synonym.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the called verb. Raises UsageError, which names the right verb, for a synonym."""
        verb = SYNONYMS.get(args[0]) if args and args[0] not in self.commands else None
        if verb in self.commands:
            raise UsageError(
                f"`{ctx.command_path} {args[0]}` is not a command: did you mean `{ctx.command_path} {verb}`?"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the help on the verbs, under their headings in the order of registration."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            verb = self.get_command(ctx, name)
            if verb and not verb.hidden:
                heading = getattr(verb, "rich_help_panel", None) or "Commands"
                sections.setdefault(heading, []).append((name, verb.get_short_help_str(sys.maxsize)))

        longest_name = max(len(name) for records in sections.values() for name, _ in records)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(longest_name), description) for name, description in records])


class CommandRegistry(typer.Typer):
    """Registers functions as verbs, and adds the shared options to each.

    A function with a parameter `terminal` gets a Terminal with the log level and format of these options.
    """

    def __init__(self, help: str, *, example: str, **typer_options: Any) -> None:
        context_settings = {"help_option_names": ["-h", "--help"]}
        super().__init__(
            help=help,
            epilog=example,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings=context_settings,
            cls=CommandGroup,
            **typer_options,
        )
        self.callback()(_with_signature(_store_shared_options, SHARED))

    def usual(self, function: Callable[..., None]) -> Callable[..., None]:
        """Make a function the default verb, which runs if the command line has no verb."""
        self.info.no_args_is_help = False
        self.callback(invoke_without_command=True)(_default_callback(function, "warning"))
        return function

    def verb(
        self, default_level: str = "warning", *, server: bool = False, heading: str | None = None
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that makes a function a verb.

        `default_level`: its log level for the setting "auto".
        `server`: whether it needs the packages of a server.
        `heading`: the heading of the verb in the help of its group.

        The last paragraph of the function's docstring, `Example: …`, is the end of the verb's help.
        """

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            description, example = split_example(function.__doc__)
            register = self.command(cls=PanelCommand, help=description, epilog=example, rich_help_panel=heading)
            register(_with_terminal(function, default_level, server))
            return function

        return decorate


def _default_callback(function: Callable[..., None], default_level: str) -> Callable[..., None]:
    """Return the callback of a group that runs this verb by default.

    The callback raises UsageError for options before another verb, since they would have no effect.
    """
    run = _with_terminal(function, default_level, server=False)
    shared_names = {option.name for option in SHARED}

    def callback(**arguments: Any) -> None:
        context: typer.Context = arguments["context"]
        if context.invoked_subcommand is None:
            run(**arguments)
            return
        _store_shared_options(**{name: arguments.pop(name) for name in shared_names})
        if used_names := [name for name, value in arguments.items() if value]:
            verb, flag = f"{context.command_path} {context.invoked_subcommand}", f"--{used_names[0].replace('_', '-')}"
            raise UsageError(f"{flag} has no effect before the verb: write {verb} {flag}")

    return _with_signature(callback, [*inspect.signature(run).parameters.values()])


def _store_shared_options(
    context: typer.Context, log_level: str | None, log_format: str | None, quiet: bool, version: bool
) -> None:
    """Add the shared options that are used to the context.

    It is called for options before the verb and for those after it. The latter take precedence.
    """
    options = {"log.level": log_level, "log.format": log_format, "quiet": quiet or None}
    context.obj = {**(context.obj or {}), **{name: value for name, value in options.items() if value is not None}}


def _with_terminal(function: Callable[..., None], default_level: str, server: bool) -> Callable[..., None]:
    """Return a function with the shared options, which calls `function` with a terminal instead.

    `default_level`: the log level for the setting "auto".
    `server`: whether the verb needs the packages of a server.
    """
    signature = inspect.signature(function, eval_str=True)

    @wraps(function)
    def wrapper(**arguments: Any) -> None:
        context: typer.Context = arguments["context"]
        if server:
            require_server(f"`{context.command_path}`")
        _store_shared_options(**{shared.name: arguments.pop(shared.name) for shared in SHARED})
        arguments.pop(FULL_HELP_PARAMETER.name)
        if "terminal" in signature.parameters:
            flags = {name: value for name, value in context.obj.items() if name in FIELDS}
            log = load(flags, arguments.get("config")).settings.log
            arguments["terminal"] = Terminal(log, default_level, quiet="quiet" in context.obj, flags=flags)
        function(**arguments)

    parameters = (
        parameter.replace(kind=KEYWORD_ONLY) for name, parameter in signature.parameters.items() if name != "terminal"
    )
    return _with_signature(wrapper, (*parameters, *SHARED, FULL_HELP_PARAMETER))


def _with_signature(function: Callable[..., None], parameters: Sequence[Parameter]) -> Callable[..., None]:
    """Set the signature of a function, from which typer derives its options. Returns the function."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function
