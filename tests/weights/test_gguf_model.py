"""Models in GGUF files: the weights that transformers has, whatever the type of their tensors, and no damaged file."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st

from tests.models.gguf_files import QUANTIZED, write_gguf
from tools.tiny_language import KINDS, make_language_model
from unfuse.core.errors import ConfigError
from unfuse.core.plan import StageSelector
from unfuse.core.worker_status import ChangedFile
from unfuse.models import find, read_model_spec, resolve_source
from unfuse.models.base import RuntimeOptions
from unfuse.weights.gguf import QUANTIZED as TYPES
from unfuse.weights.gguf_model import CHUNK, GgufModel, open_files
from unfuse.worker.loaded_models import WeightFiles, states_of

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def loaded(file: Path) -> Any:
    """What is made of a file, as a model of transformers."""
    files = GgufModel(file)
    return files.load(getattr(transformers, files.kind), torch.float32).eval()


def changed(folder: Path, **config: Any) -> Path:
    """The model of a folder with another configuration, and weights for it."""
    own = transformers.AutoConfig.from_pretrained(folder)
    own.update(config)
    own.head_dim = own.hidden_size // own.num_attention_heads
    torch.manual_seed(1)
    kind = getattr(transformers, own.architectures[0])
    kind(own).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("whole"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def file(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("file") / "a.gguf", llama)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a mixture of experts."""
    folder = make_language_model(tmp_path_factory.mktemp("mixture"), KINDS[3])
    return write_gguf(tmp_path_factory.mktemp("file") / "mixture.gguf", folder)


def test_unquantized_gguf_has_the_weights_and_logits_of_its_source_model(folder: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    mine = loaded(write_gguf(tmp_path / "a.gguf", folder))
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor), name
    ids = torch.arange(3, 40)[None]
    assert torch.equal(mine(ids).logits, theirs(ids).logits)
    assert all(tensor.device.type == "cpu" for tensor in (*mine.parameters(), *mine.buffers()))


