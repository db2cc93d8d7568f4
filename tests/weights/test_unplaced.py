"""Every tensor of a weight file takes effect in its model, or loading names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import conftest as c
from tools.tiny_language import make_language_model
from unfuse.core.errors import ConfigError
from unfuse.models import find
from unfuse.models.base import RuntimeOptions
from unfuse.weights.folder import ModelFolder
from unfuse.weights.quantized import codes
from unfuse.weights.single import unplaced

Copied = Callable[[str], Path]
Change = Callable[[dict[str, torch.Tensor]], None]


def changed(folder: Path, part: str, change: Change) -> Path:
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def load(folder: Path, kind: str) -> None:
    card = find(folder).model_spec("m", folder)
    (spec,) = (spec for spec in card.pipeline.stages if spec.kind == kind)
    find(folder).load(spec, folder, RuntimeOptions("cpu", card.dtypes))


def added(key: str, like: str = "") -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = tensors[like].clone() if like else torch.ones(1)

    return change


@pytest.mark.parametrize(
    ("model", "part", "stage", "key"),
    [
        ("wan", "transformer", "denoise", "blocks.0.attn1.to_q.other_scale"),
        ("wan", "transformer", "denoise", "blocks.2.attn1.to_q.weight"),
        ("wan", "text_encoder", "text_encode", "encoder.block.0.layer.0.SelfAttention.q.other_scale"),
        ("wan", "vae", "vae_decode", "decoder.conv_in.other_scale"),
        ("flux", "text_encoder", "text_encode", "text_model.encoder.layers.0.self_attn.q_proj.other_scale"),
        ("wan-single", "transformer", "denoise", "blocks.0.self_attn.q.other_scale"),
    ],
)
def test_unused_tensor_in_the_weights_raises_config_error(
    model: str, part: str, stage: str, key: str, copied: Copied
) -> None:
    folder = changed(copied(model), part, added(key))
    own = key.removeprefix("text_model.")
    with pytest.raises(ConfigError, match=rf"component {part} have \S*{own}"):
        load(folder, stage)


def test_encoder_weights_may_include_decoder_and_lm_head_tensors(copied: Copied) -> None:
    """Given the encoder's files with a decoder, a head and the position ids that older versions saved, it loads."""
    decoder = "decoder.block.0.layer.0.SelfAttention.q.weight"
    folder = changed(copied("wan"), "text_encoder", added(decoder))
    load(changed(folder, "text_encoder", added("lm_head.weight")), "text_encode")


def test_older_files_with_position_ids_load(copied: Copied) -> None:
    def older(tensors: dict[str, torch.Tensor]) -> None:
        tensors["text_model.embeddings.position_ids"] = torch.arange(20)[None]

    load(changed(copied("flux"), "text_encoder", older), "text_encode")


def test_known_unused_tensor_in_published_weights_is_allowed(copied: Copied) -> None:
    load(changed(copied("wan-single"), "transformer", added("norm_final.weight")), "denoise")


def test_denoiser_loads_from_an_all_in_one_checkpoint(copied: Copied) -> None:
    def whole(tensors: dict[str, torch.Tensor]) -> None:
        for key in [*tensors]:
            tensors[f"model.diffusion_model.{key}"] = tensors.pop(key)
        tensors["vae.decoder.conv_in.weight"] = torch.ones(1)

    load(changed(copied("wan-single"), "transformer", whole), "denoise")


@pytest.mark.parametrize("kind", [torch.int64, torch.int8])
def test_integer_weights_for_float_parameters_are_rejected(kind: torch.dtype, copied: Copied) -> None:
    key = "blocks.0.attn1.to_q.weight"
    folder = changed(copied("wan"), "transformer", lambda all: all.update({key: all[key].mul(127).to(kind)}))
    with pytest.raises(ConfigError, match=f"{key} (as integers|is of type)"):
        load(folder, "denoise")


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.qweight", "model.layers.0.mlp.up_proj.weight_packed"]
)
def test_quantized_language_model_without_quantization_config_is_rejected(name: str, tmp_path: Path) -> None:
    folder = make_language_model(tmp_path / "model")
    changed(folder, "", lambda all: all.update({name: torch.ones(4, 4, dtype=torch.int32)}))
    with pytest.raises(ConfigError, match=f"is quantized .*{name}"):
        find(folder).model_spec("m", folder)


def test_language_model_with_an_unused_tensor_is_rejected(tmp_path: Path) -> None:
    folder = make_language_model(tmp_path / "model")
    changed(folder, "", lambda all: all.update({"model.layers.0.self_attn.q_proj.other": torch.ones(4)}))
    with pytest.raises(ConfigError, match="have model.layers.0.self_attn.q_proj.other"):
        load(folder, "prefill")


@pytest.mark.parametrize(
    ("name", "dtype", "is_refused"),
    [
        ("a.weight", "I8", True),
        ("a.weight", "U8", True),
        ("a.weight", "I32", True),
        ("a.weight", "F4", True),
        ("a.weight.quant_state.bitsandbytes__nf4", "U8", True),
        ("a.weight.absmax", "F32", True),
        ("a.SCB", "F32", True),
        ("a.weight_scale", "F32", True),
        ("scaled_fp8", "F32", True),
        ("a.weight_scale_inv", "BF16", True),
        ("a.weight", "F32", False),
        ("a.scale", "F32", False),
        ("a.position_ids", "I64", False),
        ("a.num_batches_tracked", "I64", False),
        ("h.0.attn.bias", "U8", False),
        ("a.norm.scale", "BF16", False),
    ],
)
def test_quantized_tensors_are_detected_by_name_and_dtype(name: str, dtype: str, is_refused: bool) -> None:
    assert bool(codes({name: (dtype, 1)})) == is_refused


