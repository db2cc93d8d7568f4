"""CPU time of a token by the length of its context: paged keys and values, read where they lie, against gathered ones.

A narrow random model, one thread, float32. Per context, interleaved rounds of one token each: of a sequence in one run
and in many; the same in the exact mode (many runs are copied together); keys and values gathered by token from wherever
they are; transformers' DynamicCache. Then turns of several sequences of 1K, in one forward against one after the other.
`python -m bench.kv [ROUNDS]`
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

from bench.report import quantile, show, table
from unfuse.language.paged_kv import KvSequence, PagedKvCache
from unfuse.stages.language_model import LanguageModel

CONTEXTS = (256, 1024, 4096, 16384)
TOGETHER = (1, 4, 16)
ROUNDS = 25
LAYERS, HEADS, KEPT, WIDTH, BLOCK, RUNS = 4, 8, 2, 32, 16, 8
Step = Callable[[], object]


def narrow() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=HEADS * WIDTH,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEPT,
        max_position_embeddings=2 * max(CONTEXTS),
    )
    return LlamaForCausalLM(config).eval()


def filled(kv: PagedKvCache, tokens: int) -> KvSequence:
    sequence = kv.sequence()
    sequence.extend(tokens)
    for layer in range(LAYERS):
        sequence.write(layer, torch.randn(KEPT, tokens, WIDTH), torch.randn(KEPT, tokens, WIDTH))
    return sequence


def in_runs(tokens: int) -> PagedKvCache:
    """Room in which a sequence of so many tokens lies in about RUNS pieces."""
    kv = PagedKvCache(LAYERS, KEPT, WIDTH, 3 * tokens, BLOCK)
    holders = [kv.sequence() for _ in range(3 * tokens // BLOCK)]
    for holder in holders:
        holder.extend(BLOCK)
    every = max(2, tokens // BLOCK // RUNS)
    for holder in holders:
        if holder.spans()[0][0] // BLOCK % every:
            holder.free()
    return kv


def gathered(module: Any, query: Any, key: Any, value: Any, mask: None, *, scaling: float, paged: Any, **_: Any) -> Any:
    """What a block table costs where attention wants its keys and values behind each other."""
    (part,) = paged.calls
    kept = []
    for new, tensor in ((key, paged.kv.keys[module.layer_idx]), (value, paged.kv.values[module.layer_idx])):
        tensor.index_copy_(1, paged.slot_mapping, new[0])
        places = torch.cat([torch.arange(*span) for span in part.spans])
        kept.append(tensor.index_select(1, places)[None])
    rows = query.reshape(1, KEPT, -1, WIDTH)
    made = scaled_dot_product_attention(rows, *kept, scale=scaling)
    return made.reshape(1, HEADS, 1, WIDTH).transpose(1, 2), None


def one_token(model: LanguageModel, sequences: Sequence[KvSequence], **how: Any) -> Step:
    def step() -> None:
        for sequence in sequences:
            sequence.extend(1)
        model.forward([(sequence, [7]) for sequence in sequences], **how)
        for sequence in sequences:
            sequence.truncate(sequence.length - 1)

    return step


def by_transformers(model: Any, context: int) -> Step:
    cache = DynamicCache(config=model.config)
    for layer in range(LAYERS):
        cache.update(torch.randn(1, KEPT, context, WIDTH), torch.randn(1, KEPT, context, WIDTH), layer)
    token = torch.tensor([[7]])

    def step() -> None:
        with torch.no_grad():
            model(input_ids=token, past_key_values=cache, use_cache=True)

    return step


def variants(context: int) -> dict[str, Step]:
    plain = narrow()
    kv, parted = PagedKvCache(LAYERS, KEPT, WIDTH, 2 * context, BLOCK), in_runs(context)
    whole, pieces = filled(kv, context), filled(parted, context)
    models = [LanguageModel(copy.deepcopy(plain), memory) for memory in (kv, parted)]
    copied = copy.deepcopy(plain)
    gathering = LanguageModel(copied, parted)
    AttentionInterface.register("bench_gathered", gathered)
    copied.set_attn_implementation("bench_gathered")
    return {
        "one run": one_token(models[0], [whole]),
        "many runs": one_token(models[1], [pieces]),
        "one run, exact": one_token(models[0], [whole], alone=True),
        "many runs, exact": one_token(models[1], [pieces], alone=True),
        "gathered": one_token(gathering, [pieces]),
        "DynamicCache": by_transformers(plain, context),
    }


def timed(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each step, in turns; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            start = time.thread_time()
            step()
            if turn:
                seconds[name].append(time.thread_time() - start)
    return seconds


def ms(seconds: list[float]) -> float:
    return round(quantile(seconds, 0.5) * 1e3, 2)


def contexts(lengths: Sequence[int], rounds: int) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    for context in lengths:
        rows[str(context)] = {name: ms(seconds) for name, seconds in timed(variants(context), rounds).items()}
    return rows


def together(counts: Sequence[int], rounds: int, context: int = 1024) -> dict[str, dict[str, object]]:
    kv = PagedKvCache(LAYERS, KEPT, WIDTH, 2 * context * max(counts), BLOCK)
    model = LanguageModel(narrow(), kv)
    sequences = [filled(kv, context) for _ in range(max(counts))]
    rows: dict[str, dict[str, object]] = {}
    for count in counts:
        some = sequences[:count]
        seconds = timed({"together": one_token(model, some), "alone": one_token(model, some, alone=True)}, rounds)
        rows[str(count)] = {
            "ms a turn": ms(seconds["together"]),
            "one after the other, exact": ms(seconds["alone"]),
            "tokens/s": round(count / quantile(seconds["together"], 0.5)),
        }
    return rows


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    by_context, by_count = contexts(CONTEXTS, rounds), together(TOGETHER, rounds)
    table("ms a token, by context", by_context)
    table("sequences of 1K", by_count)
    show("kv", contexts=by_context, together=by_count)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
