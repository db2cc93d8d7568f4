"""What a forward allocates on torch's meta device: the most bytes that live at one time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, until they are freed.

    `known`: tensors that are not counted, such as the weights.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return outputs

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self._seen.discard(key)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention as a fused kernel allocates it: nothing but its output."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    with mock.patch("torch.nn.functional.scaled_dot_product_attention", attend):
        yield


def peak(model: torch.nn.Module, forward: Callable[[Any], object]) -> int:
    """Return the most bytes that live at one time in a forward, beside the weights."""
    with torch.no_grad(), fused_attention(), LiveBytes([*model.parameters(), *model.buffers()]) as live:
        forward(model)
    return live.peak
