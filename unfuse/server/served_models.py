"""Served models: the names by which clients know them, and how models are added while a gateway runs."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Literal

import msgspec

from unfuse.core.errors import ConfigError
from unfuse.core.model_spec import ModelSpec, name_of

DIGITS = 6  # of a hash, behind the name of a model whose name another one has


class ModelNames:
    """Maps the names of models in both directions; `given` are names that clients use, and whose they are.

    A model without such a name goes by its own, and if that is a path by the last part of it: no answer says where the
    server keeps files. Where two models would have one name, that of the second one ends with a hash.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given, self._own = dict(given), dict(given)
        self._shown: dict[str, str] = {}
        for name, own in given.items():
            self._shown.setdefault(own, name)

    def own(self, name: str) -> str:
        """Return the name by which a model goes here, of one that clients use."""
        return self._own.get(name, name)

    def shown(self, own: str) -> str:
        """Return the name of a model that clients see; of several the first."""
        known = self._shown.get(own)
        if known is None:
            known = name_of(own)
            if self._own.get(known, own) != own:
                known = f"{known}-{sha256(own.encode(errors='replace')).hexdigest()[:DIGITS]}"
            self._shown[own], self._own[known] = known, own
        return known

    def is_given(self, name: str) -> bool:
        """Return whether that is a name that the server was started with, for a model with another one."""
        return self._given.get(name, name) != name

    def free(self, name: str) -> None:
        """Give a name to a model that is added. Nothing that is served has this name."""
        own = self._own.get(name, name)
        if own != name and name not in self._given:
            del self._own[name], self._shown[own]

    def of(self, cards: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
        """Return these models by all names that clients use: first those that were given, in their order."""
        renamed = {name: cards[own] for name, own in self._given.items() if own in cards}
        return renamed | {self.shown(own): card for own, card in cards.items() if own not in self._given.values()}

    def asked(self, name: str) -> str:
        """Return the name that clients see for a model's own name, such as a folder's path.

        Any other name is returned as it is. A model with given names goes by these alone.
        """
        is_other = name in self._own or name in self._given.values()
        return name if is_other else self._shown.get(name, name)


Phase = Literal["starting", "fetching", "importing", "loading"]


class AddModelProgress(msgspec.Struct, frozen=True):
    """What workers do before they are ready; `done` of `total` bytes are fetched, or loaded."""

    phase: Phase
    done: int = 0
    total: int = 0


class AddModel:
    """What starts the workers of models that are added."""

    async def add(self, name: str, source: str) -> None:
        """Serve a folder or a hub name too. It is admitted at once, and its workers load from then on.

        Raises ConfigError for what cannot be served or does not fit, and Refusal (409) for a name that is taken.
        """
        raise ConfigError("this gateway starts no workers: name the model when the server is started")

    def progress(self, name: str) -> AddModelProgress | None:
        """How far workers are with loading a model; None if they are ready, or start elsewhere."""
        return None
