"""Scripted models: they say their scripts token by token, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.scripted_model import END, make_scripted_model

pytestmark = pytest.mark.slow
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é 😀 aaaa aaaa"}}\n</tool_call>'


def said(folder: Path, asked: str) -> tuple[str, list[int]]:
    """The likeliest text behind a prompt and its tokens, by transformers."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": asked}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    made = list[int]()
    with torch.inference_mode():
        while not made or tokenizer.decode(made[-1:]) != END:
            chances = model(torch.tensor([[*ids, *made]])).logits[0, -1].softmax(0)
            assert float(chances.max()) > 1 - 1e-6
            made.append(int(chances.argmax()))
    return tokenizer.decode(made[:-1]), made


def test_scripted_model_generates_its_script_token_by_token(tmp_path: Path) -> None:
    folder = make_scripted_model(tmp_path, {"greet": "Hello, hello.", "call": CALL}, marks=["<tool_call>"])
    text, ids = said(folder, "call")
    assert text == CALL and len(ids) > 20
    assert said(folder, "greet")[0] == "Hello, hello."
    assert said(folder, "anything")[0] == "Hello, hello."


def test_scripted_model_accepts_explicit_unique_tokens(tmp_path: Path) -> None:
    text, ids = said(make_scripted_model(tmp_path, ["He", "llo", " ", "world"]), "")
    assert (text, len(ids)) == ("Hello world", 5)
    with pytest.raises(ValueError, match="twice"):
        make_scripted_model(tmp_path, ["a", "b", "a"])
