"""Small language models that see, of the real classes, with random weights, a tokenizer and a picture processor."""

from __future__ import annotations

import json
from pathlib import Path

from tools.tiny_language import save_tokenizer

KINDS = ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_model(
    folder: Path, kind: str = KINDS[0], *, positions: int = 2048, width: int = 64, most: int = 64, seed: int = 0
) -> Path:
    """Save one as transformers does; pictures have 4 tokens to so many, all frames of a video 16 to twice as many.

    Another `width` than 64 is for those whose heads say how wide they are, which are all but the first kind.
    """
    import torch
    import transformers

    tokenizer = save_tokenizer(folder, TEMPLATE, *TOKENS)
    begin, end, picture, video = (tokenizer.token_to_id(token) for token in TOKENS)
    torch.manual_seed(seed)
    speaks = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": width,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "bos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    sees = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": width,
        "initializer_range": 0.2,
    }
    if kind == "Qwen2_5_VL":
        patch, sees = 14, {**sees, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    else:
        patch = 16
        speaks |= {"head_dim": 16, "rope_parameters": {**speaks["rope_parameters"], "mrope_interleaved": True}}
        sees |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    if kind.endswith("Moe"):
        speaks |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(
        text_config=speaks,
        vision_config=sees,
        image_token_id=picture,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(folder)
    side = (patch * 2) ** 2
    size = {"size": {"shortest_edge": 4 * side, "longest_edge": most * side}}
    transformers.Qwen2VLImageProcessor(patch_size=patch, **size).save_pretrained(folder)
    video_size = {"size": {"shortest_edge": 16 * side, "longest_edge": 2 * most * side}, "patch_size": patch}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video_size))
    return folder
