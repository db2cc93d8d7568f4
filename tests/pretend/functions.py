"""Every function of torch on pretended devices: `.device`, factories, copies between devices, and reads by the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.pretend.memory import is_pretended, tensors_in

if TYPE_CHECKING:
    from tests.pretend.gpus import PretendedGpus

#: The host reads values in these.
READS: dict[Any, str] = {
    Tensor.item: "item",
    Tensor.tolist: "tolist",
    Tensor.__bool__: "bool",
    Tensor.__int__: "int",
    Tensor.__float__: "float",
    Tensor.__index__: "index",
    Tensor.__contains__: "in",
    Tensor.is_nonzero: "is_nonzero",
    torch.is_nonzero: "is_nonzero",
    Tensor.equal: "equal",
    torch.equal: "equal",
    Tensor.allclose: "allclose",
    torch.allclose: "allclose",
}

#: They make a tensor like their first argument, where no device is named.
LIKE_FIRST = (Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor)

#: They copy what they are given from the host.
FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)

Answer = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class DeviceFunctions(TorchFunctionMode):
    """Answers for pretended devices what torch would answer for CUDA's."""

    def __init__(self, gpus: PretendedGpus) -> None:
        super().__init__()
        self._gpus, self._memory, self._records = gpus, gpus.memory, gpus.records
        device_of = self._memory.device_of
        self._answers: dict[Any, Answer] = {
            Tensor.device.__get__: lambda args, kwargs: device_of(args[0]),
            Tensor.is_cuda.__get__: lambda args, kwargs: is_pretended(device_of(args[0])),
            Tensor.is_cpu.__get__: lambda args, kwargs: device_of(args[0]).type == "cpu",
            Tensor.get_device: lambda args, kwargs: -1 if (index := device_of(args[0]).index) is None else index,
            Tensor.is_pinned: lambda args, kwargs: self._memory.is_pinned(args[0]),
            Tensor.pin_memory: lambda args, kwargs: (
                args[0] if self._memory.is_pinned(args[0]) else self._pinned(args[0].clone())
            ),
            Tensor.record_stream: lambda args, kwargs: self._records.call("record_stream"),
            Tensor.to: self._to,
            Tensor.cuda: self._to_cuda,
            Tensor.cpu: self._to_cpu,
            Tensor.numpy: partial(self._on_host_alone, Tensor.numpy),
            Tensor.__array__: partial(self._on_host_alone, Tensor.__array__),
            Tensor.__deepcopy__: self._deep_copy,
        }
        self._answers |= {func: partial(self._read, func) for func in READS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if answer := self._answers.get(func):
            return answer(args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call any other function. Tensors that it makes inside are on the device that it is for."""
        pinned = kwargs.pop("pin_memory", False)
        device = self._gpus.device(kwargs.get("device"))
        if device is None and func in LIKE_FIRST:
            device = self._memory.device_of(args[0])
        if device is not None and is_pretended(device):
            return self._created(func, args, kwargs, device)
        with self._gpus.call_for(device or self._device_among(args, kwargs)):
            result = func(*args, **kwargs)
        return self._pinned(result) if pinned else result

    def _created(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        """Call a function that makes a tensor on a pretended device."""
        self._gpus.faults.check()
        generator = kwargs.get("generator")
        if generator is not None and not is_pretended(generator.device):
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
        data = args[1:2] if func is Tensor.new_tensor else args[:1] or (kwargs.get("data"),)
        if func in FROM_HOST and self._device_among(data, {}) is None:
            self._records.wait("upload", func.__name__)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        with self._gpus.call_for(device):
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or self._memory.device_of(result) == device:
            return result
        return self._memory.place(result.clone() if func in FROM_HOST else result, device)

    def _device_among(self, args: Any, kwargs: Any) -> torch.device | None:
        """The pretended device of the first tensor that is on one."""
        devices = (self._memory.device_of(tensor) for tensor in tensors_in(args, kwargs))
        return next((device for device in devices if is_pretended(device)), None)

    def _pinned(self, tensor: Tensor) -> Tensor:
        self._records.call("pin_memory")
        return self._memory.pin(tensor)

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Read values: one wait of the host, whatever torch does inside."""
        device = self._device_among(args, kwargs)
        if device is None:
            return func(*args, **kwargs)
        self._gpus.faults.check()
        self._records.wait("read", READS[func])
        with self._records.pause(), self._gpus.call_for(device):
            return func(*args, **kwargs)

    def _on_host_alone(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if (device := self._memory.device_of(args[0])) and is_pretended(device):
            raise TypeError(
                f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return func(*args, **kwargs)

    def _deep_copy(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """A copy on the same device: torch copies the storage itself."""
        device, result = self._memory.device_of(args[0]), Tensor.__deepcopy__(*args, **kwargs)
        return self._memory.place(result, device) if is_pretended(device) else result

    def _to_cuda(self, args: Any, kwargs: dict[str, Any]) -> Any:
        device = args[1] if len(args) > 1 else kwargs.pop("device", None)
        return self._to((args[0], "cuda" if device is None else device, *args[2:]), kwargs)

    def _to_cpu(self, args: Any, kwargs: dict[str, Any]) -> Any:
        return self._to((args[0], "cpu"), kwargs)

    def _to(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """`Tensor.to`, in all of its forms."""
        tensor, given, non_blocking, options = self._options_of_to(args, kwargs)
        source = self._memory.device_of(tensor)
        target = self._gpus.device(given) or source
        if not is_pretended(source) and not is_pretended(target):
            return Tensor.to(tensor, target, non_blocking=non_blocking, **options)
        self._gpus.faults.check()
        if target == source:
            with self._gpus.call_for(source):
                return Tensor.to(tensor, **options) if options else tensor
        if target.type == "meta" or source.type == "meta":
            return Tensor.to(tensor, target.type if target.type == "meta" else "cpu", **options)  # the latter raises
        options.pop("copy", None)
        with self._gpus.bypass(), torch._C.DisableTorchFunction():
            result = Tensor.to(tensor, "cpu", copy=True, **options)
        if is_pretended(target):
            self._memory.place(result, target)
        self._gpus.record_copy(tensor, source, target, non_blocking, "to")
        return result

    def _options_of_to(self, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Any, bool, dict[str, Any]]:
        """The tensor, the device that is named, whether the copy need not block, and the other options."""
        tensor, *rest = args
        given = kwargs.pop("device", None)
        other = kwargs.pop("other", None)
        if rest and isinstance(rest[0], Tensor):
            other = rest.pop(0)
        elif rest and not isinstance(rest[0], torch.dtype):
            given = rest.pop(0)
        if other is not None:
            given, kwargs["dtype"] = self._memory.device_of(other), other.dtype
        elif rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            kwargs["dtype"] = rest.pop(0)
        kwargs |= dict(zip(("non_blocking", "copy"), rest, strict=False))
        non_blocking = bool(kwargs.pop("non_blocking", False))
        return tensor, given, non_blocking, {name: value for name, value in kwargs.items() if value is not None}
