"""A FLUX folder of random weights that costs what a small model does on one core: encoders 20 ms, a step 60, VAE 60.

python -m bench.peers.flux_folder FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SIDE, STEPS = 128, 4
DEFAULTS = {"height": SIDE, "width": SIDE, "num_inference_steps": STEPS, "max_sequence_length": 32}


def build(folder: Path) -> Path:
    """Save it there, the same bytes every time; about 300 MB. Returns the folder."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from tools.tiny import _bytes_tokenizer, _clip_tokenizer

    torch.manual_seed(1)
    tokenizer, tokenizer_2 = _clip_tokenizer(32), _bytes_tokenizer()
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            projection_dim=256,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    encoder_2 = T5EncoderModel(
        T5Config(vocab_size=len(tokenizer_2), d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8)
    )
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[32, 64, 64, 64],
        layers_per_block=1,
        latent_channels=16,
        sample_size=SIDE,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=3,
        num_single_layers=6,
        attention_head_dim=64,
        num_attention_heads=6,
        joint_attention_dim=512,
        pooled_projection_dim=256,
        axes_dims_rope=(16, 24, 24),
        guidance_embeds=False,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    models = (encoder.eval(), encoder_2.eval(), transformer.eval(), vae.eval())
    FluxPipeline(scheduler, models[3], models[0], tokenizer, models[1], tokenizer_2, models[2]).save_pretrained(folder)
    (folder / "serving.json").write_text(json.dumps({"defaults": DEFAULTS}))
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
