"""Ids and texts beside those of transformers, in a process of its own, and of the tokenizers library."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st
from tokenizers import Tokenizer

from tests.models.tokenizers_of import (
    ALTERNATE,
    NUMBERS,
    OPEN,
    TEXT,
    TOOLS,
    TURNS,
    gguf,
    letters,
    metadata_of,
    plain_bytes,
    save,
    words,
)
from tests.once import once
from tests.smollm2 import smollm
from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.language.detokenize import Detokenizer
from unfuse.language.tokenizer import ChatTokenizer

__all__ = ["smollm"]

UNDIVIDED = Path(__file__).with_name("chats_undivided.py")

USER = {"role": "user", "content": "What is the capital of France?  Not  <turn> 1234!\n\n"}
CHAT = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": " Paris. "}, USER]
TURNED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "ç 😀"}]
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "<b>"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": "Zürich & <more>"}}}
TEXTS = [
    "",
    " ",
    "a",
    " a b  c   d",
    "Ünïcode naïve “quotes”… 😀👩‍👩‍👧 ﬁne",
    "e\u0301 composed \u00e9",
    "don't WE'LL he'd",
    "\n\n\n  x\r\n\ty",
    "12345 1 22 333",
    "<s>a</s><|turn|>b<think>c<a b ü>d",
    "ｆｕｌｌ ３４５ ①Ⅷ",
    "its workers",
]
CHATS = [
    {"messages": CHAT, "more": {}},
    {"messages": TURNED, "more": {}},
    {"messages": CALLED, "more": {"mood": "gay"}},
    {"messages": CHAT, "tools": [TOOL, TOOL], "more": {}},
]


def build(root: Path) -> None:
    """Tokenizers of every kind."""
    save(root / "turns", letters("llama-bpe"), TURNS + OPEN)
    save(
        root / "smollm",
        letters("smollm"),
        TURNS + OPEN,
        pad_token={"__type": "AddedToken", "content": "</s>"},
        sep_token="is",
    )
    save(root / "tools", letters("qwen2"), "overridden by the file")
    (root / "tools" / "chat_template.jinja").write_text(TOOLS)
    named = [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": TOOLS}]
    save(root / "named", letters("default"), named, unk_token="<think>")
    save(root / "words", plain_bytes(words(metaspace=False)), TURNS + OPEN)
    save(root / "spaces", plain_bytes(words(metaspace=True)), TURNS)
    save(root / "alternate", letters("default"), ALTERNATE)


KINDS = ["turns", "smollm", "tools", "named", "words", "spaces"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once("tokenizers", tmp_path_factory, build)


@pytest.fixture(scope="module")
def tokenizers(folders: Path) -> dict[str, ChatTokenizer]:
    return {folder.name: ChatTokenizer.read(folder) for folder in folders.iterdir()}


def undivided(*jobs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What transformers makes of jobs."""
    done = subprocess.run([sys.executable, UNDIVIDED], input=json.dumps(jobs), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    made: list[dict[str, Any]] = json.loads(done.stdout)
    return made


@pytest.fixture(scope="module")
def theirs(folders: Path) -> dict[str, dict[str, Any]]:
    job = {"gguf": None, "texts": TEXTS, "chats": CHATS}
    return dict(zip(KINDS, undivided(*({**job, "folder": str(folders / kind)} for kind in KINDS)), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_texts_match_transformers(
    kind: str, tokenizers: dict[str, ChatTokenizer], theirs: dict[str, dict[str, Any]]
) -> None:
    mine = tokenizers[kind]
    prompts = [mine.prompt(chat["messages"], chat.get("tools"), chat["more"]) for chat in CHATS]
    assert prompts == theirs[kind]["prompts"]
    texts = [mine.ids(text) for text in TEXTS]
    assert texts == theirs[kind]["texts"]
    assert [mine.decode(ids) for ids in texts] == theirs[kind]["decoded"]
    assert len(set(map(tuple, prompts))) >= 3, "chats make different prompts"


def shown(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join([*map(detokenizer.add, ids), detokenizer.finish()])


@given(ids=st.lists(st.integers(0, 905)))
def test_arbitrary_ids_decode_like_tokenizers_library(
    ids: list[int], folders: Path, tokenizers: dict[str, ChatTokenizer]
) -> None:
    whole = Tokenizer.from_file(str(folders / "turns" / "tokenizer.json")).decode(ids)
    assert tokenizers["turns"].decode(ids) == whole
    assert shown(tokenizers["turns"], ids) == whole


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_any_text_round_trips_token_by_token(text: str, tokenizers: dict[str, ChatTokenizer]) -> None:
    """Texts with special tokens are left out: clients see none of these."""
    assume(not re.search("<[^<>]+>", text))
    for kind in ("turns", "words"):
        assert shown(tokenizers[kind], tokenizers[kind].ids(text)) == text


def test_tokenizer_needs_neither_torch_nor_transformers(folders: Path) -> None:
    program = f"""
import sys
sys.modules |= dict.fromkeys(("torch", "transformers", "diffusers", "numpy"))
from pathlib import Path
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.language.detokenize import Detokenizer, StopStrings
made = ChatTokenizer.read(Path({str(folders / "turns")!r}))
ids = made.prompt([{{"role": "user", "content": "hello"}}])
print("".join(map(Detokenizer(made).add, ids)))
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert (done.stdout, done.stderr) == ("user\nhello\nassistant\n\n", "")


def test_stop_ids_are_read_from_config_files_and_eos_token(tmp_path: Path) -> None:
    save(tmp_path / "a", letters("default"), TURNS)
    eos = {"</s>": 1, "<|turn|>": 2}
    assert ChatTokenizer.read(tmp_path / "a").stops == {eos["</s>"]}
    (tmp_path / "a" / "config.json").write_text('{"eos_token_id": 2}')
    assert ChatTokenizer.read(tmp_path / "a").stops == {1, 2}
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    made = ChatTokenizer.read(tmp_path / "a")
    assert made.stops == {1, 7}
    assert made.specials == {0, 1, 2}
    assert made.size == len(made._tokenizer.get_vocab())


def test_single_token_has_its_bytes_and_unknown_id_has_none(tokenizers: dict[str, ChatTokenizer]) -> None:
    byte, word = tokenizers["turns"], tokenizers["words"]
    half = byte.ids("😀")[0]
    assert b"\xf0\x9f\x98\x80".startswith(byte.piece(half)) and byte.piece(half)
    assert byte.piece(1) == b"</s>"
    assert byte.piece(byte.size + 7) == b""
    (first,) = word.ids("the")
    assert (word.piece(first), word.piece(first, first=True)) == (b" the", b"the")


def test_special_tokens_are_read_from_special_tokens_map(tmp_path: Path) -> None:
    save(tmp_path / "a", letters("default"), "{{ bos_token }}{{ pad_token }}")
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"chat_template": "{{ bos_token }}{{ eos_token }}"}')
    (tmp_path / "a" / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    assert ChatTokenizer.read(tmp_path / "a").prompt([USER]) == [0, 1]


@pytest.mark.parametrize("pre", ["default", "smollm", "llama-bpe", "qwen2"])
def test_gguf_tokenizer_encodes_like_its_original(pre: str, tmp_path: Path) -> None:
    origin = letters(pre)
    gguf(tmp_path / "b.gguf", metadata_of(origin, pre, TURNS), version=2)
    mine = ChatTokenizer.read(tmp_path / "b.gguf")
    for text in [*TEXTS, NUMBERS, TEXT.read_text()]:
        assert mine.ids(text) == origin.encode(text, add_special_tokens=False).ids
        assert mine.decode(mine.ids(text)) == origin.decode(mine.ids(text))
    assert (mine.stops, mine.specials) == ({1, 2}, {0, 1, 2})
    assert mine.decode(mine.prompt([USER])).startswith("user\nWhat is")


def test_tokenizer_beside_gguf_file_takes_precedence(tmp_path: Path) -> None:
    save(tmp_path / "a", letters("default"), "{{ eos_token }}")
    gguf(tmp_path / "a" / "a.gguf", metadata_of(letters("qwen2"), "tekken", TURNS))
    assert ChatTokenizer.read(tmp_path / "a" / "a.gguf").prompt([USER]) == [1]


def refused(tmp_path: Path, **changes: Any) -> str:
    said = metadata_of(letters("default"), "default", TURNS)
    gguf(tmp_path / "a.gguf", {**said, **{key.replace("__", "."): value for key, value in changes.items()}})
    with pytest.raises(ConfigError) as raised:
        ChatTokenizer.read(tmp_path / "a.gguf")
    return str(raised.value)


def test_unsupported_or_invalid_gguf_tokenizer_is_rejected(tmp_path: Path) -> None:
    assert "tokenizer llama with the pre-tokenizer default" in refused(tmp_path, tokenizer__ggml__model="llama")
    assert "the pre-tokenizer tekken: supported is gpt2" in refused(tmp_path, tokenizer__ggml__pre="tekken")
    assert "not valid" in refused(tmp_path, tokenizer__ggml__merges=["no such"])
    assert "not valid" in refused(tmp_path, tokenizer__ggml__bos_token_id=70_000)
    assert "chat template" in refused(tmp_path, tokenizer__chat_template="{% if %}")


@pytest.mark.parametrize("end", [0, 3, 20, 60, 1000, -3])
def test_truncated_gguf_file_raises_config_error(end: int, tmp_path: Path) -> None:
    gguf(tmp_path / "a.gguf", metadata_of(letters("default"), "default", TURNS))
    whole = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(whole[:end])
    with pytest.raises(ConfigError, match=r"a\.gguf is not a GGUF file that can be read"):
        ChatTokenizer.read(tmp_path / "a.gguf")


@settings(max_examples=300)
@given(data=st.data())
def test_corrupt_gguf_file_raises_config_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    gguf(folder / "a.gguf", {"tokenizer.ggml.model": "gpt2", "b": [1, 2], "c": True, "tokenizer.ggml.tokens": ["a"]})
    whole = bytearray((folder / "a.gguf").read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[place] = data.draw(st.sampled_from([0, 1, 9, 127, 255]))
    (folder / "a.gguf").write_bytes(whole)
    with pytest.raises(ConfigError):  # it has no merges, so that it is never whole
        ChatTokenizer.read(folder / "a.gguf")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[]", "cannot be read"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "cannot be read"),
        ("generation_config.json", "\xff", "cannot be read"),
        ("chat_template.jinja", "{% endfor %}", "chat template"),
        ("chat_template.jinja", "{{" + "(" * 100_000, "chat template"),
    ],
)
def test_corrupt_tokenizer_folder_raises_config_error(name: str, content: str, says: str, tmp_path: Path) -> None:
    save(tmp_path / "a", letters("default"), TURNS)
    (tmp_path / "a" / name).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=says):
        ChatTokenizer.read(tmp_path / "a")


def test_missing_or_unsupported_tokenizer_raises_config_error(tmp_path: Path, folders: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        ChatTokenizer.read(tmp_path)
    said = json.loads((folders / "turns" / "tokenizer.json").read_text())
    for decoder, shown in (({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"), (None, "none")):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**said, "decoder": decoder}))
        with pytest.raises(ConfigError, match=f"the decoder {shown} is not supported"):
            ChatTokenizer.read(tmp_path)


def test_model_without_chat_template_rejects_chats_but_encodes_text(tmp_path: Path) -> None:
    save(tmp_path / "a", letters("default"), "")
    made = ChatTokenizer.read(tmp_path / "a")
    assert made.decode(made.ids("text")) == "text"
    with pytest.raises(InvalidParameter, match="no chat template") as raised:
        made.prompt([USER])
    assert raised.value.param == "messages"


def test_template_rejection_raises_invalid_parameter_on_messages(tokenizers: dict[str, ChatTokenizer]) -> None:
    with pytest.raises(InvalidParameter, match="roles must take turns") as raised:
        tokenizers["alternate"].prompt([{"role": "assistant", "content": "Yes?"}, USER])
    assert raised.value.param == "messages"


def test_history_rejected_by_template_is_simplified(tokenizers: dict[str, ChatTokenizer]) -> None:
    answers = [{"role": "assistant", "content": text} for text in ("Par", "is")]
    joined = {"role": "assistant", "content": "Par\n\nis"}
    alternate = tokenizers["alternate"]
    assert alternate.prompt([USER, *answers, USER]) == alternate.prompt([USER, joined, USER])


def test_lone_surrogate_in_message_is_rejected(tokenizers: dict[str, ChatTokenizer]) -> None:
    with pytest.raises(InvalidParameter, match="surrogate"):
        tokenizers["turns"].prompt([{"role": "user", "content": "a\ud83d"}])


@pytest.mark.nightly
def test_smollm2_prompts_match_transformers(smollm: Path) -> None:
    """But for spaces before digits, which transformers does not keep apart where it reads GGUF files."""
    texts = [text for text in TEXTS if not any(letter.isnumeric() for letter in text)] + ["in 1789,1 x2"]
    chats = [{"messages": CHAT[:3], "more": {}}, {"messages": [{"role": "user", "content": "Hi 😀"}], "more": {}}]
    (theirs,) = undivided({"folder": str(smollm.parent), "gguf": smollm.name, "texts": texts, "chats": chats})
    mine = ChatTokenizer.read(smollm)
    assert [mine.prompt(chat["messages"]) for chat in chats] == theirs["prompts"]
    assert [mine.ids(text) for text in texts] == theirs["texts"]
    assert [mine.decode(ids) for ids in theirs["texts"]] == theirs["decoded"]
    assert (mine.stops, mine.size) == ({2}, 49_152)
    assert mine.ids("a   12") == [*mine.ids("a   "), *mine.ids("1"), *mine.ids("2")]
