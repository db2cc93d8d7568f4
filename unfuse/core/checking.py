"""What a client asks for, checked against its medium's table and the model's card before anything is queued."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from typing import Literal

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.errors import InvalidParameter
from unfuse.core.media import IMAGE, MAX_SEED, Medium
from unfuse.core.nearest import nearest
from unfuse.core.parameters import Parameter, Params, integer, shown, text

DRAWN_SEEDS = 2**31
"""A seed that was left out is drawn below this, short enough to type again."""


class Delivery(msgspec.Struct, frozen=True):
    """What a client may ask about a request rather than about the picture. `timeout` is seconds (None: no limit).

    Without `cache` nothing that another request has encoded is used for it, nor the other way round.
    """

    response_format: Literal["b64_json", "url"] = "b64_json"
    stream: bool = False
    priority: int = 0
    timeout: float | None = None
    metadata: dict[str, str] = {}
    cache: bool = True


def check(
    card: ModelCard, given: Mapping[str, object], medium: Medium = IMAGE, *, strict: bool = False
) -> tuple[Params, int]:
    """Everything the stages need for a request, and how many pictures it asks for.

    What the client left out, or gave as null, comes from the card's defaults; a missing seed is drawn. The pictures
    have the seeds s … s + n − 1. Raises InvalidParameter, also for a field that nobody knows, and if `strict` for a
    quality that means nothing to the model.
    """
    values = {name: value for name, value in given.items() if value is not None}
    known = medium.known(card.defaults)
    for name in values:
        if name not in known:
            raise _unknown(name, known)
    for one in medium.parameters:
        if one.required and one.name not in values:
            raise InvalidParameter(f"{one.name} is missing: say {one.says}", one.name)
    limits = medium.limits_of(card.limits)
    read = {name: known[name].read(value, limits) for name, value in values.items()}
    usual = [one for one in medium.parameters if one.use == "stages" and one.default is not None]
    params: Params = {one.name: one.default for one in usual}
    params |= {**card.defaults, **_quality(card, read.get("quality", "auto"), strict)}
    params |= {name: value for name, value in read.items() if known[name].use == "stages"}
    params |= _adapter(params)
    params |= medium.settle(limits, params, read)
    n = read.get("n", 1) if "n" in known and known["n"].use == "request" else 1
    if "seed" in read:
        params["seed"] = integer("seed", read["seed"], 0, MAX_SEED - n + 1)
    else:
        params["seed"] = secrets.randbelow(DRAWN_SEEDS - n + 1)
    return params, n


def check_delivery(given: Mapping[str, object], medium: Medium = IMAGE) -> Delivery:
    """How the client wants the request handled. Raises InvalidParameter."""
    asked = [one for one in medium.parameters if one.use == "delivery" and given.get(one.name) is not None]
    return Delivery(**{one.name: one.read(given[one.name], None) for one in asked})


def check_bounds(given: Mapping[str, object], medium: Medium) -> None:
    """Raise InvalidParameter for a value that no model takes; what depends on the model is not looked at."""
    for one in medium.parameters:
        value = given.get(one.name)
        if value is not None and one.fixed:
            one.read(value, None)
        elif value is not None and one.kind == "text":
            text(one.name, value, 0, sys.maxsize)


def _unknown(name: str, known: Mapping[str, Parameter]) -> InvalidParameter:
    if name == "feature_cache":
        return InvalidParameter("feature_cache skips work and is not exact: serve with --batching batched", name)
    meant = (one.name for one in known.values() if name in one.also)
    near = next(meant, None) or nearest(name, sorted(known), 0.4)
    hint = f"did you mean {near}?" if near else f"the parameters are {', '.join(sorted(known))}"
    return InvalidParameter(f"unknown parameter {shown(name)}: {hint}", shown(name)[1:-1])


def _quality(card: ModelCard, name: str, strict: bool) -> Params:
    """What a quality stands for, and its name if it does for anything."""
    if name in card.quality:
        return {**card.quality[name], "quality": name}
    if strict and name != "auto":
        known = ", ".join(["auto", *card.quality])
        raise InvalidParameter(f"quality {name} means nothing to model {card.name}: send one of {known}", "quality")
    return {}


def _adapter(params: Params) -> Params:
    """How strong an adapter is unless the client says so."""
    if "lora_scale" in params and "lora" not in params:
        raise InvalidParameter("lora_scale says how strong a lora is: send the name of one as lora too", "lora_scale")
    return {"lora_scale": params.get("lora_scale", 1.0)} if "lora" in params else {}
