"""Training from end to end on a handful of pictures: what it writes loads and runs as a pipeline."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from PIL import Image

from tools.shapes import curve, dit, reader, scenes, vae
from tools.shapes.dit import Denoiser
from tools.shapes.score import KINDS, generate, random_captions, score, score_folder, serving_defaults, sheet
from tools.shapes.train import train
from tools.shapes.words import MAX_TOKENS, Wordings, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
"""Of layer norms that see bfloat16 where steps are not compiled."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage took a step or two, too few to be worth compiling for; `out` is the model."""
    here = tmp_path_factory.mktemp("shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
        patch.setattr(vae, "IMAGES", 4)
        patch.setattr(vae, "CLIPS", 4)
        patch.setattr(reader, "CAPTIONS", 8)
        patch.setattr(dit, "COUNTS", {"single": 8, "relation": 8, "motion": 4})
        train(here / "out", here, vae_s=0.01, words_s=0.01, denoiser_s=0.01, decoder_s=0.01, seed=0)
    return here


@pytest.fixture(scope="module")
def folder(work: Path) -> Path:
    return work / "out"


@pytest.mark.nightly
def test_trained_model_is_a_wan_pipeline_of_at_most_16_mb(folder: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(folder)

    assert isinstance(pipeline, WanPipeline)
    assert pipeline.vae.config.scale_factor_spatial == 16
    assert len(pipeline.vae.config.latents_std) == 16
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 16e6
    assert not list(folder.rglob("*.bin"))


@pytest.mark.parametrize("kind", KINDS)
def test_trained_model_generates_at_its_serving_defaults(kind: str, folder: Path, tmp_path: Path) -> None:
    defaults = serving_defaults(folder, kind) | {"num_inference_steps": 2}
    captions = random_captions(kind, 2, seed=0)

    made = generate(WanPipeline.from_pretrained(folder), captions, 7, defaults)

    assert made.shape == (2, 9 if kind == "motion" else 1, 128, 128, 3)
    assert 0 <= score(made, captions).right <= 1
    assert sheet(made, captions).height == 128 + 18


def test_training_run_is_scored_from_its_checkpoints(work: Path) -> None:
    curve.follow(work, every_s=1.0, count=1, seed=0)

    (line,) = (work / "curve.jsonl").read_text().splitlines()
    assert {"spent_s", "step", *KINDS} == json.loads(line).keys()
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (work / "interim" / weights).read_bytes() == (work / "out" / weights).read_bytes()


def test_decoder_refinement_does_not_change_the_latents(work: Path) -> None:
    before, after = vae.make_vae().eval(), WanPipeline.from_pretrained(work / "out").vae
    curve.load(work / "vae.safetensors", "vae", before)
    frames = scenes.clips(1, seed=0)[0]

    latents = vae.encode(before, frames)

    assert torch.equal(latents, vae.encode(after, frames))
    with torch.no_grad():
        assert not torch.equal(before.decode(latents).sample, after.decode(latents).sample)


def test_training_data_has_no_held_out_combination() -> None:
    held_out = {f"{colour} {shape}" for colour, shape in scenes.HELD_OUT}
    drawn = [scene for kind in dit.COUNTS for scene in dit.training_scenes(kind, seed=0)[-2000:]]

    assert not held_out & {f"{thing.colour} {thing.shape}" for scene in drawn for thing in scene.things}


def test_training_text_embeddings_equal_those_of_the_pipeline(folder: Path) -> None:
    pipeline = WanPipeline.from_pretrained(folder)
    scene = scenes.scenes("relation", 1, seed=0)[0]
    table = Wordings(make_tokenizer(), [scene])
    rows = np.array([table.vary(np.array([0]), np.random.default_rng(0), 0, 0)[0], table.row("")])
    tokens, mask = table.tokens[rows], table.mask[rows]
    fed: list[torch.Tensor] = []
    model = Denoiser()
    model.text_encoder = pipeline.text_encoder
    model.transformer.register_forward_pre_hook(
        lambda _, __, given: fed.append(given["encoder_hidden_states"]), with_kwargs=True
    )

    with torch.no_grad():
        asked, empty = pipeline.encode_prompt(scene.caption, "", max_sequence_length=MAX_TOKENS)
        model(tokens, mask, torch.zeros(2, 16, 1, 8, 8), torch.ones(2))

    assert torch.allclose(fed[0], torch.cat([asked, empty]), atol=1e-5)


def test_single_frame_fast_path_equals_the_plain_vae() -> None:
    torch.manual_seed(0)
    autoencoder = vae.make_vae().eval()
    pixels = vae.to_pixels(scenes.clips(2, seed=0, frames=5)[0])[..., :64, :64]

    with torch.no_grad():
        plain = autoencoder.encode(pixels).latent_dist.mean
        with vae.single_frames():
            fast = autoencoder.encode(pixels).latent_dist.mean
            unclamped = vae.decode_unclamped(autoencoder, plain)
        decoded = autoencoder.decode(plain).sample

    assert torch.allclose(fast, plain, atol=1e-5)
    assert torch.allclose(unclamped.clamp(-1, 1), decoded, atol=1e-4)


def test_score_counts_each_caption_part_and_lists_misses() -> None:
    pictures, captions = scenes.pictures("single", 4, seed=1)
    asked = [captions[0].replace(captions[0].split()[-1], "nowhere"), *captions[1:]]

    result = score(pictures[:, None], asked)

    assert (result.parts, result.right) == ({"colour": 1, "shape": 1, "ground": 0.75}, 0.75)
    assert len(result.misses) == 1


def test_score_folder_scores_image_and_video_files_by_kind(tmp_path: Path) -> None:
    held_out = scenes.random_single(np.random.default_rng(0), scenes.HELD_OUT)
    made = {kind: scenes.scenes(kind, 1, seed=0)[0] for kind in scenes.KINDS} | {"held-out": held_out}
    for kind, scene in made.items():
        Image.fromarray(scenes.draw(scene)).save(tmp_path / f"{kind}.png")
    for index, frame in enumerate(scenes.draw_clip(made["motion"])):
        Image.fromarray(frame).save(tmp_path / f"motion-{index:04d}.png")
    names = {kind: "motion-%04d.png" if kind == "motion" else f"{kind}.png" for kind in made}
    (tmp_path / "captions.json").write_text(json.dumps({names[kind]: made[kind].caption for kind in made}))

    scores = score_folder(tmp_path)

    assert scores.keys() == set(KINDS)
    assert [result.right for result in scores.values()] == [1, 1, 1, 1]
    assert "direction" in scores["motion"].parts
