"""Load settings from flags, environment variables and a TOML file.

A value comes from the first of these that has one: flag, environment variable (`UNFUSE_GROUP__FIELD`), file
(`--config`), default. No other module reads settings from the environment.
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from unfuse.core.errors import UsageError
from unfuse.core.registry import nearest_name
from unfuse.service.groups import Level, Settings

#: The prefix of the environment variables of settings.
PREFIX = "UNFUSE_"

#: The origins of a value, as the first word of `LoadedSettings.origins`.
DEFAULT = "default"
FILE = "file"
ENVIRONMENT = "environment"
FLAG = "flag"

ADMIN_KEYS = "create an admin key by `unfuse keys add NAME --admin`, which writes admin=yes into a file for --api-keys"
GUIDANCE_HALVES = (
    "leave it out: both halves of guidance share a forward in batched pools (--batching batched), and in exact pools "
    "if that changes no byte"
)
LAYOUTS = (
    "`python -m bench.layouts MODEL`, in a clone of the repository, measures each layout; `unfuse serve --workers "
    "all=2` selects one"
)
COUNTS = "set the number of workers of each role in one plan: --workers encoder=1,denoiser=2,decoder=1"
SCALE_TO_ZERO = "write --scale-to-zero"
COLD_START = "write --cold-start-timeout"
ONE_MODEL = "write --max-loaded-models 1 for one model at a time, or all"

#: The advice for each removed flag, removed value of a flag ("--workers swap"), and beginning of a removed setting's
#: name ("fault.").
REMOVED: Mapping[str, str] = {
    "--admin-key": ADMIN_KEYS,
    "--guidance-halves": GUIDANCE_HALVES,
    "--layouts": LAYOUTS,
    "--no-workers": "write --workers none",
    **dict.fromkeys(("--encoders", "--denoisers", "--decoders"), COUNTS),
    "--hold": ONE_MODEL,
    "--asleep": SCALE_TO_ZERO,
    "--wake-limit": COLD_START,
    "--workers true": "write --workers split",
    "--workers false": "write --workers none",
    "--workers swap": "write --workers all=1 --max-loaded-models 1, with as many workers as there are devices",
    "fault.": (
        "use the transfer engine that injects faults: "
        "UNFUSE_TRANSFER__ENGINE=unfuse.testing.transfer_faults:FaultyTcp, with TRANSFER_FAULTS=drop=0.05,seed=1"
    ),
    "serve.admin_key": ADMIN_KEYS,
    "compute.guidance_halves": GUIDANCE_HALVES,
    **dict.fromkeys(("serve.encoders", "serve.denoisers", "serve.decoders"), COUNTS),
    "worker.hold": ONE_MODEL,
    "serve.asleep": SCALE_TO_ZERO,
    "serve.wake_limit": COLD_START,
}

#: Bytes by unit, in lower case: k, kib and kb; m, mib and mb; and so on.
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


class ByteSize(int):
    """A number of bytes that is printed with a unit. Settings themselves are plain ints."""

    @staticmethod
    def parse(text: str) -> int:
        """Parse a number of bytes: "4096", "2GiB", "512MB". Raises ValueError.

        A prefix without "b" is binary: "2G" is 2 GiB.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
        if not match or match[2] not in _UNITS:
            raise ValueError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB or TiB")
        return int(Decimal(match[1]) * _UNITS[match[2]])


#: Seconds by unit.
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}