def test_llama_gguf_with_attention_bias_and_tied_embeddings_loads(llama: Path, tmp_path: Path) -> None:
    folder = changed(shutil.copytree(llama, tmp_path / "b"), attention_bias=True, tie_word_embeddings=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    mine = loaded(write_gguf(tmp_path / "a.gguf", folder))
    ids = torch.arange(3, 40)[None]
    assert torch.equal(mine(ids).logits, theirs(ids).logits)
    assert mine.lm_head.weight is mine.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_gguf_weights_match_transformers(kind: str, llama: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", llama, QUANTIZED[kind])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    mine = loaded(file)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor), name
    assert {kind for kind, _ in open_files(file).tensors("model").values()} == {"GGUF F32", f"GGUF {kind}"}


def test_every_ggml_type_has_the_block_size_of_the_gguf_package() -> None:
    for number, (name, numbers, width) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, numbers, width)
        rows = torch.zeros(2, width, dtype=torch.uint8).numpy()
        assert gguf.quants.dequantize(rows, kind).shape == (2, numbers)


def test_llama3_and_linear_rope_scaling_are_applied(llama: Path, tmp_path: Path) -> None:
    scaled = changed(shutil.copytree(llama, tmp_path / "b"), rope_parameters=LLAMA3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(scaled).model.rotary_emb.inv_freq
    mine = loaded(write_gguf(tmp_path / "a.gguf", scaled)).model.rotary_emb.inv_freq
    torch.testing.assert_close(mine, theirs)
    plain = loaded(write_gguf(tmp_path / "b.gguf", llama)).model.rotary_emb.inv_freq
    assert not torch.allclose(mine, plain)
    evenly = write_gguf(tmp_path / "c.gguf", llama, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    torch.testing.assert_close(loaded(evenly).model.rotary_emb.inv_freq, plain / 4)


def test_matrix_read_in_chunks_is_identical(file: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHUNK > 1000
    monkeypatch.setattr("unfuse.weights.gguf_model.CHUNK", 1000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(llama).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in loaded(file).state_dict().items())


def test_model_spec_of_a_gguf_file_matches_its_source_except_pools(file: Path, llama: Path) -> None:
    mine, theirs = read_model_spec("m", file), read_model_spec("m", llama)
    assert (mine.limits, mine.dtypes, mine.family) == (theirs.limits, theirs.dtypes, theirs.family)
    assert mine.source == str(file)
    assert mine.pools().keys() == theirs.pools().keys()
    assert not set(mine.pools().values()) & set(theirs.pools().values())


@pytest.mark.parametrize("whole", [64 << 20, 1000])
def test_gguf_identity_depends_on_content_not_file_name(
    whole: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfuse.weights.fingerprints.WHOLE_BYTES", whole)
    monkeypatch.setattr("unfuse.weights.fingerprints.PIECE_BYTES", 1000)
    copy = Path(shutil.copy(file, tmp_path / "renamed.gguf"))
    assert GgufModel(copy).identity("model") == GgufModel(file).identity("model")

    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    copy.write_bytes(data)
    assert GgufModel(copy).identity("model") != GgufModel(file).identity("model")


@pytest.mark.row("K1")
def test_worker_detects_that_its_loaded_gguf_file_was_replaced(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copy(file, tmp_path / "copy.gguf"))
    card, states = read_model_spec("m", copy), states_of(copy)
    files = WeightFiles([("m", str(copy), "auto")], [card], StageSelector(), states)
    assert not files.refresh()

    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    (tmp_path / "new").write_bytes(data)
    (tmp_path / "new").replace(copy)
    files.refresh()
    monkeypatch.setattr("unfuse.worker.loaded_models.time.time", lambda: copy.stat().st_ctime + 60)
    files.compare()

    assert files.refresh()
    assert files.changed == dict.fromkeys(card.pools().values(), ChangedFile("copy.gguf", compared=True))


def test_serving_and_generation_config_beside_a_gguf_file_are_read(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path))
    (tmp_path / "serving.json").write_text('{"limits": {"max_tokens": 100}}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    card = read_model_spec("m", copy)
    assert (card.limits["max_tokens"], card.defaults) == (100, {"temperature": 0.25})
    with pytest.raises(ConfigError, match=rf"or set a limit max_tokens in {tmp_path}/serving\.json"):
        find(copy).load(card.pipeline.stages[0], copy, RuntimeOptions("cpu", card.dtypes, kv=1))


def said(file: Path, key: str, value: int, into: Path) -> Path:
    """The file with another whole number in its metadata."""
    data = bytearray(file.read_bytes())
    at = data.index(key.encode()) + len(key)
    assert data[at : at + 4] == struct.pack("<I", 4)
    data[at + 4 : at + 8] = struct.pack("<I", value)
    into.write_bytes(data)
    return into


def table(
    name: str, change: Callable[[list[int], int, int], tuple[list[int], int, int]]
) -> Callable[[bytearray], None]:
    """A change of what the file says of a tensor: its dimensions, type and offset."""

    def apply(data: bytearray) -> None:
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        (count,) = struct.unpack_from("<I", data, at)
        *dimensions, kind, offset = struct.unpack_from(f"<{count}QIQ", data, at + 4)
        dimensions, kind, offset = change(dimensions, kind, offset)
        struct.pack_into(f"<{count}QIQ", data, at + 4, *dimensions, kind, offset)

    return apply


def tensors(data: bytearray) -> None:
    struct.pack_into("<Q", data, 8, 1 << 60)


def values(data: bytearray) -> None:
    struct.pack_into("<Q", data, 16, 1 << 60)


def longer(key: bytes) -> Callable[[bytearray], None]:
    """A list of the metadata said to have far more values than there are."""

    def apply(data: bytearray) -> None:
        struct.pack_into("<Q", data, data.index(key) + len(key) + 8, 1 << 60)

    return apply


def renamed(name: bytes, other: bytes) -> Callable[[bytearray], None]:
    def apply(data: bytearray) -> None:
        at = data.index(name)
        data[at : at + len(name)] = other

    return apply


def of_size(size: Callable[[int], int]) -> Callable[[bytearray], None]:
    def apply(data: bytearray) -> None:
        del data[size(len(data)) :]

    return apply


AGAIN = "download or save the model again"
NORM, UP = "output_norm.weight", "blk.0.ffn_up.weight"
DAMAGES: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "nothing": (of_size(lambda _: 0), AGAIN),
    "cut before its table": (of_size(lambda size: 60), AGAIN),
    "cut in its table": (of_size(lambda size: 23_000), AGAIN),
    "cut amid its weights": (of_size(lambda size: size // 2), f"its tensors end at byte .*; {AGAIN}|{AGAIN}"),
    "cut by a byte": (of_size(lambda size: size - 1), f"its tensors end at byte .*{AGAIN}"),
    "countless tensors": (tensors, f"declares 1152921504606846976 tensors.*{AGAIN}"),
    "countless values": (values, AGAIN),
    "a list without end": (longer(b"tokenizer.ggml.tokens"), AGAIN),
    "a list of numbers without end": (longer(b"tokenizer.ggml.token_type"), AGAIN),
    "a tensor less": (renamed(b"blk.1.attn_v.", b"blk.1.attn_x."), rf"lacks the tensor blk\.1\.attn_v\..*{AGAIN}"),
    "one name for two": (renamed(b"blk.1.attn_v.", b"blk.0.attn_v."), f"have the same name.*{AGAIN}"),
    "behind the end": (table(NORM, lambda d, k, o: (d, k, 1 << 40)), f"end at byte .*{AGAIN}"),
    "offset without end": (table(NORM, lambda d, k, o: (d, k, (1 << 64) - 32)), f"end at byte .*{AGAIN}"),
    "overlapping": (table(NORM, lambda d, k, o: (d, k, 0)), f"overlap.*{AGAIN}"),
    "between places": (table(NORM, lambda d, k, o: (d, k, o + 4)), f"not aligned to 32 bytes.*{AGAIN}"),
    "of an unknown type": (table(NORM, lambda d, k, o: (d, 4711, o)), "type 4711: use a file with the"),
    "of a type without use": (table(NORM, lambda d, k, o: (d, 28, o)), "type 28: use a file with the"),
    "of half a block": (table(NORM, lambda d, k, o: (d, 12, o)), f"Q4_K has blocks of 256.*{AGAIN}"),
    "of no size": (table(NORM, lambda d, k, o: ([0], k, o)), AGAIN),
    "without end": (table(NORM, lambda d, k, o: ([1 << 62], k, o)), AGAIN),
    "turned": (table(UP, lambda d, k, o: (d[::-1], k, o)), r"\(64, 128\), but its configuration requires \(128, 64"),
    "narrow": (table(UP, lambda d, k, o: ([d[0], d[1] - 1], k, o)), f"its configuration requires .*; {AGAIN}"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_corrupt_gguf_file_is_rejected_before_any_allocation(
    how: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the card or, at the latest, where weights are looked for: before torch has been asked for room."""
    damage, says = DAMAGES[how]
    data = bytearray(file.read_bytes())
    damage(data)
    (tmp_path / "a.gguf").write_bytes(data)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("something was allocated"))
    with pytest.raises(ConfigError, match=rf"(?s){tmp_path}/a\.gguf.*({says})"):
        card = read_model_spec("m", tmp_path / "a.gguf")
        find(tmp_path / "a.gguf").load(card.pipeline.stages[0], tmp_path / "a.gguf", RuntimeOptions("cpu", card.dtypes))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("llama.block_count", 4_000_000_000, "block_count is 4000000000"),
        ("llama.block_count", 2_000_000_000, "2000000000 layers, but only 21 tensors"),
        ("llama.block_count", 1, r"has the tensor blk\.1\..*: use the model in transformers' format"),
        ("llama.block_count", 0, "block_count is 0"),
        ("llama.embedding_length", 128, r"has the shape .*, but its configuration requires"),
        ("llama.attention.head_count", 0, "attention.head_count is 0"),
        ("llama.attention.head_count", 3, "3 heads, 2 key/value heads"),
        ("llama.attention.head_count_kv", 4, "its configuration requires"),
        ("llama.attention.key_length", 15, "head size 15"),
        ("llama.context_length", 0, "context_length is 0"),
        ("tokenizer.ggml.eos_token_id", 2, ""),
    ],
)
def test_inconsistent_gguf_metadata_raises_config_error(
    key: str, value: int, says: str, file: Path, tmp_path: Path
) -> None:
    other = said(file, key, value, tmp_path / "a.gguf")
    if not says:
        assert open_files(other).tensors("model")
        return
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a\.gguf.*{says}"):
        open_files(other).tensors("model")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"expert_count": 8}, "it is a mixture of experts, which is supported only for the architecture qwen3moe"),
        ({"attention.value_length": 8}, "4 heads, 2 key/value heads"),
        ({"rope.dimension_count": 8}, "cannot be served: its rotary embedding covers only a part of each head"),
        (
            {"rope.scaling.type": "yarn"},
            "cannot be served: its rotary embedding has the scaling yarn; supported: linear",
        ),
        ({"rope.scaling.type": "linear"}, "rope.scaling.factor is None"),
        ({"attention.sliding_window": 16}, r"it uses sliding window attention \(16 tokens\)"),
        ({"vocab_size": 12}, "its configuration requires"),
    ],
)
def test_unsupported_gguf_model_features_raise_config_error(
    metadata: dict[str, Any], says: str, llama: Path, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "a.gguf", llama, **metadata)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a\.gguf.*{says}"):
        read_model_spec("m", file)
        open_files(file).tensors("model")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("expert_count", 0, "expert_count is 0"),
        ("expert_count", 3, r"ffn_gate_inp\.weight has the shape \(4, 64\), but its configuration requires \(3, 64\)"),
        ("expert_count", 1, "2 experts per token, but only 1 experts"),
        ("expert_used_count", 5, "5 experts per token, but only 4 experts"),
        ("expert_feed_forward_length", 2_000_000_000, "its configuration requires"),
    ],
)
def test_inconsistent_mixture_of_experts_metadata_raises_config_error(
    key: str, value: int, says: str, mixture: Path, tmp_path: Path
) -> None:
    other = said(mixture, f"qwen3moe.{key}", value, tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a\.gguf.*{says}"):
        read_model_spec("m", other)
        open_files(other).tensors("model")


def test_unsupported_architecture_or_split_gguf_file_is_rejected(file: Path, llama: Path, tmp_path: Path) -> None:
    kind = b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0"
    (tmp_path / "a.gguf").write_bytes(file.read_bytes().replace(kind + b"llama", kind + b"mamba"))
    with pytest.raises(ConfigError, match="architecture mamba is not supported; supported: llama, qwen2, qwen3"):
        read_model_spec("m", tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=r"one of several files: merge them with llama-gguf-split --merge"):
        read_model_spec("m", write_gguf(tmp_path / "b.gguf", llama, **{"split.count": 3}))


@settings(max_examples=200)
@given(data=st.data())
def test_fuzzed_gguf_header_loads_or_raises_config_error(
    data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Mostly in the table of tensors, which is what lies behind the tokenizer."""
    whole = bytearray(file.read_bytes())
    begin, end = data.draw(st.sampled_from([(0, 700), (whole.index(b"token_embd"), whole.index(b"output_norm") + 60)]))
    for place in data.draw(st.lists(st.integers(begin, end), min_size=1, max_size=4)):
        whole[place] = data.draw(st.sampled_from([0, 1, 9, 127, 255]))
    damaged = tmp_path_factory.getbasetemp() / "damaged.gguf"
    damaged.write_bytes(whole)
    try:
        open_files(damaged).tensors("model")
        open_files(damaged).identity("model")
    except ConfigError as error:
        assert str(damaged) in str(error)


def test_folder_with_one_gguf_file_resolves_and_with_several_is_rejected(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path / "a.gguf"))
    assert resolve_source(str(tmp_path)) == resolve_source(str(copy)) == copy
    shutil.copy(file, tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match=r"several GGUF files, use the path of one: a\.gguf, b\.gguf"):
        resolve_source(str(tmp_path))


def test_transformers_folder_takes_precedence_over_a_gguf_file_in_it(file: Path, llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "both")
    shutil.copy(file, folder)
    assert resolve_source(str(folder)) == folder
    assert read_model_spec("m", folder).pools() == read_model_spec("m", llama).pools()
