"""Small language models of the real classes, with random weights and a tokenizer of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT = "the quick brown fox jumps over a lazy dog and what is the capital of France Paris user assistant system"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
"""What the configuration of a mixture of experts says more."""


def make_language_model(
    folder: Path,
    kind: str = KINDS[0],
    *,
    positions: int = 512,
    seed: int = 0,
    width: int = 64,
    layers: int = 2,
    head_dim: int = 0,
    heads: int = 4,
    kept: int = 2,
) -> Path:
    """Save one as transformers does, with so many layers of that width, and heads of which so many are `kept`.

    A token takes 8 × kept × layers × head_dim bytes of keys and values; a head has a quarter of the width unless said.
    A mixture has four experts in each layer, of which two compute a token.
    """
    import torch
    import transformers

    tokenizer = save_tokenizer(folder, TEMPLATE)
    torch.manual_seed(seed)
    config = getattr(transformers, kind.replace("ForCausalLM", "Config"))(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kept,
        head_dim=head_dim or width // 4,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
        tie_word_embeddings=False,
        **(ROUTED if "Moe" in kind else {}),
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, template: str, *more: str) -> Any:
    """Train one and save it, with `more` tokens of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=letters)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer
