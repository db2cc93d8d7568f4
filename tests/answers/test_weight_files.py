"""Weights of other tools: what a file holds takes effect, or the server does not start and names what it cannot use."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.server import serving, until
from tools.tiny import tuned

Folder = Callable[[str], Path]
NIGHTLY = pytest.mark.row("K3"), pytest.mark.nightly


def quantized(folder: Path, part: str, layer: str, scale: str) -> None:
    """Have the weights of layers so named be integers, each with a scale beside it."""
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    for key in [key for key in tensors if layer in key and key.endswith(".weight")]:
        step = tensors[key].abs().amax() / 127
        tensors[key] = (tensors[key] / step).round().to(torch.int8)
        tensors[key.removesuffix("weight") + scale] = step
    save_file(tensors, file, {"format": "pt"})


def said_by_serve(folder: Path, place: Path) -> str:
    """What `unfuse serve` says, in one line, when it does not start; the test fails if it serves the model."""
    with serving(place, str(folder)) as server:
        until(lambda: server.process.poll() is not None or server.get("/ready"), "the server to end or to be ready")
        said = " ".join(server.log().split())
        assert server.process.poll() == 1 and "Traceback" not in said, said
    return said


@pytest.mark.parametrize(
    ("kind", "part", "layer", "scale"),
    [
        pytest.param("flux", "text_encoder_2", "SelfAttention.q", "weight_scale", marks=pytest.mark.row("P10")),
        pytest.param("wan", "text_encoder", "SelfAttention.q", "SCB", marks=NIGHTLY),
        pytest.param("flux", "transformer", "ff.net", "weight_scale", marks=NIGHTLY),
        pytest.param("wan", "transformer", "ffn.net", "scale_weight", marks=pytest.mark.row("P11")),
        pytest.param("sdxl", "unet", "ff.net", "weight_scale", marks=NIGHTLY),
        pytest.param("sd", "vae", "conv", "weight_scale", marks=NIGHTLY),
    ],
)
def test_serve_rejects_quantized_weights_and_names_the_layer(
    kind: str, part: str, layer: str, scale: str, folder: Folder, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(folder(kind), tmp_path / "model"))
    quantized(model, part, layer, scale)

    said = said_by_serve(model, tmp_path)
    assert f"{part}/" in said and "is quantized" in said and layer in said


@pytest.mark.row("P11")
def test_serve_rejects_quantized_weights_in_a_file_of_another_tool(folder: Folder, tmp_path: Path) -> None:
    model = tuned(folder("wan"), tmp_path / "model", original=True)
    quantized(model, "transformer", "ffn.0", "scale_weight")

    assert "is quantized" in said_by_serve(model, tmp_path)


@pytest.mark.row("P47")
def test_serve_rejects_two_weight_files_in_one_folder(folder: Folder, tmp_path: Path) -> None:
    model = tuned(folder("wan"), tmp_path / "model", original=True)
    shutil.copy(model / "transformer/tuned.safetensors", model / "transformer/other.safetensors")

    said = said_by_serve(model, tmp_path)
    assert (
        "2 weight files, other.safetensors and tuned.safetensors" in said
        and "keep only one of them in transformer" in said
    )
