"""Models by name and by folder: what is known, where it is, and that looking needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import conftest as c
from tools.tiny import KINDS
from unfuse.core.errors import ConfigError
from unfuse.models import find, resolve_source, served_classes
from unfuse.weights.source import hub_name, pipeline_class


@pytest.mark.parametrize(
    ("name", "pipeline", "family"),
    [
        ("unfuse/shapes", "WanPipeline", "Wan"),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "WanPipeline", "Wan"),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "WanPipeline", "Wan"),
        ("Wan-AI/Wan2.1-T2V-7B-New", "WanPipeline", "Wan"),
        ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "WanImageToVideoPipeline", "WanImage"),
        ("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "WanImageToVideoPipeline", "WanImage"),
        ("Wan-AI/Wan2.1-I2V-7B-New", "WanImageToVideoPipeline", "WanImage"),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "WanPipeline", "Wan"),
        ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", "WanImageToVideoPipeline", "WanImage"),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "WanPipeline", "Wan"),
        ("black-forest-labs/FLUX.1-dev", "FluxPipeline", "Flux"),
        ("black-forest-labs/FLUX.1-schnell", "FluxPipeline", "Flux"),
        ("black-forest-labs/FLUX.2-klein-base-9B", "Flux2KleinPipeline", "Klein"),
        ("hunyuanvideo-community/HunyuanVideo", "HunyuanVideoPipeline", "HunyuanVideo"),
        ("Qwen/Qwen-Image", "QwenImagePipeline", "QwenImage"),
        ("black-forest-labs/FLUX.1-Kontext-dev", "FluxKontextPipeline", "Kontext"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "StableDiffusionXLPipeline", "Sdxl"),
        ("stabilityai/stable-diffusion-3.5-medium", "StableDiffusion3Pipeline", "Sd3"),
        ("Tongyi-MAI/Z-Image-Turbo", "ZImagePipeline", "ZImage"),
        ("Lightricks/LTX-Video", "LTXPipeline", "Ltx"),
    ],
)
def test_model_name_maps_to_pipeline_class_and_family(name: str, pipeline: str, family: str) -> None:
    assert pipeline_class(name) == pipeline
    assert type(find(name)).__name__ == family


def test_exact_model_name_takes_precedence_over_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.weights.source.PLANS", {"a/b-*": "Pattern", "a/b-c": "Exact"})

    assert pipeline_class("a/b-c") == "Exact"
    assert pipeline_class("a/b-d") == "Pattern"


@pytest.mark.parametrize(
    "name",
    [
        "black-forest-labs/FLUX.1-Fill-dev",
        "wan-ai/wan2.1-t2v-1.3b-diffusers",
        "",
        "os:system",
    ],
)
def test_unknown_model_name_raises_error_listing_known_models(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; use a folder with model_index.json, or one of unfuse/shapes"):
        find(name)


@pytest.mark.parametrize("found", ["OwnPipeline", "os:system", ["WanPipeline"], None])
def test_unsupported_pipeline_class_raises_error_listing_supported(found: object, tmp_path: Path) -> None:
    """A folder comes from anywhere: what it names is looked up, never imported."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": found}))

    with pytest.raises(ConfigError, match=f"which is not supported; supported: {', '.join(served_classes())}"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "model_index.json cannot be read .*this is not a model in diffusers' layout"),
        ("[]", "model_index.json is not valid"),
        ("{", "model_index.json is not valid"),
        ('"\udcff"', "model_index.json is not valid"),
    ],
)
def test_missing_or_invalid_model_index_raises_config_error(content: str | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model_index.json").write_bytes(content.encode(errors="surrogateescape"))

    with pytest.raises(ConfigError, match=sentence):
        find(tmp_path)


CARD = """
import sys
from unfuse.models import find, resolve_source
for name in sys.argv[1:]:
    folder = resolve_source(name)
    card = find(folder).model_spec(name, folder)
heavy = ("torch", "diffusers", "transformers", "huggingface_hub", "safetensors", "numpy", "PIL", "av")
print(card.name, [name for name in heavy if name in sys.modules])
"""


def test_model_specs_of_all_families_are_read_without_torch(undivided: c.Undivided) -> None:
    folders = [str(undivided.folder(kind)) for kind in KINDS]
    command = [sys.executable, "-c", CARD, *folders, "unfuse/shapes"]
    done = subprocess.run(command, text=True, capture_output=True, check=True)

    assert done.stdout.split("\n")[0] == "unfuse/shapes []"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Wan2.1-T2V-1.3B", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        ("wan2.1-t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        ("Wan-AI/Wan2.1-I2V-14B-720P", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
        ("HunyuanVideo", "hunyuanvideo-community/HunyuanVideo"),
        ("FLUX.1-dev", "black-forest-labs/FLUX.1-dev"),
        ("Wan2.1-T2V-fine-tune", "Wan-AI/Wan2.1-T2V-fine-tune"),
        ("somebody/Wan2.1-T2V-1.3B", "somebody/Wan2.1-T2V-1.3B"),
        ("FLUX.1-dev@v1", "FLUX.1-dev@v1"),
        ("shapes", "unfuse/shapes"),
        ("nothing", "nothing"),
    ],
)
def test_short_model_name_resolves_to_its_hub_name(name: str, found: str) -> None:
    assert hub_name(name) == found


def test_unknown_short_name_raises_error_listing_known_models() -> None:
    with pytest.raises(ConfigError, match=r"is not a folder.*shapes, smollm2, FLUX\.1-Kontext-dev.*Wan2\.1-T2V-1\.3B"):
        resolve_source("Wan3-T2V")
