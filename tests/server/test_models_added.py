"""Models that are added and removed by calls, without workers: who may, what is refused, what all gateways know."""

from __future__ import annotations

import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

import unfuse.models
from tests.server.composed import composed
from tools.cards import card
from unfuse.core.clock import SystemClock
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.messages import Registered, StorageLocations, WorkerInfo
from unfuse.core.plan import StageSelector
from unfuse.models import resolve_source
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.registry import Registry
from unfuse.service.logs import Logs
from unfuse.service.options import plan_service, serve_options
from unfuse.service.service import Service
from unfuse.service.settings import load
from unfuse.service.worker import worker_options
from unfuse.weights.source import with_components
from unfuse.worker.registration import _source_here, decide_served

SHAPES = Path(unfuse.models.__file__).parent / "shapes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Another model's folder."""
    return Path(shutil.copytree(SHAPES, tmp_path / "more" / "shapes"))


def client(port: int, key: str = "") -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60, trust_env=False, headers=headers)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something to hold."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def error(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def listed(http: httpx2.Client) -> set[str]:
    return {one["id"] for one in http.get("models").json()["data"]}


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[int]:
    file = tmp_path / "keys"
    lines = (
        "ada anyone",
        "root boss admin=yes",
        "half some admin=yes models=unfuse/shapes",
        "see only admin=yes read=yes",
    )
    file.write_text("\n".join(lines))
    with composed(tmp_path, api_keys=(str(file),)) as port:
        yield port


def test_only_admins_with_access_to_a_model_may_add_or_remove_it(keyed: int, folder: Path) -> None:
    """Given keys, when others than an admin's add or remove a model, then each is refused, and nothing has changed."""
    path, given = "models/more", {"model": str(folder), "name": "more"}
    for key, code in (("anyone", "admin_only"), ("only", "read_only"), ("half", ""), ("some", "not_yours")):
        with client(keyed, key) as http:
            answer = http.post("models", json=given)
            assert error(answer) == ((403, code) if code else (401, "invalid_api_key"))
    with client(keyed, "anyone") as http:
        assert error(http.delete("models/unfuse/shapes")) == (403, "admin_only")
    with client(keyed, "boss") as boss, client(keyed, "some") as some:
        assert boss.post("models", json=given).status_code == 202
        assert error(some.delete(path)) == (404, "model_not_found")
        assert listed(boss) == {"unfuse/shapes", "more"}
        assert listed(some) == {"unfuse/shapes"}
        assert boss.delete(path).status_code == 200
        assert listed(boss) == {"unfuse/shapes"}


def test_added_model_waits_for_workers_and_persists_across_restarts(tmp_path: Path, folder: Path) -> None:
    """Given a server that starts no workers, when a model is added, then it is listed as loading, a name twice is
    refused, and the server that is started again still serves it; one that was removed it does not."""
    where = {"queue": f"sqlite:{tmp_path}/queue.db"}
    with composed(tmp_path, **where) as port, client(port) as http:
        added = http.post("models", json={"model": str(folder)})
        assert added.status_code == 202
        assert (added.json()["id"], added.json()["state"]) == ("shapes", "loading")
        assert error(http.post("models", json={"model": str(folder)})) == (409, "model_exists")
        assert http.post("models", json={"model": str(folder), "name": "other"}).status_code == 202
        assert http.get("models/shapes").json() == added.json()
        assert http.delete("models/other").json()["deleted"]
    with composed(tmp_path, **where) as port, client(port) as http:
        assert listed(http) == {"unfuse/shapes", "shapes"}
        assert http.get("models/shapes").json() == added.json()


PATHS = [
    "",
    "/models/flux",
    "./flux",
    "../flux",
    "~/flux",
    "a/b/c",
    "a//b",
    "-x",
    "a b",
    "a\nb",
    "x" * 129,
    7,
    ["a"],
    {},
]


@pytest.mark.parametrize("name", PATHS)
def test_model_name_that_is_a_path_returns_400(name: object, port: int, folder: Path) -> None:
    with client(port) as http:
        answer = http.post("models", json={"model": str(folder), "name": name})
        assert error(answer) == (400, "invalid_parameter")
        assert answer.json()["error"]["param"] == "name" and "and not a path" in answer.json()["error"]["message"]
        assert listed(http) == {"unfuse/shapes"}


