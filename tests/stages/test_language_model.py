"""The ragged forward over paged keys and values, against transformers' `generate` on a copy of the model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2_5_VLTextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from unfuse.core.errors import ConfigError
from unfuse.language.paged_kv import KvSequence, PagedKvCache
from unfuse.stages import language_model
from unfuse.stages.language_model import LanguageModel
from unfuse.stages.refusal import refusal

LAYERS, HEADS, KEPT, WIDTH, WORDS, BLOCK = 3, 6, 2, 16, 300, 4
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEPT,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so loud that every prompt goes on otherwise
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**{**SIZES, "hidden_size": 64}, head_dim=WIDTH)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **{**SIZES, "hidden_size": 64},
            head_dim=WIDTH,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            mlp_only_layers=[1],
        ),
    ),
}
NEW = 20
NEAR = 5e-4
"""How far logits, whose standard deviation is 2 to 3, may be from those that are computed in another order."""


def made(family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    cls, configuration = FAMILIES[family]
    torch.manual_seed(0)
    model = cls(type(configuration)(**{**configuration.to_dict(), **config})).to(dtype).eval()
    model.generation_config.eos_token_id = None
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.25  # other than what attention does by itself
    return model


def prompts(count: int = 20) -> list[list[int]]:
    source = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (1 + 7 * index % 83,), generator=source).tolist() for index in range(count)]


def generated(model: Any, prompt: Sequence[int]) -> tuple[list[int], Tensor]:
    """The tokens that transformers goes on with, and their logits."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits).float()


class Writers:
    """Sequences that go on from their prompts with what is likeliest, several in a forward."""

    def __init__(self, model: Any, kv: PagedKvCache, prompts: Sequence[Sequence[int]], **options: bool) -> None:
        self.model, self.kv = LanguageModel(model, kv, **options), kv
        self.sequences = [kv.sequence() for _ in prompts]
        self.pending = [[*prompt] for prompt in prompts]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logits: list[list[Tensor]] = [[] for _ in prompts]

    def turn(self, who: Sequence[int], chunk: int = 1 << 20, **how: Any) -> None:
        parts: list[tuple[KvSequence, list[int]]] = []
        for one in who:
            tokens, self.pending[one] = self.pending[one][:chunk], self.pending[one][chunk:]
            self.sequences[one].extend(len(tokens))
            parts.append((self.sequences[one], tokens))
        for one, logits in zip(who, self.model.forward(parts, **how), strict=True):
            if not self.pending[one]:
                self.logits[one].append(logits)
                self.tokens[one].append(int(logits.argmax()))
                self.pending[one] = self.tokens[one][-1:]

    def write(self, **how: Any) -> None:
        """Until all have written NEW tokens; they join one after the other, and leave as they are done."""
        for turn in range(1 << 10):
            waiting = [one for one, tokens in enumerate(self.tokens) if len(tokens) < NEW]
            if not waiting:
                return
            self.turn([one for one in waiting if one <= turn], **how)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def room(tokens: int = 4096, dtype: torch.dtype = torch.float32) -> PagedKvCache:
    return PagedKvCache(LAYERS, KEPT, WIDTH, tokens, BLOCK, dtype)


def scattered(blocks: int) -> PagedKvCache:
    """Room in which no two free blocks lie beside each other."""
    kv = room(2 * blocks * BLOCK)
    holders = [kv.sequence() for _ in range(2 * blocks)]
    for holder in holders:
        holder.extend(1)
    for holder in holders:
        if holder.spans()[0][0] // BLOCK % 2:
            holder.free()
    return kv


