"""The verbs as people and scripts call them: what is printed where, and how they exit."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

import unfuse as package
from tests.cli.conftest import Run
from unfuse.cli.main import exit_code
from unfuse.cli.serve import keys, options
from unfuse.cli.settings import load
from unfuse.client import Client
from unfuse.core.errors import ConfigError, InvalidParameter, NotFound, Overloaded, PermanentError, TransientError

VERBS = ["generate", "serve", "worker", "models", "requests", "workers", "pools", "doctor", "config", "version"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(unfuse: Run, verb: str) -> None:
    code, out, _ = unfuse(verb, "--help")
    assert code == 0
    assert f"Usage: unfuse {verb}" in out


def test_version_is_the_package_s(unfuse: Run) -> None:
    assert unfuse("version") == (0, f"unfuse {package.__version__}\n", "")
    assert json.loads(unfuse("version", "--json")[1]) == {"version": package.__version__}


def test_config_show_says_where_a_value_comes_from_and_hides_keys(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNFUSE_API_KEY", "sesame")

    rows = {row["setting"]: row for row in json.loads(unfuse("config", "show", "--json")[1])}
    text = unfuse("config", "show")[1]

    assert rows["api_key"]["from"] == "environment UNFUSE_API_KEY"
    assert rows["serve.port"]["value"] == 8000
    assert rows["arena.bytes"]["value"] == 2 << 30
    assert "2.0 GiB" in text
    assert "sesame" not in text + str(rows)


def test_an_unknown_setting_is_one_line_and_exit_1(unfuse: Run, tmp_path: Path) -> None:
    file = tmp_path / "unfuse.toml"
    file.write_text("[serve]\nprot = 1\n")

    code, out, err = unfuse("config", "show", "--config", str(file))

    assert (code, out) == (1, "")
    assert err == f"unfuse: {file}: serve.prot is not a setting; did you mean serve.port?\n"


def test_a_wrong_option_is_exit_2(unfuse: Run) -> None:
    code, out, err = unfuse("serve", "--prot", "1")
    assert (code, out) == (2, "")
    assert "--port" in err


def test_nobody_there_is_exit_3_and_says_where(unfuse: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    code, out, err = unfuse("models", "--json", "--server", f"http://127.0.0.1:{port}")

    assert (code, out) == (3, "")
    assert err.startswith(f"unfuse: no answer from http://127.0.0.1:{port}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 1), (PermanentError("x"), 1), (NotFound("x"), 1), (InvalidParameter("x"), 2),
        (Overloaded("x"), 3), (TransientError("x"), 3),
    ],
)  # fmt: skip
def test_an_error_s_kind_is_its_exit_code(error: package.UnfuseError, code: int) -> None:
    assert exit_code(error) == code


def test_doctor_says_what_the_machine_has(unfuse: Run) -> None:
    code, out, _ = unfuse("doctor")
    assert code == 0
    assert {"system", "processors", "memory", "GPUs", "libraries", "ports"} <= set(out.split())


def test_doctor_weighs_the_built_in_model(unfuse: Run) -> None:
    found = json.loads(unfuse("doctor", "unfuse/shapes", "--json")[1])

    weights = {row["name"]: row["bytes"] for row in found["models"]["unfuse/shapes"]}
    folder = Path(package.__file__).parent / "models" / "shapes" / "vae"
    (file,) = folder.glob("*.safetensors")
    assert set(weights) >= {"text_encoder", "transformer", "vae"}
    assert 0 < weights["vae"] < file.stat().st_size
    assert found["machine"]["memory"] > 0
    assert "they fit in" in unfuse("doctor", "unfuse/shapes")[1]


def test_doctor_has_nothing_to_clean(unfuse: Run) -> None:
    assert unfuse("doctor", "--clean")[1].startswith("nothing to clean")


def test_models_lists_what_is_served(asking: Run) -> None:
    assert [model["id"] for model in json.loads(asking("models", "--json")[1])] == ["unfuse/shapes"]
    assert "unfuse/shapes" in asking("models")[1]


def test_a_server_without_workers_says_so(asking: Run) -> None:
    assert asking("workers") == (0, "no worker is registered\n", "")
    assert json.loads(asking("workers", "--json")[1]) == []
    assert all(pool["workers"] == [] for pool in json.loads(asking("pools", "--json")[1]))
    assert "unfuse/shapes" in asking("pools")[1]


def test_requests_are_listed_shown_and_cancelled(asking: Run, idle: Client) -> None:
    first, second = (idle.submit("a red circle on white", seed=seed).id for seed in (1, 2))

    listed = [row["id"] for row in json.loads(asking("requests", "ls", "--json")[1])]
    assert listed[:2] == [second, first]
    assert first not in asking("requests", "ls", "--limit", "1")[1]
    older = asking("requests", "ls", "--after", second)[1]
    assert first in older
    assert second not in older

    shown = json.loads(asking("requests", "show", first, "--json")[1])
    assert (shown["id"], shown["status"], shown["seed"]) == (first, "queued", 1)
    text = asking("requests", "show", first)[1]
    assert first in text
    assert "text_encode" in text

    assert json.loads(asking("requests", "cancel", first, "--json")[1])["status"] == "cancelled"
    assert "cancelled" in asking("requests", "cancel", second)[1]
    assert json.loads(asking("requests", "ls", "--status", "queued", "--json")[1]) == []


def test_a_request_nobody_made_is_exit_1(asking: Run) -> None:
    code, out, err = asking("requests", "show", "req_0")
    assert (code, out) == (1, "")
    assert "req_0" in err


def test_keys_come_from_the_command_line_and_from_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ada k1\n\nk2\n")

    assert keys((str(file), "k3")) == {"k1": "ada", "k2": "default", "k3": "default"}


def test_a_key_file_with_too_much_on_a_line_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ada k1 surprise\n")
    with pytest.raises(ConfigError, match="NAME KEY"):
        keys((str(file),))


def test_settings_become_what_is_composed() -> None:
    environment = {"UNFUSE_DATA_DIR": "/d", "UNFUSE_API_KEY": "k", "UNFUSE_SERVE__DENOISERS": "3"}

    composed = options(load({"serve.max_active": 7}, None, environment))

    assert composed.results == "disk:/d"
    assert composed.keys == {"k": "default"}
    assert composed.workers == {"encoder": 1, "denoiser": 3, "decoder": 1}
    assert composed.limits.max_active == 7
    assert options(load({"serve.workers": False}, None, {})).workers == {}
