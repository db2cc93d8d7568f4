"""Routes for models: which are served, and what they can be asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from anyio import to_thread
from fastapi import APIRouter, Depends
from starlette.requests import Request

from unfuse.core.card import ModelCard
from unfuse.core.errors import ConfigError, InvalidParameter, UnknownModel
from unfuse.core.media import TEXT, VIDEO
from unfuse.scheduler.registry import Registry
from unfuse.server.answers import MODEL, REMOVED, one, several
from unfuse.server.auth import Known, admin_only
from unfuse.server.body import read_json
from unfuse.server.errors import Refusal
from unfuse.server.fields import ADD, MAX_NAME
from unfuse.server.gateway import Gateway, Served

router = APIRouter(prefix="/models", tags=["models"])


@router.get("", responses=several(MODEL, paged=False))
async def page(gateway: Served, caller: Known) -> dict[str, object]:
    """Every served model that the caller may ask for, in the order in which the server was given them."""
    loras, registry = await _loras(gateway), gateway.scheduler.registry
    missing, served = await registry.missing(), await gateway.models(caller.models)
    return {"object": "list", "data": [_model(name, card, loras, missing, registry) for name, card in served.items()]}


@router.post("", status_code=202, openapi_extra=ADD, responses=one(MODEL, 202), dependencies=[Depends(admin_only)])
async def add(request: Request, gateway: Served, caller: Known) -> dict[str, object]:
    """Serve a folder of this machine or a hub name too. It is accepted at once, and loads until its state is ready."""
    given = await read_json(request)
    name = str(given.get("model"))
    if given != {"model": name} or not name.isprintable() or not 0 < len(name) <= MAX_NAME or name[0] in "-~":
        raise InvalidParameter("send only model, a folder of the server's machine or a hub name such as a/b", "model")
    if not caller.may_use(name):
        raise Refusal(403, "not_yours", f"this key may not use a model {name!r}: its line says models=", "model")
    try:
        await gateway.joining.add(own := gateway.own(name))
    except (ConfigError, OSError) as error:
        raise InvalidParameter(str(error), "model") from error
    served = await gateway.models()
    return await show(next((public for public, card in served.items() if card.name == own), name), gateway, caller)


@router.delete("/{name:path}", responses=REMOVED, dependencies=[Depends(admin_only)])
async def remove(name: str, gateway: Served, caller: Known) -> dict[str, object]:
    """Accept no more requests for a model. Its workers end when those that are accepted are over."""
    await show(name, gateway, caller)
    await gateway.scheduler.registry.dismiss(gateway.own(name))
    return {"id": name, "object": "model", "deleted": True}


@router.get("/{name:path}", responses=one(MODEL))
async def show(name: str, gateway: Served, caller: Known) -> dict[str, object]:
    """One served model; its name may hold slashes."""
    served = await gateway.models(caller.models)
    if name not in served:
        why = gateway.joining.refused.get(name) if caller.admin else None
        others = f"it was added, and {why}" if why else f"one of {', '.join(sorted(served))}"
        raise UnknownModel(f"no model {name[:80]!r} is served: {others}", "model")
    registry = gateway.scheduler.registry
    return _model(name, served[name], await _loras(gateway), await registry.missing(), registry)


def _reads(card: ModelCard) -> list[str]:
    """Return the input modalities of a model: text, and image or video if it accepts them."""
    if card.vision:
        return ["text", "image", "video"]
    return ["text", "image"] if card.most_pictures else ["text"]


async def _loras(gateway: Gateway) -> list[str]:
    return [*await to_thread.run_sync(gateway.loras.files)] if gateway.loras else []


def _model(
    name: str, card: ModelCard, loras: list[str], missing: Mapping[str, list[str]], registry: Registry
) -> dict[str, object]:
    changed = registry.changed_file(*missing.get(card.name, ()))
    state = "loading" if card.name in missing else "ready"
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "unfuse",
        "root": PurePath(card.name).name if card.name.startswith("/") else card.name,
        "max_model_len": int(card.limits["max_tokens"]) if TEXT.made_by(card.limits) else None,
        "input_modalities": _reads(card),
        "makes_video": VIDEO.made_by(card.limits),
        "takes_image": card.takes_image,
        "starts_from": card.starts,
        "references": card.references,
        "last_frame": card.last_frame,
        "loras": loras if card.takes_lora else [],
        "limits": card.limits,
        "defaults": card.defaults,
        "quality": card.quality,
        "stages": card.pools(),
        "state": "unavailable" if changed else state,
        "reason": str(changed) if changed else None,
    }
