"""`--offload`: for all components, or for each."""

from __future__ import annotations

import pytest

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.offload_options import check_offload, offload_of, offloaded

COMPONENTS = "text_encoder", "transformer", "vae"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ("none", "none", "none")),
        ("model", ("model", "model", "model")),
        ("sequential", ("sequential", "sequential", "sequential")),
        ("text_encoder=model,vae=model", ("model", "none", "model")),
        (" text_encoder = sequential , vae = model ", ("sequential", "none", "model")),
        ("model,transformer=none", ("model", "none", "model")),
        ("transformer=sequential,model", ("model", "sequential", "model")),
    ],
)
def test_offload_of_a_component_is_its_own_value_or_that_of_all(text: str, expected: tuple[str, ...]) -> None:
    assert tuple(offload_of(text, component) for component in COMPONENTS) == expected
    assert offloaded(text, COMPONENTS) == [
        component for component, how in zip(COMPONENTS, expected, strict=True) if how != "none"
    ]
    check_offload(text, COMPONENTS)


@pytest.mark.parametrize("text", ["", "sometimes", "vae=", "=model", "vae=cpu", "model,,vae=none", "vae"])
def test_malformed_value_raises_usage_error_with_the_choices(text: str) -> None:
    with pytest.raises(UsageError, match="is not one of none, model, sequential, or COMPONENT=one of these"):
        offload_of(text, "vae")


def test_unknown_component_raises_error_with_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown component 'unet'; known are text_encoder, transformer, vae"):
        check_offload("model,unet=none", COMPONENTS)


def test_components_without_weights_are_not_offloaded() -> None:
    assert offloaded("model", ("scheduler", "text_encoder_2", "tokenizer_2")) == ["text_encoder_2"]


def test_offload_changes_no_numerics() -> None:
    """Nor names of pools, which are made of them: weights are moved, and computed with as they are."""
    assert ComputeOptions(offload="model,vae=sequential").numerics == ComputeOptions().numerics