def test_torchao_weights_are_detected_as_quantized_and_accepted(undivided: c.Undivided) -> None:
    folder = undivided.folder("wan-int8")
    stored = ModelFolder(folder).tensors("transformer")
    assert codes(stored) and json.loads((folder / "transformer/config.json").read_text())["quantization_config"]


@pytest.mark.row("K3")
@pytest.mark.parametrize(
    ("name", "may_be_there"),
    [
        ("caption_projection.y_embedding", True),  # PixArt-alpha's own folders
        ("pos_embed", True),
        ("y_embedder.y_embedding", True),  # Sana
        ("model.diffusion_model.norm_final.weight", True),  # Lumina, as ComfyUI has it
        ("model.diffusion_model.time_embed.cond_proj.weight", True),  # merges with LCM
        ("loss.logvar", True),
        ("first_stage_model.loss.discriminator.main.0.weight", True),
        ("model_ema.decay", True),
        ("net.accum_video_sample_counter", True),
        ("net.pos_embedder.seq", True),
        ("repa_projectors.0.weight", True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("rotary_emb.cos_cached", True),
        ("vision_model.embeddings.position_ids", True),
        ("bn.num_batches_tracked", True),
        ("blocks.2.attn1.to_q.weight", False),
        ("blocks.0.attn1.to_q.other_scale", False),
        ("pos_embed.proj.weight", False),
        ("blocks.0.loss_scale", False),
        ("y_embedder.y_proj.fc1.weight", False),
        ("norm_final.bias", False),
        ("__index_timestep_zero__", False),
    ],
)
def test_known_unused_tensor_names_are_allowed_and_others_reported(name: str, may_be_there: bool) -> None:
    assert unplaced(SimpleNamespace(config=SimpleNamespace()), [name]) == ([] if may_be_there else [name])


def test_comfyui_marker_tensor_is_allowed_only_if_the_config_agrees() -> None:
    """Qwen-Image-Edit 2511 as ComfyUI has it: without `zero_cond_t` pictures would be those of an older model."""
    marks = ["__index_timestep_zero__", "model.diffusion_model.__index_timestep_zero__"]
    for is_said in (True, False):
        model = SimpleNamespace(config=SimpleNamespace(zero_cond_t=is_said))
        assert unplaced(model, marks) == ([] if is_said else marks)


def as_they_are(file: Path, tensors: dict[str, str]) -> None:
    """Write a file with one number for each name, in the dtype that safetensors calls so."""
    width = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4}
    head, end = {}, 0
    for name, dtype in tensors.items():
        head[name] = {"dtype": dtype, "shape": [], "data_offsets": [end, end := end + width[dtype]]}
    raw = json.dumps(head).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))


@pytest.mark.row("K3")
@pytest.mark.parametrize(
    ("component", "tensors", "own"),
    [
        (
            "transformer",
            {
                "model.diffusion_model.a.weight": "F16",
                "text_encoders.t5xxl.transformer.b.weight": "F8_E4M3",
                "text_encoders.t5xxl.transformer.scaled_fp8": "F8_E4M3",
            },
            {"model.diffusion_model.a.weight"},
        ),
        (
            "transformer",
            {"model.diffusion_model.a.weight": "BF16", "text_encoders.gemma2_2b.spiece_model": "U8"},
            {"model.diffusion_model.a.weight"},
        ),
        (
            "unet",
            {"model.diffusion_model.a.weight": "F32", "model_ema.num_updates": "I32", "betas": "F32"},
            {"model.diffusion_model.a.weight"},
        ),
        (
            "vae",
            {"model.diffusion_model.a.weight": "F8_E4M3", "first_stage_model.b.weight": "F16"},
            {"first_stage_model.b.weight"},
        ),
        (
            "vae",
            {"decoder.b.weight": "F32", "model_ema.num_updates": "I32", "model_ema.decay": "F32"},
            {"decoder.b.weight"},
        ),
        ("transformer", {"model.diffusion_model.a.weight": "F8_E4M3", "vae.b.weight": "BF16"}, None),
        ("transformer", {"a.weight": "F8_E4M3"}, None),
        ("vae", {"first_stage_model.b.weight": "I32", "model.diffusion_model.a.weight": "F16"}, None),
    ],
)
def test_quantized_tensors_of_other_components_in_a_file_are_ignored(
    component: str, tensors: dict[str, str], own: set[str] | None, tmp_path: Path
) -> None:
    """As in Stability's SD3 with its T5 in 8 bits, Lumina with a tokenizer inside, and SD 1.5 with its averages."""
    folder = tmp_path / component
    folder.mkdir()
    (folder / "config.json").write_text('{"_class_name": "Any"}')
    (tmp_path / "model_index.json").write_text(json.dumps({component: ["diffusers", "Any"]}))
    as_they_are(folder / "all.safetensors", tensors)

    if own is None:
        with pytest.raises(ConfigError, match=r"8-bit floats|is quantized"):
            ModelFolder(tmp_path).tensors(component)
    else:
        assert ModelFolder(tmp_path).tensors(component).keys() == own
