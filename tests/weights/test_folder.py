"""A model's folder: what its components are, what tells one from another, and what is refused."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.numpy import save

from unfuse.core.errors import ConfigError
from unfuse.models import find
from unfuse.weights import fingerprints
from unfuse.weights.folder import ModelFolder, header

HEADER = json.dumps({"tensor": {"dtype": "U8", "shape": [4000], "data_offsets": [0, 4000]}}).encode()
WHOLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(4000)
FILE, SHARD = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model-0000{}-of-00002.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> ModelFolder:
    """A component of one weight file of 4,000 zeros."""
    component = tmp_path / "vae"
    component.mkdir()
    (component / "config.json").write_text("{}")
    (component / FILE).write_bytes(WHOLE)
    return ModelFolder(tmp_path)


@given(position=st.integers(0, 3999))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_identity_changes_with_any_byte_of_a_small_file(model: ModelFolder, position: int) -> None:
    file = model.path / "vae" / FILE
    before = model.identity("vae")

    at = len(WHOLE) - 4000 + position
    file.write_bytes(WHOLE[:at] + b"\1" + WHOLE[at + 1 :])
    changed = model.identity("vae")
    file.write_bytes(WHOLE)

    assert changed != before
    assert model.identity("vae") == before


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.row("K1")
def test_identity_changes_with_any_byte_of_a_multi_piece_file(
    model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fingerprint is made of those of pieces, of which the last one is shorter."""
    monkeypatch.setattr(fingerprints, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprints, "PIECE_BYTES", 1000)
    monkeypatch.setattr(fingerprints, "READ_BYTES", 300)
    file = model.path / "vae" / FILE
    seen = {model.identity("vae")}
    positions = range(8 + len(HEADER), len(WHOLE), 97)

    for position in positions:
        _flip(file, position)
        seen.add(model.identity("vae"))
        _flip(file, position)

    assert len(seen) == len(positions) + 1


def test_identity_changes_if_pieces_of_a_file_are_swapped(model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprints, "PIECE_BYTES", 1000)
    file = model.path / "vae" / FILE
    end = len(WHOLE) - len(WHOLE) % 1000
    file.write_bytes(WHOLE[: end - 2000] + b"a" * 1000 + b"b" * 1000 + WHOLE[end:])
    before = model.identity("vae")

    file.write_bytes(WHOLE[: end - 2000] + b"b" * 1000 + b"a" * 1000 + WHOLE[end:])

    assert model.identity("vae") != before


def test_identity_of_small_files_is_stable_across_releases(model: ModelFolder) -> None:
    """Or what waits in a queue would wait for ever after an upgrade."""
    known = b"config.json\x002\0{}" + f"{FILE}\0{len(WHOLE)}\0".encode() + WHOLE
    assert model.identity("vae") == xxhash.xxh3_128_hexdigest(known)


def test_identity_covers_file_size_file_name_and_config(model: ModelFolder) -> None:
    component = model.path / "vae"
    seen = {model.identity("vae")}
    (component / FILE).write_bytes(save({"tensor": np.zeros(4001, np.uint8)}))
    seen.add(model.identity("vae"))
    (component / FILE).rename(component / "model.safetensors")
    seen.add(model.identity("vae"))
    (component / "config.json").write_text('{"a": 1}')
    seen.add(model.identity("vae"))
    assert len(seen) == 4

    (component / "README.md").write_text("other files do not")
    assert model.identity("vae") in seen


def test_identity_follows_symlinks_in_a_plain_folder(model: ModelFolder) -> None:
    """Unlike those of a folder in the hub library's cache, which name the content."""
    before = model.identity("vae")
    file = model.path / "vae" / FILE
    file.rename(model.path / "elsewhere")
    file.symlink_to(model.path / "elsewhere")
    assert model.identity("vae") == before

    _flip(model.path / "elsewhere", -1)
    assert model.identity("vae") != before


