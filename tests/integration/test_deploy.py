"""What deploy/ has for systemd and Docker, as far as it can be tried: units start, commands parse, files are there.

No image was built by these tests: there is no Docker daemon where they run.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tools.addresses import free_port
from tools.server import environment
from tools.snippets import blocks
from unfuse.cli.app import app
from unfuse.edge.keys import MIN_KEY_CHARS, ApiKey, ApiKeys
from unfuse.service.settings import FIELDS, load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
WHEEL = "dist/*.whl"
"""What `make dist` makes, from which images are built."""

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yml").read_text())


def parsed(arguments: list[str]) -> None:
    """Have the real command line read a verb and its flags. Raises what a person would be told."""
    verb, *rest = arguments
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    command.make_context(verb, rest)


def of_unit(unit: Path, key: str) -> str:
    (found,) = re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(found)


def known(variables: list[str]) -> bool:
    """Whether these are settings, as far as they are ours."""
    return {name for name in variables if name.startswith("UNFUSE_")} <= {field.variable for field in FIELDS.values()}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_units_pass_verification(unit: Path, tmp_path: Path) -> None:
    """Its program is elsewhere: one that is here takes its place."""
    program, *arguments = shlex.split(of_unit(unit, "ExecStart"))
    assert program == "/opt/unfuse/bin/unfuse"
    parsed(arguments)
    assert known([setting.partition("=")[0] for setting in of_unit(unit, "Environment").split()])
    assert not re.search(r"^(PrivateDevices|ProtectClock|Device\w+)=", unit.read_text(), re.MULTILINE), "no GPU is left"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    (copied := tmp_path / unit.name).write_text(unit.read_text().replace(program, "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", str(copied)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")


class Systemd:
    """Starts a unit's command as systemd does, and hears what it is told."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._socket = folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self._socket.settimeout(600)

    def start(self, unit: Path, **variables: str) -> subprocess.Popen[bytes]:
        _, *arguments = shlex.split(of_unit(unit, "ExecStart"))
        assert of_unit(unit, "Type") == "notify"
        own = environment(self._folder) | {"NOTIFY_SOCKET": str(self._folder / "notify")} | variables
        with (self._folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "unfuse", *arguments]
            return subprocess.Popen(command, env=own, stderr=log, start_new_session=True)

    def told(self) -> str:
        return self._socket.recv(1024).decode()

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        assert self.told() == "STOPPING=1"
        assert process.wait(600) == 0, (self._folder / "log").read_text()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path)
    yield made
    made.close()


@pytest.mark.nightly
def test_serve_and_worker_units_notify_systemd_of_ready_and_stopping(systemd: Systemd) -> None:
    worker, serve = sorted(UNITS, key=lambda unit: unit.name, reverse=True)
    port = str(free_port())
    serving = systemd.start(serve, UNFUSE_SERVE__PORT=port, UNFUSE_SERVE__WORKERS="none")
    assert systemd.told() == "READY=1"
    variables = {"UNFUSE_WORKER__SCHEDULER": port, "UNFUSE_ARENA__BYTES": "64MiB"}
    working = systemd.start(worker, **variables)
    assert systemd.told() == "READY=1"
    systemd.stop(working)
    systemd.stop(serving)


def test_three_machines_howto_settings_are_consistent() -> None:
    """As the page has them, which says where the files are that units read."""
    page = ROOT / "docs" / "guides" / "three-machines.md"
    serve, worker, _ = (block for block in blocks(page) if re.match(r"UNFUSE_|\[Service\]", block))
    said = [dict(re.findall(r"^(UNFUSE_\w+)=(.+)$", block, re.MULTILINE)) for block in (serve, worker)]
    assert known([*said[0], *said[1]])
    server, theirs = (load(environment=one).settings for one in said)
    (listens,) = server.serve.listen
    assert listens in theirs.worker.scheduler and len(theirs.worker.scheduler) == 2
    assert (server.serve.models, server.serve.workers) == (("unfuse/shapes",), "none")
    for unit, kind in zip(sorted(UNITS), ("serve", "worker"), strict=True):
        assert f"EnvironmentFile=-/etc/unfuse/{kind}.env" in unit.read_text()
        assert f"`/etc/unfuse/{kind}.env`" in page.read_text()


