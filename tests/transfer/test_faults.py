"""Transfers through networks that are as bad as networks get: wrong bytes 0, hangs 0, leaked bytes 0."""

import resource
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.transfer.conftest import SECRET, ChildOwner, needed
from unfuse.arena.arena import Arena
from unfuse.core.errors import ArenaFull, ObjectLost, TransientError
from unfuse.core.object_ref import CHUNK_BYTES, ObjectRef
from unfuse.stores.keyed import open_copies
from unfuse.testing import ArenaOwner, Faults, FaultyEngine
from unfuse.testing.fake_transfer import FakeEngine
from unfuse.testing.transfer_owner import pattern, soon
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferOptions
from unfuse.transfer.session import ArenaSink, Transfers, TransferSession

OPTIONS = TransferOptions(
    secret=SECRET, heartbeat_s=0.2, max_missed=5, attempts=5, bootstrap_s=60, threads=8, trusted_network=True
)
AT_ONCE = 32
SIZES = (0, 100, 7000, 70_000, 700_000, CHUNK_BYTES, CHUNK_BYTES + 12_345, 2 * CHUNK_BYTES + 1)
FAULTS = {
    "drop": 0.1,
    "cut": 0.15,
    "corrupt": 0.15,
    "delay": 0.1,
    "slow": 0.1,
    "refuse": 0.01,
    "dead": 0.01,
    "full": 0.05,
}
content = cache(pattern)