@pytest.fixture
def snapshot(tmp_path: Path) -> ModelFolder:
    """The same as `model`, as the hub's library keeps it: links to files that are called by their content."""
    weights, config = hashlib.sha256(WHOLE).hexdigest(), hashlib.sha1(b"blob 2\0{}").hexdigest()
    place = tmp_path / "models--owner--name"
    component = place / "snapshots" / "c0ffee" / "vae"
    for folder in (component, place / "blobs", place / "trees"):
        folder.mkdir(parents=True)
    files: dict[str, dict[str, object]] = {}
    for name, content, blob in ((FILE, WHOLE, weights), ("config.json", b"{}", config)):
        (place / "blobs" / blob).write_bytes(content)
        (component / name).symlink_to(f"../../../blobs/{blob}")
        files[f"vae/{name}"] = {"size": len(content), "blob_id": blob}
    files[f"vae/{FILE}"] |= {"blob_id": "0" * 40, "lfs_sha256": weights}
    (place / "trees" / "c0ffee.json").write_text(json.dumps({"format_version": 1, "files": files}))
    return ModelFolder(component.parent)


def test_hub_links_replaced_by_copies_have_the_same_identity(snapshot: ModelFolder) -> None:
    before = snapshot.identity("vae")

    for file in [*(snapshot.path / "vae").iterdir()]:
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)

    assert snapshot.identity("vae") == before


