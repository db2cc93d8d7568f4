"""The executor over a real compute process with the built-in model's text encoder, the lightest to load."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from tests.worker import outside
from tests.worker.forking import forking
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.messages import StepProgress, StorageLocations, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import StageSelector, Value, roles_of
from unfuse.core.request import new_request_id
from unfuse.core.task import Lease
from unfuse.core.worker_status import DeviceId
from unfuse.models import find, resolve_source
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.queue_samples import task_of
from unfuse.worker import executor as executor_module
from unfuse.worker.compute_messages import LoadModels, ModelsLoaded
from unfuse.worker.executor import Executor

SHAPES = "unfuse/shapes"


def load(store: TensorStore, folder: Path, model: str = SHAPES, role: str = "encoder", threads: int = 1) -> LoadModels:
    models, choice, compute = (
        ((model, model, "auto"),),
        StageSelector(roles_of(role)),
        ComputeOptions("cpu", threads=threads),
    )
    return LoadModels(
        models,
        choice,
        compute,
        store.owner,
        store.node,
        store.address,
        store.write_token,
        StorageLocations(f"disk:{folder}"),
    )


def lease(stage: str = "text_encode", *inputs: ObjectRef, **changes: Value) -> Lease:
    card = find(folder := resolve_source(SHAPES)).model_spec(SHAPES, folder)
    params = {**card.defaults, "prompt": "a red circle on white", "seed": 1, **changes}
    pool = card.pools()[stage]
    task = task_of(new_request_id(), stage, 1, pool, stage, SHAPES, params, inputs)
    return Lease(task, "w", secrets.token_bytes(16), 0.0)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[socket.socket]:
    with forking([SHAPES]) as (asked, _):
        yield asked


@pytest.fixture(params=[pytest.param("spawned", marks=pytest.mark.nightly), "forked"])
def forks(request: pytest.FixtureRequest) -> socket.socket | None:
    """The fork server where compute processes are forked."""
    return request.getfixturevalue("fork_server") if request.param == "forked" else None


@asynccontextmanager
async def executing(
    folder: Path, forks: socket.socket | None, role: str = "encoder", threads: int = 1
) -> AsyncIterator[tuple[Executor, TensorStore, asyncio.Queue[object]]]:
    heard: asyncio.Queue[object] = asyncio.Queue()
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        executor = Executor([load(store, folder, role=role, threads=threads)], heard.put, fork_server=forks)
        assert (await executor.start()).device == "cpu"
        serving = asyncio.create_task(executor.serve())
        try:
            yield executor, store, heard
        finally:
            serving.cancel()
            await executor.close()


async def outcome(heard: asyncio.Queue[object]) -> object:
    while isinstance(message := await heard.get(), StepProgress):
        pass
    return message


async def test_executor_restarts_a_killed_process_and_runs_the_next_task(
    tmp_path: Path, forks: socket.socket | None
) -> None:
    async with executing(tmp_path, forks) as (executor, store, heard):
        await executor.run(first := lease(), {})
        done = await outcome(heard)
        assert isinstance(done, TaskCompleted)
        assert (done.claim, done.output is not None) == (first.claim, True)

        # what waits in a process that dies is handed back, and its objects live on with the parent
        (pid,) = executor.pids
        process = psutil.Process(pid)
        process.suspend()
        await executor.run(waiting := lease(), {})
        process.kill()
        failed = await outcome(heard)
        assert isinstance(failed, TaskFailed)
        assert (failed.claim, failed.kind) == (waiting.claim, "hand_back")
        assert "SIGKILL" in failed.message
        assert isinstance(await outcome(heard), ModelsLoaded)
        assert executor.pids != [process.pid]
        assert done.output is not None
        with store.get(done.output, as_torch=True, verify=True) as held:
            assert held["prompt_embeds"] is not None

        await executor.run(third := lease(), {})
        again = await outcome(heard)
        assert isinstance(again, TaskCompleted)
        assert again.claim == third.claim
        assert again.output is not None
        assert again.output.checksums == done.output.checksums


async def test_task_whose_input_was_lost_with_a_process_is_handed_back(tmp_path: Path) -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()
    with TensorStore.create("memory", owner="w") as store:
        executor = Executor([load(store, tmp_path)], heard.put)
        executor.replies._has_all[(waiting := lease()).claim] = True
        executor.replies.fail_all()
        for _ in range(2):
            await executor.run(waiting, {})
        failed = heard.get_nowait()
        assert isinstance(failed, TaskFailed)
        assert (failed.claim, failed.kind, failed.reason) == (waiting.claim, "hand_back", "compute")
        assert heard.empty() and [*executor._waiting] == [waiting.claim]
        await executor.close()


async def test_stages_have_warmed_up_once_when_a_process_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.install(monkeypatch)
    monkeypatch.setenv("OUTSIDE_WARMED", str(warmed := tmp_path / "warmed"))
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        executor = Executor(
            [load(store, tmp_path, str(outside.model(tmp_path / "m")), "denoiser")], asyncio.Queue().put
        )
        await executor.start()
        assert warmed.read_text() == "warm\n"
        await executor.close()


async def test_a_cancelled_task_stops_at_its_next_step(tmp_path: Path, fork_server: socket.socket) -> None:
    async with executing(tmp_path, fork_server, "all") as (executor, store, heard):
        await executor.run(text := lease(), {})
        encoded = await outcome(heard)
        assert isinstance(encoded, TaskCompleted)
        assert (encoded.claim, encoded.output is not None) == (text.claim, True)
        assert encoded.output is not None

        # half a second a step; that none follows a Cancel that was read is counted in test_step_loop.py
        await executor.run(slow := lease("denoise", encoded.output, num_frames=17, width=256, height=256), {})
        step = 0
        while step < 3:
            stepped = await heard.get()
            assert isinstance(stepped, StepProgress)
            step = stepped.step
        await executor.cancel(slow.claim)

        while isinstance(message := await heard.get(), StepProgress):
            step = message.step
        assert isinstance(message, TaskStopped) and message.claim == slow.claim
        assert step < stepped.steps
        # of steps that ended after the Cancel was sent, only the timings tell
        assert step <= message.timings.steps <= stepped.steps and message.timings.share_s >= stepped.share_s > 0


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.nightly), 2])
async def test_forked_and_spawned_processes_compute_identical_bytes(
    tmp_path: Path, fork_server: socket.socket, threads: int
) -> None:
    """The forking process has libraries with one thread."""
    made = []
    for forks in (None, fork_server):
        async with executing(tmp_path, forks, "all", threads) as (executor, _, heard):
            await executor.run(lease(), {})
            assert isinstance(encoded := await outcome(heard), TaskCompleted)
            assert encoded.output is not None
            await executor.run(lease("denoise", encoded.output, num_inference_steps=2), {})
            assert isinstance(denoised := await outcome(heard), TaskCompleted)
            assert denoised.output is not None
            made.append((encoded.output.checksums, denoised.output.checksums))
    assert made[0] == made[1]


@pytest.mark.row("K1")
async def test_weights_of_unregistered_pools_are_not_loaded(tmp_path: Path) -> None:
    """As when a file has changed since: the new weights would be in the pool of the old ones."""
    pools = frozenset({"text_encode:0123456789ab:float32"})
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        executor = Executor([replace(load(store, tmp_path), registered=pools)], asyncio.Queue[object]().put)
        with pytest.raises(ConfigError, match="the files of all models have changed since the worker started"):
            await executor.start()
        await executor.close()


async def test_model_that_cannot_load_raises_config_error(tmp_path: Path, forks: socket.socket | None) -> None:
    async def ignore(_: ModelsLoaded | StepProgress | TaskStopped | TaskCompleted | TaskFailed) -> None:
        """Nothing is expected."""

    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        executor = Executor([load(store, tmp_path, str(tmp_path))], ignore, fork_server=forks)
        with pytest.raises(ConfigError, match=r"model_index\.json"):
            await executor.start()
        await executor.close()


async def test_pauses_between_failed_restarts_become_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another program uses the memory of the device."""
    refusals = [ConfigError("out of memory while loading the device context")] * 9
    pauses, reported = [], asyncio.Queue[object]()
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        executor = Executor([load(store, tmp_path)], reported.put)

        async def start() -> ModelsLoaded:
            if refusals:
                raise refusals.pop()
            return ModelsLoaded("cpu", {}, {}, frozenset(), DeviceId("cpu"))

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        monkeypatch.setattr(executor, "start", start)
        monkeypatch.setattr(executor_module.asyncio, "sleep", sleep)
        assert (await executor._restart()).device == "cpu"
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert executor.health.fault is None, "the device is not to blame"


async def test_swap_loads_other_weights_and_falls_back_if_that_fails(
    tmp_path: Path, fork_server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "RESTART_S", 0.0)
    async with executing(tmp_path, fork_server) as (executor, store, heard):
        executor.swap([replace(load(store, tmp_path, role="denoiser"), loaded_model="denoiser")])
        assert not executor.ready
        assert isinstance(await outcome(heard), ModelsLoaded)
        assert (executor.loaded[0], executor.ready, executor.loaded[1] > 0) == ("denoiser", True, True)
        executor.swap([replace(load(store, tmp_path, str(tmp_path)), loaded_model="nothing")])
        assert isinstance(await outcome(heard), ModelsLoaded)
        assert executor.loaded[0] == "denoiser"
