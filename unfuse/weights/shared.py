"""Share a component's weights in host memory between the ranks of a worker.

The first rank loads and converts them; all ranks map the result.
"""

from __future__ import annotations

import mmap
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfuse.weights.folder import CONFIG, STORED, ModelFolder, has_single_experts, header

if TYPE_CHECKING:
    import torch

    from unfuse.parallel.group import Group

#: The file in which each library looks for weights first.
WEIGHTS = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}

#: The files that a library reads beside the weights.
CONFIG_FILES = (CONFIG, "generation_config.json")


def resident_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a model's weights and buffers that are on this rank.

    Of tensors that are sharded over ranks, the local shards. Meta tensors are omitted.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def move_to(model: Any, device: torch.device) -> Any:
    """Move a model's weights and buffers to the device, and return the model.

    Only the local tensors move, unless some consist of parts, such as quantized ones, which need torch's own method.
    """
    tensors = resident_tensors(model)
    if any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors):
        return model.to(device)
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    return model


def load_together(
    group: Group, folder: ModelFolder, component: str, library: str, load: Callable[[Path | None], Any], pin: bool
) -> Any:
    """Load a component once for all ranks of a group, which map the result.

    The first rank's `load` reads the component's files and converts them. The other ranks, and then the first, load the
    result from a file in shared memory. If most of the weights are used as they are in the files, each rank loads the
    files itself, since these can be mapped.

    `load`: returns the model, loaded from a folder with converted weights, or from the component's own folder for None.
    `pin`: keep the weights in this memory, pinned, so that a GPU can read them from there.
    """
    from unfuse.parallel import weights

    def load_and_convert() -> dict[str, torch.Tensor]:
        model = load(None)
        tensors = dict(model.state_dict()) if pin or _is_converted(model, folder.tensors(component)) else {}
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.new_empty(0)  # only `tensors` refers to the data now
        return tensors

    with weights.gather_files(group, load_and_convert) as file:
        if not file:
            return load(None)
        with _converted_folder(file, folder, component, library, group.folder) as converted:
            model = load(converted)
        if pin:
            map_from(model, Path(file))
        else:
            weights.align(model, file)
        return model


def _is_converted(model: torch.nn.Module, stored: Mapping[str, tuple[str, int]]) -> bool:
    """Return whether loading converts most weights.

    That is so if the files have less than half of a model's numbers in the dtypes in which it uses them, or if experts
    are joined.
    """
    if has_single_experts(stored):
        return True

    in_files = Counter[str]()  # elements by dtype
    in_model = Counter[str]()
    for dtype, elements in stored.values():
        in_files[dtype] += elements
    for tensor in model.parameters():
        in_model[STORED.get(str(tensor.dtype).removeprefix("torch."), "")] += tensor.numel()
    return 2 * (in_model - in_files).total() > in_model.total()


@contextmanager
def _converted_folder(file: str, folder: ModelFolder, component: str, library: str, within: Path) -> Iterator[Path]:
    """Yield a temporary folder with a component's configuration and the weights in `file`."""
    temporary = within / f".weights.{secrets.token_hex(8)}"
    temporary.mkdir(mode=0o700)
    try:
        for name in CONFIG_FILES:
            if (source := (folder.path / folder.component_path(component) / name).absolute()).exists():
                (temporary / name).symlink_to(source)
        (temporary / WEIGHTS[library]).symlink_to(file)
        yield temporary
    finally:
        shutil.rmtree(temporary)


def map_from(model: torch.nn.Module, file: Path) -> None:
    """Replace a model's weights by the pages of a file in shared memory.

    With CUDA the memory is pinned (registered), so that each rank's GPU can read it. torch's own pinning would copy it.
    """
    import torch

    tensors = header(file)
    with file.open("r+b") as opened:
        memory = torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)

    data_start = memory.nbytes - max(entry["data_offsets"][1] for entry in tensors.values())
    weights = model.state_dict(keep_vars=True)
    for name, entry in tensors.items():
        start, end = (data_start + offset for offset in entry["data_offsets"])
        weights[name].data = memory[start:end].view(weights[name].dtype).view(weights[name].shape)

    if torch.cuda.is_available():
        from unfuse.weights.pinned import register_memory

        register_memory(memory, torch.device("cuda"), type(model).__name__)


class MappedTensors:
    """The tensors that are mapped from a file, which all ranks share."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._addresses = {_storage_address(tensor) for tensor in tensors}
        self._bytes = sum(tensor.nbytes for tensor in tensors)

    def copy_out(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a rank's tensors out of the mapped file if it needs fewer.

        `tensors`: the tensors that the rank uses now. The file's memory is freed once no rank refers to it.
        """
        if sum(tensor.nbytes for tensor in tensors) < self._bytes:
            for tensor in tensors:
                if _storage_address(tensor) in self._addresses:
                    tensor.data = tensor.data.clone()


def _storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()
