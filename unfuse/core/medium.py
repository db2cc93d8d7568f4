"""What a medium is: a kind of result with its parameters and limits, and rules for how much a request takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from unfuse.core.errors import ConfigError
from unfuse.core.parameters import Parameter, Params

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


class Room(msgspec.Struct, frozen=True):
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


class Medium(msgspec.Struct, frozen=True):
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
