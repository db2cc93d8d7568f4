"""Send LoRA adapters to workers that do not have them."""

from __future__ import annotations

import structlog
from anyio import to_thread

from unfuse.core.errors import NotFound, PermanentError
from unfuse.core.messages import AdapterBytes, FetchAdapter, Rejected, ToScheduler, ToWorker
from unfuse.edge.keys import ApiKeys as ApiKeys
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.weights.adapters import AdapterFolder

log = structlog.get_logger(__name__)


class AdapterServer:
    """Answers messages of workers: serves LoRA adapters, and passes all other messages to the dispatcher.

    `loras`: the folder of the adapters; "" if the server has none.
    """

    def __init__(self, dispatcher: Dispatcher, loras: str) -> None:
        self._dispatcher = dispatcher
        self._loras = AdapterFolder(loras) if loras else None

    async def answer(self, peer: bytes, message: ToScheduler) -> ToWorker | None:
        """Return the reply to one message of a worker.

        It is None if the dispatcher sends no reply, and Rejected for an adapter that cannot be read.
        """
        if not isinstance(message, FetchAdapter):
            return await self._dispatcher.answer(peer, message)
        if self._loras is None:
            return Rejected("the server has no LoRA adapters: start it with --loras FOLDER")
        try:
            # A slow disk must not block heartbeats and leases, which the same event loop answers.
            return AdapterBytes(
                *await to_thread.run_sync(self._loras.read_chunk, message.name, message.id, message.offset)
            )
        except (NotFound, PermanentError) as error:
            return Rejected(str(error))
        except OSError as error:
            return Rejected(f"LoRA adapter {message.name!r} cannot be read: {error.strerror}")
