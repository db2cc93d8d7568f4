"""The tensor store: `put` stores a stage's output and returns its ref; `get` reads it."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from unfuse.arena.extents import MemoryUsage
from unfuse.arena.objects import Extent
from unfuse.core.clock import Clock, SystemClock
from unfuse.core.errors import ArenaFull, ConfigError, ObjectLost, TransientError
from unfuse.core.object_ref import ALIGNMENT, DTYPES, PACKED, ObjectRef, TensorMeta, chunk_bytes, layout_tensors
from unfuse.stores.base import (
    DEFAULT_CAPACITY,
    HASH_BYTES,
    SPILL_CAPACITY,
    Checksums,
    ObjectDraft,
    ObjectHold,
    StorageBackend,
    StoreOptions,
    checksums_of,
    open_backend,
)
from unfuse.stores.keyed import KeyedBackend, open_copies
from unfuse.stores.tensors import (
    WIDE,
    PackedTensor,
    Value,
    copy_into,
    describe,
    flat_bytes,
    narrowed,
    numpy_over,
    torch_over,
)

#: Seconds between two tries of a `put` that waits for room.
RECHECK_S = 0.005


class UnsealedObject:
    """An object that is being written. `ref` is its ref, without checksums.

    If its request is released meanwhile, writing has no effect, and `finish` raises ObjectLost.
    """

    def __init__(self, backend: StorageBackend, ref: ObjectRef, memory: NDArray[np.uint8]) -> None:
        self.ref = ref
        self._backend, self._memory = backend, memory
        self._checksums = Checksums(memory)
        #: Number of chunks that were announced.
        self._announced = 0
        #: Why the object is lost. None if it is not.
        self._lost: ObjectLost | None = None
        self._is_open = True
        for meta in ref.tensors:
            end = meta.offset + meta.nbytes
            memory[end : end + -end % ALIGNMENT] = 0

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors by name, to be written, as torch tensors."""
        return {meta.name: torch_over(self._memory, meta) for meta in self.ref.tensors}

    def completes_chunk(self, name: str, elements: int) -> bool:
        """Whether another chunk is complete once so many elements of a tensor are written.

        All tensors before it must be written by then, too.
        """
        return self._offset_behind(name, elements) >= (self._announced + 1) * chunk_bytes(self.ref.nbytes)

    def written(self, name: str, elements: int) -> None:
        """Note that so many elements of a tensor are written and will not change."""
        self._checksums.filled(self._offset_behind(name, elements), 1)
        if len(self._checksums.complete) > self._announced:
            self.announce()

    def fill(self, tensors: Mapping[str, Any]) -> None:
        """Write all tensors, unless the mapping is empty.

        Raises ValueError for tensors of other dtypes or shapes than announced.
        """
        for meta in self.ref.tensors if tensors else ():
            if (actual := describe(tensors.get(meta.name))) != (meta.dtype, meta.shape):
                raise ValueError(f"tensor {meta.name} is {actual}, but {(meta.dtype, meta.shape)} was announced")
        if tensors:
            self.write(tensors)
            self._checksums.filled(self._memory.nbytes, 1)
            self.announce()

    def write(self, tensors: Mapping[str, Value]) -> None:
        """Copy all tensors into the object's memory.

        Each piece is hashed while it is in the CPU's cache.
        """
        for meta in self.ref.tensors:
            value, end = tensors[meta.name], meta.offset + meta.nbytes
            value = value.data if isinstance(value, PackedTensor) else value
            source = None if value is None else flat_bytes(value)
            if value is not None and source is None:
                copy_into(self._memory[meta.offset : end], value)
            elif source is not None:
                for start in range(meta.offset, end, HASH_BYTES):
                    stop = min(start + HASH_BYTES, end)
                    self._memory[start:stop] = source[start - meta.offset : stop - meta.offset]
                    self._checksums.filled(stop)

    def finish(self) -> ObjectRef:
        """Seal the object and return its ref with checksums. All tensors must be written.

        Raises ObjectLost if the request was released meanwhile.
        """
        self._is_open = False
        checksums = self._checksums.finish()
        self._backend.seal(self.ref.id)
        return replace(self.ref, checksums=checksums)

    def abort(self) -> None:
        """Drop the object, unless it is sealed. Its readers get ObjectLost."""
        if self._is_open:
            self._is_open = False
            self._backend.abort(self.ref.id)

    def _offset_behind(self, name: str, elements: int) -> int:
        """Return the offset behind so many elements of a tensor, in bytes."""
        meta = next(meta for meta in self.ref.tensors if meta.name == name)
        return meta.offset + elements * DTYPES[meta.dtype]

    def announce(self) -> None:
        """Let readers see the complete chunks."""
        if self._lost:
            return
        self._announced = len(self._checksums.complete)
        try:
            self._backend.announce(self.ref.id, self._checksums.complete)
        except ObjectLost as error:
            self._lost = error


