"""Parameters: the fields that a client may send, each an entry in a modality's table.

The entry has the bounds and the description of the field. Values are JSON values (where 2.0 is the whole number 2) or
form strings. A value that is not allowed raises InvalidParameter, whose message has the bound and the value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from unfuse.core.errors import ConfigError, InvalidParameter

Value = str | int | float | bool | None
Params = dict[str, Value]  # the parameters of a request, by name, as stages read them

Kind = Literal["text", "integer", "number", "choice", "flag", "form", "texts", "scaled", "any"]
"""The type of a parameter's value.

`form` is a text that matches a pattern, `texts` an object of a few short texts, `scaled` one or more names, each with
an optional scale. `any` is not checked.
"""

Use = Literal["stages", "request", "delivery", "nothing", "unused", "refused"]
"""The part of the server that uses a parameter: the stages, the creation of the request, its delivery, or none.

An `unused` parameter has no effect here, but would change the result on another server: `--strict-params` refuses it.
A `refused` parameter is always refused; the error message is its name followed by its description.
"""

Bound = float | str  # a number, or the name of one of the model's limits

MAX_TEXTS = 16
MAX_SCALED_NAMES = 8

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?")


class Parameter(msgspec.Struct, frozen=True):
    """One field that a client may send: its type, bounds, default and description."""

    #: Name of the field, as in the client's body.
    name: str
    #: Type of its value.
    kind: Kind
    #: Lower bound of a number, or of a text's length in characters.
    low: Bound = 0
    #: Upper bound of a number, or of a text's length in characters.
    high: Bound = 0
    #: All values that are allowed; empty: the bounds decide.
    choices: tuple[object, ...] = ()
    #: Which part of the server uses it.
    use: Use = "stages"
    #: Value if neither the client nor the model's defaults set one; None: it is missing then.
    default: Value = None
    #: Text for `--help`, the OpenAPI schema and error messages.
    description: str = ""
    #: Whether it exists only for models that have a default for it.
    by_model: bool = False
    #: Whether a request without it is refused.
    required: bool = False
    #: Flag of the command line; "": made from the name; None: there is no flag.
    flag: str | None = ""
    #: Placeholder for the value in `--help`.
    metavar: str = ""
    #: For the kind `form`: a regular expression, and a description of it for error messages.
    form: tuple[str, str] = ("", "")

    @property
    def offered(self) -> bool:
        """Whether the command line has a flag for it.

        There is none for parameters of the delivery, for objects, and if `flag` is None.
        """
        return self.use in ("stages", "request") and self.kind not in ("texts", "any") and self.flag is not None

    @property
    def fixed(self) -> bool:
        """Whether its bounds are numbers, which are the same for every model."""
        return not isinstance(self.low, str) and not isinstance(self.high, str)

    @property
    def bounds(self) -> str:
        """Its bounds, for people to read; "" if it has none."""
        if self.choices:
            return ", ".join(dict.fromkeys(map(str, self.choices)))
        if self.kind not in ("text", "integer", "number"):
            return ""
        low, high = (
            f"the model's {bound}" if isinstance(bound, str) else str(bound) for bound in (self.low, self.high)
        )
        return f"up to {high} characters" if self.kind == "text" else f"{low} to {high}"

    def read(self, value: object, limits: object) -> Any:
        """Return the client's value, checked and converted. Raises InvalidParameter.

        `limits` has the model's limits as attributes. None is enough for a parameter whose bounds are `fixed`.
        """
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
                return parse_scaled(self.name, value, low, high)
            case "any":
                return value


def text(name: str, value: object, low: int, high: int) -> str:
    """Return a text of `low` to `high` characters. Raises InvalidParameter, as the functions below do."""
    if not isinstance(value, str):
        raise InvalidParameter(f"{name} must be text, not {printable(value)}", name)
    if not low <= len(value) <= high:
        raise InvalidParameter(f"{name} must be {low} to {high} characters long, not {len(value)}", name)
    # JSON escapes can contain them, but UTF-8 and msgpack cannot
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidParameter(f"{name} contains an unpaired surrogate, which is not valid Unicode", name)
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return a whole number from `low` to `high`. Forms send it as text."""
    parsed = value
    if isinstance(value, str) and _INTEGER.fullmatch(value) or isinstance(value, float) and value.is_integer():
        parsed = int(value)
    if not isinstance(parsed, int) or isinstance(parsed, bool):
        raise InvalidParameter(f"{name} must be a whole number ({low} to {high}), not {printable(value)}", name)
    if not low <= parsed <= high:
        raise InvalidParameter(f"{name} must be {low} to {high}, not {printable(parsed)}", name)
    return parsed


def number(name: str, value: object, low: float, high: float) -> float:
    """Return a number from `low` to `high`. Forms send it as text."""
    parsed = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if not isinstance(parsed, int | float) or isinstance(parsed, bool):
        raise InvalidParameter(f"{name} must be a number ({low:g} to {high:g}), not {printable(value)}", name)
    if not low <= parsed <= high:
        raise InvalidParameter(f"{name} must be {low:g} to {high:g}, not {printable(parsed)}", name)
    return float(parsed)


