"""Models of real width with few blocks and random weights, built on the device from configurations, without downloads.

Times scale with the number of blocks; memory beside the weights does not depend on it.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.model import Halves
from tools import tiny
from unfuse.weights.folder import INDEX

#: Builds a component.
Build = Callable[[], Any]


@dataclass(frozen=True)
class Subject:
    """A model to measure, and the request that is sent to it."""

    #: The kind of tiny model whose layout it has.
    kind: str

    #: How the halves of guidance are computed.
    halves: tuple[Halves, ...]

    #: Width, height and frames of the request.
    request: tuple[int, int, int]

    #: Steps of the request.
    steps: int

    #: Sides of square pictures, for batches.
    sides: tuple[int, ...]

    #: The components that replace those of the tiny model.
    components: dict[str, Build] = field(default_factory=dict)

    #: Blocks of the published model over those of this one.
    blocks_ratio: float = 1.0


def umt5_xxl(layers: int = 1) -> Any:
    """Return the text encoder of Wan 2.1, which has 24 layers."""
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": layers, "num_heads": 64}
    return UMT5EncoderModel(UMT5Config(vocab_size=256384, **sizes))


def wan_1_3b(blocks: int = 6) -> Any:
    """Return the transformer of Wan 2.1 1.3B, which has 30 blocks."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=12,
        attention_head_dim=128,
        in_channels=16,
        out_channels=16,
        text_dim=4096,
        freq_dim=256,
        ffn_dim=8960,
        num_layers=blocks,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )


def wan_vae(width: int = 96) -> Any:
    """Return the VAE of Wan 2.1, with all blocks."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=width, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True]
    )


def t5_xxl(layers: int = 1) -> Any:
    """Return the second text encoder of FLUX.1, which has 24 layers."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": layers, "num_heads": 64}
    return T5EncoderModel(T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **sizes))


def clip_l() -> Any:
    """Return the whole first text encoder of FLUX.1."""
    from transformers import CLIPTextConfig, CLIPTextModel

    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}  # the tiny tokenizer's
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=77,
            projection_dim=768,
            **ends,
        )
    )


def flux_12b(blocks: int = 4, single_blocks: int = 8) -> Any:
    """Return the transformer of FLUX.1, which has 19 blocks and 38 single blocks."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=blocks,
        num_single_layers=single_blocks,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        guidance_embeds=True,
        axes_dims_rope=(16, 56, 56),
    )


def flux_vae(width: int = 128) -> Any:
    """Return the VAE of FLUX.1, with all blocks."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[width, 2 * width, 4 * width, 4 * width],
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=32,
        sample_size=1024,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


#: Widths as published, by black-forest-labs/FLUX.1-dev and Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
REAL = {
    "flux": Subject(
        "flux",
        ("apart",),
        (1024, 1024, 1),
        4,
        (512, 1024),
        {"text_encoder": clip_l, "text_encoder_2": t5_xxl, "transformer": flux_12b, "vae": flux_vae},
        57 / 12,
    ),
    "wan": Subject(
        "wan",
        ("apart", "fused"),
        (832, 480, 17),
        4,
        (256, 512),
        {"text_encoder": umt5_xxl, "transformer": wan_1_3b, "vae": wan_vae},
        30 / 6,
    ),
}

TINY = {
    "flux": Subject("flux", ("apart",), (32, 32, 1), 6, (32, 64)),
    "wan": Subject("wan", ("apart", "fused"), (48, 32, 5), 6, (32, 64)),
}


def build(subject: Subject, root: Path, device: str) -> Path:
    """Return the folder of the model under `root`, built on the device unless it is there.

    Tokenizers and noise schedulers are those of the tiny model.
    """
    folder = root / (subject.kind if subject.components else f"{subject.kind}-tiny")
    if (folder / INDEX).exists():
        return folder
    unfinished = folder.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    tiny.build(subject.kind, unfinished, serving=not subject.components)
    for name, make in subject.components.items():
        shutil.rmtree(unfinished / name)
        model = create(make, device)
        model.save_pretrained(unfinished / name, max_shard_size="8GB")
        del model
        free_memory()
    tokenizer = unfinished / "tokenizer" / "tokenizer_config.json"
    if "text_encoder_2" in subject.components:  # CLIP's tokenizer: the tiny one ends after 20 tokens
        tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": 77}))
    unfinished.rename(folder)
    return folder


def build_llama(root: Path, tiny_model: bool, device: str) -> Path:
    """Return the folder of a Llama of width 4096 with 8 layers; of a tiny one if `tiny_model`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tools.tiny_language import TEMPLATE, make_language_model, save_tokenizer

    folder = root / ("llama-tiny" if tiny_model else "llama")
    if (folder / "config.json").exists():
        return folder
    if tiny_model:
        make_language_model(folder)
        return folder
    tokenizer = save_tokenizer(folder, TEMPLATE)
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        bos_token_id=None,
        pad_token_id=0,
    )
    create(lambda: LlamaForCausalLM(config), device).save_pretrained(folder)
    free_memory()
    return folder


def create(make: Build, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a component with random weights in this dtype, on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def free_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
