"""Skipping most of a transformer while its first block says that little has changed since the step before.

First-block caching, as diffusers has it (https://github.com/chengzeyi/ParaAttention, after TeaCache, arXiv:2411.19108):
when what the first block adds differs from last time by less than a share, the other blocks are taken to add what they
added last time. diffusers remembers that in its hooks; here each request has its own memory, which goes with its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.nn import Module

from unfuse.core.errors import PermanentError

LEADER = "fbc_leader_block_hook"  # the name of diffusers' hook on the first block
NEVER = -1.0  # a threshold below every difference: every block runs, and the result is exact
Memory = dict[int, dict[str, Any]]  # what each transformer remembered, by the names of its forwards


class FeatureCache:
    """The cache of one denoiser's transformers. Their hooks are installed when a request first asks for them."""

    def __init__(self, transformers: Sequence[Any]) -> None:
        self._transformers = transformers
        self._hooks: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Raise PermanentError for a transformer that cannot skip its blocks."""
        from diffusers import FirstBlockCacheConfig

        for transformer in self._transformers[len(self._hooks) :]:
            try:
                transformer.enable_cache(FirstBlockCacheConfig(threshold=NEVER))
            except (AttributeError, ValueError, IndexError) as error:
                name = type(transformer).__name__
                raise PermanentError(f"feature_cache: {name} cannot skip its blocks: leave it out") from error
            self._hooks.append((transformer, _leader(transformer)))

    @contextmanager
    def remembering(self, memory: Memory | None, threshold: float, forward: str) -> Iterator[None]:
        """Run the forward of that name with what its request remembers; without `memory` none is used or left.

        A `threshold` is the share by which the first block's effect may differ for the others to be skipped.
        """
        with ExitStack() as contexts:
            for number, (transformer, hook) in enumerate(self._hooks):
                hook.threshold = NEVER if memory is None else threshold
                hook.state_manager._state_cache = {} if memory is None else memory.setdefault(number, {})
                contexts.enter_context(transformer.cache_context(forward))
            yield


def _leader(transformer: Module) -> Any:
    registries = (getattr(module, "_diffusers_hook", None) for module in transformer.modules())
    return next(hook for registry in registries if registry and (hook := registry.get_hook(LEADER)))
