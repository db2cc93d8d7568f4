"""How models join the served ones while a gateway runs: the port, which is also what a gateway without one says."""

from __future__ import annotations

from unfuse.core.errors import ConfigError


class Joining:
    """What starts the workers of models that are added; `refused` says why those could not be served that failed."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    async def add(self, name: str) -> None:
        """Serve a folder or a hub name too: it is admitted at once, and its workers load from now on.

        Raises ConfigError for what cannot be served or does not fit, and Refusal (409) for a name that is taken.
        """
        raise ConfigError("this gateway starts no workers: name the model when the server is started")
