"""How models join the served ones while a gateway runs: the port, which is also what a gateway without one says."""

from __future__ import annotations

from typing import Literal

import msgspec

from unfuse.core.errors import ConfigError

Phase = Literal["starting", "fetching", "importing", "loading"]


class JoinProgress(msgspec.Struct, frozen=True):
    """What workers do before they are ready; `done` of `total` bytes are fetched, or loaded."""

    phase: Phase
    done: int = 0
    total: int = 0


class Joining:
    """What starts the workers of models that are added."""

    async def add(self, name: str, source: str) -> None:
        """Serve a folder or a hub name too. It is admitted at once, and its workers load from then on.

        Raises ConfigError for what cannot be served or does not fit, and Refusal (409) for a name that is taken.
        """
        raise ConfigError("this gateway starts no workers: name the model when the server is started")

    def progress(self, name: str) -> JoinProgress | None:
        """How far workers are with loading a model; None if they are ready, or start elsewhere."""
        return None
