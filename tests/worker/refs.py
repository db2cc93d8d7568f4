"""Refs of objects that are nowhere."""

from unfuse.core.object_ref import ObjectRef, TensorMeta


def ref(nbytes: int, *checksums: int, tensors: tuple[TensorMeta, ...] = ()) -> ObjectRef:
    """A ref of an object of so many bytes, whose chunks have these checksums."""
    return ObjectRef("id", "owner", "node", "request", "stage", 1, 1, nbytes, tensors, checksums, b"key", 0.0)
