"""`unfuse doctor --scheduler` before a real listener: what is in the way is a sentence that says what to do."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.cli.conftest import Run
from tests.launch.test_keys import UNFUSE, first_warning
from tools.cards import PICTURES
from unfuse import __version__
from unfuse.core.messages import Registered, Rejected, StorageLocations, ToScheduler, ToWorker
from unfuse.core.plan import Pipeline
from unfuse.stages.specs import UNDIVIDED
from unfuse.stores.results import ID_FILE, store_id
from unfuse.wire.keys import create_keys, read_keys
from unfuse.wire.router import Router

SHAPES = ("unfuse/shapes", "unfuse/shapes", "float32")


def offer(**about: object) -> Registered:
    found: dict[str, object] = {
        "models": (SHAPES,),
        "storage": StorageLocations(""),
        "lease_ttl": 15.0,
        "heartbeat_s": 1.0,
    }
    return Registered(**{**found, "version": __version__, "now": time.time(), **about})  # type: ignore[arg-type]


@contextmanager
def scheduler(folder: Path, answer: ToWorker) -> Iterator[str]:
    """The address of one that answers every worker with that, by its own keys, in a thread of its own."""
    create_keys(folder)
    keys, ready, over = read_keys(str(folder), "scheduler"), threading.Event(), asyncio.Event()
    where: list[tuple[asyncio.AbstractEventLoop, str]] = []

    async def answered(peer: bytes, message: ToScheduler) -> ToWorker:
        return answer

    async def undelivered(peer: bytes, reply: ToWorker) -> None:
        pass

    async def listen() -> None:
        router = Router("tcp://127.0.0.1:0", answered, undelivered, keys)
        where.append((asyncio.get_running_loop(), router.address))
        ready.set()
        await over.wait()
        await router.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    assert ready.wait(60)
    loop, address = where[0]
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNFUSE_DATA_DIR", str(tmp_path / "data"))


def checked(unfuse: Run, address: str, keys: Path | None) -> tuple[int, dict[str, tuple[bool, str]]]:
    """The exit code, and what was found of each thing."""
    code, out, err = unfuse("doctor", "--scheduler", address, "--json", *(["--keys", str(keys)] if keys else []))
    assert "Traceback" not in err
    return code, {check["what"]: (check["ok"], check["says"]) for check in json.loads(out)["checks"]}


def only_failing(found: dict[str, tuple[bool, str]], what: str) -> str:
    """What is said of the only thing that is in the way."""
    assert [name for name, (ok, _) in found.items() if not ok] == [what]
    return found[what][1]


def test_doctor_passes_all_checks_of_a_reachable_scheduler(unfuse: Run, keys: Path, tmp_path: Path) -> None:
    results = f"disk:{tmp_path / 'results'}"
    with scheduler(keys, offer(storage=StorageLocations(results, results_store_id=store_id(results)))) as address:
        code, found = checked(unfuse, address, keys)
        lines = unfuse("doctor", "--scheduler", address, "--keys", str(keys))[1].splitlines()
    assert code == 0 and all(ok for ok, _ in found.values())
    assert [*found] == ["port", "key", "version", "clock", "models", "results"]
    assert found["results"][1] == "this machine can run all stages"
    assert all(re.match(r"\w+ +ok +\S", line) for line in lines) and len(lines) == 6


def test_port_check_fails_if_no_server_listens(unfuse: Run, keys: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, found = checked(unfuse, address, None)
    assert code == 1
    assert f"start the server there by `unfuse serve --listen {address}`" in only_failing(found, "port")


def test_port_check_fails_for_an_unknown_host(unfuse: Run) -> None:
    code, found = checked(unfuse, "tcp://nowhere.invalid:8001", None)
    assert code == 1
    assert re.search(
        r"cannot be reached \(.+\): correct the address, or allow TCP connections", only_failing(found, "port")
    )


def test_port_check_fails_for_a_missing_unix_socket(unfuse: Run, tmp_path: Path) -> None:
    _, found = checked(unfuse, f"unix:{tmp_path}/serve.sock", None)
    assert "start `unfuse serve` on this machine" in only_failing(found, "port")


def test_key_check_fails_for_missing_world_readable_or_wrong_key(unfuse: Run, keys: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    create_keys(other)
    with scheduler(keys, offer()) as address:
        missing = checked(unfuse, address, None)[1]
        (open_to_all := tmp_path / "open").mkdir()
        (open_to_all / "worker.key").write_bytes((keys / "worker.key").read_bytes())
        (open_to_all / "worker.key").chmod(0o644)
        readable = checked(unfuse, address, open_to_all)[1]
        code, wrong = checked(unfuse, address, other)
    assert code == 1
    assert f"to {tmp_path}/data/keys/worker.key (chmod 600)" in only_failing(missing, "key")
    assert "chmod 600 it" in only_failing(readable, "key")
    assert "copy worker.key again" in only_failing(wrong, "key")


@pytest.mark.slow
@pytest.mark.parametrize("which", [("--workers", "auto"), ("--role", "all")])
def test_worker_without_key_logs_which_key_file_to_copy(which: tuple[str, str], tmp_path: Path) -> None:
    command = [*UNFUSE, "worker", *which, "--scheduler", "tcp://10.0.0.1:8001"]
    said = first_warning(command, UNFUSE_DATA_DIR=str(tmp_path))
    assert f"{tmp_path}/keys/worker.key" in said
    assert "copy worker.key from the scheduler's machine" in said


def test_version_check_fails_for_different_versions(unfuse: Run, keys: Path, tmp_path: Path) -> None:
    with scheduler(keys, offer(version="9.9.9")) as address:
        newer = checked(unfuse, address, keys)[1]
    assert "pip install 'unfuse[serve]==9.9.9'" in only_failing(newer, "version")
    with scheduler(
        tmp_path / "foreign", Rejected("message has protocol version 1, but this process needs version 9")
    ) as address:
        foreign = checked(unfuse, address, tmp_path / "foreign")[1]
    assert "install the same version on both machines" in only_failing(foreign, "version")


@pytest.mark.parametrize(("off", "way"), [(40.0, "behind"), (-40.0, "ahead of")])
def test_clock_check_fails_for_clock_skew(off: float, way: str, unfuse: Run, keys: Path) -> None:
    with scheduler(keys, offer(now=time.time() + off)) as address:
        said = only_failing(checked(unfuse, address, keys)[1], "clock")
    assert re.search(rf"\d+ s {way} the scheduler's: synchronize both by NTP", said)


def test_models_check_fails_for_missing_or_no_models(
    unfuse: Run, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with scheduler(keys, offer(models=(("mine", f"{tmp_path}/models/mine", "float32"),))) as address:
        folder = checked(unfuse, address, keys)[1]
    assert "copy that folder to the same path here" in only_failing(folder, "models")
    with scheduler(tmp_path / "none", offer(models=())) as address:
        nothing = checked(unfuse, address, tmp_path / "none")[1]
    assert "the scheduler serves no model yet" in only_failing(nothing, "models")


def elsewhere(folder: Path) -> StorageLocations:
    """Results in a folder that the scheduler's machine has, and this one does not."""
    mark = store_id(results := f"disk:{folder}")
    (folder / ID_FILE).write_text("of another folder")
    return StorageLocations(results, results_store_id=mark)


