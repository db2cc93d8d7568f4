"""Stores of tensors, results and blobs, and the names of their backends."""

from __future__ import annotations

#: Blob stores, by the scheme of their URL. Each class takes a URL.
BLOB_STORES = {
    "disk": "unfuse.stores.disk:DiskBlobs",
    "redis": "unfuse.stores.redis:RedisBlobs",
    "rediss": "unfuse.stores.redis:RedisBlobs",
    "s3": "unfuse.stores.s3:S3Blobs",
}
#: The folders of a blob store for objects and for durable copies.
OBJECTS, COPIES = "objects", "copies"

#: Storage backends, by name or by the scheme of a URL. Each is a function from StoreOptions to a backend.
BACKENDS = {
    "memory": "unfuse.stores.memory:open_memory",
    "shared_memory": "unfuse.stores.shared_memory:open_shared_memory",
    "spill": "unfuse.stores.spill:open_spill",
    **dict.fromkeys(BLOB_STORES, "unfuse.stores.keyed:open_keyed"),
}
