"""Names of pools. Workers of one pool are interchangeable: they make the same bytes.

A model's card declares the pool of a stage: the stage kind, and the weights and dtype of its component. Workers add the
hash of their outcome, which is everything else that results depend on: `denoise:1f2e3d4c5b6a:float32@0a1b2c3d`. A pool
that no worker has served yet has no outcome, nor has one whose workers report none.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from unfuse.core.codec import encode


def manned(pool: str, outcome: Mapping[str, str]) -> str:
    """The name of a declared pool for workers of this outcome."""
    if not outcome:
        return pool
    return f"{pool}@{blake2b(encode(sorted(outcome.items())), digest_size=4).hexdigest()}"


def declared(pool: str) -> str:
    """The name of the pool without its outcome. Workers of equal declared pools can do the same tasks."""
    return pool.partition("@")[0]


def outcome_of(pool: str) -> str:
    """The hash of the outcome in a pool's name, "" if it has none."""
    return pool.partition("@")[2]