def distance(writers: Writers, expected: Sequence[Tensor]) -> float:
    pairs = zip(writers.logits, expected, strict=True)
    return max(float((torch.stack(logits) - wanted).abs().max()) for logits, wanted in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_generate_alone_batched_and_chunked(family: str) -> None:
    model = made(family)
    expected = [generated(model, prompt) for prompt in prompts()]
    assert len({token for tokens, _ in expected for token in tokens}) > 100, "the model does not repeat itself"

    alone, together, chunked = (Writers(copy.deepcopy(model), room(), prompts()) for _ in range(3))
    gathered = Writers(copy.deepcopy(model), scattered(400), prompts(), gathers=True)
    alone.write(alone=True)
    together.write()
    chunked.write(chunk=7)
    gathered.write(chunk=7)

    for writers in (alone, together, chunked, gathered):
        assert writers.tokens == [tokens for tokens, _ in expected]
        assert all(logits.dtype == torch.float32 and logits.shape == (WORDS,) for logits in writers.logits[0])
    logits = [logits for _, logits in expected]
    assert distance(alone, logits) == 0
    assert 0 < distance(together, logits) < NEAR
    assert 0 < distance(chunked, logits) < NEAR
    assert 0 < distance(gathered, logits) < NEAR


@pytest.mark.parametrize("long", [1, language_model.LONG], ids=["read in place", "joined"])
def test_tokens_do_not_depend_on_kv_block_placement(monkeypatch: pytest.MonkeyPatch, long: int) -> None:
    monkeypatch.setattr(language_model, "LONG", long)
    model, few = made(), prompts(6)
    compact, spread, alone, spread_alone = (
        Writers(copy.deepcopy(model), kv, few) for kv in (room(), scattered(80), room(), scattered(80))
    )

    compact.write(chunk=9)
    spread.write(chunk=9)
    alone.write(chunk=9, alone=True)
    spread_alone.write(chunk=9, alone=True)

    assert max(len(sequence.spans()) for sequence in compact.sequences) == 1
    assert min(len(sequence.spans()) for sequence in spread.sequences) > 3
    assert [len(one.spans()) for one in spread_alone.sequences] == [len(one.spans()) for one in spread.sequences]
    assert spread.tokens == compact.tokens == alone.tokens == spread_alone.tokens
    assert distance(spread, [torch.stack(logits) for logits in compact.logits]) < NEAR
    assert distance(spread_alone, [torch.stack(logits) for logits in alone.logits]) == 0


@pytest.mark.parametrize("alone", [False, True])
def test_sequences_attend_in_one_call_unless_they_are_computed_alone(alone: bool) -> None:
    """A forward of their own has the bytes of `generate`, also where the other forwards gather."""
    calls = Counter[str]()

    class Attention(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[func._schema.name.partition("attention")[1]] += 1
            return func(*args, **(kwargs or {}))

    model, few = made(), prompts(5)
    expected = [generated(model, prompt) for prompt in few]
    writers = Writers(copy.deepcopy(model), room(), few, gathers=True)
    for one in range(5):
        writers.turn([one], alone=alone)
    with Attention():
        writers.turn(range(5), alone=alone)
    writers.write(alone=alone)

    assert calls["attention"] == LAYERS * (5 if alone else 1)
    assert writers.tokens == [tokens for tokens, _ in expected]
    assert (distance(writers, [logits for _, logits in expected]) == 0) is alone


@pytest.mark.parametrize("kv", [room(), scattered(60)], ids=["in one piece", "in many"])
def test_decode_step_does_not_copy_the_kv_cache(monkeypatch: pytest.MonkeyPatch, kv: PagedKvCache) -> None:
    """Of what lies in one run, or in long ones, as all are here."""
    monkeypatch.setattr(language_model, "LONG", 1)

    class Largest(TorchDispatchMode):
        """The most numbers that anything had for which there was new memory."""

        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in held:
                    self.most = max(self.most, tensor.numel())
            return out

    model = made()
    held = {one.untyped_storage().data_ptr() for one in (*kv.keys, *kv.values, *model.parameters())}
    writers = Writers(model, kv, [[3] * 120, [4] * 110])
    writers.turn([0, 1])

    with Largest() as seen:
        writers.turn([0, 1])

    assert 0 < seen.most < 120 * KEPT * WIDTH / 3


def test_retracted_sequence_continues_with_the_same_tokens() -> None:
    model = made()
    expected = [generated(model, prompt)[0] for prompt in prompts(3)]
    kv = room(128)
    writers = Writers(copy.deepcopy(model), kv, prompts(3))
    for _ in range(6):
        writers.turn([0, 1, 2])

    writers.sequences[1].free()
    writers.pending[1] = [*prompts(3)[1], *writers.tokens[1]]
    (other := kv.sequence()).extend(4 * BLOCK)
    for keys, values in zip(kv.keys, kv.values, strict=True):
        for first, end in other.spans():
            keys[:, first:end] = values[:, first:end] = torch.nan
    writers.write(chunk=5)

    assert writers.tokens == expected


def test_decode_continues_from_kv_computed_by_another_model_copy() -> None:
    """As prefill and decode do it, by halves of the heads, into another place."""
    model, prompt = made(), prompts(9)[8]
    expected, _ = generated(model, prompt)
    first, second = Writers(copy.deepcopy(model), room(), [prompt]), Writers(model, scattered(40), [prompt])
    first.turn([0])

    second.sequences[0].extend(len(prompt))
    for layer in range(LAYERS):
        keys, values = first.sequences[0].read(layer)
        assert keys.shape == values.shape == (KEPT, len(prompt), WIDTH)
        for start in range(0, len(prompt), 6):
            piece = slice(start, start + 6)
            second.sequences[0].write(layer, keys[:, piece], values[:, piece], start)
    second.tokens, second.pending = first.tokens, [first.tokens[0][-1:]]
    second.write()

    assert second.tokens == [expected]


@pytest.mark.parametrize("alone", [False, True])
def test_on_layer_is_called_when_the_kv_of_a_layer_is_final(alone: bool) -> None:
    kv = room()
    model = LanguageModel(made(), kv)
    parts = [(kv.sequence(), prompt) for prompt in prompts(3)]
    for sequence, prompt in parts:
        sequence.extend(len(prompt))
    heard: list[tuple[int, list[Tensor]]] = []

    model.forward(
        parts,
        alone=alone,
        on_layer=lambda layer: heard.append((layer, [one.clone() for seq, _ in parts for one in seq.read(layer)])),
    )

    assert [layer for layer, _ in heard] == [*range(LAYERS)]
    for layer, kept in heard:
        now = [one for sequence, _ in parts for one in sequence.read(layer)]
        assert all(torch.equal(*pair) for pair in zip(kept, now, strict=True))


def test_repeated_forward_returns_the_same_logits() -> None:
    kv = room()
    model = LanguageModel(made(), kv)
    (sequence, other) = (kv.sequence(), kv.sequence())
    sequence.extend(9)
    other.extend(2)

    once = model.forward([(sequence, [*range(9)]), (other, [1, 2])])
    again = model.forward([(sequence, [*range(9)]), (other, [1, 2])])

    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
    assert not once[0].requires_grad and model.forward([]) == []


def test_forward_rejects_sequences_without_tokens_or_kv_space() -> None:
    kv = room()
    model, sequence = LanguageModel(made(), kv), kv.sequence()
    sequence.extend(2)

    with pytest.raises(ValueError, match="has no tokens"):
        model.forward([(sequence, [])])
    with pytest.raises(ValueError, match="a sequence of 2 tokens has no tokens -1"):
        model.forward([(sequence, [1, 2, 3])])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling_is_applied_as_in_transformers(rope: dict[str, Any]) -> None:
    model = made(rope_parameters={"rope_theta": 10_000.0, **rope})
    plain, _ = generated(made(), prompts(7)[6])
    expected = [generated(model, prompt)[0] for prompt in prompts(7)]
    assert expected[6] != plain

    writers = Writers(copy.deepcopy(model), room(), prompts(7))
    writers.write(chunk=30)

    assert writers.tokens == expected


def test_bfloat16_logits_equal_transformers_generate() -> None:
    model = made(dtype=torch.bfloat16)
    tokens, logits = generated(model, prompts(9)[8])
    alone = Writers(copy.deepcopy(model), room(dtype=torch.bfloat16), prompts(9)[8:])
    alone.write(alone=True)

    assert alone.tokens == [tokens] and alone.logits[0][0].dtype == torch.float32
    assert distance(alone, [logits]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_language_models_are_accepted(family: str) -> None:
    assert refusal(FAMILIES[family][1].to_dict()) == ""


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=128), "sliding window attention (128 tokens)"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=2, num_hidden_layers=4), "sliding_attention"),
        (Gemma2Config(), "sliding_attention"),
        (GptOssConfig(), "sliding_attention"),
        (Qwen2_5_VLTextConfig(rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3]}), "several"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "the scaling dynamic"),
    ],
    ids=lambda given: getattr(given, "model_type", ""),
)
def test_model_with_unsupported_attention_is_rejected(config: Any, reason: str) -> None:
    assert reason in refusal(config.to_dict())


def test_constructing_an_unsupported_model_raises_config_error() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=64))
    with pytest.raises(
        ConfigError, match=r"this model cannot be served: it uses sliding window attention \(64 tokens\)"
    ):
        LanguageModel(model, room())
