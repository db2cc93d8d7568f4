"""The page docs/reference/settings.md, from the settings themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import unfuse.cli.app  # noqa: F401  whose verbs say which settings have flags
from tools.reference_tables import DOCS, WRITTEN, code, next_step, table
from unfuse.cli.verbs import OFFERED
from unfuse.service.groups import Level, Settings
from unfuse.service.settings import FIELDS, SettingField

PAGE = DOCS / "settings.md"

HEAD = f"""# Settings

Look up here the variable, the flag and the default of a setting. Most servers need only the first table. The
[settings that you may need](#settings-that-you-may-need) are for a purpose that their text names, and the
[expert settings](#expert-settings) suit nearly every server as they are.

The first of these that sets a value applies: flag, environment variable, file (`--config unfuse.toml`), default.
`unfuse config show` shows the source of each value. In a file, `UNFUSE_SERVE__RETENTION_S` is `retention_s` in the
table `[serve]`: use the name of the variable in lower case, not that of the flag. Sizes and times may have a unit.

```toml
[serve]
models = ["unfuse/shapes"]
host = "10.0.0.1"
api_keys = ["/etc/unfuse/keys.txt"]
retention_s = "7d"
results_limit = "50GiB"
price = ["cpu=0.05/h"]

[compute]
threads = 2

[arena]
bytes = "1GiB"
```

[Choose which workers run where](../guides/choose-a-layout.md) has the grammar of `--workers`, `--place` and
`--parallel`. A setting without a flag is set by its variable or in the file. {WRITTEN}
"""

#: The default of the folder for data, unless `load` derives another from XDG_DATA_HOME.
DATA_DIR = "~/.local/share/unfuse"

TITLES: dict[Level, tuple[str, str]] = {
    "need": (
        "Settings that you need",
        "Which models are served, where the server listens, who may call it, and where its data is.",
    ),
    "may": (
        "Settings that you may need",
        "One table for each group, which is also the name of the table in a file.",
    ),
    "expert": (
        "Expert settings",
        "Timers of protocols, numbers of threads and connections, and sizes of internals. The operator of a normal "
        "server never changes them.",
    ),
}
"""The title and the first sentence of each level."""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for level, (title, about) in TITLES.items():
        fields = [field for field in FIELDS.values() if field.level == level]
        parts.append(f"\n## {title}\n\n{about}\n")
        parts += ["\n", settings_table(fields)] if level == "need" else tables_by_group(level, fields)
    parts.append(next_step("[Parameters](parameters.md)", "[Command line](command-line.md)"))
    return "".join(parts)


def tables_by_group(level: Level, fields: Iterable[SettingField]) -> Iterator[str]:
    """Yield the heading and the table of each group."""
    for group, members in groupby(fields, lambda field: field.name.rpartition(".")[0]):
        title = f"`{group}`" if group else "Without a group"
        about = type(getattr(Settings(), group)).__doc__ if group else "What holds for several groups."
        yield f"\n### {title}{', expert' if level == 'expert' else ''}\n\n{about}\n\n"
        yield settings_table(members)


def settings_table(fields: Iterable[SettingField]) -> str:
    """Return the table of these settings."""
    return table("variable and flag | default | meaning", map(row, fields))


def row(field: SettingField) -> list[str]:
    """Return a setting's row of its table."""
    value = size(field.default) if field.unit == "byte" else field.written(field.default)
    default = DATA_DIR if field.name == "data_dir" else value
    names = f"{code(field.variable)} {code(field.flag if field.name in OFFERED else '')}".rstrip()
    return [names, code(default), field.description]


def size(number: int) -> str:
    """Return a number of bytes with the largest binary unit of which it is a multiple."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number and number % (1 << power) == 0:
            return f"{number >> power}{unit}"
    return str(number)