@pytest.mark.row("K1")
@pytest.mark.parametrize("name", [FILE, "config.json"])
@pytest.mark.parametrize("listed", [True, False])
def test_file_that_replaces_a_hub_link_is_hashed(
    listed: bool, name: str, snapshot: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is a link to a file of any folder, whose name says nothing."""
    if not listed:
        (snapshot.path.parents[1] / "trees" / "c0ffee.json").unlink()
        monkeypatch.setattr(ModelFolder, "_tree", None)
    file, other = snapshot.path / "vae" / name, tmp_path / "other"
    seen = {snapshot.identity("vae")}
    content = WHOLE[:-1] + b"\1" if name == FILE else b'{"a":1}'

    file.unlink()
    file.write_bytes(content)
    seen.add(ModelFolder(snapshot.path).identity("vae"))
    file.unlink()
    file.symlink_to(other)
    for fine_tune in (WHOLE[:-2] + b"\1\1", WHOLE[:-2] + b"\2\1") if name == FILE else (b'{"b":1}', b'{"b":2}'):
        other.write_bytes(fine_tune)
        seen.add(ModelFolder(snapshot.path).identity("vae"))

    assert len(seen) == 4


@pytest.mark.row("K1")
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", [FILE, "config.json"])
def test_hub_blob_overwritten_through_its_link_is_hashed(
    name: str, listed: bool, snapshot: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy goes through the link into the blob, which keeps the name of its old content."""
    if not listed:
        (snapshot.path.parents[1] / "trees" / "c0ffee.json").unlink()
        monkeypatch.setattr(ModelFolder, "_tree", None)
    file, before = snapshot.path / "vae" / name, snapshot.identity("vae")
    content = file.read_bytes()

    def copied(data: bytes) -> str:
        file.write_bytes(data)
        while file.stat().st_ctime_ns <= file.lstat().st_ctime_ns:  # until the times of the file system show it
            file.write_bytes(data)
        return ModelFolder(snapshot.path).identity("vae")

    other = WHOLE[:-1] + b"\1" if name == FILE else b" {}"
    assert copied(other) != before
    assert copied(content) == before


@pytest.mark.parametrize(
    ("folder", "hub"),
    [
        ("models--a--b/snapshots/c", ("a/b", "c")),
        ("models--b/snapshots/c", ("b", "c")),
        ("models--a--b/refs/c", None),
        ("my--models/snapshots/c", None),
        ("models/snapshots/c", None),
    ],
)
def test_hub_cache_snapshot_is_recognized_by_its_path(folder: str, hub: tuple[str, str] | None, tmp_path: Path) -> None:
    assert ModelFolder(tmp_path / folder).hub == hub


def _shard(model: ModelFolder) -> Path:
    """Replace the weights by two shards and their index."""
    component = model.path / "vae"
    (component / FILE).unlink()
    for number, dtype in enumerate((np.float16, np.float32), 1):
        (component / SHARD.format(number)).write_bytes(save({f"t{number}": np.zeros((number, 3), dtype)}))
    index = {"weight_map": {f"t{number}": SHARD.format(number) for number in (1, 2)}}
    (component / f"{FILE}.index.json").write_text(json.dumps(index))
    return component


@pytest.mark.row("K1")
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("shard", [1, 2])
def test_identity_changes_with_any_shard_even_behind_a_symlink(shard: int, link: bool, model: ModelFolder) -> None:
    file = _shard(model) / SHARD.format(shard)
    if link:
        file.rename(model.path / "elsewhere")
        file.symlink_to(model.path / "elsewhere")
    before = model.identity("vae")

    _flip(file.resolve(), -3)

    assert model.identity("vae") != before
    assert [path.resolve() for path in model.files("vae").values()].count(file.resolve()) == 1


def test_missing_shard_of_an_index_raises_config_error(model: ModelFolder) -> None:
    component = _shard(model)
    assert [file.name for file in model.weights("vae")] == [SHARD.format(1), SHARD.format(2)]
    assert model.tensors("vae") == {"t1": ("F16", 3), "t2": ("F32", 6)}

    (component / SHARD.format(2)).unlink()
    for ask in (model.weights, model.size, model.identity, model.tensors):
        with pytest.raises(ConfigError, match=r"component vae lacks vae/diffusion\S+-00002-of-00002.safetensors; down"):
            ask("vae")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_shard_index_without_entries_raises_config_error(content: str, model: ModelFolder) -> None:
    (_shard(model) / f"{FILE}.index.json").write_text(content)

    with pytest.raises(ConfigError, match=r"component vae lacks vae/\*.safetensors; download or save"):
        model.weights("vae")


def test_shard_path_outside_the_component_is_rejected(model: ModelFolder) -> None:
    component = _shard(model)
    (model.path / "other.safetensors").write_bytes(WHOLE)
    (component / f"{FILE}.index.json").write_text('{"weight_map": {"t1": "../other.safetensors"}}')

    with pytest.raises(ConfigError, match="component vae lacks vae/../other.safetensors"):
        model.weights("vae")


@pytest.mark.parametrize(
    ("present", "loaded"),
    [
        ([FILE, f"{FILE}.index.json"], SHARD.format(1)),
        (["model.safetensors", "model.safetensors.index.json"], "model.safetensors"),
    ],
)
def test_index_or_file_precedence_follows_the_loading_library(
    present: list[str], loaded: str, model: ModelFolder
) -> None:
    component = _shard(model)
    index = (component / f"{FILE}.index.json").read_text()
    (component / f"{FILE}.index.json").unlink()
    for name in present:
        (component / name).write_bytes(index.encode() if name.endswith(".json") else WHOLE)

    assert model.weights("vae")[0].name == loaded


def test_weight_variants_beside_plain_weights_are_ignored(model: ModelFolder) -> None:
    before = model.identity("vae"), model.size("vae"), model.weights("vae"), model.tensors("vae")
    assert before[1] == 2 + len(WHOLE)
    assert before[3] == {"tensor": ("U8", 4000)}

    for name in (
        "diffusion_pytorch_model.fp16.safetensors",
        "diffusion_pytorch_model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.bin.index.json",
    ):
        (model.path / "vae" / name).write_bytes(b"not read")

    assert (model.identity("vae"), model.size("vae"), model.weights("vae"), model.tensors("vae")) == before


PICKLES = "weights that are not safetensors: save the model again as safetensors"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("diffusion_pytorch_model.fp16.safetensors", "a weight variant, which is not supported: save the model"),
        ("model.fp16-00001-of-00002.safetensors", "a weight variant, which is not supported"),
        ("pytorch_model.bin", PICKLES),
        ("model.ckpt", PICKLES),
        ("model.pt", PICKLES),
        ("model.pth", PICKLES),
        ("pytorch_lora_weights.safetensors", r"a LoRA adapter, which is not a model: serve its base model"),
        ("adapter_model.safetensors", r"a LoRA adapter, .* with --loras FOLDER"),
    ],
)
def test_component_with_only_unsupported_weights_is_rejected(name: str, sentence: str, model: ModelFolder) -> None:
    (model.path / "vae" / FILE).rename(model.path / "vae" / name)

    for ask in (model.weights, model.size, model.identity, model.tensors):
        with pytest.raises(ConfigError, match=rf"the weights of component vae are {name}, {sentence}"):
            ask("vae")


