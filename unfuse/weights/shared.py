"""Components that the ranks of a worker have together in host memory, as the first one has made them of files."""

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

WEIGHTS = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}
"""Where libraries look for weights first."""

BESIDE = (CONFIG, "generation_config.json")


def held(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights and buffers that are here: of those that are spread over ranks, what this one keeps."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def moved(model: Any, device: torch.device) -> Any:
    """The model with these on the device; tensors that have parts move by torch's own way."""
    tensors = held(model)
    if any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors):
        return model.to(device)
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    return model


def load_together(
    group: Group, folder: ModelFolder, component: str, library: str, load: Callable[[Path | None], Any], pin: bool
) -> Any:
    """What `load` makes of a component's files for the first of these ranks, mapped by all of them.

    It is given a folder with what the first one has made, None for the component's own. Where a GPU reads weights from
    host memory, `pin` keeps them there. What lies for the most part in files as it is used, each loads for itself.
    """
    from unfuse.parallel import weights

    def taken() -> dict[str, torch.Tensor]:
        model = load(None)
        found = dict(model.state_dict()) if pin or _is_made(model, folder.tensors(component)) else {}
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.new_empty(0)  # so that only `found` has what it had
        return found

    with weights.together(group, taken) as file:
        if not file:
            return load(None)
        with _beside(file, folder, component, library, group.folder) as made:
            model = load(made)
        if pin:
            keep_in(model, Path(file))
        else:
            weights.align(model, file)
        return model


def _is_made(model: torch.nn.Module, stored: Mapping[str, tuple[str, int]]) -> bool:
    """Whether files have less than half of a model's numbers in their dtypes, or experts that were joined."""
    if has_single_experts(stored):
        return True
    had, has = Counter[str](), Counter[str]()
    for kind, elements in stored.values():
        had[kind] += elements
    for tensor in model.parameters():
        has[STORED.get(str(tensor.dtype).removeprefix("torch."), "")] += tensor.numel()
    return 2 * (has - had).total() > has.total()


@contextmanager
def _beside(file: str, folder: ModelFolder, component: str, library: str, within: Path) -> Iterator[Path]:
    """A folder, for the block, with a component's configuration and weights that are in that file."""
    made = within / f".weights.{secrets.token_hex(8)}"
    made.mkdir(mode=0o700)
    try:
        for name in BESIDE:
            if (source := (folder.path / folder.at(component) / name).absolute()).exists():
                (made / name).symlink_to(source)
        (made / WEIGHTS[library]).symlink_to(file)
        yield made
    finally:
        shutil.rmtree(made)


def keep_in(model: torch.nn.Module, file: Path) -> None:
    """Have a model's weights be the pages of that file, not a copy; pinned, so that each GPU reads those of all ranks.

    What is pinned so, torch does not copy to pin it.
    """
    import torch

    tensors = header(file)
    with file.open("r+b") as opened:
        memory = torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)
    start = memory.nbytes - max(one["data_offsets"][1] for one in tensors.values())
    own = model.state_dict(keep_vars=True)
    for name, one in tensors.items():
        begin, end = (start + at for at in one["data_offsets"])
        own[name].data = memory[begin:end].view(own[name].dtype).view(own[name].shape)
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]


class MappedTensors:
    """Where the memory of these tensors is, which lie in a file of all ranks."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places = {_place(tensor) for tensor in tensors}
        self._bytes = sum(tensor.nbytes for tensor in tensors)

    def leave(self, tensors: Sequence[torch.Tensor]) -> None:
        """If a rank keeps but a part of them, these, copy it, so that the file goes with what nobody keeps."""
        if sum(tensor.nbytes for tensor in tensors) < self._bytes:
            for tensor in tensors:
                if _place(tensor) in self._places:
                    tensor.data = tensor.data.clone()


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
