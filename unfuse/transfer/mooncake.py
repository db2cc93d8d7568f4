"""The Mooncake transfer engine, over TCP or RDMA; for trusted networks only.

It enforces no refs. RDMA was never tried on such hardware.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import structlog
from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.transfer.base import LinkBroken, TransferOptions
from unfuse.transfer.onesided import CopyRange, OneSidedEngine

try:
    from mooncake.engine import TransferEngine as Mooncake
except ImportError as error:
    raise ConfigError(
        f"the transfer engine mooncake needs its library and libibverbs1: pip install 'unfuse[mooncake]' ({error})"
    ) from error
import numpy as np
from numpy.typing import NDArray

log = structlog.get_logger(__name__)

#: The folder in which Linux has an entry for each RDMA device.
DEVICES = Path("/sys/class/infiniband")

#: The environment variable that makes the library use TCP. Its own `protocol` is not enough: with a device it would use
#: RDMA.
FORCE_TCP = "MC_FORCE_TCP"


class MooncakeEngine(OneSidedEngine):
    """Moves bytes by Mooncake. It listens on every address of the machine, whatever `host` is."""

    name = "mooncake"

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(options)
        self._library = Mooncake()
        self._registered: list[int] = []
        if not (options.mooncake_protocol == "rdma" and self._start_rdma(options)):
            os.environ[FORCE_TCP] = "1"
            _check(self._library.initialize(options.host, "P2PHANDSHAKE", "tcp", ""), "start")

    def _start_rdma(self, options: TransferOptions) -> bool:
        """Start the library over RDMA.

        Returns False, and logs why, if TCP is to be used instead.
        """
        present = {entry.name for entry in DEVICES.iterdir()} if DEVICES.is_dir() else set()
        if missing := {*options.mooncake_devices} - present:
            existing = ", ".join(sorted(present)) or "none"
            log.warning("Mooncake uses tcp: an RDMA device does not exist", devices=sorted(missing), there=existing)
            return False
        if not present:
            log.warning("Mooncake uses tcp: this machine has no RDMA device")
            return False
        os.environ.pop(FORCE_TCP, None)
        code = self._library.initialize(options.host, "P2PHANDSHAKE", "rdma", ",".join(options.mooncake_devices))
        if code != 0:
            log.warning("Mooncake uses tcp: rdma did not start, see its log on standard error", code=code)
            self._library = Mooncake()  # an instance that was not initialized yet
            return False
        devices = options.mooncake_devices or tuple(sorted(present))
        log.info("Mooncake uses rdma, which is untested on RDMA hardware", devices=devices)
        return True

    @override
    def publish(self) -> bytes:
        """Return host and port at which the library listens. The library chooses the port."""
        return f"{self.options.host}:{self._library.get_rpc_port()}".encode()

    @override
    def register(self, memory: NDArray[np.uint8]) -> None:
        _check(self._library.register_memory(memory.ctypes.data, memory.nbytes), "register memory")
        self._registered.append(memory.ctypes.data)

    @override
    def read(self, name: bytes, ranges: Sequence[CopyRange]) -> None:
        """Copy the ranges, in one call if the library has a batch call.

        Older builds of the library have no batch call.
        """
        owner, library = name.decode(), self._library
        if hasattr(library, "batch_transfer_sync_read"):
            addresses, destinations, sizes = map(list, zip(*ranges, strict=True))
            code = library.batch_transfer_sync_read(owner, destinations, addresses, sizes)
        else:
            codes = (library.transfer_sync_read(owner, r.destination, r.address, r.nbytes) for r in ranges)
            code = next((code for code in codes if code != 0), 0)
        if code != 0:
            raise LinkBroken(f"Mooncake could not read from {owner}: code {code}")

    @override
    def close(self) -> None:
        super().close()
        while self._registered:
            _check(self._library.unregister_memory(self._registered.pop()), "unregister memory")


def _check(code: int, action: str) -> None:
    """Raise ConfigError if a call of the library failed."""
    if code != 0:
        raise ConfigError(f"Mooncake could not {action} (code {code}): see its log on standard error")
