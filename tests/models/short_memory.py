"""Modules that run out of memory for large inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def short_of_memory(module: torch.nn.Module, most: int) -> Iterator[list[int]]:
    """Let a module run out of memory above `most` numbers a side; yields the sides that it was called with."""
    sides = list[int]()

    def check(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sides.append(max(args[0].shape[-2:]))
        if sides[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    hook = module.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield sides
    finally:
        hook.remove()
