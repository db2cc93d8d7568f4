"""A field that a client may send: a line of a medium's table, by which it is read, bounded and described.

Values arrive as JSON values (where 2.0 is the whole number 2) or as form strings. Whatever is refused is refused with
InvalidParameter, whose sentence holds the bound and the value.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from unfuse.core.errors import ConfigError, InvalidParameter

Value = str | int | float | bool | None
Params = dict[str, Value]
"""What stages get: the parameters of a request, by name."""

Kind = Literal["text", "integer", "number", "choice", "flag", "form", "texts", "any"]
"""`form` is a text as a pattern has it, `texts` an object of few short texts; `any` is taken as it is."""

Use = Literal["stages", "request", "delivery", "nothing"]
"""What reads it: stages, the making of the request, its delivery, nobody."""

Bound = float | str
"""A number, or the name of that limit of the model."""

MAX_TEXTS = 16

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?")


class Parameter(msgspec.Struct, frozen=True):
    """One field. `low` and `high` bound a number, or a text's length; `choices` are all that it can be.

    `default` is meant where neither client nor model says. One that is `particular` is known only where the model, or
    who serves it, has a default for it. `also` is what some write for its name: it is not known by it. A command line
    has the `flag` for it (nothing: its name), unless that is None; there, `stands` is shown for its value. `form` is
    a pattern, and what it allows, in words.
    """

    name: str
    kind: Kind
    low: Bound = 0
    high: Bound = 0
    choices: tuple[object, ...] = ()
    use: Use = "stages"
    default: Value = None
    says: str = ""
    particular: bool = False
    required: bool = False
    also: tuple[str, ...] = ()
    flag: str | None = ""
    stands: str = ""
    form: tuple[str, str] = ("", "")

    @property
    def offered(self) -> bool:
        """Whether a command line has a flag for it: it is for what is made, and can be written as one value."""
        return self.use in ("stages", "request") and self.kind not in ("texts", "any") and self.flag is not None

    @property
    def fixed(self) -> bool:
        """Whether its bounds are the same for every model."""
        return not isinstance(self.low, str) and not isinstance(self.high, str)

    @property
    def bounds(self) -> str:
        """What bounds it, for people; nothing where nothing does."""
        if self.choices:
            return ", ".join(dict.fromkeys(map(str, self.choices)))
        if self.kind not in ("text", "integer", "number"):
            return ""
        low, high = (
            f"the model's {bound}" if isinstance(bound, str) else str(bound) for bound in (self.low, self.high)
        )
        return f"up to {high} characters" if self.kind == "text" else f"{low} to {high}"

    def read(self, value: object, limits: object) -> Any:
        """A client's value, as it is meant. Raises InvalidParameter; `limits` has the model's."""
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
                return formed(self.name, value, *self.form)
            case "texts":
                return texts(self.name, value)
            case "any":
                return value


def text(name: str, value: object, low: int, high: int) -> str:
    """A text of so many characters."""
    if not isinstance(value, str):
        raise InvalidParameter(f"{name} must be text, not {shown(value)}", name)
    if not low <= len(value) <= high:
        raise InvalidParameter(f"{name} must be {low} to {high} characters long, not {len(value)}", name)
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidParameter(f"{name} holds half of a surrogate pair, which is not text", name)
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """A whole number within these bounds."""
    found = value
    if isinstance(value, str) and _INTEGER.fullmatch(value) or isinstance(value, float) and value.is_integer():
        found = int(value)
    if not isinstance(found, int) or isinstance(found, bool):
        raise InvalidParameter(f"{name} must be a whole number ({low} to {high}), not {shown(value)}", name)
    if not low <= found <= high:
        raise InvalidParameter(f"{name} must be {low} to {high}, not {shown(found)}", name)
    return found


def number(name: str, value: object, low: float, high: float) -> float:
    """A number within these bounds."""
    found = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise InvalidParameter(f"{name} must be a number ({low:g} to {high:g}), not {shown(value)}", name)
    if not low <= found <= high:
        raise InvalidParameter(f"{name} must be {low:g} to {high:g}, not {shown(found)}", name)
    return float(found)


def choice(name: str, value: object, known: tuple[object, ...]) -> object:
    """One of these; a number may come as text."""
    if value not in known or isinstance(value, bool):
        can = list(dict.fromkeys(map(str, known)))
        rule = f"must be one of {', '.join(can)}" if len(can) > 1 else f"can only be {can[0]} here"
        raise InvalidParameter(f"{name} {rule}, not {shown(value)}", name)
    return value


def formed(name: str, value: object, pattern: str, says: str) -> str:
    """A text of that pattern."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise InvalidParameter(f"{name} must be {says}, not {shown(value)}", name)
    return value


def texts(name: str, value: object) -> dict[str, str]:
    """A few texts by name."""
    if not isinstance(value, dict) or len(value) > MAX_TEXTS:
        raise InvalidParameter(f"{name} must be an object of at most {MAX_TEXTS} texts", name)
    return {text(f"{name} key", key, 1, 64): text(f"{name}.{key}"[:80], one, 0, 512) for key, one in value.items()}


def shown(value: object) -> str:
    """The value as it may stand in a sentence: short, printable whatever it is."""
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
    """A number that the model has a default for. Raises ConfigError if it has none."""
    value = params.get(name)
    if not isinstance(value, int | float):
        raise ConfigError(f"the model has no default {name}: set one in its serving.json")
    return value
