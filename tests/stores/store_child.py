"""A process of its own that does to a tensor store what it is told: one JSON line in, one out. Never imports torch."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from unfuse.core.errors import UnfuseError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import new_request_id
from unfuse.stores.tensor_store import HeldTensors, TensorStore
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferOptions


class Child:
    """The commands."""

    def __init__(self, options: dict[str, Any]) -> None:
        options = {"run_dir": os.environ["UNFUSE_RUN_DIR"]} | options
        options["write_token"] = bytes.fromhex(options.get("write_token", ""))
        self.store = TensorStore.create(options.pop("name", "shared_memory"), **options)
        self.held: dict[str, HeldTensors] = {}

    def where(self) -> dict[str, str]:
        """How others reach this one's arena."""
        return {"address": self.store.address, "write_token": self.store.write_token.hex()}

    def put(self, value: int, count: int, request: str = "") -> str:
        """An object "x" of `count` times `value` as int64."""
        tensors = {"x": np.full(count, value)}
        ref = self.store.put(tensors, request=request or new_request_id(), stage="s", attempt=1)
        return msgspec.msgpack.encode(ref).hex()

    def begin(self, nbytes: int) -> None:
        """Start to write an object, and never finish."""
        self.store._backend.create(nbytes, new_request_id()).memory[:] = 1

    def get(self, ref: str, name: str = "x") -> list[int]:
        """Hold an object under a name: its first value, its sum."""
        self.held[name] = held = self.store.get(msgspec.msgpack.decode(bytes.fromhex(ref), type=ObjectRef))
        return [int(held["x"][0]), int(held["x"].sum())]

    def first(self, name: str = "x") -> int:
        """The first value of a held object, read again."""
        return int(self.held[name]["x"][0])

    def lies_in(self, name: str = "x") -> str:
        """The line of this process's memory map that a held array lies in."""
        address = self.held[name]["x"].ctypes.data
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return line.strip()
        return ""

    def poke(self, name: str = "x") -> None:
        """Write to a held array by force, as a wrong stage would."""
        import ctypes

        ctypes.c_int64.from_address(self.held[name]["x"].ctypes.data).value = 0

    def close(self, name: str = "x") -> None:
        """Let go."""
        self.held.pop(name).close()

    def serve(self, name: str, host: str, secret: str) -> str:
        """Let other nodes pull by a transfer engine; where."""
        assert self.store.arena
        self.engine = open_engine(name, TransferOptions(host=host, secret=secret, trusted_network=True))
        return self.engine.serve(self.store.arena)

    def release(self, request: str) -> None:
        """Give up what is kept of a request."""
        self.store.release(request)

    def learn(self, peers: dict[str, list[str]]) -> None:
        """Where others are."""
        self.store.register_owners({owner: (node, address) for owner, (node, address) in peers.items()})

    def reaches(self, owner: str) -> bool:
        """Whether another owner's memory can be mapped."""
        return self.store.reaches(owner)

    def used(self) -> int:
        """Bytes in use."""
        return self.store.usage().used

    def memory_file(self) -> int:
        """The inode of the arena this process owns."""
        return os.fstat(self.store._backend._local_arena.fd).st_ino

    def modules(self) -> list[str]:
        """Names of the imported top-level modules."""
        return sorted({name.partition(".")[0] for name in sys.modules})


def main() -> None:
    child = Child(json.loads(sys.argv[1]))
    print(json.dumps({"answer": child.where()}), flush=True)
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        try:
            answer = {"answer": getattr(child, verb)(*arguments)}
        except UnfuseError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


main()
