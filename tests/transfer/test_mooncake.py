"""How Mooncake's library is started: over TCP unless RDMA is asked for, and is there. The library is made up here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from unfuse import transfer
from unfuse.core.errors import ConfigError
from unfuse.transfer.base import LinkBroken, TransferEngine, TransferOptions
from unfuse.transfer.onesided import CopyRange, OneSidedEngine

OPTIONS = TransferOptions(secret="s" * 40, trusted_network=True)
Started = Callable[..., TransferEngine]


class Library:
    """What is used of the library. `codes` says what starting by a protocol returns, else 0."""

    starts: list[tuple[str, str, bool]] = []
    codes: dict[str, int] = {}
    reads: list[tuple[str, list[tuple[int, int, int]]]] = []
    """The owner of each call that reads, and the places, addresses and counts of its ranges."""
    fails_at = 0
    """The number of the call that fails, from 1 on."""

    def batch_transfer_sync_read(self, owner: str, places: list[int], addresses: list[int], counts: list[int]) -> int:
        self.reads.append((owner, [*zip(places, addresses, counts, strict=True)]))
        return -1 if len(self.reads) == self.fails_at else 0

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        assert (host, metadata) == ("127.0.0.1", "P2PHANDSHAKE")
        self.starts.append((protocol, devices, os.environ.get("MC_FORCE_TCP") == "1"))
        return self.codes.get(protocol, 0)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Started]:
    """Start the engine on a machine that has these RDMA devices, where starting by a protocol returns these codes."""
    library: Any = ModuleType("mooncake.engine")
    library.TransferEngine = Library
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", library)
    monkeypatch.delitem(sys.modules, "unfuse.transfer.mooncake", raising=False)
    monkeypatch.delattr(transfer, "mooncake", raising=False)
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    mooncake: Any = import_module("unfuse.transfer.mooncake")

    def started(*there: str, codes: dict[str, int] | None = None, **options: Any) -> TransferEngine:
        monkeypatch.setattr(Library, "starts", [])
        monkeypatch.setattr(Library, "reads", [])
        monkeypatch.setattr(Library, "codes", codes or {})
        for name in there:
            (tmp_path / "infiniband" / name).mkdir(parents=True)
        monkeypatch.setattr(mooncake, "DEVICES", tmp_path / "infiniband")
        engine: TransferEngine = mooncake.MooncakeEngine(replace(OPTIONS, **options))
        return engine

    yield started
    del sys.modules["unfuse.transfer.mooncake"], transfer.mooncake


def test_mooncake_uses_tcp_by_default_even_with_rdma_devices(start: Started) -> None:
    """The library would take a device that is there, whatever protocol it is told."""
    start("mlx5_0")
    assert Library.starts == [("tcp", "", True)]


@pytest.mark.parametrize(("named", "said"), [((), ""), (("mlx5_1", "mlx5_0"), "mlx5_1,mlx5_0")])
def test_mooncake_uses_rdma_if_configured(start: Started, named: tuple[str, ...], said: str) -> None:
    with capture_logs() as logs:
        start("mlx5_0", "mlx5_1", mooncake_protocol="rdma", mooncake_devices=named)
    assert Library.starts == [("rdma", said, False)]
    (line,) = logs
    assert line["event"] == "Mooncake uses rdma, which is untested on RDMA hardware"
    assert sorted(line["devices"]) == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("there", "named", "says"),
    [
        ((), (), "this machine has no RDMA device"),
        ((), ("mlx5_0",), "an RDMA device does not exist"),
        (("mlx5_1",), ("mlx5_0", "mlx5_1"), "an RDMA device does not exist"),
    ],
)
def test_mooncake_falls_back_to_tcp_with_a_warning_without_devices(
    start: Started, there: tuple[str, ...], named: tuple[str, ...], says: str
) -> None:
    with capture_logs() as logs:
        start(*there, mooncake_protocol="rdma", mooncake_devices=named)
    assert Library.starts == [("tcp", "", True)]
    assert [(line["log_level"], line["event"]) for line in logs] == [("warning", f"Mooncake uses tcp: {says}")]


def test_mooncake_falls_back_to_tcp_if_rdma_fails_to_start(start: Started) -> None:
    with capture_logs() as logs:
        start("mlx5_0", codes={"rdma": -200}, mooncake_protocol="rdma")
    assert Library.starts == [("rdma", "", False), ("tcp", "", True)]
    assert (logs[0]["log_level"], logs[0]["code"]) == ("warning", -200)


def test_mooncake_that_cannot_start_raises_config_error(start: Started) -> None:
    with pytest.raises(ConfigError, match="Mooncake could not start"):
        start("mlx5_0", codes={"rdma": 1, "tcp": 1}, mooncake_protocol="rdma")


RANGES = [CopyRange(1000, 5, 16), CopyRange(1016, 21, 16), CopyRange(1032, 37, 3)]
PLACES = [(5, 1000, 16), (21, 1016, 16), (37, 1032, 3)]


def reading(start: Started) -> OneSidedEngine:
    engine = start()
    assert isinstance(engine, OneSidedEngine)
    return engine


def test_mooncake_reads_many_ranges_in_one_batch_call(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reading(start)
    engine.read(b"10.0.0.1:1", RANGES)
    assert Library.reads == [("10.0.0.1:1", PLACES)]
    monkeypatch.setattr(Library, "fails_at", 2)
    with pytest.raises(LinkBroken, match=r"could not read from 10\.0\.0\.1:1: code -1"):
        engine.read(b"10.0.0.1:1", RANGES)
    assert len(Library.reads) == 2


def test_mooncake_without_batch_read_reads_ranges_one_by_one(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at the first one that fails."""

    def read(self: Library, owner: str, place: int, address: int, count: int) -> int:
        return batch(self, owner, [place], [address], [count])

    batch = Library.batch_transfer_sync_read
    monkeypatch.delattr(Library, "batch_transfer_sync_read")
    monkeypatch.setattr(Library, "transfer_sync_read", read, raising=False)
    engine = reading(start)
    engine.read(b"o", RANGES)
    assert Library.reads == [("o", [place]) for place in PLACES]
    monkeypatch.setattr(Library, "fails_at", 5)
    with pytest.raises(LinkBroken, match="code -1"):
        engine.read(b"o", RANGES)
    assert len(Library.reads) == 5
