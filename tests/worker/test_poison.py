"""What the executor makes of a compute process that crashes, hangs or eats memory: a real one, of an outside family."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.worker import outside
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.messages import StepProgress, StorageLocations, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import StageSelector
from unfuse.core.request import new_request_id
from unfuse.core.task import Claim, Lease
from unfuse.models import find
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.queue_samples import task_of
from unfuse.worker.compute_messages import LoadModels, ModelsLoaded
from unfuse.worker.executor import Executor

MEMORY_LIMIT = 512 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        outside.install(patch)
        yield outside.model(tmp_path_factory.mktemp("model"))


class Compute:
    """An executor with its process, and what it reports by claim."""

    def __init__(self, executor: Executor, store: TensorStore, folder: Path) -> None:
        self.executor, self.store = executor, store
        self.pools = find(folder).model_spec("outside", folder).pools()
        self.heard: list[object] = []
        self.news = asyncio.Condition()

    async def hear(self, message: ModelsLoaded | StepProgress | TaskStopped | TaskCompleted | TaskFailed) -> None:
        async with self.news:
            self.heard.append(message)
            self.news.notify_all()

    async def run(self, prompt: str, *inputs: ObjectRef, stage: str = "text_encode", **changes: object) -> Claim:
        steps = changes.pop("steps", 3)
        params = {"prompt": prompt, "num_inference_steps": steps}
        task = task_of(new_request_id(), stage, 1, self.pools[stage], stage, "outside", params, inputs, **changes)  # type: ignore[arg-type]
        lease = Lease(task, "w", secrets.token_bytes(16), 0.0)
        await self.executor.run(lease, {})
        return lease.claim

    async def until(self, kind: type, claim: Claim | None = None) -> object:
        """The first message of that kind about that task."""
        while True:
            async with self.news:
                for message in self.heard:
                    if isinstance(message, kind) and (claim is None or message.claim == claim):
                        return message
                await self.news.wait()

    async def failure(self, claim: Claim) -> TaskFailed:
        failed = await self.until(TaskFailed, claim)
        assert isinstance(failed, TaskFailed)
        return failed

    async def ready_again(self) -> None:
        await self.until(ModelsLoaded)
        self.heard = [message for message in self.heard if not isinstance(message, ModelsLoaded)]

    def ended(self, claim: Claim) -> bool:
        return any(isinstance(m, TaskCompleted | TaskFailed | TaskStopped) and m.claim == claim for m in self.heard)


@asynccontextmanager
async def computing(folder: Path, stall_s: float = 600.0, processes: int = 1) -> AsyncIterator[Compute]:
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        options = ComputeOptions(threads=1)
        load = LoadModels(
            (("outside", str(folder), "auto"),),
            StageSelector(),
            options,
            "w",
            "n",
            store.address,
            store.write_token,
            StorageLocations(f"disk:{folder}/results"),
        )
        executor = Executor([load] * processes, lambda message: compute.hear(message), stall_s, MEMORY_LIMIT)
        compute = Compute(executor, store, folder)
        assert (await executor.start()).device == "cpu"
        serving = asyncio.create_task(executor.serve())
        try:
            yield compute
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await executor.close()


@pytest.mark.slow
async def test_third_party_model_family_runs_in_numpy_without_torch(folder: Path) -> None:
    async with computing(folder) as compute:
        encoded = await compute.until(TaskCompleted, await compute.run("hello"))
        assert isinstance(encoded, TaskCompleted)
        assert encoded.output
        turned = await compute.until(TaskCompleted, await compute.run("hello", encoded.output, stage="denoise"))
        assert isinstance(turned, TaskCompleted)
        assert turned.output
        with compute.store.get(turned.output) as held:
            assert held["turned"].tobytes() == b"olleh"
        # an ordinary failure needs no torch either: the stages raise if it is there
        failed = await compute.failure(await compute.run("fail"))
        assert (failed.kind, failed.message) == ("transient", "it was asked to fail")
        again = await compute.until(TaskCompleted, await compute.run("hello"))
        assert isinstance(again, TaskCompleted)


def test_unknown_pipeline_class_is_rejected_by_name(folder: Path, tmp_path: Path) -> None:
    other = outside.model(tmp_path)
    (other / "model_index.json").write_text('{"_class_name": "NobodysPipeline"}')
    with pytest.raises(ConfigError, match="is a NobodysPipeline, which is not supported; supported: .*OutsidePipeline"):
        find(other)


@pytest.mark.slow
async def test_crash_of_a_lone_task_is_reported_with_signal_and_stderr(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with computing(folder) as compute:
        failed = await compute.failure(await compute.run("abort"))
        assert (failed.kind, failed.had_companions) == ("crash", False)
        assert failed.message == "the compute process died: killed by SIGABRT"
        assert "SIGABRT" in failed.evidence
        assert "the last words of a stage" in failed.evidence
        assert "in suffer" in failed.evidence  # the stack, by faulthandler
        assert "the last words of a stage" in capfd.readouterr().err  # nothing is kept from whoever reads along

        await compute.ready_again()
        killed = await compute.failure(await compute.run("kill"))
        assert killed.message.endswith("killed by SIGKILL")
        assert "last words" not in killed.evidence  # another process's


@pytest.mark.slow
async def test_crash_with_several_running_tasks_reports_companions(folder: Path) -> None:
    async with computing(folder) as compute:
        mate = await compute.run("later nothing", stage="denoise", steps=10_000)
        await compute.until(StepProgress, mate)
        poison = await compute.run("kill", priority=1)
        crashed = [await compute.failure(claim) for claim in (mate, poison)]
        assert [(failed.kind, failed.had_companions) for failed in crashed] == [("crash", True)] * 2


@pytest.mark.slow
async def test_no_other_task_runs_beside_a_task_that_must_run_alone(folder: Path) -> None:
    async with computing(folder) as compute:
        first = await compute.run("later nothing", stage="denoise", steps=20)
        alone = await compute.run("later kill", stage="denoise", alone=True)
        behind = await compute.run("later nothing", stage="denoise", priority=9)
        cancelled = await compute.run("later nothing", stage="denoise")
        await compute.executor.cancel(cancelled)
        await compute.until(TaskStopped, cancelled)  # though it was never in the process
        await compute.until(StepProgress, alone)
        assert compute.ended(first)

        # it crashes by itself: charged, and what came after it was not begun
        failed = await compute.failure(alone)
        assert (failed.kind, failed.had_companions) == ("crash", False)
        held_back = await compute.failure(behind)
        assert (held_back.kind, held_back.had_companions) == ("hand_back", False)
        order = [message.claim for message in compute.heard if isinstance(message, StepProgress) and message.step == 0]
        assert order == [first, alone]


@pytest.mark.slow
async def test_tasks_queued_behind_a_lone_task_run_after_it(folder: Path) -> None:
    async with computing(folder) as compute:
        alone = await compute.run("later nothing", stage="denoise", alone=True)
        behind = [await compute.run("later nothing", stage="denoise", alone=number == 1) for number in range(3)]
        for claim in behind:
            await compute.until(TaskCompleted, claim)
        told = [
            (type(m).__name__, m.claim)
            for m in compute.heard
            if isinstance(m, TaskCompleted) or getattr(m, "step", 1) == 0
        ]
        apart = [alone, behind[0], behind[1], behind[2]]
        assert told == [(kind, claim) for claim in apart for kind in ("StepProgress", "TaskCompleted")]


@pytest.mark.slow
async def test_compute_processes_of_a_worker_restart_together(folder: Path) -> None:
    """Given a worker of two compute processes, when the second one dies, then the first one ends with it, what it had
    begun is reported once, and two others take their place."""
    async with computing(folder, processes=2) as compute:
        before = compute.executor.pids
        hanging = await compute.run("hang")
        await compute.until(StepProgress, hanging)
        os.kill(before[1], signal.SIGKILL)
        failed = await compute.failure(hanging)
        assert (failed.kind, failed.message) == ("crash", "the compute process died: killed by SIGKILL")
        await compute.ready_again()
        assert not set(before) & set(compute.executor.pids)
        assert len(compute.executor.pids) == 2
        assert not any(psutil.pid_exists(pid) for pid in before)


@pytest.mark.slow
async def test_stalled_process_is_killed_and_reported(folder: Path) -> None:
    async with computing(folder, stall_s=1.0) as compute:
        # steps are progress: this one takes longer than the limit, and lives
        steady = await compute.until(TaskCompleted, await compute.run("later nothing", stage="denoise", steps=100))
        assert isinstance(steady, TaskCompleted)
        failed = await compute.failure(await compute.run("hang"))
        assert failed.kind == "crash"
        assert "made no progress for 1 s" in failed.message

        # one that is stopped before it began anything has nothing to be charged
        await compute.ready_again()
        os.kill(compute.executor.pids[0], signal.SIGSTOP)
        waiting = await compute.failure(await compute.run("hello"))
        assert waiting.kind == "hand_back"


@pytest.mark.slow
async def test_suspended_machine_does_not_count_as_a_stall(folder: Path) -> None:
    async with computing(folder, stall_s=1.0) as compute:
        claim = await compute.run("later nothing", stage="denoise", steps=50)
        await compute.until(StepProgress, claim)
        os.kill(compute.executor.pids[0], signal.SIGSTOP)
        time.sleep(3.0)  # the parent with it, as when a machine is suspended
        os.kill(compute.executor.pids[0], signal.SIGCONT)
        while not compute.ended(claim):
            await asyncio.sleep(0.01)
        assert not any(isinstance(message, TaskFailed) for message in compute.heard)


@pytest.mark.slow
async def test_process_over_the_memory_limit_is_killed_and_reported(folder: Path) -> None:
    async with computing(folder) as compute:
        failed = await compute.failure(await compute.run("eat"))
        assert failed.kind == "crash"
        assert "and --memory-limit allows 512.0 MiB" in failed.message
        # tensors of others that it maps are not its own: arenas do not count
        assert isinstance(await compute.until(TaskCompleted, await _after(compute)), TaskCompleted)


async def _after(compute: Compute) -> Claim:
    await compute.ready_again()
    reference = compute.store.put({"text": np.ones(1 << 19, np.uint8)}, request="req_x", stage="s", attempt=1)
    return await compute.run("later nothing", reference, stage="denoise")
