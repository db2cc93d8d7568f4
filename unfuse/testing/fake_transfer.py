"""An in-process transfer engine that copies: the simplest one, and the reference for others."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.core.object_ref import ObjectRef
from unfuse.transfer.base import (
    LinkBroken,
    PeerLink,
    Pull,
    TransferEngine,
    TransferOptions,
    Watch,
    answer_watch,
    hold_object,
)

#: Bytes that are copied at a time.
PIECE = 1024 * 1024

#: The serving engines of this process by address, in place of a network.
_SERVING: WeakValueDictionary[str, FakeEngine] = WeakValueDictionary()


class FakeEngine(TransferEngine):
    """A transfer engine that reaches other FakeEngines of this process."""

    name = "fake"

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(options)
        self._address = f"fake:{secrets.token_hex(8)}"

    @override
    def serve(self, arena: Arena) -> str:
        self.arena = arena
        _SERVING[self._address] = self
        return self._address

    @override
    def connect(self, address: str) -> PeerLink:
        return FakeLink(address)

    @override
    def close(self) -> None:
        _SERVING.pop(self._address, None)


class FakeLink(PeerLink):
    """A link that looks up the owner's engine at each use."""

    def __init__(self, address: str) -> None:
        self._address = address

    @override
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        arena = self._owner().arena
        extent = hold_object(arena, Pull(ref.id, ref.key, ref.generation, ref.nbytes, start, stop))
        try:
            for done in range(start, stop, PIECE):
                end = min(done + PIECE, stop)
                self._owner()  # raises LinkBroken if the owner has closed meanwhile
                into[done - start : end - start] = arena.view[extent.offset + done : extent.offset + end]
                yield end - start
        finally:
            arena.unhold(ref.id)

    @override
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        owner = self._owner()
        query = Watch(ref.id, ref.key, ref.generation, ref.nbytes, known, wait)
        answer = answer_watch(owner.arena, query, owner.options.heartbeat_s)
        return answer.checksums, answer.is_whole

    @override
    def ping(self) -> None:
        self._owner()

    @override
    def close(self) -> None:
        self._address = ""

    def _owner(self) -> FakeEngine:
        """Return the engine at the link's address. Raises LinkBroken if none serves there."""
        owner = _SERVING.get(self._address)
        if owner is None:
            raise LinkBroken(f"no engine of this process serves at {self._address or 'a closed link'}")
        return owner
