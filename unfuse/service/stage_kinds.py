"""Checks that settings name kinds of stages that exist."""

from __future__ import annotations

from collections.abc import Sequence

from unfuse.core.card import ModelCard
from unfuse.core.errors import UsageError
from unfuse.core.plan import StageSpec
from unfuse.service.groups import Serve
from unfuse.stages import specs

BUILT_IN = frozenset(spec.kind for spec in vars(specs).values() if isinstance(spec, StageSpec))
"""Kinds of stages of our own families; families of other packages may have more."""


def check_stage_kinds(serve: Serve, cards: Sequence[ModelCard]) -> None:
    """Raise UsageError if --encode or --durable-stages names a kind that no stage has."""
    known = BUILT_IN | {stage.kind for card in cards for stage in card.pipeline.stages}
    for entry in serve.encode:
        _check("--encode", entry, entry.partition("=")[0], known)
    for kind in serve.durable_stages:
        _check("--durable-stages", kind, kind, known)


def _check(flag: str, entry: str, kind: str, known: frozenset[str]) -> None:
    if kind not in known:
        raise UsageError(f"{flag} {entry}: no stage is of kind {kind!r}; kinds are {', '.join(sorted(known))}")
