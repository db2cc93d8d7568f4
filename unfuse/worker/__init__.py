"""A worker: a light parent process for messages and memory, and compute processes for stages."""
