"""Offloaded models on a pretended GPU: the CPU's bytes, whatever part runs, and host memory that is pinned once."""

from __future__ import annotations

import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from tests.models.test_language import MOST, task
from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU, LoadedModel, differing, held_by, load, run_request
from tools import tiny, tiny_whole
from tools.tiny_language import make_language_model
from tools.tiny_vision import make_vision_model
from unfuse.core.errors import ConfigError
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.models import declared
from unfuse.parallel.devices import set_current
from unfuse.stages.base import StageInput, next_states
from unfuse.weights.offload import offload_model

pytestmark = pytest.mark.slow

KINDS = ("flux", "klein", "krea", "sd", "wan-image")
"""With two text encoders, of blocks of modular pipelines, undivided, and with an image encoder."""

MORE = ("wan", "wan-2.2", "wan-2.2-image", "wan-2.2-5b", "wan-2.2-5b-image", "kontext", "hunyuan-video", "qwen-image")
NIGHTLY = (*MORE, "sdxl", "sd3", "z-image", "ltx")
"""One kind of each other family."""

EDITS = ("wan-image", "wan-2.2-image", "wan-2.2-5b-image", "kontext")
"""Kinds whose requests need a picture."""


@pytest.mark.parametrize("offload", ["model", "sequential", "text_encoder=model,vae=sequential"])
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in NIGHTLY)])
def test_offloaded_model_on_second_gpu_has_bytes_of_cpu(kind: str, offload: str, tmp_path: Path) -> None:
    folder = (tiny if kind in tiny.KINDS else tiny_whole).build(kind, tmp_path / kind)
    params = {"height": 64, "width": 64, "num_inference_steps": 3} | ({"image": "x"} if kind in EDITS else {})
    expected = run_request(load(folder), params)
    with PretendedGpus() as gpus:
        model = load(folder, GPU, offload=offload)
        assert gpus.memory.pinned == 0 < len(gpus.memory.registered), "pinned, and not tensor by tensor"
        assert differing(expected, run_request(model, params, gpus)) == []
        assert held_by(gpus).keys() <= {GPU}


@pytest.mark.parametrize("offload", ["model", "sequential"])
@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_offloaded_transformer_skips_the_same_blocks_with_a_feature_cache(
    kind: str, offload: str, tmp_path: Path
) -> None:
    """The blocks of Wan have weights of their own, beside those of their layers."""
    folder, sizes = tiny.build(kind, tmp_path / kind), {"height": 64, "width": 64, "num_inference_steps": 6}
    params = sizes | {"feature_cache": 0.4}
    expected = run_request(load(folder, batching="batched"), params)
    assert differing(expected, run_request(load(folder, batching="batched"), sizes)), "blocks are skipped"
    with PretendedGpus() as gpus:
        model = load(folder, GPU, batching="batched", offload=offload)
        assert differing(expected, run_request(model, params, gpus)) == []
        assert differing(expected, run_request(model, params, gpus)) == []


def test_excluded_component_of_an_undivided_pipeline_stays_on_the_gpu(tmp_path: Path) -> None:
    """Its class names it, as that of SD names its safety checker."""
    folder = tiny_whole.build("sd", tmp_path / "sd")
    with patch.object(declared, "_strings", lambda node, attribute: ["text_encoder"]), PretendedGpus():
        declared.declared_pipeline.cache_clear()
        components = load(folder, GPU, offload="model").stages[0][1]._pipeline.components  # type: ignore[attr-defined]
        assert components["text_encoder"].device == torch.device(GPU)
        assert components["unet"].device == torch.device("cpu")
    declared.declared_pipeline.cache_clear()


def test_adapters_of_an_undivided_pipeline_are_refused_with_sequential_offload(tmp_path: Path) -> None:
    folder = tiny_whole.build("sd", tmp_path / "sd")
    with PretendedGpus(), pytest.raises(ConfigError, match="--loras cannot be combined with --offload sequential"):
        load(folder, GPU, loras=str(tmp_path), offload="model,unet=sequential")


