"""CURVE keys, which encrypt and authenticate the connections between schedulers and workers."""

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
from unfuse.core.paths import create_private_folder, expand_path
from unfuse.core.supervisor import LogThrottle
from unfuse.wire.mailbox import Mailbox

SIDES = ("scheduler", "worker")  # each has a file with its own secret key and the other side's public key

SHARED_KEY_FILE = "shared.key"
"""The file with a secret that both sides share. The keys of each side are derived from it."""

Z85_CHARS, SECRET_CHARS = 40, 32
"""Characters of a key, and the fewest of a shared secret."""

log = structlog.get_logger(__name__)


class Keys(msgspec.Struct, frozen=True):
    """The secret key of one side and the public key of the other.

    Both are in Z85, the text form that ZMQ uses.
    """

    #: The secret key of this side.
    secret: str
    #: The public key of the other side.
    peer: str

    def secure(self, socket: zmq.Socket[bytes], server: bool) -> None:
        """Enable encryption on a socket before bind or connect.

        A server also needs `start_authenticator`.
        """
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret.encode()))
        if server:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"unfuse")
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.peer.encode())

    def start_authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> Mailbox:
        """Start to authenticate connections, before bind; close the result to stop."""
        zap_socket, throttle = context.socket(zmq.REP), LogThrottle()
        zap_socket.bind("inproc://zeromq.zap.01")

        def admit(request: list[bytes]) -> None:
            """Admit connections with the peer's key, by ZAP (ZeroMQ's RFC 27)."""
            version, request_id, *credentials = request
            is_known = False
            try:
                is_known = credentials[3:] == [b"CURVE", z85.decode(self.peer)]
            finally:  # a REP socket must reply to each request before it receives the next
                authenticator.send([version, request_id, b"200" if is_known else b"400", b"", b"", b""])
            if not is_known and (times := throttle.count_if_due("key")):
                log.warning("refused a connection without the workers' key", times=times)

        authenticator = Mailbox(zap_socket, "admitting workers", admit)
        return authenticator


def generate_key_files() -> dict[str, str]:
    """The content of a new key file, by side."""
    pairs = [zmq.curve_keypair() for _ in SIDES]
    key_pairs = zip(SIDES, pairs, pairs[::-1], strict=True)
    return {side: f"secret {secret.decode()}\npeer {peer.decode()}\n" for side, (_, secret), (peer, _) in key_pairs}


def create_keys(folder: Path) -> None:
    """Write new key files into a folder that only its owner may read.

    Raises ConfigError if the folder has keys already, or cannot be written.
    """
    try:
        create_private_folder(folder)
        folder.chmod(0o700)
        if existing := [path for side in SIDES if (path := _key_path(folder, side)).exists()]:
            raise ConfigError(f"{existing[0]} is there already, and is not overwritten: name another folder")
        for side, text in generate_key_files().items():
            with open(os.open(_key_path(folder, side), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder} ({error.strerror}): name another folder") from error


def create_keys_if_missing(folder: Path) -> None:
    """Write key files into a folder unless it has some.

    Several processes may do so at once. Raises ConfigError.
    """
    if any(_key_path(folder, side).exists() for side in SIDES):
        return
    draft = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    try:
        create_keys(draft)
        with suppress(OSError):  # another process was faster: use its keys
            draft.rename(folder)
    finally:
        rmtree(draft, ignore_errors=True)


def derive_keys(shared: str, side: str) -> Keys:
    """The keys of a side, derived from a secret that both sides share."""
    (other,) = (name for name in SIDES if name != side)
    secret, peer_secret = (
        z85.encode(hmac.digest(shared.encode(), f"unfuse wire {name}".encode(), "sha256")) for name in (side, other)
    )
    return Keys(secret.decode(), zmq.curve_public(peer_secret).decode())


def read_keys(folder: str, side: str) -> Keys | None:
    """The keys of a side; None without a folder.

    Raises ConfigError for a file that is invalid, or that other users can read.
    A folder without a file of that side may have a `shared.key` instead.
    """
    if not folder:
        return None
    path = _key_path(expand_path(folder), side)
    if not path.exists() and (shared := path.with_name(SHARED_KEY_FILE)).exists():
        path = shared
    try:
        mode = path.stat().st_mode
        text = path.read_text()
        keys = (
            _parse_shared(text, side)
            if path.name == SHARED_KEY_FILE
            else Keys(**dict(line.split() for line in text.splitlines()))
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make keys by `unfuse keys new DIR`") from error
    except (ValueError, TypeError):
        keys = Keys("", "")
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others: chmod 600 it, or make new keys if somebody may have read it")
    if {len(keys.secret), len(keys.peer)} != {Z85_CHARS}:
        if path.name == SHARED_KEY_FILE:
            raise ConfigError(f"{path} is not one word of at least {SECRET_CHARS} characters: write a random one to it")
        raise ConfigError(f"{path} holds no keys: make some by `unfuse keys new DIR`")
    return keys


def _parse_shared(text: str, side: str) -> Keys:
    """The keys of a side, from the text of a shared key file. Raises ValueError."""
    (word,) = text.split()
    if len(word) < SECRET_CHARS:
        raise ValueError(f"{len(word)} characters")
    return derive_keys(word, side)


def _key_path(folder: Path, side: str) -> Path:
    return folder / f"{side}.key"
