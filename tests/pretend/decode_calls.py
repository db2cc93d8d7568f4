"""Aten calls and waits of the host in a decode step, on a pretended GPU with tiny models.

With `--decode-attention gathered`, a step of 1, 8 and 64 texts of different lengths, for each kind of sampling. The
calls of a layer are those by which models of 4 and of 2 layers differ. Calls are about as many as kernels are launched:
views are not counted.
`python -m tests.pretend.decode_calls [FILE.json]`
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tests.models.test_language import task
from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU, LoadedModel, load, on_host
from tools import tiny_language
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.stages.base import Stage, StageInput, next_states

TEXTS = (1, 8, 64)
FEW_LAYERS, MANY_LAYERS = 2, 4
STEPS = 3  # of which the last is counted

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "drawn with all": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
        "logit_bias": {"7": 1.5},
        "logprobs": True,
        "top_logprobs": 5,
    },
}


class Texts:
    """Prompts of different lengths, prefilled on a pretended GPU."""

    def __init__(self, folder: Path, count: int, gpus: PretendedGpus) -> None:
        self._gpus = gpus
        self._model = load(folder, GPU, batching="batched", decode_attention="gathered")
        tokenizer, words = ChatTokenizer.read(folder), tiny_language.TEXT.split()
        self._prompts = [
            tokenizer.prompt([{"role": "user", "content": " ".join(random.Random(seed).choices(words, k=length))}])
            for seed, length in enumerate(random.Random(0).choices(range(3, 60), k=count))
        ]
        self._kv = [self._prefilled(prompt) for prompt in self._prompts]

    def _prefilled(self, prompt: Sequence[int]) -> dict[str, Any]:
        (output,) = stage_of(self._model, "prefill").run([task(self._model.spec, prompt)])
        return on_host(output.tensors)

    def count(self, texts: int, asked: dict[str, Any]) -> dict[str, int]:
        """The calls and waits of one decode step of the first of them."""
        decode = stage_of(self._model, "decode")
        states = []
        for prompt, kv in zip(self._prompts[:texts], self._kv, strict=False):
            first = task(self._model.spec, prompt, ignore_eos=True, max_tokens=STEPS + 1, **asked)
            states.append(decode.start(StageInput(first.params, kv, first.uploads, derived=first.derived)))
        for _ in range(STEPS):
            self._gpus.records.clear()
            states = next_states(decode, states)
        records = self._gpus.records
        counted = {"calls": records.operations.total(), "waits": records.waits.total()}
        for state in states:
            decode.release(state)
        return counted


def stage_of(model: LoadedModel, kind: str) -> Stage:
    (stage,) = [stage for spec, stage in model.stages if spec.kind == kind]
    return stage


def count_all(folder: Path) -> dict[str, dict[str, int]]:
    counts = dict[tuple[int, str, int], dict[str, int]]()
    for layers in (FEW_LAYERS, MANY_LAYERS):
        made = tiny_language.make_language_model(folder / str(layers), layers=layers, positions=2048)
        with PretendedGpus() as gpus:
            prefilled = Texts(made, max(TEXTS), gpus)
            for (name, asked), texts in product(SAMPLING.items(), TEXTS):
                counts[layers, name, texts] = prefilled.count(texts, asked)
    found = {}
    for name, texts in product(SAMPLING, TEXTS):
        few, many = counts[FEW_LAYERS, name, texts], counts[MANY_LAYERS, name, texts]
        layer = (many["calls"] - few["calls"]) // (MANY_LAYERS - FEW_LAYERS)
        rest = few["calls"] - FEW_LAYERS * layer
        found[f"{name}, texts: {texts}"] = {"calls of a layer": layer, "other calls": rest, "waits": few["waits"]}
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = count_all(Path(temporary))
    for name, counted in found.items():
        print(f"{name}: {counted}")
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(found))
