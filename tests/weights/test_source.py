"""Where models come from: packaged, a folder, the hub; from a real server on loopback, each question in a process.

The hub library reads its environment when it is imported, so that one process is one machine with its cache.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests.models.hub import Hub, serve
from unfuse.core.errors import ConfigError
from unfuse.models import find, resolve_source
from unfuse.models.base import RuntimeOptions

NAME = "owner/model"

SHARD = "diffusion_pytorch_model"
PLAIN = sorted(
    [
        "model_index.json",
        "serving.json",
        "text_encoder/config.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/merges.txt",
        "tokenizer/spiece.model",
        "transformer/config.json",
        "scheduler/scheduler_config.json",
        f"transformer/{SHARD}.safetensors.index.json",
        f"transformer/{SHARD}.safetensors.index.fp16.json",
        "vae/config.json",
    ]
)
TEXT = ["text_encoder/model.safetensors"]
TRANSFORMER = [f"transformer/{SHARD}-0000{number}-of-00002.safetensors" for number in (1, 2)]
VAE = [f"vae/{SHARD}.safetensors"]

SCRIPT = """
import json, sys
from unfuse.core.errors import ConfigError
from unfuse.models import resolve_source
from unfuse.weights.folder import ModelFolder
answers = []
for method, *arguments in json.load(sys.stdin):
    try:
        if method == "resolve":
            folder = ModelFolder(resolve_source(*arguments))
            answers.append(str(folder.path))
        else:
            answers.append(getattr(folder, method)(*arguments))
    except ConfigError as error:
        answers.append("ConfigError " + str(error))
loaded = [name for name in ("torch", "diffusers", "transformers") if name in sys.modules]
json.dump([answers, loaded], sys.stdout, default=str)
"""


@dataclass
class Machine:
    """One that has a cache of its own, and asks the hub, or nobody."""

    home: Path
    hub: Hub
    said: str = ""

    def ask(self, *calls: tuple[Any, ...], offline: bool = False, **variables: str) -> list[Any]:
        """The answers of ModelFolder's methods; "resolve" chooses the folder that the next are asked of."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
        own = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.hub.url, "HF_HUB_OFFLINE": str(int(offline))}
        direct = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT],
            input=json.dumps(calls),
            env={**inherited, **own, **direct, **variables},
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        self.said = done.stderr
        answers, loaded = json.loads(done.stdout)
        assert loaded == []
        return list(answers)

    @property
    def repository(self) -> Path:
        return self.home / "hub" / "models--owner--model"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as served:
        yield served


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine", hub)


def _weights(value: float = 0, *shape: int, dtype: type = np.float32, name: str = "w") -> bytes:
    return save({name: np.full(shape or (4,), value, dtype)})


def _model(without: str = "") -> dict[str, bytes]:
    """The files of a model, no two of them equal."""
    index = {
        "_class_name": "APipeline",
        "boundary": 0.5,
        "image_encoder": [None, None],
        "text_encoder": ["transformers", "Text"],
        "tokenizer": ["transformers", "Words"],
        "transformer": ["diffusers", "Former"],
        "scheduler": ["diffusers", "Noise"],
        "vae": ["diffusers", "Vae"],
    }
    shards = {"weight_map": {f"w{number}": f"{SHARD}-0000{number}-of-00002.safetensors" for number in (1, 2)}}
    files = {
        "model_index.json": json.dumps(index).encode(),
        "README.md": b"a model",
        "pipeline.py": b"print(1)",
        "single.safetensors": _weights(),
        "tokenizer/merges.txt": b"a b",
        "tokenizer/spiece.model": b"\0\1",
        "text_encoder/model.safetensors": _weights(1, 3, 5),
        f"transformer/{SHARD}.safetensors.index.json": json.dumps(shards).encode(),
        f"transformer/{SHARD}-00001-of-00002.safetensors": _weights(2, name="w1"),
        f"transformer/{SHARD}-00002-of-00002.safetensors": _weights(3, 7, dtype=np.float16, name="w2"),
        f"transformer/{SHARD}.fp16-00001-of-00001.safetensors": _weights(5),
        f"vae/{SHARD}.safetensors": _weights(4),
        f"vae/{SHARD}.bin": b"pickle",
        f"vae/{SHARD}.fp16.safetensors": _weights(6),
    }
    files |= {name: json.dumps({"name": name}).encode() for name in PLAIN if name not in files}
    return {name: content for name, content in files.items() if name != without}


