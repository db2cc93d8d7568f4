"""Load components of diffusers from single files of other tools, and check unexpected tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfuse.weights.gguf import GGUF, contents

if TYPE_CHECKING:
    import torch

#: The names of files that are only a part of a component's weights, or an adapter.
PARTIAL_FILES = (
    "diffusion_pytorch_model*",
    "*model.*.safetensors",
    "model-0*",
    "adapter_model*",
    "pytorch_lora_weights*",
)

#: Prefixes of tensor names in a single file that holds several components.
WITHIN = (
    "model.diffusion_model.",
    "model_ema.",
    "first_stage_model.",
    "vae.",
    "cond_stage_model.",
    "conditioner.",
    "text_encoders.",
)

#: A component's prefixes in such a file. "" is the denoiser.
COMPONENT_PREFIXES = {"vae": ("first_stage_model.", "vae."), "": ("model.diffusion_model.",)}

#: Prefixes of the denoiser's class by `general.architecture`, as common tools write it in GGUF files.
BY_ARCHITECTURE = {
    "flux": ("Flux", "Chroma"),
    "sd1": ("UNet",),
    "sdxl": ("UNet",),
    "sd3": ("SD3",),
    "aura": ("AuraFlow",),
    "ltxv": ("LTX",),
    "hyvid": ("Hunyuan",),
    "wan": ("Wan", "SkyReels", "ChronoEdit"),
    "hidream": ("HiDream",),
    "cosmos": ("Cosmos",),
    "lumina2": ("Lumina", "ZImage"),
    "qwen_image": ("QwenImage",),
    **dict.fromkeys(("llama", "qwen2", "qwen2vl", "qwen3", "qwen3vl", "gemma2", "gemma3", "t5", "t5encoder"), ()),
}

#: The same by the name of a tensor that only occurs in the makers' files of these models.
BY_TENSOR = {
    "double_blocks.0.img_attn.norm.key_norm.scale": ("Flux", "Chroma", "Hunyuan"),
    "joint_blocks.0.context_block.adaLN_modulation.1.bias": ("SD3",),
    "patchify_proj.weight": ("LTX",),
    "txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.bias": ("Hunyuan",),
    "head.modulation": ("Wan", "SkyReels", "ChronoEdit"),
    "layers.0.adaLN_modulation.0.weight": ("ZImage", "Lumina"),
    "input_blocks.0.0.weight": ("UNet",),
}


def may_be_class(kind: str, names: Collection[str], architecture: str = "") -> bool:
    """Return whether a file with these tensors may be of this class of denoisers."""
    if "Transformer" not in kind and "UNet" not in kind:
        return True
    plain = {name.removeprefix(COMPONENT_PREFIXES[""][0]) for name in names}
    hints = [prefixes for name, prefixes in BY_TENSOR.items() if name in plain]
    hints += [BY_ARCHITECTURE[architecture]] if architecture in BY_ARCHITECTURE else []
    return not hints or any(kind.startswith(prefixes) for prefixes in hints)


def single_of(files: Collection[str], *usual: str) -> str:
    """Return the only file that may have all weights of a component.

    "" if there are several such files, none, or a file with one of the usual names.
    """
    candidates = [] if not set(usual).isdisjoint(files) else singles_of(files)
    return candidates[0] if len(candidates) == 1 else ""


def singles_of(files: Collection[str]) -> list[str]:
    """Return those of a component's files that may each hold all of its weights, sorted."""
    whole = [name for name in files if not any(fnmatchcase(name, pattern) for pattern in PARTIAL_FILES)]
    return sorted(name for name in whole if Path(name).suffix in (GGUF, ".safetensors"))


def tensor_names(component: str, names: Collection[str]) -> list[str]:
    """Return the names of the tensors that a component is loaded from.

    Tensors of other components in the file may have any dtype, because they are not loaded.
    """
    prefixes = COMPONENT_PREFIXES.get(component, COMPONENT_PREFIXES[""])
    prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), "")
    return [name for name in names if (name.startswith(prefix) if prefix else not _prefix_of(name))]


def load_single(kind: Any, file: Path, dtype: torch.dtype) -> tuple[Any, dict[str, list[str]]]:
    """Return the model that diffusers loads from a single file, and the file's key errors.

    `kind`: the model's class. Its configuration is beside the file.
    The errors are `missing_keys` and `unexpected_keys`.
    Raises ValueError if diffusers has no such loader for the class, or the file is of another one. Errors of the loader
    are raised as well.
    """
    from diffusers import GGUFQuantizationConfig

    if not hasattr(kind, "from_single_file"):
        raise ValueError(f"{file.name} is not in diffusers' layout, the only one that diffusers reads for this class")

    quantization = {"quantization_config": GGUFQuantizationConfig(compute_dtype=dtype)} if file.suffix == GGUF else {}
    options = {"config": str(file.parent), "torch_dtype": dtype, "local_files_only": True, **quantization}
    try:
        model = kind.from_single_file(str(file), **options)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = f"{file.name} is of another model, or has a format that diffusers does not support"
        raise ValueError(f"{reason} ({error!r}): use a file of a {kind.__name__}") from error
    missing = [key for key, tensor in model.state_dict().items() if tensor.is_meta]
    return model, {"missing_keys": missing, "unexpected_keys": _unused(kind, model, file)}


