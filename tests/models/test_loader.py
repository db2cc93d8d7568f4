"""Components from disk: whole, of their class, mapped rather than copied, and the VAE as it was told to work."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.models import conftest as c
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.models import find
from unfuse.models.base import Loader, RuntimeOptions
from unfuse.models.undivided_family import FAMILY as WHOLE
from unfuse.planning.placement import CPU, Device, WorkerPlan, parts_of
from unfuse.service.plan import components_by_role, read_models
from unfuse.stages.base import Stage, StageInput
from unfuse.weights.folder import ModelFolder


def load(folder: Path, stage: str, options: ComputeOptions = c.EXACT, **changes: Any) -> Stage:
    c.serve(folder)
    card = find(folder).model_spec("mine", folder)
    (spec,) = (spec for spec in card.pipeline.stages if spec.name == stage)
    return find(folder).load(
        msgspec.structs.replace(spec, **changes), folder, RuntimeOptions("cpu", card.dtypes, options)
    )


FILES = {
    "wan": [
        "model_index.json",
        "vae/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
        "transformer/config.json",
        "text_encoder/config.json",
    ],
    "wan-image": ["image_encoder/config.json", "image_processor/preprocessor_config.json"],
    "flux": ["tokenizer_2/tokenizer_config.json", "text_encoder_2/config.json", "vae/config.json"],
}


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind, files in FILES.items() for file in files])
def test_missing_config_file_raises_one_line_error_naming_it(
    kind: str, file: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(kind)
    family = find(folder)
    (folder / file).unlink()

    with pytest.raises(ConfigError, match=f"{file} cannot be read .* download or save the model again") as caught:
        family.model_spec("mine", folder)
    assert "\n" not in str(caught.value)


MODELS = [
    ("wan", "vae", "vae_decode"),
    ("wan", "text_encoder", "text_encode"),
    ("flux", "text_encoder_2", "text_encode_2"),
    ("wan-image", "image_encoder", "image_encode"),
    ("flux", "transformer", "denoise"),
]


@pytest.mark.parametrize(("kind", "component", "stage"), MODELS)
def test_missing_weights_raise_config_error_naming_the_component(
    kind: str, component: str, stage: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(kind)
    card = find(folder).model_spec("mine", folder)
    (spec,) = (spec for spec in card.pipeline.stages if spec.name == stage)
    (weights,) = (folder / component).glob("*.safetensors")
    weights.unlink()

    sentence = re.escape(f"component {component} lacks {component}/*.safetensors")
    with pytest.raises(ConfigError, match=sentence):
        find(folder).model_spec("mine", folder)
    with pytest.raises(ConfigError, match=sentence):
        find(folder).load(spec, folder, RuntimeOptions("cpu", card.dtypes))


@pytest.mark.parametrize(("kind", "component", "stage"), MODELS)
def test_missing_tensor_raises_config_error_instead_of_random_init(
    kind: str, component: str, stage: str, copied: Callable[[str], Path]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied(kind)
    (file,) = (folder / component).glob("*.safetensors")
    tensors = load_file(file)
    lost = next(name for name in sorted(tensors) if name.endswith("weight") and "embed_tokens" not in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})

    with pytest.raises(ConfigError, match=rf"the weights of component {component} lack .* \(1 tensors in total\)"):
        load(folder, stage)


@pytest.mark.parametrize(("kind", "component", "stage"), MODELS)
def test_weights_of_another_component_class_raise_config_error(
    kind: str, component: str, stage: str, copied: Callable[[str], Path], undivided: c.Undivided
) -> None:
    """A folder that holds something else than its index says."""
    folder = copied(kind)
    shutil.rmtree(folder / component)
    other = "image_encoder" if component != "image_encoder" else "vae"
    shutil.copytree(undivided.folder("wan-image") / other, folder / component)

    with pytest.raises(ConfigError, match=f"component {component}|(transformer|vae|image_encoder) configuration"):
        load(folder, stage)


def test_model_with_stochastic_noise_scheduler_is_served_undivided(copied: Callable[[str], Path]) -> None:
    folder = copied("wan-euler")
    c.edit(folder / "scheduler" / "scheduler_config.json", stochastic_sampling=True)
    classes = {"scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler")}

    assert find(folder) is WHOLE
    with pytest.raises(ConfigError, match="draws noise between steps, which is only supported"):
        Loader(ModelFolder(folder), classes, RuntimeOptions("cpu", {}), None).noise_scheduler()


@pytest.mark.parametrize("kind", ["wan", "wan-image", "flux"])
def test_unknown_stage_kind_raises_config_error(kind: str, copied: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="has no stage of kind prefill"):
        load(copied(kind), "denoise", kind="prefill")


def anonymous() -> int:
    """Bytes of this process's memory that no file holds."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize(("library", "name"), [("diffusers", "AutoencoderKL"), ("transformers", "T5EncoderModel")])
