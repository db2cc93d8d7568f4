"""Components of diffusers that are one file as another tool has saved it: by the names of a model's makers, or GGUF."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfuse.models.gguf import GGUF

if TYPE_CHECKING:
    import torch

PARTS = "diffusion_pytorch_model*", "*model.*.safetensors", "model-0*", "adapter_model*", "pytorch_lora_weights*"
"""What files are called that libraries save beside others: one of them alone is not all of a component."""


def single_of(files: Collection[str], *usual: str) -> str:
    """The one of a component's files that has all its weights; "" if there are several, or one of the usual names."""
    if not set(usual).isdisjoint(files):
        return ""
    whole = [name for name in files if not any(fnmatchcase(name, pattern) for pattern in PARTS)]
    found = [name for name in whole if Path(name).suffix in (GGUF, ".safetensors")]
    return found[0] if len(found) == 1 else ""


def load_single(kind: Any, file: Path, dtype: torch.dtype) -> tuple[Any, dict[str, list[str]]]:
    """What diffusers makes of such a file and of the configuration beside it, and what the file lacks.

    Raises ValueError where diffusers reads no such file for that class, or the file is of another one, and what its
    loading raises.
    """
    from diffusers import GGUFQuantizationConfig

    if not hasattr(kind, "from_single_file"):
        raise ValueError(f"{file.name} is not in diffusers' layout, and diffusers reads no other one for this class")
    how = {"quantization_config": GGUFQuantizationConfig(compute_dtype=dtype)} if file.suffix == GGUF else {}
    given = {"config": str(file.parent), "torch_dtype": dtype, "local_files_only": True, **how}
    try:
        model = kind.from_single_file(str(file), **given)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        told = f"{file.name} is of another model, or saved by a tool that diffusers does not know"
        raise ValueError(f"{told} ({error!r}): give one of a {kind.__name__}") from error
    return model, {"missing_keys": [key for key, tensor in model.state_dict().items() if tensor.is_meta]}
