"""Settings: where a value comes from, and what is said about one that is not understood."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import asdict

from tools.settings_page import PAGE
from tools.snippets import PAGES, blocks
from unfuse.core.errors import ConfigError
from unfuse.service.groups import Level, Settings
from unfuse.service.options import ServeOptions
from unfuse.service.settings import FIELDS, ByteSize, load
from unfuse.transfer.base import TransferOptions, TransferSettings
from unfuse.worker.registration import WorkerOptions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file that says port 1 and a queue of two."""
    path = tmp_path / "unfuse.toml"
    path.write_text('[serve]\nport = 1\nmax_queue = 2\n[arena]\nbytes = "1MiB"\n')
    return path


def refusal(flags: dict[str, object] | None = None, config: Path | None = None, **environment: str) -> str:
    """What `load` says no with."""
    with pytest.raises(ConfigError) as caught:
        load(flags, config, environment)
    return str(caught.value)


def test_settings_default_without_flags_environment_or_file() -> None:
    loaded = load({}, None, {"HOME": "/home/ada"})

    assert loaded.settings == Settings(data_dir="/home/ada/.local/share/unfuse", run_dir=loaded.settings.run_dir)
    assert set(loaded.origins.values()) == {"default"}


def test_tilde_in_path_settings_is_expanded_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    file = tmp_path / "unfuse.toml"
    file.write_text('data_dir = "~/data"\n[serve]\napi_keys = ["~/keys", "/k"]\nloras = "~/loras"\n')
    settings = load({}, file, {"UNFUSE_RUN_DIR": "~/run"}).settings
    assert (settings.data_dir, settings.run_dir) == ("/home/ada/data", "/home/ada/run")
    assert (settings.serve.api_keys, settings.serve.loras) == (("/home/ada/keys", "/k"), "/home/ada/loras")


def test_unknown_home_folder_raises_config_error() -> None:
    said = refusal(UNFUSE_DATA_DIR="~nobody-of-that-name/data")
    assert said == (
        "data_dir ~nobody-of-that-name/data: there is no such home folder; set UNFUSE_DATA_DIR to an absolute path"
    )


def test_flags_override_environment_overrides_file_overrides_default(file: Path) -> None:
    environment = {"UNFUSE_SERVE__PORT": "2", "UNFUSE_SERVE__MAX_ACTIVE": "5"}

    loaded = load({"serve.port": 3, "serve.host": None}, file, environment)

    serve = loaded.settings.serve
    assert (serve.port, serve.max_active, serve.max_queue, serve.order, serve.host) == (3, 5, 2, "fifo", "127.0.0.1")
    assert loaded.origins["serve.port"] == "flag --port"
    assert loaded.origins["serve.max_active"] == "environment UNFUSE_SERVE__MAX_ACTIVE"
    assert loaded.origins["serve.max_queue"] == f"file {file}"
    assert loaded.origins["serve.order"] == "default"
    assert load({}, file, environment).settings.serve.port == 2


def test_environment_variables_parse_numbers_booleans_lists_and_sizes() -> None:
    environment = {
        "UNFUSE_SERVE__STRICT_PARAMS": "true",
        "UNFUSE_SERVE__MODELS": "one, two",
        "UNFUSE_ARENA__BYTES": "1.5GiB",
        "UNFUSE_LEASE__TTL_S": "2.5",
    }

    settings = load({}, None, environment).settings

    assert settings.serve.strict_params
    assert settings.serve.models == ("one", "two")
    assert settings.arena.bytes == 3 << 29
    assert settings.lease.ttl_s == 2.5


def test_data_dir_follows_xdg_data_home_unless_set_explicitly() -> None:
    assert load({}, None, {"XDG_DATA_HOME": "/x"}).settings.data_dir == "/x/unfuse"
    assert load({}, None, {"XDG_DATA_HOME": "/x", "UNFUSE_DATA_DIR": "/y"}).settings.data_dir == "/y"


def test_unknown_setting_error_suggests_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[serve]\nprot = 1\n")

    assert "serve.prot is not a setting; did you mean serve.port?" in refusal(config=path)
    assert "did you mean UNFUSE_SERVE__PORT?" in refusal(UNFUSE_SERVE__PROT="1")
    assert "`unfuse config show` lists them" in refusal(UNFUSE_QQQQQQQQQQQQQQQQQQ="1")


