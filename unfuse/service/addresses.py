"""Resolve control addresses, keys and transfer engines from settings."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import structlog

from unfuse.core.errors import ConfigError, InvalidParameter, UsageError
from unfuse.core.paths import expand_path
from unfuse.core.registry import resolve
from unfuse.service.groups import Settings, Transfer
from unfuse.transfer import BACKENDS, open_engine
from unfuse.transfer.base import TransferEngine, TransferOptions
from unfuse.wire.address import INSECURE, UNIX, Trust, host_towards, keys_for, unix_path
from unfuse.wire.keys import SHARED_KEY_FILE, create_keys_if_missing, read_keys
from unfuse.wire.unix_socket import running_servers, server_socket

#: Seconds between two checks for a server or a key.
CHECK_INTERVAL_S = 0.2

EXPOSURE_RISK = (
    "anyone who can connect can act as a worker, read prompts and pictures, and forge results (--insecure-listen)"
)

#: Transfer engines that need a library. The engine, the library, and the extra that installs it have the same name.
EXTRAS = ("mooncake", "nixl")

log = structlog.get_logger(__name__)


def default_keys_folder(settings: Settings) -> Path:
    """Return the folder of generated keys.

    They are used unless the setting `keys` names another folder.
    """
    return Path(settings.data_dir, "keys")


def keys_folder(settings: Settings, side: str) -> str:
    """Return the folder with the key of this side, or "" without a key.

    It is the folder of the setting `keys`, else the default folder if it has the key of this side.
    With `insecure_listen`, the default folder is not used.

    `side`: "scheduler" or "worker".
    """
    if settings.keys or settings.insecure_listen or not (default_keys_folder(settings) / f"{side}.key").exists():
        return settings.keys
    return str(default_keys_folder(settings))


def trusted_keys(settings: Settings, side: str) -> Trust:
    """Return the keys that this side trusts over TCP.

    Without keys, INSECURE if `insecure_listen` is set, else None. Raises ConfigError for keys that cannot be used.
    """
    return read_keys(keys_folder(settings, side), side) or (INSECURE if settings.insecure_listen else None)


def worker_trusted_keys(settings: Settings, addresses: Iterable[str]) -> Trust:
    """Return the keys that workers of these schedulers trust.

    Raises ConfigError if a key is missing or cannot be used.
    """
    trusted = trusted_keys(settings, "worker")
    for address in addresses:
        if trusted is None and not unix_path(address):
            raise ConfigError(
                "this machine has no worker key: copy worker.key from the scheduler's machine to "
                f"{default_keys_folder(settings)}/worker.key (chmod 600); `unfuse serve` prints its path when it starts"
            )
        keys_for(address, trusted)
    return trusted


def listen_addresses(settings: Settings) -> tuple[str, ...]:
    """Return the addresses where `serve` listens in addition to its unix socket.

    Keys for TCP addresses are generated if there are none. Raises ConfigError.
    """
    addresses = tuple(_absolute(address) for address in settings.serve.listen)
    if settings.serve.launcher != "local" and all(map(unix_path, addresses)):
        raise UsageError(
            f"--launcher {settings.serve.launcher} needs --listen tcp://HOST:PORT, to which workers on other machines "
            "connect"
        )
    if any(not unix_path(address) for address in addresses) and not (settings.keys or settings.insecure_listen):
        # A folder that the user named is never written to: a missing key in it is an error.
        create_keys_if_missing(default_keys_folder(settings))
    return addresses


def schedulers(settings: Settings) -> tuple[str, ...]:
    """Return the addresses of a worker's schedulers.

    Raises InvalidParameter if several servers run here and none is named.
    """
    if settings.worker.scheduler:
        return tuple(_named(settings, name) for name in settings.worker.scheduler)
    sockets = running_servers(settings.run_dir)
    if len(sockets) > 1:
        ports = ", ".join(map(str, sockets))
        raise InvalidParameter(
            f"several servers run on this machine: select one by --scheduler PORT, of {ports}", "scheduler"
        )
    if not sockets:
        return (f"{UNIX}{server_socket(settings.run_dir, settings.serve.port)}",)
    return tuple(f"{UNIX}{path}" for path in sockets.values())


def await_scheduler(settings: Settings) -> None:
    """Wait until a worker's scheduler and key exist.

    It waits for a scheduler if the settings name none. It waits for a key if a scheduler is reached over TCP and the
    settings name no folder of keys. Each wait is logged once.
    """
    if not settings.worker.scheduler and not running_servers(settings.run_dir):
        log.warning("no server of this user runs on this machine yet: waiting for one", run_dir=settings.run_dir)
        while not running_servers(settings.run_dir):
            time.sleep(CHECK_INTERVAL_S)

    needs_key = not (settings.keys or settings.insecure_listen or all(map(unix_path, schedulers(settings))))
    key = default_keys_folder(settings) / "worker.key"
    if needs_key and not key.exists():
        log.warning(
            "this machine has no worker key yet: waiting for it",
            file=str(key),
            advice=(
                "copy worker.key from the scheduler's machine (chmod 600); `unfuse serve` prints its path when it "
                "starts"
            ),
        )
        while not key.exists():
            time.sleep(CHECK_INTERVAL_S)


def running(folder: str) -> list[str]:
    """Return the HTTP ports of this user's servers on this machine, as text.

    If the run folder cannot be used, the only item is the reason.
    """
    try:
        return [str(port) for port in running_servers(folder)]
    except ConfigError as error:
        return [str(error)]


def _named(settings: Settings, name: str) -> str:
    """Return the address of the scheduler that `--scheduler` names.

    `name`: the HTTP port of a server on this machine, as 8000 or :8000, or an address.
    """
    port = name.removeprefix(":")
    return f"{UNIX}{server_socket(settings.run_dir, int(port))}" if port.isdecimal() else _absolute(name)


def _absolute(address: str) -> str:
    """Return an address. The path of a unix socket becomes absolute."""
    if not address.startswith(UNIX):
        return address
    return f"{UNIX}{expand_path(address.removeprefix(UNIX)).absolute()}"


def connect_instructions(trusted: Trust, folder: str, addresses: Iterable[str]) -> list[str]:
    """Return a line for each TCP address: how workers of other machines connect to it.

    Without keys, the line is a warning that anybody can connect.

    `trusted`: the keys that the scheduler trusts.
    `folder`: the folder of keys, or "".
    `addresses`: the control addresses.
    """
    tcp_addresses = [address for address in addresses if not unix_path(address)]
    if trusted == INSECURE:
        return [f"WARNING: {address} is open: {EXPOSURE_RISK}" for address in tcp_addresses]
    key_files = [
        path for name in ("worker.key", SHARED_KEY_FILE) if folder and (path := expand_path(folder) / name).exists()
    ]
    key = key_files[0] if key_files else "the worker.key that was made together with this server's scheduler.key"
    return [
        f"workers on other machines: copy {key}, which is secret, to a folder of its own there (chmod 600), and run: "
        f"unfuse worker --workers auto --keys FOLDER --scheduler {external_address(address)}"
        for address in tcp_addresses
    ]


def external_address(address: str) -> str:
    """Return a TCP address as other machines reach it.

    0.0.0.0 and [::] are replaced by this machine's address, or by the word HOST if there is no route to other machines.
    """
    scheme, separator, place = address.partition("://")
    everywhere = next((host for host in ("0.0.0.0", "[::]") if place.startswith(f"{host}:")), "")
    if not everywhere:
        return address
    host = "HOST"
    with suppress(ConfigError):
        host = host_towards(address)
    return f"{scheme}{separator}{f'[{host}]' if ':' in host else host}{place.removeprefix(everywhere)}"


def require_engines(names: Iterable[str]) -> None:
    """Raise ConfigError for an unknown transfer engine, or one whose library is not installed.

    No engine is imported.
    """
    for name in names:
        # An engine of another package ("module:attr") is checked when a worker imports it.
        if name not in BACKENDS and ":" not in name:
            resolve(BACKENDS, name, "transfer engine")
        if name in EXTRAS and find_spec(name) is None:
            raise ConfigError(f"the transfer engine {name} needs its library: pip install 'unfuse[{name}]'")


def engines(settings: Settings, options: TransferOptions) -> dict[str, TransferEngine]:
    """Open the transfer engines of the settings, and return them by name.

    Without keys, which authenticate peers, no engine is opened. Raises ConfigError if one cannot run.
    """
    if not options.authentic:
        log.debug("other machines cannot pull tensors from this worker: it has no --keys")
        return {}

    engines_by_name = {name: open_engine(name, options) for name in settings.transfer.engine}
    if unprotected := [name for name, engine in engines_by_name.items() if not engine.enforces_refs]:
        log.warning(
            "anyone who can connect to this worker can read and overwrite its tensors; RDMA is untested", by=unprotected
        )
    return engines_by_name


def transfers(transfer_settings: Transfer) -> dict[str, str]:
    """Return the state of each transfer engine, as a sentence by the engine's name.

    It says whether workers here use the engine, and who can read their tensors; or why the engine cannot be used.
    """
    states = {}
    for name in sorted({*BACKENDS, *transfer_settings.engine}):
        try:
            engine: type[TransferEngine] = resolve(BACKENDS, name, "transfer engine")
        except ConfigError as error:
            states[name] = str(error)
            continue

        usage = "used by every worker that has keys" if name in transfer_settings.engine else "not used"
        access = "only holders of the keys can connect, and reads need the key of the object"
        if not engine.enforces_refs:
            access = (
                "anyone who can connect can read and overwrite all tensors: it needs --trusted-network; RDMA is "
                "untested"
            )
        states[name] = f"{usage}; {access}"
    return states
