"""A feature cache, which skips most transformer blocks of a step that changes little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from unfuse.core.errors import PermanentError

#: The name of diffusers' hook on the first block of a transformer.
LEADER = "fbc_leader_block_hook"
#: The name of diffusers' hook that finds the order of layers, in the first forward of a sequentially offloaded model.
FINDS_ORDER = "lazy_prefetch_group_offloading"
#: A threshold below every difference: no block is skipped, so the result is exact.
NEVER = -1.0
#: The cached block outputs of one request: for each transformer (by index), diffusers' states by forward name.
Memory = dict[int, dict[str, Any]]
#: The request parameter that allows blocks to be skipped: a threshold, see `FeatureCache`.
SIMILAR = "feature_cache"


class FeatureCache:
    """A feature cache that skips most transformer blocks while the first one's output changes little.

    First-block caching, as in diffusers (https://github.com/chengzeyi/ParaAttention, after TeaCache, arXiv:2411.19108).
    If the residual of the first block differs from the last step's by less than a threshold, the other blocks are
    skipped, and their last residual is used again. diffusers stores these residuals in its hooks. Here each request has
    its own, which are freed with its state. Hooks are installed when a request first uses the cache.
    """

    def __init__(self, transformers: Sequence[Any]) -> None:
        self._transformers = transformers
        self._hooks: list[tuple[Any, Any]] = []
        # Transformers whose next forward removes hooks of offload, and disconnects those of the cache.
        self._disconnecting: list[Any] = []

    def install(self) -> None:
        """Install the hooks. Raises PermanentError for a transformer that cannot skip its blocks."""
        from diffusers import FirstBlockCacheConfig

        # A call that failed midway has installed some hooks already; diffusers refuses to enable a cache twice.
        for transformer in self._transformers[len(self._hooks) :]:
            try:
                transformer.enable_cache(FirstBlockCacheConfig(threshold=NEVER))
            except (AttributeError, ValueError, IndexError) as error:
                name = type(transformer).__name__
                raise PermanentError(f"feature_cache is not supported by {name}: leave it out") from error

            registries = (getattr(module, "_diffusers_hook", None) for module in transformer.modules())
            leader = next(hook for registry in registries if registry and (hook := registry.get_hook(LEADER)))
            self._hooks.append((transformer, leader))
            self._disconnecting += [transformer] if _finds_order(transformer) else []

    @contextmanager
    def use_memory(self, memory: Memory | None, threshold: float, forward: str) -> Iterator[None]:
        """Make the forwards in this context use a request's cached residuals.

        `memory`: the residuals; None: none are used or stored. `threshold`: the relative change of the first block's
        residual up to which the other blocks are skipped. `forward`: the name under which residuals are stored.
        The hooks have no residuals afterwards: those of an idle worker would occupy device memory.
        """
        for transformer in [model for model in self._disconnecting if not _finds_order(model)]:
            _reconnect_hooks(transformer)
            self._disconnecting.remove(transformer)
        try:
            with ExitStack() as contexts:
                for number, (transformer, hook) in enumerate(self._hooks):
                    hook.threshold = NEVER if memory is None else threshold
                    # diffusers has no public way to exchange the states of a hook.
                    hook.state_manager._state_cache = {} if memory is None else memory.setdefault(number, {})
                    contexts.enter_context(transformer.cache_context(forward))
                yield
        finally:
            for _, hook in self._hooks:
                hook.state_manager._state_cache = {}


def _finds_order(transformer: Any) -> bool:
    """Return whether the next forward finds the order of layers for sequential offload."""
    registry = getattr(transformer, "_diffusers_hook", None)
    return registry is not None and registry.get_hook(FINDS_ORDER) is not None


def _reconnect_hooks(transformer: Any) -> None:
    """Let the cache's hooks run again that diffusers disconnected from their modules.

    When diffusers removes a hook, it replaces the forward of the next one, which is lost if it has one of its own.
    """
    for module in transformer.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry else ():
            new_forward, reference = getattr(hook, "new_forward", None), hook.fn_ref
            if new_forward and getattr(reference.forward, "func", None) != new_forward:
                reference.original_forward = reference.forward
                reference.forward = partial(new_forward, module)
