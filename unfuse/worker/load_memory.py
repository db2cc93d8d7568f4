"""Explains why a model does not fit into memory while it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unfuse.arena.limits import readable_bytes
from unfuse.core.errors import ConfigError
from unfuse.core.host_memory import available_memory
from unfuse.core.retries import first_line, is_out_of_host_memory, is_out_of_memory

#: What a person can do about a GPU that is too small, and about too little host memory.
ON_GPU = "stop other programs on it, choose another one with --device or --place, or use --offload or quantized weights"
ON_HOST = "stop other programs, start fewer workers, or use quantized weights"


@contextmanager
def explain_out_of_memory(
    subject: Callable[[], str], device: str, free: Callable[[], int], activity: str = "loading"
) -> Iterator[None]:
    """Raise ConfigError, with a sentence for people, if memory runs out within the block.

    `subject`: returns what is loaded, with its bytes. `free`: returns the free bytes of the device. `activity`: what is
    done with the subject.
    """
    try:
        yield
    except Exception as error:
        cause = next((cause for cause in (error, error.__cause__) if cause and is_out_of_memory(cause)), None)
        if cause is None:
            raise
        reason = first_line(cause).rstrip(".")
        if is_out_of_host_memory(cause):
            device, free = "cpu", available_memory
        raise ConfigError(f"out of memory while {activity} {subject()}: {room(device, free)} ({reason})") from error


def room(device: str, free: Callable[[], int]) -> str:
    """Return how much memory is free, and what to do, as part of a sentence."""
    name = "the device" if device == "auto" else device
    try:
        state = f"{readable_bytes(free())} of {name} are free"
    except RuntimeError:  # no device is chosen yet, or it does not answer
        state = f"{name} has too little free memory"
    return f"{state}; {ON_HOST if device.startswith('cpu') else ON_GPU}"
