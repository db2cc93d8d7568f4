"""Parameters: the fields that a client may send. Each is a line of a medium's table, which bounds and describes it.

Values arrive as JSON values (where 2.0 is the whole number 2) or as form strings. A value that is not allowed raises
InvalidParameter, whose message has the bound and the value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
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


MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""The range of seeds that torch's `manual_seed` accepts. It takes negative seeds modulo 2**64: -1 is 2**64 - 1."""

RANDOM_SEED = -1
"""A client sends this seed to get a random one."""

MIN_S, MAX_S = 0.001, 86_400  # bounds of a time that a client may say, in seconds

DELIVERED = (
    Parameter("model", "any", use="request", description="without it, the first model that serve named"),
    Parameter("priority", "integer", -100, 100, use="delivery", description="the higher, the sooner"),
    Parameter("timeout", "number", MIN_S, MAX_S, use="delivery", description="seconds from acceptance to the end"),
    Parameter("metadata", "texts", use="delivery", description="texts that are printable with the request"),
    Parameter("cache", "flag", use="delivery", description="false: share nothing that is made with other requests"),
    Parameter(
        "webhook", "text", 1, 2048, use="delivery", flag=None,
        description="address that is told, signed, when the request is completed, failed or cancelled",
    ),
)  # fmt: skip
"""Parameters of every medium: how a request is handled, whatever it asks for."""


PIXELS = ("width", "height", "num_frames")  # the parameters whose product is the size of a picture or video, in pixels
Work = tuple[float, float]  # how many forwards of a stage's network are needed, and the size of each


class OutputSize(msgspec.Struct, frozen=True):
    """Predicted bytes of a stage's output: fixed + each × the product of the parameters in `size`.

    The last of these parameters counts groups: n frames are 1 + (n − 1) // group groups.
    """

    fixed: int = 0
    each: float = 0.0
    group: int = 1
    size: tuple[str, ...] = PIXELS

    def bytes(self, params: Params) -> int:
        """Predicted bytes for one request with these parameters."""
        counts = [_count(params, name) for name in self.size]
        groups = [1 + (count - 1) // self.group for count in counts[-1:]]
        return self.fixed + round(self.each * math.prod(counts[:-1] + groups))


class Workload(msgspec.Struct, frozen=True):
    """How the parameters of a request say how much a stage has to do.

    `forwards` names the parameter that counts forwards of its network, one a step ("": there is one forward). Guidance
    doubles them: the request has a negative prompt, and the first of the scales in `guidance` that the request has is
    above 1. Of these, a request makes only the `part` that this parameter says, if it has it. The size of a forward is
    the product of the parameters in `size`.
    """

    forwards: str = ""
    guidance: tuple[str, ...] = ()
    size: tuple[str, ...] = PIXELS
    part: str = ""

    def of(self, params: Params) -> Work:
        """The number of forwards and the size of each, for a request with these parameters."""
        scale = next((params[name] for name in self.guidance if name in params), None)
        guided = isinstance(scale, int | float) and scale > 1 and params.get("negative_prompt") is not None
        forwards, part = _count(params, self.forwards) if self.forwards else 1, params.get(self.part)
        made = forwards * (part if isinstance(part, float) else 1.0)
        return made * (1.0 + guided), float(math.prod(_count(params, name) for name in self.size))


def nth_seed(seed: int, index: int) -> int:
    """Return the seed of result `index`: consecutive integers, with 0 after the largest seed.

    Instead of RANDOM_SEED it is the largest seed, which is equal for torch, so that a client can send it again.
    """
    following = (seed + index) % 2**64 if seed + index > MAX_SEED else seed + index
    return MAX_SEED if following == RANDOM_SEED else following


def _count(params: Params, name: str) -> int:
    value = params.get(name)
    return value if isinstance(value, int) and value > 0 else 1


class Modality(msgspec.Struct, frozen=True):
    """A kind of result: the table of its parameters, its limits, and the rule that completes them.

    `plural` is the word for several results. Ids of its requests begin with `prefix`. A model makes this medium if its
    limit `sign` is at least `least`. `settle(limits, params, read, tokens)` gets the model's limits, the parameters for
    the stages so far, the client's checked values, and what a tokenizer made of them (None for other media than text).
    It returns further parameters for the stages, or raises InvalidParameter. Tasks can only share a
    forward if they have equal parameters in `size`.
    """

    name: str
    plural: str
    prefix: str
    sign: str
    least: int
    limits: type[msgspec.Struct]
    settle: Callable[[Any, Params, Mapping[str, Any], Any], Params]
    parameters: tuple[Parameter, ...]
    size: tuple[str, ...] = PIXELS

    def made_by(self, limits: Mapping[str, float]) -> bool:
        """Whether a model with these limits makes this medium."""
        return limits.get(self.sign, 0) >= self.least

    def limits_of(self, limits: Mapping[str, float]) -> Any:
        """A model's limits as this medium's type, with its defaults. Raises ConfigError for what are no limits."""
        try:
            return msgspec.convert(limits, self.limits)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the limits of the model cannot be read: {error}") from error

    def takes(self, name: str, value: object) -> bool:
        """Whether the table has a parameter of this name that allows this value for some model."""
        found = (one for one in self.parameters if one.name == name)
        return any(not one.choices or value in one.choices for one in found)

    def known(self, defaults: Params) -> dict[str, Parameter]:
        """The parameters that a client may send for a model with these defaults, by name."""
        return {one.name: one for one in self.parameters if not one.by_model or one.name in defaults}
