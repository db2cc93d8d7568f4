"""Fault injection for transfer engines, reproducible by a seed."""

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


#: The environment variable with the faults of FaultyTcp and FaultyZmq.
VARIABLE = "TRANSFER_FAULTS"
#: Its default.
USUAL = "drop=0.05,cut=0.05,corrupt=0.05,delay=0.05"

#: A probability.
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The probability of each fault at every pull, from 0 to 1."""

    #: Seed of the random generator.
    seed: int = 0
    #: No byte arrives.
    drop: Share = 0.0
    #: The pull ends within its range.
    cut: Share = 0.0
    #: One bit is flipped.
    corrupt: Share = 0.0
    #: The first bytes are delayed.
    delay: Share = 0.0
    #: Every part is delayed.
    slow: Share = 0.0
    #: The owner refuses the object.
    refuse: Share = 0.0
    #: The owner does not respond any more.
    dead: Share = 0.0
    #: The arena is full.
    full: Share = 0.0
    #: Longest delay, in seconds.
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.01

    @classmethod
    def from_environment(cls) -> Faults:
        """Return the faults of the variable TRANSFER_FAULTS, or the usual ones. Raises ConfigError."""
        text = os.environ.get(VARIABLE, USUAL)
        values = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
        try:
            return msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{VARIABLE}={text}: {error}; write it like {USUAL},seed=1") from error


class FaultyEngine(TransferEngine):
    """A transfer engine that wraps `engine` and injects faults into the links that it opens."""

    name = "faulty"

    def __init__(self, engine: TransferEngine, faults: Faults) -> None:
        super().__init__(engine.options)
        self._engine = engine
        self.faults = faults
        self._random = Random(faults.seed)
        self._lock = Lock()
        #: All injected faults, in order.
        self.injected: list[str] = []
        #: Number of pulls so far.
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
        """Return the faults of the next pull, and a random generator for their details."""
        with self._lock:
            names = ("drop", "cut", "corrupt", "delay", "slow", "refuse", "dead", "full")
            drawn = {name for name in names if self._random.random() < getattr(self.faults, name)}
            self.injected += sorted(drawn)
            self.pulls += 1
            return drawn, Random(self._random.random())


class FaultyTcp(FaultyEngine):
    """The `tcp` engine with the faults of TRANSFER_FAULTS.

    It is selected by `--engine unfuse.testing.transfer_faults:FaultyTcp`.
    """

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(open_engine("tcp", options), Faults.from_environment())


class FaultyZmq(FaultyEngine):
    """The `zmq` engine with the faults of TRANSFER_FAULTS."""

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(open_engine("zmq", options), Faults.from_environment())


class FaultyLink(PeerLink):
    """A link that injects the faults that its engine draws."""

    def __init__(self, link: PeerLink, engine: FaultyEngine) -> None:
        self._link = link
        self._engine = engine
        self._dead = False

    @override
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        drawn, random = self._engine.draw()
        seconds = self._engine.faults.seconds
        self._dead |= "dead" in drawn
        self.ping()
        if "drop" in drawn:
            raise LinkBroken("injected fault: the connection was dropped")
        if "refuse" in drawn:
            raise ObjectLost(f"injected fault: object {ref.id} was refused", ref.id)
        if "full" in drawn:
            raise ArenaFull(stop - start, 0, 0)

        time.sleep(random.random() * seconds * ("delay" in drawn))
        end = random.randrange(stop - start + 1) if "cut" in drawn else None
        corrupt = random.randrange(stop - start) if "corrupt" in drawn and stop > start else None
        with closing(self._link.pull(ref, start, stop, into)) as pull:
            for filled in pull:
                time.sleep(random.random() * seconds * ("slow" in drawn))
                if corrupt is not None and corrupt < filled:
                    into[corrupt] ^= 1 << random.randrange(8)
                    corrupt = None
                if end is not None and end < filled:
                    raise LinkBroken("injected fault: the transfer was cut")
                yield filled

    @override
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        self.ping()
        return self._link.written(ref, known, wait)

    @override
    def ping(self) -> None:
        if self._dead:
            raise LinkBroken("injected fault: the owner is dead")
        self._link.ping()

    @override
    def close(self) -> None:
        self._link.close()
