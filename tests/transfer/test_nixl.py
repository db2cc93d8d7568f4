"""What NIXL's library is asked for: one transfer of all ranges. The library is made up here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from unfuse.transfer.base import LinkBroken, TransferOptions
from unfuse.transfer.onesided import CopyRange, OneSidedEngine

RANGES = [CopyRange(1000, 5, 16), CopyRange(1016, 21, 3)]


class Agent:
    """An agent whose transfers have these states, one after the other; or which raises, when it is to begin one."""

    def __init__(self, name: str, config: object) -> None:
        self.states, self.error = ["PROC", "PROC", "DONE"], None
        self.asked = list[tuple[Any, ...]]()

    def add_remote_agent(self, metadata: bytes) -> str:
        return f"agent {metadata.decode()}"

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], memory: str) -> tuple[Any, ...]:
        return memory, descs

    def initialize_xfer(self, operation: str, local: object, remote: object, owner: str) -> object:
        self.asked.append((operation, local, remote, owner))
        if self.error:
            raise self.error
        return [*self.states]

    def transfer(self, handle: list[str]) -> str:
        return handle.pop(0)

    def check_xfer_state(self, handle: list[str]) -> str:
        return handle.pop(0)

    def release_xfer_handle(self, handle: list[str]) -> None:
        self.asked.append(("released", len(handle)))


class BackendError(Exception):
    """As the library has them."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneSidedEngine]:
    library: Any = ModuleType("nixl")
    library._bindings = bindings = ModuleType("nixl._bindings")
    bindings.BackendError = BackendError  # type: ignore[attr-defined]
    library._api = api = ModuleType("nixl._api")
    api.nixl_agent, api.nixl_agent_config = Agent, lambda **_: None  # type: ignore[attr-defined]
    for module in (library, bindings, api):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "unfuse.transfer.nixl", raising=False)
    from unfuse.transfer.nixl import NixlEngine

    yield NixlEngine(TransferOptions(secret="s" * 40, trusted_network=True))
    sys.modules.pop("unfuse.transfer.nixl", None)


def test_nixl_reads_many_ranges_in_one_transfer(engine: OneSidedEngine) -> None:
    engine.read(b"here", RANGES)
    asked: Any = engine._agent.asked  # type: ignore[attr-defined]
    ours, theirs = ("DRAM", [(5, 16, 0), (21, 3, 0)]), ("DRAM", [(1000, 16, 0), (1016, 3, 0)])
    assert asked == [("READ", ours, theirs, "agent here"), ("released", 0)]


def test_failed_nixl_transfer_is_released_and_raises_link_broken(engine: OneSidedEngine) -> None:
    agent: Any = engine._agent  # type: ignore[attr-defined]
    agent.states = ["PROC", "ERR"]
    with pytest.raises(LinkBroken, match="NIXL could not read: transfer state ERR"):
        engine.read(b"here", RANGES)
    assert agent.asked[-1] == ("released", 0)
    agent.error = BackendError("no route")
    with pytest.raises(LinkBroken, match="NIXL could not read: no route"):
        engine.read(b"here", RANGES)
