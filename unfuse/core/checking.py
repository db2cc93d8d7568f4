"""Checks what a client asks for against the medium's table and the model's card, before anything is queued."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.errors import InvalidParameter
from unfuse.core.hints import hint_for
from unfuse.core.media import IMAGE, LAST_FRAME, Limits, Medium, asks_size, size_like
from unfuse.core.medium import RANDOM_SEED
from unfuse.core.parameters import Parameter, Params, default_of, printable, text
from unfuse.core.request import Delivery
from unfuse.core.words import PromptTokens

DRAWN_SEEDS = 2**31  # a seed that the client left out is drawn below this number, so that it is short enough to type
NOTHING = (0, "", "auto")  # values that ask for nothing: a model that lacks their parameter may be given them


def check(
    card: ModelCard, given: Mapping[str, object], medium: Medium = IMAGE, *, strict: bool = False,
    uploads: Collection[str] = (), files: Collection[str] = (), tokens: PromptTokens | None = None,
) -> tuple[Params, int]:  # fmt: skip
    """Check the fields that a client sent. Returns the parameters for the stages and the number of results, n.

    A field that the client left out, or sent as null, gets the card's default. A missing seed, and -1, is replaced by
    a random one. The results have the seeds s … s + n − 1 (see `nth_seed`). `uploads` names the request's uploads,
    `files` the fields that may hold them. A chat needs `tokens`, which a tokenizer made of its fields. Raises
    InvalidParameter for a bad value, an unknown field, and, if `strict`, a field without effect.
    """
    values = {name: value for name, value in given.items() if value is not None}
    known, lacks = medium.known(card.defaults), {one.name for one in card.accepts if not one.max}
    for name in values:
        if name not in known:
            raise _unknown(name, known, files)
        if known[name].use == "refused":
            raise InvalidParameter(f"{name} {known[name].description}", name)
        if strict and known[name].use == "unused":
            raise InvalidParameter(f"{name} has no effect here: leave it out", name)
        if name in lacks and values[name] not in NOTHING:
            raise InvalidParameter(f"model {card.name} takes no {name}: leave it out", name)
    for one in medium.parameters:
        if one.required and one.name not in values:
            raise InvalidParameter(f"{one.name} is missing: say {one.description}", one.name)
    limits = medium.limits_of(card.limits)
    read = {name: known[name].read(value, limits) for name, value in values.items()}
    usual = [one for one in medium.parameters if one.use == "stages" and one.default is not None]
    params: Params = {one.name: one.default for one in usual}
    params |= {**card.defaults, **_quality(card, read.get("quality", "auto"), strict)}
    params |= {name: value for name, value in read.items() if known[name].use == "stages"}
    params |= _adapter(params)
    params |= medium.settle(limits, params, read, tokens)
    params |= _strength(card, read, params, uploads)
    if LAST_FRAME in uploads and default_of(params, "num_frames") < 2:
        raise InvalidParameter("num_frames must be more than 1 where there is a last_frame", "num_frames")
    n = read.get("n", 1) if "n" in known and known["n"].use == "request" else 1
    seed = read.get("seed", RANDOM_SEED)
    params["seed"] = secrets.randbelow(DRAWN_SEEDS - n + 1) if seed == RANDOM_SEED else seed
    return params, n


def check_delivery(given: Mapping[str, object], medium: Medium = IMAGE) -> Delivery:
    """Check the fields that say how the client wants the request handled. Raises InvalidParameter."""
    asked = [one for one in medium.parameters if one.use == "delivery" and given.get(one.name) is not None]
    return Delivery(**{one.name: one.read(given[one.name], None) for one in asked})


def check_bounds(given: Mapping[str, object], medium: Medium) -> None:
    """Raise InvalidParameter for a value that no model accepts. Bounds that differ between models are not checked."""
    for one in medium.parameters:
        value = given.get(one.name)
        if value is not None and one.fixed:
            one.read(value, None)
        elif value is not None and one.kind == "text":
            text(one.name, value, 0, sys.maxsize)


def size_from(card: ModelCard, given: Mapping[str, object], params: Params, picture: tuple[int, int]) -> Params:
    """Return width and height of a result that starts from a picture of this size; empty if the client sets a size.

    The result has the picture's shape and about as many pixels as `params` say. If the pipeline takes no size, its
    number of pixels follows from the picture. Empty too for a model that makes only one size.
    """
    if asks_size(given) or not card.follows_picture:
        return {}
    limits: Limits = IMAGE.limits_of(card.limits)
    area, scale = default_of(params, "width") * default_of(params, "height"), card.picture_scale
    if scale:
        area = picture[0] * picture[1] * scale**2
        limits = msgspec.structs.replace(limits, size_multiple=limits.size_multiple * scale)
    width, height = size_like(limits, area, *picture)
    return {"width": width, "height": height}


def _unknown(name: str, known: Mapping[str, Parameter], files: Collection[str]) -> InvalidParameter:
    if name == "feature_cache":
        return InvalidParameter("feature_cache skips work and is not exact: serve with --batching batched", name)
    useful = {one.name for one in known.values() if one.use not in ("nothing", "unused", "refused")}
    hint = hint_for(name, useful, files) or f"the parameters are {', '.join(sorted({*useful, *files}))}"
    return InvalidParameter(f"unknown parameter {printable(name)}: {hint}", printable(name)[1:-1])


def _quality(card: ModelCard, name: str, strict: bool) -> Params:
    """The parameters that a quality stands for, and its name; nothing for one that the card does not define."""
    if name in card.quality:
        return {**card.quality[name], "quality": name}
    if strict and name != "auto":
        known = ", ".join(["auto", *card.quality])
        raise InvalidParameter(f"quality {name} means nothing to model {card.name}: send one of {known}", "quality")
    return {}


def _adapter(params: Params) -> Params:
    """The strength of the adapter: 1 unless the client says otherwise; nothing without an adapter."""
    if "lora_scale" in params and "lora" not in params:
        raise InvalidParameter("lora_scale says how strong a lora is: send the name of one as lora too", "lora_scale")
    return {"lora_scale": params.get("lora_scale", 1.0)} if "lora" in params else {}


def _strength(card: ModelCard, read: Mapping[str, Any], params: Params, uploads: Collection[str]) -> Params:
    """How far a picture is redrawn, which takes a step at least; nothing where none is."""
    strengths = card.strengths
    if not strengths or "image" not in uploads:
        if "strength" in read:
            how = f"model {card.name} takes no strength: leave it out"
            missing = "strength says how far a picture is redrawn: send it as image to /v1/images/edits"
            raise InvalidParameter(missing if strengths else how, "strength")
        return dict.fromkeys(params.keys() & {"strength"})
    usual = params.get("strength") or strengths["mask" if "mask" in uploads else "image"]
    strength, steps = float(read.get("strength", usual)), default_of(params, "num_inference_steps")
    if strength * steps < 1:
        raise InvalidParameter(f"strength {strength:g} of {steps:g} steps is less than one step: send more", "strength")
    return {"strength": strength}
