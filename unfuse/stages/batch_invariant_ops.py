"""Forwards that requests share without changing each other's bytes, and what is to blame where they do.

On a CPU three things make a row depend on its mates. Products with one row a request, and convolutions, pick another
kernel for another batch. Pointwise functions round otherwise in the tail of a vector than in its body, and where a tail
lies depends on how many numbers there are, and on how threads share them. And a slice that is contiguous for one
request is not for several, so that another path rounds. `BatchInvariantOps` runs just these one request at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from typing_extensions import override

Function = Callable[..., Any]


def _named(names: str) -> frozenset[Function]:
    """The functions and tensor methods of these names, wherever torch has them, in place and not."""
    places = (functional, torch, Tensor, torch.special)
    found = (getattr(place, name + end, None) for name in names.split() for end in ("", "_") for place in places)
    return frozenset(function for function in found if function is not None)


CONVOLUTIONS = _named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
NORMS = _named("normalize group_norm instance_norm")
POINTWISE = _named(
    "silu gelu mish softplus sigmoid tanh elu selu celu logsigmoid exp exp2 expm1 log log2 log10 log1p erf erfc "
    "sin cos tan sinh cosh atan"
)
INTO: dict[Function, Function] = {
    getattr(functional, name): overloads.out
    for name in ("gelu", "silu", "mish", "softplus", "sigmoid", "tanh")
    if (overloads := getattr(torch.ops.aten, name, None)) and "out" in overloads.overloads()
}  # fmt: skip
"""Of pointwise functions, those that write into memory that is given: joining what each row made costs a third more."""
KEPT = {"approximate"}  # what these are told beside the row
BASES = _named("__rpow__")
POWERS = _named("pow float_power __pow__ __ipow__") | BASES
EXACT_POWERS = (1, 2, 3, 0.5, -0.5, -1, -2)
"""Exponents for which a power is products, quotients and square roots: these round alike everywhere."""
PRODUCTS = _named("linear matmul mm __matmul__")
UNWRITTEN = _named("empty empty_like empty_strided new_empty")  # what makes memory that holds anything
FEW, FEW_NARROW = 16, 64  # for fewer vectors, of 32 bits and of 16, a product may pick a kernel by the number of rows
MATRIX = 2  # dimensions of what is for all rows


class BatchInvariantOps(TorchFunctionMode):
    """Runs what would make rows depend on each other one row at a time, in a forward of so many rows.

    Of each row, some modules make so many `parts`, which lie behind each other.
    """

    def __init__(self, rows: int, parts: int = 1) -> None:
        super().__init__()
        self._rows, self._lengths = rows, (rows, rows * parts)

    @override
    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        given = args[0] if args else None
        if not isinstance(given, Tensor) or given.dim() < 2 or given.shape[0] not in self._lengths:
            return func(*args, **kwargs)
        row = given[: given.shape[0] // self._rows]
        if func is functional.linear and row.is_contiguous():
            args = (given := given.contiguous(), *args[1:])
        if "out" in kwargs or not self._depends(func, given, args):
            return func(*args, **kwargs)
        if (into := INTO.get(func)) and given.is_contiguous() and not args[1:] and kwargs.keys() <= KEPT:
            whole = torch.empty_like(given)
            for own, place in zip(given.chunk(self._rows), whole.chunk(self._rows), strict=True):
                into(own, **kwargs, out=place)
            return whole
        made = [func(own, *args[1:], **kwargs) for own in given.chunk(self._rows)]
        is_in_place = made[0].data_ptr() == given.data_ptr()
        return given if is_in_place else torch.cat(made)

    def _depends(self, func: Function, given: Tensor, args: Sequence[Any]) -> bool:
        """Whether what this makes of a row may depend on the other rows."""
        if func in PRODUCTS:
            vectors = given.numel() // (self._rows * given.shape[-1])
            few = FEW if given.dtype == torch.float32 else FEW_NARROW
            return vectors < few and all(other.dim() <= MATRIX for other in args[1:2])
        if func in POWERS:
            return isinstance(args[1], int | float) and (func in BASES or args[1] not in EXACT_POWERS)
        return func in POINTWISE or func in CONVOLUTIONS or func in NORMS


def one_by_one(rows: int, parts: int = 1) -> AbstractContextManager[object]:
    """A context in which a forward of so many rows gives each the bytes that it has alone, as far as it can."""
    return BatchInvariantOps(rows, parts) if rows > 1 else nullcontext()


class _Trace(TorchFunctionMode):
    """Notes every function of a forward, with a digest of each row of what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[str]]] = []

    @override
    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        tensor = made[0] if isinstance(made, tuple) and made else made
        if isinstance(tensor, Tensor) and tensor.dim() and func not in UNWRITTEN:
            self.made.append((str(resolve_name(func)), [_digest(row) for row in tensor]))
        return made


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()
    digest: str = xxhash.xxh3_64_hexdigest(data.data)
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest}"


def first_difference(alone: Callable[[], object], together: Callable[[], object]) -> str:
    """The first function that makes something of a row alone that it makes of no row together.

    Both callables make a forward; "" if no function is seen to. What the forward together does besides is passed over.
    """
    with _Trace() as apart:
        alone()
    with _Trace() as joint:
        together()
    found: dict[str, set[str]] = defaultdict(set)
    for name, rows in joint.made:
        found[name].update(rows)
    return next((name for name, rows in apart.made if not found[name].issuperset(rows)), "")
