"""Transfers through networks that are as bad as networks get: wrong bytes 0, hangs 0, leaked bytes 0."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import msgspec
import numpy as np
import pytest

from unfuse.arena.arena import Arena
from unfuse.core.errors import ArenaFull, ObjectLost
from unfuse.core.object_ref import CHUNK_BYTES, ObjectRef
from unfuse.testing.transfer_faults import Faults, FaultyEngine
from unfuse.testing.transfer_suite import ArenaOwner, soon
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferOptions
from unfuse.transfer.session import Session, Transfers
from unfuse.transfer.sinks import ArenaSink

ENGINES = ("tcp", "zmq", "fake")
OPTIONS = TransferOptions(heartbeat_s=0.2, attempts=5, bootstrap_s=60, threads=8)
AT_ONCE = 32


class Soak:
    """Owners on every engine, faults on every link, and a reader whose arena has room for a few objects only."""

    def __init__(self, seed: int, stack: ExitStack) -> None:
        self.random = Random(seed)
        self.arena = Arena(48 << 20)
        self.owner = ArenaOwner(lambda: open_engine("fake", OPTIONS))
        self.engines, self.addresses = {}, {}
        for number, name in enumerate(ENGINES):
            serving = open_engine(name, OPTIONS)
            self.addresses[name] = serving.serve(self.owner.arena)
            stack.callback(serving.close)
            faults = Faults(
                seed=seed + number, drop=0.1, cut=0.15, corrupt=0.15, delay=0.1, slow=0.1, refuse=0.01, dead=0.01,
                full=0.05, seconds=0.002,
            )  # fmt: skip
            pulling = open_engine(name, OPTIONS)
            stack.callback(pulling.close)
            self.engines[name] = FaultyEngine(pulling, faults)
        self.transfers = Transfers(self.engines, lambda _: self.known(), OPTIONS)
        stack.callback(self.transfers.close)
        sizes = (0, 100, 7000, 70_000, 700_000, CHUNK_BYTES, CHUNK_BYTES + 12_345, 2 * CHUNK_BYTES + 1)
        self.refs = [self.owner.put(number, nbytes) for number, nbytes in enumerate(sizes)]
        self.outcomes: Counter[str] = Counter()

    def known(self) -> dict[str, str]:
        """Most peers have all engines; some have few."""
        names = self.random.sample(ENGINES, self.random.choice((1, 2, 3, 3, 3)))
        return {name: self.addresses[name] for name in names}

    def run(self, count: int) -> None:
        """So many transfers, several at once; some are cancelled, and some objects go while they are pulled."""
        waiting: list[tuple[Session, ArenaSink, ObjectRef]] = []
        for number in range(count):
            ref = self.random.choice(self.refs)
            if number % 50 == 49:
                ref = self.short_lived()
            sink = ArenaSink(self.arena, ref)
            waiting.append((self.transfers.fetch(ref, sink), sink, ref))
            if number % 41 == 40:
                waiting[-1][0].cancel()
            if number % 50 == 49:
                self.owner.delete(ref)
            while len(waiting) >= AT_ONCE:
                self.settle_some(waiting)
        while waiting:
            self.settle_some(waiting)

    def short_lived(self) -> ObjectRef:
        return self.owner.put(99, 2 * CHUNK_BYTES)

    def settle_some(self, waiting: list[tuple[Session, ArenaSink, ObjectRef]]) -> None:
        """Those that are over give their room to the others."""
        soon(lambda: any(session.wait(0) for session, _, _ in waiting), "all transfers hang")
        for item in [item for item in waiting if item[0].wait(0)]:
            waiting.remove(item)
            self.settle(*item)

    def settle(self, session: Session, sink: ArenaSink, ref: ObjectRef) -> None:
        """See that it ended well."""
        if session.error:
            assert session.state == "failed" and sink.extent is None
            self.outcomes["cancelled" if "cancelled" in str(session.error) else type(session.error).__name__] += 1
            return
        self.outcomes["resumed" if session.setbacks else "at once"] += 1
        extent = sink.extent
        assert extent and session.state == "success"
        mine, theirs = self.arena.view[extent.offset : extent.offset + extent.nbytes], self.bytes_of(ref)
        assert np.array_equal(mine, theirs), f"wrong bytes of {ref.id}"
        self.arena.delete(extent.id)

    def bytes_of(self, ref: ObjectRef) -> np.ndarray:  # type: ignore[type-arg]
        return self.owner._extents[ref.id][1]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def soak(seed: int, count: int, stack: ExitStack) -> Soak:
    soak = Soak(seed, stack)
    soak.run(count)
    assert soak.arena.usage().used == 0, "the reader's arena leaks"
    for ref in soak.refs:
        soak.owner.delete(ref)
    soon(lambda: soak.owner.used() == 0, "the owner's arena leaks")
    assert sum(soak.outcomes.values()) == count
    return soak


def test_a_thousand_transfers_through_faults_end_well_or_in_one_error(stack: ExitStack) -> None:
    done = soak(5, 1000, stack)
    injected = Counter(name for engine in done.engines.values() for name in engine.injected)
    print(done.outcomes, injected)
    assert set(injected) == {"drop", "cut", "corrupt", "delay", "slow", "refuse", "dead", "full"}
    assert done.outcomes["at once"] + done.outcomes["resumed"] > 800 and done.outcomes["resumed"] > 200
    assert set(done.outcomes) <= {"at once", "resumed", "cancelled", ObjectLost.__name__, ArenaFull.__name__}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_transfers_through_faults(seed: int, stack: ExitStack) -> None:
    soak(100 + seed, 1000, stack)


@pytest.mark.parametrize("fault", ["drop", "cut", "corrupt", "delay", "slow", "refuse", "dead", "full"])
def test_each_fault_alone_ends_as_it_should(fault: str, stack: ExitStack) -> None:
    """What heals by another try succeeds by another engine; what cannot heal is the error that it is."""
    owner, arena = ArenaOwner(lambda: open_engine("fake", OPTIONS)), Arena(16 << 20)
    address, ref = owner.start(), owner.put(1, CHUNK_BYTES + 5)
    stack.callback(owner.stop)
    always = FaultyEngine(open_engine("fake", OPTIONS), Faults(**{fault: 1.0, "seconds": 0.001}))
    engines = {"tcp": always, "zmq": open_engine("fake", OPTIONS)}
    options = msgspec.structs.replace(OPTIONS, bootstrap_s=1)
    transfers = Transfers(engines, lambda _: {"tcp": address, "zmq": address}, options)
    stack.callback(transfers.close)
    session = transfers.fetch(ref, sink := ArenaSink(arena, ref))
    expected = {"refuse": ObjectLost, "full": ArenaFull}.get(fault)
    if expected:
        with pytest.raises(expected):
            session.result(60)
        assert arena.usage().used == 0
    else:
        session.result(60)
        assert sink.extent
        assert session.setbacks == (fault not in ("delay", "slow"))
        offset = sink.extent.offset
        assert np.array_equal(arena.view[offset : offset + ref.nbytes], owner._extents[ref.id][1])


def test_faults_are_the_same_at_every_run_with_the_same_seed() -> None:
    def drawn(seed: int) -> list[object]:
        engine = FaultyEngine(open_engine("fake", OPTIONS), Faults(seed=seed, drop=0.5, cut=0.5, slow=0.5))
        return [sorted(engine.draw()[0]) for _ in range(50)]

    assert drawn(1) == drawn(1) != drawn(2)
