"""Weights that the ranks of a worker share in host memory.

Rank 0 writes them, and all ranks map them.

Files that store tensors in the dtype in use are mapped by every process, so they are in a machine's memory once.
Converted weights, for example of another dtype, would exist once per rank. Instead rank 0 writes them as a safetensors
file without a name, in memory only (memfd), and all ranks load that file like any other. The memory is freed when no
rank has the file open or mapped.
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
from unfuse.parallel.group import Group, trim_heap

#: Bytes of a cache line. torch aligns new tensors to it.
LINE = 64

#: The metadata key for the offsets of tensors that were not aligned to LINE in the memory of rank 0.
OFFSETS_KEY = "began"

#: Bytes of the length field at the start of a safetensors file.
HEADER_LENGTH = 8

#: The names of dtypes in safetensors files.
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}

#: The seals that rank 0 sets on the file once it is complete.
WRITTEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@contextmanager
def gather_files(group: Group, load: Callable[[], dict[str, torch.Tensor]]) -> Iterator[str]:
    """Yield the path of a shared file with the tensors from `load`.

    All ranks call this; only rank 0 calls `load`. The path is valid within the block. It is "" if `load` returns no
    tensors, or if a rank may not open the file of rank 0. Raises ConfigError with the same message on all ranks if
    `load` fails.
    """
    is_first = group.rank == 0
    file = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if is_first else -1

    try:
        # Before the path is sent, so that no other rank locks the file first.
        if is_first:
            fcntl.flock(file, fcntl.LOCK_EX)

        path = group.exchange(f"/proc/{os.getpid()}/fd/{file}".encode())[0]
        if not is_first:
            with suppress(OSError):
                file = os.open(path.decode(), os.O_RDONLY)

        # After this exchange all ranks have the file open, even if rank 0 exits.
        if any(group.exchange(b"" if file >= 0 else b"!")):
            yield ""
            return

        if is_first:
            _fill(file, load)

        # Waits until rank 0 has written the file. An exchange would time out, because a conversion may take longer.
        fcntl.flock(file, fcntl.LOCK_SH)
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & WRITTEN != WRITTEN:
            raise ConfigError(os.pread(file, 1 << 16, 0).decode() or "rank 0 exited while it loaded weights")
        yield f"/proc/self/fd/{file}" if os.fstat(file).st_size else ""
    finally:
        if file >= 0:
            os.close(file)


def _fill(file: int, load: Callable[[], dict[str, torch.Tensor]]) -> None:
    """Write the loaded tensors into the file and seal it.

    If that fails, writes the error message into the file and leaves it unsealed.
    """
    try:
        if tensors := load():
            write(file, tensors)
    except Exception as error:
        os.ftruncate(file, 0)
        os.pwrite(file, str(error).encode(), 0)
    else:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, WRITTEN)
    trim_heap()


def write(file: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as a safetensors file, and free each of them once it is written.

    Empties `tensors`, so that the weights never exist twice in memory. Tensors with the same memory and shape are
    written once, under one name. Tensors whose size is a multiple of LINE come first, so that each of them is aligned.
    The metadata has the offsets from LINE of tensors that were not aligned.
    """
    name_by_memory: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in tensors.items():
        name_by_memory.setdefault((tensor.data_ptr(), tensor.shape), name)

    names = sorted(name_by_memory.values(), key=lambda name: (tensors[name].nbytes % LINE > 0, -tensors[name].itemsize))
    offsets = {name: offset for name in names if (offset := tensors[name].data_ptr() % LINE)}

    header: dict[str, object] = {"__metadata__": {"format": "pt", OFFSETS_KEY: json.dumps(offsets)}}

    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}

    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-(HEADER_LENGTH + len(header_bytes)) % LINE)
    position = _write_at(file, len(header_bytes).to_bytes(HEADER_LENGTH, "little") + header_bytes, 0)

    remaining = {name: tensors[name] for name in names}
    tensors.clear()
    for name in names:
        position = _write_at(file, remaining.pop(name).contiguous().flatten().view(torch.uint8).numpy().data, position)


def align(model: Module, file: str) -> None:
    """Copy a model's tensors whose alignment in the file is not that of rank 0.

    The copies have the alignment of rank 0's memory, because kernels may round differently by alignment.

    `file`: the path of the file from which the model was loaded.
    """
    with safe_open(file, "pt") as opened:
        offsets, names = json.loads(opened.metadata()[OFFSETS_KEY]), opened.keys()

    parameters = model.state_dict(keep_vars=True)
    for name in names:
        tensor, offset = parameters[name], offsets.get(name, 0)
        if tensor.data_ptr() % LINE != offset:
            buffer = torch.empty(tensor.nbytes + LINE, dtype=torch.uint8)
            start = (offset - buffer.data_ptr()) % LINE
            copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = copy.copy_(tensor)


def _write_at(file: int, data: bytes | memoryview, position: int) -> int:
    """Write all of the data at a position of the file.

    Returns the position after the data.
    """
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(file, remaining, position)
        remaining, position = remaining[written:], position + written
    return position