def _unused(kind: Any, model: Any, file: Path) -> list[str]:
    """Return the names of a file's tensors that diffusers drops or the model lacks.

    Diffusers' conversion is run again on tensors without data. Tensors of other components in the file are ignored.
    """
    import torch
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    from unfuse.weights.traced import sources_of, traced

    shapes = _shapes(file)
    model_tensors = model.state_dict()
    ignored = model._keys_to_ignore_on_load_unexpected or ()

    empty, _ = traced({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    if model_tensors.keys() != shapes.keys():
        loaders = (SINGLE_FILE_LOADABLE_CLASSES.get(base.__name__) for base in kind.__mro__)
        convert = next(loader for loader in loaders if loader)["checkpoint_mapping_fn"]
        try:
            empty = convert(config=dict(model.config), checkpoint=empty)
        except (RuntimeError, NotImplementedError):  # the conversion needs tensor values
            return []

    used = sources_of([tensor for name, tensor in empty.items() if name in model_tensors])
    prefixes = {_prefix_of(name) for name in used}
    unused = [name for name in shapes if name not in used and _prefix_of(name) in prefixes]
    return [name for name in unused if not any(re.search(pattern, name) for pattern in ignored)]


def _prefix_of(name: str) -> str:
    """Return the component's prefix of a tensor name; "" if it has none."""
    return next((part for part in WITHIN if name.startswith(part)), "")


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors by name."""
    from safetensors import safe_open

    if file.suffix == GGUF:
        return {name: tensor.shape for name, tensor in contents(file).tensors.items()}
    with safe_open(file, "pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


#: Suffixes of the names of tensors that follow from the configuration, which older versions of libraries saved.
TABLES = (
    r"position_ids",
    r"token_type_ids",
    r"relative_position_index",
    r"num_batches_tracked",
    r"causal_mask",
    r"attn_mask",
    r"masked_bias",
    r"inv_freq",
    r"rotary_emb\.(cos|sin)_cached",
    r"pos_embed",
)

#: Suffixes of the names of tensors that only training, or a distilled variant of the model, uses.
#: Some transformers' `y_embedding` replaced captions in training, and some `norm_final` is never called.
#: Merges with LCM have its `cond_proj`, which only exists with `time_cond_proj_dim` in the configuration.
UNUSED_SUFFIXES = (
    r"y_embedding",
    r"norm_final\.weight",
    r"_extra_state",
    r"time_embed(ding)?\.cond_proj\.weight",
)

#: Prefixes of names, or of their parts, of losses, averages and counters, or of another component.
TRAINING = (
    r"loss\.",
    r"model_ema\.",
    r"logvar\.",
    r"accum_",
    r"repa_projectors\.",
    r"pos_embedder\.",
    r"per_channel_statistics\.",
    r"(video_|audio_)?embeddings_connector",
)

#: The names of tensors that no forward uses.
UNCOMPUTED = re.compile(rf"(^|\.)(({'|'.join((*TABLES, *UNUSED_SUFFIXES))})$|({'|'.join(TRAINING)}))")

#: Names of empty tensors by which other tools mark a variant of a model, with the equivalent configuration field.
MARKERS = {"__index_timestep_zero__": "zero_cond_t"}


def unplaced(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the unexpected tensors that must be refused.

    Published files contain tensors that no forward uses: tables that follow from the configuration, counters and losses
    of training, and layers that were removed later. diffusers and transformers ignore them with a warning.
    Tensors of other modules are accepted: the files of an encoder may contain the whole transformers model, with a
    head, a decoder or a vision tower that the encoder's class does not have.
    """
    unknown = [key for key in unexpected if not UNCOMPUTED.search(key) and not _is_declared(model, key)]
    prefix = getattr(model, "base_model_prefix", None)
    if prefix is None:
        return unknown

    children = {name for name, _ in model.named_children()}
    relative = {key: key if key.partition(".")[0] in children else key.removeprefix(f"{prefix}.") for key in unknown}
    return [key for key, name in relative.items() if name.partition(".")[0] in children]


def _is_declared(model: Any, key: str) -> bool:
    """Return whether a tensor only marks a variant that the model's configuration names too."""
    field = MARKERS.get(key.rpartition(".")[2])
    return bool(field) and bool(getattr(model.config, str(field), False))