def test_weights_are_mmapped_and_not_copied(library: str, name: str, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL
    from transformers import T5Config, T5EncoderModel

    make = {
        "AutoencoderKL": lambda: AutoencoderKL(block_out_channels=[768], norm_num_groups=1),
        "T5EncoderModel": lambda: T5EncoderModel(T5Config(vocab_size=100_000, d_model=192, d_ff=8, num_layers=1)),
    }
    make[name]().save_pretrained(tmp_path / "vae")
    size = sum(file.stat().st_size for file in (tmp_path / "vae").iterdir())
    assert size > 60 * 2**20
    loader = Loader(ModelFolder(tmp_path), {"vae": (library, name)}, RuntimeOptions("cpu", {"vae": "float32"}), None)
    before = anonymous()

    model = loader.model("vae")

    assert anonymous() - before < size / 4
    assert sum(tensor.nbytes for tensor in model.parameters()) > 60 * 2**20


@pytest.mark.parametrize(("kind", "shape"), [("wan", (1, 4, 1, 4, 68)), ("flux", (1, 2 * 34, 16))])
def test_sliced_vae_is_exact_and_tiled_vae_is_approximate(
    kind: str, shape: tuple[int, ...], copied: Callable[[str], Path]
) -> None:
    """Slices change nothing; tiles are blended where they meet, so they change pixels of what is larger than one."""
    folder, params = copied(kind), {"width": 272, "height": 16}
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    whole, sliced, tiled = (
        c.frames(c.run(load(folder, "vae_decode", ComputeOptions(vae=how)), params, {"latents": latents}).media)
        for how in ("whole", "sliced", "tiled")
    )

    assert np.array_equal(whole, sliced)
    assert not np.array_equal(whole, tiled)
    assert np.abs(whole.astype(int) - tiled).mean() < 32


@pytest.mark.parametrize("kind", ["wan", "flux"])
def test_sliced_vae_decodes_a_batch_like_single_requests(kind: str, undivided: c.Undivided, stages: c.Load) -> None:
    batched = stages(undivided.folder(kind), "float32", ComputeOptions(batching="batched", vae="sliced"))["vae_decode"]
    alone = stages(undivided.folder(kind))["vae_decode"]
    shape = (1, 4, 1, 8, 8) if kind == "wan" else (1, 16, 16)
    params = {"width": 32, "height": 32, "output_format": "png"}
    tasks = [StageInput(params, {"latents": torch.full(shape, value)}) for value in (0.5, -0.5)]

    together = batched.run(tasks)

    assert [output.media for output in together] == [alone.run([task])[0].media for task in tasks]


@pytest.mark.parametrize("kind", ["kontext", "wan-image", "klein", "sdxl"])
def test_stages_of_one_process_share_one_vae(kind: str, copied: Callable[[str], Path]) -> None:
    """Those that encode pictures, and those that decode; and it is planned once."""
    folder = copied(kind)
    model = find(folder).model_spec("mine", folder)
    runtime = RuntimeOptions("cpu", model.dtypes, c.EXACT, shared_objects={})
    loaded: list[str] = []
    for spec in model.pipeline.stages:
        find(folder).load(spec, folder, runtime, lambda name, seconds, size: loaded.append(name))
    assert [spec.components for spec in model.pipeline.stages].count(("vae",)) >= 1
    assert loaded.count("vae") == 1

    (planned,) = read_models([str(folder)], "", WorkerPlan({"all": 1}), (Device(CPU, 1 << 40),))
    needs = components_by_role([planned])
    assert [part.component for part in parts_of("all", needs, {})].count("vae") == 1
    assert sum(part.component == "vae" for parts in needs.values() for part in parts) == 2
