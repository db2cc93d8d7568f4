"""Tiny models of random weights, made by the real classes, in diffusers' layout.

    python -m tests.models.tiny KIND FOLDER

The same bytes every time. Kinds of one family share their text encoders and VAE, as published models do. Scale factors
are not the usual ones, and the text path is loud enough that another prompt makes another picture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT_DIM, POOLED_DIM, IMAGE_DIM, CHANNELS = 32, 24, 24, 4

KINDS = ("wan", "wan-euler", "wan-image", "wan-image-euler", "flux", "flux-schnell")

SERVING = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 24}
"""Defaults, so that a server makes something in no time."""


def build(kind: str, folder: Path, serving: bool = True) -> Path:
    """Save a model of that kind in a folder; returns the folder. A few tenths of a second, beside imports."""
    import torch

    with torch.random.fork_rng(devices=[]):
        pipe = _flux(kind) if kind.startswith("flux") else _wan(kind)
    pipe.save_pretrained(folder)
    if serving:
        own = {} if kind.startswith("flux") else {"num_frames": 5}
        (folder / "serving.json").write_text(json.dumps({"defaults": SERVING | own}))
    return folder


def _seeded(seed: int, make: Callable[[], Any]) -> Any:
    """Weights that depend on nothing but the seed."""
    import torch

    torch.manual_seed(seed)
    return make().eval()


def _louder(**weights: tuple[Any, float]) -> None:
    """Random weights hardly listen: scale those that do."""
    import torch

    with torch.no_grad():
        for weight, factor in weights.values():
            weight.mul_(factor)


def _bytes_tokenizer() -> Any:
    """One token a byte, so that any two texts differ."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    found = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _clip_tokenizer() -> Any:
    """CLIP's own, without merges, and shorter than any other text here."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    return CLIPTokenizerFast(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=20)


def _wan(kind: str) -> Any:
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    tokenizer = _bytes_tokenizer()
    sizes = {"d_model": TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    encoder = _seeded(1, lambda: UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **sizes)))
    vae = _seeded(2, lambda: AutoencoderKLWan(
        base_dim=8, z_dim=CHANNELS, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, False],
        latents_mean=[0.1, -0.3, 0.7, 0.0], latents_std=[1.7, 2.3, 0.9, 3.1],
        scale_factor_spatial=4, scale_factor_temporal=2,
    ))  # fmt: skip
    picture = kind.startswith("wan-image")
    own = {"in_channels": CHANNELS}
    if picture:
        own = {"in_channels": 2 * CHANNELS + 2, "image_dim": IMAGE_DIM, "added_kv_proj_dim": 24}
    transformer = _seeded(3, lambda: WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, out_channels=CHANNELS,
        text_dim=TEXT_DIM, freq_dim=32, ffn_dim=48, num_layers=2, rope_max_seq_len=32, **own,
    ))  # fmt: skip
    _louder(
        text=(transformer.condition_embedder.text_embedder.linear_2.weight, 20),
        first=(transformer.blocks[0].attn2.to_out[0].weight, 5),
        second=(transformer.blocks[1].attn2.to_out[0].weight, 5),
        out=(transformer.proj_out.weight, 5),
    )
    if kind.endswith("euler"):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    else:
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
        scheduler = UniPCMultistepScheduler(**flow)
    if not picture:
        return WanPipeline(tokenizer, encoder, vae, scheduler, transformer)
    clip = {"intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32}
    eye = _seeded(4, lambda: CLIPVisionModel(CLIPVisionConfig(hidden_size=IMAGE_DIM, patch_size=8, **clip)))
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return WanImageToVideoPipeline(tokenizer, encoder, vae, scheduler, processor, eye, transformer)


def _flux(kind: str) -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    tokenizer, tokenizer_2 = _clip_tokenizer(), _bytes_tokenizer()
    sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": POOLED_DIM}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    clip_config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=POOLED_DIM, max_position_embeddings=20, **sizes, **ends
    )
    encoder = _seeded(5, lambda: CLIPTextModel(clip_config))
    sizes = {"d_model": TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    encoder_2 = _seeded(6, lambda: T5EncoderModel(T5Config(vocab_size=len(tokenizer_2), **sizes)))
    vae = _seeded(7, lambda: AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[8, 16, 16], layers_per_block=1, norm_num_groups=4, latent_channels=CHANNELS,
        sample_size=48, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
    ))  # fmt: skip
    dev = kind == "flux"
    transformer = _seeded(8 if dev else 9, lambda: FluxTransformer2DModel(
        in_channels=4 * CHANNELS, num_layers=1, num_single_layers=2, attention_head_dim=12, num_attention_heads=2,
        joint_attention_dim=TEXT_DIM, pooled_projection_dim=POOLED_DIM, axes_dims_rope=(4, 4, 4), guidance_embeds=dev,
    ))  # fmt: skip
    _louder(
        text=(transformer.context_embedder.weight, 5),
        pooled=(transformer.time_text_embed.text_embedder.linear_2.weight, 20),
        out=(transformer.proj_out.weight, 5),
    )
    shift = {"shift": 3.0, "use_dynamic_shifting": True} if dev else {"shift": 1.0}
    scheduler = FlowMatchEulerDiscreteScheduler(**shift)
    return FluxPipeline(scheduler, vae, encoder, tokenizer, encoder_2, tokenizer_2, transformer)


def adapter(
    model: Path, folder: Path, name: str, seed: int, rank: int = 4, alpha: float | None = None, **ranks: int
) -> Path:
    """Save an adapter (LoRA) for a model's attention, by diffusers and peft, of random weights that show.

    `ranks` are those of layers with another one, by their last name. Without `alpha` the file says none.
    """
    import diffusers
    import torch
    from diffusers.training_utils import _collate_lora_metadata
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    index, config = (json.loads((model / f).read_text()) for f in ("model_index.json", "transformer/config.json"))
    transformer = getattr(diffusers, config["_class_name"]).from_pretrained(model / "transformer")
    how = LoraConfig(
        r=rank, lora_alpha=alpha or rank, rank_pattern=ranks, alpha_pattern={} if alpha else ranks,
        target_modules=["to_q", "to_k", "to_v", "to_out.0"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer.add_adapter(how)
        layers = {key: 0.5 * torch.randn_like(half) for key, half in get_peft_model_state_dict(transformer).items()}
    saved = _collate_lora_metadata({"transformer": transformer}) if alpha else {}
    pipeline, file = getattr(diffusers, index["_class_name"]), f"{name}.safetensors"
    pipeline.save_lora_weights(folder, transformer_lora_layers=layers, weight_name=file, **saved)
    return folder / file


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
