"""Predicted peaks of real models: the figures that were measured on the meta device, and on a GPU."""

from __future__ import annotations

import pytest

from tests.planning.real_models import NAMES, configuration
from unfuse.models.peaks import WORKSPACE_2D, WORKSPACE_3D, ForwardSize, component_peak, vae_peak

GIB = 1 << 30
VIDEO = {"frames": 81, "temporal": 4}


def part(model: str, component: str) -> tuple[str, str, dict[str, object]]:
    described = configuration(model)["components"][component]
    return component, described["class"], described["config"]


@pytest.mark.parametrize(
    ("model", "component", "size", "gib"),
    [
        ("flux1", "transformer", ForwardSize(), 0.46),
        ("flux1", "transformer", ForwardSize(batch=2), 0.91),
        ("flux1", "transformer", ForwardSize(batch=8), 3.6),
        ("flux1", "transformer", ForwardSize(columns=2048, rows=2048), 1.7),
        ("flux1", "text_encoder_2", ForwardSize(), 0.1),
        ("wan2.1", "text_encoder", ForwardSize(), 0.1),
        ("wan2.1", "transformer", ForwardSize(columns=832, rows=480, **VIDEO), 3.5),
        ("wan2.1", "transformer", ForwardSize(batch=2, columns=832, rows=480, **VIDEO), 6.9),
        ("wan2.1", "transformer", ForwardSize(columns=1280, rows=720, **VIDEO), 8.0),
    ],
)
def test_peak_of_a_forward_is_within_a_tenth_of_the_measured(
    model: str, component: str, size: ForwardSize, gib: float
) -> None:
    assert component_peak(*part(model, component), size) / GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(
    ("model", "size", "meta", "on_gpu"),
    [
        ("flux1", ForwardSize(width=4), (3.0, 3.0), 4.8),
        ("flux1", ForwardSize(width=4, columns=2048, rows=2048), (12.0, 12.0), None),
        ("flux1", ForwardSize(width=2), (1.5, 1.5), 2.4),
        ("wan2.1", ForwardSize(width=4, columns=832, rows=480, frames=17, temporal=4), (7.3, 7.6), 8.5),
        ("wan2.1", ForwardSize(width=2, columns=832, rows=480, frames=17, temporal=4), (3.65, 3.8), 4.2),
        ("wan2.1", ForwardSize(width=4, columns=1280, rows=720, **VIDEO), (16.8, 17.6), None),
    ],
)
def test_peak_of_decoding_has_the_workspace_that_a_gpu_showed(
    model: str, size: ForwardSize, meta: tuple[float, float], on_gpu: float | None
) -> None:
    """`on_gpu` was measured on an H100, with cuDNN's workspace."""
    _, kind, config = part(model, "vae")
    planned = vae_peak(kind, config, size) / GIB
    workspace = WORKSPACE_2D if kind == "AutoencoderKL" else WORKSPACE_3D
    assert 0.9 * meta[0] < planned / workspace < 1.1 * meta[1]
    assert on_gpu is None or planned == pytest.approx(on_gpu, rel=0.1)


def test_sequences_of_tiles_need_less_than_a_whole_picture() -> None:
    _, kind, config = part("flux1", "vae")
    whole, tiled = (
        vae_peak(kind, config, ForwardSize(width=4, columns=2048, rows=2048, tiled=tiled)) for tiled in (False, True)
    )
    assert tiled < whole / 3.5


@pytest.mark.parametrize(
    ("component", "config"), [("transformer", {}), ("unet", {}), ("vae", {}), ("text_encoder", {}), ("vision", {})]
)
def test_peak_of_an_unreadable_configuration_is_unknown(component: str, config: dict[str, object]) -> None:
    assert component_peak(component, "Unknown", config, ForwardSize()) == 0


@pytest.mark.parametrize("name", NAMES)
def test_each_configuration_has_a_public_source(name: str) -> None:
    for entry, component in configuration(name)["components"].items():
        assert "config" not in component or component["source"].startswith(("github: ", "hub: ", "crate: ")), entry
