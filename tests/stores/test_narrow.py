"""32-bit floats in 16 bits on their way: rounded to the nearest, read as 32 again, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from msgspec.structs import replace

from unfuse.core.errors import ObjectLost
from unfuse.stores.tensor_store import TensorStore

STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Half the distance of two neighbours in 16 bits, relative to a normal number between them."""

floats = hnp.arrays("float32", hnp.array_shapes(max_dims=3, max_side=9), elements=st.floats(-60000, 60000, width=32))


def through(store: TensorStore, tensors: dict[str, Any], encoding: str, as_torch: bool) -> tuple[dict[str, Any], int]:
    ref = store.put(tensors, request="r", stage="s", attempt=1, encoding=encoding)
    with store.get(ref, as_torch=as_torch) as held:
        copies = {
            name: None if held[name] is None else held[name].copy() if not as_torch else held[name].clone()
            for name in held
        }
    return copies, ref.nbytes


@pytest.mark.parametrize("encoding", ["bf16", "fp16"])
@given(array=floats)
def test_float32_is_rounded_to_the_nearest_16_bit_value(encoding: str, array: np.ndarray) -> None:
    """The oracle is the format's definition: a relative step for normal numbers, an absolute one below."""
    with TensorStore.create("memory", capacity=1 << 20) as store:
        got, _ = through(store, {"x": torch.from_numpy(array)}, encoding, as_torch=True)
    assert got["x"].dtype == torch.float32
    error = (got["x"].double().numpy() - array.astype(float)).__abs__()
    assert (error <= np.maximum(np.abs(array.astype(float)) * STEP[encoding], 2.0**-25)).all()


def test_bf16_encoding_halves_float32_and_skips_other_dtypes() -> None:
    tensors = {
        "wide": torch.randn(64, 64),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.arange(5),
        "none": None,
    }
    with TensorStore.create("memory", capacity=1 << 20) as store:
        whole, wide = through(store, tensors, "none", as_torch=True)
        got, narrow = through(store, tensors, "bf16", as_torch=True)
    assert torch.equal(whole["wide"], tensors["wide"])
    assert wide - narrow == 64 * 64 * 2
    assert torch.equal(got["half"], tensors["half"]) and torch.equal(got["count"], tensors["count"])
    assert got["none"] is None


def test_numpy_decodes_16_bit_encoded_tensors() -> None:
    tensor = torch.randn(7, 5)
    with TensorStore.create("memory", capacity=1 << 20) as store:
        got, _ = through(store, {"x": tensor}, "bf16", as_torch=False)
        fp16, _ = through(store, {"x": tensor.numpy()}, "fp16", as_torch=False)
    assert np.array_equal(got["x"], tensor.bfloat16().float().numpy())
    assert np.array_equal(fp16["x"], tensor.numpy().astype(np.float16).astype(np.float32))


def test_values_beyond_float16_range_are_stored_unencoded() -> None:
    for value in (torch.tensor([1.0, 1e6]), np.array([1.0, 1e6], np.float32)):
        with TensorStore.create("memory", capacity=1 << 20) as store:
            got, _ = through(store, {"x": value}, "fp16", as_torch=False)
        assert got["x"].tolist() == [1.0, 1e6]


def test_infinities_and_nan_survive_fp16_encoding() -> None:
    with TensorStore.create("memory", capacity=1 << 20) as store:
        got, _ = through(
            store, {"x": torch.tensor([float("inf"), float("-inf"), float("nan")])}, "fp16", as_torch=False
        )
    assert np.array_equal(got["x"], [np.inf, -np.inf, np.nan], equal_nan=True)


def test_bf16_encoding_of_numpy_arrays_raises_type_error() -> None:
    with TensorStore.create("memory", capacity=1 << 20) as store, pytest.raises(TypeError, match="as fp16"):
        store.put({"x": np.ones(2, np.float32)}, request="r", stage="s", attempt=1, encoding="bf16")


def test_inconsistent_16_bit_ref_raises_object_lost() -> None:
    with TensorStore.create("memory", capacity=1 << 20) as store:
        ref = store.put({"x": torch.ones(4, dtype=torch.int64)}, request="r", stage="s", attempt=1)
        for wide in ("float32", "object"):
            with pytest.raises(ObjectLost, match="is inconsistent"):
                store.get(replace(ref, tensors=(replace(ref.tensors[0], is_wide=wide),)))
