"""Training from end to end on a handful of pictures: what it writes loads and runs as a pipeline."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline

from tools.shapes import dit, scenes, vae
from tools.shapes.dit import Denoiser
from tools.shapes.score import generate, random_captions, score
from tools.shapes.train import train
from tools.shapes.words import MAX_TOKENS, CaptionTable, make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder exported after a step or two of training, too few to be worth compiling for."""
    here = tmp_path_factory.mktemp("shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
        for module in (vae, dit):
            patch.setattr(module, "IMAGES", 12)
            patch.setattr(module, "CLIPS", 6)
        train(here / "out", here / "work", vae_s=0.01, denoiser_s=0.01, seed=0)
    return here / "out"


def test_the_folder_is_a_wan_pipeline_of_at_most_12_mb(folder: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(folder)

    assert isinstance(pipeline, WanPipeline)
    assert pipeline.vae.config.scale_factor_spatial == 8
    assert len(pipeline.vae.config.latents_std) == 8
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 12e6
    assert not list(folder.rglob("*.bin"))


def test_the_folder_generates_at_its_serving_defaults(folder: Path) -> None:
    defaults = json.loads((folder / "serving.json").read_text())["defaults"]
    del defaults["fps"]
    captions = random_captions(2, seed=0)

    pictures = generate(WanPipeline.from_pretrained(folder), captions, 7, defaults | {"num_inference_steps": 2})

    assert pictures.shape == (2, 64, 64, 3)
    assert 0 <= score(pictures, captions).all_three <= 1


def test_training_feeds_the_words_the_pipeline_feeds(folder: Path) -> None:
    pipeline = WanPipeline.from_pretrained(folder)
    table = CaptionTable(make_tokenizer())
    rows = [int(table.rows(["an orange ring on gray"])[0]), len(table.tokens) - 1]
    tokens, mask = table.tokens[rows], table.mask[rows]
    fed: list[torch.Tensor] = []
    model = Denoiser()
    model.text_encoder = pipeline.text_encoder
    model.transformer.register_forward_pre_hook(
        lambda _, __, given: fed.append(given["encoder_hidden_states"]), with_kwargs=True
    )

    with torch.no_grad():
        asked, empty = pipeline.encode_prompt("an orange ring on gray", "", max_sequence_length=MAX_TOKENS)
        model(tokens, mask, torch.zeros(2, 8, 1, 8, 8), torch.ones(2))

    assert torch.allclose(fed[0], torch.cat([asked, empty]), atol=1e-5)


def test_single_frames_give_the_same_numbers_faster_path_or_not() -> None:
    torch.manual_seed(0)
    autoencoder = vae.make_vae().eval()
    pixels = vae.to_pixels(scenes.clips(2, seed=0)[0])[..., :32, :32]

    with torch.no_grad():
        plain = autoencoder.encode(pixels).latent_dist.mean
        with vae.single_frames():
            fast = autoencoder.encode(pixels).latent_dist.mean
            unclamped = vae.decode_unclamped(autoencoder, plain)
        decoded = autoencoder.decode(plain).sample

    assert torch.allclose(fast, plain, atol=1e-5)
    assert torch.allclose(unclamped.clamp(-1, 1), decoded, atol=1e-4)


def test_a_score_counts_each_respect_and_words_the_misses() -> None:
    pictures, captions = scenes.pictures(4, seed=1)
    asked = [captions[0].replace(captions[0].split()[-1], "nowhere"), *captions[1:]]

    result = score(pictures, asked)

    assert (result.colour, result.shape, result.ground, result.all_three) == (1, 1, 0.75, 0.75)
    assert len(result.misses) == 1
    assert np.array_equal(scenes.pictures(4, seed=1)[0], pictures)
