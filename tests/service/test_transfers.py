"""The ways tensors move that a worker opens for its settings, among them one of somebody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from unfuse.core.errors import ConfigError
from unfuse.service.addresses import engines, require_engines, transfers
from unfuse.service.options import serve_options
from unfuse.service.settings import load
from unfuse.testing import Faults, FaultyEngine
from unfuse.transfer.base import TransferOptions

FAULTY_TCP, FAULTY_ZMQ = (f"unfuse.testing.transfer_faults:{name}" for name in ("FaultyTcp", "FaultyZmq"))


@pytest.fixture
def opened() -> Iterator[dict[str, FaultyEngine]]:
    """What a worker opens when it is told to be at fault, with what else is set at its default."""
    settings = load({}, None, {"UNFUSE_TRANSFER__ENGINE": f"{FAULTY_TCP},{FAULTY_ZMQ}"}).settings
    found = engines(settings, TransferOptions(insecure=True, queues=settings.transfer.queues))
    assert all(isinstance(engine, FaultyEngine) for engine in found.values())
    yield {name: engine for name, engine in found.items() if isinstance(engine, FaultyEngine)}
    for engine in found.values():
        engine.close()


def test_faulty_engines_inject_all_network_faults_by_default(opened: dict[str, FaultyEngine]) -> None:
    """Given no word of how often, then each fault of a bad network comes now and then."""
    assert [*opened] == [FAULTY_TCP, FAULTY_ZMQ]
    for engine in opened.values():
        drawn = Counter(fault for _ in range(2000) for fault in engine.draw()[0])
        assert drawn.keys() == {"drop", "cut", "corrupt", "delay"}


def test_fault_rates_are_read_from_transfer_faults_variable(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("TRANSFER_FAULTS", "drop=0.25, seed=7")
    found: dict[str, FaultyEngine] = request.getfixturevalue("opened")
    assert [engine.faults for engine in found.values()] == [Faults(seed=7, drop=0.25)] * 2


@pytest.mark.parametrize("text", ["drop", "drop=often", "drop=2", "drop=-0.1", "drop=nan", "dorp=0.1", "seconds=-1"])
def test_invalid_transfer_faults_raise_config_error_with_an_example(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFER_FAULTS", text)
    with pytest.raises(ConfigError, match="drop=0.05"):
        Faults.from_environment()


def test_configured_engine_is_listed_as_used() -> None:
    listed = transfers(load({}, None, {"UNFUSE_TRANSFER__ENGINE": FAULTY_TCP}).settings.transfer)
    assert listed[FAULTY_TCP].startswith("used by")
    assert listed["tcp"].startswith("not used")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nixl", r"the transfer engine nixl needs its library: pip install 'unfuse\[nixl\]'"),
        ("mooncake", r"the transfer engine mooncake needs its library: pip install 'unfuse\[mooncake\]'"),
        ("zmp", "unknown transfer engine 'zmp': did you mean zmq"),
    ],
)
def test_unavailable_transfer_engine_fails_serve_at_startup(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfuse.service.addresses.find_spec", lambda library: None)
    variables = {"UNFUSE_DATA_DIR": str(tmp_path), "UNFUSE_TRANSFER__ENGINE": f"tcp,{name}"}
    flags = {"serve.listen": ["tcp://127.0.0.1:0"]}
    with pytest.raises(ConfigError, match=said):
        serve_options(load(flags, None, variables))
    serve_options(
        load(flags | {"serve.workers": "none"}, None, variables)
    )  # those that are started elsewhere may have it
    serve_options(load({}, None, variables | {"UNFUSE_DATA_DIR": str(tmp_path / "other")}))  # nobody pulls here
    require_engines(["tcp", "zmq", FAULTY_TCP])
