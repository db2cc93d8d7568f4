"""Inputs that came in pieces, of which their stage wants the whole: put together in the memory of this process."""

from __future__ import annotations

from typing import Any

import numpy as np

from unfuse.arena.limits import available_memory, readable_bytes
from unfuse.core.errors import TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.tensors import numpy_over, torch_over


class Collected:
    """Takes an object from its front to its end. Raises TransientError where there is no memory for it."""

    def __init__(self, ref: ObjectRef) -> None:
        if ref.nbytes > (free := available_memory()):
            has = f"{readable_bytes(free)} of memory are left"
            raise TransientError(f"an input of {readable_bytes(ref.nbytes)} comes, and {has}")
        self._ref, self._memory, self._filled = ref, np.empty(ref.nbytes, np.uint8), 0

    def take(self, piece: Any) -> None:
        """Take the next bytes."""
        stop = self._filled + len(piece)
        self._memory[self._filled : stop] = piece
        self._filled = stop

    def drop(self) -> None:
        """It goes with whoever has its tensors."""

    def tensors(self, *, as_torch: bool) -> dict[str, Any]:
        """What has come, by name. Raises ValueError for what is no such object."""
        over = torch_over if as_torch else numpy_over
        return {meta.name: over(self._memory, meta) for meta in self._ref.tensors}
