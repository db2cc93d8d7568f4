"""What backends have in common whose objects are in a table."""

from __future__ import annotations

from typing_extensions import override

from unfuse.arena.buddy import Usage
from unfuse.arena.client import ArenaClient
from unfuse.arena.objects import Extent, ObjectTable
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.base import StorageBackend


class TabledBackend(StorageBackend):
    """Objects in a table of this process, or by a connection to that of another one."""

    def __init__(self, table: ObjectTable | ArenaClient) -> None:
        self._objects = table

    @override
    def seal(self, id: str) -> None:
        self._objects.seal(id)

    @override
    def abort(self, id: str) -> None:
        self._objects.abort(id)

    @override
    def delete(self, ref: ObjectRef) -> None:
        self._objects.delete(ref.id)

    @override
    def release(self, request: str) -> None:
        self._objects.release(request)

    @override
    def holding(self) -> frozenset[str]:
        return self._objects.requests()

    @override
    def idle(self) -> list[Extent]:
        return self._objects.idle()

    @override
    def spill(self, ref: ObjectRef) -> None:
        self._objects.spill(ref.id)

    @override
    def usage(self) -> Usage:
        return self._objects.usage()
