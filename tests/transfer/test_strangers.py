"""Another user's process of this machine gets no byte of a tensor, unless its owner was told that anybody may."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import psutil
import pytest

from tests.transfer.conftest import SECRET
from unfuse.core.object_ref import ObjectRef
from unfuse.service.addresses import engines
from unfuse.service.groups import Settings
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferEngine, TransferOptions

CHILD = Path(__file__).with_name("stranger_child.py")
ROOT = Path(__file__).parents[2]
STRANGER = 4321

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process that becomes another user's")


def attacked(address: str, served: dict[str, str], *refs: ObjectRef) -> list[str]:
    """What a stranger got with each attack on each ref, in hexadecimal, or why nothing."""
    what = json.dumps([STRANGER, address, served, [msgspec.msgpack.encode(ref).hex() for ref in refs]])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(CHILD), what], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)


@pytest.fixture
def store(folder: Path) -> Iterator[TensorStore]:
    with TensorStore.create("shared_memory", owner="w", capacity=1 << 20, run_dir=str(folder)) as store:
        yield store


def opened(options: TransferOptions, store: TensorStore) -> tuple[dict[str, TransferEngine], dict[str, str]]:
    """The engines of a worker with default settings, and where they listen."""
    made = engines(Settings(), options)
    assert store.arena
    return made, {name: engine.serve(store.arena) for name, engine in made.items()}


def secret_of(store: TensorStore) -> ObjectRef:
    return store.put({"x": np.frombuffer(b"a prompt" * 100, np.uint8)}, request="req", stage="s", attempt=1)


def listening() -> set[tuple[str, int]]:
    """Addresses of this process that a network reaches."""
    found = psutil.Process().net_connections("inet")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("mode", [0o700, 0o755], ids=["as it is made", "opened by somebody's mistake"])
def test_without_keys_no_engine_listens_and_other_users_are_rejected(
    store: TensorStore, folder: Path, mode: int
) -> None:
    folder.chmod(mode)
    Path(store.address.removeprefix("unix:")).chmod(0o777)
    before = listening()
    _, served = opened(TransferOptions(), store)
    assert served == {} and listening() <= before

    (told,) = attacked(store.address, served, secret_of(store))

    assert told.startswith("PermissionError") if mode == 0o700 else told == ""
    assert store.arena and store.arena.usage().used > 0


def test_peers_without_keys_cannot_detect_which_objects_exist(store: TensorStore) -> None:
    made, served = opened(TransferOptions(secret=SECRET), store)
    assert set(served) == {"tcp", "zmq"}
    ref = secret_of(store)
    other = msgspec.structs.replace(ref, id="0" * 32, key=bytes(16))

    outcomes = attacked(store.address, served, ref, other)

    assert len(outcomes) == 2 * (1 + 2 + 3 + 2)
    for there, nowhere in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert b"a prompt".hex() not in there and there == nowhere
    for engine in made.values():
        engine.close()


def test_insecure_owner_serves_any_peer_that_has_the_object_key(store: TensorStore) -> None:
    made, served = opened(TransferOptions(insecure=True), store)
    ref = secret_of(store)
    other = msgspec.structs.replace(ref, key=bytes(16))

    outcomes = attacked(store.address, served, ref, other)

    known = [told for told in outcomes[::2] if b"a prompt".hex() in told]
    assert len(known) >= 2 and not any(b"a prompt".hex() in told for told in outcomes[1::2])
    for engine in made.values():
        engine.close()
