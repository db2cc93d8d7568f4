"""Answers a request with the results of an equal one that was made before, where its bytes could be no others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from anyio import to_thread

from unfuse import __version__
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import Damaged, NotFound, TransientError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import RANDOM_SEED
from unfuse.core.plan import Params, cache_key
from unfuse.core.request import Caller, Delivery, GenerationRequest, RequestContext, RequestRecord, ResultFile
from unfuse.queues.base import RequestFilter
from unfuse.scheduler.scheduler import Scheduler
from unfuse.stores.results import ResultStore

LOOKED_AT = 8  # how many earlier requests with the same body are looked at, the newest first


def result_key(
    card: ModelSpec, given: Mapping[str, object], params: Params, derived: DerivedFacts, n: int, delivery: Delivery
) -> str:
    """A hash of what the bytes of a request's results depend on beside the pools that make them.

    "" for one whose bytes are its own: its seed was drawn, it shares nothing, or it wants previews.
    """
    if given.get("seed") in (None, RANDOM_SEED, str(RANDOM_SEED)) or not delivery.cache or params.get("preview_every"):
        return ""
    known = params | derived.values()
    weights, dtypes = sorted(card.weights.items()), sorted(card.dtypes.items())
    return cache_key(__version__, card.name, card.family, card.pipeline, weights, dtypes, sorted(known.items()), n)


class ResultCache:
    """Finds results of equal requests, and copies them for a request with its own id, events and files."""

    def __init__(self, scheduler: Scheduler, results: ResultStore) -> None:
        self._scheduler, self._results = scheduler, results

    async def answer(self, request: GenerationRequest, caller: Caller, delivery: Delivery) -> RequestRecord | None:
        """The request that is asked for, completed; None if it has to be made."""
        if not request.result_cache_key:
            return None
        same = RequestFilter(tenant=caller.tenant, fingerprint=caller.fingerprint)
        for source in [record.context for record in await self._scheduler.queue.list(same, limit=LOOKED_AT)]:
            if self._is_equal(request, source) and await self._copied(source, request.id):
                record = await self._scheduler.reuse(request, caller, delivery, source)
                if record.context.id != request.id:
                    await to_thread.run_sync(self._results.delete, request.id)
                return record
        return None

    def _is_equal(self, request: GenerationRequest, source: RequestContext) -> bool:
        """Whether a request completed with the very bytes that this one would be made of now, by workers that live."""
        if source.status != "completed" or source.request.result_cache_key != request.result_cache_key:
            return False
        return all(self._scheduler.registry.is_exact(stage.pool) for stage in source.plan.stages)

    async def _copied(self, source: RequestContext, request: str) -> bool:
        """Copy results, if they are whole and their request is not deleted meanwhile; else no copy is left."""
        with suppress(NotFound, Damaged, TransientError):
            copies = await to_thread.run_sync(self._copy, source, request)
            await self._scheduler.queue.load(source.id)
            if copies == source.result:
                return True
        with suppress(TransientError):
            await to_thread.run_sync(self._results.delete, request)
        return False

    def _copy(self, source: RequestContext, request: str) -> tuple[ResultFile, ...]:
        return tuple(
            self._results.put(request, file.index, file.content_type, self._results.read(source.id, file.index))
            for file in source.result
        )
