"""Names of pools: which workers are interchangeable, down to the bytes of what they make.

A model's card declares the pool of a stage: its kind, the weights and the dtype of its component. Workers add their
outcome, what results depend on beside: `denoise:1f2e3d4c5b6a:float32@0a1b2c3d`. A pool that no worker ever served has
none, nor have those of workers that say none.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from unfuse.core.codec import encode


def manned(pool: str, outcome: Mapping[str, str]) -> str:
    """The pool of workers of that outcome, of those that could serve a declared one."""
    if not outcome:
        return pool
    return f"{pool}@{blake2b(encode(sorted(outcome.items())), digest_size=4).hexdigest()}"


def declared(pool: str) -> str:
    """The pool without the outcome: every worker of it could serve in another's place, if to other bytes."""
    return pool.partition("@")[0]


def outcome_of(pool: str) -> str:
    """The hash of the outcome, "" where there is none."""
    return pool.partition("@")[2]
