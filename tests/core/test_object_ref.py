"""Where tensors lie inside an object, and how it is cut into chunks."""

import pytest
from hypothesis import given, settings, strategies as st

from unfuse.core.object_ref import (
    ALIGNMENT,
    CHUNK_BYTES,
    DTYPES,
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_TENSORS,
    PACKED,
    chunk_bytes,
    layout_tensors,
)

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
one_tensor = st.tuples(st.text(max_size=5), st.sampled_from([*DTYPES, "none"]), shapes)
tensors = st.lists(one_tensor, max_size=20, unique_by=lambda one: one[0])


@settings(deadline=None)
@given(tensors)
def test_tensors_are_laid_out_contiguously_and_cache_line_aligned(
    given: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    metas, total = layout_tensors(given)
    assert [(meta.name, meta.dtype, meta.shape) for meta in metas] == given
    end = 0
    for meta in metas:
        count = 1
        for side in meta.shape:
            count *= side
        assert meta.nbytes == (0 if meta.dtype == "none" else count * DTYPES[meta.dtype])
        assert meta.offset % ALIGNMENT == 0
        assert end <= meta.offset < end + ALIGNMENT
        end = meta.offset + meta.nbytes
    assert end <= total < end + ALIGNMENT


def test_layout_offsets_match_a_hand_computed_example() -> None:
    metas, total = layout_tensors(
        [("a", "bfloat16", (3, 5)), ("b", "none", ()), ("c", "float32", ()), ("d", "uint8", (65,))]
    )
    assert [(meta.offset, meta.nbytes) for meta in metas] == [(0, 30), (64, 0), (64, 4), (128, 65)]
    assert total == 256
    assert layout_tensors([]) == ((), 0)


def test_packed_4_bit_tensor_is_sized_in_whole_blocks() -> None:
    metas, _ = layout_tensors([(str(size), PACKED, (size,)) for size in (0, 1, 32, 33)] + [("rows", PACKED, (3, 32))])
    assert [meta.nbytes for meta in metas] == [0, 18, 18, 36, 54]


@pytest.mark.parametrize(
    "bad, reason",
    [
        ([("x", "complex64", (1,))], "tensor 'x' has the unsupported dtype complex64; supported: float64"),
        ([("x", "object", ())], "dtype object"),
        ([("x", "float32", (2, -1))], "shape"),
        ([("x", "float32", (1,) * (MAX_DIMS + 1))], "shape"),
        ([("x", "float32", ()), ("x", "int8", ())], "different names"),
        ([(str(number), "int8", ()) for number in range(MAX_TENSORS + 1)], "up to 256 tensors"),
    ],
)
def test_invalid_tensor_layout_raises_value_error(bad: list[tuple[str, str, tuple[int, ...]]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        layout_tensors(bad)


@settings(deadline=None)
@given(st.integers(0, 2**42))
def test_chunks_have_a_minimum_size_and_maximum_count(nbytes: int) -> None:
    size = chunk_bytes(nbytes)
    assert size >= CHUNK_BYTES
    assert -(-nbytes // size) <= MAX_CHUNKS


@pytest.mark.parametrize(
    "nbytes, size", [(0, CHUNK_BYTES), (1024 * 2**20, CHUNK_BYTES), (1024 * 2**20 + 1, CHUNK_BYTES + 1)]
)
def test_chunk_size_grows_beyond_the_maximum_count(nbytes: int, size: int) -> None:
    assert chunk_bytes(nbytes) == size
