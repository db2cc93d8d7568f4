"""An object that is being written, from front to back. If it is announced, others can read it meanwhile.

An announced object is the sending end of a tensor that streams between workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from unfuse.core.errors import ObjectLost
from unfuse.core.object_ref import ALIGNMENT, DTYPES, ObjectRef, chunk_bytes
from unfuse.stores.base import StorageBackend
from unfuse.stores.checksums import PIECE, Checksums
from unfuse.stores.four_bits import Packed
from unfuse.stores.tensors import Value, copy_into, describe, flat_bytes, torch_over


class Unsealed:
    """An object that is not sealed yet; `ref` names it, without checksums.

    Where its request is over meanwhile, writing goes on to no effect, and `finish` says so.
    """

    def __init__(self, backend: StorageBackend, ref: ObjectRef, memory: NDArray[np.uint8]) -> None:
        self._backend, self.ref, self._memory = backend, ref, memory
        self._checksums, self._told = Checksums(memory), 0
        self._lost: ObjectLost | None = None
        self._open = True
        for meta in ref.tensors:
            end = meta.offset + meta.nbytes
            memory[end : end + -end % ALIGNMENT] = 0

    @property
    def tensors(self) -> dict[str, Any]:
        """Its tensors by name, to be written, as torch has them."""
        return {meta.name: torch_over(self._memory, meta) for meta in self.ref.tensors}

    def due(self, name: str, elements: int) -> bool:
        """Whether others can read more once so many elements of a tensor, and all tensors before it, are written."""
        return self._end(name, elements) >= (self._told + 1) * chunk_bytes(self.ref.nbytes)

    def written(self, name: str, elements: int) -> None:
        """These are written, and do not change any more."""
        self._checksums.filled(self._end(name, elements), 1)
        if len(self._checksums.known) > self._told:
            self.announce()

    def fill(self, tensors: Mapping[str, Any]) -> None:
        """Write all of these, if there are any. Raises ValueError for other tensors than were said to come."""
        for meta in self.ref.tensors if tensors else ():
            if (found := describe(tensors.get(meta.name))) != (meta.dtype, meta.shape):
                raise ValueError(f"{meta.name} is {found}, and was said to be {(meta.dtype, meta.shape)}")
        if tensors:
            self.write(tensors)
            self._checksums.filled(self._memory.nbytes, 1)
            self.announce()

    def write(self, tensors: Mapping[str, Value]) -> None:
        """Copy all tensors of `ref` to their places; hash each piece while it is in the CPU's cache."""
        for meta in self.ref.tensors:
            value, end = tensors[meta.name], meta.offset + meta.nbytes
            value = value.data if isinstance(value, Packed) else value
            source = None if value is None else flat_bytes(value)
            if value is not None and source is None:
                copy_into(self._memory[meta.offset : end], value)
            elif source is not None:
                for start in range(meta.offset, end, PIECE):
                    stop = min(start + PIECE, end)
                    self._memory[start:stop] = source[start - meta.offset : stop - meta.offset]
                    self._checksums.filled(stop)

    def finish(self) -> ObjectRef:
        """All is written: seal it. Raises ObjectLost if its request was released meanwhile."""
        self._open = False
        checksums = self._checksums.finish()
        self._backend.seal(self.ref.id)
        return replace(self.ref, checksums=checksums)

    def abort(self) -> None:
        """Drop it, unless it is sealed: whoever reads it hears that it is lost."""
        if self._open:
            self._open = False
            self._backend.abort(self.ref.id)

    def _end(self, name: str, elements: int) -> int:
        meta = next(meta for meta in self.ref.tensors if meta.name == name)
        return meta.offset + elements * DTYPES[meta.dtype]

    def announce(self) -> None:
        """Let others read what is complete."""
        if self._lost:
            return
        self._told = len(self._checksums.known)
        try:
            self._backend.announce(self.ref.id, self._checksums.known)
        except ObjectLost as error:
            self._lost = error
