"""What dead workers leave in places that outlive them can be found and dropped, whoever they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.stores.servers import S3Server
from tools.redis_server import RedisServer
from unfuse.core.errors import ObjectLost
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.keyed import stored_objects
from unfuse.stores.tensor_store import TensorStore


@pytest.fixture(
    params=["disk", pytest.param("redis", marks=pytest.mark.slow), pytest.param("s3", marks=pytest.mark.slow)]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return f"disk:{tmp_path}/place"
    server: RedisServer | S3Server = request.getfixturevalue(f"{request.param}_server")
    return server.url


def put(store: TensorStore, request: str) -> ObjectRef:
    return store.put({"x": np.arange(9)}, request=request, stage="s", attempt=1)


def test_objects_and_copies_of_dead_workers_are_found_and_dropped(place: str) -> None:
    """Given two workers that put their outputs into one place and copies beside them, and have died, when what is left
    of one request is dropped, then the other's is still there to be read."""
    stores = [TensorStore.create(place, owner=owner, durable=place) for owner in ("a", "b")]
    refs = {request: [put(store, request) for store in stores] for request in ("req_1", "req_2")}
    for store, ref in zip(stores, refs["req_1"], strict=True):
        store.save(ref)
    (remains,) = stored_objects(f"spill:shared_memory+{place}", place, "none", "shared_memory")

    found = remains.requests()
    remains.drop(found["req_1"])

    assert {request: len(folders) for request, folders in found.items()} == {"req_1": 3, "req_2": 2}
    assert remains.requests().keys() == {"req_2"}
    reader = TensorStore.create(place, owner="c", durable=place)
    for ref in refs["req_2"]:
        assert reader.get(ref)["x"].tolist() == list(range(9))
    for ref in refs["req_1"]:
        with pytest.raises(ObjectLost):
            reader.get(ref)
    remains.drop(remains.requests()["req_2"])
