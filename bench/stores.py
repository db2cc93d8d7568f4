"""The tensor store against the memory and the disk below it, everything interleaved in one run.

put: by the process that owns the memory, and by another that writes into it (as a worker's compute process does),
against a loop that copies and hashes piece by piece. get: from another process, over sizes. spill and restore: a store
that moves one object to disk to take another and reads it back verified, against a file written and read by hand, both
without fsync and from the page cache. `python -m bench.stores [FOLDER]`
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.report import ratio, show, spread, table
from unfuse.arena.arena import Arena
from unfuse.core.object_ref import ObjectRef, chunk_bytes
from unfuse.core.request import new_request_id
from unfuse.stores.base import HASH_BYTES
from unfuse.stores.tensor_store import TensorStore

KIB, MIB = 1 << 10, 1 << 20
PUT_SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
GET_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
SPILL_BYTES = 64 * MIB
PAIRS = 15


def timed(work: object, *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)  # type: ignore[operator]
    return time.perf_counter() - began


def copy_and_hash(memory: NDArray[np.uint8], source: NDArray[np.uint8]) -> list[int]:
    """What a put cannot do without: each piece copied, and hashed while it is in the cache."""
    chunk, sums, hasher, view = chunk_bytes(source.nbytes), [], xxhash.xxh3_64(), memory.data
    for first in range(0, source.nbytes, chunk):
        last = min(first + chunk, source.nbytes)
        for start in range(first, last, HASH_BYTES):
            stop = min(start + HASH_BYTES, last)
            memory[start:stop] = source[start:stop]
            hasher.update(view[start:stop])
        sums.append(hasher.intdigest())
        hasher.reset()
    return sums


def puts(sizes: tuple[int, ...], pairs: int) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for nbytes in sizes:
        with (
            TensorStore.create("shared_memory", capacity=nbytes + MIB) as mine,
            owner(nbytes + MIB) as (address, token, _),
            TensorStore.create("shared_memory", address=address, write_token=token) as writer,
        ):
            found[f"{nbytes >> 20} MiB"] = put_into({"owner": mine, "writer": writer}, nbytes, pairs)
    return found


def put_into(stores: dict[str, TensorStore], nbytes: int, pairs: int) -> dict[str, object]:
    source, arena = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8), Arena(nbytes + MIB)
    found: dict[str, object] = {}
    for name, store in stores.items():
        ours, theirs = [], []
        for pair in range(pairs + 2):
            took = timed(copy_and_hash, arena.memory, source)
            began = time.perf_counter()
            ref = store.put({"x": source}, request="r", stage="s", attempt=1)
            mine = time.perf_counter() - began
            store.delete(ref)
            if pair > 1:
                ours.append(mine)
                theirs.append(took)
        found |= {
            "copy and hash, ms": round(median(theirs) * 1e3, 3),
            f"put by the {name}, ms": round(median(ours) * 1e3, 3),
            f"{name} ÷ copy and hash": round(ratio(ours, theirs)["p50"], 3),
        }
    arena.close()
    return found


@contextmanager
def owner(capacity: int, *sizes: int) -> Iterator[tuple[str, bytes, list[ObjectRef]]]:
    """The store of another process: its address, the right to write into it, and an object of each size."""
    command = [sys.executable, "-m", "bench.stores", "own", *map(str, (capacity, *sizes))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address, token, *refs = process.stdout.readline().split()
        yield address, bytes.fromhex(token), [msgspec.msgpack.decode(bytes.fromhex(r), type=ObjectRef) for r in refs]


def own(capacity: int, *sizes: int) -> None:
    """That process."""
    with TensorStore.create("shared_memory", owner="own", capacity=capacity) as store:
        values = (np.ones(nbytes, np.uint8) for nbytes in sizes)
        refs = [store.put({"x": value}, request="r", stage="s", attempt=1) for value in values]
        print(store.address, store.write_token.hex(), *(msgspec.msgpack.encode(r).hex() for r in refs), flush=True)
        sys.stdin.readline()


def gets(sizes: tuple[int, ...], times: int) -> dict[str, dict[str, object]]:
    seconds: dict[int, list[float]] = {nbytes: [] for nbytes in sizes}
    with (
        owner(sum(sizes) * 2 + MIB, *sizes) as (address, _, refs),
        TensorStore.create("shared_memory", owner="other", capacity=MIB) as store,
    ):
        store.register_owners({"own": ("", address)})
        for _ in range(times):
            for nbytes, ref in zip(sizes, refs, strict=True):
                began = time.perf_counter()
                held = store.get(ref)
                seconds[nbytes].append(time.perf_counter() - began)
                assert held["x"][-1] == 1
                held.close()
    p50 = median(seconds[sizes[0]])
    return {
        f"{nbytes >> 10} KiB": {
            **{f"{name}, µs": round(value * 1e6, 1) for name, value in spread(took).items() if name in ("p50", "p99")},
            "p50 over that of the smallest": round(median(took) / p50, 2),
        }
        for nbytes, took in seconds.items()
    }


def make_room(store: TensorStore, nbytes: int) -> None:
    store._backend.abort(store._backend.create(nbytes, "r").id)


def spills(folder: Path, nbytes: int, pairs: int) -> dict[str, dict[str, object]]:
    """A store that moves one object out to take another, and gets it back, against the file alone."""
    source = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    plain, url = folder / "plain", f"spill:shared_memory+disk:{folder}/kept"
    moves: dict[str, tuple[list[float], list[float]]] = {"spill": ([], []), "restore": ([], [])}
    with TensorStore.create(url, capacity=nbytes * 3 // 2) as store:
        for pair in range(pairs + 1):
            ref = store.put({"x": source}, request=new_request_id(), stage="s", attempt=1)
            store.get(ref, verify=True).close()
            written, read = timed(plain.write_bytes, source.data), timed(plain.read_bytes)
            plain.unlink()
            spilled = timed(make_room, store, nbytes)
            restored = timed(store.get, ref)
            store.release(ref.request)
            for name, ours, theirs in (("spill", spilled, written), ("restore", restored, read)) if pair else ():
                moves[name][0].append(ours)
                moves[name][1].append(theirs)
    return {
        name: {
            "MiB/s": round(nbytes / MIB / median(ours)),
            "by hand, MiB/s": round(nbytes / MIB / median(theirs)),
            "speed ÷ by hand": round(1 / ratio(ours, theirs)["p50"], 2),
        }
        for name, (ours, theirs) in moves.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["own"]:
        own(*map(int, sys.argv[2:]))
        return
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as folder:
        found = {
            "put": puts(PUT_SIZES, PAIRS),
            "get": gets(GET_SIZES, 2000),
            f"{SPILL_BYTES // MIB} MiB": spills(Path(folder), SPILL_BYTES, PAIRS),
        }
    show("stores", pairs=PAIRS, **found)
    for name, rows in found.items():
        table(name, rows)


if __name__ == "__main__":
    main()
