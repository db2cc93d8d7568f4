"""`unfuse config`: show the settings and their origins."""

from __future__ import annotations

import re
from typing import Any

from unfuse.cli import show as shown
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import OFFERED, CommandRegistry, Config, Json
from unfuse.service.groups import Settings
from unfuse.service.settings import FIELDS, ByteSize, SettingField, load

app = CommandRegistry(
    "Show the settings and where they are set.",
    example="unfuse config show",
)

#: The text that replaces a secret.
HIDDEN = "********"

#: The password in a URL, as of Redis.
PASSWORD = re.compile(r"(://[^/@\s]*:)[^/@\s]*@")


@app.verb()
def show(terminal: Terminal, config: Config = None, json: Json = False) -> None:
    """List every setting with its value, the value's source, its flag and environment variable.

    Example: unfuse config show --config unfuse.toml
    """
    loaded = load(terminal.flags, config)
    rows = [
        {
            "setting": name,
            "value": _value(field, loaded.settings),
            "from": loaded.origins[name],
            "flag": field.flag if name in OFFERED else None,
            "environment": field.variable,
        }
        for name, field in FIELDS.items()
    ]
    if json:
        shown.as_json(rows)
    else:
        shown.as_table(rows, ["setting", "value", "flag", "environment", "from"], "no settings")


def _value(field: SettingField, settings: Settings) -> Any:
    """Return the value of a setting for output, with secrets hidden."""
    value: Any = settings
    for part in field.name.split("."):
        value = getattr(value, part)
    if field.unit == "byte":
        return ByteSize(value)
    if field.secret and value:
        return HIDDEN
    return PASSWORD.sub(rf"\1{HIDDEN}@", value) if isinstance(value, str) else value
