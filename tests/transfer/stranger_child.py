"""Another user's process: it knows every address and every ref, and says what it got with them, or why nothing."""

import encodings.idna  # looked for when an address is, which this user could not read then
import json
import os
import socket
import sys
from contextlib import suppress

import msgspec
import numpy as np
import zmq

from unfuse.arena.protocol import GetState, HoldObject, Write, frame
from unfuse.core.errors import UnfuseError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.registry import resolve
from unfuse.transfer import BACKENDS, open_engine
from unfuse.transfer.base import Pull, TransferOptions
from unfuse.transfer.tcp import NONCE, prove, read, send, write

assert encodings.idna


def at_the_arena(path: str, ref: ObjectRef) -> bytes:
    """Past our own client, which would not talk to another user's arena."""
    got = b""
    for message in (HoldObject(ref.id, ref.key, ref.generation, ref.nbytes), Write(b""), GetState()):
        with socket.socket(socket.AF_UNIX) as arena:
            arena.settimeout(20)
            arena.connect(path)
            with suppress(ConnectionError):
                arena.sendall(frame(message))
                got += socket.recv_fds(arena, 1 << 16, 4)[0]
    return got


def by_an_engine(name: str, address: str, ref: ObjectRef, secret: str) -> bytes:
    """As a worker would, with a secret that is guessed."""
    options = TransferOptions(secret=secret, insecure=not secret, heartbeat_s=2, max_missed=1, threads=1)
    memory, engine = np.zeros(ref.nbytes, np.uint8), open_engine(name, options)
    try:
        list(engine.connect(address).pull(ref, 0, ref.nbytes, memory))
    finally:
        engine.close()
    return memory.tobytes()


def without_a_word(address: str, ref: ObjectRef, proof: bytes) -> bytes:
    """Over TCP, with this for a proof; what comes after the nonce."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), 20) as owner:
        write(owner, bytes(NONCE))
        read(owner)
        write(owner, proof)
        send(owner, Pull(ref.id, ref.key, ref.generation, ref.nbytes, 0, ref.nbytes))
        return owner.recv(1 << 16)


def main() -> None:
    for name in BACKENDS.keys() & {"tcp", "zmq"}:
        resolve(BACKENDS, name, "engine")  # while this user may read Python's own files
    user, arena, engines, refs = json.loads(sys.argv[1])
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    guess = zmq.curve_keypair()[1].decode()
    attacks = [(at_the_arena, arena.removeprefix("unix:"))]
    for name, address in engines.items():
        attacks += [(lambda at, ref, n=name, s=secret: by_an_engine(n, at, ref, s), address) for secret in ("", guess)]
        for proof in (b"", bytes(32), prove("", b"reader", bytes(NONCE), bytes(NONCE))) if name == "tcp" else ():
            attacks += [(lambda at, ref, p=proof: without_a_word(at, ref, p), address)]
    outcomes = []
    for attack, address in attacks:
        for ref in (msgspec.msgpack.decode(bytes.fromhex(ref), type=ObjectRef) for ref in refs):
            try:
                outcomes.append(attack(address, ref).hex())
            except (OSError, UnfuseError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    print(json.dumps(outcomes))


main()
