"""What `--dtype` says of each component."""

from __future__ import annotations

from collections.abc import Collection

from unfuse.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def parse_dtypes(spec: str) -> tuple[str, dict[str, str]]:
    """What `--dtype` says: the dtype of whatever it does not name ("auto" if it does not say), and those by component.

    Written `bfloat16`, `transformer=bfloat16,vae=float32`, or both. Raises ConfigError for an unknown dtype.
    """
    rest, named = "auto", dict[str, str]()
    for entry in spec.split(","):
        component, equals, dtype = (part.strip() for part in entry.rpartition("="))
        if dtype not in DTYPES and (equals or dtype != "auto"):
            raise ConfigError(f"--dtype {spec}: unknown dtype {dtype!r}: one of auto, {', '.join(DTYPES)}")
        if equals:
            named[component] = dtype
        else:
            rest = dtype
    return rest, named


def choose_dtypes(spec: str, components: Collection[str]) -> dict[str, str]:
    """The dtype of each component by `--dtype`; "auto" is float32, which is what diffusers loads when told nothing.

    One dtype for all means every component, as `torch_dtype` of a diffusers script does.
    Raises ConfigError for an unknown dtype or component.
    """
    rest, named = parse_dtypes(spec)
    if unknown := sorted(set(named) - set(components)):
        raise ConfigError(f"--dtype {spec}: no component is called {unknown[0]!r}; known are {', '.join(components)}")
    return dict.fromkeys(components, DTYPES[0] if rest == "auto" else rest) | named
