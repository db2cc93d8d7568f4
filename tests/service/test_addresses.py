"""Where a worker finds its server, and by which keys they know each other, from settings alone."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from unfuse.cli.doctor import _ports
from unfuse.cli.exit_codes import exit_code
from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.service import addresses
from unfuse.service.addresses import (
    await_scheduler,
    connect_instructions,
    keys_folder,
    listen_addresses,
    schedulers,
    trusted_keys,
    worker_trusted_keys,
)
from unfuse.service.options import serve_options
from unfuse.service.plan import environment_of
from unfuse.service.settings import LoadedSettings, load
from unfuse.wire.address import INSECURE, Trust
from unfuse.wire.keys import Keys, create_keys, create_keys_if_missing, read_keys
from unfuse.wire.unix_socket import listen_unix, private_socket, server_socket


@pytest.fixture
def run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="run-") as made:
        yield Path(made)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def loaded(run: Path, data: Path, **flags: object) -> LoadedSettings:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return load(given, None, {"UNFUSE_RUN_DIR": str(run), "UNFUSE_DATA_DIR": str(data)})


def found(run: Path, *names: str) -> tuple[str, ...]:
    return schedulers(loaded(run, run, worker__scheduler=list(names) or None).settings)


def test_worker_finds_the_running_server(run: Path) -> None:
    with listen_unix(server_socket(run, 8123)), listen_unix(private_socket(run)):
        assert found(run) == (f"unix:{run}/serve-8123.sock",)


def test_several_servers_need_an_explicit_scheduler(run: Path) -> None:
    with listen_unix(server_socket(run, 8001)), listen_unix(server_socket(run, 8000)):
        with pytest.raises(InvalidParameter, match=r"--scheduler PORT, of 8000, 8001") as refused:
            found(run)
        assert exit_code(refused.value) == 2
        assert found(run, "8001") == found(run, ":8001") == (f"unix:{run}/serve-8001.sock",)
        assert found(run, "8001", ":8000") == tuple(f"unix:{run}/serve-{port}.sock" for port in (8001, 8000))


def test_worker_uses_the_default_socket_if_no_server_runs(run: Path) -> None:
    listen_unix(server_socket(run, 8123)).close()  # killed
    assert found(run) == (f"unix:{run}/serve-8000.sock",)
    assert schedulers(loaded(run, run, serve__port=9000).settings) == (f"unix:{run}/serve-9000.sock",)


def test_worker_waits_for_a_server_to_start(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given no server, then a worker says once that it waits, and finds the one that comes, whatever its port."""
    looks = list[float]()

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            coming.append(listen_unix(server_socket(run, 8123)))

    coming = list[socket.socket]()
    monkeypatch.setattr(addresses.time, "sleep", look)
    settings = loaded(run, run).settings
    with capture_logs() as logs:
        await_scheduler(settings)
        assert schedulers(settings) == (f"unix:{run}/serve-8123.sock",)
        await_scheduler(settings)
    coming[0].close()
    assert [line["event"] for line in logs] == ["no server of this user runs on this machine yet: waiting for one"]
    assert len(looks) == 3


