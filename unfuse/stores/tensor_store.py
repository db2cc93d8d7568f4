"""The tensor store: `put` stores a stage's output and returns an object ref; `get` reads the tensors of a ref."""

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
from unfuse.core.object_ref import ALIGNMENT, DTYPES, PACKED, ObjectRef, TensorMeta, chunk_bytes, lay_out
from unfuse.stores.base import (
    DEFAULT_CAPACITY,
    PIECE,
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


class UnsealedObject:
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
            value = value.data if isinstance(value, PackedTensor) else value
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
        """Let readers see the chunks that are complete."""
        if self._lost:
            return
        self._told = len(self._checksums.known)
        try:
            self._backend.announce(self.ref.id, self._checksums.known)
        except ObjectLost as error:
            self._lost = error


LOOK_AGAIN_S = 0.005  # seconds between two tries of a `put` that waits for room


class HeldTensors(Mapping[str, Any]):
    """The tensors of an object by name: read-only arrays over the store's memory, not copies.

    They must not be read after `close` or the end of the `with` block. Without either, they are held until the last of
    them is garbage.
    """

    def __init__(self, tensors: dict[str, Any], hold: ObjectHold) -> None:
        self._tensors, self._hold = tensors, hold

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
        self._hold.release()


class TensorStore:
    """Stores the objects of one owner, and reads those of others. Synchronous, thread-safe, a context manager."""

    def __init__(
        self, backend: StorageBackend, owner: str, node: str, clock: Clock, copies: KeyedBackend | None = None,
        copies_at: str = "none",
    ) -> None:  # fmt: skip
        self._backend, self._clock, self._opened, self._copies_at = backend, clock, copies, copies_at
        self._holds = weakref.WeakKeyDictionary[ObjectHold, ObjectRef]()
        self.owner, self.node = owner, node
        self.address, self.write_token = backend.address, backend.write_token
        """Where other processes of this machine read the objects, and the secret of those who write; "" if none can."""
        self.arena, self.bounded = backend.arena, backend.bounded
        """The memory of the objects, if this process owns it, and whether the store has no room but that."""

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
        """Open a store: "memory", "shared_memory", "auto" (shared memory where the kernel has it), `disk:PATH`,
        `redis://HOST:PORT/DATABASE`, `s3://BUCKET/PREFIX`, `spill:FAST+SLOW` of two of these, or `module:attr`.

        `owner` and `node` go into refs (default: a random owner). Without `address` the store owns `capacity` bytes;
        with it, and the `write_token` of the owner, it writes into the memory of another process. A store that spills
        begins when the share `threshold` of the fast one is used. `durable` is where `save` keeps copies, `copies` the
        same for who seldom has any: it is opened when it is first needed. Owners on one machine find each other's
        sockets in `run_dir`; without it, by their addresses. Raises ConfigError.
        """
        owner = owner or f"store-{secrets.token_hex(4)}"
        options = StoreOptions(owner, capacity, address, write_token, "", threshold, spill_capacity, run_dir)
        return cls(open_backend(name, options), owner, node, clock or SystemClock(), open_copies(durable), copies)

    def reserve(self, nbytes: int, request: str) -> Extent:
        """Allocate room in that memory for an object from another node. Raises ArenaFull."""
        return self._backend.reserve(nbytes, request)

    def learn(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Learn where other owners are, as {owner: (node, address)}: their objects can be read from now on."""
        self._backend.learn(peers)

    def reaches(self, owner: str) -> bool:
        """Whether another owner's memory can be mapped. This may take long if that process is stopped."""
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

        With an `encoding` ("bf16" or "fp16"), 32-bit floats are stored in 16 bits and read as 32 bits again; with
        "int4", floats of 32 and 16 bits are stored in four, in blocks that share a scale. Waits up
        to `wait` seconds for room. Raises ArenaFull if there is none, TransientError if the store fails, ObjectLost if
        the request was released meanwhile, TypeError or ValueError for values that stages cannot hand on.
        """
        wide = tensors
        if encoding != "none":
            tensors = {name: narrowed(value, encoding) for name, value in wide.items()}
        metas, nbytes = lay_out((name, *describe(value)) for name, value in tensors.items())
        narrow = {name: describe(wide[name])[0] for name in tensors if tensors[name] is not wide[name]}
        metas = tuple(replace(meta, wide=narrow[meta.name]) if narrow.get(meta.name) else meta for meta in metas)
        output = self._unsealed(metas, nbytes, request, stage, attempt, wait)
        try:
            output.write(tensors)
            return output.finish()
        except BaseException:
            output.abort()
            raise

    def begin(
        self,
        outline: Iterable[tuple[str, str, tuple[int, ...]]],
        *,
        request: str,
        stage: str,
        attempt: int,
        small: bool = False,
    ) -> UnsealedObject | None:
        """Begin an output that is written step by step, of these names, dtypes and shapes, and can be read meanwhile.

        None where nobody could read any of it before it is whole: the store does not announce, or it is one chunk, and
        not wanted though it is `small`.
        Raises ArenaFull, and ValueError for what no object can be.
        """
        metas, nbytes = lay_out(outline)
        if not self._backend.announces or (nbytes <= chunk_bytes(nbytes) and not small):
            return None
        output = self._unsealed(metas, nbytes, request, stage, attempt)
        output.announce()
        return output

    def at(self, offset: int, nbytes: int) -> Any:
        """Bytes of the memory in which objects lie, whatever they are now, as a torch tensor of uint8."""
        return torch_over(self._backend.at(offset, nbytes), TensorMeta("", "uint8", (nbytes,), 0, nbytes))

    def is_whole(self, ref: ObjectRef) -> bool:
        """Whether an object is written to its end, of those that can be mapped. Raises ObjectLost."""
        return ref.whole or self._backend.is_whole(ref)

    def get(self, ref: ObjectRef, *, as_torch: bool = False, verify: bool = False, reader: str = "") -> HeldTensors:
        """Read an object without copying, as numpy arrays (bfloat16 and float8 as their bits) or torch tensors.

        The request `reader` may have a copy of its own of another one's object. Raises ObjectLost if it is gone or does
        not match the ref; with `verify`, also if its checksums do not match.
        """
        hold = self.hold(ref, verify=verify, reader=reader)
        over, memory = (torch_over if as_torch else numpy_over), hold.bytes(writable=as_torch)
        return HeldTensors({meta.name: over(memory, meta) for meta in ref.tensors}, hold)

    def hold(self, ref: ObjectRef, *, verify: bool = False, reader: str = "") -> ObjectHold:
        """Hold the bytes of an object, or else those of its durable copy. Raises ObjectLost, as `get` does."""
        if not _consistent(ref):
            raise ObjectLost(f"object {ref.id} cannot be read: its ref contradicts itself", ref.id)
        hold = self._hold(ref, verify, reader)
        self._holds[hold] = ref
        return hold

    def held(self) -> list[ObjectRef]:
        """The refs of the objects that were read here and are still held."""
        return [ref for hold, ref in list(self._holds.items()) if not hold.released]

    def _hold(self, ref: ObjectRef, verify: bool, reader: str) -> ObjectHold:
        try:
            hold = self._backend.hold(ref)
            if verify and checksums_of(hold.bytes()) != ref.checksums:
                hold.release()
                raise ObjectLost(f"object {ref.id} is damaged: its bytes are not the ones that were written", ref.id)
            return hold
        except ObjectLost:
            for request in dict.fromkeys([ref.request, reader or ref.request]):
                with suppress(ObjectLost):
                    return self._copy(replace(ref, request=request))
            raise

    def save(self, ref: ObjectRef, reader: str = "") -> None:
        """Write a durable copy of an object, if there is a store for copies. It is read if the object is lost.

        With a `reader`, the copy belongs to that request, which reads an object of another one. Raises ObjectLost if
        the object is lost already, TransientError if the copy cannot be written.
        """
        if copies := self._copies():
            copy = replace(ref, request=reader or ref.request)
            copies.keep(copy, self._backend.hold(ref).bytes(), durable=True)

    def delete(self, ref: ObjectRef) -> None:
        """Delete an object of this owner; its memory is free when the last reader closes. Idempotent."""
        self._backend.delete(ref)

    def discard(self, ref: ObjectRef) -> None:
        """Delete an object of this owner, and its copy, anyone's. Idempotent. Raises TransientError if that stays."""
        self.delete(ref)
        if copies := self._copies():
            copies.delete(ref)

    def release(self, request: str) -> None:
        """Delete all objects of a request, and their durable copies. Idempotent. Raises TransientError if some stay."""
        self.abandon(request)
        if copies := self._copies():
            copies.release(request)

    def abandon(self, request: str) -> None:
        """Delete all objects of a request, but not their durable copies. Idempotent. Raises TransientError."""
        self._backend.release(request)

    def holding(self) -> frozenset[str]:
        """Ids of the requests this owner has objects of."""
        return self._backend.holding()

    def usage(self) -> MemoryUsage:
        """How full the store is, in bytes."""
        return self._backend.usage()

    def close(self) -> None:
        """Free everything. Arrays that were read stay valid as long as they exist."""
        self._backend.close()

    def _copies(self) -> KeyedBackend | None:
        """The store of copies. Raises TransientError if it cannot be opened now."""
        if self._opened is None and self._copies_at != "none":
            try:
                self._opened = open_copies(self._copies_at)
            except ConfigError as error:
                raise TransientError(str(error)) from error
        return self._opened

    def _copy(self, ref: ObjectRef) -> ObjectHold:
        """Hold a copy. Raises ObjectLost."""
        try:
            copies = self._copies()
        except TransientError as error:
            raise ObjectLost(f"object {ref.id} is lost: {error}", ref.id) from error
        if copies is None:
            raise ObjectLost(f"object {ref.id} is lost, and this worker makes no copies", ref.id)
        return copies.hold(ref)

    def _unsealed(
        self, metas: tuple[TensorMeta, ...], nbytes: int, request: str, stage: str, attempt: int, wait: float = 0.0
    ) -> UnsealedObject:
        """Allocate an object, waiting up to `wait` seconds for room. Raises ArenaFull."""
        draft = self._create(nbytes, request, wait)
        ref = ObjectRef(
            draft.id, self.owner, self.node, request, stage, attempt, draft.generation, nbytes, metas, (), draft.key,
            self._clock.wall(),
        )  # fmt: skip
        return UnsealedObject(self._backend, ref, draft.memory)

    def _create(self, nbytes: int, request: str, wait: float) -> ObjectDraft:
        until = self._clock.now() + wait
        while True:
            try:
                return self._backend.create(nbytes, request)
            except ArenaFull as full:
                if nbytes > full.capacity or self._clock.now() >= until:
                    raise
            time.sleep(LOOK_AGAIN_S)

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _consistent(ref: ObjectRef) -> bool:
    """Whether a ref's tensors are where `lay_out` puts them, so that none extends into another object."""
    try:
        narrow = (meta for meta in ref.tensors if meta.wide or meta.dtype == PACKED)
        if any(meta.wide not in WIDE.get(meta.dtype, ()) for meta in narrow):
            return False
        stored = tuple(replace(meta, wide="") if meta.wide else meta for meta in ref.tensors)
        return lay_out((meta.name, meta.dtype, meta.shape) for meta in stored) == (stored, ref.nbytes)
    except ValueError:
        return False
