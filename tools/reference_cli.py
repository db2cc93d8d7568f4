"""The page docs/reference/command-line.md, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from tools.reference_tables import WRITTEN, code, next_step, table
from unfuse.cli.app import app
from unfuse.cli.verbs import ARGUMENTS, OPTIONS, PANELS, SHARED

HEAD = f"""# Command line

Look up here a command of `unfuse`, its arguments, its options and their defaults. Each command has an example that
you can run. `unfuse COMMAND --help` shows the same text in a terminal. {WRITTEN}

Options that are settings also have an environment variable and a name in a settings file: see
[settings](settings.md). [Errors](errors.md#in-python-and-exit-codes) has the exit codes.

"""

SHARED_HEAD = """
## Options of several commands

Every command has the options of the first table.

"""

COMMON = ("server", "api_key", "config", "json")
"""Options that many commands have, by name. They are described once."""

EXAMPLES = {
    "generate": 'unfuse generate "a red circle on white" --size 64x64 --seed 7 --output circle.png',
    "chat": 'unfuse chat "Why is the sky blue?"',
    "serve": "unfuse serve unfuse/shapes --port 8000",
    "worker": "unfuse worker --role denoiser --scheduler tcp://10.0.0.1:7000",
    "pull": "unfuse pull black-forest-labs/FLUX.1-dev --role denoiser",
    "models": "unfuse models",
    "models ls": "unfuse models ls --json",
    "models add": "unfuse models add /models/mine --name mine",
    "models rm": "unfuse models rm mine",
    "requests ls": "unfuse requests ls --status failed --limit 20",
    "requests show": "unfuse requests show req_0123456789abcdef",
    "requests cancel": "unfuse requests cancel req_0123456789abcdef",
    "dead ls": "unfuse dead ls",
    "dead show": "unfuse dead show req_0123456789abcdef",
    "dead rm": "unfuse dead rm req_0123456789abcdef",
    "dead retry": "unfuse dead retry req_0123456789abcdef",
    "workers": "unfuse workers",
    "pools": "unfuse pools --server http://10.0.0.1:8000",
    "doctor": "unfuse doctor unfuse/shapes",
    "compare": "unfuse compare unfuse/shapes --levels 1,4 --rounds 3",
    "disk": "unfuse disk",
    "operator": "unfuse operator --namespace pictures",
    "keys new": "unfuse keys new /etc/unfuse/keys",
    "keys add": "unfuse keys add anna --rate 60/min --concurrent 4",
    "keys ls": "unfuse keys ls --file keys.txt",
    "keys rm": "unfuse keys rm anna",
    "keys hash": "unfuse keys hash keys.txt",
    "config show": "unfuse config show --config unfuse.toml",
    "version": "unfuse version --json",
}
"""An example of each command. `tools.pages` has the command line parse them."""

EXTRAS = {"operator": "operator"}
"""The extra that a command needs, besides those of a server, by the name of the command."""

NOTE = re.compile(r"\s*\[([^\[\]]*(?:default: |required|x[<>])[^\[\]]*)\](\.?)$")


def page() -> str:
    """Return the whole page."""
    root = visible(typer.main.get_command(app))
    verbs = dict(commands(root))
    index = table(
        "command | what it does",
        ([f"[`unfuse {name}`](#unfuse-{name.replace(' ', '-')})", summary(verb)] for name, verb in verbs.items()),
    )
    sections = [section(name, verb) for name, verb in verbs.items()]
    end = next_step("[Settings](settings.md)", "[Start a server](../start/start-a-server.md)")
    return "".join([HEAD, index, *sections, shared(root, verbs["models ls"]), end])


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands by name, those of a group after the group, if that can be called itself."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            if command.invoke_without_command:
                yield prefix + name, command
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, visible(command)


def visible(command: Any) -> Any:
    """Show all options of a command, those too that its help hides."""
    for parameter in command.params:
        parameter.hidden = False
    return command


def summary(command: Any) -> str:
    """Return the first sentence of a command's help."""
    return str(command.help or "").partition("\n\n")[0].replace("\n", " ")


def section(name: str, command: Any) -> str:
    """Return what the page says about a command."""
    context = typer.Context(command, info_name=f"unfuse {name}")
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    text = "\n\n".join(part for part in str(command.help).split("\n\n") if not part.startswith("Example: "))
    parts = [f"\n## `unfuse {name}`\n\n{text}\n\n```bash\n{EXAMPLES[name]}\n```\n\nUsage: `{usage}`\n"]
    if extra := EXTRAS.get(name):
        parts.append(f"\nIt needs the extra `unfuse[{extra}]`: [install](../start/install.md).\n")
    shared_names = {parameter.name for parameter in SHARED}
    by_panel: dict[str, list[Any]] = {title: [] for title in (ARGUMENTS, OPTIONS, *PANELS)}
    for parameter in command.params:
        if parameter.name not in shared_names | {*COMMON}:
            title = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
            by_panel[getattr(parameter, "rich_help_panel", None) or title].append(row(parameter, context))
    for title, rows in by_panel.items():
        if rows:
            head = "argument" if title == ARGUMENTS else "option"
            parts.append(f"\n**{title}**\n\n{table(f'{head} | default | meaning', rows)}")
    common = [code(parameter.opts[-1]) for parameter in command.params if parameter.name in COMMON]
    also = f"{', '.join(common)}, and the options of all commands" if common else "the options of all commands"
    parts.append(f"\nAlso: {also} ([below](#options-of-several-commands)).\n")
    return "".join(parts)


def shared(root: Any, client: Any) -> str:
    """Return the tables of the options that are described once: those of `client` are common, those of root shared."""
    context = typer.Context(root, info_name="unfuse")
    rows = [row(parameter, context) for parameter in root.params if "completion" not in parameter.name]
    completion = [row(parameter, context) for parameter in root.params if "completion" in parameter.name]
    common = [row(parameter, context) for parameter in client.params if parameter.name in COMMON]
    head = "option | default | meaning"
    return "".join(
        [
            SHARED_HEAD,
            table(head, [*rows, ["`-h`, `--help`", "", "Show the help and exit."]]),
            "\nMost commands that call a server, or print objects, have these.\n\n",
            table(head, common),
            "\n`unfuse` without a command has these.\n\n",
            table(head, completion),
        ]
    )


def row(parameter: Any, context: Any) -> list[str]:
    """Return the row of an argument or option: its names, its default, its help."""
    names, text = parameter.get_help_record(context)
    notes = NOTE.search(text)
    default, limits = "", ""
    if notes:
        text = NOTE.sub(r"\2", text)
        for note in notes[1].split("; "):
            if note.startswith("default: "):
                default = code(note.removeprefix("default: "))
            elif note == "required":
                default = "required"
            else:
                limits += f" Bounds: `{note}`."
    return [code(names), default, text.rstrip() + limits]
