"""Divided, the pipeline makes the bits it makes undivided; a card is made of JSON; what cannot be served is refused."""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from tests.models.conftest import Job, Undivided
from unfuse.core.card import ModelCard
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.object_ref import lay_out
from unfuse.core.params import check
from unfuse.core.plan import Params
from unfuse.models import find, resolve_source
from unfuse.stages.base import OneStep, Stage, StageInput, SteppedStage

Load = Callable[[Path, str], dict[str, Stage]]


@pytest.fixture(autouse=True)
def no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage may fall back on a diffusers pipeline: none can be made, and none called."""
    import diffusers

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a diffusers pipeline was used")

    for kind in (diffusers.DiffusionPipeline, diffusers.WanPipeline):
        monkeypatch.setattr(kind, "__init__", refuse)
        monkeypatch.setattr(kind, "__call__", refuse, raising=False)
        monkeypatch.setattr(kind, "from_pretrained", refuse)


def divided(stages: dict[str, Stage], seeds: list[int], params: Params) -> Iterator[tuple[Any, np.ndarray]]:
    """Text encoded once, then each sample denoised and decoded on its own, as an execution plan has it."""

    def run(name: str, params: Params, tensors: Any) -> Any:
        task = StageInput(params, tensors)
        stages[name].verify(task)
        (output,) = stages[name].run([task])
        return output

    text = run("text_encode", params, {})
    for seed in seeds:
        own = {**params, "seed": seed}
        latents = run("denoise", own, text.tensors).tensors["latents"]
        media = run("vae_decode", own, {"latents": latents}).media
        yield latents, np.stack([np.asarray(Image.open(io.BytesIO(picture.data))) for picture in media])


def test_latents_and_pixels_are_those_of_the_undivided_pipeline(job: Job, undivided: Undivided, stages: Load) -> None:
    expected = undivided.result(job.name)
    loaded = stages(undivided.folder(job.model), job.dtype)

    [(latents, pixels)] = divided(loaded, [job.params["seed"]], {**job.params, "output_format": "png"})

    assert np.array_equal(latents.float().numpy(), expected["latents"])
    assert np.array_equal(pixels, expected["pixels"])
    assert str(latents.dtype) == expected["dtype"]
    assert not latents.requires_grad


def test_the_references_can_tell_requests_apart(undivided: Undivided) -> None:
    """Were they all alike, equality above would mean little."""
    image = undivided.result("unipc-image")["pixels"]
    for other in ("unipc-seed", "unipc-prompt", "unipc-unguided", "euler-image"):
        assert (undivided.result(other)["pixels"] != image).mean() > 0.1, other


@pytest.mark.parametrize(("model", "seed", "names"), [
    ("euler", 9, ["euler-image", "euler-next-seed"]),
    ("shapes", 1, ["shapes-image", "shapes-next-seed"]),
])  # fmt: skip
def test_each_of_n_samples_is_the_pipelines_own_call(
    model: str, seed: int, names: list[str], undivided: Undivided, stages: Load
) -> None:
    jobs = {job.name: job for job in _jobs()}
    params = {**jobs[names[0]].params, "output_format": "png"}
    loaded = stages(undivided.folder(jobs[names[0]].model), "float32")

    samples = list(divided(loaded, [seed, seed + 1], params))

    for name, (latents, pixels) in zip(names, samples, strict=True):
        assert np.array_equal(latents.numpy(), undivided.result(name)["latents"])
        assert np.array_equal(pixels, undivided.result(name)["pixels"])


def _jobs() -> list[Job]:
    from tests.models.conftest import JOBS

    return JOBS


def test_requests_that_share_a_step_loop_do_not_touch_each_other(undivided: Undivided, stages: Load) -> None:
    """Joining and leaving at different steps: each request has a noise scheduler of its own."""
    jobs = {job.name: job.params for job in _jobs()}
    names = ["unipc-image", "unipc-unguided", "unipc-negative"]
    loaded = stages(undivided.folder("unipc"), "float32")
    text, denoise = OneStep(loaded["text_encode"]), loaded["denoise"]
    assert isinstance(denoise, SteppedStage)

    states: dict[str, Any] = {}
    done: dict[str, Any] = {}
    waiting = list(names)
    while len(done) < len(names):
        if waiting:
            name = waiting.pop(0)
            (embeds,) = text.run([StageInput(jobs[name], {})])
            states[name] = denoise.start(StageInput(jobs[name], embeds.tensors))
        states = dict(zip(states, denoise.step(list(states.values())), strict=True))
        for name in [name for name, state in states.items() if len(set(denoise.progress(state))) == 1]:
            done[name] = denoise.finish(states.pop(name)).tensors["latents"]

    for name in names:
        assert np.array_equal(done[name].numpy(), undivided.result(name)["latents"])


@pytest.mark.parametrize(("stage", "kept"), [
    ("text_encode", ["text_encoder", "tokenizer"]),
    ("denoise", ["transformer", "scheduler", "vae/config.json"]),
    ("vae_decode", ["vae"]),
])  # fmt: skip
def test_a_stage_loads_from_its_own_components_alone(stage: str, kept: list[str], copy: Path, tmp_path: Path) -> None:
    card = find(copy).card("model", copy)
    spec = next(spec for spec in card.pipeline.stages if spec.name == stage)
    bare = tmp_path / "bare"
    for name in ["model_index.json", *kept]:
        source, target = copy / name, bare / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    reports: list[tuple[str, float, int]] = []

    loaded = find(bare).load(spec, bare, "cpu", card.dtypes, lambda *report: reports.append(report))

    assert loaded.kind == spec.kind
    assert sorted(name for name, _, _ in reports) == sorted(spec.components)
    assert all(seconds > 0 and size > 0 for _, seconds, size in reports)


def test_a_card_of_a_folder_without_serving_json(copy: Path) -> None:
    card = find(copy).card("mine", copy)

    card.pipeline.validate()
    assert (card.name, card.source, card.family) == ("mine", str(copy), "wan")
    assert card.defaults == {
        "height": 256, "width": 256, "num_frames": 63, "num_inference_steps": 50, "guidance_scale": 5.0,
        "max_sequence_length": 512, "negative_prompt": "", "fps": 16,
    }  # fmt: skip
    limits = card.limits
    assert (limits.size_multiple, limits.frame_multiple, limits.max_sequence_length) == (16, 2, 512)
    assert (limits.max_size, limits.max_frames) == (256, 63)


def test_a_card_of_a_model_of_full_size(copy: Path) -> None:
    """What the published models have: VAE factors 8 and 4, room for 1024 patches an axis."""
    _edit(copy / "transformer" / "config.json", rope_max_seq_len=1024)
    _edit(copy / "vae" / "config.json", scale_factor_spatial=8, scale_factor_temporal=4)

    card = find(copy).card("mine", copy)

    assert (card.defaults["height"], card.defaults["width"], card.defaults["num_frames"]) == (480, 832, 81)
    limits = card.limits
    assert (limits.max_size, limits.max_pixels, limits.max_frames) == (2048, 2048 * 2048, 161)


def test_a_card_with_serving_json(copy: Path) -> None:
    _serve(copy, {"num_frames": 3}, {"max_size": 64})

    card = find(copy).card("mine", copy)

    assert card.defaults["num_frames"] == 3
    assert card.defaults["num_inference_steps"] == 50
    assert (card.limits.max_size, card.limits.max_pixels, card.limits.max_frames) == (64, 64 * 64, 5)
    params, _ = check(card, {"prompt": "p", "size": "48x16", "num_frames": 5})
    assert (params["width"], params["height"]) == (48, 16)


def test_the_built_in_model_serves_what_its_serving_json_says() -> None:
    folder = resolve_source("unfuse/shapes")
    said = json.loads((folder / "serving.json").read_text())

    card = find(folder).card("unfuse/shapes", folder)

    assert card.defaults == said["defaults"]
    assert said["limits"].items() <= msgspec.structs.asdict(card.limits).items()


@pytest.mark.parametrize(("wanted", "others"), [("auto", "float32"), ("float16", "float16")])
def test_dtypes_are_by_component_and_the_vae_stays_exact(wanted: str, others: str, copy: Path) -> None:
    _serve(copy, SMALL)

    dtypes = find(copy).card("mine", copy, wanted).dtypes

    assert dtypes.pop("vae") == "float32"
    assert set(dtypes.values()) == {others}


def test_an_unknown_dtype_is_refused(copy: Path) -> None:
    _serve(copy, SMALL)
    with pytest.raises(ConfigError, match="unknown dtype 'int4': one of auto, float32"):
        find(copy).card("mine", copy, "int4")


SMALL = {"height": 32, "width": 32, "num_frames": 1, "max_sequence_length": 24}


def _serve(folder: Path, defaults: dict[str, Any], limits: dict[str, Any] | None = None) -> None:
    small = {**SMALL, **defaults}
    (folder / "serving.json").write_text(json.dumps({"defaults": small, "limits": limits or {}}))


@pytest.fixture(scope="module")
def shapes_card() -> ModelCard:
    folder = resolve_source("unfuse/shapes")
    return find(folder).card("unfuse/shapes", folder)


@given(sides=st.tuples(st.integers(2, 8), st.integers(2, 8)), groups=st.integers(0, 4))
def test_room_holds_every_output_and_little_more(shapes_card: ModelCard, sides: tuple[int, int], groups: int) -> None:
    width, height, frames = 16 * sides[0], 16 * sides[1], 4 * groups + 1
    rooms = {stage.name: stage.room.bytes({"width": width, "height": height, "num_frames": frames})
             for stage in shapes_card.pipeline.stages}  # fmt: skip

    _, latents = lay_out([("latents", "float32", (1, 8, groups + 1, height // 8, width // 8))])
    _, embeds = lay_out([(name, "float32", (1, 16, 96)) for name in ("prompt_embeds", "negative_prompt_embeds")])

    assert latents <= rooms["denoise"] <= latents + 128
    assert embeds <= rooms["text_encode"] <= embeds + 128
    assert rooms["vae_decode"] == 0


def test_weights_ids_are_equal_for_copies_and_tell_changes(copy: Path, undivided: Undivided) -> None:
    original = find(copy).card("a", undivided.folder("unipc")).weights
    assert find(copy).card("b", copy).weights == original

    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)

    changed = find(copy).card("b", copy).weights
    assert {name for name in changed if changed[name] != original[name]} == {"transformer"}
    euler = find(copy).card("c", undivided.folder("euler")).weights
    assert {name for name in euler if euler[name] != original[name]} == {"scheduler", "transformer"}


def test_pools_of_equal_components_are_shared_between_models(undivided: Undivided) -> None:
    folders = [undivided.folder(name) for name in ("unipc", "euler")]
    first, second = (find(folder).card("mine", folder).pools() for folder in folders)

    assert first["text_encode"] == second["text_encode"]
    assert first["vae_decode"] == second["vae_decode"]
    assert first["denoise"] != second["denoise"], "another noise scheduler denoises otherwise"


def _edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, "two transformers (Wan 2.2), which is not served yet"),
    ({"boundary_ratio": 0.875}, "two transformers (Wan 2.2), which is not served yet"),
    ({"expand_timesteps": True}, "a timestep for each token (Wan 2.2 5B), which is not served yet"),
    ({"scheduler": ["diffusers", "DDPMScheduler"]}, "served is diffusers UniPCMultistepScheduler or FlowMatchEuler"),
    ({"text_encoder": ["os", "system"]}, "gives component text_encoder as ['os', 'system']; served is transformers"),
    ({"vae": [None, None]}, "gives component vae as [None, None]; served is diffusers AutoencoderKLWan"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str, copy: Path) -> None:
    _edit(copy / "model_index.json", **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(copy).card("mine", copy)


@pytest.mark.parametrize(("file", "changes", "sentence"), [
    ("vae/config.json", {"z_dim": 5}, "the VAE has 5 channels, the transformer 4"),
    ("transformer/config.json", {"patch_size": 2}, "transformer or vae configuration"),
    ("serving.json", {"defaults": {"heigth": 32}}, "serving.json is not valid"),
    ("serving.json", {"defaults": {"height": "32"}}, "Expected `int`, got `str` - at `$.defaults.height`"),
    ("serving.json", {"defaults": {**SMALL, "height": 40}}, "default height 40 is outside the limits; 48 is not"),
    ("serving.json", {"defaults": {**SMALL, "num_frames": 4}}, "default num_frames 4 is outside the limits; 3 is not"),
    ("serving.json", {"limits": {"max_sizes": 64}}, "unknown limit 'max_sizes'"),
    ("serving.json", {"limits": {"max_size": 0.5}}, "serving.json: limits: Expected `int`"),
    ("serving.json", {"limits": {"size_multiple": 8}}, "size_multiple must be a multiple of the model's 16, not 8"),
    ("serving.json", {"limits": {"max_frames": 1001}}, "rope_max_seq_len allows 256 pixels and 63 frames"),
])  # fmt: skip
def test_contradictions_are_refused_in_a_sentence(
    file: str, changes: dict[str, Any], sentence: str, copy: Path
) -> None:
    _serve(copy, SMALL)
    _edit(copy / file, **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(copy).card("mine", copy)


@pytest.mark.parametrize("file", [
    "model_index.json", "vae/config.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json",
    "transformer/config.json", "text_encoder/config.json",
])  # fmt: skip
def test_a_missing_file_is_named_in_one_line(file: str, copy: Path) -> None:
    _serve(copy, SMALL)
    family = find(copy)
    (copy / file).unlink()

    with pytest.raises(ConfigError, match=f"{file} cannot be read .* download or save the model again") as caught:
        family.card("mine", copy)
    assert "\n" not in str(caught.value)


def _spec(folder: Path, stage: str) -> tuple[Any, Any]:
    card = find(folder).card("mine", folder)
    return next(spec for spec in card.pipeline.stages if spec.name == stage), card.dtypes


def test_missing_weights_are_named(copy: Path) -> None:
    _serve(copy, SMALL)
    spec, dtypes = _spec(copy, "vae_decode")
    shutil.move(copy / "vae" / "diffusion_pytorch_model.safetensors", copy / "vae" / "weights.bin")

    sentence = re.escape("component vae lacks vae/*.safetensors")
    with pytest.raises(ConfigError, match=sentence):
        find(copy).card("mine", copy)
    with pytest.raises(ConfigError, match=sentence):
        find(copy).load(spec, copy, "cpu", dtypes)


def test_truncated_weights_are_refused_when_they_are_loaded(copy: Path) -> None:
    _serve(copy, SMALL)
    spec, dtypes = _spec(copy, "vae_decode")
    file = copy / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(ConfigError, match="component vae in .* cannot be loaded as AutoencoderKLWan") as caught:
        find(copy).load(spec, copy, "cpu", dtypes)
    assert "\n" not in str(caught.value)


def test_weights_that_lack_a_tensor_are_not_filled_with_random_numbers(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    _serve(copy, SMALL)
    spec, dtypes = _spec(copy, "text_encode")
    file = copy / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in sorted(tensors) if "SelfAttention.q" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})

    with pytest.raises(ConfigError, match=r"the weights of component text_encoder lack encoder\.block\.0"):
        find(copy).load(spec, copy, "cpu", dtypes)


def test_a_noise_scheduler_that_draws_for_itself_is_refused(undivided: Undivided, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(undivided.folder("euler"), tmp_path / "model"))
    _serve(folder, SMALL)
    _edit(folder / "scheduler" / "scheduler_config.json", stochastic_sampling=True)
    spec, dtypes = _spec(folder, "denoise")

    with pytest.raises(ConfigError, match="stochastic_sampling has no seed of its own"):
        find(folder).load(spec, folder, "cpu", dtypes)


def test_a_stage_of_another_kind_is_refused(copy: Path) -> None:
    _serve(copy, SMALL)
    spec, dtypes = _spec(copy, "denoise")

    with pytest.raises(ConfigError, match="has no stage of kind prefill"):
        find(copy).load(msgspec.structs.replace(spec, kind="prefill"), copy, "cpu", dtypes)


@pytest.mark.parametrize(("stage", "tensors", "sentence"), [
    ("denoise", {}, "input prompt_embeds is missing"),
    ("denoise", {"prompt_embeds": (1, 24, 32)}, "input negative_prompt_embeds is missing"),
    ("denoise", {"prompt_embeds": (1, 24, 33), "negative_prompt_embeds": (1, 24, 32)}, "1×any×32, not torch.float32"),
    ("vae_decode", {"latents": (1, 4, 8, 8)}, "1×4×any×any×any"),
    ("vae_decode", {"latents": (2, 4, 1, 8, 8)}, "1×4×any×any×any"),
])  # fmt: skip
def test_inputs_of_another_shape_are_refused(
    stage: str, tensors: dict[str, tuple[int, ...]], sentence: str, undivided: Undivided, stages: Load,
    params: Callable[..., Params],
) -> None:  # fmt: skip
    import torch

    loaded = stages(undivided.folder("unipc"), "float32")[stage]
    task = StageInput(params(), {name: torch.zeros(shape) for name, shape in tensors.items()})

    with pytest.raises(PermanentError, match=re.escape(sentence)):
        loaded.verify(task)