@pytest.mark.row("P47")
def test_misnamed_text_encoder_weights_raise_an_error_with_rename_hint(tmp_path: Path) -> None:
    """As of a file that other tools have of T5, and that somebody put where it belongs."""
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text('{"architectures": ["UMT5EncoderModel"]}')
    (tmp_path / "text_encoder" / "umt5_xxl_fp16.safetensors").write_bytes(WHOLE)

    with pytest.raises(ConfigError, match=r"are umt5_xxl_fp16.safetensors, but .* only model.safetensors: rename"):
        ModelFolder(tmp_path).weights("text_encoder")


def test_adapter_config_beside_the_weights_is_rejected(model: ModelFolder) -> None:
    (model.path / "vae" / "adapter_config.json").write_text("{}")

    with pytest.raises(ConfigError, match=r"the weights of component vae are adapter_config.json, a LoRA adapter"):
        model.identity("vae")


def test_lora_adapter_folder_is_rejected_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(WHOLE)
    with pytest.raises(
        ConfigError, match=r"model_index.json is missing; the folder has pytorch_lora_weights.safetensors, a LoRA"
    ):
        ModelFolder(tmp_path).index()

    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"unet/config.json is missing; the folder has adapter_config.json, a LoRA adapter"
    ):
        ModelFolder(tmp_path).weights("unet")


def test_component_with_unsupported_quantization_is_rejected(model: ModelFolder) -> None:
    (model.path / "vae" / "config.json").write_text('{"quantization_config": null}')
    model.weights("vae")

    (model.path / "vae" / "config.json").write_text('{"quantization_config": {"quant_method": "other"}}')
    for ask in (model.weights, model.size, model.identity, model.tensors):
        with pytest.raises(
            ConfigError, match=r"component vae is quantized \(quantization_config\) by other, which is n"
        ):
            ask("vae")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_weights_without_quantization_config_are_rejected(dtype: str, model: ModelFolder) -> None:
    head = HEADER.replace(b'"U8"', f'"{dtype}"'.encode())
    (model.path / "vae" / FILE).write_bytes(len(head).to_bytes(8, "little") + head + bytes(4000))

    for ask in (model.weights, model.identity, model.tensors):
        with pytest.raises(ConfigError, match=rf"vae/{FILE} has 8-bit floats, which are not supported"):
            ask("vae")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (WHOLE[:-1], f"is incomplete: it has {len(WHOLE) - 1} bytes, but its header requires {len(WHOLE)}"),
        (WHOLE + b"\0", "is incomplete"),
        (WHOLE[:40], "is not a safetensors file, or truncated"),
        (WHOLE[:5], "is not a safetensors file, or truncated"),
        (b"", "is not a safetensors file, or truncated"),
        (b"\xff" * 8 + bytes(4000), "is not a safetensors file, or truncated"),
        (b"\x02" + bytes(7) + b"[]", "is not a safetensors file"),
        (b"\x02" + bytes(7) + b'"\xff', "is not a safetensors file"),
        (b"\x09" + bytes(7) + b'{"a": {}}', "is not a safetensors file"),
    ],
)
def test_truncated_or_invalid_safetensors_file_is_rejected(content: bytes, sentence: str, model: ModelFolder) -> None:
    (model.path / "vae" / FILE).write_bytes(content)

    for ask in (model.weights, model.size, model.identity, model.tensors):
        with pytest.raises(ConfigError, match=rf"vae/{FILE} {sentence}"):
            ask("vae")


