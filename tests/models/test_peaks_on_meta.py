"""Formulas of peak memory against forwards of the real classes and widths, with few blocks, on the meta device."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.planning.live_bytes import peak
from tests.planning.real_models import configuration
from unfuse.core.text import GATHERED_KV_BYTES
from unfuse.models.peaks import (
    WORKSPACE_2D,
    WORKSPACE_3D,
    ForwardSize,
    language_peak,
    text_encoder_peak,
    transformer_peak,
    unet_peak,
    vae_peak,
    vision_peak,
)

DTYPES = {2: torch.bfloat16, 4: torch.float32}
SHORT = {"num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1}


def build(library: str, kind: str, config: dict[str, Any], width: int) -> torch.nn.Module:
    """The module on the meta device."""
    module = importlib.import_module(library)
    with torch.device("meta"):
        if library == "diffusers":
            model = getattr(module, kind)(**config)
        else:
            settings = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
            model = getattr(module, kind)(getattr(module, kind).config_class(**settings))
    return model.to(DTYPES[width]).eval()


def blank(size: ForwardSize, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=DTYPES[size.width], device="meta")


def packed(size: ForwardSize, config: dict[str, Any], text: int, axes: int) -> dict[str, Any]:
    """The inputs of a transformer of packed latents."""
    tokens = size.latents // 4 // size.batch
    return {
        "hidden_states": blank(size, size.batch, tokens, int(config["in_channels"])),
        "encoder_hidden_states": blank(size, size.batch, size.tokens, text),
        "timestep": blank(size, size.batch),
        "guidance": blank(size, size.batch),
        "img_ids": torch.empty(tokens, axes, device="meta"),
        "txt_ids": torch.empty(size.tokens, axes, device="meta"),
    }


def gridded(size: ForwardSize, config: dict[str, Any], text: int) -> dict[str, Any]:
    """The inputs of a transformer of a video's latents."""
    grid = (size.latent_frames, size.rows // size.spatial, size.columns // size.spatial)
    return {
        "hidden_states": blank(size, size.batch, int(config["in_channels"]), *grid),
        "encoder_hidden_states": blank(size, size.batch, size.tokens, text),
        "timestep": torch.empty(size.batch, device="meta"),
    }


def inputs(kind: str, config: dict[str, Any], size: ForwardSize) -> dict[str, Any]:
    """What the forward of a transformer gets."""
    if kind == "FluxTransformer2DModel":
        return packed(size, config, 4096, 3) | {"pooled_projections": blank(size, size.batch, 768)}
    if kind == "Flux2Transformer2DModel":
        return packed(size, config, 15360, 4)
    if kind == "QwenImageTransformer2DModel":
        sides = (1, size.rows // 16, size.columns // 16)
        part = packed(size, config, 3584, 3)
        kept = {name: part[name] for name in ("hidden_states", "encoder_hidden_states", "timestep")}
        mask = torch.ones(size.batch, size.tokens, dtype=torch.bool, device="meta")
        return kept | {"encoder_hidden_states_mask": mask, "img_shapes": [[sides]] * size.batch}
    if kind == "HunyuanVideoTransformer3DModel":
        mask = torch.ones(size.batch, size.tokens, dtype=torch.bool, device="meta")
        more = {"pooled_projections": blank(size, size.batch, 768), "guidance": blank(size, size.batch)}
        return gridded(size, config, 4096) | more | {"encoder_attention_mask": mask}
    return gridded(size, config, 4096)


PICTURE = ForwardSize()
SMALL = ForwardSize(columns=512, rows=512)
CLIP_480 = ForwardSize(columns=832, rows=480, frames=81, temporal=4)
TRANSFORMERS = [
    ("flux1", PICTURE),
    ("flux1", ForwardSize(batch=2)),
    ("flux1", ForwardSize(width=4)),
    ("flux1", SMALL),
    ("flux1", ForwardSize(columns=2048, rows=2048)),
    ("flux2", PICTURE),
    ("qwen-image", PICTURE),
    ("qwen-image", ForwardSize(batch=2, columns=1664, rows=928)),
    ("qwen-image", SMALL),
    ("wan2.1", CLIP_480),
    ("wan2.1", ForwardSize(width=4, columns=832, rows=480, frames=81, temporal=4)),
    ("wan2.1", ForwardSize(batch=2, columns=832, rows=480, frames=33, temporal=4)),
    ("hunyuan-video", ForwardSize(columns=832, rows=480, frames=61, temporal=4, tokens=256)),
    ("hunyuan-video", ForwardSize(columns=1280, rows=720, frames=129, temporal=4, tokens=256)),
]


@pytest.mark.parametrize(("name", "size"), TRANSFORMERS)
def test_formula_agrees_with_a_transformers_forward(name: str, size: ForwardSize) -> None:
    described = configuration(name)["components"]["transformer"]
    kind, config = described["class"], described["config"]
    model = build("diffusers", kind, config | {key: SHORT[key] for key in SHORT if key in config}, size.width)
    measured = peak(model, lambda model: model(**inputs(kind, config, size), return_dict=False))
    assert transformer_peak(kind, config, size) == pytest.approx(measured, rel=0.1)


def test_formula_agrees_with_a_narrow_transformer_of_wide_feed_forward_layers() -> None:
    config = configuration("wan2.1")["components"]["transformer"]["config"]
    narrow = config | {"num_attention_heads": 12, "ffn_dim": 8960}  # Wan 2.1 1.3B
    model = build("diffusers", "WanTransformer3DModel", narrow | {"num_layers": 1}, 2)
    measured = peak(model, lambda model: model(**gridded(CLIP_480, narrow, 4096), return_dict=False))
    assert transformer_peak("WanTransformer3DModel", narrow, CLIP_480) == pytest.approx(measured, rel=0.1)


UNETS = {
    "sdxl": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (320, 640, 1280),
        "transformer_layers_per_block": (1, 1, 1),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
    },
    "sd15": {"block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 768},
}


@pytest.mark.parametrize("name", UNETS)
def test_formula_agrees_with_a_unets_forward(name: str) -> None:
    size = ForwardSize(batch=2)
    model = build("diffusers", "UNet2DConditionModel", UNETS[name], size.width)
    text = blank(size, 2, 77, int(UNETS[name]["cross_attention_dim"]))
    step = torch.empty(1, device="meta")
    measured = peak(model, lambda model: model(blank(size, 2, 4, 128, 128), step, text, return_dict=False))
    assert unet_peak(model.config, size) == pytest.approx(measured, rel=0.1)


VAES = [
    ("flux1", ForwardSize(width=4)),
    ("flux1", ForwardSize(width=2, batch=2)),
    ("flux1", ForwardSize(width=4, columns=2048, rows=2048, tiled=True)),
    ("flux2", ForwardSize(width=2, columns=512, rows=512)),
    ("qwen-image", ForwardSize(width=4)),
    ("wan2.1", ForwardSize(width=4, columns=416, rows=240, frames=17, temporal=4)),
    ("wan2.1", ForwardSize(width=2, columns=416, rows=240, frames=33, temporal=4)),
    ("hunyuan-video", ForwardSize(width=2, columns=256, rows=256, frames=13, temporal=4)),
    ("hunyuan-video", ForwardSize(width=2, columns=256, rows=256, frames=33, temporal=4)),
]


@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize(("name", "size"), VAES)
def test_formula_agrees_with_a_vae_but_for_the_workspace_of_convolutions(
    name: str, size: ForwardSize, encodes: bool
) -> None:
    described = configuration(name)["components"]["vae"]
    kind, config = described["class"], described["config"]
    model: Any = build("diffusers", kind, config, size.width)
    if size.tiled:
        model.enable_tiling()
    channels = int(config.get("latent_channels") or config.get("z_dim"))
    is_video = kind not in ("AutoencoderKL", "AutoencoderKLFlux2")
    frames = (size.frames,) if is_video else ()
    latents = blank(
        size, size.batch, channels, *([size.latent_frames] if is_video else []), size.rows // 8, size.columns // 8
    )
    pixels = blank(size, size.batch, 3, *frames, size.rows, size.columns)
    measured = peak(model, lambda vae: vae.encode(pixels) if encodes else vae.decode(latents))
    workspace = WORKSPACE_3D if is_video else WORKSPACE_2D
    planned = vae_peak(kind, config, size, encodes=encodes)
    assert planned / workspace == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 512), (1, 256), (4, 512)])
