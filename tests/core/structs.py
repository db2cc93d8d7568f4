"""Hypothesis strategies for msgspec structs, from their types, within what msgpack can carry."""

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

PLAIN: Mapping[object, st.SearchStrategy[Any]] = {
    NoneType: st.none(),
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=4),
    bytes: st.binary(max_size=4),
}


@cache
def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type: a plain one, a struct, or a tuple, frozenset, dict, literal or union of such."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _bounded(inside[0], next(each for each in inside[1:] if isinstance(each, msgspec.Meta)))
    if origin in (Union, UnionType):
        return st.one_of([of(one) for one in inside])
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is dict:
        return st.dictionaries(of(inside[0]), of(inside[1]), max_size=2)
    if origin is frozenset:
        return st.frozensets(of(inside[0]), max_size=2)
    if origin is tuple and inside[-1] is ...:
        return st.lists(of(inside[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(of(one) for one in inside))
    assert issubclass(kind, msgspec.Struct), kind
    hints = get_type_hints(kind, include_extras=True)
    fields = kind.__struct_fields__
    return st.deferred(lambda: st.builds(kind, **{name: of(hints[name]) for name in fields}))  # it may hold itself


def _bounded(kind: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    if kind is float and meta.ge is not None:
        return st.floats(meta.ge, meta.le, allow_nan=False, allow_infinity=meta.le is None)
    if kind is int and meta.le is not None:
        return st.integers(meta.ge, meta.le)
    return of(kind) if meta.ge is None else of(kind).filter(lambda value: value >= meta.ge)
