"""Any array of an allowed type comes back equal, whatever its strides."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from unfuse.core.object_ref import DTYPES, TensorMeta, layout_tensors
from unfuse.stores.base import Checksums, checksums_of
from unfuse.stores.tensors import RAW, copy_into, describe, flat_bytes, numpy_over, torch_over

NUMPY_TYPES = sorted(set(DTYPES) - set(RAW))
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
arrays = st.sampled_from(NUMPY_TYPES).flatmap(lambda name: hnp.arrays(name, shapes))


def views(array: np.ndarray, data: st.DataObject) -> np.ndarray:
    """Some view of an array: transposed, stepped, reversed."""
    slices = st.sampled_from([slice(None), slice(None, None, -1), slice(1, None, 2)])
    index = [data.draw(slices) for _ in array.shape]
    return array[(*index, ...)].transpose(data.draw(st.permutations(range(array.ndim))))


def over(memory: np.ndarray, value: object) -> TensorMeta:
    ((meta,), nbytes) = layout_tensors([("x", *describe(value))])  # type: ignore[arg-type]
    assert nbytes <= memory.nbytes
    return meta


@settings(deadline=None)
@given(array=arrays, data=st.data())
def test_numpy_arrays_of_any_strides_round_trip(array: np.ndarray, data: st.DataObject) -> None:
    value, memory = views(array, data), np.full(8192, 255, np.uint8)
    copy_into(memory[: value.nbytes], value)
    back = numpy_over(memory, over(memory, value))
    np.testing.assert_array_equal(back, value, strict=True)


@settings(deadline=None)
@given(array=hnp.arrays("int8", shapes), data=st.data(), name=st.sampled_from(sorted(DTYPES)))
def test_torch_tensors_of_any_strides_round_trip(array: np.ndarray, data: st.DataObject, name: str) -> None:
    tensor = torch.from_numpy(array).to(getattr(torch, name))
    order = data.draw(st.permutations(range(tensor.dim())))
    value, memory = tensor.permute(order), np.full(8192, 255, np.uint8)
    copy_into(memory[: value.nbytes], value)
    back = torch_over(memory, over(memory, value))
    assert back is not None and (back.dtype, back.shape) == (value.dtype, value.shape)
    straight = value.clone(memory_format=torch.contiguous_format)
    assert back.reshape(-1).view(torch.uint8).equal(straight.view(-1).view(torch.uint8))


@given(array=arrays, data=st.data())
def test_flat_bytes_is_a_view_or_none_for_non_contiguous_arrays(array: np.ndarray, data: st.DataObject) -> None:
    value = views(array, data)
    flat = flat_bytes(value)
    if flat is None:
        assert not value.flags.c_contiguous
    else:
        assert bytes(flat) == value.tobytes()
        assert value.size == 0 or np.shares_memory(flat, value)


def test_foreign_byte_order_is_converted_on_copy() -> None:
    value, memory = np.arange(3, dtype=">i4"), np.zeros(64, np.uint8)
    assert flat_bytes(value) is None
    copy_into(memory[:12], value)
    assert memory[:12].view("=i4").tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(RAW))
def test_dtypes_numpy_lacks_are_read_as_raw_bits(name: str) -> None:
    value, memory = torch.tensor([1.5, -2.0]).to(getattr(torch, name)), np.zeros(64, np.uint8)
    assert describe(value) == (name, (2,))
    copy_into(memory[: value.nbytes], value)
    bits = numpy_over(memory, over(memory, value))
    assert bits is not None and bits.tolist() == value.view(getattr(torch, RAW[name])).tolist()


def test_single_element_tensor_of_any_stride_has_flat_bytes() -> None:
    value = torch.ones(3, dtype=torch.bfloat16).as_strided((1, 1), (0, 7))
    flat = flat_bytes(value)
    assert flat is not None and flat.nbytes == 2


def test_tensor_requiring_grad_is_stored_detached() -> None:
    value = torch.ones(3, requires_grad=True)
    flat = flat_bytes(value)
    assert flat is not None and flat.view("float32").tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [1, 2.5, [1], "x", np.float32(1)])
def test_non_tensor_values_raise_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        describe(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [0, 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 9 << 20])
def test_incremental_checksums_equal_checksums_of_the_whole(nbytes: int) -> None:
    memory = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
    checksums = Checksums(memory)
    for end in (0, nbytes // 3, nbytes // 3 + 1, nbytes // 2, nbytes):
        checksums.filled(end)
    chunks = [memory[start : start + (4 << 20)] for start in range(0, nbytes, 4 << 20)]
    assert checksums.finish() == checksums_of(memory) == tuple(map(xxhash.xxh3_64_intdigest, chunks))


def test_incomplete_chunks_are_not_hashed() -> None:
    memory = np.zeros(8 << 20, np.uint8)
    checksums = Checksums(memory)
    checksums.filled((4 << 20) - 1)
    memory[(4 << 20) - 1 :] = 9
    checksums.filled(4 << 20)
    assert checksums.finish() == checksums_of(memory)
