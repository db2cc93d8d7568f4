"""What models need where: their components' memory, their dtypes, and what they share."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tests.models.hub import serve
from tests.worker import outside
from tools.tiny_vision import make_vision_model
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.plan import Pipeline
from unfuse.models import read_model_spec, resolve_source
from unfuse.models.float16 import float16_components
from unfuse.planning.component_memory import ComponentMemory
from unfuse.planning.placement import CPU, Device, PlacedWorker, WorkerPlan, parse_place
from unfuse.service.dtypes import GpuRoles, explicit_dtypes
from unfuse.service.options import plan_service, serve_options
from unfuse.service.plan import PlannedModel, ServingPlan, components_by_role, plan_models, read_models
from unfuse.service.settings import load
from unfuse.stages.specs import UNDIVIDED
from unfuse.weights.gguf_model import open_files

GIB = 1 << 30
SHAPES = "unfuse/shapes"
HOST = (Device(CPU, 64 * GIB),)
VAE, TEXT = ComponentMemory("vae", "float32", GIB), ComponentMemory("text_encoder", "float32", GIB)
GPUS = (*HOST, Device("cuda:0", 80 * GIB), Device("cuda:1", 80 * GIB))
OLD_GPUS = (*HOST, Device("cuda:0", 16 * GIB, has_bfloat16=False), Device("cuda:1", 80 * GIB))


@pytest.fixture
def sibling(tmp_path: Path) -> str:
    """The built-in model with another noise scheduler: it shares the encoder and the VAE, and not the denoiser."""
    folder = shutil.copytree(resolve_source(SHAPES), tmp_path / "sibling")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": 3.0}))
    return str(folder)


def wanted(dtype: str = "auto", place: str = "", device: str = "auto") -> WorkerPlan:
    return WorkerPlan(None, parse_place(place), ComputeOptions(device=device, dtype=dtype))


def look(want: WorkerPlan, devices: tuple[Device, ...] = HOST, *more: str) -> tuple[PlannedModel, ...]:
    return read_models([SHAPES, *more], "", want, devices)


def dtypes(model: PlannedModel) -> dict[str, str]:
    """The dtypes of what has weights."""
    return {name: one.dtype for name, one in model.components.items() if one.parameters}


def test_component_memory_is_computed_from_headers_and_dtype() -> None:
    (model,) = look(wanted("bfloat16"))
    transformer, vae, tokenizer = (model.components[name] for name in ("transformer", "vae", "tokenizer"))
    assert (transformer.kind, transformer.memory) == (
        json.loads((model.folder / "model_index.json").read_text())["transformer"][1],
        2 * transformer.parameters,
    )
    (file,) = (model.folder / "transformer").glob("*.safetensors")
    assert 4 * transformer.parameters < file.stat().st_size < transformer.files
    assert vae.memory == 2 * vae.parameters
    assert (tokenizer.memory, tokenizer.files > 0) == (0, True)


@pytest.mark.slow
def test_vision_and_language_components_have_own_memory_and_dtypes(tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "tiny")
    (model,) = read_models([str(folder)], "", wanted("float32,vision=bfloat16"), HOST)
    language, vision = (model.components[name] for name in ("language", "vision"))
    (file,) = folder.glob("*.safetensors")
    header = 16_384
    assert 0 < file.stat().st_size - 4 * (language.parameters + vision.parameters) < header
    assert (language.memory, vision.memory) == (4 * language.parameters, 2 * vision.parameters)
    parts = {
        role: [(part.component, part.shared_by_stages) for part in held]
        for role, held in components_by_role([model]).items()
    }
    speaks = [("language", True), ("keys and values", True)]
    assert parts == {"vision": [("vision", True)], "prefill": speaks, "decode": speaks}


def test_tensor_parallel_rank_is_planned_with_its_share_of_weights() -> None:
    compute = ComputeOptions(parallel="denoiser=tensor:2,encoder=tensor:4")
    parts = {
        part.component: part
        for part in components_by_role(look(wanted()))["denoiser"] + components_by_role(look(wanted()))["encoder"]
    }
    found = plan_models(
        [SHAPES], "", WorkerPlan(dict.fromkeys(("encoder", "denoiser", "decoder"), 1), {}, compute), HOST
    )
    own = {part.component: part.bytes for worker in found.workers for part in worker.parts}
    for name, ranks in (("transformer", 2), ("text_encoder", 4)):
        part = parts[name]
        assert 0.7 * part.bytes < part.tensor_parallel_bytes < part.bytes
        assert own[name] == part.bytes - part.tensor_parallel_bytes + part.tensor_parallel_bytes // ranks
    assert own["vae"] == found.models[0].components["vae"].memory


def test_auto_is_float32_on_a_cpu() -> None:
    (model,) = look(wanted())
    assert set(dtypes(model).values()) == {"float32"}


@pytest.mark.parametrize(
    ("want", "expected"),
    [
        (wanted(), ("bfloat16", "bfloat16", "float32")),
        (wanted(device="cpu"), ("float32", "float32", "float32")),
        (wanted(place="encoder=cpu"), ("float32", "bfloat16", "float32")),
        (wanted(place="denoiser=cpu,denoiser=cuda:0", device="cpu"), ("float32", "bfloat16", "float32")),
        (wanted("vae=bfloat16"), ("bfloat16", "bfloat16", "bfloat16")),
        (wanted("float16"), ("float16", "float16", "float16")),
        (wanted("float16,vae=float32"), ("float16", "float16", "float32")),
        (wanted("float32,transformer=float16"), ("float32", "float16", "float32")),
    ],
)
def test_dtypes_follow_the_device_of_the_role_unless_they_are_given(
    want: WorkerPlan, expected: tuple[str, str, str]
) -> None:
    (model,) = look(want, GPUS)
    assert tuple(dtypes(model)[name] for name in ("text_encoder", "transformer", "vae")) == expected


@pytest.mark.parametrize(
    ("want", "expected"),
    [
        (wanted(), ("float32", "float16", "float32")),
        (wanted(device="cuda:1"), ("bfloat16", "bfloat16", "float32")),
        (wanted(place="denoiser=cuda:0", device="cuda:1"), ("bfloat16", "float16", "float32")),
        (wanted(place="denoiser=cuda:1", device="cuda:0"), ("float32", "bfloat16", "float32")),
        (wanted(place="denoiser=cpu"), ("float32", "float32", "float32")),
        (wanted("text_encoder=float16"), ("float16", "float16", "float32")),
        (wanted("float16"), ("float16", "float16", "float16")),
    ],
)
def test_gpu_without_bfloat16_gets_float16_where_it_cannot_overflow(
    want: WorkerPlan, expected: tuple[str, str, str]
) -> None:
    """The text encoder is a UMT5, whose activations overflow in float16."""
    (model,) = look(want, OLD_GPUS)
    assert tuple(dtypes(model)[name] for name in ("text_encoder", "transformer", "vae")) == expected
    denoiser = next(stage for stage in model.spec.pipeline.stages if stage.role == "denoiser")
    assert {model.spec.dtypes[name] for name in denoiser.components} <= {expected[1], "float32"}, "a worker checks all"
    assert model.spec.pools()["denoise"].endswith(":float16") == (expected[1] == "float16")


def test_undivided_pipeline_computes_in_float16_as_a_whole_or_not_at_all() -> None:
    spec = read_model_spec("mine", resolve_source(SHAPES))
    whole = replace(UNDIVIDED, components=("unet", "text_encoder", "vae", "tokenizer"))
    spec = replace(spec, pipeline=Pipeline((whole,)))
    classes = {"unet": "UNet2DConditionModel", "text_encoder": "CLIPTextModel", "vae": "AutoencoderKL"}
    roles = {whole.role}
    assert float16_components(spec, classes, roles) == {"unet", "text_encoder"}
    classes["text_encoder"] = "T5EncoderModel"
    assert float16_components(spec, classes, roles) == set()


def test_workers_derive_the_pools_of_the_gateway_from_its_dtypes() -> None:
    from unfuse.models import find

    (model,) = look(wanted(place="decoder=cpu"), GPUS)
    assert find(model.folder).model_spec(SHAPES, model.folder, model.dtypes) == model.spec
    assert find(model.folder).model_spec(SHAPES, model.folder).pools() != model.spec.pools()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("int4", "unknown dtype 'int4', use auto, float32, bfloat16, float16"),
        ("vae=auto", "unknown dtype 'auto'"),
        ("unet=float32", "unknown component 'unet'; known are"),
        ("", "unknown dtype ''"),
    ],
)
def test_invalid_dtype_option_raises_config_error(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        look(wanted(spec))


def test_dtype_of_a_component_of_another_model_is_ignored() -> None:
    (model,) = look(wanted())
    files = open_files(model.folder)
    assert explicit_dtypes(model.spec, "other=float16,vae=float16", GpuRoles(), files)["vae"] == "float16"
    assert "other" not in explicit_dtypes(model.spec, "other=float16", GpuRoles(), files)


def test_components_of_shared_pools_are_planned_once(sibling: str) -> None:
    held = components_by_role(look(wanted(), HOST, sibling))
    assert {role: [part.component for part in parts] for role, parts in held.items()} == {
        "encoder": ["text_encoder"],
        "denoiser": ["transformer", "transformer"],
        "decoder": ["vae"],
    }
    (encoder,), (first, second) = held["encoder"], held["denoiser"]
    assert encoder.models == (SHAPES, sibling)
    assert (first.models, second.models) == ((SHAPES,), (sibling,))


def test_plan_that_does_not_fit_reports_why_and_lists_the_models() -> None:
    small = (Device(CPU, GIB // 2),)
    found = plan_models([SHAPES], "", wanted(), small)
    assert "cpu would need" in found.refusal
    assert (found.workers, found.rows(), found.memory()) == ((), [], [])
    assert found.models[0].components


def test_plan_sums_memory_by_device() -> None:
    found = plan_models([SHAPES], "", wanted(place="decoder=cpu"), GPUS)
    assert [(row["role"], row["device"], row["component"]) for row in found.rows()] == [
        ("encoder", "cuda:1", "text_encoder"),
        ("denoiser", "cuda:0", "transformer"),
        ("decoder", "cpu", "vae"),
    ]
    assert [row["device"] for row in found.memory()] == ["cpu", "cuda:0", "cuda:1"]
    assert all(row["memory"] < row_total["takes"] for row in found.rows() for row_total in found.memory())


def test_plan_also_sums_the_memory_that_host_and_gpu_share() -> None:
    (host,) = HOST
    found = plan_models([SHAPES], "", wanted(), (host, Device("cuda:0", host.free, uses_host_memory=True)))
    cpu, gpu, both = found.memory()
    assert [row["device"] for row in (cpu, gpu, both)] == [CPU, "cuda:0", "cpu and cuda:0 (one memory)"]
    assert (both["takes"], both["free"]) == (cpu["takes"] + gpu["takes"], host.free)


def test_missing_model_file_raises_config_error_naming_it(sibling: str) -> None:
    (Path(sibling) / "vae" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"vae/config\.json"):
        read_models([sibling], "", wanted(), HOST)


def test_pipeline_with_a_missing_stage_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a package's family that forgot its encoder, then `serve` says what nobody makes."""
    outside.install(monkeypatch)
    family = importlib.import_module("outside_family")
    monkeypatch.setattr(family, "PIPELINE", Pipeline(family.PIPELINE.stages[1:]))
    flags = {"serve.models": (str(outside.model(tmp_path / "model")),), "data_dir": str(tmp_path)}

    with pytest.raises(ConfigError, match="of family outside: no stage of the pipeline makes text"):
        plan_service(serve_options(load(flags, None, {})))


