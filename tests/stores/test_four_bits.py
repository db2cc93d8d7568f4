"""Floats in four bits: how far off a number may be, what travels, and what is left as it is."""

from __future__ import annotations

from math import prod
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.stores.test_narrow import through
from unfuse.core.errors import ObjectLost
from unfuse.core.object_ref import ALIGNMENT
from unfuse.stores.tensor_store import TensorStore

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TINY = 7 * 2.0**-24
"""Seven times the smallest float16: where a block's numbers are that small, they may all become 0."""


def packed(value: Any, as_torch: bool) -> Any:
    with TensorStore.create("memory", capacity=1 << 20) as store:
        got, nbytes = through(store, {"x": value}, "int4", as_torch)
    blocks = -(-prod(value.shape) // 32)
    assert nbytes == -(-blocks * 18 // ALIGNMENT) * ALIGNMENT
    return got["x"]


def check_bound(got: np.ndarray, given: np.ndarray, rounding: float) -> None:
    """Each number is off by a fourteenth of the largest of its block at most, and by what its own type rounds."""
    assert got.shape == given.shape
    off, size = np.abs(got.astype(float) - given.astype(float)).ravel(), np.abs(given.astype(float)).ravel()
    for start in range(0, size.size, 32):
        largest = size[start : start + 32].max()
        assert off[start : start + 32].max() <= max(largest / 14, TINY) + largest * rounding


@given(shape=SHAPES, kind=TYPES, exponent=st.integers(-30, 13), seed=st.integers(0, 999))
def test_int4_error_is_at_most_half_a_block_step_in_torch(
    shape: tuple[int, ...], kind: torch.dtype, exponent: int, seed: int
) -> None:
    """Of blocks of most different sizes, in every type that is narrowed."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * 2.0**exponent
    value = torch.from_numpy(np.asarray(numbers * np.linspace(0, 1, numbers.size).reshape(shape))).to(kind)
    got = packed(value, as_torch=True)
    assert got.dtype == kind
    check_bound(got.double().numpy(), value.double().numpy(), torch.finfo(kind).eps)


@given(array=hnp.arrays("float32", SHAPES, elements=st.floats(-400_000, 400_000, width=32)))
def test_int4_error_is_at_most_half_a_block_step_in_numpy(array: np.ndarray) -> None:
    check_bound(packed(array, as_torch=False), array, 2.0**-23)


@given(shape=SHAPES, kind=TYPES, seed=st.integers(0, 999))
def test_numpy_and_torch_decode_int4_to_the_same_bits(shape: tuple[int, ...], kind: torch.dtype, seed: int) -> None:
    value = torch.from_numpy(np.asarray(np.random.default_rng(seed).standard_normal(shape))).to(kind)
    by_torch, by_numpy = packed(value, as_torch=True), packed(value, as_torch=False)
    bits = by_torch.view(torch.int16).numpy() if kind == torch.bfloat16 else by_torch.numpy()
    assert by_numpy.tobytes() == bits.tobytes()


def test_multiples_of_the_block_scale_round_trip_exactly() -> None:
    value = np.array([*range(-7, 8), 0, 0], np.float32) * 0.25
    assert packed(value, as_torch=False).tolist() == value.tolist()


def test_int4_bytes_are_scales_followed_by_packed_nibbles() -> None:
    with TensorStore.create("memory", capacity=1 << 20) as store:
        value = np.array([7, -7, 1] + [0] * 29 + [14, 2], np.float32)
        ref = store.put({"x": value}, request="r", stage="s", attempt=1, encoding="int4")
        stored = bytes(store.open(ref).bytes())[:36]
    first, second = bytes([0 << 4 | 14, 7 << 4 | 8] + [0x77] * 14), bytes([8 << 4 | 14] + [0x77] * 15)
    assert stored == bytes.fromhex("003c 0040") + first + second


def test_largest_16_bit_values_stay_finite_in_int4() -> None:
    for kind in (torch.float16, torch.bfloat16):
        value = torch.full((40,), 65504.0).to(kind)
        assert torch.allclose(packed(value, as_torch=True).float(), value.float(), rtol=2**-7)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 500_000.0])
def test_tensor_with_value_outside_int4_range_is_stored_unencoded(number: float) -> None:
    value = torch.linspace(-1, 1, 99)
    value[50] = number
    with TensorStore.create("memory", capacity=1 << 20) as store:
        got, _ = through(store, {"x": value}, "int4", as_torch=True)
    assert np.array_equal(got["x"], value, equal_nan=True)


def test_tensors_of_other_dtypes_are_stored_unencoded() -> None:
    tensors = {
        "count": torch.arange(100),
        "mask": torch.ones(100, dtype=torch.bool),
        "double": torch.linspace(0, 1, 100, dtype=torch.float64),
        "bytes": np.arange(100, dtype=np.uint8),
        "none": None,
    }
    with TensorStore.create("memory", capacity=1 << 20) as store:
        got, nbytes = through(store, tensors, "int4", as_torch=True)
        plain, same = through(store, tensors, "none", as_torch=True)
    assert got.pop("none") is plain.pop("none") is None
    assert nbytes == same and all(got[name].equal(plain[name]) for name in got)


@pytest.mark.parametrize("change", [{"is_wide": ""}, {"is_wide": "int64"}, {"is_wide": "float64"}, {"shape": (33,)}])
def test_inconsistent_int4_ref_raises_object_lost(change: dict[str, Any]) -> None:
    with TensorStore.create("memory", capacity=1 << 20) as store:
        ref = store.put({"x": torch.ones(32)}, request="r", stage="s", attempt=1, encoding="int4")
        with pytest.raises(ObjectLost, match="is inconsistent"):
            store.get(replace(ref, tensors=(replace(ref.tensors[0], **change),)))