def test_folder_with_an_unusable_name_needs_an_explicit_name(port: int, folder: Path) -> None:
    strange = folder.rename(folder.with_name("my model (v2)"))
    with client(port) as http:
        answer = http.post("models", json={"model": str(strange)})
        assert error(answer) == (400, "invalid_parameter") and "name is required" in answer.text


def test_concurrent_calls_add_a_model_once(tmp_path: Path, folder: Path) -> None:
    with composed(tmp_path) as port, client(port) as http, ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(http.post, "models", json={"model": str(folder), "name": "x"}) for _ in range(4)]
        assert sorted(call.result().status_code for call in calls) == [202, 409, 409, 409]
        assert listed(http) == {"unfuse/shapes", "x"}


SECRET = "behind-the-server"


def test_responses_contain_no_model_paths(tmp_path: Path) -> None:
    """Given models in folders, when anything is asked of the server, then no answer has the path of one."""
    place = tmp_path / SECRET
    for name in ("flux", "other", "more", "broken"):
        shutil.copytree(SHAPES, place / name)
    (place / "broken/vae/config.json").unlink()
    with composed(tmp_path / "data", models=(f"{place}/flux", f"{place}/other")) as port, client(port) as http:
        told = [http.post("models", json={"model": f"{place}/{name}"}) for name in ("more", "broken", "nowhere")]
        assert [one.status_code for one in told] == [202, 400, 400]
        for model in (None, "flux", f"{place}/flux", "more", "nowhere"):
            body = {"prompt": "a red circle", **({"model": model} if model else {})}
            told.append(http.post("images/generations", json=body, headers={"prefer": "respond-async"}))
        assert [one.status_code for one in told[3:]] == [202, 202, 202, 202, 404]
        assert [one.json()["model"] for one in told[3:7]] == ["flux", "flux", "flux", "more"]
        base = f"http://127.0.0.1:{port}"
        for path in ("/ready", "/metrics", "/v1/models", "/v1/pools", "/v1/workers", "/v1/requests", "/v1/dead"):
            told.append(http.get(base + path))
        for path in ("models/flux", f"models/{quote(str(place))}/flux", "models/nowhere"):
            told.append(http.get(path))
        told.append(http.delete("models/other"))
        assert listed(http) == {"flux", "more"}
    for answer in told:
        text = answer.text.replace(f"no model '{place}", "")  # what a client sent itself
        assert SECRET not in text and str(tmp_path) not in text, answer.text


def test_requests_without_a_model_use_the_first_model_of_the_server(tmp_path: Path, folder: Path) -> None:
    """Given two models, when others are added, then those who name none still get the first, which is marked."""
    started = {"models": ("unfuse/shapes", str(folder)), "served_model_name": ("one", "two")}
    asked, later = {"prompt": "a"}, {"prefer": "respond-async"}
    with composed(tmp_path, **started) as port, client(port) as http:
        assert http.post("models", json={"model": str(folder), "name": "another"}).status_code == 202
        marked = [one["id"] for one in http.get("models").json()["data"] if one["default"]]
        assert (marked, http.post("images/generations", json=asked, headers=later).json()["model"]) == (["one"], "one")
        http.delete("models/one")
        assert http.get("models/two").json()["default"]
        http.delete("models/two")
        answer = http.post("images/generations", json=asked, headers=later)
        assert answer.json()["model"] == "another", "it is the only one"


