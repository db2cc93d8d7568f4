"""Keys: made once, kept to their owner, and nobody is heard without the right one."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from unfuse.core.codec import encode
from unfuse.core.errors import ConfigError
from unfuse.core.messages import Heartbeat, HeartbeatReply, ToScheduler, ToWorker
from unfuse.wire.address import INSECURE, Trust
from unfuse.wire.dealer import Dealer
from unfuse.wire.keys import SIDES, Keys, create_keys, read_keys
from unfuse.wire.router import Router


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


def keys(folder: Path, side: str) -> Keys:
    found = read_keys(str(folder), side)
    assert found
    return found


@asynccontextmanager
async def listening(keys: Trust, host: str = "127.0.0.1") -> AsyncIterator[tuple[str, list[ToScheduler]]]:
    seen: list[ToScheduler] = []

    async def answer(_: bytes, message: ToScheduler) -> ToWorker:
        seen.append(message)
        return HeartbeatReply((), ())

    async def undelivered(_: bytes, __: ToWorker) -> None:
        """Nothing was granted."""

    router = Router(f"tcp://{host}:0", answer, undelivered, keys)
    try:
        yield router.address.replace("0.0.0.0", "127.0.0.1"), seen
    finally:
        await router.close()


def test_key_files_pair_both_sides_and_are_readable_only_by_the_owner(folder: Path) -> None:
    scheduler, worker = keys(folder, "scheduler"), keys(folder, "worker")
    assert zmq.curve_public(scheduler.secret.encode()).decode() == worker.peer
    assert zmq.curve_public(worker.secret.encode()).decode() == scheduler.peer
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_existing_keys_are_not_overwritten(folder: Path) -> None:
    before = keys(folder, "worker")
    (folder / "scheduler.key").unlink()
    with pytest.raises(ConfigError, match="worker.key is there already"):
        create_keys(folder)
    assert keys(folder, "worker") == before


def test_key_file_readable_by_others_is_rejected(folder: Path) -> None:
    (folder / "worker.key").chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others: chmod 600"):
        read_keys(str(folder), "worker")
    assert read_keys(str(folder), "scheduler")


def shared(folder: Path, text: str) -> Path:
    (folder / "shared.key").touch(0o600)
    (folder / "shared.key").write_text(text)
    return folder


def test_shared_secret_derives_matching_keys_for_both_sides(tmp_path: Path) -> None:
    """Each side knows its own secret and the other's public key; another secret gives other keys."""
    first = {side: keys(shared(tmp_path, "a" * 32), side) for side in SIDES}
    for side, other in (SIDES, SIDES[::-1]):
        assert first[side].peer.encode() == zmq.curve_public(first[other].secret.encode())
    assert first["scheduler"].secret != first["worker"].secret
    assert keys(shared(tmp_path, "a" * 32 + "\n"), "worker") == first["worker"]
    assert keys(shared(tmp_path, "a" * 33), "worker") != first["worker"]


def test_key_file_of_a_side_takes_precedence_over_a_shared_secret(folder: Path) -> None:
    before = keys(folder, "worker")
    assert keys(shared(folder, "a" * 32), "worker") == before


@pytest.mark.parametrize("text", ["", "a" * 31, "a" * 32 + " b", "\n", "é\x00"])
def test_short_or_malformed_shared_secret_is_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="shared.key is not one word of at least 32 characters"):
        read_keys(str(shared(tmp_path, text)), "worker")


def test_shared_secret_readable_by_others_is_rejected(tmp_path: Path) -> None:
    (shared(tmp_path, "a" * 32) / "shared.key").chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_keys(str(tmp_path), "worker")


async def test_worker_with_the_shared_secret_can_connect(tmp_path: Path) -> None:
    async with listening(keys(shared(tmp_path, "s" * 40), "scheduler")) as (address, seen):
        dealer = Dealer(address, keys(tmp_path, "worker"))
        assert await dealer.call(Heartbeat(), 60) == HeartbeatReply((), ())
        assert seen == [Heartbeat()]
        await dealer.close()


@pytest.mark.parametrize("text", ["", "secret abc\npeer def\n", "secret\n", "other 1\npeer 2\n", "\udcff"])
def test_invalid_key_file_error_names_the_keys_command(folder: Path, text: str) -> None:
    (folder / "worker.key").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="holds no keys: make some by `unfuse keys new DIR`"):
        read_keys(str(folder), "worker")


def test_missing_key_file_error_names_the_keys_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="worker.key cannot be read .*unfuse keys new DIR"):
        read_keys(str(tmp_path), "worker")
    assert read_keys("", "worker") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_worker_with_keys_connects_on_loopback_and_all_interfaces(folder: Path, host: str) -> None:
    async with listening(keys(folder, "scheduler"), host) as (address, seen):
        dealer = Dealer(address, keys(folder, "worker"))
        assert await dealer.call(Heartbeat(), 60) == HeartbeatReply((), ())
        assert seen == [Heartbeat()]
        await dealer.close()


async def test_peer_without_the_right_key_gets_connection_error(folder: Path, tmp_path: Path) -> None:
    create_keys(tmp_path / "other")
    stolen = keys(tmp_path / "other", "worker")
    own = keys(folder, "worker")
    strangers = [None, stolen, Keys(stolen.secret, own.peer), Keys(own.secret, stolen.peer)]
    async with listening(keys(folder, "scheduler")) as (address, seen):
        honest = Dealer(address, own)
        for stranger in strangers:
            dealer = Dealer(address, stranger or INSECURE)
            with pytest.raises(ConnectionError):
                await dealer.call(Heartbeat(retracted=666), 60)
            await dealer.close()
            assert await honest.call(Heartbeat(), 60) == HeartbeatReply((), ())
        assert seen == [Heartbeat()] * len(strangers)
        await honest.close()


async def test_worker_with_keys_sends_nothing_to_a_scheduler_without_keys(folder: Path) -> None:
    async with listening(INSECURE) as (address, seen):
        dealer = Dealer(address, keys(folder, "worker"))
        with pytest.raises(ConnectionError):
            await dealer.call(Heartbeat(), 60)
        await dealer.close()
        assert not seen


async def test_messages_are_encrypted_in_transit_with_keys(folder: Path) -> None:
    """A relay between the two sees every byte; the message is not among them."""
    heard, relays = bytearray(), list[asyncio.Task[None] | None]()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(asyncio.current_task())
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await source.read(65536):
                    heard.extend(data)
                    sink.write(data)
            sink.close()
            with suppress(ConnectionError):
                await sink.wait_closed()

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    for used in (True, False):
        async with listening(keys(folder, "scheduler") if used else INSECURE) as (address, seen):
            server = await asyncio.start_server(relay, "127.0.0.1", 0)
            between = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            dealer = Dealer(between, keys(folder, "worker") if used else INSECURE)
            message = Heartbeat(stored_requests=("req_a-request-nobody-else-should-hear-of",))
            await dealer.call(message, 60)
            assert seen == [message]
            await dealer.close()
            server.close()
            await asyncio.gather(*filter(None, relays))
            assert (encode(message) in heard) is not used