def test_removed_fault_settings_error_names_the_faulty_engine(tmp_path: Path) -> None:
    path = tmp_path / "faulty.toml"
    path.write_text("[fault]\ndrop = 0.1\n")
    new = "UNFUSE_TRANSFER__ENGINE=unfuse.testing.transfer_faults:FaultyTcp"

    for said in (refusal(UNFUSE_FAULT__DROP="0"), refusal(UNFUSE_FAULT__TYPO="1"), refusal(config=path)):
        assert new in said and "TRANSFER_FAULTS=" in said
        assert said.count(". ") == 0


def test_removed_admin_key_setting_error_names_its_replacement(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text('[serve]\nadmin_key = ["0123456789abcdef"]\n')
    for said in (refusal(UNFUSE_SERVE__ADMIN_KEY="0123456789abcdef"), refusal(config=path)):
        assert "admin=yes" in said and "unfuse keys add NAME --admin" in said and "0123456789abcdef" not in said


def test_removed_setting_error_explains_the_replacement(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text('[compute]\nguidance_halves = "apart"\n')
    for said in (refusal(UNFUSE_COMPUTE__GUIDANCE_HALVES="apart"), refusal(config=path)):
        assert "is not a setting any more; leave it out: both halves of guidance share a forward" in said


@pytest.mark.parametrize(
    ("group", "name", "value", "replacement"),
    [
        ("serve", "encoders", "0", "--workers encoder=1,denoiser=2,decoder=1"),
        ("serve", "denoisers", "2", "--workers encoder=1,denoiser=2,decoder=1"),
        ("serve", "decoders", "2", "--workers encoder=1,denoiser=2,decoder=1"),
        ("serve", "workers", "true", "--workers split"),
        ("serve", "workers", "false", "--workers none"),
        ("serve", "workers", "swap", "--workers all=1 --max-loaded-models 1"),
        ("worker", "workers", "swap", "--workers all=1 --max-loaded-models 1"),
        ("worker", "hold", "model", "--max-loaded-models 1"),
        ("serve", "asleep", "denoiser=4", "--scale-to-zero"),
        ("serve", "wake_limit", "60", "--cold-start-timeout"),
    ],
)
def test_removed_layout_setting_error_names_the_new_spelling(
    tmp_path: Path, group: str, name: str, value: str, replacement: str
) -> None:
    assert replacement in refusal(**{f"UNFUSE_{group}__{name}".upper(): value})
    path = tmp_path / "old.toml"
    for written in (f'"{value}"', value if value in ("true", "false") else f'"{value}"'):
        path.write_text(f"[{group}]\n{name} = {written}\n")
        assert replacement in refusal(config=path)


def test_max_loaded_models_accepts_an_integer_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text("[worker]\nmax_loaded_models = 1\n")
    assert load({}, path, {}).settings.worker.max_loaded_models == "1"
    assert "one of 1, all" in refusal(UNFUSE_WORKER__MAX_LOADED_MODELS="2")


def test_environment_variables_of_other_programs_are_ignored() -> None:
    assert load({}, None, {"UNFUSED": "1", "PATH": "/bin"}).origins["server"] == "default"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("UNFUSE_SERVE__PORT", "http"),
        ("UNFUSE_SERVE__PORT", "70000"),
        ("UNFUSE_SERVE__MAX_ACTIVE", "-1"),
        ("UNFUSE_LEASE__TTL_S", "0"),
        ("UNFUSE_ARENA__BYTES", "2 apples"),
        ("UNFUSE_ARENA__BYTES", "9" * 400),
    ],
)
def test_invalid_value_error_names_the_value_and_its_origin(variable: str, value: str) -> None:
    message = refusal(**{variable: value})
    assert repr(value) in message
    assert variable in message


def test_secret_values_are_not_repeated_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "unfuse.toml"
    path.write_text("api_key = 123456789\n")
    assert "123456789" not in refusal(config=path)


