"""Routes for models: list them with their limits, add and remove them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from anyio import to_thread
from fastapi import APIRouter, Depends
from starlette.requests import Request

from unfuse.core.errors import ConfigError, InvalidParameter, UnknownModel
from unfuse.core.modalities import LAST_FRAME, TEXT, UPLOAD, VIDEO
from unfuse.core.model_spec import MAX_NAME, ModelSpec, is_name, name_of, without_source
from unfuse.core.plan import readable_pool
from unfuse.edge.access import ApiError
from unfuse.server.auth import CallerDep, Principal, admin_only
from unfuse.server.body import read_json
from unfuse.server.gateway import Gateway, GatewayDep
from unfuse.server.openapi_schemas import ADD, MAX_SOURCE, MODEL, REMOVED, list_response, object_response
from unfuse.server.route_parameters import ModelName

router = APIRouter(prefix="/models", tags=["models"])


@router.get("", responses=list_response(MODEL, paged=False))
async def page(gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """Every served model that the caller may use.

    They are in the order in which the server was given them. Requests without a model go to the one that is marked as
    default. An admin also gets those that were added and cannot be served.
    """
    views = await ModelViews.snapshot(gateway, caller)
    failed = gateway.failed_models(caller.models) if caller.admin else {}
    return {"object": "list", "data": [*map(views.served, views.cards), *map(views.failed, failed)]}


@router.post(
    "", status_code=202, openapi_extra=ADD, responses=object_response(MODEL, 202), dependencies=[Depends(admin_only)]
)
async def add(request: Request, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """Serve another model, from a folder of the server's machine or from the hub.

    You may choose its name. The response does not wait until the model has loaded: then its `state` is `ready`. Before,
    `progress` shows how much is loaded. If the model cannot be served, `state` is `failed`, and `reason` has the cause.
    """
    source, name = _parse_addition(await read_json(request))
    if not caller.may_use(name):
        raise ApiError(
            403,
            "not_yours",
            f"this API key may not use a model {name!r}: the key has a models= list without it",
            "model",
        )

    names = gateway.names
    if name in await gateway.models() or (names.is_configured(name) and source != name):
        raise ApiError(409, "model_exists", f"a model {name!r} is served already: send another name", "name")
    if names.is_configured(name):  # a configured model that was removed: its internal name is its source
        source = name = names.internal_name(name)

    names.release(name)
    try:
        await gateway.joining.add(name, source)
    except ConfigError as error:
        raise InvalidParameter(without_source(str(error), source, name), "model") from error
    except OSError as error:
        raise InvalidParameter(f"model {name!r} cannot be inspected: {error.strerror or error}", "model") from error
    return await show(names.public_name(name), gateway, caller)


@router.delete("/{name:path}", responses=REMOVED, dependencies=[Depends(admin_only)])
async def remove(name: ModelName, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """Stop accepting requests for a model.

    Its workers stop when its accepted requests have ended.
    """
    model = await show(name, gateway, caller)
    registry = gateway.scheduler.registry
    internal_name = gateway.names.internal_name(str(model["id"]))
    await (registry.withdraw(internal_name) if model["state"] == "failed" else registry.dismiss(internal_name))
    return {"id": model["id"], "object": "model", "deleted": True}


@router.get("/{name:path}", responses=object_response(MODEL))
async def show(name: ModelName, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """One served model, or one that was added and cannot be served.

    Its name may contain slashes.
    """
    views = await ModelViews.snapshot(gateway, caller)
    public_name = gateway.names.resolve(name)
    if public_name in views.cards:
        return views.served(public_name)
    if public_name in gateway.failed_models(caller.models):
        return views.failed(public_name)
    raise UnknownModel(f"model {name[:80]!r} is not served: send one of {', '.join(sorted(views.cards))}", "model")


def _parse_addition(fields: Mapping[str, Any]) -> tuple[str, str]:
    """Return the source and the name of the model to add.

    fields: the fields of the body. Raises InvalidParameter.
    """
    source = str(fields.get("model"))
    name = fields.get("name")
    is_source = source.isprintable() and 0 < len(source) <= MAX_SOURCE and source[0] not in "-~"
    if fields.get("model") != source or not is_source or fields.keys() - {"model", "name"}:
        raise InvalidParameter(
            "model must be a folder on the server's machine or a hub name such as a/b; the only other field is name",
            "model",
        )

    if name is None and not is_name(name_of(source)):
        raise InvalidParameter("name is required: the last part of the path in model cannot be a name", "name")
    if name is not None and not (isinstance(name, str) and is_name(name)):
        rule = f"at most {MAX_NAME} letters, digits and . _ - : @ +, with at most one slash, and not a path"
        raise InvalidParameter(f"name must be a name that clients use, such as mine or owner/mine: {rule}", "name")
    return source, name or name_of(source)


@dataclass(frozen=True)
class ModelViews:
    """Builds model objects for one caller, from one snapshot of the models."""

    #: The gateway that serves the models.
    gateway: Gateway
    #: The served models that the caller may use, by public name.
    cards: Mapping[str, ModelSpec]
    #: The pools without a live worker, by the internal name of their model.
    missing: Mapping[str, list[str]]
    #: The names of the LoRA adapters that are served.
    loras: list[str]

    @classmethod
    async def snapshot(cls, gateway: Gateway, caller: Principal) -> ModelViews:
        """Return the views of the models that are served now."""
        loras = [*await to_thread.run_sync(gateway.loras.files)] if gateway.loras else []
        missing = await gateway.scheduler.registry.unavailable_pools()
        return cls(gateway, await gateway.models(caller.models), missing, loras)

    def served(self, name: str) -> dict[str, object]:
        """Return the model object of a served model."""
        spec = self.cards[name]
        gateway = self.gateway
        changed_file = gateway.scheduler.registry.changed_file(*self.missing.get(spec.name, ()))
        is_missing = spec.name in self.missing
        progress = gateway.joining.progress(spec.name) if is_missing and not changed_file else None
        state = "unavailable" if changed_file else "loading" if is_missing else "ready"
        return self._static_fields(name, spec) | {
            "state": state,
            "reason": str(changed_file) if changed_file else None,
            "progress": msgspec.to_builtins(progress),
            "default": name == gateway.default_model(self.cards),
        }

    def failed(self, name: str) -> dict[str, object]:
        """Return the model object of a model that was added and cannot be served."""
        declared = self.gateway.failed_models()[name]
        state = {"state": "failed", "reason": declared.failure, "progress": None, "default": False}
        return self._static_fields(name, declared.models[0]) | state

    def _static_fields(self, name: str, spec: ModelSpec) -> dict[str, object]:
        """Return the fields of a model object that do not depend on the model's state."""
        picture, last_frame = spec.accepted_input(UPLOAD), spec.accepted_input(LAST_FRAME)
        registry = self.gateway.scheduler.registry
        return {
            "id": name,
            "object": "model",
            "created": spec.created,
            "owned_by": "unfuse",
            "root": name_of(spec.source or spec.name).partition("@")[0],
            "max_model_len": int(spec.limits["max_tokens"]) if TEXT.is_supported_by(spec.limits) else None,
            "input_modalities": ["text", *(["image", "video"] if spec.vision else ["image"] if picture.max else [])],
            "makes_video": VIDEO.is_supported_by(spec.limits),
            "takes_image": picture.min > 0,
            "starts_from": spec.strengths,
            "references": picture.max if picture.mode == "reference" else 0,
            "last_frame": "must" if last_frame.min else "may" if last_frame.max else "",
            "loras": self.loras if spec.takes_lora else [],
            "limits": spec.limits,
            "defaults": spec.defaults,
            "quality": spec.quality,
            "stages": {stage: readable_pool(registry.waiting_pool(pool)) for stage, pool in spec.pools().items()},
        }
