"""Requests as a scheduler is asked for them, by the fields that matter."""

from collections.abc import Sequence
from typing import Any

from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params
from unfuse.core.request import Caller, Delivery, GenerationRequest


def asking(
    card: ModelSpec, params: Params, *, prefixes: Sequence[str] = (), **fields: Any
) -> tuple[ModelSpec, GenerationRequest, Caller, Delivery, Sequence[str]]:
    """The arguments of `Scheduler.submit`: each field where it belongs."""
    request, caller, delivery = (
        {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields}
        for kind in (GenerationRequest, Caller, Delivery)
    )
    if fields:
        raise TypeError(f"unknown request fields: {', '.join(fields)}")
    what = GenerationRequest(**{"id": "", "model": card.name, "params": params, **request})
    return card, what, Caller(**caller), Delivery(**delivery), prefixes
