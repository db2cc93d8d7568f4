"""Tiny models of random weights for pipelines that unfuse has no family for: `python -m tools.tiny_whole KIND FOLDER`.

As those of `tools.tiny`: made by the real classes, the same bytes every time, loud enough to listen to their text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.tiny import (
    CHANNELS,
    LAYERS,
    SERVING,
    TEXT_DIM,
    _bytes_tokenizer,
    _clip,
    _klein,
    _louder,
    _ltx,
    _qwen,
    _seeded,
    _t5,
    _unet,
    _vae,
)
from tools.tiny_vision import TOKENS


def build(kind: str, folder: Path, serving: bool = True) -> Path:
    """Save a model of that kind in a folder; returns the folder."""
    import torch

    with torch.random.fork_rng(devices=[]):
        pipe = KINDS[kind]()
    pipe.save_pretrained(folder)
    if serving:
        own = {"num_frames": 9} if kind in VIDEOS else {}
        (folder / "serving.json").write_text(json.dumps({"defaults": {**SERVING, **own}}))
    return folder


def _gemma() -> tuple[Any, Any]:
    from transformers import Gemma2Config, Gemma2Model

    tokenizer = _bytes_tokenizer()
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    return tokenizer, _seeded(32, lambda: Gemma2Model(config))


def _sd(kind: str) -> Any:
    import diffusers

    tokenizer, encoder = _clip()
    usual = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, **usual)
    return getattr(diffusers, kind)(
        _vae(33), encoder, tokenizer, _unet(34), scheduler, None, None, requires_safety_checker=False
    )


def _pixart(kind: str, seed: int) -> Any:
    import diffusers

    tokenizer, encoder = _t5()
    transformer = _seeded(
        seed,
        lambda: diffusers.PixArtTransformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=CHANNELS,
            out_channels=2 * CHANNELS,
            attention_head_dim=12,
            **LAYERS,
            cross_attention_dim=24,
            caption_channels=TEXT_DIM,
        ),
    )
    _louder(text=(transformer.caption_projection.linear_1.weight, 5), out=(transformer.proj_out.weight, 5))
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return getattr(diffusers, kind)(tokenizer, encoder, _vae(43), transformer, scheduler)


def _sana() -> Any:
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    tokenizer, encoder = _gemma()
    blocks = {"block_out_channels": (16, 16, 16), "layers_per_block": (1, 1, 1), "qkv_multiscales": ((), (), ())}
    vae = _seeded(
        44,
        lambda: AutoencoderDC(
            in_channels=3,
            latent_channels=CHANNELS,
            attention_head_dim=4,
            upsample_block_type="interpolate",
            **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in blocks.items()},
        ),
    )
    transformer = _seeded(
        45,
        lambda: SanaTransformer2DModel(
            patch_size=1,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            attention_head_dim=12,
            **LAYERS,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=TEXT_DIM,
            sample_size=16,
        ),
    )
    _louder(text=(transformer.caption_projection.linear_1.weight, 5), out=(transformer.proj_out.weight, 5))
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return SanaPipeline(tokenizer, encoder, vae, transformer, DPMSolverMultistepScheduler(**flow))


def _ltx_image() -> Any:
    from diffusers import LTXImageToVideoPipeline

    return LTXImageToVideoPipeline(**_ltx("ltx").components)


def _cogvideox() -> Any:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    tokenizer, encoder = _t5()
    vae = _seeded(
        48,
        lambda: AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=CHANNELS,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
    )
    transformer = _seeded(
        49,
        lambda: CogVideoXTransformer3DModel(
            attention_head_dim=16,
            **LAYERS,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            time_embed_dim=8,
            text_embed_dim=TEXT_DIM,
            sample_width=4,
            sample_height=4,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=24,
        ),
    )
    _louder(text=(transformer.patch_embed.text_proj.weight, 5), out=(transformer.proj_out.weight, 5))
    return CogVideoXPipeline(tokenizer, encoder, vae, transformer, CogVideoXDDIMScheduler())


def _auraflow() -> Any:
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    tokenizer, encoder = _t5(umt5=True)
    transformer = _seeded(
        50,
        lambda: AuraFlowTransformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=CHANNELS,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=12,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=24,
            out_channels=CHANNELS,
            pos_embed_max_size=256,
        ),
    )
    _louder(text=(transformer.context_embedder.weight, 200), out=(transformer.proj_out.weight, 5))
    return AuraFlowPipeline(tokenizer, encoder, _vae(51), transformer, FlowMatchEulerDiscreteScheduler(shift=1.73))


def _lumina2() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    tokenizer, encoder = _gemma()
    transformer = _seeded(
        52,
        lambda: Lumina2Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=CHANNELS,
            hidden_size=24,
            num_layers=1,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            axes_dim_rope=(4, 4, 4),
            axes_lens=(512, 64, 64),
            cap_feat_dim=TEXT_DIM,
            multiple_of=16,
        ),
    )
    _louder(out=(transformer.norm_out.linear_2.weight, 5))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=6.0)
    vae = _vae(53, 4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1)
    return Lumina2Pipeline(transformer, scheduler, vae, encoder, tokenizer)


def _klein_kv() -> Any:
    from diffusers import Flux2KleinKVPipeline

    return Flux2KleinKVPipeline(**_klein("klein-distilled").components)


def _flux2() -> Any:
    """With VAE and scheduler of klein; its text encoder, which is read at layers 10, 20 and 30, sees nothing here."""
    from diffusers import Flux2Pipeline, Flux2Transformer2DModel
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralImageProcessor, PixtralProcessor

    tokenizer = _bytes_tokenizer()
    tokenizer.add_tokens(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    said = "{% for message in messages if message.role == 'user' %}{{ message.content[0].text }}{% endfor %}"
    processor = PixtralProcessor(PixtralImageProcessor(), tokenizer, patch_size=14, chat_template=said)
    language = {
        "model_type": "mistral",
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 31,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
    }
    eyes = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Mistral3Config(text_config=language, vision_config=eyes, image_token_index=tokenizer.vocab["[IMG]"])
    encoder = _seeded(58, lambda: Mistral3ForConditionalGeneration(config))
    transformer = _seeded(
        59,
        lambda: Flux2Transformer2DModel(
            in_channels=4 * CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=True,
        ),
    )
    _louder(text=(transformer.context_embedder.weight, 5), out=(transformer.proj_out.weight, 5))
    klein = _klein("klein").components
    return Flux2Pipeline(klein["scheduler"], klein["vae"], encoder, processor, transformer)


def _qwen_edit_plus() -> Any:
    """With a VAE of factor 16, since what it sees has a megapixel."""
    from diffusers import AutoencoderKLQwenImage, QwenImageEditPlusPipeline
    from diffusers.modular_pipelines.qwenimage import prompt_templates as templates
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    template, start = (
        templates.QWENIMAGE_EDIT_PLUS_PROMPT_TEMPLATE,
        templates.QWENIMAGE_EDIT_PLUS_PROMPT_TEMPLATE_START_IDX,
    )
    tokenizer = _bytes_tokenizer(template, start)
    tokenizer.add_tokens([*TOKENS])
    begin, end, picture, video = (tokenizer.vocab[token] for token in TOKENS)
    size = {"size": {"shortest_edge": 56 * 56, "longest_edge": 384 * 384}}
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(**size), tokenizer, Qwen2VLVideoProcessor(**size))
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
    config = Qwen2_5_VLConfig(
        text_config=language,
        vision_config=eyes,
        image_token_id=picture,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
    )
    encoder = _seeded(60, lambda: Qwen2_5_VLForConditionalGeneration(config))
    vae = _seeded(
        61,
        lambda: AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[True] * 4,
            latents_mean=[0.2, -0.1, 0.5, 0.3],
            latents_std=[1.3, 2.1, 0.8, 2.7],
        ),
    )
    qwen = _qwen("qwen-image").components
    return QwenImageEditPlusPipeline(qwen["scheduler"], vae, encoder, tokenizer, processor, qwen["transformer"])


KINDS: dict[str, Callable[[], Any]] = {
    "sd": lambda: _sd("StableDiffusionPipeline"),
    "sd-image": lambda: _sd("StableDiffusionImg2ImgPipeline"),
    "pixart-alpha": lambda: _pixart("PixArtAlphaPipeline", 42),
    "pixart-sigma": lambda: _pixart("PixArtSigmaPipeline", 62),
    "sana": _sana,
    "ltx-image": _ltx_image,
    "cogvideox": _cogvideox,
    "auraflow": _auraflow,
    "lumina2": _lumina2,
    "klein-kv": _klein_kv,
    "flux2": _flux2,
    "qwen-edit-plus": _qwen_edit_plus,
}
VIDEOS = ("cogvideox", "ltx-image")


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
