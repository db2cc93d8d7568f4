"""Stores of two hosts: memory is each one's own, a place that both reach is read by both."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.netns import SecondHost, second_host
from tests.stores.processes import Refused, Start
from tests.stores.test_recall import Reader
from tests.stores.test_shared_memory import decoded, encoded
from tests.transfer.conftest import SECRET
from tools.redis_server import RedisServer
from unfuse.core.errors import ObjectLost
from unfuse.core.request import new_request_id
from unfuse.stores.tensor_store import TensorStore

CAPACITY = 40 << 20


@pytest.fixture(scope="module")
def host() -> Iterator[SecondHost]:
    with second_host() as host:
        yield host


@pytest.fixture(scope="module")
def pod() -> Iterator[SecondHost]:
    """A container beside this one."""
    with second_host("pod", shared=True) as host:
        yield host


@pytest.fixture(params=["disk", "redis"])
def place(request: pytest.FixtureRequest, host: SecondHost, tmp_path: Path) -> Iterator[str]:
    """A place that both hosts reach."""
    if request.param == "disk":
        yield f"disk:{tmp_path}/kept"
        return
    server = RedisServer(tmp_path, host=host.near)
    yield server.url
    server.client.close()
    server.kill()


def test_shared_memory_of_another_host_raises_object_lost(start: Start, host: SecondHost) -> None:
    """Both have the same host name, user and path to the run folder; what tells them apart is that the socket is not
    there."""
    there = start(enter=host.enter, owner="there", capacity=CAPACITY)
    here = start(owner="here", capacity=CAPACITY)
    assert Path(there.where["address"]).parent == Path(here.where["address"]).parent
    ref = there("put", 7, 1000)
    here("learn", {"there": ["other", there.where["address"]]})
    assert not here("reaches", "there")
    with pytest.raises(Refused, match="ObjectLost"):
        here("get", ref)
    with TensorStore.create(
        "shared_memory", owner="mine", capacity=CAPACITY, run_dir=os.environ["UNFUSE_RUN_DIR"]
    ) as store:
        store.register_owners({"there": ("other", there.where["address"])})
        with pytest.raises(ObjectLost) as lost:
            store.get(decoded(ref))
        assert lost.value.object_id == decoded(ref).id
    assert there("get", ref) == [7, 7000], "it is where it was"


def test_containers_sharing_the_run_dir_map_each_others_memory(start: Start, pod: SecondHost) -> None:
    """Whatever path they see it at, and whatever they are called."""
    there = start(enter=pod.enter, owner="there", capacity=CAPACITY)
    here = start(owner="here", capacity=CAPACITY)
    assert Path(there.where["address"]).parent != Path(here.where["address"]).parent
    for one, other in ((there, here), (here, there)):
        name = "there" if one is there else "here"
        ref = one("put", 7, 1000)
        other("learn", {name: ["other", one.where["address"]]})
        assert other("reaches", name)
        assert other("get", ref) == [7, 7000]
        assert other("lies_in").split()[4] == str(one("memory_file")), "it is a copy"


def test_hosts_read_each_others_objects_in_a_shared_store(start: Start, host: SecondHost, place: str) -> None:
    there = start(enter=host.enter, name=place, owner="there", capacity=CAPACITY)
    ref = there("put", 7, 1_000_000)
    with TensorStore.create(place, owner="here", capacity=CAPACITY) as store:
        with store.get(decoded(ref)) as held:
            assert (held["x"] == 7).all()
        mine = store.put({"x": np.full(1000, 3)}, request=new_request_id(), stage="s", attempt=1)
        assert there("get", encoded(mine)) == [3, 3000]
        there.kill()
        with store.get(decoded(ref)) as held:
            assert (held["x"] == 7).all()
        store.release(mine.request)


def test_shared_store_passes_the_store_suite_on_another_host(host: SecondHost, place: str) -> None:
    suite = (
        "import sys; from unfuse.stores.tensor_store import TensorStore; from unfuse.testing import check_store;"
        f"check_store(lambda: TensorStore.create(sys.argv[1], owner='far', capacity={CAPACITY}))"
    )
    done = subprocess.run(host.enter([sys.executable, "-c", suite, place]), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_objects_spilled_on_another_host_can_be_pulled(start: Start, host: SecondHost, tmp_path: Path) -> None:
    url, piece = f"spill:shared_memory+disk:{tmp_path}/slow", 1 << 20
    there = start(enter=host.enter, name=url, owner="there", capacity=8 * piece, threshold=0.5)
    refs = [decoded(there("put", value, piece // 8)) for value in range(24)]
    reader = Reader("tcp", there("serve", "tcp", host.far, SECRET))
    for value, ref in enumerate(refs):
        assert (reader.get(ref).view(np.int64) == value).all()
    reader.close()