def test_sd_notify_ignores_an_unusable_notify_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from unfuse.service.stopping import READY, notify

    for address in ("", "relative", str(tmp_path / "nobody"), "@unfuse-nobody"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify(READY)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles_copy_existing_files_and_run_valid_commands(dockerfile: Path) -> None:
    text = dockerfile.read_text().replace("\\\n", " ")
    steps = [line.partition(" ")[::2] for line in text.splitlines() if line and not line.startswith("#")]
    does = {name: [rest for step, rest in steps if step == name] for name in {step for step, _ in steps}}
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for copied in (source for line in does["COPY"] for source in line.split()[:-1]):
        assert (ROOT / copied).exists() or copied == WHEEL
        assert any(fnmatch(copied, pattern) for pattern in let_in), f"{copied} is kept out by .dockerignore"
    assert WHEEL in does["COPY"][-1].split()
    command = re.search(r"pip install .*\$\((ls \S+)\)\[([\w,]+)\]", does["RUN"][-1])
    assert command and command[1] == f"ls {does['COPY'][-1].split()[-1]}*.whl"
    assert {*command[2].split(",")} <= {*EXTRAS}
    assert known([setting.partition("=")[0] for line in does["ENV"] for setting in line.split()])
    assert json.loads(does["ENTRYPOINT"][0]) == ["unfuse"]
    parsed(json.loads(does["CMD"][0]))
    (uid, gid) = does["USER"][0].split(":")  # numbers, so that Kubernetes sees that they are not root's
    assert int(uid) == int(gid) == int(re.search(r"useradd .*--uid (\d+) unfuse", text)[1]) > 0  # type: ignore[index]


def test_compose_services_reference_existing_files_and_services() -> None:
    services: dict[str, Any] = COMPOSE["services"]
    parsed(services["unfuse"]["command"])
    assert {*services["unfuse"]["secrets"], *services["prometheus"]["secrets"]} == {*COMPOSE["secrets"]}
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            there = source in COMPOSE["volumes"] or (DEPLOY / "docker" / source).is_dir()
            assert there, f"{name} mounts {source}"
    more = yaml.safe_load((DEPLOY / "docker" / "cuda.yml").read_text())["services"]
    for build in (services["unfuse"]["build"], more["unfuse"]["build"]):
        assert (ROOT / build["dockerfile"]).is_file()
    queue = next(flag for flag in services["unfuse"]["command"] if flag.startswith("--queue="))
    assert re.fullmatch(r"--queue=redis://(\w+):6379/0", queue)[1] in services  # type: ignore[index]
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert [target for job in jobs for group in job["static_configs"] for target in group["targets"]] == ["unfuse:8000"]
    (credentials,) = {job["authorization"]["credentials_file"] for job in jobs}
    assert credentials.removeprefix("/run/secrets/") in services["prometheus"]["secrets"]
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"].split("/")[2].partition(":")[0] in services
    (board,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/unfuse.yml").read_text())["providers"]
    assert f"../grafana/dashboards:{board['options']['path']}:ro" in services["grafana"]["volumes"]


def test_compose_make_keys_script_creates_keys_only_once(tmp_path: Path) -> None:
    script = shutil.copy(DEPLOY / "docker" / "make-keys.sh", tmp_path)
    made = subprocess.run([script], capture_output=True, text=True, check=True).stdout.strip()
    files = {name: tmp_path / secret["file"] for name, secret in COMPOSE["secrets"].items()}
    keys = ApiKeys(files=[str(files["keys"])])
    assert keys.find(made) == ApiKey("studio", admin=True) and len(made) >= MIN_KEY_CHARS
    assert keys.find(files["metrics"].read_text()) == ApiKey("prometheus", read_only=True)
    assert (keys.warning, keys.admin_note) == ("", "")
    before = files["keys"].read_text()
    again = subprocess.run([script], capture_output=True, text=True, check=False)
    assert again.returncode and files["keys"].read_text() == before


def test_deploy_checks_detect_unknown_flags_and_settings() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["serve", "--no-such-flag"])
    assert not known(["UNFUSE_SERVE__NOTHING"])
