"""The result cache: answer a request with the results of an earlier equal one.

Only results with the bytes that the request would produce itself are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from anyio import to_thread

from unfuse import __version__
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import NotFound, RecordDamaged, TransientError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import RANDOM_SEED
from unfuse.core.plan import Params, cache_key
from unfuse.core.request import Caller, Delivery, GenerationRequest, RequestContext, RequestRecord, ResultFile
from unfuse.queues.base import RequestFilter
from unfuse.scheduler.scheduler import Scheduler
from unfuse.stores.results import ResultStore

#: The most earlier requests with the same body that are considered, the newest first.
MAX_CANDIDATES = 8


def result_key(
    spec: ModelSpec, fields: Mapping[str, object], params: Params, derived: DerivedFacts, n: int, delivery: Delivery
) -> str:
    """Return a hash of everything that results depend on, except the pools.

    It is "" if the results cannot be cached: the seed is random, the client set `cache` to false, or it requests
    previews.

    fields: the fields of the call, without defaults.
    params: the parameters, with defaults.
    derived: facts about the attachments.
    """
    if fields.get("seed") in (None, RANDOM_SEED, str(RANDOM_SEED)) or not delivery.cache or params.get("preview_every"):
        return ""
    inputs = params | derived.values()
    weights, dtypes = sorted(spec.weights.items()), sorted(spec.dtypes.items())
    return cache_key(__version__, spec.name, spec.family, spec.pipeline, weights, dtypes, sorted(inputs.items()), n)


class ResultCache:
    """Finds the results of an equal request, and copies them to the new one.

    The new request has its own id, events and files.
    """

    def __init__(self, scheduler: Scheduler, results: ResultStore) -> None:
        self._scheduler = scheduler
        self._results = results

    async def find(self, request: GenerationRequest, caller: Caller, delivery: Delivery) -> RequestRecord | None:
        """Return the record of a request completed with cached results, or None.

        A repeat with the same idempotency key gets the record of the first request. Only requests of the same tenant
        with the same body are considered.
        """
        if not request.result_cache_key:
            return None
        same_body = RequestFilter(tenant=caller.tenant, fingerprint=caller.fingerprint)
        for source in [record.context for record in await self._scheduler.queue.list(same_body, limit=MAX_CANDIDATES)]:
            if self._is_equal(request, source) and await self._copy_results(source, request.id):
                record = await self._scheduler.reuse(request, caller, delivery, source)
                if record.context.id != request.id:  # a repeat of an earlier request: the copies are not used
                    await to_thread.run_sync(self._results.delete, request.id)
                return record
        return None

    def _is_equal(self, request: GenerationRequest, source: RequestContext) -> bool:
        """Return whether `source` has the results that this request would produce now.

        The request has no plan so far. Its pools would be those of `source`, which must be exact (batch invariant).
        Results that were decoded in tiles for lack of memory have other bytes.
        """
        if any(state.vae for state in source.stages.values()):
            return False
        if source.status != "completed" or source.request.result_cache_key != request.result_cache_key:
            return False
        return all(self._scheduler.registry.is_exact(stage.pool) for stage in source.plan.stages)

    async def _copy_results(self, source: RequestContext, request_id: str) -> bool:
        """Copy the results of `source` to a request. Returns whether all are copied.

        They are not if a result is damaged, or if `source` is deleted meanwhile. Then the copies are deleted.
        """
        with suppress(NotFound, RecordDamaged, TransientError):
            copies = await to_thread.run_sync(self._copy, source, request_id)
            await self._scheduler.queue.load(source.id)  # raises NotFound if it was deleted while it was copied
            if copies == source.result:
                return True
        with suppress(TransientError):
            await to_thread.run_sync(self._results.delete, request_id)
        return False

    def _copy(self, source: RequestContext, request_id: str) -> tuple[ResultFile, ...]:
        """Write copies of all results. Returns their facts, such as hash and size."""
        return tuple(
            self._results.put(request_id, file.index, file.content_type, self._results.read(source.id, file.index))
            for file in source.result
        )