def test_safetensors_header_is_parsed_and_missing_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(save({"a": np.zeros((2, 3), np.float16)}, metadata={"format": "pt"}))

    assert header(tmp_path / "w.safetensors") == {"a": {"dtype": "F16", "shape": [2, 3], "data_offsets": (0, 12)}}
    with pytest.raises(ConfigError, match=r"none.safetensors cannot be read \(No such file or directory\)"):
        header(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("component", "file"),
    [
        ("vae", "config.json"),
        ("text_encoder_2", "config.json"),
        ("image_encoder", "config.json"),
        ("scheduler", "scheduler_config.json"),
        ("tokenizer", "tokenizer_config.json"),
        ("tokenizer_2", "tokenizer_config.json"),
        ("image_processor", "preprocessor_config.json"),
        ("feature_extractor", "preprocessor_config.json"),
        ("processor", "tokenizer_config.json"),
    ],
)
def test_each_component_type_has_its_own_config_file(component: str, file: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{component}/{file} cannot be read"):
        ModelFolder(tmp_path).config(component)

    (tmp_path / component).mkdir()
    (tmp_path / component / file).write_text('{"found": true}')
    assert ModelFolder(tmp_path).config(component) == {"found": True}


def test_component_weights_without_config_are_reported_as_incomplete(model: ModelFolder) -> None:
    (model.path / "vae" / "config.json").unlink()

    with pytest.raises(ConfigError, match="vae/config.json cannot be read .* so component vae is incomplete"):
        model.weights("vae")


def test_component_without_weights_has_a_size_and_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer" / "merges.txt").write_text("a b")

    model = ModelFolder(tmp_path)
    assert (model.size("tokenizer"), model.weights("tokenizer"), model.tensors("tokenizer")) == (5, [], {})
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer/tokenizer_config.json cannot be read"):
        model.identity("tokenizer")


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    "content",
    [
        nested(5000),
        b'{"_class_name":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"_class_name":' + b"9" * 5000 + b"}",
        b'{"_class_name":"' + b"x" * 1_000_000 + b'"}',
        b'{"_class_name":["a"]}',
        b"{}",
        b"[]",
        b"null",
        b"",
        b"\xff",
        b'{"_class_name":NaN}',
        b'{"_class_name":"\\ud800"}',
        b'{"_class_name":"\\u0000"}',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_invalid_model_index_raises_a_one_line_config_error(content: bytes, model: ModelFolder) -> None:
    (model.path / "model_index.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        find(model.path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_deeply_nested_json_raises_config_error(model: ModelFolder) -> None:
    (model.path / "vae" / "config.json").write_bytes(nested(5000))
    with pytest.raises(ConfigError, match="config.json is not valid"):
        model.config("vae")
    (model.path / "vae" / FILE).write_bytes(len(nested(5000)).to_bytes(8, "little") + nested(5000))
    with pytest.raises(ConfigError, match="not a safetensors file"):
        header(model.path / "vae" / FILE)


def test_serving_json_does_not_change_a_language_model_identity(tmp_path: Path) -> None:
    """Given `serving.json` beside its weights, when an operator edits it, then the model that is served is the same."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    before = ModelFolder(tmp_path).identity("model")

    for setting in ("{}", '{"limits": {"max_tokens": 10}}'):
        (tmp_path / "serving.json").write_text(setting)
        assert ModelFolder(tmp_path).identity("model") == before
    assert "serving.json" not in ModelFolder(tmp_path).files("model")
