"""Where weights are found, and how they are read: folders, the hub, single files, GGUF, adapters."""
