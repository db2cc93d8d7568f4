"""Ports that tests choose."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tools import addresses
from tools.addresses import free_ports


def test_free_ports_are_unique_and_outside_the_ephemeral_range() -> None:
    given = int(addresses.EPHEMERAL.read_text().split()[0])
    ports = free_ports(50)
    assert len({*ports}) == 50
    assert max(ports) < given or given < 2 * addresses.LOWEST
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("given", ["1024\t65535", "15000\t60999"])
def test_free_ports_work_with_a_very_wide_ephemeral_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    (tmp_path / "range").write_text(given)
    monkeypatch.setattr(addresses, "EPHEMERAL", tmp_path / "range")
    assert all(addresses.LOWEST <= port <= addresses.MOST for port in free_ports(5))
