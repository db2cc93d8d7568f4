"""Weights that rest: what is computed stays the same, and one component at a time is on the device.

The host stands in for a GPU here: what comes to the device is a copy that goes again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import LlamaConfig, LlamaForCausalLM, UMT5EncoderModel

from tools.tiny import adapter
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.offload_options import Offload
from unfuse.core.plan import Params
from unfuse.models import resolve_source
from unfuse.models.base import Loader, RuntimeOptions
from unfuse.weights.adapters import AdapterFolder, LoadedAdapters
from unfuse.weights.folder import ModelFolder
from unfuse.weights.offload import offload_model

SHAPES = resolve_source("unfuse/shapes")
HOST = torch.device("cpu")
VAE = {"vae": ("diffusers", "AutoencoderKLWan")}


def transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel.from_pretrained(SHAPES, subfolder="transformer").eval()


def vae() -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(SHAPES, subfolder="vae").eval()


@torch.no_grad()
def denoise(model: torch.nn.Module) -> torch.Tensor:
    latents, text = torch.linspace(-1, 1, 16 * 64).view(1, 16, 1, 8, 8), torch.ones(1, 16, 96)
    found: torch.Tensor = model(latents, torch.tensor([500]), text, return_dict=False)[0]
    return found


@torch.no_grad()
def decode(model: AutoencoderKLWan) -> torch.Tensor:
    found: torch.Tensor = model.decode(torch.linspace(-1, 1, 16 * 64).view(1, 16, 1, 8, 8), return_dict=False)[0]
    return found


def places(model: torch.nn.Module) -> list[int]:
    """Where the weights of a model lie."""
    return [tensor.data_ptr() for tensor in model.parameters()]


@pytest.mark.parametrize("how", ["model", "sequential"])
def test_offloaded_model_computes_identical_outputs(how: Offload) -> None:
    assert torch.equal(denoise(offload_model(transformer(), HOST, how)), denoise(transformer()))
    assert torch.equal(decode(offload_model(vae(), HOST, how)), decode(vae()))


def test_sequentially_offloaded_text_encoder_computes_identical_outputs() -> None:
    plain = UMT5EncoderModel.from_pretrained(SHAPES, subfolder="text_encoder").eval()
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        expected = plain(tokens).last_hidden_state
        assert torch.equal(offload_model(plain, HOST, "sequential")(tokens).last_hidden_state, expected)


def test_a_component_is_on_the_device_until_another_one_runs() -> None:
    one, two = offload_model(transformer(), HOST, "model"), offload_model(vae(), HOST, "model")
    resting = places(one), places(two)
    denoise(one)
    there = places(one)
    assert not {*there} & {*resting[0]}
    denoise(one)
    assert places(one) == there  # it stays while only it runs
    decode(two)
    assert (places(one), places(two) == resting[1]) == (resting[0], False)
    denoise(one)
    assert places(two) == resting[1]


PARTS = ("model", "model.embed_tokens", "lm_head", "model.norm", "model.rotary_emb")
"""Of a language model: its decoder, its head and more, which stages run without the model around them."""


@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_part_that_runs_by_itself_brings_the_model_to_the_device(part: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    model, other = (offload_model(one, HOST, "model") for one in (LlamaForCausalLM(config).eval(), vae()))
    inputs: dict[str, tuple[Any, ...]] = {
        "model": (torch.arange(4)[None],),
        "model.embed_tokens": (torch.arange(4),),
        "model.rotary_emb": (torch.ones(1, 4, 16), torch.arange(4)[None]),
    }
    resting = places(model)
    decode(other)
    model.get_submodule(part)(*inputs.get(part, (torch.ones(1, 16),)))
    assert not {*places(model)} & {*resting}
    decode(other)
    assert places(model) == resting


def test_component_returns_to_host_memory_if_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    model = offload_model(transformer(), HOST, "model")
    resting, calls = places(model), 0
    to = torch.Tensor.to

    def full(tensor: torch.Tensor, *given: object, **options: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise torch.OutOfMemoryError("no room")
        return to(tensor, *given, **options)  # type: ignore[arg-type,call-overload,no-any-return,unused-ignore]

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch.Tensor, "to", full)
        denoise(model)
    assert places(model) == resting
    assert torch.equal(denoise(model), denoise(transformer()))


def test_lora_adapters_on_an_offloaded_model_compute_identical_outputs(tmp_path: Path) -> None:
    """Given adapters that come, change and go on a transformer that another model drives from its place."""
    for name, rank in (("one", 2), ("two", 3)):
        adapter(SHAPES, tmp_path, name, rank, rank)
    loras, one, other = AdapterFolder(str(tmp_path)), transformer(), vae()
    resting, busy = offload_model(transformer(), HOST, "model"), offload_model(vae(), HOST, "model")
    sides = [LoadedAdapters(loras, model, lambda: WanPipeline, HOST, 1) for model in (one, resting)]
    for name in ("", "one", "two", "", "one"):
        own: Params = {"lora": name, "lora_scale": 0.5} if name else {}
        for side in sides:
            side.use(own, loras.id_of(name) if name else "")
        assert torch.equal(denoise(one), denoise(resting)), name
        assert torch.equal(decode(other), decode(busy))


@pytest.mark.parametrize("how", ["model", "sequential"])
def test_offload_on_cpu_raises_config_error(how: Offload) -> None:
    runtime = RuntimeOptions("cpu", {"vae": "float32"}, ComputeOptions(offload=how))
    with pytest.raises(ConfigError, match=f"--offload {how} needs a GPU"):
        Loader(ModelFolder(Path(SHAPES)), VAE, runtime, None).model("vae")


def test_memory_size_and_load_time_of_a_component_are_reported() -> None:
    reports: list[tuple[str, float, int]] = []
    loader = Loader(
        ModelFolder(SHAPES), VAE, RuntimeOptions("cpu", {"vae": "bfloat16"}), lambda *found: reports.append(found)
    )
    model = loader.model("vae")
    ((name, seconds, size),) = reports
    assert (name, size) == ("vae", sum(2 * tensor.numel() for tensor in model.parameters()))
    assert seconds > 0
