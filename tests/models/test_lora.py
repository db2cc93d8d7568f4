"""With a LoRA adapter, a denoiser makes the bits that diffusers makes with it; without one, the model's own."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from tests.models import conftest as c
from tools.tiny import KINDS
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ConfigError, NotFound, PermanentError
from unfuse.core.plan import Params
from unfuse.models import find
from unfuse.models.base import DiffusersFamily, RuntimeOptions
from unfuse.models.modular import Modular
from unfuse.stages.base import StageInput, SteppedStage, next_states
from unfuse.weights.adapters import AdapterFolder

JOBS = {job.name: job for job in [*c.LORA_JOBS, c.FILES[-1]]}
ONE = ComputeOptions(max_loras=1)
SEQUENCE = [
    "lora-plain",
    "lora-none",
    "lora-alpha",
    "lora-scaled",
    "lora-two",
    "lora-plain",
    "lora-two",
    "lora-alpha",
    "lora-none",
]


@pytest.fixture(scope="session")
def loras(undivided: c.Undivided) -> AdapterFolder:
    return AdapterFolder(str(undivided.folder("loras")))


@pytest.fixture
def prepared(
    undivided: c.Undivided, stages: c.Load, loras: AdapterFolder
) -> Callable[..., tuple[SteppedStage[Any], Any]]:
    """The denoise stage for a job, and the job as its task."""

    def prepare(job: c.Job, options: ComputeOptions = c.EXACT) -> tuple[SteppedStage[Any], StageInput]:
        folder = str(undivided.folder("loras"))
        loaded = stages(undivided.folder(job.model), job.dtype, options, folder)
        encoded = c.encode(loaded, job.params, undivided.uploads(job.params))
        stage, task = loaded["denoise"], known(job.params, loras, encoded)
        assert isinstance(stage, SteppedStage)
        stage.verify(task)
        return stage, task

    return prepare


Prepare = Callable[..., tuple[SteppedStage[Any], StageInput]]


def known(params: Params, loras: AdapterFolder, tensors: Any = None) -> StageInput:
    """A request's task, with what the gateway knows of its adapters."""
    id = loras.ids_of(str(params["lora"])) if "lora" in params else ""
    return StageInput(params, tensors or {}, derived=DerivedFacts(lora_id=id))


def latents(stage: SteppedStage[Any], task: StageInput) -> np.ndarray:
    (output,) = stage.run([task])
    found: np.ndarray = output.tensors["latents"].float().numpy()  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("name", JOBS)
def test_lora_latents_equal_the_undivided_pipeline(name: str, undivided: c.Undivided, prepared: Prepare) -> None:
    assert np.array_equal(latents(*prepared(JOBS[name])), undivided.result(name)["latents"])


def test_reference_latents_differ_between_adapters_and_scales(undivided: c.Undivided) -> None:
    for names in (
        ["lora-none", "lora-plain", "lora-alpha", "lora-scaled", "lora-two"],
        ["lora-flux-none", "lora-flux", "lora-flux-two", "lora-flux-kohya"],
    ):
        made = [undivided.result(name)["latents"] for name in names]
        for place, one in enumerate(made):
            assert all(np.abs(one - other).mean() > 0.01 for other in made[place + 1 :]), names[place]


@pytest.mark.parametrize("options", [c.EXACT, ONE], ids=["four loaded", "one loaded"])
def test_successive_requests_with_different_adapters_are_independent(
    options: ComputeOptions, undivided: c.Undivided, prepared: Prepare
) -> None:
    """Given requests with two adapters, another scale and none on one transformer, when they come in turn, then each
    is its own reference, also where only one adapter stays loaded."""
    for name in SEQUENCE:
        assert np.array_equal(latents(*prepared(JOBS[name], options)), undivided.result(name)["latents"]), name


@pytest.mark.parametrize("options", [c.EXACT, ONE], ids=["four loaded", "one loaded"])
def test_interleaved_steps_with_different_adapters_are_independent(
    options: ComputeOptions, undivided: c.Undivided, prepared: Prepare
) -> None:
    names = ["lora-plain", "lora-none", "lora-two", "lora-alpha", "lora-scaled"]
    stage, _ = prepared(JOBS["lora-none"], options)
    states = [stage.start(prepared(JOBS[name], options)[1]) for name in names]

    for _ in range(stage.progress(states[0])[1]):
        states = [next_states(stage, [state])[0] for state in states]

    for name, state in zip(names, states, strict=True):
        made = stage.finish(state).tensors["latents"]
        assert made is not None and np.array_equal(made.numpy(), undivided.result(name)["latents"]), name


def test_resume_from_checkpoint_applies_the_lora_adapter_of_the_task(undivided: c.Undivided, prepared: Prepare) -> None:
    """Given a checkpoint made with one adapter, when a transformer that ran with another one goes on from it, then the
    latents are those of the undivided pipeline with the first."""
    stage, task = prepared(JOBS["lora-alpha"])
    (state,) = next_states(stage, [stage.start(task)])
    checkpoint = stage.save(state)
    assert checkpoint is not None
    other, another_task = prepared(JOBS["lora-plain"], ONE)
    other.run([another_task])

    state = other.resume(task, checkpoint)
    done, steps = other.progress(state)
    for _ in range(done, steps):
        (state,) = next_states(other, [state])

    made = other.finish(state).tensors["latents"]
    assert made is not None and np.array_equal(made.numpy(), undivided.result("lora-alpha")["latents"])


