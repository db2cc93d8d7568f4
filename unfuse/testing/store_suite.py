"""The conformance suite of tensor stores: run `check_store` on a new StorageBackend."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from unfuse.core.errors import ArenaFull, UnfuseError
from unfuse.core.object_ref import CHUNK_BYTES, DTYPES, ObjectRef, layout_tensors
from unfuse.core.request import new_request_id
from unfuse.stores.tensor_store import TensorStore
from unfuse.stores.tensors import RAW
from unfuse.testing.store_port import PORT_CHECKS, Join, Open, check_closed, check_peers, expect_lost, put_object

#: Replaces the stored bytes of an object, or removes them.
Overwrite = Callable[[ObjectRef, bytes | None], None]

#: Number of bit flips.
FLIPS = 1000
#: Longest wait for room, in seconds.
WITHIN_S = 60


def check_store(open: Open, overwrite: Overwrite | None = None, join: Join | None = None) -> None:
    """Check a tensor store. Raises AssertionError where it breaks the contract.

    `open`: returns a new, empty store of at least 32 MiB, which the suite closes. torch tensors are checked if torch is
    imported already.
    `overwrite`: replaces the stored bytes of an object behind the store's back; None removes them. With it, damage at
    rest is checked too.
    `join`: opens the store of another owner, which knows where the first is. With it, access between owners is checked
    too.
    """
    checks: dict[str, Callable[[TensorStore], None]] = {check.__name__: check for check in (*CHECKS, *PORT_CHECKS)}
    if overwrite:
        checks |= {
            check.__name__: partial(check, overwrite=overwrite) for check in (check_flips, check_incomplete_objects)
        }
    if join:
        checks[check_peers.__name__] = partial(check_peers, join=join)
    for name, check in checks.items():
        with open() as store:
            try:
                check(store)
            except UnfuseError as error:
                raise AssertionError(f"{name}: {error}") from error
            for request in store.stored_requests():
                store.release(request)
            assert store.usage().used == 0, f"{name} did not free all memory: {store.usage()}"
    check_closed(open)


def check_dtypes(store: TensorStore) -> None:
    """Arrays of every dtype are read with their values, shapes and names."""
    bits = np.random.default_rng(7).integers(0, 2, 48, np.uint8)
    tensors = {name: bits.view(bool) if name == "bool" else bits.astype(name) for name in DTYPES if name not in RAW}
    ref = put_object(store, tensors)
    assert [(meta.name, meta.dtype) for meta in ref.tensors] == [(name, name) for name in tensors]
    with store.get(ref, verify=True) as loaded:
        assert list(loaded) == list(tensors)
        for name, value in tensors.items():
            np.testing.assert_array_equal(loaded[name], value, strict=True)


def check_torch(store: TensorStore) -> None:
    """Tensors of torch are read unchanged, as tensors or raw bits, whatever their strides.

    They are read without gradients.
    """
    if (torch := sys.modules.get("torch")) is None:
        return
    tensors = {name: torch.arange(24).reshape(2, 3, 4).to(getattr(torch, name)) for name in DTYPES}
    tensors["across"] = tensors["bfloat16"].transpose(0, 2)
    tensors["point"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(0, 4, dtype=torch.bfloat16)
    tensors["weight"] = torch.ones(3, requires_grad=True)
    ref = put_object(store, {**tensors, "nothing": None})
    with store.get(ref, as_torch=True, verify=True) as loaded:
        assert loaded["nothing"] is None
        for name, value in tensors.items():
            tensor = loaded[name]
            assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (value.dtype, value.shape, False), name
            assert (
                tensor.contiguous()
                .view(-1)
                .view(torch.uint8)
                .equal(value.detach().contiguous().view(-1).view(torch.uint8))
            ), name
    with store.get(ref) as loaded:
        assert all(loaded[name].dtype == raw for name, raw in RAW.items())
        assert bytes(loaded["bfloat16"]) == bytes(tensors["bfloat16"].view(torch.uint16).numpy())


def check_shapes(store: TensorStore) -> None:
    """None, empty arrays, scalars, any strides, foreign byte order and empty objects are stored."""
    grid = np.arange(60, dtype="int32").reshape(3, 4, 5)
    tensors = {
        "none": None,
        "point": np.array(2.5),
        "empty": np.empty((0, 7), "float16"),
        "across": grid.transpose(2, 0, 1),
        "every other": grid[:, ::2, ::-1],
        "foreign": np.arange(5, dtype=">i8"),
        "spread": np.broadcast_to(np.float32(3), (2, 3)),
    }
    with store.get(put_object(store, tensors), verify=True) as loaded:
        assert loaded["none"] is None
        for name, value in tensors.items():
            if value is not None:
                np.testing.assert_array_equal(loaded[name], value)
                assert loaded[name].shape == value.shape and loaded[name].flags.c_contiguous, name
    for nothing in ({}, {"a": None}, {"a": np.empty(0)}):
        ref = put_object(store, nothing)
        assert ref.nbytes == 0 and ref.checksums == ()
        with store.get(ref, verify=True) as loaded:
            assert list(loaded) == list(nothing)


def check_refusals(store: TensorStore) -> None:
    """Values of unsupported types are refused, and use no room."""
    for value, error in ((np.zeros(2, "complex64"), ValueError), ([1, 2], TypeError), (np.array("text"), ValueError)):
        try:
            put_object(store, {"x": value})
        except error:
            continue
        raise AssertionError(f"{value!r} was stored")
    assert store.usage().used == 0 and not store.stored_requests()


def check_ref(store: TensorStore) -> None:
    """A ref is unique, names its origin, has a secret key, and survives encoding."""
    request = new_request_id()
    first, second = (store.put({"x": np.ones(3)}, request=request, stage="denoise", attempt=4) for _ in range(2))
    assert (first.owner, first.node, first.request, first.stage, first.attempt) == (
        store.owner,
        store.node,
        request,
        "denoise",
        4,
    )
    assert first.id != second.id and first.key != second.key and first.generation != second.generation
    assert len(first.key) >= 16
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=ObjectRef)
    with store.get(decoded) as loaded:
        assert loaded["x"].tolist() == [1, 1, 1]


def check_large(store: TensorStore) -> None:
    """An object of several chunks has a checksum for each."""
    rng = np.random.default_rng(3)
    tensors = {name: rng.integers(0, 255, CHUNK_BYTES + 1001, np.uint8) for name in "ab"}
    tensors["c"] = rng.random((512, 1025), np.float32)[:, ::2]
    ref = put_object(store, tensors)
    assert len(ref.checksums) == -(-ref.nbytes // CHUNK_BYTES) == 3
    with store.get(ref, verify=True) as loaded:
        assert all(np.array_equal(loaded[name], value) for name, value in tensors.items())


def check_read_only(store: TensorStore) -> None:
    """A stored array cannot be changed, neither by its source nor by a reader."""
    source = np.arange(6.0)
    ref = put_object(store, {"x": source})
    source[:] = -1
    with store.get(ref) as loaded:
        assert loaded["x"].tolist() == [0, 1, 2, 3, 4, 5]
        assert not loaded["x"].flags.writeable
        try:
            loaded["x"].flags.writeable = True
        except ValueError:
            return
    raise AssertionError("a reader could make the array writable")


def check_delete(store: TensorStore) -> None:
    """A deleted object is lost for new readers, and freed when the last reader closes.

    Deleting is idempotent.
    """
    ref = put_object(store, {"x": np.full(5000, 7)})
    before = store.usage().used
    with store.get(ref) as loaded:
        store.delete(ref)
        store.delete(ref)
        with expect_lost(ref):
            store.get(ref)
        assert not store.stored_requests() and store.usage().used == before
        others = [put_object(store, {"x": np.zeros(5000)}) for _ in range(3)]
        assert (loaded["x"] == 7).all()
        for other in others:
            store.delete(other)
    assert store.usage().used == 0


def check_garbage(store: TensorStore) -> None:
    """A reader that is never closed holds its object until its last array is collected."""
    ref = put_object(store, {"x": np.full(5000, 7), "y": np.ones(9)})
    array = store.get(ref)["x"][10:]
    store.delete(ref)
    gc.collect()
    assert store.usage().used > 0 and (array == 7).all()
    del array
    gc.collect()
    assert store.usage().used == 0


def check_release(store: TensorStore) -> None:
    """`release` frees all objects of one request only. `stored_requests` returns requests with objects."""
    first, second = new_request_id(), new_request_id()
    refs = [put_object(store, {"x": np.ones(10)}, first) for _ in range(3)]
    second_ref = put_object(store, {"x": np.ones(10)}, second)
    assert store.stored_requests() == {first, second}
    store.release(first)
    store.release(first)
    assert store.stored_requests() == {second}
    for ref in refs:
        with expect_lost(ref):
            store.get(ref)
    store.get(second_ref).close()


def check_full(store: TensorStore) -> None:
    """A full store raises ArenaFull with numbers, loses nothing, and recovers."""
    empty = store.usage()
    piece = np.zeros(empty.capacity // 8, np.uint8)
    refs: list[ObjectRef] = []
    try:
        for _ in range(9):
            refs.append(put_object(store, {"x": piece}))
    except ArenaFull as error:
        assert error.needed == piece.nbytes and error.free < error.capacity
    assert 4 <= len(refs) <= 8, f"{len(refs)} objects of an eighth of the capacity were stored"
    assert len(store.stored_requests()) == len(refs)
    store.delete(refs.pop())
    refs.append(put_object(store, {"x": piece}))
    for ref in refs:
        store.get(ref).close()
        store.delete(ref)
    usage = store.usage()
    assert usage.used == usage.requested == 0 and usage.free == usage.capacity
    assert usage.largest_free == empty.largest_free, "freed memory was not merged"
    assert usage.high_water >= 4 * piece.nbytes


def check_forged(store: TensorStore) -> None:
    """A ref that differs in any field raises ObjectLost, and leaves no hold."""
    ref = put_object(store, {"x": np.ones(1000), "y": np.zeros(3, "int8")})
    x, y = ref.tensors
    changed: list[dict[str, Any]] = [
        {"key": bytes(16)},
        {"key": b""},
        {"generation": ref.generation + 1},
        {"id": "0" * 32},
        {"nbytes": ref.nbytes + 64},
        {"tensors": (x, msgspec.structs.replace(y, offset=1 << 40))},
        {"tensors": (msgspec.structs.replace(x, shape=(1 << 50,)), y)},
        {"tensors": (msgspec.structs.replace(x, dtype="object"), y)},
        dict(zip(("tensors", "nbytes"), layout_tensors([("x", "uint8", (1 << 50,))]), strict=True)),
    ]
    for change in changed:
        forged = msgspec.structs.replace(ref, **change)
        with expect_lost(forged):
            store.get(forged)
    store.delete(ref)
    assert store.usage().used == 0


def check_damage(store: TensorStore) -> None:
    """With `verify`, bytes that do not match the ref's checksums raise ObjectLost.

    No hold is left.
    """
    ref = put_object(store, {"x": np.arange(1000)})
    for checksums in ((ref.checksums[0] ^ 1,), (), ref.checksums * 2):
        damaged = msgspec.structs.replace(ref, checksums=checksums)
        with expect_lost(damaged):
            store.get(damaged, verify=True)
    store.get(ref, verify=True).close()
    store.delete(ref)
    assert store.usage().used == 0


def check_threads(store: TensorStore) -> None:
    """Many threads put, get, hold and delete at once, and each reads its own bytes."""

    def work(number: int) -> None:
        request = new_request_id()
        for turn in range(20):
            value = np.full(2000 + 500 * number, number * 1000 + turn)
            ref = put_object(store, {"x": value}, request)
            with store.get(ref, verify=turn % 2 == 0) as loaded:
                store.delete(ref)
                assert (loaded["x"] == value).all()
        store.release(request)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert store.usage().used == 0


def check_wait(store: TensorStore) -> None:
    """`put` with `wait` gets room that is freed meanwhile.

    An object larger than the store is refused at once.
    """
    capacity = store.usage().capacity
    piece = np.zeros(capacity // 8, np.uint8)
    refs: list[ObjectRef] = []
    with suppress(ArenaFull):
        while len(refs) < 9:
            refs.append(put_object(store, {"x": piece}))
    assert len(refs) < 9
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(store.put, {"x": piece}, request=new_request_id(), stage="s", attempt=1, wait=WITHIN_S)
        wait([patient], 0.05)  # so that it has most likely found no room before there is some
        for ref in refs:
            store.delete(ref)
        store.get(patient.result()).close()
    for never in (capacity, capacity * 2):
        try:
            put_object(store, {"x": np.broadcast_to(np.uint8(1), (never + 1,))})
        except ArenaFull as error:
            assert error.needed > error.capacity
        else:
            raise AssertionError("an object larger than the capacity was stored")


def check_flips(store: TensorStore, overwrite: Overwrite) -> None:
    """Each of FLIPS bit flips at rest is detected, in small objects and across chunks."""
    rng = np.random.default_rng(5)
    for nbytes, flips in ((40_000, FLIPS - 10), (2 * CHUNK_BYTES + 999, 10)):
        ref = put_object(store, {"x": rng.integers(0, 255, nbytes, np.uint8)})
        stored = bytearray(store.open(ref).bytes())
        for bit in rng.choice(len(stored) * 8, flips, replace=False).tolist():
            stored[bit // 8] ^= 1 << bit % 8
            overwrite(ref, bytes(stored))
            stored[bit // 8] ^= 1 << bit % 8
            with expect_lost(ref):
                store.get(ref)
        overwrite(ref, bytes(stored))
        store.get(ref, verify=True).close()


def check_incomplete_objects(store: TensorStore, overwrite: Overwrite) -> None:
    """An object at rest that is shorter, longer or missing is lost.

    Once its bytes are restored, it can be read again.
    """
    ref = put_object(store, {"x": np.arange(CHUNK_BYTES // 8 + 500)})
    stored = bytes(store.open(ref).bytes())
    for wreck in (b"", stored[:1], stored[:-1], stored[:CHUNK_BYTES], stored + b"x", stored * 2, None):
        overwrite(ref, wreck)
        with expect_lost(ref):
            store.get(ref)
        overwrite(ref, stored)
        store.get(ref, verify=True).close()
    overwrite(ref, None)
    store.delete(ref)
    store.release(ref.request)
    assert not store.stored_requests() and store.usage().used == 0


CHECKS = (
    check_dtypes,
    check_torch,
    check_shapes,
    check_refusals,
    check_ref,
    check_large,
    check_read_only,
    check_delete,
    check_garbage,
    check_release,
    check_full,
    check_forged,
    check_damage,
    check_threads,
    check_wait,
)
