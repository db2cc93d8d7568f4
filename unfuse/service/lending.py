"""Lends adapters to workers that do not see the folder."""

from __future__ import annotations

from anyio import to_thread

from unfuse.core.errors import NotFound, PermanentError
from unfuse.core.messages import Borrow, Lent, Refused, ToScheduler, ToWorker
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.weights.adapters import Loras


class Lending:
    """Answers workers: of adapters in the folder `loras` itself, of all else by the dispatcher."""

    def __init__(self, dispatcher: Dispatcher, loras: str) -> None:
        self._dispatcher, self._loras = dispatcher, Loras(loras) if loras else None

    async def answer(self, peer: bytes, message: ToScheduler) -> ToWorker | None:
        """The reply to one message."""
        if not isinstance(message, Borrow):
            return await self._dispatcher.answer(peer, message)
        if self._loras is None:
            return Refused("no lora is served here: start the server with --loras FOLDER")
        try:
            return Lent(*await to_thread.run_sync(self._loras.part, message.name, message.id, message.offset))
        except (NotFound, PermanentError) as error:
            return Refused(str(error))
        except OSError as error:
            return Refused(f"lora {message.name!r} cannot be read: {error.strerror}")
