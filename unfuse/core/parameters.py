"""Parameters: the fields that a client may send. Each is a line of a medium's table, which bounds and describes it.

Values arrive as JSON values (where 2.0 is the whole number 2) or as form strings. A value that is not allowed raises
InvalidParameter, whose message has the bound and the value.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from unfuse.core.errors import ConfigError, InvalidParameter

Value = str | int | float | bool | None
Params = dict[str, Value]  # the parameters of a request, by name, as stages get them

Kind = Literal["text", "integer", "number", "choice", "flag", "form", "texts", "scaled", "any"]
"""`form` is a text that matches a pattern, `texts` an object of a few short texts, `scaled` a name or
several, each with a scale or without one; `any` is not checked."""

Use = Literal["stages", "request", "delivery", "nothing", "unused", "refused"]
"""Which part uses a parameter: the stages, the creation of the request, its delivery, or none ("nothing").

An `unused` parameter has no effect here, but would change the result on another server: `--strict-params` refuses it.
A `refused` parameter is always refused; the error message is its name followed by its description.
"""

Bound = float | str  # a number, or the name of one of the model's limits

MAX_TEXTS = 16
MAX_SCALED = 8

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?")


class Parameter(msgspec.Struct, frozen=True):
    """One field. `low` and `high` bound a number, or a text's length; `choices` are all values that it can have.

    `default` is used when neither the client nor the model gives a value. A parameter `by_model` exists only for models
    that have a default for it. `flag` is its flag in the command line ("": made from the name; None: it has no flag),
    `metavar` what `--help` shows for the value. `form` is a pattern, and a description of the pattern.
    """

    name: str
    kind: Kind
    low: Bound = 0
    high: Bound = 0
    choices: tuple[object, ...] = ()
    use: Use = "stages"
    default: Value = None
    description: str = ""
    by_model: bool = False
    required: bool = False
    flag: str | None = ""
    metavar: str = ""
    form: tuple[str, str] = ("", "")

    @property
    def offered(self) -> bool:
        """Whether the command line has a flag for it: it says what to make, and can be written as one value."""
        return self.use in ("stages", "request") and self.kind not in ("texts", "any") and self.flag is not None

    @property
    def fixed(self) -> bool:
        """Whether its bounds are the same for every model."""
        return not isinstance(self.low, str) and not isinstance(self.high, str)

    @property
    def bounds(self) -> str:
        """Its bounds, for people to read; "" if it has none."""
        if self.choices:
            return ", ".join(dict.fromkeys(map(str, self.choices)))
        if self.kind not in ("text", "integer", "number"):
            return ""
        low, high = (f"the model's {end}" if isinstance(end, str) else str(end) for end in (self.low, self.high))
        return f"up to {high} characters" if self.kind == "text" else f"{low} to {high}"

    def read(self, value: object, limits: object) -> Any:
        """Check and convert a client's value. `limits` has the model's limits. Raises InvalidParameter."""
        low, high = (getattr(limits, bound) if isinstance(bound, str) else bound for bound in (self.low, self.high))
        match self.kind:
            case "text":
                return text(self.name, value, int(low), int(high))
            case "integer":
                return integer(self.name, value, int(low), int(high))
            case "number":
                return number(self.name, value, low, high)
            case "choice":
                return choice(self.name, value, self.choices)
            case "flag":
                return choice(self.name, str(value).lower(), ("true", "false")) == "true"
            case "form":
                return matching(self.name, value, *self.form)
            case "texts":
                return texts(self.name, value)
            case "scaled":
                return scaled(self.name, value, low, high)
            case "any":
                return value


def text(name: str, value: object, low: int, high: int) -> str:
    """A text of `low` to `high` characters. Raises InvalidParameter, as the functions below do."""
    if not isinstance(value, str):
        raise InvalidParameter(f"{name} must be text, not {printable(value)}", name)
    if not low <= len(value) <= high:
        raise InvalidParameter(f"{name} must be {low} to {high} characters long, not {len(value)}", name)
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidParameter(f"{name} holds half of a surrogate pair, which is not text", name)
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """A whole number from `low` to `high`; a form sends it as text."""
    found = value
    if isinstance(value, str) and _INTEGER.fullmatch(value) or isinstance(value, float) and value.is_integer():
        found = int(value)
    if not isinstance(found, int) or isinstance(found, bool):
        raise InvalidParameter(f"{name} must be a whole number ({low} to {high}), not {printable(value)}", name)
    if not low <= found <= high:
        raise InvalidParameter(f"{name} must be {low} to {high}, not {printable(found)}", name)
    return found


def number(name: str, value: object, low: float, high: float) -> float:
    """A number from `low` to `high`; a form sends it as text."""
    found = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise InvalidParameter(f"{name} must be a number ({low:g} to {high:g}), not {printable(value)}", name)
    if not low <= found <= high:
        raise InvalidParameter(f"{name} must be {low:g} to {high:g}, not {printable(found)}", name)
    return float(found)


def choice(name: str, value: object, known: tuple[object, ...]) -> object:
    """One of the `known` values."""
    if value not in known or isinstance(value, bool):
        can = list(dict.fromkeys(map(str, known)))
        rule = f"must be one of {', '.join(can)}" if len(can) > 1 else f"can only be {can[0]} here"
        raise InvalidParameter(f"{name} {rule}, not {printable(value)}", name)
    return value


def matching(name: str, value: object, pattern: str, description: str) -> str:
    """A text that matches the pattern; `description` says in words which texts do."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise InvalidParameter(f"{name} must be {description}, not {printable(value)}", name)
    return value


