"""The verbs as people and scripts call them: what is printed where, and how they exit."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer.main
from structlog.testing import capture_logs

import unfuse as package
from tests.cli.conftest import Run
from tests.server.served import EVIDENCE, IDLE, PICTURES, POISON, Served, serve
from tools.pages import parse_command
from unfuse.cli import show
from unfuse.cli.app import app
from unfuse.cli.exit_codes import exit_code
from unfuse.client import Client, Request, connect
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import (
    ConfigError,
    InvalidParameter,
    NotFound,
    Overloaded,
    PermanentError,
    TransientError,
    UsageError,
)
from unfuse.core.plan import readable_pool
from unfuse.models import find, resolve_source, served_classes
from unfuse.planning.gpus import Gpu, GpuSearch
from unfuse.queues.base import QueueLimits
from unfuse.service.settings import load
from unfuse.wire.unix_socket import listen_unix, server_socket
from unfuse.worker.batch_invariance import InvarianceResults

SHAPES = resolve_source("unfuse/shapes")
VERBS = ["generate", "serve", "worker", "models", "requests", "dead", "workers", "pools", "doctor", "config", "version"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_subcommand_has_a_help_page(unfuse: Run, verb: str) -> None:
    code, out, _ = unfuse(verb, "--help")
    assert code == 0
    assert f"Usage: unfuse {verb}" in out


@pytest.mark.parametrize("arguments", [("--admin-key", "k"), ("--admin-key=k",)])
def test_removed_admin_key_flag_exits_2_and_names_its_replacement(unfuse: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = unfuse("serve", "--port", "0", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--admin-key is not a flag any more" in err and "unfuse keys add NAME --admin" in err
    assert "No such option: --admin-keys" in unfuse("serve", "--admin-keys", "k")[2]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("serve", "--guidance-halves", "apart"), "leave it out: both halves of guidance share a forward"),
        (("compare", "unfuse/shapes", "--layouts"), "`python -m bench.layouts MODEL`, in a clone of the repository"),
    ],
)
def test_removed_flags_exit_2_with_advice(unfuse: Run, arguments: tuple[str, ...], advice: str) -> None:
    code, out, err = unfuse(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"is not a flag any more; {advice}" in err


@pytest.mark.parametrize(
    ("arguments", "replacement"),
    [
        (("serve", "--no-workers"), "--workers none"),
        (("serve", "--encoders", "0"), "--workers encoder=1,denoiser=2,decoder=1"),
        (("serve", "--denoisers=2"), "--workers encoder=1,denoiser=2,decoder=1"),
        (("doctor", "--decoders", "2"), "--workers encoder=1,denoiser=2,decoder=1"),
        (("serve", "--workers", "true"), "--workers split"),
        (("serve", "--workers", "false"), "--workers none"),
        (("serve", "--workers", "swap"), "--workers all=1 --max-loaded-models 1"),
        (("worker", "--workers=swap"), "--workers all=1 --max-loaded-models 1"),
        (("worker", "--hold", "model"), "--max-loaded-models 1"),
        (("serve", "--asleep", "denoiser=4"), "--scale-to-zero"),
        (("serve", "--wake-limit=60"), "--cold-start-timeout"),
    ],
)
def test_removed_layout_flags_exit_2_and_name_their_replacement(
    unfuse: Run, arguments: tuple[str, ...], replacement: str
) -> None:
    code, out, err = unfuse(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert replacement in err


def test_help_all_lists_expert_settings_that_help_omits(unfuse: Run) -> None:
    usual, full = unfuse("serve", "--help")[1], unfuse("serve", "--help-all")[1]
    expert = full[full.index("Expert:") :]
    assert all(flag in expert for flag in ("--dispatch", "--loop", "--collective-s"))
    assert "--order" not in expert and "--log-level" not in expert
    assert "--help-all" in usual and not any(flag in usual for flag in ("Expert:", "--dispatch", "--collective-s"))


def commands_of(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All groups and verbs of the command line, with their paths."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands_of(command, (*path, name))


COMMANDS = dict(commands_of(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_ends_with_an_example_that_the_command_line_accepts(unfuse: Run, path: tuple[str, ...]) -> None:
    text = unfuse(*path, "--help")[1]
    (example,) = re.findall(r"^Example:\n  (unfuse .+)\n\Z", text, re.MULTILINE)
    program, *arguments = shlex.split(example)
    assert tuple(arguments[: len(path)]) == path
    parse_command(arguments)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_the_default_of_every_option_with_a_value(path: tuple[str, ...]) -> None:
    context = typer.Context(COMMANDS[path])
    for option in COMMANDS[path].params:
        if option.param_type_name == "option" and not (option.is_flag or option.required or option.hidden):
            assert "default" in option.get_help_record(context)[1], option.opts


def test_help_groups_the_verbs_under_headings(unfuse: Run) -> None:
    text = unfuse("--help")[1]
    headings = re.findall(r"^([A-Z].*):$", text, re.MULTILINE)
    assert headings == [
        "Options",
        "Generate",
        "Serve",
        "Models and machines",
        "Watch a server",
        "Keys and settings",
        "Example",
    ]
    assert text.index("Watch a server:") < text.index("\n  dead ") < text.index("Keys and settings:")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--api-key", "keys.txt"), "pass a file of keys by --api-keys"),
        (("--api-key", "short"), "a key needs at least 16"),
        (("--api-keys", "keys.txt"), "there is no key file keys.txt"),
    ],
)
def test_serve_with_an_invalid_api_key_or_key_file_exits_2(
    unfuse: Run, arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = unfuse("serve", "--workers", "none", "--port", "0", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_version_prints_the_package_version(unfuse: Run) -> None:
    assert unfuse("version") == (0, f"unfuse {package.__version__}\n", "")
    assert json.loads(unfuse("version", "--json")[1]) == {"version": package.__version__}


def test_config_show_lists_value_sources_and_masks_secrets(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "SERVE__API_KEY", "SERVE__WEBHOOK_SECRET"):
        monkeypatch.setenv(f"UNFUSE_{name}", "sesame")
    monkeypatch.setenv("UNFUSE_SERVE__QUEUE", "redis://:sesame@127.0.0.1:6379/0")
    monkeypatch.setenv("UNFUSE_SERVE__STORE", "spill:shared_memory+redis://ada:sesame@h/0")

    rows = {row["setting"]: row for row in json.loads(unfuse("config", "show", "--json")[1])}
    text = unfuse("config", "show")[1]

    assert rows["api_key"]["from"] == "environment UNFUSE_API_KEY"
    assert (rows["arena.bytes"]["flag"], rows["arena.bytes"]["environment"]) == ("--arena", "UNFUSE_ARENA__BYTES")
    assert rows["spill.threshold"]["flag"] is None
    assert text.split()[:5] == ["SETTING", "VALUE", "FLAG", "ENVIRONMENT", "FROM"]
    assert rows["serve.port"]["value"] == 8000
    assert rows["serve.encoder_cache"]["value"] == 256 << 20
    assert "256.0 MiB" in text
    assert "sesame" not in text + str(rows)
    assert rows["serve.queue"]["value"] == "redis://:********@127.0.0.1:6379/0"
    assert rows["serve.store"]["value"] == "spill:shared_memory+redis://ada:********@h/0"


def test_unknown_setting_exits_2_with_the_nearest_name(unfuse: Run, tmp_path: Path) -> None:
    file = tmp_path / "unfuse.toml"
    file.write_text("[serve]\nprot = 1\n")

    code, out, err = unfuse("config", "show", "--config", str(file))

    assert (code, out) == (2, "")
    assert err == f"unfuse: {file}: serve.prot is not a setting; did you mean serve.port?\n"


@pytest.mark.parametrize("verb", ["serve", "worker"])
def test_removed_fault_settings_exit_2_and_name_their_replacement(
    unfuse: Run, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("UNFUSE_FAULT__SEED", "1")
    code, out, err = unfuse(verb)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "UNFUSE_TRANSFER__ENGINE=unfuse.testing.transfer_faults:FaultyTcp" in err


def test_unknown_option_exits_2_with_the_nearest_name(unfuse: Run) -> None:
    code, out, err = unfuse("serve", "--prot", "1")
    assert (code, out) == (2, "")
    assert "--port" in err


def test_mapping_value_is_shown_as_name_value_pairs() -> None:
    shown = show.cell({"predicted_s": 0.1, "device_s": {}, "by": ["a", True]})
    assert shown == "predicted_s=0.1, device_s=-, by=a, yes"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_table_fits_the_terminal_width_without_losing_text(width: int) -> None:
    row = {"id": f"req_{'0' * 32}", "stage": "text_encode", "message": "it died " * 20, "model": "\x1b[2Junfuse/shapes"}
    lines = show.table([row, row], list(row), "nothing", width)
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert text.count(row["id"]) == 2
    assert text.count("died") == 40
    assert "\\x1b[2Junfuse/shapes" in text


@pytest.mark.parametrize("verb", ["serve", "worker", "generate"])
def test_help_has_headings_and_is_not_truncated(unfuse: Run, verb: str) -> None:
    text = unfuse(verb, "--help")[1]
    headings = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert {"Options", "Workers", "Computing", "Output and logging"} <= {*headings}
    assert "…" not in text.replace("redis://…", "").replace("s3://…", "").replace("NAME-1.png, …", "")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("group", [[], ["requests"], ["keys"], ["dead"]])
def test_subcommand_list_is_not_truncated(unfuse: Run, group: list[str]) -> None:
    text = unfuse(*group, "--help")[1]
    assert "…" not in text and "..." not in text.replace("[ARGS]...", "").replace("COMMAND [ARGS]...", "")
    assert max(map(len, text.splitlines())) <= 80
    if not group:
        assert "Show this machine's resources, the needs of models, and how `serve` would place them." in (
            " ".join(text.split())
        )


def test_synonym_of_a_subcommand_exits_2_with_the_right_name(unfuse: Run) -> None:
    for words, verb in ((["requests", "list"], "requests ls"), (["keys", "remove", "x"], "keys rm")):
        code, out, err = unfuse(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.endswith(f"did you mean `unfuse {verb}`?\n")


def test_serve_rejects_an_unusable_address_before_inspecting_models(
    unfuse: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(options: object) -> None:
        raise AssertionError("it looked into the model")

    importlib.import_module("unfuse.service.service")  # which copies the function when it is first imported
    monkeypatch.setattr("unfuse.service.options.plan_service", look)
    code, _, err = unfuse("serve", "--workers", "none", "--host", "0.0.0.0", "--port", "0")
    assert (code, "set --api-keys FILE or --api-key KEY" in err) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["serve", "--workers", "none", "--port", str(port)]
        assert unfuse(*command)[2].endswith(f":{port}: Address already in use; choose another --port\n")
        with listen_unix(server_socket(load().settings.run_dir, port)):
            assert "Address already in use; another server of yours uses it; choose another" in unfuse(*command)[2]


@pytest.mark.parametrize("verb", [["models", "add"], ["serve", "--workers", "none", "--port", "0"], ["doctor"]])
def test_model_path_of_an_unknown_user_prints_an_error_message(
    unfuse: Run, verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNFUSE_SERVER", "http://127.0.0.1:9")
    code, _, err = unfuse(*verb, "~nobody-of-that-name/model")
    assert code in (1, 3) and err.splitlines()[-1].startswith("unfuse: ")


def test_compare_ignores_configured_api_keys(unfuse: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNFUSE_API_KEY", "short")
    monkeypatch.setenv("UNFUSE_SERVE__API_KEYS", "/nowhere/keys")
    code, _, err = unfuse("compare", str(tmp_path))
    assert (code, str(tmp_path) in err, "--api-key" in err) == (1, True, False), err


def test_misspelled_subcommand_exits_2_with_the_nearest_name(unfuse: Run) -> None:
    code, out, err = unfuse("genrate", "x")
    assert (code, out) == (2, "")
    assert "'generate'" in err


def test_unreachable_server_exits_3_with_its_url(unfuse: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    code, out, err = unfuse("models", "--json", "--server", f"http://127.0.0.1:{port}")

    assert (code, out) == (3, "")
    assert err.startswith(f"unfuse: no answer from http://127.0.0.1:{port}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("server", "meant"),
    [
        ("127.0.0.1:9000", "did you mean http://127.0.0.1:9000?"),
        ("tcp://10.0.0.1:8001", "did you mean http://10.0.0.1:8001?"),
        ("localhost", "did you mean http://localhost?"),
        ("http://[::1", "did you mean http://127.0.0.1:8000?"),
        ("http://h:99999", "did you mean http://127.0.0.1:8000?"),
        ("http://", "did you mean http://127.0.0.1:8000?"),
        ("", "did you mean http://127.0.0.1:8000?"),
    ],
)
def test_invalid_server_url_exits_2_with_a_suggestion(unfuse: Run, server: str, meant: str) -> None:
    code, out, err = unfuse("models", "--server", server)
    assert (code, out) == (2, "")
    assert err == f"unfuse: {server!r} is not the URL of a server: {meant}\n"


@pytest.fixture(
    params=[
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<ht>",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 8\r\n\r\nno\n\nhere",
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ]
)
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that says the same to everyone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(request.param)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_response_of_another_kind_of_server_is_a_one_line_error(unfuse: Run, stranger: str) -> None:
    for verb in (["models"], ["requests", "ls"], ["requests", "show", "x"], ["workers", "--json"]):
        code, out, err = unfuse(*verb, "--server", stranger)
        assert code in (1, 3)
        assert out == ""
        assert err.startswith("unfuse: ")
        assert err.count("\n") == 1
        assert stranger in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 1),
        (UsageError("x"), 2),
        (PermanentError("x"), 1),
        (NotFound("x"), 1),
        (InvalidParameter("x"), 2),
        (Overloaded("x"), 3),
        (TransientError("x"), 3),
    ],
)
def test_error_type_determines_the_exit_code(error: package.UnfuseError, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.slow
def test_doctor_reports_machine_resources(unfuse: Run) -> None:
    code, out, _ = unfuse("doctor")
    assert code == 0
    assert {"system", "processors", "memory", "GPUs", "libraries", "ports"} <= set(out.split())


def test_doctor_lists_running_servers_and_warns_of_insecure_listen(unfuse: Run) -> None:
    assert not re.search("WARNING|insecure", unfuse("doctor")[1])
    with listen_unix(server_socket(load().settings.run_dir, 12345)):
        code, out, _ = unfuse("doctor", "--insecure-listen")
        assert re.search(r"^servers .*\b12345\b", out, re.MULTILINE)
        assert re.search(r"^WARNING +workers connect over TCP without keys: anyone", out, re.MULTILINE)
        found = json.loads(unfuse("doctor", "--json")[1])
        assert "12345" in found["servers"]
        assert found["insecure_listen"] is False


def test_doctor_shows_memory_and_placement_and_advises_not_to_split(unfuse: Run) -> None:
    code, out, _ = unfuse("doctor", "unfuse/shapes", "--device", "cpu", "--arena", "1MiB", "--workers", "split")
    assert code == 0
    assert re.search(r"text_encoder +UMT5EncoderModel +281952 +\S+ MiB +float32 +1.1 MiB", out)
    assert re.search(r"denoiser +cpu +transformer +float32 +7.6 MiB +0 B +unfuse/shapes", out)
    assert re.search(r"cpu: 881.4 MiB of \S+ GiB free, including processes and arenas; activations need", out)
    assert "do not split: on one device stages take turns" in out
    assert out.endswith("2 more processes than undivided take 576.0 MiB of host memory\n")
    assert "gain:" not in out


def test_doctor_lists_layouts_and_the_reason_of_its_choice(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.service.plan.usable_cpus", lambda group: 2.0)
    arguments = "unfuse/shapes", "--device", "cpu", "--arena", "1MiB"
    out = unfuse("doctor", *arguments)[1]
    why = "since the models fit in one worker, which gives the best utilization"
    assert f"\nlayout all=2: each worker runs all stages, {why}\n" in out
    assert re.search(r"LAYOUT +RATE +REFUSAL\nall=2 +1 +-\n", out)
    assert "\nrates are estimates without measurements\n" in out
    assert "cpu: 592.4 MiB of" in out  # what both map counts once
    out = unfuse("doctor", *arguments, "--memory-limit", "300MiB")[1]
    assert "each stage has its own workers, since not all fit in one worker: a worker would need 302.4 MiB" in out
    assert re.search(r"all=2 +1 +a worker would need 302.4 MiB, but --memory-limit allows 300.0 MiB\n", out)
    out = unfuse("doctor", *arguments, "--device-memory", "cpu=400MiB")[1]
    assert "\nlayout all=1: each worker runs all stages, since" in out
    assert re.search(r"\nall=2 .*the models do not fit: cpu would need 592.4 MiB .* and has 400.0 MiB free", out)
    refused = unfuse("doctor", *arguments, "--device-memory", "gpu=1GiB")
    assert (refused[0], "not a device name: use cpu, cuda:0" in refused[2]) == (2, True)
    assert "write DEVICE=SIZE" in unfuse("doctor", *arguments, "--device-memory", "cpu=some")[2]


def test_doctor_says_why_no_gpu_can_be_used(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    search = GpuSearch(problem="torch 2.13.0+cu130 cannot use any GPU: cuda: the driver is too old")
    monkeypatch.setattr("unfuse.planning.machine.search_gpus", lambda: search)
    out = unfuse("doctor")[1]
    assert f"\nGPUs         none: computing on the CPU\nWARNING      {search.problem}\n" in out
    assert json.loads(unfuse("doctor", "--json")[1])["machine"]["gpu_problem"] == search.problem


def test_doctor_lists_gpus_without_bfloat16_and_the_dtypes_there(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("Tesla T4", 15 << 30, 14 << 30, compute_capability="7.5")
    monkeypatch.setattr("unfuse.planning.machine.search_gpus", lambda: GpuSearch((gpu,)))
    out = unfuse("doctor", "unfuse/shapes")[1]
    assert "\nGPUs         Tesla T4 (14.0 GiB of 15.0 GiB free, no bfloat16)\n" in out
    assert re.search(r"transformer +WanTransformer3DModel .* float16 ", out)
    assert re.search(r"text_encoder +UMT5EncoderModel .* float32 ", out)


def test_doctor_plans_for_another_machine_by_device_memory(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.planning.machine.search_gpus", GpuSearch)
    code, out, err = unfuse(
        "doctor", "unfuse/shapes", "--device-memory", "cuda:0=24GiB", "--device-memory", "cuda:1=24GiB"
    )
    assert (code, err) == (0, "")
    assert re.search(
        r"^planned for  another machine: cpu \S+ \w+, cuda:0 24.0 GiB, cuda:1 24.0 GiB$", out, re.MULTILINE
    )
    assert "\nlayout all=2: each worker runs all stages" in out
    assert re.search(
        r"\ncuda:0: \S+ MiB of 24.0 GiB free, including processes, and activations of one request of the default size",
        out,
    )
    assert re.search(r"transformer +bfloat16 ", out)
    found = json.loads(unfuse("doctor", "unfuse/shapes", "--device-memory", "cuda:0=300MiB", "--json")[1])
    assert (found["planned_for"]["cuda:0"], found["is_this_machine"]) == (300 << 20, False)
    assert "cuda:0 would need" in found["refusal"] and "300.0 MiB free" in found["refusal"]
    out = unfuse("doctor", "unfuse/shapes", "--place", "denoiser=cuda:0")[1]
    assert "there is no device cuda:0 for the denoiser" in out
    assert "set its memory, as by --device-memory cuda:0=24GiB" in out
    missing = ["--place", "denoiser=cuda:1", "--device-memory", "cuda:0=2GiB"]
    assert "as by --device-memory cuda:1=24GiB" in unfuse("doctor", "unfuse/shapes", *missing)[1]
    assert unfuse("doctor", "unfuse/shapes", "--place", "denoiser=cuda:0", "--device-memory", "cuda:0=2GiB")[0] == 0


def test_doctor_reports_machine_resources_despite_a_missing_model(unfuse: Run) -> None:
    code, out, err = unfuse("doctor", "unfuse/shape")
    assert code == 1
    assert {"system", "processors", "servers", "transfers"} <= {line.split()[0] for line in out.splitlines()}
    assert "is not packaged (did you mean unfuse/shapes?), and cannot be downloaded from the hub: " in err


def test_doctor_shows_recorded_batch_invariance_results(
    unfuse: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNFUSE_DATA_DIR", str(tmp_path))
    arguments = "unfuse/shapes", "--device", "cpu"
    assert "not compared yet" in unfuse("doctor", *arguments)[1]
    (pool,) = {
        one for one in find(SHAPES).model_spec("unfuse/shapes", SHAPES).pools().values() if one.startswith("denoise")
    }
    InvarianceResults(tmp_path / "exactness.json").record((pool, (64, 64)), 4, "results differ", 0.2, 0.1)
    name, batching = readable_pool(pool), "one request per forward: batches change bytes here"
    assert re.search(rf"{name} +{batching} +4 +0.5\n", unfuse("doctor", *arguments)[1])
    (row,) = [row for row in json.loads(unfuse("doctor", *arguments, "--json")[1])["batches"] if row["pool"] == name]
    figures = {"exact_to": 1, "not_from": 4, "because_of": "results differ", "time": 0.5}
    assert row == {"pool": name, "batching": batching, **figures}


def test_doctor_reports_memory_saved_by_shared_components(unfuse: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(SHAPES, tmp_path / "sibling")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(file.read_text().replace("1.5", "3.0"))
    workers = ("--workers", "encoder=1,denoiser=2,decoder=1")
    out = unfuse("doctor", "unfuse/shapes", str(folder), "--device", "cpu", *workers, "--arena", "1MiB")[1]
    assert "gain: one text_encoder serves 2 models: 1.1 MiB less memory" in out
    assert "gain: one vae serves 2 models: 5.8 MiB less memory" in out
    assert "gain: 2 denoisers share encoder and decoder: 6.8 MiB less memory than as many undivided pipelines" in out
    assert "\ndo not split: " in out


@pytest.mark.slow
def test_doctor_reports_configurations_that_serve_rejects(unfuse: Run) -> None:
    arguments = ["unfuse/shapes", "--device", "cpu", "--arena", "100TiB"]
    text = unfuse("doctor", *arguments)[1]
    refused = unfuse("serve", *arguments, "--port", "0")
    assert "serve would refuse: the models do not fit: cpu would need 300.0 TiB (encoder 100.0 TiB + " in text
    assert text.endswith("nothing to split: serve would refuse this\n")
    assert refused[0] == 1
    assert refused[2].splitlines()[-1].startswith("unfuse: the models do not fit: cpu would need 300.0 TiB")
    assert (
        "--offload model needs a GPU" in unfuse("doctor", "unfuse/shapes", "--device", "cpu", "--offload", "model")[1]
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--parallel", "nonsense"], "is not ROLE=KIND:N"),
        (["--workers", "auto", "--parallel", "auto"], "--parallel auto configures one worker"),
    ],
)
def test_worker_with_invalid_options_exits_2_without_a_scheduler(
    unfuse: Run, arguments: list[str], reason: str
) -> None:
    code, _, err = unfuse("worker", *arguments)
    assert (code, reason in err) == (2, True), err


def test_doctor_json_reports_models_placement_and_rejection(unfuse: Run) -> None:
    found = json.loads(unfuse("doctor", "unfuse/shapes", "--json", "--device", "cpu", "--dtype", "bfloat16")[1])
    chosen = found["verdict"].split()[1].rstrip(":")
    assert found["layouts"][0] == {"layout": chosen, "rate": 1.0, "refusal": ""}
    rows = {row["name"]: row for row in found["models"]["unfuse/shapes"]}
    assert rows["transformer"]["memory"] == 2 * rows["transformer"]["parameters"]
    assert {row["role"] for row in found["placement"]} == {"all"}
    assert found["memory"][0]["takes"] > sum(row["memory"] for row in found["placement"])
    assert (found["refusal"], found["gains"]) == (None, [])
    assert found["machine"]["memory"] > 0
    refused = json.loads(unfuse("doctor", "unfuse/shapes", "--json", "--place", "decoder=cuda:99")[1])
    assert refused["placement"] == []
    assert "no device cuda:99 for the decoder" in refused["refusal"]


@pytest.mark.parametrize("verb", ["serve", "worker", "doctor"])
def test_serve_worker_and_doctor_accept_every_compute_option(unfuse: Run, verb: str) -> None:
    text = unfuse(verb, "--help-all")[1]
    for field in ComputeOptions.__struct_fields__:
        assert f"--{field.replace('_', '-')} " in text


def test_invalid_choice_exits_2_and_lists_the_choices(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = unfuse("serve", "--vae", "sometimes")
    assert (code, out) == (2, "")
    assert "'whole', 'sliced', 'tiled'" in err
    monkeypatch.setenv("UNFUSE_COMPUTE__VAE", "sometimes")
    code, _, err = unfuse("serve")
    assert code == 2
    assert "compute.vae 'sometimes' (from environment UNFUSE_COMPUTE__VAE): one of whole, sliced, tiled" in err


@pytest.mark.slow  # it starts a fork server, which imports while the models are read
def test_invalid_offload_exits_2_and_lists_the_choices(unfuse: Run) -> None:
    code, out, err = unfuse("serve", "--offload", "sometimes")
    assert (code, out) == (2, "")
    assert "--offload sometimes: 'sometimes' is not one of none, model, sequential, or COMPONENT=one of these" in err


@pytest.mark.slow
def test_models_lists_the_models_of_the_server(asking: Run) -> None:
    rows = json.loads(asking("models", "--json")[1])
    assert [model["id"] for model in rows if model["state"] == "loading"] == ["unfuse/shapes"]
    assert [model["id"] for model in rows].count("unfuse/shapes") == 1
    assert re.search("^unfuse/shapes +loading +yes", asking("models")[1], re.MULTILINE)


def test_models_without_a_server_lists_built_in_and_cached_models(
    unfuse: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, other = served_classes()[0], "SomebodyElsesPipeline"
    for name, kind in (("ada--one", known), ("ada--two", other)):
        folder = tmp_path / f"models--{name}" / "snapshots" / ("0" * 40)
        folder.mkdir(parents=True)
        (folder / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    (folder / "model_index.json").write_text("[" * 5000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("unfuse.client.client.Client.models", nobody)
    code, out, err = unfuse("models")
    assert code == 0
    assert re.search("^unfuse/shapes +built in", out, re.MULTILINE)
    assert re.search("^ada/one +in the hub cache", out, re.MULTILINE)
    assert "ada/two" not in out
    assert known in out.splitlines()[-1]
    assert err == "nobody there\n"


def nobody(client: Client) -> None:
    """Answer as no server does."""
    raise TransientError("nobody there")


def test_workers_of_a_server_without_workers_prints_an_empty_list(asking: Run) -> None:
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

    plain, wide = (asking("requests", "ls", *flags)[1] for flags in ((), ("--wide",)))
    assert "default" not in plain and "a red circle on white" not in plain
    assert all(word in wide for word in ("TENANT", "SECONDS", "MONEY", "PROMPT", "default", "a red circle on white"))

    shown = json.loads(asking("requests", "show", first, "--json")[1])
    assert (shown["id"], shown["status"], shown["seed"]) == (first, "queued", 1)
    text = asking("requests", "show", first)[1]
    assert first in text
    assert re.search(r"^cost +nothing used, predicted [\d.]+ s$", text, re.MULTILINE)
    assert "text_encode" in text

    assert json.loads(asking("requests", "cancel", first, "--json")[1])["status"] == "cancelled"
    assert "cancelled" in asking("requests", "cancel", second)[1]
    assert json.loads(asking("requests", "ls", "--status", "queued", "--json")[1]) == []


def test_unknown_request_id_exits_1(asking: Run) -> None:
    code, out, err = asking("requests", "show", "req_0")
    assert (code, out) == (1, "")
    assert "req_0" in err


@pytest.mark.parametrize("verb", ["requests show", "requests cancel", "dead show", "dead rm", "dead retry"])
def test_unknown_id_names_the_server_that_was_asked(asking: Run, idle: Client, verb: str) -> None:
    code, out, err = asking(*verb.split(), "req_0")
    assert (code, out) == (1, "")
    assert "req_0" in err and err.endswith(f" (server: {idle.url})\n")


def test_unknown_id_of_a_file_or_of_events_names_the_server(idle: Client) -> None:
    unknown = Request(idle, {"id": "req_0"})
    for call in (lambda: idle.download("/v1/requests/req_0/result/0"), lambda: list(unknown.events())):
        with pytest.raises(NotFound, match=re.escape(f"(server: {idle.url})")):
            call()


@pytest.fixture
def drawing(unfuse: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Run, Served]]:
    """Run a command line whose server has a worker, that can be poisoned."""
    with capture_logs(), serve(tmp_path, limits=QueueLimits(max_active=1)) as served:
        monkeypatch.setenv("UNFUSE_SERVER", served.url)
        yield unfuse, served


def test_dead_letters_are_listed_shown_and_retried(drawing: tuple[Run, Served]) -> None:
    unfuse, served = drawing
    with connect(served.url) as client:
        id = client.submit(POISON, model=PICTURES.name).id
        served.next_event(id, "failed")

        assert [row["id"] for row in json.loads(unfuse("dead", "ls", "--json")[1])] == [id]
        line = unfuse("dead", "ls", "--limit", "1")[1].splitlines()[1]
        assert re.search(rf"^{id}  .*  text_encode  compute_crashed  the compute process died .*2 times", line)

        shown = json.loads(unfuse("dead", "show", id, "--json")[1])
        assert shown["error"]["evidence"] == EVIDENCE
        for verb in ("dead", "requests"):
            text = unfuse(verb, "show", id)[1]
            assert all(f"evidence        {line}\n" in text for line in EVIDENCE.splitlines())
            assert re.search(r"FAILURES +CRASHES +DEVICE FAILURES +RECOMPUTES", text)
            assert re.search(r"text_encode +cancelled +worker-1 +2 +0 +2 +0 +0 ", text)

        retried = json.loads(unfuse("dead", "retry", id, "--json")[1])
        assert retried["metadata"] == {"retry_of": id}
        served.next_event(retried["id"], "failed")
        assert unfuse("dead", "retry", id)[0] == 1
        client.submit("a circle", model=IDLE.name)
        code, _, err = unfuse("dead", "retry", retried["id"])
        assert (code, err.count("\n")) == (3, 1)
        assert unfuse("dead", "show", "req_0")[0] == 1
    assert unfuse("dead", "ls", "--after", retried["id"]) == (0, "no dead letters\n", "")


def test_workers_and_pools_show_health_and_load(drawing: tuple[Run, Served]) -> None:
    unfuse, _ = drawing
    assert re.search(r"worker-1 +all +node +- +0 +4 +0 +yes +\d", unfuse("workers")[1])
    assert json.loads(unfuse("workers", "--json")[1])[0]["healthy"] is True
    assert {"SLOTS", "LEASED", "WAITING", "OLDEST S"} <= set(re.split("  +", unfuse("pools")[1].splitlines()[0]))
