"""Tiny models of random weights, made by the real classes, in diffusers' layout.

    python -m tools.tiny KIND FOLDER

The same bytes every time. Kinds of one family share their text encoders and VAE, as published models do. Scale factors
are not the usual ones, and the text path is loud enough that another prompt makes another picture.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

TEXT_DIM, POOLED_DIM, IMAGE_DIM, CHANNELS = 32, 24, 24, 4
LAYERS = {"num_layers": 2, "num_attention_heads": 2}

KINDS = (
    "wan",
    "wan-euler",
    "wan-image",
    "wan-image-euler",
    "wan-image-last",
    "wan-2.2",
    "wan-2.2-image",
    "wan-2.2-5b",
    "wan-2.2-5b-image",
    "flux",
    "flux-schnell",
    "hunyuan-video",
    "qwen-image",
    "klein",
    "klein-distilled",
    "krea",
    "krea-distilled",
    "sdxl",
    "sd3",
    "sd3-medium",
    "z-image",
    "ltx",
    "ltx-timed",
    "kontext",
)
PICTURES = ("flux", "qwen", "klein", "krea", "sd", "z", "kontext")
"""What the kinds begin with that make no videos."""

SERVING = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 24}
"""Defaults, so that a server makes something in no time."""


def build(kind: str, folder: Path, serving: bool = True) -> Path:
    """Save a model of that kind in a folder; returns the folder. A few tenths of a second, beside imports."""
    import torch

    with torch.random.fork_rng(devices=[]):
        families = {
            "flux": _flux,
            "hunyuan": _hunyuan,
            "klein": _klein,
            "krea": _krea,
            "kontext": _kontext,
            "ltx": _ltx,
            "qwen": _qwen,
            "sd3": _sd3,
            "sdxl": _sdxl,
            "wan": _wan,
            "z": _z,
        }
        make = families[kind.partition("-")[0]]
        pipe = make(kind)
    pipe.save_pretrained(folder)
    if serving:
        own = {} if kind.startswith(PICTURES) else {"num_frames": 5}
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


def _bytes_tokenizer(template: str = "", start: int = 0) -> Any:
    """One token a byte, so that any two texts differ; what a template begins with is so many tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    found = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    if template:
        first, _, last = template.partition("{}")
        fast.add_tokens([first[: 1 - start]] + [last] * (last not in first))
        assert len(fast(first).input_ids) == start + 1
    return fast


