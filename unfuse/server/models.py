"""Routes for models: which are served, and what they can be asked for."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends

from unfuse.core.card import ModelCard
from unfuse.core.errors import UnknownModel
from unfuse.core.media import VIDEO
from unfuse.server.answers import MODEL, one, several
from unfuse.server.auth import Known
from unfuse.server.gateway import Gateway, gateway_of

router = APIRouter(prefix="/models", tags=["models"])
Served = Annotated[Gateway, Depends(gateway_of)]


@router.get("", responses=several(MODEL, paged=False))
async def page(gateway: Served, caller: Known) -> dict[str, object]:
    """Every served model that the caller may ask for."""
    loras = await _loras(gateway)
    served = sorted((await gateway.models(caller.models)).items())
    return {"object": "list", "data": [_model(name, card, loras) for name, card in served]}


@router.get("/{name:path}", responses=one(MODEL))
async def show(name: str, gateway: Served, caller: Known) -> dict[str, object]:
    """One served model; its name may hold slashes."""
    served = await gateway.models(caller.models)
    if name not in served:
        raise UnknownModel(f"no model {name[:80]!r} is served: one of {', '.join(sorted(served))}", "model")
    return _model(name, served[name], await _loras(gateway))


async def _loras(gateway: Gateway) -> list[str]:
    return [*await to_thread.run_sync(gateway.loras.files)] if gateway.loras else []


def _model(name: str, card: ModelCard, loras: list[str]) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "unfuse",
        "makes_video": VIDEO.made_by(card.limits),
        "takes_image": card.takes_image,
        "starts_from": card.starts,
        "loras": loras if card.takes_lora else [],
        "limits": card.limits,
        "defaults": card.defaults,
        "quality": card.quality,
        "stages": card.pools(),
    }
