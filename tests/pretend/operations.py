"""Every aten operation on pretended devices: it computes on the CPU, and is refused where CUDA refuses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend.memory import has_storage, is_pretended, tensors_in

if TYPE_CHECKING:
    from tests.pretend.gpus import PretendedGpus

#: They may have tensors on several devices, or change none.
ANY_DEVICE = ("copy_", "_to_copy", "set_", "set_data", "lift_fresh", "_pin_memory", "detach", "alias")

REPEAT = "repeat_interleave"

#: The size of their result depends on values, so the host waits for these.
SIZED_BY_VALUES = (
    "nonzero",
    "argwhere",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    REPEAT,
)

#: The host reads whether they have worked.
CHECKED = ("_linalg_check_errors", "_linalg_solve_ex", "linalg_inv_ex")

#: CUDA takes their indices from the host too, and copies them.
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")

#: CUDA's attention returns its log-sum-exp for a multiple of this many queries.
PADDED_QUERIES = 32

#: They start no kernel, nor do views.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")


class DeviceOperations(TorchDispatchMode):
    """Checks that the tensors of an operation are on one device, and places its results there."""

    def __init__(self, gpus: PretendedGpus) -> None:
        super().__init__()
        self._gpus, self._memory, self._records = gpus, gpus.memory, gpus.records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._gpus.is_bypassed:
            return func(*args, **kwargs)
        tensors = [*tensors_in(args, kwargs)]
        devices = [self._memory.device_of(tensor) for tensor in tensors]
        if not tensors and (device := self._gpus.device_of_call) is not None:
            return self._created(func(*args, **kwargs), device)
        pretended = [device for device in devices if is_pretended(device)]
        if not pretended:
            return func(*args, **kwargs)

        self._gpus.faults.check()
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            return self._copy(func, args, kwargs, devices)
        if name not in ANY_DEVICE:
            self._check(name, func, args, [*zip(tensors, devices, strict=True)])
        self._record(name, func, args, kwargs)
        device = pretended[0]
        return self._placed(_on_the_cpu(name, func, args, kwargs), tensors, device)

    def _created(self, result: Any, device: torch.device) -> Any:
        """A new tensor of a function that runs for this device."""
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and is_pretended(device):
            self._memory.place(result, device)
        return result

    def _copy(self, func: Any, args: Any, kwargs: Mapping[str, Any], devices: Sequence[torch.device]) -> Any:
        target, source = devices[0], devices[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if source != target:
            self._gpus.record_copy(args[1], source, target, bool(non_blocking), "copy_")
        if not self._records.is_paused:
            self._records.operations["copy_"] += 1
        with self._gpus.bypass():
            return func(*args, **kwargs)

    def _check(self, name: str, func: Any, args: Any, placed: Sequence[tuple[torch.Tensor, torch.device]]) -> None:
        """Raise what CUDA raises for tensors on several devices. Numbers and indices may be on the host."""
        free = {id(tensor) for tensor in tensors_in(args[1])} if name in INDEXED and len(args) > 1 else set[int]()
        written = {id(arg) for arg, formal in zip(args, func._schema.arguments, strict=False) if formal.is_write}
        on_host = [
            tensor
            for tensor, device in placed
            if not is_pretended(device) and id(tensor) not in free and (tensor.dim() > 0 or id(tensor) in written)
        ]
        if on_host or len({device for _, device in placed if is_pretended(device)}) > 1:
            found = sorted({str(device) for _, device in placed})
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor, _ in placed)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(found)}! (pretended, in {name} of shapes {shapes})"
            )

    def _record(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self._records.is_paused:
            return
        if launches(func):
            self._records.operations[name] += 1
        if name == "_local_scalar_dense":
            self._records.wait("read", "item")
        elif name in CHECKED:
            self._records.wait("read", name)
        elif name in SIZED_BY_VALUES:
            has_size = name == REPEAT and (len(args) > 1 or kwargs.get("output_size") is not None)
            if not has_size:
                self._records.wait("size", name)
        elif name in INDEXED and len(args) > 1:
            for index in tensors_in(args[1]):
                self._record_index(name, index, args)

    def _record_index(self, name: str, index: torch.Tensor, args: Any) -> None:
        is_mask = index.dtype in (torch.bool, torch.uint8)
        fills = name.startswith(("index_put", "_index_put")) and args[2].numel() == 1  # a masked fill
        if not is_pretended(self._memory.device_of(index)):
            self._records.wait("index", name)
        elif is_mask and not fills:
            self._records.wait("size", f"{name} by a mask")

    def _placed(self, result: Any, tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
        """The results of an operation, with new ones on its device."""
        for tensor in tensors_in(result):
            if tensor.device.type == "cpu" and has_storage(tensor) and not self._is_one_of(tensor, tensors):
                self._memory.place(tensor, device)
        return result

    def _is_one_of(self, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor is a view of another, which has a place already."""
        storage = tensor.untyped_storage()._cdata
        return any(has_storage(other) and other.untyped_storage()._cdata == storage for other in others)


@cache
def launches(func: Any) -> bool:
    """Whether an aten operation starts a kernel: one that is neither a view nor an allocation."""
    views = [one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns]
    return not any(views) and func._schema.name.removeprefix("aten::") not in (*ALLOCATIONS, "_local_scalar_dense")


def _on_the_cpu(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation, also of those that CUDA alone has."""
    if name == "histc" and not args[0].dtype.is_floating_point:
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if name == "_scaled_dot_product_efficient_attention":
        return _efficient_attention(*args, **kwargs)
    return func(*args, **kwargs)


def _efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    computes_log_sum_exp: bool,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """What CUDA's kernel returns: the attention, the log-sum-exp with padded queries, and the state of its dropout."""
    attended, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=bias, scale=scale
    )
    assert computes_log_sum_exp
    padded = torch.nn.functional.pad(log_sum_exp, (0, -log_sum_exp.shape[-1] % PADDED_QUERIES), value=float("inf"))
    return attended, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