def _clip_tokenizer(length: int = 20) -> Any:
    """CLIP's own, without merges, and shorter than any other text here."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    return CLIPTokenizerFast(
        vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=length
    )


def _wan(kind: str) -> Any:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
    )
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    tokenizer = _bytes_tokenizer()
    sizes = {"d_model": TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    encoder = _seeded(1, lambda: UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **sizes)))
    small, second = "5b" in kind, kind.startswith("wan-2.2") and "5b" not in kind
    vae = _wan_vae(small)
    picture = kind.startswith("wan-image") or kind.endswith("-image")
    sees = picture and "2.2" not in kind
    own = {"in_channels": CHANNELS, "rope_max_seq_len": 64 if kind == "wan-image-euler" else 32}
    if picture and not small:
        own |= {"in_channels": 2 * CHANNELS + 2}
    if kind.endswith("even"):  # its numbers come in 32s
        own |= {"attention_head_dim": 16}
    if sees:
        own |= {"image_dim": IMAGE_DIM, "added_kv_proj_dim": 24}
    if kind.endswith("last"):  # CLIP's tokens of two pictures
        own |= {"pos_embed_seq_len": 34}
    transformer, low = (_wan_transformer(seed, own) for seed in (3, 23))
    if kind.endswith("euler"):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    else:
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
        scheduler = UniPCMultistepScheduler(**flow)
    how = {"transformer_2": low, "boundary_ratio": 0.875} if second else {"expand_timesteps": small}
    if not picture:
        return WanPipeline(tokenizer, encoder, vae, scheduler, transformer, **how)
    clip = {"intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32}
    eye = _seeded(4, lambda: CLIPVisionModel(CLIPVisionConfig(hidden_size=IMAGE_DIM, patch_size=8, **clip)))
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    seen = (processor, eye) if sees else (None, None)
    return WanImageToVideoPipeline(tokenizer, encoder, vae, scheduler, *seen, transformer, **how)


def _wan_vae(small: bool) -> Any:
    """That of the 5B in small, of factor 16 and with patches; or one of factor 4."""
    from diffusers import AutoencoderKLWan

    own = {
        "dim_mult": [1, 2, 2],
        "temperal_downsample": [True, False],
        "scale_factor_spatial": 4,
        "scale_factor_temporal": 2,
    }
    if small:
        own = {
            "dim_mult": [1, 1, 2, 2],
            "temperal_downsample": [False, True, True],
            "scale_factor_spatial": 16,
            "scale_factor_temporal": 4,
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
        }
    return _seeded(
        2,
        lambda: AutoencoderKLWan(
            base_dim=8,
            z_dim=CHANNELS,
            num_res_blocks=1,
            latents_mean=[0.1, -0.3, 0.7, 0.0],
            latents_std=[1.7, 2.3, 0.9, 3.1],
            **own,
        ),
    )


def _wan_transformer(seed: int, own: dict[str, Any]) -> Any:
    from diffusers import WanTransformer3DModel

    transformer = _seeded(
        seed,
        lambda: WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            out_channels=CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=32,
            ffn_dim=48,
            num_layers=2,
            **{"attention_head_dim": 12, **own},
        ),
    )
    _louder(
        text=(transformer.condition_embedder.text_embedder.linear_2.weight, 20),
        first=(transformer.blocks[0].attn2.to_out[0].weight, 5),
        second=(transformer.blocks[1].attn2.to_out[0].weight, 5),
        out=(transformer.proj_out.weight, 5),
    )
    return transformer


def _clip(length: int = 20) -> tuple[Any, Any]:
    """Tokenizer and text encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = _clip_tokenizer(length)
    sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": POOLED_DIM}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=POOLED_DIM, max_position_embeddings=length, **sizes, **ends
    )
    return tokenizer, _seeded(5, lambda: CLIPTextModel(config))