def test_failed_model_reports_the_reason_and_can_be_added_or_removed(tmp_path: Path, folder: Path) -> None:
    """Given a server whose model is gone after it was killed, then all who ask for it are told the reason."""
    where = {"queue": f"sqlite:{tmp_path}/queue.db"}
    with composed(tmp_path, **where) as port, client(port) as http:
        for name in ("again", "removed"):
            assert http.post("models", json={"model": str(folder), "name": name}).status_code == 202
        asked = {"prompt": "a", "model": "again"}
        request = http.post("images/generations", json=asked, headers={"prefer": "respond-async"}).json()["id"]
    away = folder.rename(folder.with_name("away"))
    with composed(tmp_path, **where) as port, client(port) as http:
        until(lambda: http.get("models/removed").json()["state"] == "failed")
        failed = http.get("models/again").json()
        assert (failed["state"], failed["default"], failed["progress"]) == ("failed", False, None)
        assert "there is no such folder" in failed["reason"] and str(tmp_path) not in failed["reason"]
        assert {one["id"]: one["state"] for one in http.get("models").json()["data"]} == {
            "unfuse/shapes": "loading",
            "again": "failed",
            "removed": "failed",
        }
        answer = http.get(f"http://127.0.0.1:{port}/ready").json()
        assert answer["failed"].keys() == {"again", "removed"} and answer["failed"]["again"] == failed["reason"]
        answer = http.post("images/generations", json=asked)
        assert error(answer) == (503, "model_failed") and failed["reason"] in answer.text
        over = http.get(f"requests/{request}").json()
        assert (over["status"], over["error"]["code"]) == ("failed", "model_failed")
        assert failed["reason"] in over["error"]["message"]
        assert error(http.post(f"dead/{request}/retry")) == (503, "model_failed")
        assert http.delete("models/removed").json()["deleted"]
        assert error(http.get("models/removed")) == (404, "model_not_found")
        away.rename(folder)
        assert http.post("models", json={"model": str(folder), "name": "again"}).json()["state"] == "loading"
        assert http.get("models/again").json()["reason"] is None
        assert http.post(f"dead/{request}/retry").json()["status"] == "queued"


def text(said: bytes) -> bytes:
    return len(said).to_bytes(8, "little") + said


GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"general.architecture") + struct.pack("<I", 8)
HEADER = b"{%s}" % b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(20))
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
BAD: dict[str, tuple[dict[str, bytes | None], str]] = {
    "a pickle": (
        {WEIGHTS: None, "transformer/pytorch_model.bin": b"\x80\x04K\x01."},
        "component transformer are pytorch_model.bin, weights that are not safetensors: save the model again",
    ),
    "a checkpoint": ({WEIGHTS: None, "transformer/tuned.ckpt": b"\x80\x04K\x01."}, "not safetensors: save the model"),
    "a gguf of another kind": (
        {"model_index.json": None, "a.gguf": GGUF + text(b"mamba")},
        "architecture mamba is not supported; supported: llama, qwen2, qwen3",
    ),
    "an adapter": (
        {"model_index.json": None, "pytorch_lora_weights.safetensors": b""},
        "a LoRA adapter, which is not a model: serve its base model with --loras FOLDER",
    ),
    "a pipeline with code": (
        {"model_index.json": b'{"_class_name": ["pipeline", "Own"]}', "pipeline.py": b"raise SystemExit"},
        "which is not supported",
    ),
    "a component with code": (
        {"model_index.json": b'{"_class_name": "StableDiffusionPipeline", "unet": ["own", "Own"]}'},
        "component unet has a custom class (own), and custom code of models is not run",
    ),
    "a language model with code": (
        {
            "model_index.json": None,
            "own.py": b"raise SystemExit",
            "config.json": b'{"architectures": ["Own"], "auto_map": {"AutoModelForCausalLM": "own.Own"}}',
        },
        "Own",
    ),
    "a header of 100 MB": (
        {WEIGHTS: text(HEADER.ljust(100_000_000))},
        "its header is larger than 25000000 bytes: download it again",
    ),
    "a header that ends": ({WEIGHTS: text(HEADER)[:-1]}, "is not a safetensors file, or truncated: download it again"),
}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with composed(tmp_path_factory.mktemp("served")) as port:
        yield port


@pytest.mark.parametrize("name", BAD)
def test_unsupported_weights_return_400_with_the_remedy(name: str, port: int, folder: Path) -> None:
    files, says = BAD[name]
    for path, content in files.items():
        (folder / path).unlink() if content is None else (folder / path).write_bytes(content)
    with client(port) as http:
        answer = http.post("models", json={"model": str(folder)})
        assert error(answer) == (400, "invalid_parameter")
        assert says in answer.json()["error"]["message"]
        assert listed(http) == {"unfuse/shapes"}


