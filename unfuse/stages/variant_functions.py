"""Finds the torch function that changes a row when it shares a forward.

Every result of every function is reduced to a digest for each row, on the device that has it. The host reads only these
digests, and stores those of one forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from typing_extensions import override

from unfuse.stages.base import Stage
from unfuse.stages.batch_invariant_ops import functions_named

#: Functions that return uninitialized memory, whose contents are not compared.
UNWRITTEN = functions_named("empty empty_like empty_strided new_empty")

#: The result of a forward that differs although no function of it does.
UNKNOWN = "an unknown function"

#: The bytes of a word, and the most words of a row that are reduced at a time.
WORD, MOST_WORDS = 8, 1 << 18

#: Digests of successive words are combined by this odd factor.
FACTOR = 0x5851F42D4C957F2D

#: What a row of a result has: shape, dtype, and a hash of its bytes.
Digest = tuple[tuple[int, ...], torch.dtype, int]

#: Called with the name of a function and the digests of the rows of its result.
Visit = Callable[[str, list[Digest]], None]


def variant_function(stage: Stage, states: Sequence[Any], row: int) -> str:
    """Return the first function that makes this row of a batch differ.

    Repeats both forwards, the second one up to that function.
    """
    return first_variant_function(lambda: stage.step_alone(states[row]), lambda: stage.step(states)) or UNKNOWN


def first_variant_function(alone: Callable[[], object], together: Callable[[], object]) -> str:
    """Return the first function whose result differs between two forwards; "" if none does.

    `alone`: runs the forward of one row. `together`: runs a forward of several rows, with that one. The results for
    that row are compared. Further rows and functions of the latter are ignored. `together` runs first and whole, and
    `alone` ends at the difference.
    """
    digests_by_name: dict[str, set[Digest]] = defaultdict(set)

    def compare(name: str, digests: list[Digest]) -> None:
        if not digests_by_name[name].issuperset(digests):
            raise DifferenceReached(name)

    with _ResultDigests(lambda name, digests: digests_by_name[name].update(digests)):
        together()
    try:
        with _ResultDigests(compare):
            alone()
    except DifferenceReached as difference:
        return difference.name
    return ""


class DifferenceReached(BaseException):
    """Ends a forward at the first function that differs.

    No model handles it, unlike an Exception.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        #: The name of the function.
        self.name = name


class _ResultDigests(TorchFunctionMode):
    """Calls `visit` for every function of a forward."""

    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self._visit = visit

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensor = result[0] if isinstance(result, tuple) and result else result
        if isinstance(tensor, Tensor) and tensor.dim() and func not in UNWRITTEN:
            self._visit(str(resolve_name(func)), row_digests(tensor))
        return result


@torch.no_grad()
def row_digests(tensor: Tensor) -> list[Digest]:
    """Return a digest of each row's shape, dtype and bytes.

    The host reads 8 bytes for each row.
    """
    rows, shape = len(tensor), tuple(tensor.shape[1:])
    if not tensor.numel():
        return [(shape, tensor.dtype, 0)] * rows

    values = tensor.detach().resolve_conj().resolve_neg()
    data = values.reshape(rows, -1).contiguous().view(torch.uint8)
    if padding := -data.shape[1] % WORD:
        data = functional.pad(data, (0, padding))

    hashes = torch.zeros(rows, dtype=torch.int64, device=tensor.device)
    for words in torch.split(data.view(torch.int64), MOST_WORDS, 1):
        mixed = words ^ (words >> 31)  # otherwise differences of only the highest bit would cancel out in pairs
        hashes = hashes * FACTOR + (mixed * _weights(tensor.device)[: words.shape[1]]).sum(1)
    return [(shape, tensor.dtype, row_hash) for row_hash in hashes.tolist()]


@cache
def _weights(device: torch.device) -> Tensor:
    """Return odd random weights, equal on all devices: one for each place of a word."""
    generator = torch.Generator("cpu").manual_seed(0)
    return (torch.randint(-(1 << 62), 1 << 62, (MOST_WORDS,), generator=generator) * 2 + 1).to(device)
