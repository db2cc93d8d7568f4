"""The benches stay runnable: their parts at tiny sizes, in this process. What they measure is not asserted."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import unfuse.models
from bench import (
    arrivals,
    beats,
    chat,
    costs,
    flexible,
    gpu_models,
    grammar,
    growth,
    hop,
    http_edge,
    idle,
    kv,
    leases,
    load,
    lora,
    narrow,
    seen,
    sides,
    steps,
    stored,
    stream,
    tasks,
    turns,
    waiting,
)
from bench.model import PROMPTS, Case, Model
from bench.peers.loop import Ear, Mouth, closed_loop
from bench.servers import redis_server
from bench.undivided import load as load_undivided, make
from tools import tiny
from tools.server import serving, until
from unfuse.core.request import Timings


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: gpu_models.build(subject, root, "cpu") for kind, subject in gpu_models.TINY.items()}


@pytest.fixture(scope="module")
def case(folders: dict[str, Path]) -> Case:
    model = Model(folders["wan"])
    return Case(model, [model.encode(model.params(seed)) for seed in range(len(PROMPTS))], (32, 32, 1), 5)


def test_steps_are_timed_and_bytes_compared(case: Case) -> None:
    cost = steps.cost(case, 1, (1, 2))
    found = steps.independence(case, "fused", trials=2)

    assert set(cost) == {"1", "2"} and cost["1"]["apart"]["throughput_over_alone"] == 1.0
    assert [one["latents_furthest_from_alone"] < 1e-3 for one in found.values()] == [True] * 3
    assert all(0 < one["same_bytes_each_time"] <= one["seen_again"] for one in [found["padded, fused"]])


def test_adapters_are_timed_as_they_come_and_go(folders: dict[str, Path], tmp_path: Path) -> None:
    found = lora.measure(folders["wan"], tmp_path, 2, (1, 2))

    for steps_of in found["steps"].values():
        assert steps_of.keys() == {"none was ever loaded", "none, beside loaded ones", "rank-1", "rank-2"}
    assert all(taken > 0 for taken in found["change_ms"].values())


@pytest.mark.parametrize("how", stream.HOWS)
def test_decoding_is_measured_in_pieces_and_at_once(how: str) -> None:
    assert stream.decode("tiny", how, 5, 32)["seconds"] > 0


def test_company_that_keeps_its_slots_has_each_request_in_one() -> None:
    slots: dict[int, set[int]] = {}
    for row in steps.companies("slots kept", 20):
        for slot, seed in enumerate(row):
            slots.setdefault(seed, set()).add(slot)

    assert all(len(found) == 1 for seed, found in slots.items() if seed != steps.POOL)
    assert all(len(row) == steps.PADDED for row in steps.companies("padded", 20))


def test_a_component_takes_the_place_of_the_tiny_one(tmp_path: Path) -> None:
    def deeper() -> object:
        from transformers import T5Config, T5EncoderModel

        return T5EncoderModel(
            T5Config(vocab_size=300, d_model=tiny.TEXT_DIM, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
        )

    def longer() -> object:
        from transformers import CLIPTextConfig, CLIPTextModel

        ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "num_attention_heads": 4}
        sizes = {"hidden_size": tiny.POOLED_DIM, "intermediate_size": 48, "num_hidden_layers": 1}
        return CLIPTextModel(CLIPTextConfig(vocab_size=600, max_position_embeddings=77, **sizes, **ends))

    components = {"text_encoder": longer, "text_encoder_2": deeper}
    subject = gpu_models.Subject("flux", ("apart",), (32, 32, 1), 2, (32,), components)
    model = Model(gpu_models.build(subject, tmp_path, "cpu"))
    made = model.encode(model.params(1, max_sequence_length=16))
    assert isinstance(made["prompt_embeds"], Tensor) and made["prompt_embeds"].shape == (1, 16, tiny.TEXT_DIM)


def test_the_undivided_side_makes_the_same_pixels_of_requests_made_alone(case: Case, folders: dict[str, Path]) -> None:
    seed, params = 3, case.params(3)
    asked = {name: params[name] for name in ("prompt", "seed", "height", "width", "num_frames", "num_inference_steps")}
    given = {"guidance_scale": params["guidance_scale"], "max_sequence_length": params["max_sequence_length"]}

    (pixels,) = make(load_undivided(str(folders["wan"])), [{**asked, **given}])

    (latents,) = case.denoised("apart", [seed])
    assert (steps.pictures(case, latents, seed) == pixels).all()


def test_a_dispatcher_gives_a_free_pipeline_what_waits_and_is_alike() -> None:
    class Pipelines:
        """One process that has just been given the first request."""

        processes = [None]

        def __init__(self) -> None:
            self.batches: list[list[object]] = []
            self.began = False

        def run(self, index: int, cases: list[dict[str, object]]) -> None:
            self.began = True
            while not self.batches and len(dispatcher._waiting) < 3:
                time.sleep(0.001)
            self.batches.append([case["seed"] for case in cases])

    pipelines = Pipelines()
    dispatcher = arrivals.Dispatcher(pipelines, 8)  # type: ignore[arg-type]
    kinds = (20, 10, 20, 10)
    trace = [arrivals.Arrival(0.01 * place, place, kind, 64, 4.0) for place, kind in enumerate(kinds)]

    def ask(arrival: arrivals.Arrival) -> None:
        """Ask in the order of the trace, however late a thread runs."""
        while arrival.seed and not (pipelines.began and len(dispatcher._waiting) == arrival.seed - 1):
            time.sleep(0.001)
        dispatcher.ask(arrival)

    arrivals.replay(ask, trace, 1.0)
    dispatcher.close()

    assert pipelines.batches == [[0], [1, 3], [2]]


def test_the_trace_is_the_same_every_time() -> None:
    assert arrivals.trace() == arrivals.trace()
    assert len({arrival.kind for arrival in arrivals.trace()}) > 8


def test_clients_wait_for_their_picture_before_they_ask_again() -> None:
    asked: list[int] = []

    wall, each = load.closed_loop(asked.append, 1, 5)

    assert asked == [*range(5)] and len(each) == 5 and wall >= sum(each)


@pytest.mark.nightly
def test_schedulers_share_a_redis_or_have_one_each() -> None:
    found = tasks.scaling(1, 0.2, (1, 2))
    assert list(found) == [
        "1 schedulers, 1 Redis",
        "2 schedulers, 1 Redis",
        "2 schedulers, 2 shards",
        "2 schedulers, 2 Redis",
    ]
    assert all(rate > 0 for figures in found.values() for rate in figures["tasks_per_s"])
    for figures in found.values():
        assert figures["cpu_ms_per_task"].keys() == {"client", "worker", "redis"}
        assert sum(figures["cpu_ms_per_task"].values()) > 0  # of each, 10 ms at the least are counted, or none


@pytest.mark.nightly
def test_tasks_go_through_a_scheduler_and_a_worker_process() -> None:
    found = tasks.measure(1, 0.2, {}, only=("memory", "redis, three stages"))

    assert [*found] == ["memory", "redis, three stages"]
    assert all(figures["tasks_per_s"] > 0 for figures in found.values())
    assert found["redis, three stages"]["cpu_ms_per_task"].keys() == {"client", "worker", "redis"}


async def test_a_task_is_over_for_its_client_when_a_worker_has_said_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ear, mouth = Ear(str(tmp_path / "pipe")), Mouth(str(tmp_path / "pipe"))
    submitted: list[str] = []

    async def submit(name: str) -> None:
        submitted.append(name)
        asyncio.get_running_loop().call_later(0.001 * len(submitted), mouth.say, name)

    found = await closed_loop(lambda: ear.one(submit), 0.05, 3)
    ear.close()
    mouth.close()

    assert len(found["each"]) == len(submitted) >= 3


def test_a_token_is_timed_by_its_context_and_its_company() -> None:
    by_context, by_count = kv.contexts((256,), 1), kv.together((1, 2), 1, 64)

    assert {"one run", "many runs", "gathered", "DynamicCache"} <= by_context["256"].keys()
    assert all(cost > 0 for row in (*by_context.values(), *by_count.values()) for cost in row.values())


def test_a_grammar_is_timed_beside_others_and_alone(tmp_path: Path) -> None:
    source = grammar.make_language_model(tmp_path / "narrow")

    assert len(grammar.turns(grammar.Texts(source), 2)) == len(grammar.alone(source, 8, 3)) == 3


def test_what_a_client_saw_of_a_chat_becomes_a_row_beside_others() -> None:
    seen = chat.Read(1.0, [1.5, 1.6, 2.0], 3)
    assert (seen.first, seen.gaps) == (0.5, pytest.approx([0.1, 0.4]))
    fast, slow = ({"tokens": 30, "seconds": s, "cpu": 0.3, "first": [0.5], "gaps": seen.gaps} for s in (1.0, 2.0))

    row = chat._row([fast, fast], {"other": [slow, slow]})

    assert (row["tokens/s"], row["÷ other"], row["CPU ms a token"]) == (30.0, 2.0, 10.0)
    assert (row["first token, ms"], row["p99"]) == (500.0, 400.0)


@pytest.mark.nightly
def test_chats_with_pictures_are_asked_alike_of_both_sides(tmp_path: Path) -> None:
    """Given a picture, and frames of a video, then what is served reads as many tokens as the undivided model."""
    shots = seen.Shots(tmp_path)
    with ExitStack() as stack:
        ways = {"generate": seen.Undivided(stack, 1, 1).ask, "all=1": seen.served(stack, shots.model, "all=1", 1)}
        for scene in ((2, 1, 0, 2), (4, 0, 2, 2)):
            chat = shots.chat(scene)
            assert len({ask(chat) for ask in ways.values()}) == 1
        found = seen.compared(shots, ways, (2, 1, 0, 2), 2, 1)
    assert {"generate, s", "all=1, s", "all=1 ÷ generate"} == seen.row(found).keys()
    assert {"generate, chats/s", "all=1, chats/s", "all=1 ÷ generate"} == seen.row(found, 2).keys()


def test_scenes_of_long_chats_have_as_many_tokens_as_they_say() -> None:
    assert [sides.size_of(scene) for scene in seen.LONG.values()] == [1024, 4096, 16_384]
    assert [sides.size_of(scene) for scene in sides.SCENES.values()] == [1024, 4096, 16_384]
    assert max(map(sides.size_of, seen.LONG.values())) <= seen.LONG_SEEN < seen.LONG_POSITIONS


@pytest.mark.nightly
def test_memory_of_either_side_is_told_and_narrowed_chats_are_compared(tmp_path: Path) -> None:
    scenes = {"small": (16, 1, 0, 2)}
    (row,) = sides.measure(seen.Shots(tmp_path), scenes, (1,)).values()
    for side in sides.SIDES.values():
        assert 0 < row[f"{side}: arena, MiB"] < row["fixed, MiB"] and row[f"{side}: resident, MiB"] > 50
    assert sides.undivided(seen.Shots(tmp_path / "undivided"), scenes)["small"] > 50

    found = narrow.chats(1, ("vision_encode",), ("int4",))
    assert found["none"]["equal texts"] == "1 of 1"
    assert 0 < found["vision_encode=int4"]["KiB pulled a chat"] < found["none"]["KiB pulled a chat"]


@pytest.mark.nightly
def test_leases_are_timed_at_every_depth() -> None:
    found = leases.measure((64, 128), quick=True)

    assert {queue: {"64", "128"} <= rows.keys() for queue, rows in found.items()} == dict.fromkeys(found, True)
    assert found.keys() == {"memory", "sqlite", "redis"}


@pytest.mark.nightly
def test_what_clients_ask_is_timed_at_both_depths() -> None:
    found = stored.measure(300, 1)

    assert found.keys() == {"sqlite", "redis"}
    assert all(found[queue][ask]["p50_ratio"] >= 0 for queue in found for ask in stored.ROUTES)  # rounded


async def test_hops_are_timed_over_every_queue(tmp_path: Path) -> None:
    with redis_server() as server:
        for url in ("memory", f"sqlite:{tmp_path}/queue.db", server.url):
            assert len(await hop.measure(url, 4, warm=1)) == 4, url


def test_what_grows_is_counted_beside_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "CALLS", 2)

    found = asyncio.run(growth.measured("memory", 2))

    assert found["calls ÷ commits"]["n"] == 2


def test_an_idle_process_is_told_from_a_busy_one() -> None:
    sides = {"idle": "import time; time.sleep(600)", "busy": "while True: pass"}
    processes = {name: subprocess.Popen([sys.executable, "-c", code]) for name, code in sides.items()}
    try:
        found = idle.idle({name: SimpleNamespace(process=process) for name, process in processes.items()}, 1.0)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()

    ((rest,), (work,)) = found.values()
    assert rest["percent_of_a_core"] >= 0 and work["percent_of_a_core"] > 0


def test_predictions_are_compared_with_what_was_held_out() -> None:
    def measured(case: costs.Case) -> costs.Measured:
        took = {"text_encode": 0.01, "denoise": case.steps * (1 + case.frames), "vae_decode": 0.1 * case.frames}
        return costs.Measured(case, {kind: Timings(run_s=seconds) for kind, seconds in took.items()})

    learned = [measured(case) for case in costs.LEARNED * 3]
    found = costs.compare(learned, [measured(case) for case in costs.HELD_OUT[:12]])

    assert [*found][:4] == ["law", "law, of the first 12", "one rate", "noise"]
    assert found["noise"]["all"] == {"median": 0.0, "p90": 0.0}
    assert found["law"]["text_encode"]["median"] < 10 < found["one rate"]["text_encode"]["median"]


@pytest.mark.nightly
def test_health_is_asked_for_beside_streams_and_large_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "STREAMS", 3)
    monkeypatch.setattr(http_edge, "LARGE", 1000)
    with serving(tmp_path, "--workers", "none", "--drain-timeout", "0") as server:
        until(lambda: server.get("/health"), "the server", server.process)
        port = int(server.url.rpartition(":")[2])
        assert http_edge.health(port, 0.1)
        asyncio.run(http_edge.streams(port, http_edge.waiting(port)))
        for kind in http_edge.LOADS[1:]:
            asyncio.run(http_edge.bodies(port, kind))


def test_a_burst_is_made_by_fixed_workers_and_by_flexible_ones() -> None:
    fixed, flexible_ones = (
        flexible.burst(flexible.SIDES[side], (0.02, 0.06, 0.08), 0.5, 6) for side in ("fixed 1 + 2 + 1", "flexible")
    )
    assert fixed.keys() == flexible_ones.keys()
    assert (fixed["swaps"], 0 < float(str(fixed["utilisation"])) < 1) == (0, True)


def test_heartbeats_and_looks_at_workers_cost_something() -> None:
    with redis_server() as server:
        found = asyncio.run(beats.costs(server.url, server.pid, 3, 20))
    assert len(found) == 4 and found["a heartbeat: scheduler ms"]


SHAPES = Path(unfuse.models.__file__).parent / "shapes"
VAE = "vae/diffusion_pytorch_model.safetensors"


class Pictures(BaseHTTPRequestHandler):
    """A server that answers as `serve` does; of the model `two` it loses every picture."""

    def do_GET(self) -> None:
        self.answer(200, b'unfuse_swaps_total{loaded="one"} 3.0\nunfuse_loading_seconds_total{loaded="one"} 1.5\n')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer(500 if asked["model"] == "two" else 200, b"{}")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody asked."""


def test_turns_are_measured_beside_servers_of_one_model_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        at = SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}")
        sides = {side: dict.fromkeys(turns.NAMES, at) for side in turns.SIDES}
        assert turns.swapped(sides[turns.TURNS]) == (3, 1.5)
        found = turns.measure(sides, 1, 0.0)
        server.shutdown()
        thread.join()
    for clients, (_, others) in turns.CLIENTS.items():
        assert [found[clients][side]["lost"] for side in turns.SIDES] == [others] * 3
        assert {"in turns ÷ half each", "in turns ÷ apart"} < found[clients].keys()
    shapes = turns.sibling(SHAPES, tmp_path / "two")
    assert {file.name for file in shapes.glob("*")} == {file.name for file in SHAPES.glob("*")}
    assert (shapes / VAE).read_bytes() != (SHAPES / VAE).read_bytes()


def test_threads_that_wait_decode_something() -> None:
    assert waiting.decode(1, 0.01) > 0