def test_every_name_of_a_model_works_for_adding_and_removing_it(tmp_path: Path) -> None:
    with composed(tmp_path, served_model_name=("a", "b")) as port, client(port) as http:
        assert error(http.post("models", json={"model": "a"})) == (409, "model_exists")
        assert error(http.post("models", json={"model": "unfuse/shapes"})) == (409, "model_exists")
        assert http.delete("models/b").json() == {"id": "b", "object": "model", "deleted": True}
        assert listed(http) == set()
        assert error(http.delete("models/a")) == (404, "model_not_found")
        assert error(http.post("models", json={"model": "unfuse/shapes"})) == (409, "model_leaves")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"model": "\\ud800"}', b'{"model": 1e999}', b'{"model": "a/b", "x": 1}', b'{"name": "a"}'],
)
def test_body_without_a_valid_model_is_rejected(keyed: int, body: bytes) -> None:
    with client(keyed, "boss") as http:
        assert error(http.post("models", content=body, headers={"content-type": "application/json"}))[0] == 400
        assert error(http.post("models", content=body, headers={"content-type": "text/plain"}))[0] == 415
        assert listed(http) == {"unfuse/shapes"}


def test_added_model_must_fit_into_the_remaining_device_memory(tmp_path: Path) -> None:
    """Given devices that are capped, and what others take of them, then what does not fit beside them is refused by the
    sentence with which a server would not start; what is still to be loaded counts, too, where nothing is capped."""
    chosen = serve_options(load({"serve.workers": "all=1", "serve.device_memory": ("cpu=3GiB",)}, None, {}))
    service = Service(chosen, plan_service(chosen), Logs())
    named = {"unfuse/shapes": "unfuse/shapes"}
    assert service._planned(named, Counter(), Counter()).workers
    assert service._planned(named, Counter({"cpu": 1 << 30}), Counter()).workers
    for taken, coming in ((Counter({"cpu": 3 << 30}), Counter[str]()), (Counter[str](), Counter({"cpu": 1 << 50}))):
        with pytest.raises(ConfigError, match="the models do not fit: cpu would need"):
            service._planned(named, taken, coming)


def test_revision_applies_only_to_models_of_the_command_line(folder: Path) -> None:
    """Given a server with --revision, when a model is added that would be planned together with those of its start,
    then that is refused, since one plan has one revision; alone each has its own."""
    chosen = serve_options(
        load({"serve.workers": "all=1", "worker.max_loaded_models": "1", "serve.revision": "main"}, None, {})
    )
    service = Service(chosen, plan_service(chosen), Logs())
    first, added = {"unfuse/shapes": "unfuse/shapes"}, {"added": str(folder)}
    for named in (first, added):
        assert service._planned(named, Counter(), Counter()).workers
    with pytest.raises(ConfigError, match="--revision main applies only to the models of the command line"):
        service._planned({**added, **first}, Counter(), Counter())


async def test_dismissed_model_is_not_served_until_it_is_added_again() -> None:
    """Given two schedulers of one queue and a worker that brings a model, when it is dismissed at one, then neither
    serves it; it is served again once it is admitted, or a server is started with it."""
    queue, (one, other) = MemoryQueue(SystemClock()), (card("one"), card("other"))
    here, there = Registry(queue, 60.0, [one]), Registry(queue, 60.0)
    await here.declare([one])
    await queue.register(worker(other), [other])
    assert {*await here.model_specs()} == {*await there.model_specs()} == {"one", "other"}
    for card_ in (one, other):
        await there.dismiss(card_.name)
    assert await here.model_specs() == await there.model_specs() == {} and await here.dismissed_models() == {
        "one",
        "other",
    }
    await here.admit(other)
    assert {*await there.model_specs()} == {"other"} and there.admitted == {"other"}
    await there.declare([one])
    assert {*await here.model_specs()} == {"one", "other"}
    await queue.close()


def worker(served: Any) -> Any:
    return WorkerInfo("w", "node", "all", tuple(served.pools().values()), 1, "", 0)


