"""Tensors that record from which entries of a file they were computed.

A library that converts a file's tensors may silently drop an entry. Given traced tensors, its results show which
entries it used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from typing_extensions import override

READING = frozenset({"item", "tolist", "__float__", "__int__"})
"""Methods that return a plain number, whose further use cannot be traced."""

SHAPED_ONLY = frozenset({"zeros_like", "ones_like", "empty_like", "full_like"})
"""Functions that use only the shape of a tensor, not its values."""


class TracedTensor(torch.Tensor):
    """A tensor with the names of all entries from which it was computed."""

    sources: frozenset[str] = frozenset()
    read: set[str] | None = None
    """Names of the entries that were read as plain numbers, shared by all tensors of a file."""

    @override
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        name = getattr(func, "__name__", "")
        inputs = [tensor for tensor in _flat((args, (kwargs or {}).values())) if isinstance(tensor, TracedTensor)]
        sources = frozenset[str]().union(*(tensor.sources for tensor in inputs))

        if name in READING:
            for tensor in inputs:
                if tensor.read is not None:
                    tensor.read.update(tensor.sources)
        if name == "__setitem__" and isinstance(args[0], TracedTensor):
            args[0].sources = sources
        if name not in SHAPED_ONLY:
            for output in _flat(result):
                if isinstance(output, TracedTensor):
                    output.sources = output.sources | sources
                    output.read = next((tensor.read for tensor in inputs if tensor.read is not None), None)
        return result


def traced(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return traced views of these tensors, and a set of entry names.

    The set collects the names of those that are read as plain numbers.
    """
    traced_tensors: dict[str, torch.Tensor] = {}
    read = set[str]()
    for name, tensor in tensors.items():
        traced_tensor = tensor.as_subclass(TracedTensor)
        traced_tensor.sources, traced_tensor.read = frozenset({name}), read
        traced_tensors[name] = traced_tensor
    return traced_tensors, read


def sources_of(values: object) -> set[str]:
    """Return the names of all entries from which the tensors among these values were computed."""
    return {name for tensor in _flat(values) if isinstance(tensor, TracedTensor) for name in tensor.sources}


def _flat(values: object) -> Iterator[object]:
    if isinstance(values, Mapping):
        values = values.values()
    if isinstance(values, torch.Tensor | str | bytes) or not isinstance(values, Iterable):
        yield values
        return
    for value in values:
        yield from _flat(value)
