"""Divided, each family's pipeline makes the bits it makes undivided; batched, nearly so."""

import io
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.models import conftest as c
from tools.tiny import KINDS, SERVING
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.modalities import IMAGE_UPLOADS
from unfuse.core.object_ref import layout_tensors
from unfuse.core.plan import Params
from unfuse.models import find, served_classes
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import Stage, StageInput, SteppedStage, next_states

JOBS = {job.name: job for job in c.JOBS}
BLOCKS = ("klein", "klein-distilled", "krea", "krea-distilled")
"""Kinds of the general family."""
BATCHED = ComputeOptions(batching="batched")


@pytest.fixture(autouse=True)
def no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage may fall back on a diffusers pipeline: none can be made, and none called."""
    import diffusers

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a diffusers pipeline was used")

    served = [getattr(diffusers, name) for name in served_classes() if name.endswith("Pipeline")]
    for kind in (diffusers.DiffusionPipeline, *served):
        monkeypatch.setattr(kind, "__init__", refuse)
        monkeypatch.setattr(kind, "__call__", refuse, raising=False)
        monkeypatch.setattr(kind, "from_pretrained", refuse)


def test_latents_and_pixels_equal_the_undivided_diffusers_pipeline(
    job: c.Job, undivided: c.Undivided, stages: c.Load
) -> None:
    expected = undivided.result(job.name)
    loaded = stages(undivided.folder(job.model), job.dtype)

    [(latents, pixels)] = c.divided(loaded, job.params, undivided.uploads(job.params), [job.params["seed"]])

    found = latents.float().numpy()
    if job.model in BLOCKS:  # they hand them over unpacked
        found, expected["latents"] = (np.sort(values, axis=None) for values in (found, expected["latents"]))
    assert np.array_equal(found, expected["latents"])
    assert np.array_equal(pixels, expected["pixels"])
    assert str(latents.dtype) == expected["dtype"]
    assert not latents.requires_grad


@pytest.mark.parametrize("name", [job.name for job in c.JOBS if job.blocks])
def test_modular_diffusers_pipelines_generate_the_same_pixels(name: str, undivided: c.Undivided) -> None:
    """A second opinion on what the stages are held to above."""
    found = undivided.result(name)

    assert np.array_equal(found["blocks"], found["pixels"])


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("unipc-image", ["unipc-seed", "unipc-prompt", "unipc-unguided", "euler-image"]),
        ("picture-video", ["picture-seed", "picture-prompt", "picture-other", "picture-unguided"]),
        ("frames-video", ["frames-other", "picture-video"]),
        ("two-picture-last", ["two-picture"]),
        ("two-image", ["unipc-image", "two-seed", "two-second-scale"]),
        ("two-picture", ["picture-video", "two-picture-other"]),
        ("tokens-video", ["tokens-seed", "tokens-picture"]),
        ("tokens-picture", ["tokens-picture-seed", "tokens-picture-other"]),
        ("flux-image", ["flux-seed", "flux-prompt", "flux-guidance", "flux-empty-negative"]),
        ("hunyuan-video", ["hunyuan-seed", "hunyuan-prompt", "hunyuan-guidance", "hunyuan-empty-negative"]),
        ("qwen-image", ["qwen-next-seed", "qwen-prompt", "qwen-empty-negative"]),
        ("klein-image", ["klein-seed", "klein-prompt", "klein-guidance"]),
        ("krea-image", ["krea-seed", "krea-prompt", "krea-negative"]),
        ("xl-image", ["xl-seed", "xl-prompt", "xl-negative", "xl-empty-negative"]),
        ("three-image", ["three-seed", "three-prompt", "three-negative"]),
        ("z-image", ["z-seed", "z-prompt", "z-negative"]),
        ("ltx-video", ["ltx-seed", "ltx-prompt", "ltx-rate"]),
        ("kontext-image", ["kontext-seed", "kontext-other"]),
        ("redrawn-flux", ["redrawn-flux-seed", "redrawn-flux-less", "redrawn-flux-other", "masked-flux"]),
        ("redrawn-xl", ["redrawn-xl-seed", "redrawn-xl-less", "masked-xl"]),
        ("masked-flux", ["masked-flux-seed"]),
    ],
)
def test_reference_outputs_differ_between_different_requests(
    name: str, others: list[str], undivided: c.Undivided
) -> None:
    """Were they all alike, equality above would mean little."""
    image = undivided.result(name)["pixels"]
    for other in others:
        assert (undivided.result(other)["pixels"] != image).mean() > 0.1, other


SEEING = ("klein-image", "klein-seen", "klein-seen-two", "klein-seen-turned")


@pytest.mark.parametrize(("name", "other"), [*itertools.combinations(SEEING, 2)])
def test_number_and_order_of_input_images_change_the_result(name: str, other: str, undivided: c.Undivided) -> None:
    """Their number and their order too, if not as much as a prompt."""
    first, second = (undivided.result(one)["pixels"] for one in (name, other))
    assert (first != second).mean() > 0.01


@pytest.mark.parametrize(
    ("same", "plain"),
    [
        ("flux-no-negative", "flux-image"),
        ("flux-negative-unread", "flux-image"),
        ("hunyuan-negative-unread", "hunyuan-video"),
        ("qwen-no-scale", "qwen-image"),
    ],
)
def test_true_cfg_requires_both_negative_prompt_and_scale(same: str, plain: str, undivided: c.Undivided) -> None:
    assert np.array_equal(undivided.result(same)["pixels"], undivided.result(plain)["pixels"])


def test_model_without_guidance_distillation_ignores_guidance_scale(undivided: c.Undivided) -> None:
    image, guided = (undivided.result(name)["pixels"] for name in ("schnell-image", "schnell-guidance"))
    assert np.array_equal(image, guided)


@pytest.mark.parametrize("name", ["flux-image", "hunyuan-video", "xl-image", "three-image"])
@pytest.mark.parametrize("encoder", ["text_encode", "text_encode_2"])
def test_each_text_encoder_changes_the_latents(encoder: str, name: str, undivided: c.Undivided, stages: c.Load) -> None:
    loaded = stages(undivided.folder(JOBS[name].model))
    params = JOBS[name].params
    mixed = c.encode(loaded, params, {}) | c.run(loaded[encoder], {**params, "prompt": "b"}).tensors

    latents = c.run(loaded["denoise"], params, mixed).tensors["latents"]

    assert np.abs(latents.numpy() - undivided.result(name)["latents"]).mean() > 0.01


@pytest.mark.parametrize("output", ["image_embeds", "condition"])
def test_image_embeds_and_condition_each_change_the_latents(
    output: str, undivided: c.Undivided, stages: c.Load
) -> None:
    loaded = stages(undivided.folder("wan-image"))
    params = JOBS["picture-video"].params
    encoded = c.encode(loaded, params, undivided.uploads(params))
    other = c.run(loaded["image_encode"], params, None, undivided.uploads(JOBS["picture-other"].params)).tensors

    latents = c.run(loaded["denoise"], params, encoded | {output: other[output]}).tensors["latents"]

    assert np.abs(latents.numpy() - undivided.result("picture-video")["latents"]).mean() > 0.01


@pytest.mark.parametrize(
    "names",
    [
        ["euler-image", "euler-next-seed"],
        ["shapes-image", "shapes-next"],
        ["flux-image", "flux-next-seed"],
        ["picture-video", "picture-seed"],
        ["two-image", "two-seed"],
        ["tokens-picture", "tokens-picture-seed"],
        ["hunyuan-video", "hunyuan-seed"],
        ["qwen-image", "qwen-next-seed"],
        ["xl-image", "xl-seed"],
        ["three-image", "three-seed"],
        ["z-image", "z-seed"],
        ["ltx-video", "ltx-seed"],
        ["kontext-image", "kontext-seed"],
        ["redrawn-flux", "redrawn-flux-seed"],
        ["masked-xl", "masked-xl-seed"],
    ],
)
def test_each_of_n_samples_equals_a_pipeline_call_with_its_seed(
    names: list[str], undivided: c.Undivided, stages: c.Load
) -> None:
    first = JOBS[names[0]]
    loaded = stages(undivided.folder(first.model))
    seeds = [first.params["seed"], first.params["seed"] + 1]

    samples = list(c.divided(loaded, first.params, undivided.uploads(first.params), seeds))

    for name, (latents, pixels) in zip(names, samples, strict=True):
        assert np.array_equal(latents.numpy(), undivided.result(name)["latents"])
        assert np.array_equal(pixels, undivided.result(name)["pixels"])


MATES = {
    "wan": ["unipc-image", "unipc-negative", "unipc-seed"],
    "wan-euler": ["euler-image", "euler-next-seed"],
    "wan-image": ["picture-video", "picture-negative", "picture-other"],
    "wan-image-last": ["frames-video", "frames-other"],
    "wan-2.2": ["two-image", "two-steps", "two-second-scale"],
    "wan-2.2-image": ["two-picture", "two-picture-other"],
    "wan-2.2-5b": ["tokens-video", "tokens-seed"],
    "wan-2.2-5b-image": ["tokens-picture", "tokens-picture-other"],
    "flux": ["flux-image", "flux-guidance", "flux-next-seed"],
    "flux-schnell": ["schnell-image", "schnell-guidance"],
    "hunyuan-video": ["hunyuan-video", "hunyuan-guidance", "hunyuan-prompt"],
    "qwen-image": ["qwen-image", "qwen-prompt", "qwen-next-seed"],
    "sdxl": ["xl-image", "xl-prompt", "xl-empty-negative"],
    "sd3": ["three-image", "three-prompt", "three-negative"],
    "z-image": ["z-image", "z-prompt", "z-seed"],
    "ltx": ["ltx-video", "ltx-prompt", "ltx-rate"],
    "kontext": ["kontext-image", "kontext-other", "kontext-seed"],
}
"""Requests with one batch key, and different seeds, prompts, pictures, step counts, and guidance scales."""
REDRAWN = {
    "flux": ["redrawn-flux", "masked-flux", "redrawn-flux-less"],
    "sdxl": ["redrawn-xl", "masked-xl-seed", "redrawn-xl-less"],
}
GUIDED = {
    "flux": ["flux-negative", "flux-empty-negative"],
    "hunyuan-video": ["hunyuan-negative", "hunyuan-empty-negative"],
    "qwen-image": ["qwen-negative", "qwen-empty-negative"],
}


@pytest.mark.parametrize(("kind", "names"), [*MATES.items(), *GUIDED.items(), *REDRAWN.items()])
def test_batched_results_match_unbatched_within_tolerance(
    kind: str, names: list[str], undivided: c.Undivided, stages: c.Load
) -> None:
    """Every stage takes all at once; to denoising they come, and leave it, one step after the other."""
    loaded = stages(undivided.folder(kind), "float32", BATCHED)
    params = [JOBS[name].params for name in names]
    denoise = loaded["denoise"]
    assert isinstance(denoise, SteppedStage)
    assert len({denoise.batch_key(StageInput(given, {})) for given in params}) == 1

    encoded: list[dict[str, Any]] = [{} for _ in names]
    brought = undivided.uploads(params[0]).keys()
    for stage in [stage for name, stage in loaded.items() if "encode" in name and set(stage.uploads) <= brought]:
        for found, output in zip(encoded, _together(stage, params, encoded, undivided), strict=True):
            found.update(output.tensors)
    latents = _staggered(denoise, [StageInput(*task) for task in zip(params, encoded, strict=True)])
    media = _together(loaded["vae_decode"], params, [{"latents": one} for one in latents], undivided)

    for name, found, output in zip(names, latents, media, strict=True):
        expected = undivided.result(name)
        np.testing.assert_allclose(found.numpy(), expected["latents"], rtol=0, atol=1e-4)
        levels = np.abs(c.frames(output.media).astype(int) - expected["pixels"])
        assert levels.max() <= 1
        assert (levels > 0).mean() < 0.01


def _together(stage: Stage, params: list[Params], tensors: list[Any], undivided: c.Undivided) -> list[Any]:
    tasks = [
        c.task({**given, "output_format": "png"}, found, undivided.uploads(given))
        for given, found in zip(params, tensors, strict=True)
    ]
    for task in tasks:
        stage.verify(task)
    return stage.run(tasks)


def _staggered(denoise: SteppedStage[Any], tasks: list[StageInput]) -> list[Any]:
    waiting, states, done = dict(enumerate(tasks)), dict[int, Any](), dict[int, Any]()
    while len(done) < len(tasks):
        if waiting:
            place = min(waiting)
            states[place] = denoise.start(waiting.pop(place))
        states = dict(zip(states, next_states(denoise, list(states.values())), strict=True))
        for place in [place for place, state in states.items() if len(set(denoise.progress(state))) == 1]:
            done[place] = denoise.finish(states.pop(place)).tensors["latents"]
    return [done[place] for place in range(len(tasks))]


@pytest.mark.parametrize(("kind", "names"), [*MATES.items(), *REDRAWN.items()])
def test_requests_sharing_a_step_loop_do_not_affect_each_other(
    kind: str, names: list[str], undivided: c.Undivided, stages: c.Load
) -> None:
    """One step of one, then of the next: each request has a noise scheduler of its own."""
    loaded = stages(undivided.folder(kind))
    denoise = loaded["denoise"]
    assert isinstance(denoise, SteppedStage)
    params = [JOBS[name].params for name in names]
    states = [denoise.start(StageInput(given, c.encode(loaded, given, undivided.uploads(given)))) for given in params]

    unfinished = dict(enumerate(states))
    while unfinished:
        for place, state in list(unfinished.items()):
            (states[place],) = next_states(denoise, [state])
            unfinished[place] = states[place]
            if len(set(denoise.progress(states[place]))) == 1:
                del unfinished[place]

    for name, state in zip(names, states, strict=True):
        assert np.array_equal(denoise.finish(state).tensors["latents"].numpy(), undivided.result(name)["latents"])


@pytest.mark.parametrize(
    "name",
    [
        "unipc-video",
        "picture-wide",
        "flux-wide",
        "flux-half",
        "hunyuan-long",
        "qwen-wide",
        "xl-half",
        "three-image",
        "z-image",
        "ltx-video",
        "kontext-image",
        "redrawn-flux",
        "masked-xl-half",
    ],
)
def test_preview_is_a_jpeg_with_the_requested_width_and_height(
    name: str, undivided: c.Undivided, stages: c.Load
) -> None:
    job = JOBS[name]
    loaded = stages(undivided.folder(job.model), job.dtype)
    denoise = loaded["denoise"]
    assert isinstance(denoise, SteppedStage)
    params = {**job.params, "preview_every": 1}
    state = denoise.start(StageInput(params, c.encode(loaded, params, undivided.uploads(params))))

    (state,) = next_states(denoise, [state])
    media = denoise.preview(state)

    assert media is not None
    assert media.content_type == "image/jpeg"
    assert Image.open(io.BytesIO(media.data)).size == (params["width"], params["height"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_declared_output_size_bounds_each_stage_output_closely(
    kind: str, dtype: str, undivided: c.Undivided, stages: c.Load, copied: Callable[[str], Path]
) -> None:
    folder = copied(kind)
    (folder / "serving.json").write_text(json.dumps({"defaults": SERVING}))
    card = find(folder).model_spec("m", folder, dtype)
    job = max((job for job in c.JOBS if job.model == kind), key=lambda job: len(job.params))  # with a mask, if it may
    params = {**job.params, "negative_prompt": "no", "true_cfg_scale": 2.0, "num_inference_steps": 4, "width": 64}
    loaded = stages(undivided.folder(kind), dtype)

    made: dict[str, Any] = {}
    for spec in card.pipeline.stages:
        if spec.only_with and spec.only_with not in params:
            continue
        given = {name: made[name] for name in spec.inputs if name in made}
        output = c.run(loaded[spec.name], params, given, undivided.uploads(params))
        made |= output.tensors
        assert set(output.tensors) == set(spec.outputs)
        kept = [
            (n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in output.tensors.items() if t is not None
        ]
        taken = layout_tensors(kept)[1] if kept else 0
        room = spec.output_size.bytes(params)
        assert taken <= room
        whole = len(kept) == len(output.tensors)
        tight = (
            whole and not kind.startswith("krea") and spec.depends_on_params not in (("image",), IMAGE_UPLOADS)
        )  # shorter template, smaller picture
        if dtype == "float32" and tight:
            assert room <= taken + 64 * len(kept)


CLIPS = ["text_encoder/config.json", "text_encoder_2/config.json"]
NEEDED = {
    "denoise": ["vae/config.json", *CLIPS],
    "image_encode": ["transformer/config.json"],
    "vae_decode": ["transformer/config.json"],
}
"""What a stage reads beside its components, where the model has it."""


@pytest.mark.parametrize(
    "kind",
    [
        "wan",
        "wan-image",
        "wan-2.2",
        "wan-2.2-5b-image",
        "flux",
        "hunyuan-video",
        "qwen-image",
        "sdxl",
        "sd3",
        "z-image",
        "ltx",
        "kontext",
    ],
)
def test_stage_loads_from_its_own_components_only(kind: str, undivided: c.Undivided, tmp_path: Path) -> None:
    folder = undivided.folder(kind)
    card = find(folder).model_spec("model", folder)
    for spec in card.pipeline.stages:
        bare = tmp_path / spec.name
        for component in spec.components:
            shutil.copytree(folder / component, bare / component)
        for name in ["model_index.json", *NEEDED.get(spec.kind, [])]:
            if not (folder / name).exists() or (bare / name).exists():
                continue
            (bare / name).parent.mkdir(exist_ok=True)
            shutil.copy(folder / name, bare / name)
        reports: list[tuple[str, float, int]] = []

        loaded = find(bare).load(spec, bare, RuntimeOptions("cpu", card.dtypes), lambda *found: reports.append(found))  # noqa: B023

        assert loaded.kind == spec.kind
        assert sorted(name for name, _, _ in reports) == sorted(spec.components)
        assert all(seconds > 0 and size > 0 for _, seconds, size in reports)