@pytest.mark.parametrize("name", ["unfuse/shapes", "nobody/knows"])
def test_worker_loads_an_offered_model_from_the_offered_source(name: str) -> None:
    """So a hub's model is of the commit that the server found, whatever its branch is by now; what is here is here."""
    offered = ((name, str(SHAPES), "float32"), ("another", "/nowhere", "float32"))
    settings = load(
        {
            "worker.model": (name,),
            "worker.role": "denoiser",
            "worker.scheduler": ("tcp://127.0.0.1:9",),
            "insecure_listen": True,
        },
        None,
        {},
    )
    asked = worker_options(settings.settings)
    served = decide_served(
        Registered(offered, StorageLocations("disk:/tmp"), 15.0, 1.0), asked, StageSelector(frozenset({"denoiser"}))
    )
    assert served.models == ((name, str(SHAPES), "float32"),) and [one.name for one in served.specs] == [name]


def test_worker_prefers_an_offered_model_to_a_local_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a model that an admin called like a folder where a worker was started, then the worker has that model."""
    (tmp_path / "flux").mkdir()
    monkeypatch.chdir(tmp_path)
    own = {"worker.model": ("flux",), "worker.scheduler": ("tcp://127.0.0.1:9",), "insecure_listen": True}
    asked = worker_options(load(own, None, {"UNFUSE_DATA_DIR": str(tmp_path)}).settings)
    welcome = Registered((("flux", str(SHAPES), "float32"),), StorageLocations("disk:/tmp"), 15.0, 1.0)
    served = decide_served(welcome, asked, StageSelector(frozenset({"denoiser"})))
    assert served.models == (("flux", str(SHAPES), "float32"),)
    assert _source_here("flux", "owner/model@1") == "owner/model@1", "one of a hub that is not here either"
    assert _source_here("flux", "/elsewhere/flux") == "flux", "a copy of what another machine has"
    assert _source_here(str(tmp_path / "flux"), "/elsewhere/flux") == str(tmp_path / "flux")


OFFERED = "unfuse/shapes"
COMPOSED = with_components(OFFERED, {"vae": str(SHAPES / "vae")})


@pytest.mark.parametrize(
    ("offered", "flags", "source"),
    [
        (COMPOSED, {}, COMPOSED),
        (COMPOSED, {"worker.model": (OFFERED,)}, COMPOSED),
        (OFFERED, {"serve.component_source": (f"vae={SHAPES / 'vae'}",)}, COMPOSED),
        (OFFERED, {"worker.model": (OFFERED,), "serve.component_source": (f"vae={SHAPES / 'vae'}",)}, COMPOSED),
        (with_components(OFFERED, {"vae": "/other"}), {"serve.component_source": (f"vae={SHAPES / 'vae'}",)}, COMPOSED),
        (OFFERED, {}, OFFERED),
    ],
)
def test_worker_component_source_overrides_that_of_the_scheduler(
    offered: str, flags: dict[str, tuple[str, ...]], source: str, tmp_path: Path
) -> None:
    """Its own word goes first; a model that is here by that name does not hide what the scheduler says of it."""
    own = {"worker.role": "decoder", "worker.scheduler": ("tcp://127.0.0.1:9",), "insecure_listen": True}
    asked = worker_options(load(own | flags, None, {"UNFUSE_DATA_DIR": str(tmp_path)}).settings)
    welcome = Registered(((OFFERED, offered, "float32"),), StorageLocations("disk:/tmp"), 15.0, 1.0)
    served = decide_served(welcome, asked, StageSelector(frozenset({"decoder"})))
    assert served.models == ((OFFERED, str(resolve_source(source)), "float32"),)
    assert [card.name for card in served.specs] == [OFFERED]


def test_component_source_for_several_models_raises_usage_error(tmp_path: Path) -> None:
    own = {"worker.scheduler": ("tcp://127.0.0.1:9",), "insecure_listen": True, "serve.component_source": ("vae=a/b",)}
    asked = worker_options(load(own, None, {"UNFUSE_DATA_DIR": str(tmp_path)}).settings)
    welcome = Registered(
        ((OFFERED, OFFERED, "float32"), ("b", "b", "float32")), StorageLocations("disk:/tmp"), 15.0, 1.0
    )
    with pytest.raises(UsageError, match="is for one model: select it with --model"):
        decide_served(welcome, asked, StageSelector())
