"""A store of another package, whose compute processes begin an object beside each output and forget it."""

from __future__ import annotations

from unfuse.arena.client import ArenaClient
from unfuse.stores.base import ObjectDraft, StorageBackend, StoreOptions
from unfuse.stores.shared_memory import SharedMemoryBackend, open_shared_memory

FORGOTTEN = 12_345
"""Bytes of each such object."""


class Forgetful(SharedMemoryBackend):
    def create(self, nbytes: int, request: str) -> ObjectDraft:
        super().create(FORGOTTEN, request)
        return super().create(nbytes, request)


def open_forgetful(options: StoreOptions) -> StorageBackend:
    if not options.address:
        return open_shared_memory(options)
    home = ArenaClient(options.address, options.write_token)
    return Forgetful(options, home, options.address, options.write_token)
