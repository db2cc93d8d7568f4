"""What is checked before any worker starts: optional libraries, and the request that workers are started for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unfuse.core.checking import check
from unfuse.core.errors import InvalidParameter, NotFound, Unsuitable
from unfuse.core.media import IMAGE, UPLOADS, VIDEO
from unfuse.service.plan import Plan
from unfuse.weights.adapters import Loras, require_peft
from unfuse.weights.gguf_model import files_of
from unfuse.weights.quantised import library


def require_libraries(plan: Plan, loras: str) -> None:
    """Raise ConfigError, with what to install, for an optional library that the workers of this plan would miss.

    `loras` is the folder of adapters ("": none). They are loaded by the roles whose stages have many forwards.
    """
    if not plan.workers:
        return
    adapts = any(plan.wanted.goes_first(worker.role) for worker in plan.workers)
    if loras and adapts and any(model.card.takes_lora for model in plan.models):
        require_peft()
    for model in plan.models:
        files = files_of(model.folder)
        library(files.quantisation(component) for component in model.components)


def check_request(plan: Plan, asked: Mapping[str, Any], loras: str) -> None:
    """Check the parameters and adapters of a request for the only model of a plan, as a gateway would.

    `asked` are the arguments of `Client.submit`. Raises InvalidParameter. What only a gateway can tell is left to it.
    """
    card, medium = plan.models[0].card, VIDEO if asked.get("video") else IMAGE
    if not medium.made_by(card.limits):
        return
    fields = {name: value for name, value in asked.items() if name not in (*UPLOADS, "video")}
    params, _ = check(card, fields, medium, uploads=[name for name in UPLOADS if name in asked])
    if "lora" not in params:
        return
    if not card.takes_lora:
        raise InvalidParameter(f"model {card.name} takes no lora: leave it out", "lora")
    if not loras:
        raise InvalidParameter(
            "--lora names a file in a folder of adapters: give that folder by --loras FOLDER", "lora"
        )
    try:
        Loras(loras).check(str(params["lora"]))
    except (NotFound, Unsuitable) as error:
        raise InvalidParameter(str(error), "lora") from error
