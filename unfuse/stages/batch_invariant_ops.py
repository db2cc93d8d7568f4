"""Batch invariance: forwards that requests share without changing each other's bytes, and what breaks it.

On a CPU a row depends on the rest of its batch for three reasons. Products with one row per request, and convolutions,
select another kernel for another batch size. Pointwise functions round differently in the tail of a vector than in its
body, and the position of tails depends on the number of elements and on how threads divide them. A slice that is
contiguous for one request is not contiguous for several, so another code path rounds.

On a CUDA device a row depends on the rest of its batch for products that sum many terms to few outputs, convolutions,
and slices as above. It does not for attention, norms and pointwise functions. Measured on an H100 with torch 2.11, and
not on other devices: docs/reference/performance/gpu.md.

`BatchInvariantOps` runs only these operations one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

Function = Callable[..., Any]


def functions_named(names: str) -> frozenset[Function]:
    """Return torch's functions and tensor methods of these names, with their in-place variants.

    They are found in torch, torch.nn.functional, torch.special and Tensor.
    """
    namespaces = (functional, torch, Tensor, torch.special)
    candidates = (
        getattr(namespace, name + suffix, None)
        for name in names.split()
        for suffix in ("", "_")
        for namespace in namespaces
    )
    return frozenset(function for function in candidates if function is not None)


#: Functions that may depend on the rest of the batch, whatever their arguments.
CONVOLUTIONS = functions_named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
NORMS = functions_named("normalize group_norm instance_norm")
POINTWISE = functions_named(
    "silu gelu mish softplus sigmoid tanh elu selu celu logsigmoid exp exp2 expm1 log log2 log10 log1p erf erfc "
    "sin cos tan sinh cosh atan"
)
#: Variants of pointwise functions that write into given memory. Concatenating the rows' results costs a third more.
IN_PLACE_VARIANTS: dict[Function, Function] = {
    getattr(functional, name): overloads.out
    for name in ("gelu", "silu", "mish", "softplus", "sigmoid", "tanh")
    if (overloads := getattr(torch.ops.aten, name, None)) and "out" in overloads.overloads()
}
#: Keyword arguments of these variants that are passed on.
PASSED_KEYWORDS = {"approximate"}
#: Functions with a constant base, so that the tensor is the exponent.
BASES = functions_named("__rpow__")
#: Functions that compute powers.
POWERS = functions_named("pow float_power __pow__ __ipow__") | BASES
#: Exponents for which a power is computed by products, quotients and square roots, which round the same everywhere.
EXACT_POWERS = (1, 2, 3, 0.5, -0.5, -1, -2)
#: Matrix products.
PRODUCTS = functions_named("linear matmul mm __matmul__")
#: With fewer vectors than this, of 32-bit and of 16-bit elements, a product may select its kernel by their number.
FEW, FEW_NARROW = 16, 64

#: On a CUDA device, a sum of more terms than this in 16-bit elements may be split by a rule that depends on the number
#: of rows, if each row has fewer outputs than so many times the terms. Of 259 products for each number of terms none
#: differed up to 2,560, and from 3,072 on those with at most 192 times as many outputs as terms.
UNSPLIT_TERMS, OUTPUTS_PER_TERM = 2560, 256
#: The same of 32-bit elements with a bias, whatever the terms: the largest product that differed has 2,359,296 outputs.
#: Without a bias, products of every size did.
FEW_OUTPUTS = 5 << 19

#: The most dimensions of an operand that all rows share, such as a weight.
MATRIX = 2


class BatchInvariantOps(TorchFunctionMode):
    """A torch function mode for batch invariance: runs batch-dependent operations row by row.

    `rows`: the number of rows (requests) in the forward.
    `parts`: how many adjacent rows some modules make of each.
    """

    def __init__(self, rows: int, parts: int = 1) -> None:
        super().__init__()
        self._rows = rows
        self._batch_sizes = rows, rows * parts

    @override
    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)

        batch = args[0] if args else None
        if not isinstance(batch, Tensor) or batch.dim() < 2 or batch.shape[0] not in self._batch_sizes:
            return func(*args, **kwargs)

        # A slice may be contiguous for one row and not for several, and then `linear` takes another path.
        first_row = batch[: batch.shape[0] // self._rows]
        if func is functional.linear and first_row.is_contiguous():
            args = (batch := batch.contiguous(), *args[1:])

        if "out" in kwargs or not self._depends(func, batch, args):
            return func(*args, **kwargs)

        if (
            (write_into := IN_PLACE_VARIANTS.get(func))
            and batch.is_contiguous()
            and not args[1:]
            and kwargs.keys() <= PASSED_KEYWORDS
        ):
            output = torch.empty_like(batch)
            for row_input, row_output in zip(batch.chunk(self._rows), output.chunk(self._rows), strict=True):
                write_into(row_input, **kwargs, out=row_output)
            return output

        outputs = [func(row_input, *args[1:], **kwargs) for row_input in batch.chunk(self._rows)]
        # An in-place function has already written its result into the batch, through the views of its rows.
        is_in_place = outputs[0].data_ptr() == batch.data_ptr()
        return batch if is_in_place else torch.cat(outputs)

    def _depends(self, func: Function, batch: Tensor, args: Sequence[Any]) -> bool:
        """Return whether the result for a row may depend on the other rows."""
        rule = RULES.get(batch.device.type, depends_on_cpu)
        return rule(func, self._rows, batch, args)


def depends_on_cpu(func: Function, rows: int, batch: Tensor, args: Sequence[Any]) -> bool:
    """Return whether a row's result on a CPU may depend on other rows."""
    if func in PRODUCTS:
        minimum = FEW if batch.dtype == torch.float32 else FEW_NARROW
        return _vectors_per_row(batch, rows) < minimum and _shares_operand(args)
    if func in POWERS:
        return isinstance(args[1], int | float) and (func in BASES or args[1] not in EXACT_POWERS)
    return func in POINTWISE or func in CONVOLUTIONS or func in NORMS


def depends_on_cuda(func: Function, rows: int, batch: Tensor, args: Sequence[Any]) -> bool:
    """Return whether a row's result on a CUDA device may depend on other rows."""
    if func not in PRODUCTS:
        return func in CONVOLUTIONS
    if not args[1:]:  # the operand is a keyword
        return True
    if not _shares_operand(args):
        return False

    terms = batch.shape[-1]
    outputs = _vectors_per_row(batch, rows) * args[1].numel() // terms
    if batch.element_size() < torch.float32.itemsize:
        return terms > UNSPLIT_TERMS and outputs < OUTPUTS_PER_TERM * terms
    has_bias = len(args) > 2 and args[2] is not None
    return not has_bias or outputs < FEW_OUTPUTS


#: What may depend on the other rows, by type of device. Others have the CPU's rule.
RULES = {"cuda": depends_on_cuda}


def _vectors_per_row(batch: Tensor, rows: int) -> int:
    """Return how many vectors of its last dimension a row of the batch has."""
    return batch.numel() // (rows * batch.shape[-1])


def _shares_operand(args: Sequence[Any]) -> bool:
    """Return whether the other operand of a product is the same for all rows."""
    return all(operand.dim() <= MATRIX for operand in args[1:2])


def one_by_one(rows: int, parts: int = 1) -> AbstractContextManager[object]:
    """Return a context in which rows get the bytes that they get alone (batch invariance).

    Holds for forwards whose batch-dependent operations `BatchInvariantOps` covers.

    `rows`: the number of rows (requests) in the forward.
    `parts`: how many adjacent rows some modules make of each.
    """
    return BatchInvariantOps(rows, parts) if rows > 1 else nullcontext()