def test_results_check_passes_and_lists_roles_without_result_storage(unfuse: Run, keys: Path, tmp_path: Path) -> None:
    with scheduler(keys, offer(storage=elsewhere(tmp_path / "results"))) as address:
        code, found = checked(unfuse, address, keys)
    assert code == 0
    said = found["results"][1]
    assert (
        "stages of the roles encoder, denoiser can run here, the others need workers on the scheduler's machine" in said
    )


def test_results_check_fails_if_every_stage_needs_result_storage(
    unfuse: Run, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a model of which every stage needs results, as undivided ones are, and then one that is not here."""
    places = elsewhere(tmp_path / "results")
    whole = msgspec.structs.replace(PICTURES, pipeline=Pipeline((UNDIVIDED,)))
    with monkeypatch.context() as patch, scheduler(keys, offer(storage=places)) as address:
        patch.setattr("unfuse.service.worker.read_model_spec", lambda *_: whole)
        code, found = checked(unfuse, address, keys)
    assert code == 1
    assert "every stage of these models needs: to run them here, mount" in only_failing(found, "results")
    missing = (("mine", f"{tmp_path}/models/mine", "float32"),)
    with scheduler(tmp_path / "missing", offer(storage=places, models=missing)) as address:
        found = checked(unfuse, address, tmp_path / "missing")[1]
    only_failing(found, "models")
    assert "stages that need it need workers on the scheduler's machine" in found["results"][1]