def _flux(kind: str) -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    (tokenizer, encoder), tokenizer_2 = _clip(), _bytes_tokenizer()
    sizes = {"d_model": TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    encoder_2 = _seeded(6, lambda: T5EncoderModel(T5Config(vocab_size=len(tokenizer_2), **sizes)))
    vae = _seeded(
        7,
        lambda: AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 3,
            up_block_types=["UpDecoderBlock2D"] * 3,
            block_out_channels=[8, 16, 16],
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=CHANNELS,
            sample_size=48,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
    )
    dev = kind == "flux"
    transformer = _seeded(
        8 if dev else 9,
        lambda: FluxTransformer2DModel(
            in_channels=4 * CHANNELS,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=12,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            pooled_projection_dim=POOLED_DIM,
            axes_dims_rope=(4, 4, 4),
            guidance_embeds=dev,
        ),
    )
    _louder(
        text=(transformer.context_embedder.weight, 5),
        pooled=(transformer.time_text_embed.text_embedder.linear_2.weight, 20),
        out=(transformer.proj_out.weight, 5),
    )
    shift = {"shift": 3.0, "use_dynamic_shifting": True} if dev else {"shift": 1.0}
    scheduler = FlowMatchEulerDiscreteScheduler(**shift)
    return FluxPipeline(scheduler, vae, encoder, tokenizer, encoder_2, tokenizer_2, transformer)


def _kontext(kind: str) -> Any:
    """The encoders of FLUX.1, and a VAE of factor 16, since a reference has a megapixel."""
    from diffusers import FluxKontextPipeline

    flux = _flux("flux").components
    vae = _vae(57, 5, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159)
    del flux["image_encoder"], flux["feature_extractor"]
    return FluxKontextPipeline(**{**flux, "vae": vae})


def _hunyuan(kind: str) -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
    from transformers import LlamaConfig, LlamaModel

    tokenizer = _bytes_tokenizer(DEFAULT_PROMPT_TEMPLATE["template"], DEFAULT_PROMPT_TEMPLATE["crop_start"])
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    encoder = _seeded(11, lambda: LlamaModel(llama))
    tokenizer_2, encoder_2 = _clip(77)
    vae = _seeded(
        12,
        lambda: AutoencoderKLHunyuanVideo(
            latent_channels=CHANNELS,
            block_out_channels=(8, 8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 3,
            up_block_types=("HunyuanVideoUpBlock3D",) * 3,
            scaling_factor=0.4769,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
    )
    transformer = _seeded(
        13,
        lambda: HunyuanVideoTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=TEXT_DIM,
            pooled_projection_dim=POOLED_DIM,
            rope_axes_dim=(4, 4, 4),
            guidance_embeds=True,
        ),
    )
    _louder(
        text=(transformer.context_embedder.proj_in.weight, 5),
        pooled=(transformer.time_text_embed.text_embedder.linear_2.weight, 20),
        guidance=(transformer.time_text_embed.guidance_embedder.linear_2.weight, 20),
        out=(transformer.proj_out.weight, 5),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    return HunyuanVideoPipeline(encoder, tokenizer, transformer, vae, scheduler, encoder_2, tokenizer_2)


def _qwen(kind: str) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel
    from diffusers.modular_pipelines.qwenimage import prompt_templates as templates
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    template, start = templates.QWENIMAGE_PROMPT_TEMPLATE, templates.QWENIMAGE_PROMPT_TEMPLATE_START_IDX
    tokenizer = _bytes_tokenizer(template, start)
    language = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_DIM,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT_DIM}
    config = Qwen2_5_VLConfig(text_config=language, vision_config=eyes)
    encoder = _seeded(14, lambda: Qwen2_5_VLForConditionalGeneration(config))
    vae = _qwen_vae()
    transformer = _seeded(
        16,
        lambda: QwenImageTransformer2DModel(
            in_channels=4 * CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=12,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=(4, 4, 4),
        ),
    )
    _louder(text=(transformer.txt_in.weight, 20), out=(transformer.proj_out.weight, 5))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return QwenImagePipeline(scheduler, vae, encoder, tokenizer, transformer)


def _qwen_vae() -> Any:
    from diffusers import AutoencoderKLQwenImage

    return _seeded(
        15,
        lambda: AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[True, False],
            latents_mean=[0.2, -0.1, 0.5, 0.3],
            latents_std=[1.3, 2.1, 0.8, 2.7],
        ),
    )


def _klein(kind: str) -> Any:
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _bytes_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}!"
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=28,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
    )
    encoder = _seeded(17, lambda: Qwen3ForCausalLM(config))
    vae = _seeded(
        18,
        lambda: AutoencoderKLFlux2(
            down_block_types=["DownEncoderBlock2D"] * 3,
            up_block_types=["UpDecoderBlock2D"] * 3,
            block_out_channels=[8, 16, 16],
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=CHANNELS,
            sample_size=48,
        ),
    )
    transformer = _seeded(
        19,
        lambda: Flux2Transformer2DModel(
            in_channels=4 * CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
    )
    _louder(text=(transformer.context_embedder.weight, 5), out=(transformer.proj_out.weight, 5))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    distilled = kind.endswith("distilled")
    return Flux2KleinPipeline(scheduler, vae, encoder, tokenizer, transformer, is_distilled=distilled)


def _krea(kind: str) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
    from diffusers.modular_pipelines.qwenimage import prompt_templates as templates
    from transformers import Qwen3VLConfig, Qwen3VLModel

    template, start = templates.QWENIMAGE_PROMPT_TEMPLATE, templates.QWENIMAGE_PROMPT_TEMPLATE_START_IDX
    tokenizer = _bytes_tokenizer(template, start)
    language = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "pad_token_id": 0,
    }
    eyes = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    encoder = _seeded(20, lambda: Qwen3VLModel(Qwen3VLConfig(text_config=language, vision_config=eyes)))
    transformer = _seeded(
        21,
        lambda: Krea2Transformer2DModel(
            in_channels=4 * CHANNELS,
            num_layers=2,
            attention_head_dim=12,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=32,
            timestep_embed_dim=32,
            text_hidden_dim=16,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=24,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 4, 4),
        ),
    )
    _louder(text=(transformer.txt_in.linear_1.weight, 5), out=(transformer.final_layer.linear.weight, 5))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    distilled = kind.endswith("distilled")
    return Krea2Pipeline(scheduler, _qwen_vae(), encoder, tokenizer, transformer, is_distilled=distilled)


