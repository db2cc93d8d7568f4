"""A worker: a light parent that talks and keeps memory, and compute processes that run stages."""