def test_missing_or_invalid_toml_file_is_named_in_the_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[serve\n")

    assert "none.toml: No such file" in refusal(config=tmp_path / "none.toml")
    assert "broken.toml is not TOML" in refusal(config=broken)


def plain(value: object) -> bool:
    """Whether a value is of the types themselves that messages, records and scripts carry: a subclass is not."""
    items = value if type(value) is tuple else (value,)
    return all(type(item) in (int, float, str, bool) for item in items)


@given(
    st.lists(st.sampled_from([name for name, field in FIELDS.items() if field.unit == "byte"]), unique=True),
    st.booleans(),
)
def test_loaded_settings_are_plain_values_without_parser_types(sizes: list[str], as_text: bool) -> None:
    """Given sizes as flags, as people write them or as numbers, then nothing says any more how they were written."""
    settings = load(dict.fromkeys(sizes, "3GiB" if as_text else 3 << 30), None, {"UNFUSE_ARENA__BYTES": "1MB"}).settings
    values = {name: reduce(getattr, name.split("."), settings) for name in FIELDS}
    assert [name for name, value in values.items() if not plain(value)] == []
    assert {values[name] for name in sizes} <= {3 << 30}
    assert [name for name, field in FIELDS.items() if not plain(field.default)] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_dir", "/srv/Run of Ada"),
        ("insecure_listen", True),
        ("transfer.engine", ("tcp", "my_Package:Engine")),
        ("store.orphan_s", 12.5),
        ("arena.bytes", 3 << 20),
    ],
)
def test_settings_round_trip_through_environment_variables(name: str, value: object) -> None:
    """As workers read what `serve` tells them."""
    field = FIELDS[name]
    settings = load({}, None, {field.variable: field.written(value)}).settings
    assert reduce(getattr, name.split("."), settings) == value


@pytest.mark.parametrize("kind", [ServeOptions, WorkerOptions])
def test_composed_options_have_no_defaults_of_their_own(kind: type[msgspec.Struct]) -> None:
    assert [field.name for field in msgspec.structs.fields(kind) if not field.required] == []


def test_transfer_options_default_to_the_transfer_settings() -> None:
    chosen = asdict(TransferSettings()) | {"threads": TransferOptions().threads}  # 0 stands for a number by the cores
    assert asdict(TransferOptions()).items() >= chosen.items()
    assert {f"transfer.{name}" for name in asdict(TransferSettings())} < FIELDS.keys()


def test_every_setting_has_a_level_and_few_are_needed() -> None:
    levels = {name: field.level for name, field in FIELDS.items()}
    assert {*levels.values()} == {*get_args(Level)}
    assert sum(level == "need" for level in levels.values()) <= 12
    assert (levels["serve.port"], levels["serve.order"], levels["lease.ttl_s"]) == ("need", "may", "expert")


def test_example_toml_of_the_settings_page_loads(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(PAGE) if block.startswith("[serve]")]
    (file := tmp_path / "unfuse.toml").write_text(block)

    loaded = load({}, file, {})

    assert (loaded.settings.serve.retention_s, loaded.settings.serve.results_limit) == (7 * 86_400, 50 << 30)
    assert (loaded.settings.compute.threads, loaded.settings.arena.bytes) == (2, 1 << 30)


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "deploy").glob("*/*.*"))], ids=lambda path: path.name)
def test_variables_named_in_the_docs_are_settings(path: Path) -> None:
    named = set(re.findall(r"UNFUSE_[A-Z0-9_]*[A-Z0-9]", path.read_text()))
    assert named - {field.variable for field in FIELDS.values()} == set()


def test_every_setting_has_a_description() -> None:
    assert all(field.description.endswith(".") for field in FIELDS.values())


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("12", 12), ("1k", 1024), ("1KB", 1000), ("1KiB", 1024), ("2 GiB", 2 << 30), ("1t", 1 << 40)],
)
def test_byte_sizes_parse_with_units(text: str, count: int) -> None:
    assert ByteSize.parse(text) == count


@given(st.integers(0, 1 << 20), st.sampled_from(["k", "KiB", "MiB", "GiB"]))
def test_parsed_byte_size_increases_with_its_number(number: int, unit: str) -> None:
    assert ByteSize.parse(f"{number + 1}{unit}") > ByteSize.parse(f"{number}{unit}") >= number


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1 XB", "1e9", "nan", "1,5GiB"])
def test_invalid_byte_size_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        ByteSize.parse(text)
