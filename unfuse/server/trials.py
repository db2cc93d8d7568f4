"""Tries grammars before anything is queued, so that a bad one is refused, and harms nobody."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from anyio import CapacityLimiter, to_thread

from unfuse.core.errors import InvalidParameter
from unfuse.language.grammars import Grammars, grammar_digest
from unfuse.server.metrics import Metrics

AT_ONCE = 2  # how many grammars are tried at one time; each may compute for some seconds
UNSATISFIABLE = "Unsatisfiable"  # in the engine's error for a schema that nothing matches: no looser one is tried
KNOWN = 1024  # of how many grammars it is known what came of trying them


class Trials:
    """Compiles grammars, as workers will, in processes that are bounded; only requests that have one wait for that."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._grammars, self._limiter = Grammars(), CapacityLimiter(AT_ONCE)
        self._known = OrderedDict[str, str]()

    async def choose(self, grammars: Sequence[bytes], param: str) -> bytes:
        """Return the first of a request's packed grammars, the strictest first, that can be used.

        Raises InvalidParameter, naming `param`, if none can be used, or if nothing matches one of them.
        """
        whys = list[str]()
        for grammar in grammars:
            why = await self._refusal(grammar)
            if not why:
                return grammar
            whys.append(why)
            if UNSATISFIABLE in why:
                break
        raise InvalidParameter(f"{param} cannot be enforced: {whys[0]}", param)

    async def _refusal(self, grammar: bytes) -> str:
        """Return why a grammar cannot be used, or ""."""
        key = grammar_digest(grammar)
        if key not in self._known:
            self._metrics.grammars += 1
            try:
                why = await to_thread.run_sync(self._grammars.refusal, grammar, limiter=self._limiter)
            finally:
                self._metrics.grammars -= 1
            self._known[key] = why
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]