def choice(name: str, value: object, choices: tuple[object, ...]) -> object:
    """Return the value if it is one of the choices."""
    # True == 1 in Python, but a client that sends true does not mean the choice 1
    if value not in choices or isinstance(value, bool):
        allowed = list(dict.fromkeys(map(str, choices)))
        rule = f"must be one of {', '.join(allowed)}" if len(allowed) > 1 else f"must be {allowed[0]}"
        raise InvalidParameter(f"{name} {rule}, not {printable(value)}", name)
    return value


def matching(name: str, value: object, pattern: str, description: str) -> str:
    """Return a text that matches the regular expression; `description` is its meaning, for the error."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise InvalidParameter(f"{name} must be {description}, not {printable(value)}", name)
    return value


def texts(name: str, value: object) -> dict[str, str]:
    """Return an object of at most MAX_TEXTS short texts by name."""
    if not isinstance(value, dict) or len(value) > MAX_TEXTS:
        raise InvalidParameter(f"{name} must be an object of at most {MAX_TEXTS} strings", name)
    return {text(f"{name} key", key, 1, 64): text(f"{name}.{key}"[:80], item, 0, 512) for key, item in value.items()}


def parse_scaled(name: str, value: object, low: float, high: float) -> str:
    """Return up to MAX_SCALED names with optional scales, as one text for `split_scaled`.

    A client sends a text (`ink:0.8`, or several with commas between), an object with `name` and `scale`, or a list of
    these. Scales are from `low` to `high`.
    """
    items = value if isinstance(value, list) else [value]
    pairs: list[tuple[object, object]] = []
    # one more than allowed, so that the error below is raised, but a long list costs no time
    for item in items[: MAX_SCALED_NAMES + 1]:
        if isinstance(item, dict) and {"name"} <= item.keys() <= {"name", "scale"}:
            pairs.append((item["name"], item.get("scale")))
        else:
            entries = _split_names(text(name, item, 1, 129 * MAX_SCALED_NAMES))
            pairs += [(raw_name if scale or not colon else "", scale or None) for raw_name, colon, scale in entries]

    by_name: dict[str, str] = {}
    for raw_name, scale in pairs:
        item_name = matching(name, raw_name, "[^,:]{1,128}", "NAME or NAME:SCALE, or several separated by commas")
        if item_name in by_name:
            raise InvalidParameter(
                f"{name} has {printable(item_name)} twice: send it once, with the sum of scales", name
            )
        by_name[item_name] = item_name if scale is None else f"{item_name}:{number(name, scale, low, high)!r}"
    if not 1 <= len(by_name) <= MAX_SCALED_NAMES:
        raise InvalidParameter(f"{name} must be 1 to {MAX_SCALED_NAMES} names", name)
    return ",".join(by_name.values())


def split_scaled(text: str) -> list[tuple[str, float | None]]:
    """Return the names in the output of `parse_scaled`, each with its scale or None."""
    return [(name, float(scale) if scale else None) for name, _, scale in _split_names(text)]


def _split_names(text: str) -> list[tuple[str, str, str]]:
    """Split `a:0.5,b` into (name, colon, scale) parts."""
    return [part.partition(":") for part in text.split(",")]


def printable(value: object) -> str:
    """Return any value as short, printable text for an error message."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "…")
    if isinstance(value, bytes):
        return "a file"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    # str() raises ValueError for integers of more than 4300 digits
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def default_of(params: Params, name: str) -> float:
    """Return the model's default for a number. Raises ConfigError if it has none."""
    value = params.get(name)
    if not isinstance(value, int | float):
        raise ConfigError(f"the model has no default {name}: set one in its serving.json")
    return value


MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""The range of seeds that torch's `manual_seed` accepts. It takes negative seeds modulo 2**64: -1 is 2**64 - 1."""

RANDOM_SEED = -1
"""A client sends this seed to get a random seed."""

MIN_S, MAX_S = 0.001, 86_400  # bounds of a duration that a client may send, in seconds

DELIVERY_PARAMETERS = (
    Parameter("model", "any", use="request", description="name of the model; by default the server's first model"),
    Parameter("priority", "integer", -100, 100, use="delivery", description="requests of a higher priority run first"),
    Parameter("timeout", "number", MIN_S, MAX_S, use="delivery", description="seconds from acceptance to the deadline"),
    Parameter("metadata", "texts", use="delivery", description="strings that are returned with the request"),
    Parameter("cache", "flag", use="delivery", description="false: reuse no outputs or results of other requests"),
    Parameter(
        "webhook",
        "text",
        1,
        2048,
        use="delivery",
        flag=None,
        description="URL of a signed call when the request is completed, failed or cancelled",
    ),
)
"""Parameters of every modality: the model, and how the request is handled."""