def _vae(seed: int, blocks: int = 3, **own: Any) -> Any:
    from diffusers import AutoencoderKL

    return _seeded(
        seed,
        lambda: AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * blocks,
            up_block_types=["UpDecoderBlock2D"] * blocks,
            block_out_channels=[8, *[16] * (blocks - 1)],
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=CHANNELS,
            sample_size=48,
            **own,
        ),
    )


def _unet(seed: int, **own: Any) -> Any:
    from diffusers import UNet2DConditionModel

    usual = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "block_out_channels": (16, 32),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
        "attention_head_dim": 4,
    }
    unet = _seeded(
        seed,
        lambda: UNet2DConditionModel(
            sample_size=16,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            layers_per_block=1,
            norm_num_groups=4,
            **{**usual, **own},
        ),
    )
    _louder(out=(unet.conv_out.weight, 3))
    return unet


def _t5(umt5: bool = False, width: int = TEXT_DIM) -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    tokenizer = _bytes_tokenizer()
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config, kind = (UMT5Config, UMT5EncoderModel) if umt5 else (T5Config, T5EncoderModel)
    return tokenizer, _seeded(31, lambda: kind(config(vocab_size=len(tokenizer), **sizes)))


def _projected(seed: int, tokenizer: Any, width: int, projected: int) -> Any:
    """CLIP with what it projects of all tokens."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": projected}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    length = tokenizer.model_max_length
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, max_position_embeddings=length, **sizes, **ends
    )
    return _seeded(seed, lambda: CLIPTextModelWithProjection(config))


def _sdxl(kind: str) -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    tokenizer, encoder = _clip()
    second = _projected(35, tokenizer, 32, 16)
    unet = _unet(
        36,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        cross_attention_dim=POOLED_DIM + 32,
        projection_class_embeddings_input_dim=16 + 6 * 8,
    )
    usual = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    scheduler = EulerDiscreteScheduler(timestep_spacing="leading", **usual)
    return StableDiffusionXLPipeline(_vae(37), encoder, second, tokenizer, tokenizer, unet, scheduler)


def _sd3(kind: str) -> Any:
    """Of 3.5, large, or medium, in which the picture also sees itself alone."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    tokenizer, _ = _clip()
    one, two = _projected(38, tokenizer, 24, 24), _projected(39, tokenizer, 32, 16)
    tokenizer_3, three = _t5(width=64)
    dual = (0,) if kind.endswith("medium") else ()
    transformer = _seeded(
        40,
        lambda: SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=CHANNELS,
            attention_head_dim=12,
            **LAYERS,
            caption_projection_dim=24,
            joint_attention_dim=64,
            pooled_projection_dim=40,
            out_channels=CHANNELS,
            qk_norm="rms_norm",
            dual_attention_layers=dual,
        ),
    )
    _louder(text=(transformer.context_embedder.weight, 5), out=(transformer.proj_out.weight, 5))
    vae = _vae(41, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return StableDiffusion3Pipeline(transformer, scheduler, vae, one, tokenizer, two, tokenizer, three, tokenizer_3)


def _z(kind: str) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = _bytes_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}!"
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
    )
    encoder = _seeded(54, lambda: Qwen3Model(config))
    transformer = _seeded(
        55,
        lambda: ZImageTransformer2DModel(
            in_channels=CHANNELS,
            dim=24,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=TEXT_DIM,
            axes_dims=[4, 4, 4],
            axes_lens=[128, 64, 64],
        ),
    )
    _louder(text=(transformer.cap_embedder[1].weight, 5), out=(transformer.all_final_layer["2-1"].linear.weight, 5))
    vae = _vae(56, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159, scaling_factor=0.3611)
    return ZImagePipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), vae, encoder, tokenizer, transformer)


