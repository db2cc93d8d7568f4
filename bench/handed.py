"""Keys and values from prefill to a decoder: time to the first decoded token, and what a small receive buffer costs.

Overlap: a narrow random model prefills a prompt in this process, and another arena pulls what it makes by tcp, while it
is made (announced) or afterwards (put whole), over loopback as it is and slowed to so many MB/s; then the decoder draws
a token. Interleaved pairs. Pieces: prompts of 20K ... 100K tokens through a window of 8K into a decoder's blocks,
against an arena that holds them whole, which the decoder reads then; what came is compared.
`python -m bench.handed [ROUNDS]`
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from bench.pull import Slow
from bench.report import quantile, ratio, show, table
from bench.tokens import Counted
from unfuse.arena.arena import Arena
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.object_ref import ObjectRef
from unfuse.core.text import pack_ids
from unfuse.language.paged_kv import KvSequence
from unfuse.stages.base import StageInput, next_states
from unfuse.stages.kv_transfer import CHUNKS, LAST_CHUNK, KvReader
from unfuse.stages.language import Decode, Prefill, PrefillState
from unfuse.stages.sequence_pool import open_model
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferOptions
from unfuse.transfer.session import ArenaSink, Transfers, TransferSession

K = 1024
LAYERS, HEADS, KEPT, WIDTH, VOCABULARY = 4, 8, 4, 64, 512
TOKEN = 2 * LAYERS * KEPT * WIDTH * 4
PROMPT = 4 * K
RATES = (0, 125, 40)
"""MB/s of the network; 0: as fast as it goes."""
LONG, WINDOW = (20, 50, 100), 8
ROUNDS = 5
OPTIONS = TransferOptions(insecure=True)
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "seed": 1,
    "logit_bias": "{}",
    "logprobs": None,
    "stop": "[]",
    "max_tokens": 1,
}


class Words:
    """A tokenizer that says nothing."""

    stops = specials = frozenset[int]()

    def decode(self, ids: object) -> str:
        return ""

    def piece(self, id: int, first: bool) -> bytes:
        return b""


class NoGrammars:
    def open(self, grammar: bytes) -> Any:
        raise NotImplementedError


class Bench:
    """Both ends."""

    def __init__(self, positions: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HEADS * WIDTH,
            intermediate_size=1024,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KEPT,
            max_position_embeddings=positions,
        )
        model = LlamaForCausalLM(config).eval()
        self.near, self.far = (open_model(model, "cpu", positions) for _ in range(2))
        capacity = 1 << (2 * positions * TOKEN - 1).bit_length()
        self.owner = TensorStore.create("shared_memory", owner="p", capacity=capacity, run_dir=os.environ["BENCH_RUN"])
        self.arena = Arena(capacity)
        self.engine = Slow(OPTIONS)
        assert self.owner.arena
        address = self.engine.serve(self.owner.arena)
        self.transfers = Transfers({"tcp": self.engine}, lambda _: {"tcp": address}, OPTIONS)
        self.prefill, self.decode = Prefill(self.near), Decode(self.far, Words(), NoGrammars())
        self.number = 0

    def first_token(self, ids: list[int], announced: bool) -> tuple[float, float, float]:
        """Seconds of prefill, as a clock and as this thread's CPU time tell, and from its end to a token elsewhere."""
        self.number += 1
        named: dict[str, Any] = {"request": f"req_{self.number}", "stage": "prefill", "attempt": 1}
        task = StageInput(GREEDY, {}, {"prompt": pack_ids(ids)}, derived=DerivedFacts(prompt_tokens=len(ids)))
        began, computed = time.monotonic(), time.thread_time()
        state = self.prefill.start(task)
        output = self.owner.start_output(self.prefill.outline(state), **named) if announced else None
        if output:
            self.prefill.write_to(state, output)
            pulling = self.pull(output.ref)
        state = self._whole(state)
        prefilled, computed = time.monotonic(), time.thread_time() - computed
        made = self.prefill.finish(state)
        if output:
            output.finish()
        else:
            pulling = self.pull(self.owner.put(made.tensors, **named))
        session, sink = pulling
        session.result(600)
        tensors = tensors_of(self.arena, sink, session.ref)
        writing = self.decode.start(StageInput(task.params, tensors, task.uploads))
        (stepped,) = next_states(self.decode, [writing])
        assert not isinstance(stepped, Exception) and self.decode.new_chunks(stepped) and writing.done == len(ids) - 1
        behind = time.monotonic() - prefilled
        self.decode.release(stepped)
        self.prefill.release(state)
        assert sink.extent
        self.arena.delete(sink.extent.id)
        self.owner.release(named["request"])
        return prefilled - began, computed, behind

    def _whole(self, state: PrefillState) -> PrefillState:
        done, steps = self.prefill.progress(state)
        for _ in range(done, steps):
            (stepped,) = next_states(self.prefill, [state])
            assert not isinstance(stepped, Exception)
            state = stepped
        return state

    def pull(self, ref: ObjectRef) -> tuple[TransferSession, ArenaSink]:
        sink = ArenaSink(self.arena, ref)
        return self.transfers.fetch(ref, sink), sink


