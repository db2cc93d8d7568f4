"""What grammars cost: those who have one, and those who have none.

Turns of four texts without a grammar, and a fifth that has none, or has to be JSON; in turns, on the same decode stage,
in pairs. Of each turn the seconds, and of the fifth text those that it waits for what may follow behind the forward.
Then, alone: what may follow, how long it takes until a grammar is compiled, the first one with the program's start, and
how long it takes to try one. With SmolLM2 where it is installed, else a narrow random model; one thread.
`python -m bench.grammar [PAIRS]`
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.report import ratio, show, spread
from tools.tiny_language import make_language_model
from unfuse.core.checking import check_request
from unfuse.core.derived_facts import GRAMMAR, DerivedFacts
from unfuse.core.errors import ConfigError
from unfuse.core.modalities import TEXT
from unfuse.core.text import pack_ids
from unfuse.core.text_parameters import PromptTokens, schema_text
from unfuse.language.grammars import Grammar, Grammars, grammar_digest, pack_grammar
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.models import find, read_model_spec, resolve_source
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import StageInput, next_states
from unfuse.stages.language import Decode, DecodeState

PAIRS, FREE, WARM = 60, 4, 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 200},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def grammar(number: int = 0) -> bytes:
    said = schema_text({**SCHEMA, "title": f"number {number}"}, True, "bench")
    return pack_grammar(Grammar("json_schema", said), "bench")


def model(folder: Path) -> Path:
    try:
        return resolve_source("smollm2")
    except ConfigError:
        return make_language_model(folder / "narrow", positions=2048)


class Texts:
    """The decode stage of a model, and texts that it makes."""

    def __init__(self, source: Path) -> None:
        self._card, self._tokenizer = read_model_spec("bench", source), ChatTokenizer.read(source)
        runtime = RuntimeOptions("cpu", self._card.dtypes, kv=1 << 30, shared_objects={})
        stage = find(source).load(self._card.pipeline.stages[1], source, runtime)
        assert isinstance(stage, Decode)
        self.stage = stage

    def start(self, seed: int, held: bytes | None = None) -> DecodeState:
        ids = self._tokenizer.prompt([{"role": "user", "content": "Tell me of a person, as JSON."}])
        asked: dict[str, Any] = {"messages": [], "seed": seed, "max_tokens": 400}
        asked |= {"logit_bias": {str(stop): -100 for stop in self._tokenizer.stops}}
        uploads = {"prompt": pack_ids(ids)} | ({GRAMMAR: held} if held else {})
        params, _ = check_request(self._card, asked, TEXT, tokens=PromptTokens(len(ids)))
        derived = DerivedFacts(prompt_tokens=len(ids), grammar=grammar_digest(held) if held else "")
        state = self.stage.start(StageInput(params, {}, uploads, derived=derived))
        while held and self.stage.waits(state):
            time.sleep(0.01)
        return state

    def step(self, states: list[DecodeState]) -> list[DecodeState]:
        made = next_states(self.stage, states)
        assert not any(isinstance(state, Exception) for state in made)
        return [state for state in made if isinstance(state, DecodeState)]


class Slow:
    """A constraint that is looked at: how long it lets a step wait."""

    def __init__(self, inner: Any, waits: list[float]) -> None:
        self._inner, self._waits = inner, waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allowed(self, ids: list[int]) -> bytes | None:
        began = time.perf_counter()
        mask: bytes | None = self._inner.allowed(ids)
        self._waits.append(time.perf_counter() - began)
        return mask


def turns(texts: Texts, pairs: int) -> dict[str, object]:
    """Seconds of turns of all texts, in pairs: the fifth text without a grammar, and with one."""
    seconds: dict[str, list[float]] = {"free": [], "held": []}
    waits = list[float]()
    states = {name: [texts.start(seed) for seed in range(FREE)] for name in seconds}
    for name, held in (("free", None), ("held", grammar())):
        states[name].append(texts.start(9, held))
    object.__setattr__(states["held"][-1], "constraint", Slow(states["held"][-1].constraint, waits))
    for turn in range(pairs + WARM):
        for name in [*seconds][:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            states[name] = texts.step(states[name])
            if turn >= WARM:
                seconds[name].append(time.perf_counter() - began)
    for state in (*states["free"], *states["held"]):
        texts.stage.release(state)
    return {
        "turn, one with a grammar / none": ratio(seconds["held"], seconds["free"]),
        "seconds of a turn": spread(seconds["free"]),
        "seconds waited behind the forward": spread(waits[WARM:]),
    }


def timed(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def alone(source: Path, tokens: int, grammars: int) -> dict[str, object]:
    """Seconds until it is known what may follow, by tokens of a text; and until a grammar is compiled, or tried."""
    opened, trial = Grammars(str(source), patience_s=None), Grammars()
    first, first_trial = timed(lambda: opened.open(grammar()).allowed([])), timed(lambda: trial.refusal(grammar()))
    constraint, made, each = opened.open(grammar()), list[int](), list[float]()
    for id in (ChatTokenizer.read(source).ids(json.dumps({"name": "x" * tokens, "ages": [*range(tokens)]})))[:tokens]:
        each.append(timed(lambda: constraint.allowed(made)))
        made.append(id)
    compiled = [timed(lambda n=n: opened.open(grammar(n)).allowed([])) for n in range(1, grammars)]
    tried = [timed(lambda n=n: trial.refusal(grammar(n))) for n in range(1, grammars)]
    opened.close()
    trial.close()
    return {
        "seconds of what may follow": spread(each),
        "seconds until compiled": spread(compiled) | {"first": round(first, 3)},
        "seconds until tried": spread(tried) | {"first": round(first_trial, 3)},
    }


def main(pairs: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        source = model(Path(folder))
        figures = turns(Texts(source), pairs) | alone(source, 4 * pairs, max(8, pairs // 2))
    show("grammar", model=source.name, **figures)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS)
