"""The gloo engine as a worker has it, but for the process in which the bytes are moved: that is this one."""

from __future__ import annotations

import asyncio
from threading import Thread
from typing import TYPE_CHECKING

from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.parallel.pairs import TorchPairs
from unfuse.transfer.pairs import GlooEngine
from unfuse.worker.compute import PairServer
from unfuse.worker.compute_messages import FromCompute, PairCall, PairDone
from unfuse.worker.executor import ComputePairs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LocalGloo(GlooEngine):
    """Moves the bytes of the arena that it serves, or of the memory that is registered."""

    @override
    def serve(self, arena: Arena) -> str:
        self.use(local_pairs(arena.memory), "cpu")
        return super().serve(arena)

    @override
    def register(self, memory: NDArray[np.uint8]) -> None:
        self.use(local_pairs(memory), "cpu")
        super().register(memory)


def local_pairs(memory: NDArray[np.uint8]) -> ComputePairs:
    """Both ends, with an event loop that runs as long as this process."""

    def answered(message: FromCompute) -> None:
        assert isinstance(message, PairDone)
        loop.call_soon_threadsafe(pairs.finish_call, message)

    async def send(message: PairCall) -> bool:
        server.serve(message)
        return True

    async def made() -> ComputePairs:
        return ComputePairs(send)

    loop, server = asyncio.new_event_loop(), PairServer(lambda: TorchPairs(memory, "cpu"), answered)
    Thread(target=loop.run_forever, daemon=True).start()
    pairs = asyncio.run_coroutine_threadsafe(made(), loop).result()
    return pairs
