"""Requests as a scheduler is asked for them, by the fields that matter."""

from typing import Any

from unfuse.core.card import ModelCard
from unfuse.core.checking import Delivery
from unfuse.core.plan import Params
from unfuse.core.request import Asked, Who


def asking(card: ModelCard, params: Params, **fields: Any) -> tuple[Asked, Delivery, Who]:
    """What is asked for, how it is delivered, who asks: each field where it belongs."""
    kinds = (Asked, Delivery, Who)
    asked, delivery, who = (
        {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields} for kind in kinds
    )
    if fields:
        raise TypeError(f"no field of a request: {', '.join(fields)}")
    return Asked(card, params, **asked), Delivery(**delivery), Who(**who)
