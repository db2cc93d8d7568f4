"""Weights are known by all their bytes: what differs in one weight is another model, and a changed file is noticed."""

import base64
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.answers.conftest import Folder, Serve
from tests.forking import isolated
from tools.server import Server, computes_of, serving, until

REFERENCE = Path(__file__).parents[1] / "integration" / "reference.py"

WORDS = 1_638_400
"""Rows of a text encoder's embedding: with 32 numbers each, it is a tensor of 200 MiB."""

ASKED = {"num_inference_steps": 4, "seed": 5}
PROMPT = "cats cats cats"

TEXT_ENCODER, TRANSFORMER = "text_encoder_2/model.safetensors", "transformer/diffusion_pytorch_model.safetensors"


def rewritten(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Save a weight file anew, with its tensors changed."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def configured(component: Path, **values: object) -> None:
    file = component / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def negate_last_layer(tensors: dict[str, Any]) -> None:
    tensors["proj_out.weight"] *= -1


def digest_of(server: Server, model: Path, **parameters: object) -> str:
    """SHA-256 of the RGB bytes of a picture."""
    body = {"model": str(model), "prompt": PROMPT, **ASKED, **parameters}
    picture = base64.b64decode(server.post("/v1/images/generations", body)["data"][0]["b64_json"])
    return hashlib.sha256(Image.open(io.BytesIO(picture)).convert("RGB").tobytes()).hexdigest()


def expected_of(folder: Path, *models: Path) -> list[str]:
    """The same of diffusers' pipelines, in a process of its own."""
    size = {"height": 32, "width": 32, "max_sequence_length": 24}
    cases = [{"model": str(model), "prompt": PROMPT, **size, **ASKED} for model in models]
    (folder / "cases.json").write_text(json.dumps(cases))
    out = folder / "expected.json"
    isolated(REFERENCE, str(models[0]), str(out), str(folder / "cases.json"), folder=folder)
    return [digest for (digest,) in json.loads(out.read_text())]


@pytest.fixture(scope="module")
def large(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A FLUX whose text encoder has a tensor of 200 MiB, and whose transformer has more than 64 MiB."""
    from diffusers import FluxTransformer2DModel

    made = tmp_path_factory.mktemp("fine-tunes") / "base"
    shutil.copytree(folder("flux"), made)
    configured(made / "text_encoder_2", vocab_size=WORDS)

    def with_more_words(tensors: dict[str, Any]) -> None:
        words = tensors["shared.weight"]
        tensors["shared.weight"] = np.concatenate([words, np.zeros((WORDS - len(words), words.shape[1]), words.dtype)])

    rewritten(made / TEXT_ENCODER, with_more_words)
    configured(made / "transformer", attention_head_dim=64, num_attention_heads=12, axes_dims_rope=[16, 24, 24])
    config = FluxTransformer2DModel.load_config(made / "transformer")
    FluxTransformer2DModel.from_config(config).save_pretrained(made / "transformer")
    yield made
    shutil.rmtree(made.parent)


@pytest.mark.row("P01", "P02", "K1")
def test_fine_tunes_that_differ_in_few_weights_do_not_share_a_pool(large: Path, served: Serve, tmp_path: Path) -> None:
    """One weight of a tensor of 200 MiB differs in one; the last layer of a large transformer in the other."""
    words, layer = large.with_name("words"), large.with_name("layer")
    for copy in (words, layer):
        shutil.copytree(large, copy)

    def change_one_weight(tensors: dict[str, Any]) -> None:
        letter = json.loads((large / "tokenizer_2/tokenizer.json").read_text())["model"]["vocab"]["a"]
        tensors["shared.weight"][letter, 7] += 20

    rewritten(words / TEXT_ENCODER, change_one_weight)
    rewritten(layer / TRANSFORMER, negate_last_layer)
    assert (large / TRANSFORMER).stat().st_size > 64 << 20

    server = served(large, words, layer, "--threads", "1")
    pools = {model: server.get(f"/v1/models/{model}")["stages"] for model in (large, words, layer)}
    digests = [digest_of(server, model) for model in (large, words, layer)]

    assert len({pools[model]["text_encode_2"] for model in (large, words)}) == 2
    assert pools[large]["text_encode_2"] == pools[layer]["text_encode_2"]
    assert len({pools[model]["denoise"] for model in (large, layer)}) == 2
    assert pools[large]["denoise"] == pools[words]["denoise"]
    assert digests == expected_of(tmp_path, large, words, layer)
    assert len(set(digests)) == 3


def refused(call: Callable[[], object]) -> tuple[int, str, str]:
    """Status, code and message of a call that is refused."""
    with pytest.raises(HTTPError) as caught:
        call()
    error = json.loads(caught.value.read())["error"]
    return caught.value.code, error["code"], error["message"]


@pytest.mark.row("K1")
def test_a_model_whose_file_is_overwritten_is_unavailable_until_a_restart(folder: Folder, tmp_path: Path) -> None:
    """A file that was only touched is served on. The other model, which shares components, is served all the time,
    also after compute has died and is loaded again.
    """
    model, other = tmp_path / "model", folder("flux-schnell")
    shutil.copytree(folder("flux"), model)
    with serving(tmp_path, str(model), str(other), "--threads", "1") as server:
        server.ready()
        before = digest_of(server, model)
        (model / TRANSFORMER).touch()
        until(lambda: "all model files match the loaded weights" in server.log(), "a comparison", server.process)
        assert digest_of(server, model) == before

        changed = tmp_path / "changed.safetensors"
        shutil.copy(model / TRANSFORMER, changed)
        rewritten(changed, negate_last_layer)
        with (model / TRANSFORMER).open("r+b") as file:
            file.write(changed.read_bytes())
        until(lambda: server.get(f"/v1/models/{model}")["state"] == "unavailable", "the change to show", server.process)

        reason = f"{TRANSFORMER} has changed since it was loaded: restart the server to load the new file"
        until(lambda: server.get(f"/v1/models/{model}")["reason"] == reason, "the bytes to be compared", server.process)
        pools = {pool["id"]: pool["reason"] for pool in server.get("/v1/pools")["data"]}
        assert pools[server.get(f"/v1/models/{model}")["stages"]["denoise"]] == reason
        assert refused(lambda: urlopen(f"{server.url}/ready")) == (503, "not_ready", f"{model.name}: {reason}")
        code, kind, message = refused(lambda: digest_of(server, model))
        assert (code, kind) == (503, "weights_changed")
        assert reason in message
        for compute in computes_of(*(worker["pid"] for worker in server.get("/v1/workers")["data"])):
            compute.kill()  # as reading what was cut off of a mapped file does
        of_other = digest_of(server, other)
        assert server.get(f"/v1/models/{model}")["reason"] == reason

        server.killed_and_started_again().ready()
        after = digest_of(server, model)

    assert [after, of_other] == expected_of(tmp_path, model, other)
    assert after != before
