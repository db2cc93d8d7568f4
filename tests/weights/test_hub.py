"""A download from hubs that cut connections, are slow, lie, ask to agree, or vanish; and on a disk that fills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.disks import small_disk
from tests.models.hub import Hub, serve
from tools.server import until
from unfuse.models import resolve_source
from unfuse.weights.folder import HubFile
from unfuse.weights.hub import DownloadProgress, _Download

NAME = "owner/model"
KIB = 1 << 10
WEIGHTS = {
    "text_encoder": "text_encoder/model.safetensors",
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as served:
        yield served


@pytest.fixture
def files(hub: Hub) -> dict[str, bytes]:
    """The packaged model, whose weights are others of 600 KiB: nothing is loaded of them."""
    packaged = resolve_source("unfuse/shapes")
    found = {str(file.relative_to(packaged)): file.read_bytes() for file in packaged.rglob("*") if file.is_file()}
    weights = {path for path in found if path.endswith(".safetensors")}
    assert weights == {*WEIGHTS.values()}
    for number, path in enumerate(sorted(weights)):
        drawn = np.random.default_rng(number).integers(0, 255, 600 * KIB, dtype=np.uint8)
        found[path] = save({"w": drawn})
    hub.push(NAME, found)
    return found


class Machine:
    """One with a cache of its own, which knows no other hub."""

    def __init__(self, home: Path, hub: Hub) -> None:
        self.home, self.hub = home, hub

    def begin(self, *arguments: str, hasty: bool = True) -> subprocess.Popen[str]:
        """`unfuse pull`; a hasty one gives up soon, whoever is silent."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
        own = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.hub.url, "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
        direct = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "HF_HUB_OFFLINE": "0"}
        pauses = "import unfuse.weights.hub as hub; hub.PAUSES_S = (0.01,) * 3; " if hasty else ""
        code = f"import sys; {pauses}sys.argv[0] = 'unfuse'; from unfuse.cli.main import main; main()"
        command = [sys.executable, "-c", code, "pull", NAME, *arguments]
        return subprocess.Popen(
            command, env={**inherited, **own, **direct}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def pull(self, *arguments: str) -> tuple[int, str, str]:
        """The exit code, and what was said on standard output and standard error."""
        process = self.begin(*arguments)
        out, error = process.communicate(timeout=300)
        return process.returncode, out, error

    def here(self) -> dict[str, bytes]:
        """The weights that are in its snapshots, by path."""
        found = {}
        for file in self.home.glob("hub/models--owner--model/snapshots/*/*/*.safetensors"):
            found[f"{file.parent.name}/{file.name}"] = file.read_bytes()
        return found

    def parts(self) -> list[Path]:
        return sorted(self.home.glob("hub/models--owner--model/blobs/*.unfuse-part"))


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine", hub)


def weights_of(files: dict[str, bytes], *components: str) -> dict[str, bytes]:
    return {WEIGHTS[name]: files[WEIGHTS[name]] for name in components or WEIGHTS}


def went_on(hub: Hub) -> list[str]:
    """The files of which only the rest was asked for."""
    return sorted(asked.file for asked in hub.asked if asked.storage and asked.ranged)


def test_download_resumes_after_cut_connections_without_resending_bytes(
    machine: Machine, hub: Hub, files: dict[str, bytes]
) -> None:
    """Whole and verified, and no byte comes twice but those that were on their way."""
    hub.cuts = [100 * KIB, 200 * KIB, 1, 150 * KIB]
    code, out, error = machine.pull("--json")

    assert code == 0, error
    assert machine.here() == weights_of(files) and not machine.parts() and not hub.cuts
    assert json.loads(out)[0]["brought"] == sum(map(len, weights_of(files).values())) == hub.sent


def test_pull_downloads_only_the_files_of_the_given_roles(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    one, two = Machine(tmp_path / "one", hub), Machine(tmp_path / "two", hub)
    assert one.pull("--role", "encoder+decoder")[0] == two.pull("--role", "denoiser")[0] == 0

    assert one.here() == weights_of(files, "text_encoder", "vae")
    assert two.here() == weights_of(files, "transformer")
    code, _, error = two.pull("--role", "painter")
    assert code == 1 and "its roles are encoder, denoiser, decoder" in error


def test_killed_download_resumes_on_the_next_pull(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.pace_s = 0.05
    process = machine.begin()
    until(lambda: sum(part.stat().st_size for part in machine.parts()) > 300 * KIB, "some bytes", process)
    process.kill()
    process.communicate()
    hub.pace_s = 0.0
    hub.asked.clear()

    assert machine.pull()[0] == 0
    assert machine.here() == weights_of(files) and not machine.parts()
    assert went_on(hub) == [*WEIGHTS.values()]


def test_download_completes_if_the_hub_ignores_range_requests(
    machine: Machine, hub: Hub, files: dict[str, bytes]
) -> None:
    hub.cuts, hub.whole = [100 * KIB, 200 * KIB], True
    code, _, error = machine.pull()

    assert code == 0, error
    assert machine.here() == weights_of(files)


def test_unreachable_hub_fails_the_pull_and_a_later_pull_resumes(
    machine: Machine, hub: Hub, files: dict[str, bytes]
) -> None:
    hub.pace_s = 0.05
    process = machine.begin()
    until(lambda: hub.sent > 300 * KIB, "some bytes", process)
    hub.gone = True
    _, error = process.communicate(timeout=300)
    *_, last = error.strip().splitlines()
    assert process.returncode == 1 and "cannot be downloaded" in last
    assert "a retry resumes there" in last and "Traceback" not in error

    hub.gone, hub.pace_s = False, 0.0
    hub.asked.clear()
    assert machine.pull()[0] == 0
    assert machine.here() == weights_of(files) and went_on(hub) == [*WEIGHTS.values()]


@pytest.mark.parametrize(
    ("listed", "stored", "reason"),
    [
        (700 * KIB, None, "is not the file that the hub lists: it ends after"),
        (10 * KIB, None, "is not the file that the hub lists: it has more than the 10240 bytes"),
        (None, bytes(300 * KIB), "is not the file that the hub lists: it ends after 307200 bytes"),
        (None, b"other", "is not the file that the hub lists: its hash differs"),
    ],
)
def test_download_with_wrong_size_or_hash_fails_and_is_discarded(
    listed: int | None, stored: bytes | None, reason: str, machine: Machine, hub: Hub, files: dict[str, bytes]
) -> None:
    """Of sizes and of bytes; nothing of such a file stays."""
    path = WEIGHTS["vae"]
    if listed is not None:
        hub.listed[path] = listed
    if stored is not None:
        hub.stored[path] = stored if len(stored) > 10 else bytes(len(files[path]))
    code, _, error = machine.pull("--role", "decoder")

    assert code == 1 and f"{path} {reason}" in error, error
    assert not machine.parts() and path not in machine.here()


def test_gated_model_error_names_hf_token(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.gated = True
    code, _, error = machine.pull()

    assert code == 1 and f"is gated: accept its terms at {hub.url}/{NAME}, and set HF_TOKEN" in error


def test_free_disk_space_is_checked_before_the_download(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.listed[WEIGHTS["vae"]] = 1 << 60
    code, _, error = machine.pull()

    assert code == 1 and "the download needs" in error and "HF_HOME" in error
    assert hub.sent == 0 and not machine.here()


def test_full_disk_fails_the_pull_and_a_later_pull_resumes(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    with small_disk(tmp_path, 2600) as disk:
        machine = Machine(disk, hub)
        hub.pace_s = 0.05
        process = machine.begin()
        until(lambda: hub.sent > 200 * KIB, "some bytes", process)
        filler = disk / "filler"
        with filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * KIB)
            except OSError:
                pass
        _, error = process.communicate(timeout=300)
        *_, last = error.strip().splitlines()
        assert process.returncode == 1 and "is full" in last and "resume with `unfuse pull`" in last, error

        filler.unlink()
        hub.pace_s = 0.0
        assert machine.pull()[0] == 0
        assert machine.here() == weights_of(files)


def test_concurrent_pulls_download_each_byte_once(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.pace_s = 0.02
    both = [machine.begin(), machine.begin()]
    for process in both:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error

    assert machine.here() == weights_of(files)
    assert hub.sent == sum(map(len, weights_of(files).values()))


def test_file_completed_before_its_lock_is_taken_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a process that finds no file, when another one completes it before the first opens the partial file."""
    file = HubFile(4, "0" * 40)
    download = _Download(("owner/model", "1"), tmp_path / "snapshots" / "1", {"a": file}, bool)
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / file.digest
    monkeypatch.setattr("unfuse.weights.hub.fcntl.flock", lambda *_: blob.write_bytes(b"done"))
    with download._lock_partial_file("a", file, blob) as stream:
        assert stream is None
    assert [*blob.parent.iterdir()] == [blob]


def test_pull_reports_progress_with_rate_and_remaining_time(
    machine: Machine, hub: Hub, files: dict[str, bytes]
) -> None:
    hub.pace_s = 0.4
    _, _, error = machine.pull("--role", "denoiser")

    told = [line for line in error.splitlines() if line.startswith(f"{NAME}: ")]
    assert any(" left" in line and "KiB/s" in line for line in told), error


@pytest.mark.parametrize(
    ("done", "rate", "words"),
    [(0, 0.0, "0 B of 1.0 GiB"), (1 << 29, float(1 << 22), "512.0 MiB of 1.0 GiB, 4.0 MiB/s, 2:08 left")],
)
def test_download_progress_is_formatted_for_humans(done: int, rate: float, words: str) -> None:
    assert str(DownloadProgress("m", done, 1 << 30, rate)) == words


def test_pull_of_a_cached_model_needs_no_hub(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    assert machine.pull()[0] == 0
    hub.gone = True
    code, out, error = machine.pull("--json")
    assert code == 0, error
    assert json.loads(out)[0]["brought"] == 0