def _ltx(kind: str) -> Any:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    tokenizer, encoder = _t5()
    vae = _seeded(
        46,
        lambda: AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False,) * 5,
            upsample_residual=(False,) * 4,
            upsample_factor=(1,) * 4,
            patch_size=1,
            patch_size_t=1,
            encoder_causal=True,
            decoder_causal=False,
            timestep_conditioning=kind.endswith("timed"),
        ),
    )
    transformer = _seeded(
        47,
        lambda: LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            attention_head_dim=12,
            **LAYERS,
            cross_attention_dim=24,
            caption_channels=TEXT_DIM,
        ),
    )
    _louder(text=(transformer.caption_projection.linear_1.weight, 5), out=(transformer.proj_out.weight, 5))
    return LTXPipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), vae, encoder, tokenizer, transformer)


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

    index = json.loads((model / "model_index.json").read_text())
    part = "unet" if "unet" in index else "transformer"
    transformer = getattr(diffusers, index[part][1]).from_pretrained(model / part)
    how = LoraConfig(
        r=rank,
        lora_alpha=alpha or rank,
        rank_pattern=ranks,
        alpha_pattern={} if alpha else ranks,
        target_modules=["to_q", "to_k", "to_v", "to_out.0"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer.add_adapter(how)
        layers = {key: 0.5 * torch.randn_like(half) for key, half in get_peft_model_state_dict(transformer).items()}
    saved = _collate_lora_metadata({part: transformer}) if alpha else {}
    pipeline, file = getattr(diffusers, index["_class_name"]), f"{name}.safetensors"
    pipeline.save_lora_weights(folder, **{f"{part}_lora_layers": layers}, weight_name=file, **saved)
    return folder / file


ORIGINAL = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_out.0": "o",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "proj_out": "head.head",
    "norm2": "norm3",
}
"""What Wan's own names are for diffusers'."""


def tuned(model: Path, folder: Path, *, original: bool = False, quantized: bool = False) -> Path:
    """A copy of a Wan model whose transformer is one file: by Wan's own names, or GGUF with 8 bits where these fit."""
    import numpy as np
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors, own = load_file(file), {}
    file.unlink()
    for key, tensor in tensors.items():
        if original:
            key = "head.modulation" if key == "scale_shift_table" else key.replace("scale_shift_table", "modulation")
            for name, its in ORIGINAL.items():
                key = key.replace(name, its)
        own[key] = tensor
    if not quantized:
        save_file(own, folder / "transformer/tuned.safetensors")
        return folder
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(folder / "transformer/tuned-Q8_0.gguf", "wan")
    for key, tensor in own.items():
        plain = tensor.float().numpy()
        if plain.ndim == 2 and plain.shape[1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(key, quants.quantize(plain, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, np.ascontiguousarray(plain))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def quantized(model: Path, folder: Path, how: str, dtype: str = "float32") -> Path:
    """A copy of a model whose transformer and first text encoder torchao has quantized so, for computing in a dtype."""
    import torch
    import torchao.quantization

    shutil.copytree(model, folder)
    index = json.loads((folder / "model_index.json").read_text())
    for part in ("transformer", "text_encoder"):
        library, name = index[part]
        module = import_module(library)
        config = module.TorchAoConfig(getattr(torchao.quantization, how)())
        kind, given = getattr(module, name), {"quantization_config": config, "dtype": getattr(torch, dtype)}
        made = kind.from_pretrained(model / part, **given)
        shutil.rmtree(folder / part)
        made.save_pretrained(folder / part)
    return folder


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