PIXELS = ("width", "height", "num_frames")  # the parameters whose product is the size of a picture or video, in pixels
Work = tuple[float, float]  # number of forwards of a stage's network, and the size of each (see `Workload`)


class OutputSize(msgspec.Struct, frozen=True):
    """A formula for the bytes of a stage's output.

    It is `fixed` + `per_unit` × the product of the parameters in `size`.
    """

    #: Bytes that do not depend on the parameters.
    fixed: int = 0
    #: Bytes for each unit of the product, such as a pixel.
    per_unit: float = 0.0
    #: The last parameter in `size` counts groups: n frames are 1 + (n − 1) // group groups.
    group: int = 1
    #: Names of the parameters that are multiplied.
    size: tuple[str, ...] = PIXELS

    def bytes(self, params: Params) -> int:
        """Return the predicted bytes for a request with these parameters."""
        counts = [_count(params, name) for name in self.size]
        groups = [1 + (count - 1) // self.group for count in counts[-1:]]
        return self.fixed + round(self.per_unit * math.prod(counts[:-1] + groups))


class Workload(msgspec.Struct, frozen=True):
    """A formula for the work of a stage: the number of forwards, and their size."""

    #: Name of the parameter that counts the steps, one forward each; "": there is one forward.
    forwards: str = ""
    #: Names of guidance scales. The first one that the request has counts. Guidance doubles the forwards if that scale
    #: is above 1 and the request has a negative prompt.
    guidance: tuple[str, ...] = ()
    #: Names of the parameters whose product is the size of a forward.
    size: tuple[str, ...] = PIXELS
    #: Name of a parameter with the share of the steps that is computed, such as `strength`. A request without it
    #: computes all steps.
    part: str = ""

    def of(self, params: Params) -> Work:
        """Return the number of forwards and the size of each, for these parameters."""
        scale = next((params[name] for name in self.guidance if name in params), None)
        guided = isinstance(scale, int | float) and scale > 1 and params.get("negative_prompt") is not None

        steps = _count(params, self.forwards) if self.forwards else 1
        part = params.get(self.part)
        computed_steps = steps * (part if isinstance(part, float) else 1.0)
        return computed_steps * (1.0 + guided), float(math.prod(_count(params, name) for name in self.size))


def nth_seed(seed: int, index: int) -> int:
    """Return the seed of result `index`: consecutive integers, with 0 after the largest seed.

    Instead of RANDOM_SEED it returns the largest seed. torch treats both alike, and a client can send the latter again.
    """
    result_seed = (seed + index) % 2**64 if seed + index > MAX_SEED else seed + index
    return MAX_SEED if result_seed == RANDOM_SEED else result_seed


def _count(params: Params, name: str) -> int:
    """Return a parameter that is a positive whole number; 1 for any other value."""
    value = params.get(name)
    return value if isinstance(value, int) and value > 0 else 1


class Modality(msgspec.Struct, frozen=True):
    """A kind of result (image, video or text): its table of parameters, and its limits."""

    #: Name of the modality: image, video or text.
    name: str
    #: Word for several results.
    plural: str
    #: Beginning of the ids of its requests.
    prefix: str
    #: Name of a limit. A model generates this modality if the limit is at least `min_limit`.
    limit_name: str
    #: Least value of that limit. A video has at least 2 frames.
    min_limit: int
    #: Type of the model's limits.
    limits: type[msgspec.Struct]
    #: `complete_params(limits, params, values, tokens)` returns further parameters for the stages, or raises
    #: InvalidParameter. Its arguments are the model's limits, the stages' parameters so far, the client's checked
    #: values, and, for text only, the chat's PromptTokens.
    complete_params: Callable[[Any, Params, Mapping[str, Any], Any], Params]
    #: All fields that a client may send.
    parameters: tuple[Parameter, ...]
    #: Parameters that tasks must have in common to share a forward, since they decide the shapes of tensors.
    size: tuple[str, ...] = PIXELS

    def is_supported_by(self, limits: Mapping[str, float]) -> bool:
        """Whether a model with these limits generates this modality."""
        return limits.get(self.limit_name, 0) >= self.min_limit

    def limits_of(self, limits: Mapping[str, float]) -> Any:
        """Return a model's limits as this modality's type, with defaults. Raises ConfigError for invalid limits."""
        try:
            return msgspec.convert(limits, self.limits)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the model's limits are not valid: {error}") from error

    def allows(self, name: str, value: object) -> bool:
        """Whether the table has this parameter, and allows this value for some model."""
        candidates = (parameter for parameter in self.parameters if parameter.name == name)
        return any(not parameter.choices or value in parameter.choices for parameter in candidates)

    def parameters_for(self, defaults: Params) -> dict[str, Parameter]:
        """Return the parameters that exist for a model with these defaults, by name."""
        return {
            parameter.name: parameter
            for parameter in self.parameters
            if not parameter.by_model or parameter.name in defaults
        }
