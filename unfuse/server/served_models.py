"""Served models: their public names, and the interface that adds models at run time."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Literal

import msgspec

from unfuse.core.errors import ConfigError
from unfuse.core.model_spec import ModelSpec, name_of

#: Hex digits of the hash that is appended to a public name which another model has already.
DIGITS = 6

#: What the workers of an added model do before they are ready.
Phase = Literal["starting", "fetching", "importing", "loading"]


class ModelNames:
    """Maps public model names to internal ones, and back.

    configured: public name → internal name, of the models that the server was started with.

    The public name of any other model is its internal name. Of a path it is the last part, so that responses do not
    reveal where the server stores files. If two models would have the same public name, a hash is appended to the
    second one.
    """

    def __init__(self, configured: Mapping[str, str]) -> None:
        self._configured = dict(configured)  # public name → internal name
        self._internal = dict(configured)  # the same, with the names of all models that were seen
        self._public: dict[str, str] = {}  # internal name → public name, the first of several
        for public_name, internal_name in configured.items():
            self._public.setdefault(internal_name, public_name)

    def internal_name(self, name: str) -> str:
        """Return the internal name of a model by its public name.

        Unknown names are returned unchanged.
        """
        return self._internal.get(name, name)

    def public_name(self, internal_name: str) -> str:
        """Return the first public name of a model by its internal name."""
        public_name = self._public.get(internal_name)
        if public_name is None:
            public_name = name_of(internal_name)
            if self._internal.get(public_name, internal_name) != internal_name:
                public_name = f"{public_name}-{sha256(internal_name.encode(errors='replace')).hexdigest()[:DIGITS]}"
            self._public[internal_name] = public_name
            self._internal[public_name] = internal_name
        return public_name

    def is_configured(self, name: str) -> bool:
        """Return whether the server was started with this name for a model.

        That is a public name for a model with another internal name.
        """
        return self._configured.get(name, name) != name

    def release(self, name: str) -> None:
        """Remove an automatic public name, so that a model can be added by it.

        No served model may have the name. Names that the server was started with stay.
        """
        internal_name = self._internal.get(name, name)
        if internal_name != name and name not in self._configured:
            del self._internal[name]
            del self._public[internal_name]

    def by_public_name(self, specs: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
        """Return models by all their public names, the configured names first.

        specs: the models by internal name.
        """
        configured = {public: specs[internal] for public, internal in self._configured.items() if internal in specs}
        others = {name: spec for name, spec in specs.items() if name not in self._configured.values()}
        return configured | {self.public_name(name): spec for name, spec in others.items()}

    def resolve(self, name: str) -> str:
        """Return the public name for a model's name in a request.

        The request may have the internal name, unless the model has configured names. Any other name is returned
        unchanged.
        """
        is_unchanged = name in self._internal or name in self._configured.values()
        return name if is_unchanged else self._public.get(name, name)


class AddModelProgress(msgspec.Struct, frozen=True):
    """The progress of the cold start of an added model's workers."""

    #: What the workers do now.
    phase: Phase
    #: Bytes that were fetched or loaded so far.
    done: int = 0
    #: Bytes to fetch or load.
    total: int = 0


class ModelAdder:
    """Adds models at run time. This base class adds none: its gateway starts no workers."""

    async def add(self, name: str, source: str) -> None:
        """Serve the model at `source`, a folder or a hub name, by this internal name.

        Returns once it is admitted. Its workers load it after that.

        Raises ConfigError if the model cannot be served or does not fit, and ApiError (409) if the name is in use.
        """
        raise ConfigError("this gateway starts no workers: name the model when you start the server")

    def progress(self, name: str) -> AddModelProgress | None:
        """Return the progress of a model's workers.

        It is None if they are ready, or belong to another server.
        """
        return None
