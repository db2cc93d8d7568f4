"""Stores: where tensors and results live."""

from __future__ import annotations

BACKENDS = {
    "memory": "unfuse.stores.memory:open_memory",
    "shared_memory": "unfuse.stores.shared_memory:open_shared_memory",
}
"""What `TensorStore.create` takes by name: functions from StoreOptions to a StorageBackend."""
