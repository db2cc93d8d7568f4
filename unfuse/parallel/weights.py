"""Weights that the ranks of a worker have together in host memory: the first one makes them, and all map what it made.

Files that have tensors as they are used are mapped by every process, so that a machine holds them once. What is made of
files, such as another dtype, each rank would make and hold for itself. Instead the first one writes it as a file of
safetensors that is only in memory, and has no name, and all load that like any other. It goes with the last of them.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from safetensors import safe_open
from torch.nn import Module

from unfuse.core.errors import ConfigError
from unfuse.parallel.group import Group, give_back

LINE, BEGAN = 64, "began"
"""Bytes of a line of memory, at which torch begins tensors; where metadata says which began elsewhere."""

HEADER_LENGTH = 8
DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
"""What safetensors files call these types."""

WRITTEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # what the first rank does to the file when all is in it


@contextmanager
def together(group: Group, load: Callable[[], dict[str, torch.Tensor]]) -> Iterator[str]:
    """The path, within the block, of a file with the tensors that `load` gives the first rank; all ranks call this.

    "" where it gives none, or where a rank may not open what the first one has. Raises ConfigError, for the same reason
    on all ranks, if it fails.
    """
    first = group.rank == 0
    file = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if first else -1
    try:
        if first:
            fcntl.flock(file, fcntl.LOCK_EX)
        place = group.exchange(f"/proc/{os.getpid()}/fd/{file}".encode())[0]
        if not first:
            with suppress(OSError):
                file = os.open(place.decode(), os.O_RDONLY)
        if any(group.exchange(b"" if file >= 0 else b"!")):  # from here on all have it, whatever becomes of the first
            yield ""
            return
        if first:
            _fill(file, load)
        fcntl.flock(file, fcntl.LOCK_SH)  # waits for the first, however long it takes
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & WRITTEN != WRITTEN:
            raise ConfigError(os.pread(file, 1 << 16, 0).decode() or "the first rank ended while it loaded weights")
        yield f"/proc/self/fd/{file}" if os.fstat(file).st_size else ""
    finally:
        if file >= 0:
            os.close(file)


def _fill(file: int, load: Callable[[], dict[str, torch.Tensor]]) -> None:
    """Write what is loaded, or why it could not be."""
    try:
        if tensors := load():
            write(file, tensors)
    except Exception as error:
        os.ftruncate(file, 0)
        os.pwrite(file, str(error).encode(), 0)
    else:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, WRITTEN)
    give_back()


def write(file: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as a file of safetensors, and let each go: it need not be there twice. Takes them out of `tensors`.

    Those that are one have one place and one name. What fills whole lines of memory lies first, so that all of it
    begins at one; its metadata says how far behind the beginning of a line tensors began that did not.
    """
    known: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in tensors.items():
        known.setdefault((tensor.data_ptr(), tensor.shape), name)
    names = sorted(known.values(), key=lambda name: (tensors[name].nbytes % LINE > 0, -tensors[name].itemsize))
    began = {name: off for name in names if (off := tensors[name].data_ptr() % LINE)}
    said: dict[str, object] = {"__metadata__": {"format": "pt", BEGAN: json.dumps(began)}}
    end = 0
    for name in names:
        one, begin, end = tensors[name], end, end + tensors[name].nbytes
        said[name] = {"dtype": DTYPES[one.dtype], "shape": [*one.shape], "data_offsets": [begin, end]}
    text = json.dumps(said).encode()
    text += b" " * (-(HEADER_LENGTH + len(text)) % LINE)
    at = _put(file, len(text).to_bytes(HEADER_LENGTH, "little") + text, 0)
    kept = {name: tensors[name] for name in names}
    tensors.clear()
    for name in names:
        at = _put(file, kept.pop(name).contiguous().flatten().view(torch.uint8).numpy().data, at)


def align(model: Module, file: str) -> None:
    """Copy what lies otherwise in that file than it did for the first rank: kernels may round otherwise by that."""
    with safe_open(file, "pt") as opened:
        began, names = json.loads(opened.metadata()[BEGAN]), opened.keys()
    own = model.state_dict(keep_vars=True)
    for name in names:
        tensor, off = own[name], began.get(name, 0)
        if tensor.data_ptr() % LINE != off:
            room = torch.empty(tensor.nbytes + LINE, dtype=torch.uint8)
            start = (off - room.data_ptr()) % LINE
            copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = copy.copy_(tensor)


def _put(file: int, data: bytes | memoryview, at: int) -> int:
    """Write all of it. Returns where it ends."""
    left = memoryview(data)
    while left:
        done = os.pwrite(file, left, at)
        left, at = left[done:], at + done
    return at
