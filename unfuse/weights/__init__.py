"""Model weights: where they are, and how they are read (folders, hub, GGUF, LoRA adapters)."""