def texts(name: str, value: object) -> dict[str, str]:
    """An object of at most MAX_TEXTS short texts by name."""
    if not isinstance(value, dict) or len(value) > MAX_TEXTS:
        raise InvalidParameter(f"{name} must be an object of at most {MAX_TEXTS} texts", name)
    return {text(f"{name} key", key, 1, 64): text(f"{name}.{key}"[:80], one, 0, 512) for key, one in value.items()}


def scaled(name: str, value: object, low: float, high: float) -> str:
    """A few names as a text that `scales` reads. Each is given as a text (`ink:0.8`) or as an object with `name` and
    `scale`; several as a list, or with commas between.
    """
    given, found = value if isinstance(value, list) else [value], dict[str, str]()
    parts: list[tuple[object, object]] = []
    for one in given[: MAX_SCALED + 1]:
        if isinstance(one, dict) and {"name"} <= one.keys() <= {"name", "scale"}:
            parts.append((one["name"], one.get("scale")))
        else:
            cut = _cut(text(name, one, 1, 129 * MAX_SCALED))
            parts += [(part if scale or not colon else "", scale or None) for part, colon, scale in cut]
    for part, scale in parts:
        called = matching(name, part, "[^,:]{1,128}", "a name, or NAME:SCALE, or several with commas between")
        if called in found:
            raise InvalidParameter(f"{name} has {printable(called)} twice: name it once, with the scale of both", name)
        found[called] = called if scale is None else f"{called}:{number(name, scale, low, high)!r}"
    if not 1 <= len(found) <= MAX_SCALED:
        raise InvalidParameter(f"{name} must be 1 to {MAX_SCALED} names", name)
    return ",".join(found.values())


def scales(text: str) -> list[tuple[str, float | None]]:
    """The names in a text that `scaled` has made, each with its scale, if it has one."""
    return [(name, float(scale) if scale else None) for name, _, scale in _cut(text)]


def _cut(text: str) -> list[tuple[str, str, str]]:
    return [part.partition(":") for part in text.split(",")]


def printable(value: object) -> str:
    """The value for use in a message: short and printable, whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "…")
    if isinstance(value, bytes):
        return "a file"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def default_of(params: Params, name: str) -> float:
    """The model's default for a number. Raises ConfigError if it has none."""
    value = params.get(name)
    if not isinstance(value, int | float):
        raise ConfigError(f"the model has no default {name}: set one in its serving.json")
    return value
