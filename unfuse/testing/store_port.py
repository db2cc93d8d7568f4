"""Checks of the storage port beneath a tensor store, and between owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from unfuse.core.errors import ObjectLost
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import new_request_id
from unfuse.stores.base import ObjectDraft, checksums_of
from unfuse.stores.tensor_store import TensorStore

#: Opens a new, empty store.
Open = Callable[[], TensorStore]
#: Opens the store of another owner that can read from the given one.
Join = Callable[[TensorStore], TensorStore]


def put_object(store: TensorStore, tensors: Mapping[str, Any], request: str = "") -> ObjectRef:
    """Put tensors as the output of stage "s". The default request is a new one."""
    return store.put(tensors, request=request or new_request_id(), stage="s", attempt=1)


@contextmanager
def expect_lost(ref: ObjectRef) -> Iterator[None]:
    """Require ObjectLost with the object's id inside the block. A context manager."""
    try:
        yield
    except ObjectLost as error:
        assert error.object_id == ref.id, f"ObjectLost names {error.object_id!r}, not {ref.id!r}"
    else:
        raise AssertionError("an object that does not exist was read")


def start_output(store: TensorStore, request: str, nbytes: int = 5000) -> tuple[ObjectDraft, ObjectRef]:
    """Create a draft with a known pattern. Returns it with its future ref."""
    draft = store._backend.create(nbytes, request)
    draft.memory[:] = np.arange(nbytes) % 251
    checksums = checksums_of(draft.memory)
    fields = draft.generation, nbytes, (), checksums, draft.key, 0.0
    return draft, ObjectRef(draft.id, store.owner, store.node, request, "s", 1, *fields)


def check_drafts(store: TensorStore) -> None:
    """A draft cannot be read, is listed by `stored_requests`, and uses room.

    That ends when it is aborted. A sealed one can be read, and a hold may be released twice.
    """
    backend, request = store._backend, new_request_id()
    draft, ref = start_output(store, request)
    assert backend.stored_requests() == {request} and store.usage().used >= 5000
    with expect_lost(ref):
        backend.open(ref)
    backend.abort(draft.id)
    assert not backend.stored_requests() and store.usage().used == 0
    with expect_lost(ref):
        backend.open(ref)
    draft, ref = start_output(store, request)
    backend.seal(draft.id)
    reader = backend.open(ref)
    assert (reader.bytes() == np.arange(5000) % 251).all()
    reader.release()
    reader.release()
    backend.delete(ref)
    assert store.usage().used == 0


def check_overtaken(store: TensorStore) -> None:
    """Releasing a request while its draft is written leaves nothing.

    Drafts of other requests are not affected.
    """
    over, alive = new_request_id(), new_request_id()
    draft, ref = start_output(store, over)
    other_draft, other_ref = start_output(store, alive)
    store.release(over)
    assert store.stored_requests() == {alive}
    with expect_lost(ref):
        store._backend.seal(draft.id)
    with expect_lost(ref):
        store._backend.open(ref)
    store._backend.seal(other_draft.id)
    store._backend.open(other_ref).release()
    store.release(alive)
    assert store.usage().used == 0


def check_idle(store: TensorStore) -> None:
    """`idle` returns sealed objects without holds, the least recently used first, or none."""
    refs = [put_object(store, {"x": np.full(100, value)}) for value in range(4)]
    draft, _ = start_output(store, refs[0].request)
    with store.get(refs[1]):
        store.get(refs[0]).close()
        idle = [extent.id for extent in store._backend.idle()]
        assert idle in ([], [refs[2].id, refs[3].id, refs[0].id]), idle
    store._backend.abort(draft.id)


def check_peers(store: TensorStore, join: Join) -> None:
    """Another owner can read an object by its ref, but neither delete nor change it."""
    with join(store) as other:
        refs = [put_object(store, {"x": np.full(5000, value)}) for value in range(3)]
        other_ref = put_object(other, {"x": np.full(5000, 9)}, refs[0].request)
        for ref in refs:
            other.delete(ref)
        other.release(refs[0].request)
        assert not other.stored_requests() and len(store.stored_requests()) == 3
        for value, ref in enumerate(refs):
            with other.get(ref, verify=True) as tensors:
                assert (tensors["x"] == value).all() and not tensors["x"].flags.writeable
        for change in ({"key": bytes(16)}, {"generation": 99}, {"id": other_ref.id}):
            with expect_lost(forged := msgspec.structs.replace(refs[0], **change)):
                other.get(forged)
        with other.get(refs[0]) as tensors:
            store.delete(refs[0])
            with expect_lost(refs[0]):
                other.get(refs[0])
            put_object(store, {"x": np.full(5000, 8)})
            assert (tensors["x"] == 0).all()


def check_closed(open: Open) -> None:
    """Arrays that were read stay valid after their store is closed."""
    store = open()
    request = new_request_id()
    tensors = store.get(put_object(store, {"x": np.full(5000, 7)}, request))
    array = tensors["x"]
    store.release(request)
    store.close()
    assert (array == 7).all(), "an array changed after its store was closed"
    tensors.close()


PORT_CHECKS = (check_drafts, check_overtaken, check_idle)