def seconds_in(text: str) -> float:
    """Parse a time: a number of seconds, or "90min", "24h", "7d". Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _SECONDS:
        raise ValueError(f"{text!r} is not a time: write seconds, or a number with s, min, h or d")
    return float(match[1]) * _SECONDS[match[2]]


#: Parsers of text by the unit of a setting.
PARSERS: Mapping[str, Callable[[str], float]] = {
    "byte": ByteSize.parse,
    "second": seconds_in,
}


class SettingField(msgspec.Struct, frozen=True):
    """One setting: its names, its type, and its description."""

    #: The dotted name, such as "serve.port".
    name: str

    #: The annotated type. Its first argument is the type, the others are bounds and the description.
    type: Any

    #: The value if no flag, variable or file sets it.
    default: Any

    #: The description in `--help`.
    description: str

    #: The flag, such as "--port", in the verbs that have one for this setting.
    flag: str

    #: "byte" or "second" for a number that may be written with a unit; else "".
    unit: str

    #: Whether the value is hidden in all output.
    secret: bool

    #: Who sets it: "need", "may" or "expert". The settings page and `--help` are ordered by it.
    level: Level

    @property
    def variable(self) -> str:
        """The environment variable of this setting."""
        return PREFIX + self.name.upper().replace(".", "__")

    def written(self, value: Any) -> str:
        """Return a value as text for the environment variable."""
        if isinstance(value, bool):
            return str(value).lower()
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _fields(struct: type[msgspec.Struct], prefix: str = "") -> Iterable[SettingField]:
    """Yield the settings of a struct of `groups`, and of the groups in it."""
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        if isinstance(field.default, msgspec.Struct):
            yield from _fields(type(field.default), f"{field.name}.")
        else:
            meta = next(item for item in get_args(hints[field.name])[::-1] if getattr(item, "description", None))
            extra = meta.extra or {}
            flag = extra.get("flag") or f"--{field.name.replace('_', '-')}"
            yield SettingField(
                prefix + field.name,
                hints[field.name],
                field.default,
                meta.description,
                flag,
                unit=str(extra.get("unit", "")),
                secret=bool(extra.get("secret")),
                level=extra.get("level", "may"),
            )


#: All settings by dotted name.
FIELDS: Mapping[str, SettingField] = {field.name: field for field in _fields(Settings)}


_SetValue = tuple[Any, str]  # a value that was set, before conversion, and its origin


class LoadedSettings(msgspec.Struct, frozen=True):
    """Settings, and the origin of each value."""

    #: The values, converted to their types.
    settings: Settings

    #: The origin of each value by dotted name: "default", "file PATH", "environment VARIABLE" or "flag FLAG".
    origins: dict[str, str]


def load(
    flags: Mapping[str, Any] | None = None, config: Path | None = None, environment: Mapping[str, str] = os.environ
) -> LoadedSettings:
    """Load settings from flags, a file and the environment.

    `flags`: values by dotted name; None stands for a flag that was not used.
    `config`: the path of a TOML file, or None.
    `environment`: environment variables.

    Raises UsageError for an unknown key, with the nearest known one, and for a value of the wrong type.
    """
    data_home = environment.get("XDG_DATA_HOME") or Path(environment.get("HOME", "~"), ".local", "share")
    # Later entries replace earlier ones, so flags come last.
    set_values: dict[str, _SetValue] = {
        "data_dir": (str(Path(data_home, "unfuse")), DEFAULT),
        "run_dir": (_run_dir(environment), DEFAULT),
        **_from_file(config),
        **_from_environment(environment),
        **{name: (value, f"{FLAG} {FIELDS[name].flag}") for name, value in (flags or {}).items() if value is not None},
    }
    settings: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, DEFAULT)
    for name, (value, origin) in set_values.items():
        origins[name] = origin
        group, _, key = name.rpartition(".")
        group_values = settings.setdefault(group, {}) if group else settings
        group_values[key] = _convert(FIELDS[name], value, origin)
    return LoadedSettings(_expand_home(msgspec.convert(settings, Settings)), origins)


def _expand_home(settings: Settings) -> Settings:
    """Return the settings with `~` in paths replaced by the home folder.

    Shells do so only on command lines.

    Raises UsageError if there is no home folder.
    """
    for name in ("data_dir", "run_dir"):
        if os.path.expanduser(getattr(settings, name)).startswith("~"):
            raise UsageError(
                f"{name} {getattr(settings, name)}: there is no such home folder; set {FIELDS[name].variable} to an "
                "absolute path"
            )
    serve = msgspec.structs.replace(
        settings.serve,
        api_keys=tuple(map(os.path.expanduser, settings.serve.api_keys)),
        loras=os.path.expanduser(settings.serve.loras),
    )
    data_dir, run_dir = os.path.expanduser(settings.data_dir), os.path.expanduser(settings.run_dir)
    return msgspec.structs.replace(settings, data_dir=data_dir, run_dir=run_dir, serve=serve)


def _from_environment(environment: Mapping[str, str]) -> dict[str, _SetValue]:
    """Return the values of environment variables by dotted name. Raises UsageError for an unknown variable."""
    names = {field.variable: name for name, field in FIELDS.items()}
    variables = {variable: value for variable, value in environment.items() if variable.startswith(PREFIX)}
    for variable in variables:
        if variable not in names:
            name = variable.removeprefix(PREFIX).lower().replace("__", ".")
            raise UsageError(f"environment variable {variable} is not a setting{_advice(name, variable, names)}")
    return {names[variable]: (value, f"{ENVIRONMENT} {variable}") for variable, value in variables.items()}


def _from_file(path: Path | None) -> dict[str, _SetValue]:
    """Return the values of a TOML file by dotted name.

    Raises UsageError for a file that cannot be read or is not TOML, and for an unknown name.
    """
    if path is None:
        return {}
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error

    values_by_name: dict[str, Any] = {}
    for key, value in tree.items():
        values_by_name |= (
            {f"{key}.{subkey}": item for subkey, item in value.items()} if isinstance(value, dict) else {key: value}
        )
    for name in values_by_name:
        if name not in FIELDS:
            raise UsageError(f"{path}: {name} is not a setting{_advice(name, name, FIELDS)}")
    return {name: (value, f"{FILE} {path}") for name, value in values_by_name.items()}


def _advice(name: str, written_name: str, known_names: Iterable[str]) -> str:
    """Return the end of an error message: a replacement, or the nearest known name.

    `name`: the dotted name of the setting.
    `written_name`: the name as the user wrote it, for example as a variable.
    `known_names`: the known names, written in the same way.
    """
    for prefix, replacement in REMOVED.items():
        if name.startswith(prefix):
            return f" any more; {replacement}"
    nearest = nearest_name(written_name, known_names, 0.5)
    return f"; did you mean {nearest}?" if nearest else "; `unfuse config show` lists them"


def _convert(field: SettingField, value: Any, origin: str) -> Any:
    """Return a value converted to its setting's type.

    Raises UsageError, whose message has the value unless that is secret.
    """
    if replacement := REMOVED.get(f"{field.flag} {value}".lower()):
        raise UsageError(f"{field.name} {value!r} (from {origin}) is removed: {replacement}")
    if isinstance(field.default, tuple) and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    value_type = get_args(field.type)[0]
    if get_origin(value_type) is Literal:
        value = str(value)  # a TOML file may have the number 1 instead of the text "1"
    try:
        parse = PARSERS.get(field.unit)
        parsed = parse(value) if parse and isinstance(value, str) else value
        return msgspec.convert(parsed, field.type, strict=not isinstance(parsed, str))
    except (ValueError, msgspec.ValidationError) as error:
        value_text = "" if field.secret else f" {value!r}"
        reason = f"one of {', '.join(get_args(value_type))}" if get_origin(value_type) is Literal else error
        raise UsageError(f"{field.name}{value_text} (from {origin}): {reason}") from error


def _run_dir(environment: Mapping[str, str]) -> str:
    """Return the default run folder of this user, which other users cannot share."""
    runtime_dir = environment.get("XDG_RUNTIME_DIR")
    folder_name = f"unfuse-{os.geteuid()}" if hasattr(os, "geteuid") else "unfuse"  # without user ids, TEMP is per user
    return str(Path(runtime_dir, "unfuse") if runtime_dir else Path(tempfile.gettempdir(), folder_name))