def test_a_source_may_be_the_packaged_model_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolve_source("unfuse/shapes") / "model_index.json").is_file()
    assert resolve_source(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert resolve_source(NAME) == tmp_path / "owner" / "model"


NO_NAME = "is not a folder, a hub name such as owner/model, or one of unfuse/shapes"
NOTHING = ": there is no such folder or file on this machine"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shape", NO_NAME),
        ("", NO_NAME),
        ("/no/such/folder", NOTHING),
        ("./none", NOTHING),
        ("a/b/c", NOTHING),
        ("~/none-at-all", NOTHING),
        ("~nobody-of-that-name/model", NOTHING),
    ],
)
def test_unknown_model_source_is_rejected_without_network_access(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve_source(name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("flux1-dev.safetensors", r"a single file: flux1-dev\.safetensors, a checkpoint outside .* in its component"),
        ("model.ckpt", r"a single file: model\.ckpt, weights that are not safetensors"),
        ("notes.md", "a single file: not the folder of a model"),
    ],
)
def test_single_weight_file_is_rejected_as_a_model_source(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")

    with pytest.raises(ConfigError, match=sentence):
        resolve_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("components", "weights"),
    [
        ((), []),
        (("text_encoder", "tokenizer"), TEXT),
        (("transformer", "scheduler"), TRANSFORMER),
        (None, TEXT + TRANSFORMER + VAE),
    ],
)
def test_only_weights_of_the_components_are_downloaded_and_no_code(
    components: tuple[str, ...] | None, weights: list[str], machine: Machine, hub: Hub
) -> None:
    commit = hub.push(NAME, _model())

    (folder,) = machine.ask(("resolve", NAME, None, components))

    assert hub.brought() == sorted(PLAIN + weights)
    assert machine.said == ""  # nor progress bars, nor advice of the library
    assert Path(folder) == machine.repository / "snapshots" / commit
    here = {str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()}
    assert here == {*PLAIN, *weights}


def test_cached_files_are_not_downloaded_again(machine: Machine, hub: Hub) -> None:
    hub.push(NAME, _model())
    machine.ask(("resolve", NAME, None, ["vae"]))
    hub.brought()

    machine.ask(("resolve", NAME, None, ["text_encoder", "vae"]), ("resolve", NAME, None, ["vae"]))

    assert hub.brought() == TEXT


def test_all_files_are_of_one_commit_when_the_branch_moves_in_between(machine: Machine, hub: Hub) -> None:
    newer = hub.push(NAME, {**_model(), "vae/config.json": b"{}", VAE[0]: _weights(9)})
    older = hub.push(NAME, _model())
    hub.refs["main"] = [older, newer]

    (folder,) = machine.ask(("resolve", NAME, None, ["vae"]))

    assert Path(folder).name == older
    assert not any(newer in asked.path for asked in hub.asked)
    assert machine.ask(("resolve", NAME, None, ["vae"])) == [str(Path(folder).with_name(newer))]


def test_a_branch_a_tag_or_a_commit_may_be_pinned(machine: Machine, hub: Hub) -> None:
    old = hub.push(NAME, {**_model(), "serving.json": b"1"}, "v1", "refs/pr/1")
    new = hub.push(NAME, _model())

    found = machine.ask(*[("resolve", NAME, revision, []) for revision in (None, "v1", "refs/pr/1", old, "v2")])

    assert [Path(folder).name for folder in found[:4]] == [new, old, old, old]
    assert found[4].startswith("ConfigError model 'owner/model' is not a local folder")
    assert "Revision Not Found" in found[4]


def test_token_is_sent_to_the_hub_and_not_to_its_file_storage(machine: Machine, hub: Hub) -> None:
    hub.token = "hf_" + "a" * 34
    hub.push(NAME, _model())

    (refused,) = machine.ask(("resolve", NAME, None, ["vae"]))
    assert "is not a local folder" in refused
    assert "make sure you are authenticated" in refused

    hub.asked.clear()
    machine.ask(("resolve", NAME, None, ["vae"]), ("tensors", "transformer"), HF_TOKEN=hub.token)
    sent = {(asked.storage, asked.authorization) for asked in hub.asked}
    assert sent == {(False, f"Bearer {hub.token}"), (True, None)}


