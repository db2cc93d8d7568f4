"""`--attention`: the attention kernels of denoisers, by the names of diffusers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import msgspec
import structlog

from unfuse.core.compute_options import NATIVE_ATTENTION, ParallelDegrees
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.plan import StageSpec
from unfuse.stages.specs import DENOISE, UNDIVIDED

log = structlog.get_logger(__name__)

#: How the names of those end that download their kernels when a model is loaded.
DOWNLOADED = "_hub"


class AttentionBackend(msgspec.Struct, frozen=True):
    """What an attention backend of diffusers needs."""

    #: The package that has its kernels, as pip names it; "" for torch.
    package: str = ""
    #: The module of that package.
    module: str = ""
    #: The types of devices that it computes on.
    devices: tuple[str, ...] = ("cuda",)
    #: Whether queries, keys and values must be float16 or bfloat16.
    is_half: bool = True
    #: Whether it can leave out tokens, as models need that pad their prompts.
    has_masks: bool = False


_FLASH_3 = AttentionBackend("flash-attn-3", "flash_attn_interface")
_SAGE = AttentionBackend("sageattention", "sageattention")

#: By name, the attention backends that a model's denoiser can use.
BACKENDS: Mapping[str, AttentionBackend] = {
    NATIVE_ATTENTION: AttentionBackend(devices=(), is_half=False, has_masks=True),
    "_native_cudnn": AttentionBackend(has_masks=True),
    "_native_efficient": AttentionBackend(is_half=False, has_masks=True),
    "_native_flash": AttentionBackend(devices=("cuda", "cpu")),
    "_native_math": AttentionBackend(devices=(), is_half=False, has_masks=True),
    "flex": AttentionBackend(is_half=False, has_masks=True),
    "flash": AttentionBackend("flash-attn", "flash_attn"),
    "flash_varlen": AttentionBackend("flash-attn", "flash_attn", has_masks=True),
    "_flash_3": _FLASH_3,
    "_flash_varlen_3": msgspec.structs.replace(_FLASH_3, has_masks=True),
    "sage": _SAGE,
    "sage_varlen": _SAGE,
    "_sage_qk_int8_pv_fp8_cuda": _SAGE,
    "_sage_qk_int8_pv_fp8_cuda_sm90": _SAGE,
    "_sage_qk_int8_pv_fp16_cuda": _SAGE,
    "_sage_qk_int8_pv_fp16_triton": _SAGE,
    "xformers": AttentionBackend("xformers", "xformers", is_half=False, has_masks=True),
}

#: The kinds of parallelism that replace attention by their own.
OWN_ATTENTION = ("ring", "ulysses")


def check_attention(
    name: str, stages: Iterable[StageSpec], spreads: Mapping[str, ParallelDegrees] | None = None
) -> None:
    """Raise UsageError or ConfigError if the denoisers of these stages cannot use this attention backend.

    `spreads`: the parallelism of each role.
    """
    if name.endswith(DOWNLOADED):
        raise ConfigError(
            f"--attention {name}: its kernels are downloaded and run when a model is loaded, and unfuse runs no code "
            f"that it downloads: install the kernels as a package, and use {name.removesuffix(DOWNLOADED)}"
        )
    if name not in BACKENDS:
        raise UsageError(f"--attention {name}: unknown backend; known are {', '.join(BACKENDS)}")
    if name == NATIVE_ATTENTION:
        return
    denoisers = [stage for stage in stages if stage.kind in (DENOISE.kind, UNDIVIDED.kind)]
    if not denoisers:
        raise ConfigError(f"--attention {name}: it is for denoisers, and no model here has one: leave it out")
    for stage in denoisers:
        spread = (spreads or {}).get(stage.role, ParallelDegrees())
        if replaced_by := sorted(spread.degrees.keys() & {*OWN_ATTENTION}):
            raise ConfigError(
                f"--attention {name} cannot be combined with --parallel {stage.role}={replaced_by[0]}, which has "
                "attention of its own: leave one of them out"
            )


def check_masks(name: str, masks: Collection[str]) -> None:
    """Raise ConfigError if a denoiser with these masks cannot use this attention backend."""
    if masks and not BACKENDS[name].has_masks:
        raise ConfigError(
            f"--attention {name} cannot leave out the padding of prompts, as this model must: use one of "
            + ", ".join(other for other, needs in BACKENDS.items() if needs.has_masks)
        )


def set_attention(model: Any, name: str, component: str, device_type: str) -> None:
    """Make a diffusers model compute its attention with this backend.

    Other models, such as text encoders and VAEs, keep their own. Raises ConfigError if the model cannot use it.

    `device_type`: where the model computes.
    """
    if not hasattr(model, "set_attention_backend") or hasattr(model, "decode"):
        return
    if name != NATIVE_ATTENTION:
        _check_model(model, name, component, device_type)
    from diffusers.utils import logging

    logger = logging.get_logger("diffusers.models.modeling_utils")
    verbosity = logger.level
    logger.setLevel("ERROR")  # it warns at each call that the interface may change
    try:
        # Also the default, which an environment variable of diffusers could change otherwise.
        model.set_attention_backend(name)
    except RuntimeError as error:
        raise ConfigError(f"--attention {name} cannot be used here: {error}") from error
    finally:
        logger.setLevel(verbosity)
    if name != NATIVE_ATTENTION and device_type != "cpu":
        log.warning("this attention backend was never tried on a GPU", attention=name, component=component)


def _check_model(model: Any, name: str, component: str, device_type: str) -> None:
    """Raise ConfigError if a model cannot use this attention backend."""
    backend, option = BACKENDS[name], f"--attention {name}"
    if not any(hasattr(getattr(module, "processor", None), "_attention_backend") for module in model.modules()):
        raise ConfigError(
            f"{option}: the attention of {component}, a {type(model).__name__}, cannot be chosen: leave the option out"
        )
    if backend.devices and device_type not in backend.devices:
        raise ConfigError(
            f"{option} does not compute on {device_type}, where {component} is: use another device, or one of "
            + ", ".join(other for other, needs in BACKENDS.items() if not needs.devices or device_type in needs.devices)
        )
    if backend.is_half and device_type != "cpu" and str(model.dtype) == "torch.float32":
        raise ConfigError(
            f"{option} needs 16-bit numbers, and {component} is float32: add --dtype {component}=bfloat16"
        )
    if backend.package and find_spec(backend.module) is None:
        raise ConfigError(f"{option} needs the package {backend.package}: install it beside unfuse, and start again")
