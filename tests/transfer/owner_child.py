"""A process of its own that owns objects and serves them: one JSON line in, one out."""

import json
import os
import sys
from typing import Any

import msgspec

from unfuse.core.errors import UnfuseError
from unfuse.core.object_ref import ObjectRef
from unfuse.testing.transfer_owner import ArenaOwner
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferOptions


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    names, options = sys.argv[1].split(","), msgspec.json.decode(sys.argv[2], type=TransferOptions)
    owner = ArenaOwner(lambda: open_engine(names[0], options))
    others = {name: open_engine(name, options) for name in names[1:]}
    others_at = {name: engine.serve(owner.arena) for name, engine in others.items()}
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        arguments = [as_ref(value) for value in arguments]
        try:
            value = others_at if verb == "others" else getattr(owner, verb)(*arguments)
        except UnfuseError as error:
            print(json.dumps({"error": str(error)}), file=answers, flush=True)
        else:
            value = msgspec.msgpack.encode(value).hex() if isinstance(value, ObjectRef) else value
            print(json.dumps({"answer": value}), file=answers, flush=True)
    for engine in others.values():
        engine.close()
    owner.stop()


def as_ref(value: Any) -> Any:
    return msgspec.msgpack.decode(bytes.fromhex(value), type=ObjectRef) if isinstance(value, str) else value


main()
