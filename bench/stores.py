"""The tensor store against the memory and the disk below it, everything interleaved in one run.

put: against a loop that copies and hashes chunk by chunk. get: from another process, over sizes. spill and restore: a
store's disk against a file written and read by hand. `python -m bench.stores [FOLDER]`
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.report import ratio, show, spread
from unfuse.arena.arena import Arena
from unfuse.core.object_ref import ObjectRef, chunk_bytes
from unfuse.core.request import new_request_id
from unfuse.stores.tensor_store import TensorStore

KIB, MIB = 1 << 10, 1 << 20
PUT_SIZES = (1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
GET_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
SPILL_BYTES = 64 * MIB
PAIRS = 15


def timed(work: object, *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)  # type: ignore[operator]
    return time.perf_counter() - began


def copy_and_hash(memory: NDArray[np.uint8], source: NDArray[np.uint8]) -> list[int]:
    """What a put cannot do without: each chunk copied, and hashed while it is in the cache."""
    step, sums = chunk_bytes(source.nbytes), []
    for start in range(0, source.nbytes, step):
        stop = min(start + step, source.nbytes)
        memory[start:stop] = source[start:stop]
        sums.append(xxhash.xxh3_64_intdigest(memory[start:stop].data))
    return sums


def puts(sizes: tuple[int, ...], pairs: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for nbytes in sizes:
        source = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
        with TensorStore.create("shared_memory", capacity=nbytes + MIB) as store:
            arena = Arena(nbytes + MIB)
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
            arena.close()
        found[f"{nbytes >> 20} MiB"] = {
            "put_ms": round(median(ours) * 1e3, 3),
            "copy_and_hash_ms": round(median(theirs) * 1e3, 3),
            "ratio": ratio(ours, theirs),
        }
    return found


def own(sizes: tuple[int, ...]) -> None:
    """A process that puts one object of each size, says where, and waits."""
    with TensorStore.create("shared_memory", owner="own", capacity=sum(sizes) * 2 + MIB) as store:
        for nbytes in sizes:
            ref = store.put({"x": np.ones(nbytes, np.uint8)}, request="r", stage="s", attempt=1)
            print(msgspec.msgpack.encode(ref).hex())
        print(store.address, flush=True)
        sys.stdin.readline()


def gets(sizes: tuple[int, ...], times: int) -> dict[str, object]:
    command = [sys.executable, "-m", "bench.stores", "own", *map(str, sizes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        return read_from([owner.stdout.readline().strip() for _ in range(len(sizes) + 1)], sizes, times)


def read_from(lines: list[str], sizes: tuple[int, ...], times: int) -> dict[str, object]:
    refs = [msgspec.msgpack.decode(bytes.fromhex(line), type=ObjectRef) for line in lines[:-1]]
    seconds: dict[int, list[float]] = {nbytes: [] for nbytes in sizes}
    with TensorStore.create("shared_memory", owner="other", capacity=MIB) as store:
        store.learn({"own": ("", lines[-1])})
        for _ in range(times):
            for nbytes, ref in zip(sizes, refs, strict=True):
                began = time.perf_counter()
                held = store.get(ref)
                seconds[nbytes].append(time.perf_counter() - began)
                assert held["x"][-1] == 1
                held.close()
    found = {f"{nbytes >> 10} KiB": spread([1e6 * each for each in took]) for nbytes, took in seconds.items()}
    p50 = [median(took) for took in seconds.values()]
    return {"microseconds": found, "largest_over_smallest": round(p50[-1] / p50[0], 3)}


def make_room(store: TensorStore, nbytes: int) -> None:
    store._backend.abort(store._backend.create(nbytes, "r").id)


def spills(folder: Path, nbytes: int, pairs: int) -> dict[str, object]:
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
            "MiB_per_s": round(nbytes / MIB / median(ours)),
            "file_MiB_per_s": round(nbytes / MIB / median(theirs)),
            "ratio": ratio(ours, theirs),
        }
        for name, (ours, theirs) in moves.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["own"]:
        own(tuple(map(int, sys.argv[2:])))
        return
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as folder:
        show(
            "stores",
            put=puts(PUT_SIZES, PAIRS),
            get=gets(GET_SIZES, 2000),
            spill_64_MiB=spills(Path(folder), SPILL_BYTES, PAIRS),
        )


if __name__ == "__main__":
    main()
