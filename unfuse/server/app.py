"""The application: the routes of all resources, and the layers around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from fastapi_offline import FastAPIOffline

from unfuse import __version__
from unfuse.edge.access import Access, Guard
from unfuse.edge.throttle import Throttle
from unfuse.server import chat, dead, health, images, models, requests, videos, workers
from unfuse.server.answers import EVENT
from unfuse.server.auth import KEYED, Lasting, caller_of
from unfuse.server.body import BodyBudget
from unfuse.server.errors import DOCUMENTED, Edge, install
from unfuse.server.gateway import Gateway
from unfuse.server.methods import Methods


def create_app(gateway: Gateway, access: Access | None = None) -> FastAPI:
    """The application of a gateway. Without keys, `access` says from where it may be used: from this machine alone."""
    app = FastAPIOffline(redoc_url=None, title="unfuse", version=__version__, responses=DOCUMENTED)
    app.state.gateway, app.state.reading = gateway, BodyBudget()
    keyed = bool(gateway.keys)
    guards = [Depends(caller_of), *([Depends(KEYED)] if keyed else [])]
    for resource in (images, videos, chat, requests, dead, models, workers):
        app.include_router(resource.router, prefix="/v1", dependencies=guards)
    app.include_router(health.router)
    install(app)
    app.add_middleware(Methods)
    app.add_middleware(Lasting, keys=gateway.keys)
    app.add_middleware(Guard, access=access or Access(), keyed=keyed)
    app.add_middleware(Throttle)
    app.add_middleware(Edge)
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]  # it is said to be done so
    return app


def _described(made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What /openapi.json says: made when it is first asked for, and kept, since a start need not wait for it."""
    schema = made()
    schema.setdefault("components", {}).setdefault("schemas", {})["Event"] = EVENT
    return schema
