"""`--offload`: what each component does while it is not used."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, get_args

from unfuse.core.errors import ConfigError, UsageError

Offload = Literal["none", "model", "sequential"]
"""A component stays on the device (none), or moves there as a whole (model), or layer by layer (sequential)."""

WITHOUT_WEIGHTS = "scheduler", "tokenizer", "processor", "image_processor", "feature_extractor"
"""How the names of components begin that have no weights, such as `tokenizer_2`."""


def parse_offload(text: str) -> tuple[Offload, dict[str, Offload]]:
    """Return the offload of all components by `--offload`, and that of single ones.

    The option is written as `model`, `text_encoder=model,vae=model`, or both: `model,vae=none`. Components that are not
    named stay on the device if no value is for all. Raises UsageError.
    """
    default: Offload = "none"
    named = dict[str, Offload]()
    for entry in text.split(","):
        component, equals, how = (part.strip() for part in entry.rpartition("="))
        known = next((mode for mode in get_args(Offload) if mode == how), None)
        if known is None or (equals and not component):
            raise UsageError(
                f"--offload {text}: {entry.strip()!r} is not one of {', '.join(get_args(Offload))}, or COMPONENT=one "
                "of these"
            )
        if equals:
            named[component] = known
        else:
            default = known
    return default, named


def offload_of(text: str, component: str) -> Offload:
    """Return the offload of a component. Raises UsageError."""
    default, named = parse_offload(text)
    return named.get(component, default)


def offloaded(text: str, components: Iterable[str]) -> list[str]:
    """Return those of these components whose weights are offloaded. Raises UsageError."""
    with_weights = (component for component in components if not component.startswith(WITHOUT_WEIGHTS))
    return [component for component in with_weights if offload_of(text, component) != "none"]


def require_gpu(offload: Offload, kind: str) -> None:
    """Raise ConfigError if a component is offloaded from a CPU."""
    if offload != "none" and kind == "cpu":
        raise ConfigError(f"--offload {offload} needs a GPU: on a CPU, weights are in host memory anyway")


def check_offload(text: str, components: Collection[str]) -> None:
    """Raise ConfigError if `--offload` names a component that no model has.

    Raises UsageError if it is malformed.
    """
    _, named = parse_offload(text)
    if unknown := sorted(named.keys() - components):
        raise ConfigError(f"--offload {text}: unknown component {unknown[0]!r}; known are {', '.join(components)}")
