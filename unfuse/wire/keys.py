"""Keys, by which messages between schedulers and workers are encrypted, and others are not heard (CURVE)."""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

import msgspec
import structlog
import zmq
from zmq.utils import z85

from unfuse.core.errors import ConfigError
from unfuse.core.paths import expand_path
from unfuse.core.supervisor import LogThrottle
from unfuse.wire.mailbox import Mailbox

SIDES = ("scheduler", "worker")  # each has a file with its own secret key and the other side's public key

SHARED = "shared.key"
"""The file of a secret that both sides share: the keys of each side are derived from it."""

Z85_CHARS, SHARED_CHARS = 40, 32
"""Characters of a key, and the fewest of a shared secret."""

log = structlog.get_logger(__name__)


class Keys(msgspec.Struct, frozen=True):
    """One side's secret key and the other side's public key, in Z85, the text form that ZMQ uses."""

    #: The secret key of this side.
    secret: str
    #: The public key of the other side.
    peer: str

    def secure(self, socket: zmq.Socket[bytes], server: bool) -> None:
        """Make a socket encrypt, before it binds or connects. A server also needs `authenticate`."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret.encode()))
        if server:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"unfuse")
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.peer.encode())

    def authenticate(self, context: zmq.Context[zmq.Socket[bytes]]) -> Mailbox:
        """Before bind: answer ZMQ whether a connection is admitted, until that is closed."""
        asked, throttle = context.socket(zmq.REP), LogThrottle()
        asked.bind("inproc://zeromq.zap.01")

        def admit(asking: list[bytes]) -> None:
            """Admit connections with the peer's key, by ZAP (ZeroMQ's RFC 27)."""
            version, number, *question = asking
            known = False
            try:
                known = question[3:] == [b"CURVE", z85.decode(self.peer)]
            finally:  # each question must be answered before the next one comes
                door.send([version, number, b"200" if known else b"400", b"", b"", b""])
            if not known and (times := throttle.count_if_due("key")):
                log.warning("refused a connection without the workers' key", times=times)

        door = Mailbox(asked, "admitting workers", admit)
        return door


def new() -> dict[str, str]:
    """What a new file of keys holds for each side."""
    pairs = [zmq.curve_keypair() for _ in SIDES]
    ends = zip(SIDES, pairs, pairs[::-1], strict=True)
    return {side: f"secret {secret.decode()}\npeer {peer.decode()}\n" for side, (_, secret), (peer, _) in ends}


def make(folder: Path) -> None:
    """Write new pairs of keys into a folder that only its owner may read. Raises ConfigError if it has keys already."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        if existing := [path for side in SIDES if (path := _file(folder, side)).exists()]:
            raise ConfigError(f"{existing[0]} is there already, and is not overwritten: name another folder")
        for side, text in new().items():
            with open(os.open(_file(folder, side), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder} ({error.strerror}): name another folder") from error


def make_once(folder: Path) -> None:
    """Write keys into a folder unless it has some; safe when several processes do so at once. Raises ConfigError."""
    if any(_file(folder, side).exists() for side in SIDES):
        return
    draft = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    try:
        make(draft)
        with suppress(OSError):  # another process was faster: use its keys
            draft.rename(folder)
    finally:
        rmtree(draft, ignore_errors=True)


def derive(shared: str, side: str) -> Keys:
    """The keys of a side, derived from a secret that both sides share."""
    (other,) = (one for one in SIDES if one != side)
    own, others = (
        z85.encode(hmac.digest(shared.encode(), f"unfuse wire {one}".encode(), "sha256")) for one in (side, other)
    )
    return Keys(own.decode(), zmq.curve_public(others).decode())


def read(folder: str, side: str) -> Keys | None:
    """The keys of a side; None without a folder. Raises ConfigError for a file that is bad, or that others can read.

    A folder without a file of that side may have a `shared.key` instead.
    """
    if not folder:
        return None
    path = _file(expand_path(folder), side)
    if not path.exists() and (shared := path.with_name(SHARED)).exists():
        path = shared
    try:
        mode = path.stat().st_mode
        text = path.read_text()
        keys = (
            _parse_shared(text, side)
            if path.name == SHARED
            else Keys(**dict(line.split() for line in text.splitlines()))
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make keys by `unfuse keys new DIR`") from error
    except (ValueError, TypeError):
        keys = Keys("", "")
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others: chmod 600 it, or make new keys if somebody may have read it")
    if {len(keys.secret), len(keys.peer)} != {Z85_CHARS}:
        if path.name == SHARED:
            raise ConfigError(f"{path} is not one word of at least {SHARED_CHARS} characters: write a random one to it")
        raise ConfigError(f"{path} holds no keys: make some by `unfuse keys new DIR`")
    return keys


def _parse_shared(text: str, side: str) -> Keys:
    """The keys of a side, from what a shared file holds. Raises ValueError."""
    (word,) = text.split()
    if len(word) < SHARED_CHARS:
        raise ValueError(f"{len(word)} characters")
    return derive(word, side)


def _file(folder: Path, side: str) -> Path:
    return folder / f"{side}.key"
