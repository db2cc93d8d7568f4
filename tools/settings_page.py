"""Writes docs/reference/settings.md from the settings themselves: `python -m tools.settings_page`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import unfuse.cli.app  # noqa: F401  whose verbs say which settings have flags
from unfuse.cli.verbs import EXPERT, OFFERED, PANELS
from unfuse.service.groups import Settings
from unfuse.service.settings import FIELDS, ByteSize, SettingField

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"

HEAD = """# Settings

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
`--parallel`.
This page is written by `python -m tools.settings_page`.
"""

TABLE = "\n\n| variable | flag | default | |\n|---|---|---|---|\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    usual = (field for field in FIELDS.values() if field.name not in PANELS[EXPERT])
    for group, fields in groupby(usual, lambda field: field.name.rpartition(".")[0]):
        about = type(getattr(Settings(), group)) if group else Settings
        title, says = (f"`{group}`", about.__doc__) if group else ("Without a group", "What holds for several groups.")
        parts += [f"\n## {title}\n\n{says}{TABLE}", *map(row, fields)]
    expert = [row(FIELDS[name]) for name in PANELS[EXPERT]]
    return "".join([*parts, f"\n## Expert settings\n\nThe defaults suit nearly every server.{TABLE}", *expert])


def row(field: SettingField) -> str:
    """A setting's line of its table."""
    value = ByteSize(field.default) if field.unit == "byte" else field.written(field.default)
    flag = f"`{field.flag}`" if field.name in OFFERED else ""
    cells = [f"`{field.variable}`", flag, f"`{value}`" if str(value) else "", field.description.replace("|", "\\|")]
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
