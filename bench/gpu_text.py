"""Texts on a GPU: a tiny Llama against the CPU, and the time of a token of a wide one."""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from unfuse.core.checking import check_request
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.modalities import TEXT
from unfuse.core.text import pack_ids
from unfuse.core.text_parameters import PromptTokens
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.models import find, read_model_spec
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import StageInput, next_states

#: Words of prompts.
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]

#: Tokens of an answer, of which the first steps warm up.
ANSWER, WARM_UP, TIMED = 20, 3, 7


class TokenModel:
    """Prefill and decode of a language model, with room for 16,384 tokens at 8 KiB each."""

    KV_BYTES = 16_384 << 13

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        self.card = read_model_spec("bench", folder, dtype)
        options = ComputeOptions(device=device, batching="batched")
        run = RuntimeOptions(device, self.card.dtypes, options, kv=self.KV_BYTES, shared_objects={})
        self._tokenizer = ChatTokenizer.read(folder)
        stages = {spec.kind: find(folder).load(spec, folder, run) for spec in self.card.pipeline.stages}
        self._prefill, self.decode = stages["prefill"], stages["decode"]

    def prefill(self, text: str, **parameters: Any) -> StageInput:
        """Compute the KV of a chat's prompt. Returns the task that decodes its answer."""
        ids = self._tokenizer.prompt([{"role": "user", "content": text}])
        body = {"messages": [], "seed": 1, **parameters}
        params, _ = check_request(self.card, body, TEXT, tokens=PromptTokens(len(ids)))
        derived = DerivedFacts(prompt_tokens=len(ids))
        task = StageInput(params, {}, {"prompt": pack_ids(ids)}, derived=derived)
        (output,) = self._prefill.run([task])
        kv = {name: tensor.clone() for name, tensor in output.tensors.items() if tensor is not None}
        return StageInput(params, kv, task.uploads, derived=derived)


def prompt(words: int, seed: int) -> str:
    """Return a prompt of random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def answer(folder: Path, device: str, dtype: str) -> tuple[list[int], dict[str, Any]]:
    """Return the greedy tokens of an answer, and the KV of its prompt in float32."""
    model = TokenModel(folder, device, dtype)
    kv = model.prefill(prompt(40, 0), temperature=0, max_tokens=ANSWER)
    state = model.decode.start(kv)
    while len({*model.decode.progress(state)}) > 1:
        (state,) = next_states(model.decode, [state])
    tokens = state.ids[state.prompt :]
    model.decode.release(state)
    return tokens, {name: tensor.float() for name, tensor in kv.tensors.items() if tensor is not None}


def compare(folder: Path, device: str, dtype: str) -> dict[str, Any]:
    """Compare greedy tokens and KV on the device with those on the CPU in float32."""
    (reference, kv), (tokens, own) = answer(folder, "cpu", "float32"), answer(folder, device, dtype)
    figures: dict[str, Any] = {"equal_tokens": sum(map(int.__eq__, reference, tokens)), "tokens": len(reference)}
    for name, tensor in kv.items():
        figures[name] = round(float((tensor - own[name]).norm() / tensor.norm().clamp(min=1e-9)), 6)
    return figures


def decode_times(folder: Path, device: str, texts: int, temperature: float) -> dict[str, Any]:
    """Return milliseconds of prefill for each text, and of a decode step of all texts."""
    model = TokenModel(folder, device, "auto" if device == "cpu" else "bfloat16")
    began = time.perf_counter()
    options = {"temperature": temperature, "max_tokens": 64}
    prefilled = [model.prefill(prompt(200, seed), seed=seed, **options) for seed in range(texts)]
    prefill_ms = (time.perf_counter() - began) * 1e3 / texts
    states, seconds = [model.decode.start(kv) for kv in prefilled], []
    for _ in range(WARM_UP + TIMED):
        began = time.perf_counter()
        states = next_states(model.decode, states)
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    for state in states:
        model.decode.release(state)
    step = median(seconds[WARM_UP:])
    return {
        "prefill_ms_each": round(prefill_ms, 1),
        "step_ms": round(step * 1e3, 2),
        "tokens_per_s": round(texts / step),
    }