def test_requests_share_a_batch_key_only_with_equal_adapter_and_scale(loras: AdapterFolder, prepared: Prepare) -> None:
    stage, _ = prepared(JOBS["lora-none"])
    names = ("lora-plain", "lora-alpha", "lora-scaled", "lora-two", "lora-none")
    keys = [stage.batch_key(known(JOBS[name].params, loras)) for name in names]

    assert len(set(keys)) == 5
    assert stage.batch_key(known({**JOBS["lora-plain"].params, "seed": 1}, loras)) == keys[0]


def test_batched_lora_latents_match_unbatched_within_tolerance(undivided: c.Undivided, prepared: Prepare) -> None:
    stage, task = prepared(JOBS["lora-alpha"], ComputeOptions(batching="batched"))
    mate = replace(task, params={**task.params, "seed": 99})
    states = [stage.start(one) for one in (task, mate)]

    for _ in range(stage.progress(states[0])[1]):
        states = next_states(stage, states)  # type: ignore[assignment]

    made = stage.finish(states[0]).tensors["latents"]
    assert made is not None
    np.testing.assert_allclose(made.numpy(), undivided.result("lora-alpha")["latents"], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def folder(undivided: c.Undivided, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that cannot be used, by what they are."""
    folder, plain = tmp_path_factory.mktemp("loras"), load_file(undivided.folder("loras") / "wan-plain.safetensors")
    first = next(key for key in plain if "lora_A" in key)
    up = first.replace("lora_A", "lora_B")
    broken = {
        "text": {
            **plain,
            **{
                f"text_encoder.q.lora_{side}.weight": plain[key].clone()
                for side, key in zip("AB", (first, up), strict=True)
            },
        },
        "other": load_file(undivided.folder("loras") / "flux-plain.safetensors"),
        "ranks": {**plain, first: plain[first][:2].clone()},
        "wide": {**plain, first: plain[first][:, :3].clone()},
        "half": {key: tensor for key, tensor in plain.items() if key != up},
        "more": {**plain, "transformer.blocks.0.attn1.to_q.lora_magnitude_vector": plain[first].clone()},
        "second": {key.replace("transformer.", "transformer_2."): tensor for key, tensor in plain.items()},
        "empty": {},
        "kohya": load_file(undivided.folder("loras") / "flux-kohya.safetensors"),
    }
    for name, tensors in broken.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "pickle.safetensors").write_bytes(pickle.dumps(dict(plain)))
    (folder / "cut.safetensors").write_bytes((folder / "ranks.safetensors").read_bytes()[:-9])
    save_file(plain, folder / "good.safetensors")
    return folder


class TestRefusals:
    """What is no adapter for the model fails its own request with a sentence; the next one has the model's own bits."""

    @pytest.fixture
    def run(self, folder: Path, undivided: c.Undivided, stages: c.Load) -> Iterator[Callable[[str], np.ndarray]]:
        """Makes lora-none's request with an adapter of that folder."""
        loaded = stages(undivided.folder("wan"), "float32", c.EXACT, str(folder))
        stage, params, loras = loaded["denoise"], JOBS["lora-none"].params, AdapterFolder(str(folder))
        assert isinstance(stage, SteppedStage)

        def make(name: str) -> np.ndarray:
            own = {"lora": name, "lora_scale": 1.0} if name else {}
            return latents(stage, known({**params, **own}, loras, c.encode(loaded, params, {})))

        yield make
        assert np.array_equal(make(""), undivided.result("lora-none")["latents"])
        assert np.array_equal(make("good"), undivided.result("lora-plain")["latents"])

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("text", "only the denoiser is adapted"),
            ("other", "made for another model"),
            ("second", "no such layer"),
            ("kohya", "cannot be loaded|another model"),
            ("ranks", "of different ranks"),
            ("wide", "does not fit the model"),
            ("empty", "is empty"),
            ("half", "half of the low-rank pair"),
            ("more", "not part of a low-rank pair"),
            ("pickle", "cannot be loaded"),
            ("cut", "cannot be loaded"),
        ],
    )
    def test_incompatible_or_damaged_lora_file_fails_only_its_request(
        self, name: str, says: str, run: Callable[[str], Any]
    ) -> None:
        with pytest.raises(PermanentError, match=says):
            run(name)

    def test_deleted_or_changed_lora_file_fails_its_request(
        self, undivided: c.Undivided, stages: c.Load, tmp_path: Path
    ) -> None:
        file, source = tmp_path / "mine.safetensors", undivided.folder("loras")
        file.write_bytes((source / "wan-plain.safetensors").read_bytes())
        loaded, asked = stages(undivided.folder("wan"), "float32", c.EXACT, str(tmp_path)), AdapterFolder(str(tmp_path))
        stage, base = loaded["denoise"], JOBS["lora-plain"].params
        assert isinstance(stage, SteppedStage)
        task = known({**base, "lora": "mine"}, asked, c.encode(loaded, base, {}))
        file.write_bytes((source / "wan-alpha.safetensors").read_bytes())

        with pytest.raises(PermanentError, match="has other content"):
            stage.run([task])
        file.unlink()
        with pytest.raises(NotFound, match="lora 'mine' does not exist"):
            stage.run([task])
        file.write_bytes((source / "wan-plain.safetensors").read_bytes())
        assert np.array_equal(latents(stage, task), undivided.result("lora-plain")["latents"])

    @pytest.mark.parametrize(
        ("option", "says"), [("", "needs the library peft"), ("sequential", "use --offload model")]
    )
    def test_loading_without_peft_or_with_sequential_offload_raises_error(
        self, option: str, says: str, undivided: c.Undivided, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It does not start: without peft, and where layers come to the device one by one."""
        folder = undivided.folder("wan")
        card = find(folder).model_spec("m", folder)
        if option:
            monkeypatch.setattr("unfuse.models.base.Loader._place", lambda _, model, *__, **___: model)  # as with a GPU
            monkeypatch.setattr("unfuse.models.base.require_gpu", lambda *_: None)
        else:
            monkeypatch.setitem(sys.modules, "peft", None)
        runtime = RuntimeOptions(
            "cpu", card.dtypes, ComputeOptions(offload="sequential" if option else "none"), str(tmp_path)
        )
        (spec,) = (spec for spec in card.pipeline.stages if spec.kind == "denoise")
        with pytest.raises(ConfigError, match=says):
            find(folder).load(spec, folder, runtime)

    def test_lora_request_on_worker_without_loras_option_is_rejected(
        self, undivided: c.Undivided, stages: c.Load, loras: AdapterFolder
    ) -> None:
        loaded, params = stages(undivided.folder("wan")), JOBS["lora-plain"].params
        with pytest.raises(PermanentError, match="--loras"):
            loaded["denoise"].verify(known(params, loras, c.encode(loaded, params, {})))


class TestFolder:
    """What can be asked for is a safetensors file that lies in the folder, by its plain name."""

    def test_only_safetensors_files_inside_the_folder_are_available(self, tmp_path: Path) -> None:
        folder, outside = tmp_path / "loras", tmp_path / "secret.safetensors"
        (folder / "inner").mkdir(parents=True)
        for path in (outside, folder / "a.b-C_1.safetensors", folder / "x.bin", folder / "inner/y.safetensors"):
            path.write_bytes(b"weights")
        (folder / "has space.safetensors").write_bytes(b"weights")
        os.symlink(outside, folder / "link.safetensors")
        os.symlink(folder / "a.b-C_1.safetensors", folder / "alias.safetensors")
        loras = AdapterFolder(str(folder))

        assert [*loras.files()] == ["a.b-C_1", "alias"]
        assert loras.id_of("alias") == loras.id_of("a.b-C_1")
        for name in ("link", "../secret", "inner/y", "y", "x", "has space", "", ".", "..", "a\0", "a" * 200):
            with pytest.raises(NotFound, match=r"available: a\.b-C_1, alias"):
                loras.id_of(name)
        with pytest.raises(NotFound, match="; rename has space.safetensors: names may have only letters, digits"):
            loras.id_of("has space")

    def test_changed_file_gets_a_new_id_and_oversized_file_is_rejected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (file := tmp_path / "a.safetensors").write_bytes(b"one")
        loras = AdapterFolder(str(tmp_path))
        first = loras.id_of("a")
        assert loras.id_of("a") == first
        file.write_bytes(b"two")
        assert loras.id_of("a") != first
        monkeypatch.setattr("unfuse.weights.adapters.MAX_BYTES", 2)
        with pytest.raises(NotFound, match="3 bytes"):
            loras.id_of("a")

    def test_unknown_lora_error_lists_at_most_20_adapters(self, tmp_path: Path) -> None:
        for number in range(30):
            (tmp_path / f"a{number:02}.safetensors").write_bytes(b"")
        with pytest.raises(NotFound, match="a19 and 10 more$"):
            AdapterFolder(str(tmp_path)).id_of("b")


@pytest.mark.parametrize("kind", KINDS)
def test_lora_families_have_a_pipeline_and_transformer_with_lora_support(kind: str, undivided: c.Undivided) -> None:
    family = find(undivided.folder(kind))
    assert isinstance(family, DiffusersFamily)
    config = json.loads((undivided.folder(kind) / family.adapts / "config.json").read_text())
    able = [
        hasattr(getattr(import_module("diffusers"), family.source[1]), "lora_state_dict"),
        hasattr(getattr(diffusers, config["_class_name"]), "load_lora_adapter"),
    ]
    assert able == [True, True] or not family.takes_lora
    assert family.takes_lora or isinstance(family, Modular), "blocks are run as they are"
