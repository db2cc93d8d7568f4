"""Each layer of an adapter has the alpha that its file says, as in weights that are merged by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders import StableDiffusionLoraLoaderMixin
from safetensors.torch import save_file

from unfuse.weights.adapters import AdapterFolder, LoadedAdapters

RANK = 2


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=4,
        block_out_channels=(8,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()


@pytest.mark.row("K2")
@pytest.mark.parametrize("alphas", [(1.0,), (1.0, 2.0, 1.0), (4.0, 0.5, None)], ids=["equal", "several", "in part"])
def test_lora_layers_scale_by_their_own_alpha(
    alphas: tuple[float | None, ...], unet: UNet2DConditionModel, tmp_path: Path
) -> None:
    """As of files whose convolutions have another alpha than the rest, or that were made smaller layer by layer."""
    ends = ("attn1.to_q", "attn1.to_out.0", "attn2.to_k", "ff.net.2", "conv1")
    layers = {name: layer for name, layer in unet.named_modules() if name.endswith(ends)}
    wanted, file = {}, {}
    for number, (name, layer) in enumerate(layers.items()):
        named, alpha = f"lora_unet_{name.replace('.', '_')}", alphas[number % len(alphas)]
        height, width, *window = layer.weight.shape
        file[f"{named}.lora_down.weight"] = torch.randn(RANK, width, *window)
        file[f"{named}.lora_up.weight"] = torch.randn(height, RANK, *(1 for _ in window))
        if alpha is not None:
            file[f"{named}.alpha"] = torch.tensor(alpha)
        wanted[name] = 0.5 * (1.0 if alpha is None else alpha / RANK)
    save_file(file, tmp_path / "tuned.safetensors")
    loras = AdapterFolder(str(tmp_path))
    id, reader = loras.id_of("tuned"), SimpleNamespace(lora_state_dict=StableDiffusionLoraLoaderMixin.lora_state_dict)
    adapters = LoadedAdapters(loras, unet, lambda: reader, torch.device("cpu"), 1, "unet")

    adapters.use({"lora": "tuned", "lora_scale": 0.5}, id)

    assert {name: layer.scaling[id] for name, layer in unet.named_modules() if hasattr(layer, "scaling")} == wanted
    adapters.use({}, "")
    unet.delete_adapters(id)
