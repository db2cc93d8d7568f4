"""The application: the routes of all resources, and the layers around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from fastapi_offline import FastAPIOffline

from unfuse import __version__
from unfuse.core.plan import Params
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server import chat, dead, health, images, models, requests, videos, workers
from unfuse.server.access import Access, Guard
from unfuse.server.answers import EVENT
from unfuse.server.auth import KEYED, Lasting, caller_of
from unfuse.server.body import Reading
from unfuse.server.errors import DOCUMENTED, Edge, install
from unfuse.server.fetching import Fetching
from unfuse.server.gateway import Gateway
from unfuse.server.joining import Joining
from unfuse.server.keys import Keys
from unfuse.server.prices import FREE, Prices
from unfuse.server.throttle import Throttle
from unfuse.server.webhooks import Webhooks
from unfuse.stores.results import ResultStore


def create_app(
    scheduler: Scheduler,
    results: ResultStore,
    *,
    keys: Keys | None = None,
    names: Mapping[str, str] | None = None,
    standard: Params | None = None,
    loras: str = "",
    strict: bool = False,
    time_limits: Mapping[str, float] | None = None,
    store: str = "shared_memory",
    access: Access | None = None,
    cancels: bool = False,
    reuses: bool = False,
    webhooks: Webhooks | None = None,
    prices: Prices = FREE,
    fetching: Fetching | None = None,
    joining: Joining | None = None,
) -> FastAPI:
    """The gateway of one scheduler, whose life is the caller's.

    Without `keys`, every caller is the tenant `default`. `names` maps the names that clients use to the names of models
    that go by another one here; `standard` goes before the models' defaults; `loras` is the folder of adapters, if any;
    a `strict` gateway refuses fields that it would have to ignore. `time_limits` are seconds that a request's stages
    may run, by medium; 0 or none: any number. `store` is the kind of place where workers keep outputs; `joining` adds
    models. Without keys, `access` says from where it may be used: from this machine alone. A gateway that `cancels`
    ends requests whose callers waited and are all gone; one that `reuses` gives results again. Without `webhooks`
    nobody is told of the ends of requests; without `prices` they cost no money; without `fetching` none is fetched.
    """
    app = FastAPIOffline(redoc_url=None, title="unfuse", version=__version__, responses=DOCUMENTED)
    own_keys, own_names = keys or Keys(), dict(names or {})
    app.state.gateway = Gateway(
        scheduler,
        results,
        own_keys,
        own_names,
        standard,
        loras,
        strict,
        time_limits,
        store,
        cancels,
        reuses,
        webhooks,
        prices,
        fetching,
        joining,
    )
    app.state.reading = Reading()
    guards = [Depends(caller_of), *([Depends(KEYED)] if keys else [])]
    for resource in (images, videos, chat, requests, dead, models, workers):
        app.include_router(resource.router, prefix="/v1", dependencies=guards)
    app.include_router(health.router)
    install(app)
    app.add_middleware(Lasting, keys=own_keys)
    app.add_middleware(Guard, access=access or Access(), keyed=bool(keys))
    app.add_middleware(Throttle)
    app.add_middleware(Edge)
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]  # it is said to be done so
    return app


def _described(made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What /openapi.json says: made when it is first asked for, and kept, since a start need not wait for it."""
    schema = made()
    schema.setdefault("components", {}).setdefault("schemas", {})["Event"] = EVENT
    return schema
