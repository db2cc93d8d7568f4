"""Stores: where tensors and results live."""

from __future__ import annotations

SHELVES = {
    "disk": "unfuse.stores.disk:DiskBlobs",
    "redis": "unfuse.stores.redis:RedisBlobs",
    "rediss": "unfuse.stores.redis:RedisBlobs",
    "s3": "unfuse.stores.s3:S3Blobs",
}
"""Places outside of every process, by the beginning of their URL, which opens them."""

BACKENDS = {
    "memory": "unfuse.stores.memory:open_memory",
    "shared_memory": "unfuse.stores.shared_memory:open_shared_memory",
    "spill": "unfuse.stores.spill:open_spill",
    **dict.fromkeys(SHELVES, "unfuse.stores.keyed:open_keyed"),
}
"""What `TensorStore.create` takes by name or by the beginning of a URL: functions from StoreOptions to a backend."""