def test_formula_agrees_with_t5(batch: int, tokens: int) -> None:
    described = configuration("flux1")["components"]["text_encoder_2"]
    model = build("transformers", described["class"], described["config"] | {"num_layers": 2}, 2)
    ids = torch.empty(batch, tokens, dtype=torch.long, device="meta")
    measured = peak(model, lambda model: model(input_ids=ids))
    size = ForwardSize(batch=batch, tokens=tokens)
    assert text_encoder_peak(described["class"], described["config"], size) == pytest.approx(measured, rel=0.1)


def test_formula_agrees_with_clip() -> None:
    described = configuration("flux1")["components"]["text_encoder"]
    model = build("transformers", described["class"], described["config"] | {"num_hidden_layers": 2}, 2)
    measured = peak(model, lambda model: model(input_ids=torch.empty(1, 77, dtype=torch.long, device="meta")))
    assert text_encoder_peak(described["class"], described["config"], ForwardSize()) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("returns_all", [False, True])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-vl-7b"])
def test_formula_agrees_with_a_language_model(name: str, returns_all: bool) -> None:
    config = configuration(name)["components"]["model"]["config"]
    text = {**(config.get("text_config") or config), "num_hidden_layers": 3}
    kind, library = ("LlamaModel", "Llama") if name.startswith("llama") else ("Qwen2Model", "Qwen2")
    model = build("transformers", kind, text, 2)
    tokens = 512 if returns_all else 256
    ids = torch.empty(1, tokens, dtype=torch.long, device="meta")
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta")
    measured = peak(
        model,
        lambda model: model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=returns_all),
    )
    assert library in type(model).__name__
    planned = (
        text_encoder_peak(kind, text, ForwardSize(tokens=tokens - 96))
        if returns_all
        else language_peak(text, ForwardSize(tokens=tokens))
    )
    assert planned == pytest.approx(measured, rel=0.1)


