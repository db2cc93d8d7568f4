"""Checks of an adapter's file by names, shapes and values: every entry that would have no effect is refused.

The checks of the header need neither torch nor a model, so the gateway runs them before a request is queued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

HALVES = (("lora_A", "lora_B"), ("lora_down", "lora_up"), (".down.", ".up."))
"""Parts of the names of the two halves of a low-rank pair, down and up, in the order in which they are tried."""

BEYOND = {
    "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", ".hada_": "LoHa", ".lokr_": "LoKr", ".oft_": "OFT",
    ".lora_mid": "a pair with a third matrix", ".diff_m": "a difference of modulation",
    ".diff_b": "a difference of a bias", ".diff": "a whole difference of weights",
}  # fmt: skip
"""Kinds of other entries than low-rank pairs, by a part of their names."""

NOWHERE = ("dora_scale", ".hada_", ".oft_", ".lora_mid")
"""Parts of the names of entries that are not supported for any model."""

ONLY = "only low-rank pairs (LoRA) with their alphas are applied"
REMEDY = "save it without that, or merge it into the model's weights"


class TensorEntry(NamedTuple):
    """An entry of a safetensors file: the file's name for its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def entries(file: Path) -> dict[str, TensorEntry]:
    """Return the entries of a safetensors file by name. Raises SafetensorError and OSError."""
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        return {name: TensorEntry(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}


def refusal(found: Mapping[str, TensorEntry]) -> str:
    """Return why a file with these entries cannot be used with any model, as the end of a sentence; else ""."""
    if not found:
        return "is empty"
    for name, entry in found.items():
        if any(part in name for part in NOWHERE):
            return unapplied(name)
        if not name.endswith("alpha") and (reason := _codes(name, entry.dtype)):
            return reason
    for name, entry in found.items():
        other, is_down = other_half(name)
        if not other:
            continue
        if other not in found:
            return f"holds {name} without {other}, the other half of the low-rank pair: save it again with both"
        pair = (entry.shape, found[other].shape)
        down, up = pair if is_down else pair[::-1]
        if len(down) > 1 and len(up) > 1 and down[0] != up[1]:
            return f"holds {name} and {other} of different ranks ({down[0]} and {up[1]}): save it again"
    return ""


def other_half(name: str) -> tuple[str, bool]:
    """Return the name of the pair's other half, and whether `name` is the down half; "" for other entries."""
    for down, up in HALVES if "lora" in name else ():
        for own, other in ((down, up), (up, down)):
            before, found, after = name.rpartition(own)
            if found and after in ("weight", ".weight", ".default.weight"):
                return f"{before}{other}{after}", own == down
    return "", False


def unapplied(name: str) -> str:
    """Return the end of a sentence that refuses an entry without effect."""
    kind = next((kind for part, kind in BEYOND.items() if part in name), "")
    shown = f"{name} ({kind})" if kind else name
    return f"holds {shown}, which is not applied to this model: {ONLY}; {REMEDY}"


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the end of a sentence about the first entry with NaN or infinite numbers; "" if there is none."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            kind = "NaN" if bool(tensor.isnan().any()) else "infinite numbers"
            return f"holds {kind} in {name}: it was damaged in training or saving; download or save it again"
    return ""


def left_out(tensors: Mapping[str, Tensor], used: set[str]) -> str:
    """Return the first entry that is not in `used` and would have an effect; "" if there is none.

    A difference of zeros, a pair whose up half is zero, and an alpha equal to the rank have no effect.
    """
    without = set(_zeros(tensors))
    return next((name for name in tensors if name not in used and not _is_without_effect(name, tensors, without)), "")


def _zeros(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        other, is_down = other_half(name)
        adds = name.endswith((".diff", ".diff_b")) or bool(other) and not is_down
        if adds and not bool(tensor.any()):
            yield name


def _is_without_effect(name: str, tensors: Mapping[str, Tensor], zeros: set[str]) -> bool:
    if name in zeros or other_half(name)[0] in zeros:
        return True
    if not name.endswith(".alpha") or tensors[name].numel() != 1:
        return False
    path = name.removesuffix("alpha")
    halves = {one: other_half(one) for one in tensors if one.startswith(path)}
    ranks = {tensors[one].shape[0] for one, (_, is_down) in halves.items() if is_down}
    is_zero = any(one in zeros for one, (other, is_down) in halves.items() if other and not is_down)
    return is_zero or ranks == {float(tensors[name])}


def _codes(name: str, dtype: str) -> str:
    """Return the end of a sentence that refuses a quantised entry; "" for floats of at least 16 bits."""
    if dtype.startswith(("I", "U", "B")) and dtype != "BF16":
        return f"holds {name} as integers ({dtype}): quantised adapters are not supported; save it in 16 bits"
    if dtype.startswith(("F8", "F6", "F4")):
        return f"holds {name} in floats of fewer than 16 bits ({dtype}), which are not supported; save it in 16 bits"
    return ""


def fitted(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tensors, with a zero bias added to each pair without one, if any pair has a bias.

    peft gives either all layers of an adapter a bias or none, and does not initialize a bias that the file lacks.
    """
    found = dict(tensors)
    if any(name.endswith("lora_B.bias") for name in tensors):
        for name, tensor in tensors.items():
            if name.endswith("lora_B.weight"):
                found.setdefault(f"{name.removesuffix('weight')}bias", tensor.new_zeros(tensor.shape[0]))
    return found