@pytest.mark.slow
def test_planning_does_not_import_torch_or_diffusers() -> None:
    code = (
        "import sys; from unfuse.service.plan import plan_models;"
        "from unfuse.planning.placement import WorkerPlan, Device;"
        "print(plan_models(['unfuse/shapes'], '', WorkerPlan(), (Device('cpu', 1 << 40),)).rows()[0]['component'],"
        "{'torch', 'diffusers', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["text_encoder", "set()"]


HUB_SCRIPT = """
from unfuse.service.plan import plan_models
from unfuse.planning.placement import Device, WorkerPlan
found = plan_models(["owner/model"], "v1", WorkerPlan(), (Device("cpu", 1 << 40),))
print(found.models[0].spec.source, *(row["memory"] for row in found.rows()))
"""


@pytest.mark.slow
def test_hub_model_is_planned_at_its_commit_without_its_weights(tmp_path: Path) -> None:
    packaged = resolve_source(SHAPES)
    files = {str(file.relative_to(packaged)): file.read_bytes() for file in packaged.rglob("*") if file.is_file()}
    with serve() as hub:
        commit = hub.push("owner/model", files, "v1")
        variables = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", HUB_SCRIPT]
        done = subprocess.run(command, env=os.environ | variables, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split() == [f"owner/model@{commit}", *(str(4 * n) for n in (281952, 1981072, 1508032))]
        assert not [file for file in hub.brought() if file.endswith(".safetensors")]


def test_language_worker_is_planned_with_weights_and_kv_cache_once(tmp_path: Path) -> None:
    """And once by each, where the roles have workers of their own; with keys and values of the longest text, too, of
    which ranks have a share each, as of what is cut."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 64,
        "vocab_size": 100,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(described).to_bytes(8, "little") + described + bytes(4000))
    together, apart = (
        plan_models([str(tmp_path)], "", WorkerPlan(workers, {}, ComputeOptions()), GPUS).workers
        for workers in ({"language": 1}, {"prefill": 1, "decode": 1})
    )
    kept, full = (4096 + 2 * 2 * 16 * 64 * width for width in (2, 4))
    assert [[part.bytes for part in worker.parts][0] for worker in (*together, *apart)] == [2000, 2000, 2000]
    needs = components_by_role(read_models([str(tmp_path)], "", WorkerPlan(), GPUS))
    (least,) = {part.bytes for parts in needs.values() for part in parts[1:]}
    assert least == kept < min(worker.parts[1].bytes for worker in (*together, *apart))
    ranks = {"parallel": "language=tensor:2", "device": "cpu+cpu"}
    (worker,) = plan_models([str(tmp_path)], "", WorkerPlan(None, {}, ComputeOptions(**ranks)), HOST).workers
    assert (worker.role, [part.bytes for part in worker.parts]) == ("language", [4000, full // 2])


def test_offload_of_an_unknown_component_is_refused_with_the_known_ones() -> None:
    known = "scheduler, text_encoder, tokenizer, transformer, vae"
    with pytest.raises(ConfigError, match=f"--offload model,unet=none: unknown component 'unet'; known are {known}"):
        read_models([SHAPES], "", WorkerPlan(compute=ComputeOptions(offload="model,unet=none")), HOST)
    assert (
        look(wanted())[0] == read_models([SHAPES], "", WorkerPlan(compute=ComputeOptions(offload="vae=model")), HOST)[0]
    ), "nothing else depends on it, neither dtypes nor names of pools"


def test_component_loaded_by_several_stages_is_reported_as_repeated() -> None:
    both, once = (PlacedWorker("all", CPU, parts) for parts in ((VAE, TEXT, VAE), (VAE,)))
    assert ServingPlan((), {}, WorkerPlan(), HOST, (once, both)).repeats() == {"vae": 2}
    assert ServingPlan((), {}, WorkerPlan(), HOST, (once, once)).repeats() == {}
    others = PlacedWorker("all", CPU, tuple(msgspec.structs.replace(VAE, models=(name,)) for name in ("one", "two")))
    assert ServingPlan((), {}, WorkerPlan(), HOST, (others,)).repeats() == {}, "of two models"
    assert ServingPlan((), {}, WorkerPlan(), HOST, ()).repeats() == {}
