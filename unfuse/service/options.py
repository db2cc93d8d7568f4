"""Turns settings into the options of a service."""

from __future__ import annotations

from pathlib import Path
from socket import gethostname

from unfuse.core.errors import UsageError
from unfuse.core.messages import Places
from unfuse.core.plan import Params
from unfuse.edge.access import Access
from unfuse.edge.connections import ConnectionLimits
from unfuse.edge.keys import Keys
from unfuse.launch import opener
from unfuse.planning.placement import NONE
from unfuse.queues.base import Limits
from unfuse.server.links import parse_public_url
from unfuse.server.parsers import Parsers
from unfuse.server.prices import Prices
from unfuse.service.addresses import listens, trust
from unfuse.service.groups import Settings
from unfuse.service.plan import wanted
from unfuse.service.resources import COSTS, counts, device_memory, means, resources
from unfuse.service.service import ServeOptions
from unfuse.service.settings import Loaded
from unfuse.service.specs import WorkerSlots, environment_of, flags_of
from unfuse.service.transfers import require_engines
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.worker.checkpoints import Policy


def options(loaded: Loaded) -> ServeOptions:
    """Return the options of a service for these settings. Fingerprints of weights are cached in the data folder."""
    settings, serve = loaded.settings, loaded.settings.serve
    FINGERPRINTS.remember_in(Path(settings.data_dir))
    found = ServeOptions(
        serve=serve,
        keys=Keys((*serve.api_key, *filter(None, [settings.api_key])), serve.api_keys),
        public_url=parse_public_url(serve.public_url),
        access=Access(serve.allowed_hosts, serve.allowed_origins, serve.trusted_proxies),
        bounds=ConnectionLimits(serve.max_connections, serve.max_connections_per_address),
        prices=Prices(serve.price),
        queue=serve.queue.replace("DATA_DIR", settings.data_dir),
        queue_wait=serve.queue_wait,
        places=places(settings),
        run_dir=settings.run_dir,
        listen=listens(settings),
        launcher=opener(serve.launcher),
        trust=trust(settings, "scheduler"),
        worker_environment=environment_of(settings),
        worker_flags=flags_of(settings),
        workers=wanted(settings),
        device_memory=device_memory(settings),
        means=means(settings),
        slots=WorkerSlots.of(settings),
        asleep=counts("--asleep", serve.asleep, "ROLE=N, like denoiser=2"),
        resources=resources(settings),
        limits=Limits(serve.max_active, serve.max_queue, serve.max_cost or None),
        encoder_cache=serve.encoder_cache if "shared_memory" in serve.store or "auto" in serve.store else 0,
        costs=Path(settings.data_dir, COSTS),
        lease_ttl=settings.lease.ttl_s,
        standard=standard(settings),
        parsers=Parsers.chosen(serve.tool_call_parser, serve.reasoning_parser),
        name=f"{gethostname()}:{serve.port}:{Path(settings.data_dir).absolute()}",
    )
    if found.trust is not None and serve.workers != NONE and found.launcher is None:
        require_engines(settings.transfer.engine)
    return found


def standard(settings: Settings) -> Params:
    """Default parameters of requests. Raises ConfigError for those that exact pools cannot use."""
    threshold = settings.serve.feature_cache
    if threshold and settings.compute.parallel:
        raise UsageError(
            f"--feature-cache {threshold:g} cannot be used with --parallel {settings.compute.parallel}: leave one out"
        )
    if settings.compute.batching == "batched":
        return {"feature_cache": threshold}
    if threshold:
        raise UsageError(f"--feature-cache {threshold:g} skips work and is not exact: add --batching batched")
    return {}


def places(settings: Settings) -> Places:
    """Where these settings have workers keep things; DATA_DIR stands for the data folder. Raises ConfigError."""
    serve = settings.serve
    Policy.parse(serve.checkpoint)
    if serve.store == "memory":
        raise UsageError("the store memory lies within one process, and workers are several: use shared_memory")
    results, store, durable = (
        url.replace("DATA_DIR", settings.data_dir) for url in (serve.results, serve.store, serve.durable)
    )
    encodings = dict(entry.partition("=")[::2] for entry in serve.encode)
    if wrong := set(encodings.values()) - {"bf16", "fp16", "int4"}:
        raise UsageError(
            f"--encode {min(wrong) or serve.encode[0]}: write KIND=bf16, KIND=fp16 or KIND=int4, like denoise=bf16"
        )
    if serve.loras and not Path(serve.loras).is_dir():
        raise UsageError(f"--loras {serve.loras}: there is no such folder")
    loras, spill = str(Path(serve.loras).resolve()) if serve.loras else "", settings.spill
    return Places(
        results, store, spill.threshold, spill.capacity, durable, serve.durable_stages, encodings,
        serve.checkpoint, loras,
    )  # fmt: skip
