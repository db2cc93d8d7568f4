"""The NIXL transfer engine over UCX, with RDMA where available; for trusted networks only.

It enforces no refs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.transfer.base import LinkBroken, TransferOptions
from unfuse.transfer.onesided import CopyRange, OneSidedEngine

try:
    from nixl import _bindings
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError as error:
    raise ConfigError(f"the transfer engine nixl needs its library: pip install 'unfuse[nixl]' ({error})") from error
import numpy as np
from numpy.typing import NDArray

#: Seconds between two checks of a running transfer.
POLL_S = 0.0001

#: The errors of the library, which have no common base.
ERRORS = tuple(kind for kind in vars(_bindings).values() if isinstance(kind, type) and issubclass(kind, Exception))


class NixlEngine(OneSidedEngine):
    """Moves bytes by one NIXL agent.

    The agent has a progress thread, without which the reads of other agents would hang.
    """

    name = "nixl"

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(options)
        self._agent = nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"], enable_prog_thread=True))
        self._registered: list[Any] = []

    @override
    def publish(self) -> bytes:
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    @override
    def register(self, memory: NDArray[np.uint8]) -> None:
        self._registered.append(self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))

    @override
    def read(self, name: bytes, ranges: Sequence[CopyRange]) -> None:
        try:
            owner = self._agent.add_remote_agent(name)
            local_descs = self._agent.get_xfer_descs([(r.destination, r.nbytes, 0) for r in ranges], "DRAM")
            remote_descs = self._agent.get_xfer_descs([(r.address, r.nbytes, 0) for r in ranges], "DRAM")
            handle = self._agent.initialize_xfer("READ", local_descs, remote_descs, owner)
            try:
                state, deadline = self._agent.transfer(handle), time.monotonic() + self.options.silence_s
                while state == "PROC" and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    state = self._agent.check_xfer_state(handle)
            finally:
                self._agent.release_xfer_handle(handle)
        except ERRORS as error:
            raise LinkBroken(f"NIXL could not read: {error}") from error
        if state != "DONE":
            raise LinkBroken(f"NIXL could not read: transfer state {state}")

    @override
    def close(self) -> None:
        super().close()
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())