def answers(model: LoadedModel, folder: Path) -> list[list[int]]:
    """The answers to prompts of several lengths, computed together."""
    (prefill,), (decode,) = (
        [stage for spec, stage in model.stages if spec.kind == kind] for kind in ("prefill", "decode")
    )
    tokenizer, states = ChatTokenizer.read(folder), []
    for words in (3, 40):
        text = " ".join(random.Random(words).choices(["the", "quick", "brown", "fox"], k=words))
        asked = task(model.spec, tokenizer.prompt([{"role": "user", "content": text}]))
        (output,) = prefill.run([asked])
        inputs = {name: tensor.clone() for name, tensor in output.tensors.items() if tensor is not None}
        states.append(decode.start(StageInput(asked.params, inputs, asked.uploads, derived=asked.derived)))
    for _ in range(MOST):
        states = next_states(decode, states)
    return [[*state.ids] for state in states]


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offloaded_language_model_on_second_gpu_has_tokens_of_cpu(offload: str, tmp_path: Path) -> None:
    folder = make_language_model(tmp_path / "llama")
    expected = answers(load(folder), folder)
    with PretendedGpus():
        assert answers(load(folder, GPU, offload=offload), folder) == expected


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offloaded_vision_encoder_on_second_gpu_has_features_of_cpu(offload: str, tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "seeing", "Qwen3VL")

    def features(model: LoadedModel) -> list[torch.Tensor]:
        (stage,) = [stage for spec, stage in model.stages if spec.kind == "vision_encode"]
        tower = stage._encoder
        sizes = tower._tower.config
        width = sizes.in_channels * sizes.temporal_patch_size * sizes.patch_size**2
        with torch.no_grad():
            found = tower._forward(torch.linspace(-1, 1, 16 * width).view(16, width), (1, 4, 4))
        return [tensor.cpu() for tensor in (found.embeddings, *found.deep)]

    expected = features(load(folder))
    with PretendedGpus():
        found = features(load(folder, GPU, offload=offload))
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def encoder() -> T5EncoderModel:
    """One whose embedding is the weight of two modules, as those of T5 are."""
    torch.manual_seed(0)
    return T5EncoderModel(T5Config(vocab_size=99, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3)).eval()


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_weights_are_pinned_in_one_buffer_and_shared_ones_once(offload: str) -> None:
    plain = encoder()
    size = sum(-(-tensor.nbytes // 256) * 256 for tensor in (*plain.parameters(), *plain.buffers()))
    with PretendedGpus() as gpus:
        model = offload_model(encoder(), torch.device(GPU), offload)  # type: ignore[arg-type]
        assert [*gpus.memory.registered.values()] == [size]
        assert gpus.memory.pinned == 0, "nothing is pinned tensor by tensor"
        with torch.no_grad():
            found = model(torch.arange(6, device=GPU)[None]).last_hidden_state.cpu()
        assert gpus.records.copied["cpu to cuda"] >= size // 2
        del model
        held_by(gpus)
        assert not gpus.memory.registered
    with torch.no_grad():
        assert torch.equal(found, plain(torch.arange(6)[None]).last_hidden_state)


def test_sequential_offload_copies_on_a_stream_of_its_own_device() -> None:
    """As a worker does, which makes its device the current one before it loads."""
    with PretendedGpus() as gpus:
        set_current(GPU)
        model = offload_model(encoder(), torch.device(GPU), "sequential")
        with torch.no_grad():
            model(torch.arange(6, device=GPU)[None])
        streams = {call.name for call in gpus.records.calls if call.name.startswith("Stream(")}
        assert streams == {f"Stream({GPU})"}
        assert not any(call.name == "copy cpu to cuda" for call in gpus.records.calls), (
            "all copies are of pinned memory"
        )


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_refused_pinning_warns_with_the_limit_and_computes_the_same(
    offload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.no_grad():
        expected = encoder()(torch.arange(6)[None]).last_hidden_state
    with PretendedGpus() as gpus:
        gpus.memory.registrable = 1000
        model = offload_model(encoder(), torch.device(GPU), offload)  # type: ignore[arg-type]
        assert not gpus.memory.registered and gpus.memory.pinned == 0
        with torch.no_grad():
            assert torch.equal(model(torch.arange(6, device=GPU)[None]).last_hidden_state.cpu(), expected)
    warned = capsys.readouterr().out
    assert "weights not pinned" in warned and "ulimit -l" in warned and "error=2" in warned
