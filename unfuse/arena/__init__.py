"""The arena of a worker: shared memory for tensors, its allocator, and its socket."""
