"""What is known of an adapter's file without a model, and of what a library's conversion left out of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from unfuse.core.errors import UnsupportedRequest
from unfuse.weights.adapters import (
    AdapterFolder,
    TensorEntry,
    entries,
    fitted,
    not_finite,
    other_half,
    refusal,
    unused_entry,
)
from unfuse.weights.traced import sources_of, traced

PAIR = {"a.lora_A.weight": TensorEntry("F32", (2, 8)), "a.lora_B.weight": TensorEntry("BF16", (8, 2))}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("transformer.a.lora_A.weight", "transformer.a.lora_B.weight"),
        ("unet.down_blocks.0.to_q.lora.down.weight", "unet.down_blocks.0.to_q.lora.up.weight"),
        ("lora_unet_up_blocks_0_to_q.lora_up.weight", "lora_unet_up_blocks_0_to_q.lora_down.weight"),
        ("double_blocks.0.processor.qkv_lora1.down.weight", "double_blocks.0.processor.qkv_lora1.up.weight"),
        ("a.processor.to_q_lora.up.weight", "a.processor.to_q_lora.down.weight"),
        ("blocks.0.down.lora_B.weight", "blocks.0.down.lora_A.weight"),
        ("base.a.lora_A.default.weight", "base.a.lora_B.default.weight"),
        ("a.lora_B.bias", ""),
        ("blocks.0.down.lora_magnitude_vector.weight", ""),
        ("a.alpha", ""),
        ("a.down.weight", ""),
    ],
)
def test_other_half_of_a_lora_pair_is_derived_from_its_tensor_name(name: str, other: str) -> None:
    assert other_half(name)[0] == other


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, ""),
        ({"a.alpha": TensorEntry("I64", ())}, ""),
        ({"b.lora_A.weight": TensorEntry("F32", (2, 8))}, "b.lora_A.weight"),
        ({"b.lora_up.weight": TensorEntry("F32", (8, 2))}, "without b.lora_down.weight"),
        ({"a.lora_B.weight": TensorEntry("F32", (8, 3))}, "different ranks (2 and 3)"),
        ({"a.dora_scale": TensorEntry("F32", (8,))}, "a.dora_scale (DoRA)"),
        ({"a.hada_w1_a": TensorEntry("F32", (8, 2))}, "a.hada_w1_a (LoHa)"),
        ({"a.oft_blocks": TensorEntry("F32", (8,))}, "OFT"),
        ({"a.lora_mid.weight": TensorEntry("F32", (2, 2))}, "a.lora_mid.weight"),
        ({"a.lora_A.weight": TensorEntry("I8", (2, 8))}, "a.lora_A.weight as integers (I8)"),
        ({"a.lora_A.weight": TensorEntry("F8_E4M3", (2, 8))}, "a.lora_A.weight in floats of less than 16 bits"),
    ],
)
def test_adapter_header_with_unsupported_tensors_is_rejected(more: dict[str, TensorEntry], says: str) -> None:
    said = refusal({**PAIR, **more})
    assert says in said and bool(said) == bool(says)
    assert refusal({}) == "is empty"


@pytest.mark.row("P47")
def test_request_for_an_unsupported_adapter_is_rejected_before_queueing(tmp_path: Path) -> None:
    save_file({"a.lora_A.weight": np.ones((2, 8), np.float32)}, tmp_path / "half.safetensors")
    (tmp_path / "odd.safetensors").write_bytes(b"no safetensors file: its worker says so")
    loras = AdapterFolder(str(tmp_path))

    assert entries(tmp_path / "half.safetensors") == {"a.lora_A.weight": TensorEntry("F32", (2, 8))}
    for _ in range(2):
        with pytest.raises(UnsupportedRequest, match=r"'half' contains a\.lora_A\.weight without a\.lora_B\.weight"):
            loras.ids_of("half")
    assert loras.ids_of("odd") == loras.id_of("odd")


def test_unused_adapter_tensor_is_reported_only_if_it_has_an_effect() -> None:
    one, none = torch.ones(2, 2), torch.zeros(2, 2)
    pair = {"a.lora_A.weight": one, "a.lora_B.weight": one}
    used = {*pair}

    assert unused_entry(pair, used) == ""
    assert unused_entry({**pair, "a.diff": one}, used) == "a.diff"
    assert unused_entry({**pair, "a.diff": none, "a.diff_b": none}, used) == ""
    assert unused_entry({**pair, "a.diff_m": none}, used) == "a.diff_m"
    assert unused_entry({**pair, "a.alpha": torch.tensor(2.0)}, used) == ""
    assert unused_entry({**pair, "a.alpha": torch.tensor(1.0)}, used) == "a.alpha"
    idle = {"b.lora_down.weight": one, "b.lora_up.weight": none, "b.alpha": torch.tensor(1.0)}
    assert unused_entry({**pair, **idle}, used) == ""


def test_nan_and_infinite_adapter_weights_are_reported_separately() -> None:
    assert not_finite({"a": torch.ones(2), "alpha": torch.tensor(4)}) == ""
    assert "NaN in a" in not_finite({"a": torch.tensor([1.0, torch.nan, torch.inf])})
    assert "infinite numbers in a" in not_finite({"a": torch.tensor([1.0, -torch.inf])})


def test_lora_pair_without_bias_gets_a_zero_bias_if_another_has_one() -> None:
    pair = {"a.lora_B.weight": torch.ones(3, 2), "b.lora_B.weight": torch.ones(3, 2), "b.lora_B.bias": torch.ones(3)}
    assert fitted(pair)["a.lora_B.bias"].tolist() == [0, 0, 0]
    assert fitted(pair)["b.lora_B.bias"].tolist() == [1, 1, 1]
    assert fitted({"a.lora_B.weight": torch.ones(3, 2)}).keys() == {"a.lora_B.weight"}


def test_traced_tensors_track_their_source_entries_through_operations() -> None:
    """Given entries that are scaled, cut, joined, copied and read as numbers, when the results are asked, then each
    names the entries whose values it has, and no others."""
    found, read = traced({name: torch.ones(4, 2) for name in "abcdef"} | {"alpha": torch.tensor(2.0)})
    scaled = found["a"] * (found["alpha"].item() / 2)
    first, second = torch.split(torch.cat([found["b"], found["c"]]), [4, 4])
    blank = torch.zeros_like(found["d"])
    full = torch.zeros_like(found["a"])
    full[:2] = found["e"][:2]

    assert sources_of(scaled) == {"a"} and read == {"alpha"}
    assert sources_of([first, {"more": (second, None)}]) == {"b", "c"}
    assert sources_of(blank) == set() and sources_of(full) == {"e"}
    assert sources_of(torch.ones(1)) == set()
