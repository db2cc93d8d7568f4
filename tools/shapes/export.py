"""Writes the built-in model as a diffusers folder: one `WanPipeline`, its serving defaults, its card."""

import json
from pathlib import Path

from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

from tools.shapes import scenes
from tools.shapes.dit import Denoiser
from tools.shapes.words import MAX_TOKENS, SPELLINGS, WORDS, make_tokenizer

SHIFT = 1.5  # the schedule spends more of its steps at high noise, where the shape is decided

EXAMPLES = (
    '"a red circle on white", "a blue star left of a green ring on gray" or "a yellow cross moving left on black"'
)
KINDS = "; ".join(", ".join(names) for names in (scenes.COLOURS, scenes.SHAPES, scenes.GROUNDS))

SERVING = {
    "defaults": {
        "height": scenes.SIZE,
        "width": scenes.SIZE,
        "num_frames": scenes.FRAMES,  # of a video; a picture is one frame whatever stands here
        "num_inference_steps": 30,
        "guidance_scale": 4.0,
        "max_sequence_length": MAX_TOKENS,
        "fps": 8,
        "negative_prompt": "",
    },
    "limits": {
        "min_size": 32,
        "max_size": 256,
        "size_multiple": 32,
        "max_frames": 17,
        "max_steps": 100,
        "max_prompt_chars": 2000,
    },
    "vocabulary": {
        "words": [*WORDS, *SPELLINGS],
        "makes": f"one or two shapes, such as {EXAMPLES} ({KINDS})",
    },
}


def assemble(vae: AutoencoderKLWan, denoiser: Denoiser) -> WanPipeline:
    """The trained parts as the pipeline that serves them."""
    return WanPipeline(
        tokenizer=make_tokenizer(),
        text_encoder=denoiser.text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=denoiser.transformer,
    )


def export(vae: AutoencoderKLWan, denoiser: Denoiser, folder: Path) -> None:
    """Save float32 weights as safetensors, with `serving.json` beside `model_index.json`."""
    assemble(vae.eval(), denoiser.eval()).save_pretrained(folder)
    for name in ("model_index.json", "tokenizer/tokenizer_config.json"):
        _name_tokenizer_for_all(folder / name)
    for weights in folder.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes files that only their owner may read
    (folder / "serving.json").write_text(json.dumps(SERVING, indent=2) + "\n")


def _name_tokenizer_for_all(config: Path) -> None:
    """Write the tokenizer's class by the name that transformers 4 and 5 both know; 5 saves another."""
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