class HeldTensors(Mapping[str, Any]):
    """The tensors of an object by name: read-only arrays over the store's memory, not copies.

    They must not be read after `close` or the end of the `with` block. Without either, the object is held until the
    last of them is garbage.
    """

    def __init__(self, tensors: dict[str, Any], object_hold: ObjectHold) -> None:
        self._tensors, self._object_hold = tensors, object_hold

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> HeldTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the hold on the object."""
        self._tensors = {}
        self._object_hold.release()


class TensorStore:
    """Stores the objects of one owner, and reads those of others.

    Synchronous, thread-safe, a context manager.
    """

    def __init__(
        self,
        backend: StorageBackend,
        owner: str,
        node: str,
        clock: Clock,
        copies: KeyedBackend | None = None,
        copies_at: str = "none",
    ) -> None:
        self._backend, self._clock = backend, clock
        self._opened_copies, self._copies_at = copies, copies_at
        self._holds = weakref.WeakKeyDictionary[ObjectHold, ObjectRef]()
        self.owner, self.node = owner, node

        #: Where other processes of this machine read the objects, and the token for writing. Empty if none can.
        self.address, self.write_token = backend.address, backend.write_token

        #: The memory of the objects, if this process owns it.
        self.arena = backend.arena

        #: Whether the store's room is only that memory. If not, it stores objects elsewhere too.
        self.bounded = backend.bounded

    @classmethod
    def create(
        cls,
        name: str = "auto",
        *,
        owner: str = "",
        node: str = "",
        capacity: int = DEFAULT_CAPACITY,
        address: str = "",
        write_token: bytes = b"",
        threshold: float = 0.8,
        spill_capacity: int = SPILL_CAPACITY,
        durable: str = "none",
        copies: str = "none",
        run_dir: str = "",
        clock: Clock | None = None,
    ) -> TensorStore:
        """Open the store of that name or URL. Raises ConfigError.

        - `name`: "memory", "shared_memory", "auto" (shared memory if the kernel has it), `disk:PATH`,
          `redis://HOST:PORT/DATABASE`, `s3://BUCKET/PREFIX`, `spill:FAST+SLOW` of two of these, or `module:attr`.
        - `owner`, `node`: these go into refs. The default is a random owner.
        - `capacity`: bytes of the store, without `address`.
        - `address`, `write_token`: those of an owner process, into whose memory the store writes.
        - `threshold`: the share of the fast store above which a store spills; `spill_capacity`: most bytes of spilled
          objects.
        - `durable`: URL at which `save` stores durable copies.
        - `copies`: the same for stores that seldom have copies: it is opened when it is first needed.
        - `run_dir`: folder in which owners on one machine find each other's sockets. Without it, their addresses are
          used.
        """
        owner = owner or f"store-{secrets.token_hex(4)}"
        options = StoreOptions(owner, capacity, address, write_token, "", threshold, spill_capacity, run_dir)
        return cls(open_backend(name, options), owner, node, clock or SystemClock(), open_copies(durable), copies)

    def reserve(self, nbytes: int, request: str) -> Extent:
        """Allocate room in the arena for an object from another node. Raises ArenaFull."""
        return self._backend.reserve(nbytes, request)

    def register_owners(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Register the addresses of other owners, as {owner: (node, address)}.

        Their objects can be read from now on.
        """
        self._backend.register_owners(peers)

    def reaches(self, owner: str) -> bool:
        """Whether another owner's memory can be mapped.

        This may take long if that process is stopped.
        """
        return self._backend.reaches(owner)

    def put(
        self,
        tensors: Mapping[str, Value],
        *,
        request: str,
        stage: str,
        attempt: int,
        wait: float = 0.0,
        encoding: str = "none",
    ) -> ObjectRef:
        """Store one stage's output, copying each tensor once.

        Waits up to `wait` seconds for room. With the `encoding` "bf16" or "fp16", 32-bit floats are stored in 16 bits,
        and read as 32 bits again. With "int4", floats of 32 and 16 bits are quantized to four bits, in blocks that
        share a scale.

        Raises ArenaFull if there is no room, TransientError if the store fails, ObjectLost if the request was released
        meanwhile, and TypeError or ValueError for values that no object can have.
        """
        originals = tensors
        if encoding != "none":
            tensors = {name: narrowed(value, encoding) for name, value in originals.items()}
        metas, nbytes = layout_tensors((name, *describe(value)) for name, value in tensors.items())
        original_dtypes = {
            name: describe(originals[name])[0] for name in tensors if tensors[name] is not originals[name]
        }
        metas = tuple(
            replace(meta, is_wide=original_dtypes[meta.name]) if original_dtypes.get(meta.name) else meta
            for meta in metas
        )
        output = self._new_unsealed(metas, nbytes, request, stage, attempt, wait)
        try:
            output.write(tensors)
            return output.finish()
        except BaseException:
            output.abort()
            raise

    def start_output(
        self,
        outline: Iterable[tuple[str, str, tuple[int, ...]]],
        *,
        request: str,
        stage: str,
        attempt: int,
        small: bool = False,
    ) -> UnsealedObject | None:
        """Start an output that can be read while it is written step by step.

        Returns None if the store does not announce objects. Returns None also for an output of a single chunk, which
        can only be read when it is complete, unless `small` asks to announce these as well. Raises ArenaFull, and
        ValueError for an outline that no object can have.

        outline: the names, dtypes and shapes of the output's tensors.
        """
        metas, nbytes = layout_tensors(outline)
        if not self._backend.announces or (nbytes <= chunk_bytes(nbytes) and not small):
            return None
        output = self._new_unsealed(metas, nbytes, request, stage, attempt)
        output.announce()
        return output

    def memory(self, offset: int, nbytes: int) -> Any:
        """Return bytes of the objects' memory, as a torch tensor of uint8."""
        return torch_over(self._backend.memory(offset, nbytes), TensorMeta("", "uint8", (nbytes,), 0, nbytes))

    def is_whole(self, ref: ObjectRef) -> bool:
        """Whether an object that can be mapped is completely written. Raises ObjectLost."""
        return ref.is_whole or self._backend.is_whole(ref)

    def get(self, ref: ObjectRef, *, as_torch: bool = False, verify: bool = False, reader: str = "") -> HeldTensors:
        """Read an object without copying, as numpy arrays or torch tensors.

        numpy arrays have bfloat16 and float8 as their bits. Raises ObjectLost if the object is gone or does not match
        the ref. With `verify`, it is raised also if the checksums do not match.

        reader: the request that reads another request's object. It may have a durable copy of its own.
        """
        object_hold = self.open(ref, verify=verify, reader=reader)
        tensor_over, memory = (torch_over if as_torch else numpy_over), object_hold.bytes(writable=as_torch)
        return HeldTensors({meta.name: tensor_over(memory, meta) for meta in ref.tensors}, object_hold)

    def open(self, ref: ObjectRef, *, verify: bool = False, reader: str = "") -> ObjectHold:
        """Return a hold on an object, or on its durable copy if it is lost.

        Raises ObjectLost as `get` does.
        """
        if not _is_consistent(ref):
            raise ObjectLost(f"object {ref.id} cannot be read: its ref is inconsistent", ref.id)
        object_hold = self._hold_object(ref, verify, reader)
        self._holds[object_hold] = ref
        return object_hold

    def open_refs(self) -> list[ObjectRef]:
        """Return the refs of the objects that were read here and are still held."""
        return [ref for object_hold, ref in list(self._holds.items()) if not object_hold.released]

    def _hold_object(self, ref: ObjectRef, verify: bool, reader: str) -> ObjectHold:
        """Return a hold on an object or its durable copy. Raises ObjectLost."""
        try:
            object_hold = self._backend.open(ref)
            if verify and checksums_of(object_hold.bytes()) != ref.checksums:
                object_hold.release()
                raise ObjectLost(f"object {ref.id} is damaged: its bytes do not match its checksums", ref.id)
            return object_hold
        except ObjectLost:
            for request in dict.fromkeys([ref.request, reader or ref.request]):
                with suppress(ObjectLost):
                    return self._hold_copy(replace(ref, request=request))
            raise

    def save(self, ref: ObjectRef, reader: str = "") -> None:
        """Write a durable copy of an object, if there is a store for copies.

        The copy is read if the object is lost. With a `reader`, the copy belongs to that request, which reads another
        request's object. Raises ObjectLost if the object is lost already, and TransientError if the copy cannot be
        written.
        """
        if copies := self._copies():
            copy = replace(ref, request=reader or ref.request)
            copies.store(copy, self._backend.open(ref).bytes(), durable=True)

    def delete(self, ref: ObjectRef) -> None:
        """Delete an object of this owner.

        Idempotent. Its memory is free when its last hold ends.
        """
        self._backend.delete(ref)

    def discard(self, ref: ObjectRef) -> None:
        """Delete an object of this owner, and its durable copy. Idempotent.

        The copy may be of an object of any owner. Raises TransientError if it remains.
        """
        self.delete(ref)
        if copies := self._copies():
            copies.delete(ref)

    def release(self, request: str) -> None:
        """Delete all objects of a request, and their durable copies. Idempotent.

        Raises TransientError if some remain.
        """
        self.abandon(request)
        if copies := self._copies():
            copies.release(request)

    def abandon(self, request: str) -> None:
        """Delete all objects of a request, but not their durable copies. Idempotent.

        Raises TransientError.
        """
        self._backend.release(request)

    def stored_requests(self) -> frozenset[str]:
        """Return the ids of the requests with objects of this owner."""
        return self._backend.stored_requests()

    def usage(self) -> MemoryUsage:
        """Return how full the store is, in bytes."""
        return self._backend.usage()

    def close(self) -> None:
        """Free everything. Arrays that were read stay valid as long as they exist."""
        self._backend.close()
        if self._opened_copies is not None:
            self._opened_copies.close()

    def _copies(self) -> KeyedBackend | None:
        """Return the store of durable copies. Raises TransientError if it cannot be opened now."""
        if self._opened_copies is None and self._copies_at != "none":
            try:
                self._opened_copies = open_copies(self._copies_at)
            except ConfigError as error:
                raise TransientError(str(error)) from error
        return self._opened_copies

    def _hold_copy(self, ref: ObjectRef) -> ObjectHold:
        """Return a hold on the durable copy of an object. Raises ObjectLost."""
        try:
            copies = self._copies()
        except TransientError as error:
            raise ObjectLost(f"object {ref.id} is lost: {error}", ref.id) from error
        if copies is None:
            raise ObjectLost(f"object {ref.id} is lost, and this worker has no durable copies", ref.id)
        return copies.open(ref)

    def _new_unsealed(
        self, metas: tuple[TensorMeta, ...], nbytes: int, request: str, stage: str, attempt: int, wait: float = 0.0
    ) -> UnsealedObject:
        """Allocate an object, waiting up to `wait` seconds for room. Raises ArenaFull."""
        draft = self._wait_for_room(nbytes, request, wait)
        ref = ObjectRef(
            draft.id,
            self.owner,
            self.node,
            request,
            stage,
            attempt,
            draft.generation,
            nbytes,
            metas,
            (),
            draft.key,
            self._clock.wall(),
        )
        return UnsealedObject(self._backend, ref, draft.memory)

    def _wait_for_room(self, nbytes: int, request: str, wait: float) -> ObjectDraft:
        """Return a new draft, waiting up to `wait` seconds for room. Raises ArenaFull."""
        deadline = self._clock.now() + wait
        while True:
            try:
                return self._backend.create(nbytes, request)
            except ArenaFull as full:
                # An object that is larger than the whole store never fits.
                if nbytes > full.capacity or self._clock.now() >= deadline:
                    raise
            time.sleep(RECHECK_S)

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_consistent(ref: ObjectRef) -> bool:
    """Whether a ref's tensors are where `layout_tensors` puts them, inside their object."""
    try:
        encoded = (meta for meta in ref.tensors if meta.is_wide or meta.dtype == PACKED)
        if any(meta.is_wide not in WIDE.get(meta.dtype, ()) for meta in encoded):
            return False
        stored = tuple(replace(meta, is_wide="") if meta.is_wide else meta for meta in ref.tensors)
        return layout_tensors((meta.name, meta.dtype, meta.shape) for meta in stored) == (stored, ref.nbytes)
    except ValueError:
        return False