def tensors_of(arena: Arena, sink: ArenaSink, ref: ObjectRef) -> dict[str, Any]:
    assert (extent := sink.extent)
    memory = arena.memory[extent.offset : extent.offset + extent.nbytes]
    found = {meta.name: memory[meta.offset : meta.offset + meta.nbytes] for meta in ref.tensors}
    shapes = {meta.name: meta.shape for meta in ref.tensors}
    return {name: torch.from_numpy(part).view(torch.float32).view(shapes[name]) for name, part in found.items()}


def overlap(bench: Bench, rounds: int) -> dict[str, dict[str, Any]]:
    rows = {}
    ids = torch.randint(0, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    for rate in RATES:
        bench.engine.rate = rate
        bench.first_token(ids, True)
        pairs = [(bench.first_token(ids, True), bench.first_token(ids, False)) for _ in range(rounds)]
        meanwhile, afterwards = ([pair[side] for pair in pairs] for side in (0, 1))
        whole = median(prefill for prefill, _, _ in meanwhile + afterwards)
        rows[f"{rate} MB/s" if rate else "loopback"] = {
            "MiB": PROMPT * TOKEN >> 20,
            "prefill, s": round(whole, 2),
            "its CPU time, meanwhile ÷ afterwards": ratio([c for _, c, _ in meanwhile], [c for _, c, _ in afterwards])[
                "p50"
            ],
            "token behind prefill, ms": round(median(behind for _, _, behind in meanwhile) * 1e3),
            "pulled afterwards, ms": round(median(behind for _, _, behind in afterwards) * 1e3),
            "meanwhile ÷ afterwards": ratio([b for _, _, b in meanwhile], [b for _, _, b in afterwards])["p50"],
            "to the first token, the same": ratio(
                [whole + b for _, _, b in meanwhile], [whole + b for _, _, b in afterwards]
            )["p50"],
        }
    bench.engine.rate = 0
    return rows


def pieces(bench: Bench, rounds: int) -> dict[str, dict[str, Any]]:
    rows = {}
    buffer = np.empty(WINDOW * K * TOKEN, np.uint8)
    for length in LONG:
        tokens = length * K
        layout = bench.far.layout(tokens)
        ref = bench.owner.put(
            {name: torch.rand(shape) for name, _, shape in layout.outline()}, request="req", stage="s", attempt=1
        )
        ways: dict[str, Callable[[KvSequence], int]] = {
            "pieces": lambda kv: through(bench, ref, buffer, kv),  # noqa: B023
            "whole": lambda kv: at_once(bench, ref, kv),  # noqa: B023
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        resumes, sums = 0, set[float]()
        for _ in range(rounds + 1):
            for name, way in ways.items():
                kv = bench.far.start(0)
                kv.extend(tokens)
                began = time.monotonic()
                resumes = max(resumes, way(kv))
                seconds[name].append(time.monotonic() - began)
                sums.add(round(float(torch.stack([kv.read(0)[0], kv.read(LAYERS - 1)[1]]).double().sum()), 3))
                bench.far.free(kv)
        more = quantile([a - b for a, b in zip(seconds["pieces"], seconds["whole"], strict=True)][1:], 0.5)
        rows[f"{length}K"] = {
            "MiB": ref.nbytes >> 20,
            "resumes": resumes,
            "ms": round(median(seconds["pieces"][1:]) * 1e3),
            "whole, ms": round(median(seconds["whole"][1:]) * 1e3),
            "ms more for each resume": round(more * 1e3 / max(1, resumes), 2),
            "arena, MiB": f"{buffer.nbytes >> 20} instead of {ref.nbytes >> 20}",
            "the same": len(sums) == 1,
        }
        bench.owner.delete(ref)
    return rows


def through(bench: Bench, ref: ObjectRef, buffer: NDArray[np.uint8], kv: KvSequence) -> int:
    window, reader = Counted(buffer, ref), KvReader(kv, bench.far.layout(kv.length))
    session = bench.transfers.fetch(ref, window)
    for piece in window:
        reader.write(torch.from_numpy(piece))
    session.result(600)
    assert reader.is_complete
    return window.asked - 1


def at_once(bench: Bench, ref: ObjectRef, kv: KvSequence) -> int:
    session, sink = bench.pull(ref)
    session.result(600)
    tensors = tensors_of(bench.arena, sink, ref)
    assert tensors.keys() == {CHUNKS, LAST_CHUNK} and sink.extent
    for start, layer, unit in bench.far.layout(kv.length).read(tensors):
        kv.write(layer, unit[:, 0], unit[:, 1], start)
    bench.arena.delete(sink.extent.id)
    return 0


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BENCH_RUN"] = folder
        found = {
            "first token": overlap(Bench(PROMPT + K), rounds),
            f"through {WINDOW}K tokens": pieces(Bench(LONG[-1] * K + K), rounds),
        }
    show("handed", rounds=rounds, token_bytes=TOKEN, **found)
    for name, rows in found.items():
        table(name, rows)
    os._exit(0)


if __name__ == "__main__":
    main()