def test_keys_and_values_that_texts_gather_are_planned() -> None:
    """Those of one layer, with the padding; for many long texts, the most that are gathered at once."""
    llama = configuration("llama-3.1-8b")["components"]["model"]["config"]
    one, many = (language_peak(llama, ForwardSize(tokens=256, texts=texts)) for texts in (1, 32))
    assert many - one == GATHERED_KV_BYTES
    short = {**llama, "max_position_embeddings": 512}
    assert language_peak(short, ForwardSize(tokens=256, texts=2)) - one == 2 * 2 * 512 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("width", [2, 4])
def test_formula_agrees_with_the_vision_encoder_of_a_language_model(width: int) -> None:
    """On the CPU, because the encoder reads the sizes of pictures from its input."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = configuration("qwen2.5-vl-7b")["components"]["model"]["config"]["vision_config"]
    short = Qwen2_5_VLVisionConfig(**config | {"depth": 1, "fullatt_block_indexes": [0]})
    model = Qwen2_5_VisionTransformerPretrainedModel._from_config(short, dtype=DTYPES[width]).eval()
    patches, grid = torch.zeros(1024, 1176, dtype=DTYPES[width]), torch.tensor([[1, 32, 32]])
    measured = peak(model, lambda model: model(patches, grid_thw=grid))
    size = ForwardSize(width=width, columns=32 * 14, rows=32 * 14)
    assert vision_peak(config, size) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("name", "component"), [("flux1", "vae"), ("flux1", "text_encoder"), ("wan2.1", "vae")])
def test_committed_number_of_parameters_is_that_of_the_class(name: str, component: str) -> None:
    described = configuration(name)["components"][component]
    model = build(described["library"], described["class"], described["config"], 2)
    assert sum(parameter.numel() for parameter in model.parameters()) == described["parameters"]
