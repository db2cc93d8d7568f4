"""Stores: where tensors and results live."""

from __future__ import annotations

BLOB_STORES = {
    "disk": "unfuse.stores.disk:DiskBlobs",
    "redis": "unfuse.stores.redis:RedisBlobs",
    "rediss": "unfuse.stores.redis:RedisBlobs",
    "s3": "unfuse.stores.s3:S3Blobs",
}
"""Blob stores, by the scheme of their URL; each class takes a URL."""

OBJECTS, COPIES = "objects", "copies"
"""The folders of a blob store for objects, and for durable copies."""

BACKENDS = {
    "memory": "unfuse.stores.memory:open_memory",
    "shared_memory": "unfuse.stores.shared_memory:open_shared_memory",
    "spill": "unfuse.stores.spill:open_spill",
    **dict.fromkeys(BLOB_STORES, "unfuse.stores.keyed:open_keyed"),
}
"""Storage backends, by name or by the scheme of a URL; each is a function from StoreOptions to a backend."""