def test_hub_name_resolves_from_the_hub_cache_offline(machine: Machine) -> None:
    """The cache as an older hub library laid it out, with no listing of the commit, offline."""
    snapshot = machine.repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    (machine.repository / "refs").mkdir()
    (machine.repository / "refs" / "main").write_text("c" * 40)

    asked = [(NAME, None), (NAME, "c" * 40), (NAME, "tag"), ("owner/other", None), ("o/-.-", None)]
    latest, pinned, *refused = machine.ask(*[("resolve", *one) for one in asked], offline=True)

    assert latest == pinned == str(snapshot)
    for answer in refused:
        assert answer.startswith("ConfigError model 'o")
        assert "cannot be downloaded from the hub" in answer
        assert "\n" not in answer


def test_offline_error_names_the_missing_file_and_download_command(machine: Machine, hub: Hub) -> None:
    commit = hub.push(NAME, _model())
    online = machine.ask(("resolve", NAME, None, ["transformer"]), ("weights", "transformer"))
    hub.asked.clear()

    calls = ("resolve", NAME, None, ["transformer"]), ("weights", "transformer"), ("resolve", NAME, None, ["vae"])
    *cached, refused = machine.ask(*calls, offline=True)
    assert cached == online

    remedy = f"hf download owner/model --revision {commit} --include 'vae/*'"
    lacks = f"component vae lacks vae/{SHARD}.safetensors; download it while the hub is reachable: {remedy}"
    assert refused.endswith(lacks)

    shutil.rmtree(machine.repository / "trees")
    *cached, refused = machine.ask(*calls, offline=True)
    assert cached == online
    assert "component vae lacks vae/*.safetensors; download it while" in refused
    assert hub.asked == []


def test_unreachable_hub_behaves_like_offline_mode(machine: Machine, hub: Hub) -> None:
    hub.push(NAME, _model())
    asked = ("resolve", NAME, None, ["vae"])
    online = machine.ask(asked)

    other = ("resolve", "owner/other", None, [])
    cached, refused = machine.ask(asked, other, HF_ENDPOINT="http://127.0.0.1:9")

    assert [cached] == online
    assert "cannot be downloaded from the hub: ConnectError" in refused


COMPONENTS = ("text_encoder", "tokenizer", "transformer", "scheduler", "vae")
CARD = [("identity", *COMPONENTS), ("identity", "transformer", "scheduler"), *[("size", one) for one in COMPONENTS]]


def test_identity_and_size_do_not_depend_on_the_files_downloaded(hub: Hub, tmp_path: Path) -> None:
    hub.push(NAME, _model())
    names = ("gateway", "denoiser", "whole")
    gateway, denoiser, whole = (Machine(tmp_path / name, hub) for name in names)

    card = gateway.ask(("resolve", NAME, None, []), *CARD)[1:]
    assert not any(str(answer).startswith("ConfigError") for answer in card)
    assert gateway.ask(("resolve", NAME, None, []), *CARD, offline=True)[1:] == card
    assert denoiser.ask(("resolve", NAME, None, ["transformer"]), *CARD)[1:] == card
    assert whole.ask(("resolve", NAME), *CARD)[1:] == card

    for one in (gateway, whole):
        shutil.rmtree(one.repository / "trees")
    folder = next((gateway.repository / "snapshots").iterdir())
    hub.push(NAME, {**_model(), VAE[0]: _weights(9)})  # the branch moves on, the folder's commit does not
    assert gateway.ask(("resolve", str(folder)), *CARD)[1:] == card  # the hub is asked for the listing
    assert whole.ask(("resolve", NAME), *CARD, offline=True)[1:] == card  # what is here is named by its content


def test_new_commit_changes_only_identities_of_changed_components(machine: Machine, hub: Hub) -> None:
    changes: list[dict[str, bytes]] = [{}, {"README.md": b"2"}, {"vae/config.json": b'{"a": 1}'}, {VAE[0]: _weights(5)}]
    commits = [hub.push(NAME, {**_model(), **change}) for change in changes]

    asked = [
        call
        for commit in commits
        for call in (("resolve", NAME, commit, []), ("identity", "vae"), ("identity", "transformer"))
    ]
    answers = machine.ask(*asked)

    vae, transformer = answers[1::3], answers[2::3]
    assert len(set(transformer)) == 1
    assert vae[0] == vae[1]
    assert len(set(vae)) == 3