@contextmanager
def full_disk() -> Iterator[None]:
    """The kernel lets nobody of this process write a file longer than a thousand bytes."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


class Served:
    """An owner in a process of its own, with an object of each size."""

    def __init__(self, name: str, engines: Sequence[str]) -> None:
        self.child = ChildOwner(",".join(engines), OPTIONS)
        self.addresses = {engines[0]: self.child.start(), **self.child.others()}
        refs = [self.child.put(number, nbytes) for number, nbytes in enumerate(SIZES)]
        self.refs = {number: msgspec.structs.replace(ref, owner=name) for number, ref in enumerate(refs)}


class Soak:
    """Two owners, faults on every link, and a reader whose arena has room for a few objects only.

    Owners are killed and started anew; objects go, and sessions are cancelled, while they move. Some of what came is
    kept on a disk, which is full at times.
    """

    def __init__(self, seed: int, engines: Sequence[str], stack: ExitStack, folder: Path) -> None:
        self.random, self.names = Random(seed), engines
        self.arena = Arena(48 << 20)
        stack.callback(self.arena.close)
        self.engines: dict[str, FaultyEngine] = {}
        for number, name in enumerate(engines):
            pulling = open_engine(name, OPTIONS)
            pulling.register(self.arena.memory)
            stack.callback(pulling.close)
            self.engines[name] = FaultyEngine(pulling, Faults(seed=seed + number, seconds=0.002, **FAULTS))
        self.owners: dict[str, Served] = {}
        self.gone: dict[str, dict[str, str]] = {}
        stack.callback(lambda: [served.child.end() for served in self.owners.values()])
        self.started = 0
        for _ in range(2):
            self.add_owner()
        self.transfers = Transfers(self.engines, self.ways, OPTIONS)
        stack.callback(self.transfers.close)
        opened = open_copies(f"disk:{folder}")
        assert opened
        self.copies = opened
        self.outcomes: Counter[str] = Counter()

    def add_owner(self) -> None:
        self.started += 1
        name = f"owner {self.started}"
        self.owners[name] = Served(name, self.names)

    def ways(self, owner: str) -> dict[str, str]:
        """Most peers have all engines; some have few. Of one that was killed, the registry still says where it was."""
        known = self.owners[owner].addresses if owner in self.owners else self.gone[owner]
        few = self.random.sample(self.names, self.random.randint(1, len(self.names)))
        return {name: known[name] for name in (few if self.random.random() < 0.3 else self.names)}

    def run(self, count: int, kills: int) -> None:
        """So many transfers, several at once."""
        waiting: list[tuple[TransferSession, ArenaSink, ObjectRef, int]] = []
        for number in range(count):
            owner = self.random.choice(list(self.owners))
            seed = self.random.randrange(len(SIZES))
            ref = self.owners[owner].refs[seed]
            if brief := number % 50 == 49:
                ref, seed = msgspec.structs.replace(self.owners[owner].child.put(3, 2 * CHUNK_BYTES), owner=owner), 3
            sink = ArenaSink(self.arena, ref)
            waiting.append((self.transfers.fetch(ref, sink), sink, ref, seed))
            if number % 41 == 40:
                waiting[-1][0].cancel()
            if brief:
                self.owners[owner].child.delete(ref)
            if number % (count // kills) == count // kills // 2:
                self.kill(owner)
            while len(waiting) >= AT_ONCE:
                self.settle_some(waiting)
        while waiting:
            self.settle_some(waiting)

    def kill(self, owner: str) -> None:
        """Kill -9, while objects of it are on their way."""
        self.gone[owner] = self.owners[owner].addresses
        self.owners.pop(owner).child.kill()
        self.outcomes["(owners killed)"] += 1
        self.add_owner()

    def settle_some(self, waiting: list[tuple[TransferSession, ArenaSink, ObjectRef, int]]) -> None:
        """Those that are over give their room to the others."""
        soon(lambda: any(session.wait(0) for session, *_ in waiting), "all transfers hang")
        for item in [item for item in waiting if item[0].wait(0)]:
            waiting.remove(item)
            self.settle(*item)

    def settle(self, session: TransferSession, sink: ArenaSink, ref: ObjectRef, seed: int) -> None:
        """See that it ended well."""
        if session.error:
            assert session.state == "failed" and sink.extent is None
            self.outcomes["cancelled" if "cancelled" in str(session.error) else type(session.error).__name__] += 1
            return
        self.outcomes["resumed" if session.setbacks else "at once"] += 1
        extent = sink.extent
        assert extent and session.state == "success"
        here = self.arena.view[extent.offset : extent.offset + extent.nbytes]
        assert np.array_equal(here, content(seed, ref.nbytes)), f"wrong bytes of {ref.id}"
        if self.random.random() < 0.2:
            self.keep(ref, here)
        self.arena.delete(extent.id)

    def keep(self, ref: ObjectRef, here: Any) -> None:
        """A copy on a disk, which is full every third time: it is there and right, or it is an error."""
        if full := self.random.random() < 0.33 and ref.nbytes > 1000:
            with full_disk(), pytest.raises(TransientError, match="check the folder"):
                self.copies.store(ref, here)
            with pytest.raises(ObjectLost):
                self.copies.open(ref)
        else:
            self.copies.store(ref, here)
            assert np.array_equal(self.copies.open(ref).bytes(), here)
        self.outcomes[f"(copies {'refused by a full disk' if full else 'kept'})"] += 1
        self.copies.release(ref.request)

    def check_leaks(self) -> None:
        assert self.arena.usage().used == 0, "the reader's arena leaks"
        for served in self.owners.values():
            for ref in served.refs.values():
                served.child.delete(ref)
            soon(lambda: served.child.used() == 0, "an owner's arena leaks")  # noqa: B023
        assert self.copies.usage().used == 0 and not self.copies.stored_requests(), "the disk leaks"

    def told(self) -> str:
        """What happened, by engine and in all."""
        lines = [
            f"{name}: {e.pulls} pulls, faults {dict(sorted(Counter(e.injected).items()))}"
            for name, e in self.engines.items()
        ]
        return "\n".join([*lines, f"transfers: {dict(sorted(self.outcomes.items()))}"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


Record = Callable[[str, object], None]


def soak(seed: int, count: int, kills: int, engines: Sequence[str], stack: ExitStack, folder: Path) -> Soak:
    soak = Soak(seed, engines, stack, folder)
    soak.run(count, kills)
    soak.check_leaks()
    assert sum(number for name, number in soak.outcomes.items() if name[0] != "(") == count
    assert {name for name in soak.outcomes if name[0] != "("} <= {
        "at once",
        "resumed",
        "cancelled",
        ObjectLost.__name__,
        ArenaFull.__name__,
    }
    return soak


@pytest.mark.slow
def test_faulty_transfers_succeed_or_raise_one_error(stack: ExitStack, tmp_path: Path, record_property: Record) -> None:
    done = soak(5, 600, 3, ["tcp", "zmq"], stack, tmp_path)
    record_property("counted", done.told())
    assert {name for engine in done.engines.values() for name in engine.injected} == set(FAULTS)
    assert done.outcomes["at once"] + done.outcomes["resumed"] > 450 and done.outcomes["resumed"] > 100
    assert done.outcomes["(owners killed)"] == 3 and done.outcomes["(copies refused by a full disk)"]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_many_faulty_transfers_succeed_or_raise_one_error(
    seed: int, stack: ExitStack, tmp_path: Path, record_property: Record
) -> None:
    """Mooncake is among the engines in every second round."""
    engines = ["tcp", "zmq", "mooncake"][: 2 + seed % 2]
    for name in engines:
        needed(name)
    record_property("counted", soak(100 + seed, 1000, 5, engines, stack, tmp_path).told())


@pytest.mark.slow
@pytest.mark.parametrize("times", [200, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["tcp", "zmq"])
def test_every_bit_flip_is_detected_by_each_engine(name: str, times: int, stack: ExitStack) -> None:
    """One bit of each object, somewhere; with one try only, so that each is an error."""
    owner, arena = ChildOwner(name), Arena(64 << 20)
    stack.callback(owner.end)
    address, random = owner.start(), Random(8)
    options = TransferOptions(secret=SECRET, attempts=1, threads=2)
    engine = FaultyEngine(open_engine(name, options), Faults(seed=8, corrupt=1.0))
    stack.callback(engine.close)
    transfers = Transfers({name: engine}, lambda _: {name: address}, options)
    stack.callback(transfers.close)
    refs = [owner.put(number, nbytes) for number, nbytes in enumerate((1, 300, 40_000, CHUNK_BYTES + 500))]
    detected = 0
    for number in range(times):
        ref = refs[3] if number % 50 == 0 else random.choice(refs[:3])
        session = transfers.fetch(ref, sink := ArenaSink(arena, ref))
        assert session.wait(600)
        detected += isinstance(session.error, ObjectLost) and "damaged" in str(session.error) and sink.extent is None
    assert (engine.pulls, engine.injected, detected) == (times, ["corrupt"] * times, times)
    assert arena.usage().used == 0


@pytest.mark.parametrize("fault", ["drop", "cut", "corrupt", "delay", "slow", "refuse", "dead", "full"])
def test_each_single_fault_recovers_or_raises_its_error(fault: str, stack: ExitStack) -> None:
    """What heals by another try succeeds by another engine; what cannot heal is the error that it is."""
    owner, arena = ArenaOwner(lambda: FakeEngine(OPTIONS)), Arena(16 << 20)
    address, ref = owner.start(), owner.put(1, CHUNK_BYTES + 5)
    stack.callback(owner.stop)
    always = FaultyEngine(FakeEngine(OPTIONS), Faults(**{fault: 1.0, "seconds": 0.001}))
    engines = {"tcp": always, "zmq": FakeEngine(OPTIONS)}
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


def test_faults_are_reproducible_with_the_same_seed() -> None:
    def drawn(seed: int) -> list[object]:
        engine = FaultyEngine(FakeEngine(OPTIONS), Faults(seed=seed, drop=0.5, cut=0.5, slow=0.5))
        return [sorted(engine.draw()[0]) for _ in range(50)]

    assert drawn(1) == drawn(1) != drawn(2)
