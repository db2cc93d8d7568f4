"""A Llama that says exactly the text that a test gives it, token by token, at any temperature.

    make_scripted_model(folder, "Hello.")                      says that to everybody
    make_scripted_model(folder, {"greet": "Hello.", ...})      says the text that the last user message names

The weights are a table "behind this token comes that one". Each prompt ends with a token of its script, whose text
follows from there, and then the end token. Behind any other token comes the end token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = "<|im_end|>"
WIDTH = 256
"""Numbers of a token's code. Two random codes of this width are nearly orthogonal."""

Script = str | Sequence[str]
"""A text, which is cut into tokens, or its tokens, no two of which are equal in a model."""


def make_scripted_model(
    folder: Path,
    scripts: Script | Mapping[str, Script],
    template: str = CHATML,
    *,
    specials: Sequence[str] = (),
    marks: Sequence[str] = (),
    positions: int = 2048,
    seed: int = 0,
) -> Path:
    """Save a model that says these texts; returns the folder.

    `scripts` is one text, or texts by the user message that asks for them; other messages get the first. `specials` and
    `marks` are more tokens that are written as they are, `specials` of the kind that is not part of the text.
    """
    import torch
    import transformers

    named = scripts if isinstance(scripts, Mapping) else {"": scripts}
    begins = [f"<|script_{number}|>" for number in range(len(named))]
    added = [*SPECIALS, *specials, *begins, *marks]
    pieces = [_spelled(script, added) for script in _cut(list(named.values()), added)]
    tokenizer = _tokenizer(pieces, [*SPECIALS, *specials, *begins], marks)

    ids = tokenizer.get_vocab()
    follows = dict[int, int]()
    for begin, script in zip(begins, pieces, strict=True):
        chain = [ids[token] for token in (begin, *script, END)]
        follows |= dict(zip(chain[:-1], chain[1:], strict=True))

    config = transformers.LlamaConfig(
        vocab_size=len(ids),
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=positions,
        eos_token_id=ids[END],
        bos_token_id=None,
        pad_token_id=ids[SPECIALS[0]],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
        _write_table(model, follows, ids[END])
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": SPECIALS[0],
        "chat_template": template + _chooses(list(named)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _write_table(model: Any, follows: Mapping[int, int], end: int) -> None:
    """Make the layers add nothing, and the head answer a token's code with the token behind it."""
    import torch

    codes = torch.randint(0, 2, (len(follows), WIDTH)) * 2.0 - 1
    codes[:, 0] = 1.0  # what all tokens have, to which the end token answers weakly
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[end, 0] = WIDTH / 4
        for code, (token, after) in zip(codes, follows.items(), strict=True):
            model.model.embed_tokens.weight[token] = code
            model.lm_head.weight[after] += code / 2


def _chooses(names: Sequence[str]) -> str:
    """What ends each prompt: the token of the script that the last user message names, or of the first script."""
    asked = "{% set asked = (messages | selectattr('role', 'equalto', 'user') | list | last or {}).content %}"
    cases = "".join(
        f"{{% {'elif' if number else 'if'} asked == {json.dumps(name)} %}}<|script_{number}|>"
        for number, name in enumerate(names)
    )
    return f"{{% if add_generation_prompt %}}{asked}{cases}{{% else %}}<|script_0|>{{% endif %}}{{% endif %}}"


def _cut(scripts: Sequence[Script], added: Sequence[str]) -> list[list[bytes]]:
    """Each script as tokens, all different: the shortest pieces that were not used before, as LZ78 cuts a text."""
    used = {token.encode() for script in scripts if not isinstance(script, str) for token in script}
    found = []
    for script in scripts:
        if isinstance(script, str):
            found.append(_pieces(script, added, used))
        else:
            found.append([token.encode() for token in script])
    tokens = [token for script in found for token in script]
    if repeated := {token for token in tokens if tokens.count(token) > 1}:
        raise ValueError(f"tokens of scripts must all be different, and {min(repeated)!r} is there twice")
    return found


def _pieces(text: str, added: Sequence[str], used: set[bytes]) -> list[bytes]:
    """The tokens of a text, none of which is used before. A mark is a token of its own where it comes first."""
    pieces = list[bytes]()
    piece = b""
    for unit in _units(text, added):
        piece += unit
        if piece not in used:
            used.add(piece)
            pieces.append(piece)
            piece = b""
    while piece:  # the end of the text repeats a token: join it to the one before
        if not pieces:
            raise ValueError(f"the script {text!r} leaves no new tokens: change it")
        piece = pieces.pop() + piece
        if piece not in used:
            used.add(piece)
            pieces.append(piece)
            piece = b""
    return pieces


def _units(text: str, added: Sequence[str]) -> Iterable[bytes]:
    """The bytes of a text, one by one, and added tokens whole."""
    while text:
        mark = next((token for token in added if text.startswith(token)), "")
        if mark:
            yield mark.encode()
        else:
            yield from (bytes([byte]) for byte in text[0].encode())
        text = text[len(mark) or 1 :]


def _spelled(pieces: Sequence[bytes], added: Sequence[str]) -> list[str]:
    """Tokens as a byte-level vocabulary has them; added tokens as they are."""
    from unfuse.language.tokenizer import LETTERS

    letters = {byte: letter for letter, byte in LETTERS.items()}
    known = {token.encode(): token for token in added}
    return [known.get(piece) or "".join(letters[byte] for byte in piece) for piece in pieces]


def _tokenizer(pieces: Iterable[Sequence[str]], specials: Sequence[str], marks: Sequence[str]) -> Any:
    """A byte-level tokenizer without merges, so that a text is read byte by byte and tokens of scripts only written."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [token for script in pieces for token in script if token not in (*specials, *marks)]
    words = dict.fromkeys([*specials, *marks, *letters, *own])
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in marks])
    return tokenizer