def test_worker_waits_for_its_key_file(run: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a scheduler over TCP and no key in the data folder, then a worker says once that it waits, and has the key
    that comes; a folder that is named has to be there, and on this machine none is needed."""
    looks = list[float]()

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            create_keys_if_missing(data / "keys")

    monkeypatch.setattr(addresses.time, "sleep", look)
    with capture_logs() as logs:
        for flags in ({"insecure_listen": True}, {"keys": str(run / "none")}):
            await_scheduler(loaded(run, data, worker__scheduler=["tcp://10.0.0.1:8001"], **flags).settings)
        await_scheduler(loaded(run, data, worker__scheduler=["8000"]).settings)
        assert not logs
        settings = loaded(run, data, worker__scheduler=["tcp://10.0.0.1:8001"]).settings
        await_scheduler(settings)
    assert isinstance(worker_trusted_keys(settings, schedulers(settings)), Keys)
    assert [line["file"] for line in logs] == [str(data / "keys" / "worker.key")]
    assert len(looks) == 3


def test_explicit_scheduler_addresses_are_used_unchanged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert found(run, "tcp://10.0.0.1:8001", "unix:x.sock") == ("tcp://10.0.0.1:8001", f"unix:{run}/x.sock")


def test_tcp_listen_creates_private_keys_once_and_reuses_them(run: Path, data: Path) -> None:
    composed = serve_options(loaded(run, data, serve__listen=["tcp://127.0.0.1:0"]))
    again = serve_options(loaded(run, data, serve__listen=["tcp://0.0.0.0:1", "tcp://[::]:1"]))

    assert isinstance(composed.trust, Keys)
    assert composed.trust == again.trust == read_keys(str(data / "keys"), "scheduler")
    assert keys_folder(composed.settings, "worker") == str(data / "keys")
    assert stat.S_IMODE((data / "keys").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (data / "keys").iterdir()} == {0o600}
    assert [path.name for path in data.iterdir()] == ["keys"]
    assert trusted_keys(loaded(run, data).settings, "worker") == read_keys(str(data / "keys"), "worker")


def test_keys_are_not_created_or_needed_without_tcp(run: Path, data: Path) -> None:
    (data / "keys").mkdir(parents=True)
    create_keys(data / "other")
    (data / "other" / "worker.key").rename(data / "keys" / "worker.key")  # as on a machine of workers

    assert serve_options(loaded(run, data)).trust is None
    assert listen_addresses(loaded(run, data, serve__listen=["unix:/r/x.sock"]).settings) == ("unix:/r/x.sock",)
    assert not (data / "keys" / "scheduler.key").exists()


def test_named_keys_override_those_of_the_data_folder(run: Path, data: Path) -> None:
    create_keys(data / "named")
    composed = serve_options(loaded(run, data, serve__listen=["tcp://127.0.0.1:0"], keys=str(data / "named")))
    assert composed.trust == read_keys(str(data / "named"), "scheduler")
    assert keys_folder(composed.settings, "worker") == str(data / "named")
    assert not (data / "keys").exists()


def test_insecure_listen_uses_no_keys_except_named_keys(run: Path, data: Path) -> None:
    flags = {"serve__listen": ["tcp://0.0.0.0:0"], "insecure_listen": True}
    composed = serve_options(loaded(run, data, **flags))
    assert (composed.trust, keys_folder(composed.settings, "worker")) == (INSECURE, "")
    assert load({}, None, environment_of(composed.settings)).settings.insecure_listen
    assert not (data / "keys").exists()

    create_keys_if_missing(data / "keys")
    assert serve_options(loaded(run, data, **flags)).trust == INSECURE
    assert isinstance(serve_options(loaded(run, data, **flags, keys=str(data / "keys"))).trust, Keys)


def test_concurrent_key_creation_yields_one_key_pair(data: Path) -> None:
    def made(_: int) -> Keys | None:
        create_keys_if_missing(data / "keys")
        return read_keys(str(data / "keys"), "scheduler")

    with ThreadPoolExecutor(16) as pool:
        assert len({*pool.map(made, range(32))}) == 1
    assert [path.name for path in data.iterdir()] == ["keys"]


def test_unwritable_key_folder_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for making in (create_keys, create_keys_if_missing):
        with pytest.raises(ConfigError, match="keys cannot be written to .*name another folder"):
            making(tmp_path / "file" / "keys")


@pytest.mark.parametrize("trusted", [Keys("s" * 40, "p" * 40), INSECURE, None])
def test_server_start_prints_how_workers_connect_or_an_open_warning(trusted: Trust, tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    lines = connect_instructions(
        trusted, f"{tmp_path}/keys", ["unix:/r/x.sock", *(["tcp://127.0.0.1:5"] if trusted else [])]
    )
    if isinstance(trusted, Keys):
        (line,) = lines
        assert f"{tmp_path}/keys/worker.key" in line
        assert "scheduler.key" not in line
        assert line.endswith("unfuse worker --workers auto --keys FOLDER --scheduler tcp://127.0.0.1:5")
    elif trusted:
        (line,) = lines
        assert line.startswith("WARNING: tcp://127.0.0.1:5 is open: anyone who can connect can act as a worker")
    else:
        assert lines == []


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["scheduler.key"], "copy the worker.key that was made together with this server's scheduler.key, which is"),
        (["shared.key"], "copy FOLDER/shared.key, which is"),
        (["scheduler.key", "worker.key", "shared.key"], "copy FOLDER/worker.key, which is"),
    ],
)
def test_connect_instructions_name_only_existing_key_files(files: list[str], named: str, tmp_path: Path) -> None:
    """Given a server's machine that has the scheduler's half of a pair alone, then no path is named."""
    for name in files:
        (tmp_path / name).touch()

    (line,) = connect_instructions(Keys("s" * 40, "p" * 40), str(tmp_path), ["tcp://10.0.0.1:8001"])
    (bare,) = connect_instructions(Keys("s" * 40, "p" * 40), "", ["tcp://10.0.0.1:8001"])

    assert line.startswith(f"workers on other machines: {named.replace('FOLDER', str(tmp_path))} secret, to")
    assert bare.startswith("workers on other machines: copy the worker.key that was made together")


@pytest.mark.parametrize(
    ("host", "address", "external"),
    [
        ("10.1.2.3", "tcp://0.0.0.0:7000", "tcp://10.1.2.3:7000"),
        ("10.1.2.3", "tcp://[::]:7000", "tcp://10.1.2.3:7000"),
        ("fd00::7", "tcp://[::]:7000", "tcp://[fd00::7]:7000"),
        ("", "tcp://[::]:7000", "tcp://HOST:7000"),
        ("", "tcp://0.0.0.0:7000", "tcp://HOST:7000"),
        ("10.1.2.3", "tcp://[fd00::]:7000", "tcp://[fd00::]:7000"),
        ("10.1.2.3", "tcp://10.0.0.0.0:7000", "tcp://10.0.0.0.0:7000"),
    ],
)
def test_address_of_all_interfaces_is_shown_as_other_machines_reach_it(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str, external: str
) -> None:
    def towards(address: str) -> str:
        if not host:
            raise ConfigError("there is no route")
        return host

    monkeypatch.setattr(addresses, "host_towards", towards)
    assert addresses.external_address(address) == external


def test_path_of_a_unix_socket_is_no_port_to_check() -> None:
    assert _ports(["unix:///run/a:8000", "tcp://[::]:7000", "tcp://127.0.0.1:7001"]) == [7000, 7001]
