"""Faults on purpose: any engine, made as bad as the worst network, and the same at every run with the same seed."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import closing
from random import Random
from threading import Lock
from typing import TYPE_CHECKING, Annotated

import msgspec
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.core.errors import ArenaFull, ConfigError, ObjectLost
from unfuse.core.object_ref import ObjectRef
from unfuse.transfer import open_engine
from unfuse.transfer.base import LinkBroken, PeerLink, TransferEngine, TransferOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


VARIABLE, USUAL = "TRANSFER_FAULTS", "drop=0.05,cut=0.05,corrupt=0.05,delay=0.05"
"""How often a named engine fails is told by this variable of the environment; without it so often."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How probable each fault is at every pull, from 0 to 1; delays are up to `seconds`.

    drop: nothing comes. cut: it ends in mid-range. corrupt: one bit is wrong. delay: it comes late. slow: it comes
    slowly. refuse: the owner says no. dead: the owner never answers again. full: the arena has no room.
    """

    seed: int = 0
    drop: Share = 0.0
    cut: Share = 0.0
    corrupt: Share = 0.0
    delay: Share = 0.0
    slow: Share = 0.0
    refuse: Share = 0.0
    dead: Share = 0.0
    full: Share = 0.0
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.01

    @classmethod
    def told(cls) -> Faults:
        """Those that TRANSFER_FAULTS tells, or the usual ones. Raises ConfigError for what cannot be read."""
        text = os.environ.get(VARIABLE, USUAL)
        named = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
        try:
            return msgspec.convert(named, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{VARIABLE}={text}: {error}; write it like {USUAL},seed=1") from error


class FaultyEngine(TransferEngine):
    """`engine`, with the links of this end at fault."""

    name = "faulty"

    def __init__(self, engine: TransferEngine, faults: Faults) -> None:
        super().__init__(engine.options)
        self._engine, self.faults = engine, faults
        self._random, self._lock = Random(faults.seed), Lock()
        self.injected: list[str] = []
        self.pulls = 0

    @override
    def serve(self, arena: Arena) -> str:
        return self._engine.serve(arena)

    @override
    def register(self, memory: NDArray[np.uint8]) -> None:
        self._engine.register(memory)

    @override
    def connect(self, address: str) -> PeerLink:
        return FaultyLink(self._engine.connect(address), self)

    @override
    def close(self) -> None:
        self._engine.close()

    def draw(self) -> tuple[set[str], Random]:
        """The faults of the next pull, and chance for their details."""
        with self._lock:
            names = ("drop", "cut", "corrupt", "delay", "slow", "refuse", "dead", "full")
            drawn = {name for name in names if self._random.random() < getattr(self.faults, name)}
            self.injected += sorted(drawn)
            self.pulls += 1
            return drawn, Random(self._random.random())


class FaultyTcp(FaultyEngine):
    """`tcp`, at fault as the environment tells: for `--engine unfuse.testing.transfer_faults:FaultyTcp`."""

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(open_engine("tcp", options), Faults.told())


class FaultyZmq(FaultyEngine):
    """The same of `zmq`."""

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(open_engine("zmq", options), Faults.told())


class FaultyLink(PeerLink):
    """A link that fails as its engine draws."""

    def __init__(self, link: PeerLink, engine: FaultyEngine) -> None:
        self._link, self._engine = link, engine
        self._dead = False

    @override
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        drawn, random = self._engine.draw()
        seconds = self._engine.faults.seconds
        self._dead |= "dead" in drawn
        self.ping()
        if "drop" in drawn:
            raise LinkBroken("dropped on purpose")
        if "refuse" in drawn:
            raise ObjectLost(f"object {ref.id} is refused on purpose", ref.id)
        if "full" in drawn:
            raise ArenaFull(stop - start, 0, 0)
        time.sleep(random.random() * seconds * ("delay" in drawn))
        end = random.randrange(stop - start + 1) if "cut" in drawn else None
        wrong = random.randrange(stop - start) if "corrupt" in drawn and stop > start else None
        with closing(self._link.pull(ref, start, stop, into)) as pull:
            for filled in pull:
                time.sleep(random.random() * seconds * ("slow" in drawn))
                if wrong is not None and wrong < filled:
                    into[wrong] ^= 1 << random.randrange(8)
                    wrong = None
                if end is not None and end < filled:
                    raise LinkBroken("cut on purpose")
                yield filled

    @override
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        self.ping()
        return self._link.written(ref, known, wait)

    @override
    def ping(self) -> None:
        if self._dead:
            raise LinkBroken("dead on purpose")
        self._link.ping()

    @override
    def close(self) -> None:
        self._link.close()
