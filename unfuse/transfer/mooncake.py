"""Transfer by Mooncake, over TCP, or RDMA where the hardware has it. It enforces no refs: for trusted networks only."""

from __future__ import annotations

from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.transfer.base import LinkBroken, TransferOptions
from unfuse.transfer.onesided import OneSidedEngine

try:
    from mooncake.engine import TransferEngine as Mooncake
except ImportError as error:
    raise ConfigError(
        f"the transfer engine mooncake needs its library and libibverbs1: pip install 'unfuse[mooncake]' ({error})"
    ) from error
import numpy as np
from numpy.typing import NDArray

PROTOCOL = "tcp"


class MooncakeEngine(OneSidedEngine):
    """Listens on every address of the machine, whatever `host` is."""

    name = "mooncake"

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(options)
        self._library = Mooncake()
        self._registered: list[int] = []
        _check(self._library.initialize(options.host, "P2PHANDSHAKE", PROTOCOL, ""), "start")

    @override
    def publish(self) -> bytes:
        """The address that the library listens on: it chooses the port itself."""
        return f"{self.options.host}:{self._library.get_rpc_port()}".encode()

    @override
    def register(self, memory: NDArray[np.uint8]) -> None:
        _check(self._library.register_memory(memory.ctypes.data, memory.nbytes), "register memory")
        self._registered.append(memory.ctypes.data)

    @override
    def read(self, name: bytes, address: int, to: int, count: int) -> None:
        code = self._library.transfer_sync_read(name.decode(), to, address, count)
        if code != 0:
            raise LinkBroken(f"Mooncake could not read from {name.decode()}: code {code}")

    @override
    def close(self) -> None:
        super().close()
        while self._registered:
            _check(self._library.unregister_memory(self._registered.pop()), "let go of memory")


def _check(code: int, what: str) -> None:
    if code != 0:
        raise ConfigError(f"Mooncake could not {what} (code {code}): its log on standard error says why")
