"""`--attention`: every name is set, or refused in a sentence."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel
from diffusers.models.attention_dispatch import AttentionBackendName

from unfuse.core.compute_options import parse_parallel
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.plan import StageSpec
from unfuse.stages.attention import BACKENDS, check_attention, check_masks, set_attention
from unfuse.stages.specs import DENOISE, PREFILL, VAE_DECODE

ON_CPU = [name for name, needs in BACKENDS.items() if not needs.devices or "cpu" in needs.devices]


def transformer(dtype: torch.dtype = torch.float32) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        in_channels=4,
    ).to(dtype)


@torch.no_grad()
def predicted(model: FluxTransformer2DModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shapes = {"hidden_states": (1, 4, 4), "encoder_hidden_states": (1, 3, 32), "pooled_projections": (1, 32)}
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    ids = {"img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(3, 3)}
    output: torch.Tensor = model(**inputs, **ids, timestep=torch.ones(1), return_dict=False)[0]
    return output


def test_names_are_those_of_diffusers_that_need_no_download() -> None:
    """Those of other accelerators are left out: no such device is supported."""
    others = {"_native_npu", "_native_xla"}
    assert {*BACKENDS} == {name.value for name in AttentionBackendName if not name.value.endswith("_hub")} - others


@pytest.mark.parametrize(
    "name", [name for name, needs in BACKENDS.items() if not needs.devices or "cpu" in needs.devices]
)
def test_attention_of_a_cpu_gives_about_the_default_results(name: str) -> None:
    model = transformer()
    expected = predicted(model)
    set_attention(model, name, "transformer", "cpu")
    assert {block.attn.processor._attention_backend.value for block in model.transformer_blocks} == {name}
    assert torch.allclose(predicted(model), expected, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name, needs in BACKENDS.items() if needs.devices and "cpu" not in needs.devices]
)
def test_attention_that_does_not_compute_on_a_cpu_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--attention {name} does not compute on cpu.* or one of native, "):
        set_attention(transformer(), name, "transformer", "cpu")


@pytest.mark.parametrize("name", [name for name, needs in BACKENDS.items() if needs.package])
def test_attention_whose_package_is_missing_is_refused_on_a_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match=f"needs the package {BACKENDS[name].package}"):
        set_attention(transformer(torch.bfloat16), name, "transformer", "cuda")


@pytest.mark.parametrize("name", [name for name, needs in BACKENDS.items() if needs.is_half])
def test_attention_in_16_bit_is_refused_for_float32_on_a_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match="add --dtype transformer=bfloat16"):
        set_attention(transformer(), name, "transformer", "cuda")


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_without_masks_is_refused_for_models_with_masks(name: str) -> None:
    check_masks(name, ())
    if BACKENDS[name].has_masks:
        check_masks(name, ("prompt_embeds_mask",))
    else:
        with pytest.raises(ConfigError, match="padding of prompts.* use one of native, "):
            check_masks(name, ("prompt_embeds_mask",))


def test_attention_of_a_unet_is_refused() -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            block_out_channels=(8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )
    with pytest.raises(ConfigError, match="the attention of unet, a UNet2DConditionModel, cannot be chosen"):
        set_attention(unet, "_native_math", "unet", "cpu")


def test_attention_of_a_vae_and_of_other_modules_is_left_as_it_is() -> None:
    with torch.device("meta"):
        set_attention(AutoencoderKL(), "sage", "vae", "cpu")
        set_attention(torch.nn.Linear(1, 1), "sage", "text_encoder", "cpu")


def test_default_attention_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers takes its default from DIFFUSERS_ATTN_BACKEND, which would change bytes and no pool."""
    model = transformer()
    set_attention(model, "native", "transformer", "cpu")
    assert model.transformer_blocks[0].attn.processor._attention_backend is AttentionBackendName.NATIVE


@pytest.mark.parametrize(
    ("name", "stages", "parallel", "error", "message"),
    [
        ("flash3", [DENOISE], "", UsageError, "unknown backend; known are native, "),
        ("sage_hub", [DENOISE], "", ConfigError, "no code that it downloads.* use sage$"),
        ("sage", [PREFILL, VAE_DECODE], "", ConfigError, "no model here has one"),
        (
            "sage",
            [DENOISE],
            "denoiser=ulysses:2",
            ConfigError,
            "--parallel denoiser=ulysses, which has",
        ),
        ("_native_math", [DENOISE], "denoiser=ring:2+cfg:2", ConfigError, "--parallel denoiser=ring"),
    ],
)
def test_unusable_attention_is_refused_before_anything_is_loaded(
    name: str, stages: list[StageSpec], parallel: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_attention(name, stages, parse_parallel(parallel))


def test_attention_is_refused_before_anything_is_loaded_only_where_it_is_unusable() -> None:
    check_attention("native", [PREFILL])
    check_attention("sage", [DENOISE], parse_parallel("denoiser=tensor:2+cfg:2,decoder=tiles:2"))