def test_size_and_tensors_are_known_without_downloading_weights(machine: Machine, hub: Hub) -> None:
    files = _model()
    asked = [("size", "transformer"), *[("tensors", component) for component in COMPONENTS]]

    pinned = hub.push(NAME, files)
    hub.push(NAME, {**files, VAE[0]: _weights(0, 99)})  # where the branch is
    without = machine.ask(("resolve", NAME, pinned, []), *asked)[1:]
    assert not set(hub.brought()) & {*TEXT, *TRANSFORMER, *VAE}
    counted = {"tokenizer": {}, "scheduler": {}, "text_encoder": {"w": ["F32", 15]}, "vae": {"w": ["F32", 4]}}
    counted["transformer"] = {"w1": ["F32", 4], "w2": ["F16", 7]}
    size = sum(len(files[name]) for name in (*TRANSFORMER, "transformer/config.json"))
    assert without == [size, *[counted[name] for name in COMPONENTS]]

    refused = machine.ask(("resolve", NAME, pinned, []), ("tensors", "vae"), offline=True)[1]
    assert f"component vae lacks vae/{SHARD}.safetensors; download it while the hub is reachable" in refused

    machine.ask(("resolve", NAME, pinned))
    assert machine.ask(("resolve", NAME, pinned, []), *asked, offline=True)[1:] == without


LORA = {"README.md": b"", "pytorch_lora_weights.safetensors": _weights()}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (LORA, "model_index.json is missing; the folder has pytorch_lora_weights.safetensors, a LoRA adapter"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "has adapter_config.json, a LoRA adapter"),
        ({"wan.Q4_K.gguf": b""}, "has wan.Q4_K.gguf, GGUF weights, which are supported only as a local file"),
        ({"ltx.safetensors": b"", "config.json": b"{}"}, "has ltx.safetensors, a checkpoint outside diffusers' layout"),
        ({"config.json": b"{}"}, "model_index.json cannot be read (No such file or directory), so this is not a model"),
        (
            {**_model(), "vae/config.json": b'{"quantization_config": {"quant_method": "bitsandbytes"}}'},
            "component vae is quantized (quantization_config) by bitsandbytes, which is not supported",
        ),
        (
            _model(without=TEXT[0]) | {"text_encoder/pytorch_model.bin": b""},
            "weights of component text_encoder are pytorch_model.bin, weights that are not safetensors: "
            "save the model again",
        ),
    ],
)
def test_unsupported_hub_model_is_rejected_before_weights_download(
    files: dict[str, bytes], sentence: str, machine: Machine, hub: Hub
) -> None:
    hub.push(NAME, files)

    (refused,) = machine.ask(("resolve", NAME))

    assert sentence in refused
    assert all(name.endswith((".json", ".txt", ".model")) for name in hub.brought())


def test_truncated_file_in_the_cache_is_named_in_the_error(machine: Machine, hub: Hub) -> None:
    hub.push(NAME, _model())
    (folder,) = machine.ask(("resolve", NAME, None, ["vae"]))
    file = Path(folder, VAE[0])
    os.truncate(file, file.stat().st_size - 1)

    *refused, other = machine.ask(
        ("resolve", NAME, None, ["vae"]), ("resolve", NAME, None, []), ("identity", "vae"), ("identity", "transformer")
    )

    assert f"{file} is incomplete" in refused[0]
    assert f"{file} is incomplete" in refused[2]
    assert len(other) == 32


def test_stage_needs_only_its_components_and_the_model_spec_none(hub: Hub, tmp_path: Path) -> None:
    """The packaged model, from the hub to two machines; the pools that their cards name are the same."""
    packaged = resolve_source("unfuse/shapes")
    files = [file for file in packaged.rglob("*") if file.is_file()]
    hub.push(NAME, {str(file.relative_to(packaged)): file.read_bytes() for file in files})
    ((gateway,), (decoder,)) = (
        Machine(tmp_path / name, hub).ask(("resolve", NAME, None, components))
        for name, components in {"gateway": [], "decoder": ["vae"]}.items()
    )

    card, same = (find(folder).model_spec("shapes", Path(folder)) for folder in (gateway, decoder))
    assert card.weights == same.weights

    _, denoise, decode = card.pipeline.stages
    assert find(decoder).load(decode, Path(decoder), RuntimeOptions("cpu", card.dtypes)).kind == "vae_decode"
    with pytest.raises(ConfigError, match="component transformer lacks transformer/diffusion_pytorch_model.safetensor"):
        find(decoder).load(denoise, Path(decoder), RuntimeOptions("cpu", card.dtypes))
