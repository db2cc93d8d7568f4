"""One worker's tensor memory, shared by map: the arena, its allocator, and the socket other processes reach it by."""
