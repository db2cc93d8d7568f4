"""The pure transitions: one example of each, and random walks in which every move is held against the tables."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tests.core.graphs import object_for, pipelines, request_for
from tests.examples import examples
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import IllegalMove, LeaseLost
from unfuse.core.messages import CheckpointSaved, OutputAnnounced, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.request import (
    FLAGGED_TYPE,
    REQUEST_MOVES,
    Change,
    ErrorInfo,
    RequestContext,
    ResultFile,
    RunningStage,
    StageState,
    Timings,
)
from unfuse.core.task import TASK_MOVES, Claim, Lease, Task
from unfuse.scheduler import change_builder, deadlines, lifecycle
from unfuse.testing.queue_samples import task_of

WALL, NOW = 1_700_000_000.0, 50.0

PICTURE = Pipeline(
    (
        StageSpec("text", "text_encode", ("t",), (), ("embedding",)),
        StageSpec("image", "image_encode", ("i",), (), ("pixels",)),
        StageSpec("denoise", "denoise", ("d",), ("embedding", "pixels"), ("latents",), per_sample=True),
        StageSpec("decode", "vae_decode", ("v",), ("latents",), (), per_sample=True),
    )
)


def claim_of(change: Change, stage: str, handed_back: int = 0) -> Claim:
    task = next(task for task in change.push if task.stage == stage)
    return Claim(task.request, stage, task.attempt + handed_back, b"token of " + stage.encode())


def done(claim: Claim, index: int | None = None) -> TaskCompleted:
    output = object_for(claim) if index is None else None
    files = () if index is None else (ResultFile(index, "image/png", 10, "hash"),)
    return TaskCompleted(claim, output, files, Timings(run_s=2.0))


def finish(change: Change, *stages: str) -> Change:
    """Complete stages one after the other; tasks that were pushed on the way are those of the answer."""
    pushed = list(change.push)
    for stage in stages:
        index = int(stage[-1]) if stage.startswith("decode") else None
        claim = claim_of(msgspec.structs.replace(change, push=tuple(pushed)), stage)
        change = lifecycle.complete_stage(change.context, done(claim, index), "w", WALL)
        pushed = [task for task in pushed if task.stage != stage] + list(change.push)
    return msgspec.structs.replace(change, push=tuple(pushed))


def fail(
    change: Change,
    stage: str,
    kind: Any,
    object_id: str = "",
    running: tuple[RunningStage, ...] = (),
    company: bool = False,
    wall: float = WALL,
) -> Change:
    failed = TaskFailed(claim_of(change, stage), kind, "it broke", "trace", object_id, company)
    return lifecycle.fail_stage(change.context, failed, "w", wall, NOW, running)


def names(change: Change) -> list[str]:
    return [task.stage for task in change.push]


def kinds(change: Change) -> list[str]:
    return [event.type for event in change.events]


@pytest.fixture
def first() -> Change:
    return lifecycle.admit(request_for(PICTURE, samples=2, priority=3, deadline=99.0), WALL)


class TestAdmission:
    def test_stages_without_inputs_are_queued_at_admission(self, first: Change) -> None:
        assert names(first) == ["text", "image"]
        assert {name: state.status for name, state in first.context.stages.items()} == {
            "text": "queued",
            "image": "queued",
            "denoise.0": "waiting",
            "denoise.1": "waiting",
            "decode.0": "waiting",
            "decode.1": "waiting",
        }
        assert (first.context.version, first.context.status) == (0, "queued")
        assert [(event.type, event.at) for event in first.events] == [("queued", WALL)]

    def test_task_has_the_parameters_of_its_stage(self, first: Change) -> None:
        task = first.push[0]
        assert (task.request, task.attempt, task.planned.kind, task.planned.pool) == (
            first.context.id,
            1,
            "text_encode",
            "pool0",
        )
        assert (task.model, task.params, task.priority, task.deadline) == ("m", {"steps": 2}, 3, 99.0)
        assert (task.order, task.preferred_node, task.affinity, task.alone) == (0.0, "", "", False)

    def test_task_has_order_affinity_and_preferred_node(self) -> None:
        size: dict[str, Any] = {"width": 64, "height": 32, "num_frames": 1}
        request = request_for(PICTURE, order=7.5, params=size)
        change = lifecycle.admit(request, WALL)
        assert [(task.order, task.affinity) for task in change.push] == [(7.5, "m [64, 32, 1]")] * 2
        adapter = request_for(PICTURE, params={**size, "lora": "a"}, derived=DerivedFacts(lora_id="f00"))
        adapted = lifecycle.admit(adapter, WALL)
        assert [task.affinity for task in adapted.push] == ["m [64, 32, 1] f00"] * 2
        for stage, node, nbytes in (("text", "far", 10), ("image", "near", 11)):
            claim = claim_of(change, stage)
            output = msgspec.structs.replace(object_for(claim), node=node, nbytes=nbytes)
            push = change.push
            change = lifecycle.complete_stage(change.context, TaskCompleted(claim, output, (), Timings()), "w", WALL)
            change = msgspec.structs.replace(change, push=(*push, *change.push))
        assert change.push[-1].preferred_node == "near"


class TestFlagged:
    def flagged(self, change: Change, *indexes: int) -> Change:
        """Complete both pictures; those of these indexes were flagged by a safety checker."""
        change = finish(change, "text", "image", "denoise.0", "denoise.1")
        push = list(change.push)
        for index in range(2):
            claim = claim_of(msgspec.structs.replace(change, push=tuple(push)), f"decode.{index}")
            kind = FLAGGED_TYPE if index in indexes else "image/png"
            report = TaskCompleted(claim, None, (ResultFile(index, kind, 10, "hash"),), Timings())
            change = lifecycle.complete_stage(change.context, report, "w", WALL)
        return change

    def test_request_fails_with_moderation_blocked_if_all_images_are_flagged(self, first: Change) -> None:
        end = self.flagged(first, 0, 1).context

        assert end.status == "failed" and not end.is_dead_letter and end.error is not None
        assert end.error.code == "moderation_blocked" and "safety checker flagged" in end.error.message

    def test_request_completes_if_only_some_images_are_flagged(self, first: Change) -> None:
        end = self.flagged(first, 1).context

        assert (end.status, [file.flagged for file in end.result]) == ("completed", [False, True])


class TestCompletion:
    def test_stage_is_queued_when_its_last_input_is_ready(self, first: Change) -> None:
        half = finish(first, "text")
        assert names(half) == ["image"]
        both = finish(first, "text", "image")
        assert names(both) == ["denoise.0", "denoise.1"]
        assert [ref.id for ref in both.push[0].inputs] == ["text@1", "image@1"]
        assert [task.params for task in both.push] == [{"steps": 2, "index": 0}, {"steps": 2, "index": 1}]

    def test_completed_stage_records_output_attempt_and_timings(self, first: Change) -> None:
        claim = claim_of(first, "text", handed_back=2)
        running = (RunningStage("text", claim.attempt, "w", WALL + 4),)
        change = lifecycle.complete_stage(first.context, done(claim), "w", WALL + 9, running)
        state = change.context.stages["text"]
        assert (state.status, state.attempt, state.token, state.worker) == ("done", 3, claim.token, "w")
        assert state.output == object_for(claim)
        assert (state.timings.queued_s, state.timings.run_s) == (4.0, 2.0)
        assert (change.claim, change.context.version, change.context.status) == (claim, 1, "in_progress")
        assert [(e.type, e.stage, e.attempt, e.worker) for e in change.events] == [("stage_completed", "text", 3, "w")]

    def test_the_last_final_stage_completes_the_request(self, first: Change) -> None:
        change = finish(first, "text", "image", "denoise.1", "decode.1", "denoise.0", "decode.0")
        context = change.context
        assert (context.status, context.completed_at, context.version) == ("completed", WALL, 6)
        assert [file.index for file in context.result] == [0, 1]
        assert kinds(change) == ["stage_completed", "completed"]
        assert all(state.output is None for state in context.stages.values())

    def test_repeated_completion_is_left_to_the_queue(self, first: Change) -> None:
        claim = claim_of(first, "text")
        change = lifecycle.complete_stage(first.context, done(claim), "w", WALL)
        again = lifecycle.complete_stage(change.context, done(claim), "w", WALL + 5)
        assert again == Change(change.context, claim)
        over = lifecycle.cancel(change.context, WALL)
        assert over is not None
        assert lifecycle.complete_stage(over.context, done(claim), "w", WALL) == Change(over.context, claim)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"output": None},
            {"output": {"request": "req_another"}},
            {"output": {"stage": "image"}},
            {"output": {"nbytes": -1}},
            {"output": {"nbytes": 2**60}},
            {"output": {"attempt": 9}},
            {"output": {"owner": "another"}},
            {"results": (ResultFile(0, "image/png", 1, "hash"),)},
        ],
    )
    def test_wrong_stage_output_fails_the_request(self, first: Change, wrong: dict[str, Any]) -> None:
        claim = claim_of(first, "text")
        if isinstance(fields := wrong.get("output"), dict):
            wrong = {"output": msgspec.structs.replace(object_for(claim), **fields)}
        change = lifecycle.complete_stage(first.context, msgspec.structs.replace(done(claim), **wrong), "w", WALL)
        assert change.context.error is not None
        assert "returned the wrong kind of output for stage text" in change.context.error.message
        assert (change.context.status, change.context.is_dead_letter, change.claim) == ("failed", False, claim)

    @pytest.mark.parametrize("results, made", [((), None), ((ResultFile(0, "image/png", 1, "h"),), "an object")])
    def test_final_stage_with_an_object_or_no_results_fails_the_request(
        self, first: Change, results: Any, made: str | None
    ) -> None:
        ready = finish(first, "text", "image", "denoise.0")
        claim = claim_of(ready, "decode.0")
        report = TaskCompleted(claim, object_for(claim) if made else None, results, Timings())
        assert lifecycle.complete_stage(ready.context, report, "w", WALL).context.status == "failed"

    def test_report_of_a_worker_without_the_lease_raises_lease_lost(self, first: Change) -> None:
        claim = claim_of(first, "text")
        held = (RunningStage("text", claim.attempt, "w", WALL),)
        with pytest.raises(LeaseLost, match="not leased to thief"):
            lifecycle.complete_stage(first.context, done(claim), "thief", WALL, held)
        with pytest.raises(LeaseLost, match="not leased to thief"):
            lifecycle.fail_stage(first.context, TaskFailed(claim, "permanent", ""), "thief", WALL, NOW, held)
        change = lifecycle.complete_stage(first.context, done(claim), "w", WALL, held)
        assert lifecycle.complete_stage(change.context, done(claim), "w", WALL) == Change(change.context, claim)
        with pytest.raises(LeaseLost):
            lifecycle.complete_stage(change.context, done(claim), "thief", WALL)

    @pytest.mark.parametrize("stage, attempt", [("text", 0), ("denoise.0", 1), ("nobody", 1)])
    def test_claim_that_cannot_be_current_raises_lease_lost(self, first: Change, stage: str, attempt: int) -> None:
        claim = Claim(first.context.id, stage, attempt, b"token")
        with pytest.raises(LeaseLost):
            lifecycle.complete_stage(first.context, done(claim), "w", WALL)


class TestFailure:
    def test_transient_failure_is_retried_with_exponential_backoff(self, first: Change) -> None:
        change, waits = first, []
        for _ in range(change_builder.BUDGETS["failures"]):
            change = fail(change, "text", "transient")
            assert kinds(change) == ["retrying"]
            waits.append(change.push[0].not_before - NOW)
        assert waits == [0.5, 1.0, 2.0]
        assert (change.push[0].attempt, change.context.stages["text"].failures) == (4, 3)

    def test_fourth_transient_failure_fails_the_request(self, first: Change) -> None:
        change = first
        for _ in range(4):
            change = fail(change, "text", "transient")
        error = change.context.error
        assert error is not None
        assert (error.code, error.stage, error.evidence) == ("stage_failed", "text", "trace")
        assert error.message == "it broke (failed 4 times)"
        assert (change.context.status, names(change), kinds(change)) == ("failed", [], ["failed"])
        assert {state.status for state in change.context.stages.values()} == {"cancelled"}

    def test_permanent_failure_fails_the_request_without_retry(self, first: Change) -> None:
        change = fail(first, "text", "permanent")
        assert change.context.error is not None
        assert (change.context.error.code, change.context.error.message) == ("stage_failed", "it broke")
        assert (change.context.completed_at, change.claim) == (WALL, claim_of(first, "text"))
        assert not change.context.is_dead_letter

    def test_client_error_in_a_stage_fails_with_invalid_parameter(self, first: Change) -> None:
        failed = TaskFailed(claim_of(first, "text"), "permanent", "for another model", reason="refused")
        change = lifecycle.fail_stage(first.context, failed, "w", WALL, NOW, ())
        assert change.context.error is not None
        assert (change.context.error.code, change.context.error.stage) == ("invalid_parameter", "text")

    def test_permanent_lack_of_memory_fails_with_a_code_of_its_own(self, first: Change) -> None:
        failed = TaskFailed(claim_of(first, "text"), "permanent", "too large", reason="out_of_memory")
        change = lifecycle.fail_stage(first.context, failed, "w", WALL, NOW, ())
        assert change.context.error is not None
        assert (change.context.error.code, change.context.is_dead_letter) == ("out_of_memory", False)

    @pytest.mark.parametrize(("has_other", "wait", "avoided"), [(True, 0.0, "w"), (False, 5.0, "")])
    def test_lack_of_memory_beside_other_processes_is_retried_once_elsewhere_or_later(
        self, first: Change, has_other: bool, wait: float, avoided: str
    ) -> None:
        change = first
        for _ in range(2):
            claim = claim_of(change, "text")
            failed = TaskFailed(claim, "transient", "full", reason="out_of_memory", error="OutOfMemory")
            change = lifecycle.fail_stage(change.context, failed, "w", WALL, NOW, (), has_other)
            if change.push:
                assert change.push[0].not_before == (NOW + wait if wait else 0.0)
                assert change.push[0].avoid_worker == avoided
        assert change.context.error is not None
        assert (change.context.error.code, change.context.is_dead_letter) == ("out_of_memory", True)
        assert change.context.stages["text"].attempt == 2

    def test_second_crash_fails_the_request_with_evidence(self, first: Change) -> None:
        once = fail(first, "text", "crash")
        assert (names(once), once.push[0].not_before) == (["text"], 0.0)
        twice = fail(once, "text", "crash")
        assert twice.context.error is not None
        assert (twice.context.error.code, twice.context.error.evidence) == ("compute_crashed", "trace")
        assert twice.context.stages["text"].crashes == 2
        assert twice.context.is_dead_letter

    def test_crash_in_a_batch_is_not_charged_and_the_stage_then_runs_alone(self, first: Change) -> None:
        change = fail(first, "text", "crash", company=True)
        assert (change.push[0].alone, change.push[0].not_before, kinds(change)) == (True, 0.0, ["retrying"])
        assert (change.context.stages["text"].crashes, change.context.stages["image"].alone) == (0, False)
        change = fail(change, "text", "transient")
        assert change.push[0].alone
        change = fail(change, "text", "crash")
        assert (change.context.stages["text"].crashes, change.context.status) == (1, "in_progress")
        assert fail(change, "text", "crash").context.is_dead_letter

    def test_batched_crash_is_charged_to_a_stage_marked_to_run_alone(self, first: Change) -> None:
        change = fail(first, "text", "crash", company=True)
        for _ in range(2):
            change = fail(change, "text", "crash", company=True)
        assert change.context.is_dead_letter

    @pytest.mark.parametrize("kind, lives", [("transient", 4), ("crash", 2), ("object_lost", 4)])
    def test_exhausted_retry_budget_creates_a_dead_letter(self, first: Change, kind: str, lives: int) -> None:
        change = first
        for _ in range(lives):
            assert not change.context.is_dead_letter
            change = fail(change, "text", kind, "unknown")
        assert (change.context.status, change.context.is_dead_letter) == ("failed", True)
        looked_at = lifecycle.clear_dead_letter(change.context)
        assert looked_at is not None
        assert (looked_at.context.is_dead_letter, looked_at.context.version) == (False, change.context.version + 1)
        assert lifecycle.clear_dead_letter(looked_at.context) is None

    def test_failure_kinds_have_separate_retry_budgets(self, first: Change) -> None:
        change = first
        for kind in ("transient", "crash", "transient", "transient"):
            change = fail(change, "text", kind)
        assert change.context.status == "in_progress"

    def test_expired_lease_counts_as_a_failure_and_is_retried_without_delay(self, first: Change) -> None:
        lease = Lease(first.push[0], "w", b"token", NOW)
        change = lifecycle.expire_lease(first.context, lease, WALL)
        assert change is not None
        assert (change.claim, names(change), change.push[0].not_before) == (lease.claim, ["text"], 0.0)
        assert change.context.stages["text"].failures == 1
        assert lifecycle.expire_lease(finish(first, "text").context, lease, WALL) is None

    def test_fail_stage_rejects_a_hand_back(self, first: Change) -> None:
        with pytest.raises(ValueError, match="handed back"):
            fail(first, "text", "hand_back")


class TestLostObjects:
    def test_lost_output_is_recomputed_while_its_consumers_wait(self, first: Change) -> None:
        ready = finish(first, "text", "image")
        change = fail(ready, "denoise.0", "object_lost", "text@1")
        assert names(change) == ["text"]
        assert (change.push[0].attempt, change.context.stages["text"].recomputes) == (2, 1)
        assert [name for name, state in change.context.stages.items() if state.lost_output_id == "text@1"] == ["text"]
        assert change.context.stages["denoise.0"].status == change.context.stages["denoise.1"].status == "waiting"
        assert change.close == ((change.context.id, "denoise.1"),)
        again = finish(change, "text")
        assert names(again) == ["denoise.0", "denoise.1"]
        assert [ref.id for ref in again.push[0].inputs] == ["text@2", "image@1"]
        assert [task.attempt for task in again.push] == [2, 2]

    def test_running_consumer_of_a_lost_output_continues(self, first: Change) -> None:
        ready = finish(first, "text", "image")
        running = tuple(RunningStage(f"denoise.{n}", 1, "w", WALL) for n in (0, 1))
        change = fail(ready, "denoise.0", "object_lost", "text@1", running)
        assert (change.close, change.context.stages["denoise.1"].status) == ((), "queued")
        after = lifecycle.complete_stage(change.context, done(claim_of(ready, "denoise.1")), "w", WALL)
        assert names(after) == ["decode.1"]

    @pytest.mark.parametrize("kind", ["transient", "crash", "object_lost"])
    def test_failed_consumer_of_a_lost_output_waits_for_the_recomputed_one(self, first: Change, kind: str) -> None:
        ready = finish(first, "text", "image")
        running = tuple(RunningStage(f"denoise.{n}", 1, "w", WALL) for n in (0, 1))
        lost = fail(ready, "denoise.0", "object_lost", "text@1", running)
        change = fail(msgspec.structs.replace(lost, push=ready.push), "denoise.1", kind, "text@1")
        assert (names(change), change.context.stages["denoise.1"].status) == ([], "waiting")
        assert change.context.stages["denoise.1"].recomputes == 0
        again = finish(msgspec.structs.replace(change, push=lost.push), "text")
        assert names(again) == ["denoise.0", "denoise.1"]
        assert all(len(task.inputs) == 2 for task in again.push)

    def test_loss_report_for_a_replaced_output_is_not_charged(self, first: Change) -> None:
        ready = finish(first, "text", "image")
        running = tuple(RunningStage(f"denoise.{n}", 1, "w", WALL) for n in (0, 1))
        lost = fail(ready, "denoise.0", "object_lost", "text@1", running, wall=WALL + 1)
        made = finish(lost, "text")
        change = fail(msgspec.structs.replace(made, push=ready.push), "denoise.1", "object_lost", "text@1")
        assert (names(change), change.context.stages["denoise.1"].recomputes) == (["denoise.1"], 0)
        assert [ref.id for ref in change.push[0].inputs] == ["text@2", "image@1"]

    def test_loss_report_for_an_older_output_does_not_rerun_the_producer(self, first: Change) -> None:
        ready = finish(first, "text", "image")
        change = fail(ready, "denoise.0", "object_lost", "text@0")
        assert (names(change), change.close) == (["denoise.0"], ())
        assert [ref.id for ref in change.push[0].inputs] == ["text@1", "image@1"]
        assert change.context.stages["text"].status == "done"

    def test_lost_input_of_a_recomputed_stage_is_recomputed_too(self, first: Change) -> None:
        ready = finish(first, "text", "image", "denoise.0")
        lost = fail(ready, "decode.0", "object_lost", "denoise.0@1")
        assert names(lost) == ["denoise.0"]
        deeper = fail(lost, "denoise.0", "object_lost", "image@1")
        assert names(deeper) == ["image"]
        back = finish(deeper, "image", "denoise.0", "decode.0")
        assert back.context.stages["decode.0"].status == "done"

    def test_fourth_loss_of_an_output_fails_the_request_as_object_lost(self, first: Change) -> None:
        change = finish(first, "text", "image")
        for attempt in range(1, 4):
            change = finish(fail(change, "denoise.0", "object_lost", f"text@{attempt}"), "text")
        assert change.context.stages["text"].recomputes == 3
        change = fail(change, "denoise.0", "object_lost", "text@4")
        assert change.context.error is not None
        assert (change.context.status, change.context.error.code) == ("failed", "object_lost")
        assert change.context.is_dead_letter

    def test_repeated_loss_reports_of_unknown_objects_fail_the_request(self, first: Change) -> None:
        change = finish(first, "text", "image")
        for _ in range(4):
            change = fail(change, "denoise.0", "object_lost", "nobody's")
        assert change.context.error is not None
        assert (change.context.status, change.context.error.stage) == ("failed", "denoise.0")


class TestTheEnd:
    def test_cancel_ends_the_request_and_its_unfinished_stages(self, first: Change) -> None:
        change = lifecycle.cancel(finish(first, "text").context, WALL)
        assert change is not None
        assert (change.context.status, change.context.completed_at, kinds(change)) == ("cancelled", WALL, ["cancelled"])
        assert not change.context.is_dead_letter
        assert change.context.stages["text"].status == "done"
        assert change.context.stages["image"].status == "cancelled"

    def test_passed_deadline_expires_the_request_with_a_failed_event(self, first: Change) -> None:
        change = deadlines.expire_deadline(first.context, WALL)
        assert change is not None
        assert change.context.error is not None
        assert (change.context.status, change.context.error.code, kinds(change)) == ("expired", "expired", ["failed"])
        assert change.events[0].message == change.context.error.message

    def test_expired_request_names_the_stage_that_waited_and_how_long(self, first: Change) -> None:
        waiting = finish(first, "text").context
        change = deadlines.expire_deadline(waiting, WALL + 12)
        assert change is not None and change.context.error is not None
        assert change.context.error.stage == "image"
        assert change.context.error.message == (
            "the request did not complete before its deadline, and stage image has waited 12 s for a worker: "
            "increase its timeout"
        )
        waited = {name: state.timings.queued_s for name, state in change.context.stages.items()}
        assert waited == dict.fromkeys(waited, 0.0) | {"image": 12.0}

        runs = (RunningStage("image", 1, "w", WALL + 5),)
        change = deadlines.expire_deadline(waiting, WALL + 12, running=runs)
        assert change is not None and change.context.error is not None
        assert change.context.error.stage == "image" and " while stage image ran: " in change.context.error.message

    @pytest.mark.parametrize("report_s", [None, 3.0])
    def test_unfinished_stages_keep_the_time_that_they_waited(self, first: Change, report_s: float | None) -> None:
        """Given a request that ends while one stage runs and another waits, then both show the time in the queue, also
        after the last report of the worker."""
        runs = (RunningStage("text", 1, "w", WALL + 5),)
        change = lifecycle.cancel(first.context, WALL + 12, runs)
        assert change is not None
        if report_s is not None:
            stopped = TaskStopped(claim_of(first, "text"), Timings(run_s=report_s, share_s=report_s))
            change = lifecycle.account_stopped(change.context, stopped, "w", WALL + 13)
            assert change is not None
        timings = {name: state.timings for name, state in change.context.stages.items()}
        assert (timings["text"].queued_s, timings["image"].queued_s) == (5.0, 12.0)
        assert timings["text"].share_s == (report_s or 0.0)

    def test_time_limit_counts_run_time_of_a_chain_without_queue_time(self, first: Change) -> None:
        """Given a limit of 10 s, when a stage was leased for 4, waited for an hour and runs for 7, then it is over."""
        limited = msgspec.structs.replace(first, context=_limited(first.context, 10.0))
        text = (RunningStage("text", 1, "w", WALL, ran_s=4.0),)
        once = fail(limited, "text", "transient", running=text, wall=WALL + 4).context
        assert once.stages["text"].leased_s == 4

        def again(text_s: float) -> tuple[RunningStage, ...]:
            return RunningStage("text", 2, "w", WALL, ran_s=text_s), RunningStage(
                "image", 1, "w", WALL, ran_s=text_s + 3
            )

        assert deadlines.enforce_time_limit(once, WALL + 3606, again(6.0)) is None  # 4 + 6 beside 9, not 19
        change = deadlines.enforce_time_limit(once, WALL + 3607, again(7.0))

        assert change is not None
        assert change.context.error is not None
        assert (change.context.status, change.context.error.code) == ("expired", "expired")
        assert "10 s" in change.context.error.message
        assert change.context.error.stage == "text"
        assert deadlines.enforce_time_limit(change.context, WALL + 9999, again(99.0)) is None
        assert deadlines.enforce_time_limit(_limited(once, None), WALL + 9999, again(99.0)) is None

    @pytest.mark.parametrize("status", [name for name, moves in REQUEST_MOVES.items() if not moves])
    def test_ended_request_does_not_change(self, first: Change, status: Any) -> None:
        over = msgspec.structs.replace(first.context, status=status)
        assert lifecycle.cancel(over, WALL) is None
        assert deadlines.expire_deadline(over, WALL) is None
        assert lifecycle.expire_lease(over, Lease(first.push[0], "w", b"token", NOW), WALL) is None
        with pytest.raises(LeaseLost):
            lifecycle.complete_stage(over, done(claim_of(first, "text")), "w", WALL)
        with pytest.raises(LeaseLost):
            lifecycle.fail_stage(over, TaskFailed(claim_of(first, "text"), "crash", ""), "w", WALL, NOW)


@pytest.mark.parametrize("old", TASK_MOVES)
@pytest.mark.parametrize("new", TASK_MOVES)
def test_change_builder_allows_only_listed_stage_transitions(old: Any, new: Any) -> None:
    context = msgspec.structs.replace(request_for(PICTURE), stages={"text": StageState(old)})
    made = change_builder.ChangeBuilder(context, WALL)
    if new in TASK_MOVES[old]:
        made.move_stage("text", new)
        assert made.stages["text"].status == new
    else:
        with pytest.raises(IllegalMove, match=f"stage text cannot change from {old} to {new}"):
            made.move_stage("text", new)


def test_ending_an_ended_request_raises_illegal_move(first: Change) -> None:
    over = msgspec.structs.replace(first.context, status="completed")
    with pytest.raises(IllegalMove, match="from completed to failed"):
        change_builder.ChangeBuilder(over, WALL).end_request("failed")


class Walk:
    """A request that random things happen to, with its tasks in a plain dict."""

    def __init__(self, context: RequestContext, dice: random.Random) -> None:
        self.dice = dice
        admitted = lifecycle.admit(context, WALL)
        self.context = admitted.context
        self.tasks: dict[str, Task] = {task.stage: task for task in admitted.push}

    def step(self, trouble: float, announces: float) -> None:
        task = self.dice.choice(sorted(self.tasks.values(), key=lambda task: task.stage))
        claim = Claim(task.request, task.stage, task.attempt, bytes([self.dice.randrange(256)]) * 16)
        if not task.planned.final and self.dice.random() < announces:
            return self.announce(claim)
        if self.dice.random() >= trouble:
            files = (ResultFile(task.params.get("index", 0), "image/png", 1, "h"),) if task.planned.final else ()
            report = TaskCompleted(claim, None if task.planned.final else object_for(task), files, Timings())
            return self.take(lifecycle.complete_stage(self.context, report, "w", WALL))
        kind = self.dice.choice(["transient", "crash", "object_lost", "object_lost"])
        lost = self.dice.choice(task.inputs).id if task.inputs else "unknown"
        return self.take(lifecycle.fail_stage(self.context, TaskFailed(claim, kind, "", "", lost), "w", WALL, NOW))

    def announce(self, claim: Claim) -> None:
        """Have a task's output read from now on, or have the task go back, if it is read already."""
        running = [RunningStage(claim.stage, claim.attempt, "w", WALL)]
        news = OutputAnnounced(claim, object_for(claim))
        change = lifecycle.announce_output(self.context, news, "w", WALL, running)
        if change is None:
            change = lifecycle.hand_back(self.context, claim, "w", WALL, running)
        assert change
        self.take(change)

    def take(self, change: Change) -> None:
        for name, state in change.context.stages.items():
            assert reachable(self.context.stages[name].status, state.status)
            assert state.attempt >= self.context.stages[name].attempt
        assert change.context.version == self.context.version + 1
        reported = [change.claim.stage] if change.claim else []
        for stage in (*reported, *(key[1] for key in change.close)):
            del self.tasks[stage]
        for task in change.push:
            assert task.stage not in self.tasks
            planned = change.context.plan.stage(task.stage)
            assert [ref.stage for ref in task.inputs] == list(planned.after)
            assert all(ref == change.context.stages[ref.stage].output for ref in task.inputs)
            self.tasks[task.stage] = task
        self.context = change.context


def reachable(old: str, new: str, moves: int = 3) -> bool:
    return old == new or (moves > 0 and any(reachable(step, new, moves - 1) for step in TASK_MOVES[old]))


@settings(deadline=None, max_examples=examples(60))
@given(
    pipelines(),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([0.0, 0.3, 0.6]),
)
def test_every_request_ends_after_random_outcomes(
    pipeline: Pipeline, samples: int, dice: random.Random, trouble: float, announces: float
) -> None:
    """Whatever happens to its stages in whatever order; without trouble it completes after one task a stage."""
    walk = Walk(request_for(pipeline, samples), dice)
    steps = 0
    while not walk.context.is_over:
        assert walk.tasks, "a request that is not over must have a task"
        walk.step(trouble, announces)
        steps += 1
    context = walk.context
    assert all(state.output is None and state.status in ("done", "cancelled") for state in context.stages.values())
    if trouble == 0.0:
        assert context.status == "completed"
        assert announces or steps <= len(context.plan.stages)
    if context.status == "completed":
        finals = [stage for stage in context.plan.stages if stage.final]
        assert sorted(file.index for file in context.result) == [file.index for file in context.result]
        assert len(context.result) == len(finals)


class TestWhatAnAttemptHasUsed:
    """Each attempt is counted once."""

    def used(self, claim: Claim, seconds: float) -> list[RunningStage]:
        return [
            RunningStage(claim.stage, claim.attempt, "w", WALL, 1, 4, timings=Timings(share_s=seconds, device="cpu"))
        ]

    def test_repeated_hand_back_is_accounted_once(self, first: Change) -> None:
        """The queue was away when the lease was to end."""
        claim = claim_of(first, "text")
        running = self.used(claim, 2.0)
        back = lifecycle.hand_back(first.context, claim, "w", WALL, running)
        assert back
        assert lifecycle.hand_back(back.context, claim, "w", WALL, running) is None
        lease = Lease(next(task for task in first.push if task.stage == "text"), "w", claim.token, NOW)
        expired = lifecycle.expire_lease(back.context, lease, WALL, running)
        assert expired
        state = expired.context.stages["text"]
        assert (state.lost_s, state.attempts_started, state.attempt) == ({"cpu": 2.0}, 1, 2)

    def test_hand_back_of_an_unstarted_task_is_not_an_attempt(self, first: Change) -> None:
        claim = claim_of(first, "text")
        unused = [RunningStage(claim.stage, claim.attempt, "w", WALL)]
        back = lifecycle.hand_back(first.context, claim, "w", WALL + 1, unused)
        assert back
        state = back.context.stages["text"]
        assert (state.attempts_started, state.attempts_not_started, state.lost_s, back.context.started_at) == (
            0,
            1,
            {},
            WALL,
        )
        assert lifecycle.hand_back(back.context, claim, "w", WALL, unused) is None

    def test_the_start_is_recorded_while_the_first_stage_runs(self, first: Change) -> None:
        running = self.used(claim_of(first, "text"), 2.0)
        begun = lifecycle.record_start(first.context, running)
        assert begun
        assert (begun.context.started_at, begun.context.version) == (WALL, first.context.version + 1)
        assert (begun.claim, begun.push, begun.close, begun.events) == (None, (), (), ())
        assert lifecycle.record_start(begun.context, running) is None
        assert lifecycle.record_start(first.context, ()) is None

    def test_seconds_of_a_lost_output_are_not_billed(self, first: Change) -> None:
        claim = claim_of(first, "text")
        made = TaskCompleted(claim, object_for(claim), (), Timings(share_s=3.0, device="cpu"))
        ready = lifecycle.complete_stage(finish(first, "image").context, made, "w", WALL)
        assert ready.context.stages["text"].timings.share_s == 3.0
        lost = fail(ready, "denoise.0", "object_lost", object_for(claim).id)
        state = lost.context.stages["text"]
        assert (state.timings, state.lost_s) == (Timings(), {"cpu": 3.0})


class TestAnnouncing:
    """A running stage's output, read while it is written."""

    @staticmethod
    def news(claim: Claim, id: str = "early") -> OutputAnnounced:
        return OutputAnnounced(claim, object_for(claim, id))

    @staticmethod
    def running(*claims: Claim) -> list[RunningStage]:
        return [RunningStage(claim.stage, claim.attempt, "w", WALL) for claim in claims]

    def begun(self, first: Change) -> tuple[Change, Claim, list[Claim]]:
        """With one denoiser of two announced: that, its claim, and those of its readers."""
        ready = finish(first, "text", "image")
        claim = claim_of(ready, "denoise.0")
        change = lifecycle.announce_output(ready.context, self.news(claim), "w", WALL, self.running(claim))
        assert change
        return change, claim, [claim_of(change, "decode.0")]

    def test_announced_output_queues_its_consumers_and_retains_the_lease(self, first: Change) -> None:
        change, claim, _ = self.begun(first)
        assert (change.claim, change.close, names(change)) == (None, (), ["decode.0"])
        assert change.push[0].inputs == (object_for(claim, "early"),)
        assert {name: state.status for name, state in change.context.stages.items()} == {
            "text": "done",
            "image": "done",
            "denoise.0": "announced",
            "denoise.1": "queued",
            "decode.0": "queued",
            "decode.1": "waiting",
        }
        again = lifecycle.announce_output(change.context, self.news(claim), "w", WALL, self.running(claim))
        assert again is None

    def test_announcing_an_output_without_its_lease_raises_lease_lost(self, first: Change) -> None:
        ready = finish(first, "text", "image")
        claim = claim_of(ready, "denoise.0")
        other = msgspec.structs.replace(claim, attempt=claim.attempt + 1)
        for news, worker, running in (
            (self.news(claim), "w", []),
            (self.news(claim), "thief", self.running(claim)),
            (OutputAnnounced(claim, object_for(other, "early")), "w", self.running(claim)),
        ):
            with pytest.raises(LeaseLost):
                lifecycle.announce_output(ready.context, news, worker, WALL, running)
        done_already = finish(ready, "denoise.0")
        with pytest.raises(LeaseLost):
            lifecycle.announce_output(done_already.context, self.news(claim), "w", WALL, self.running(claim))

    def test_announced_stage_is_completed_normally(self, first: Change) -> None:
        change, claim, _ = self.begun(first)
        whole = lifecycle.complete_stage(
            change.context, TaskCompleted(claim, object_for(claim, "early"), (), Timings()), "w", WALL
        )
        assert (whole.claim, whole.push, whole.close) == (claim, (), ())
        assert whole.context.stages["denoise.0"].status == "done"

    @pytest.mark.parametrize("how", ["transient", "crash", "expired", "handed back"])
    def test_restarted_announced_stage_withdraws_its_consumers(self, first: Change, how: str) -> None:
        change, claim, (reader,) = self.begun(first)
        if how == "expired":
            task = next(task for task in finish(first, "text", "image").push if task.stage == claim.stage)
            lease = Lease(task, "w", claim.token, NOW)
            back = lifecycle.expire_lease(change.context, lease, WALL, self.running(claim, reader))
        elif how == "handed back":
            back = lifecycle.hand_back(change.context, claim, "w", WALL, self.running(claim, reader))
        else:
            failed = TaskFailed(claim, how, "it broke")  # type: ignore[arg-type]
            back = lifecycle.fail_stage(change.context, failed, "w", WALL, NOW, self.running(claim, reader))
        assert back
        assert back.close == ((claim.request, "decode.0"),)
        states = back.context.stages
        assert (states["denoise.0"].status, states["denoise.0"].output) == ("queued", None)
        assert (states["decode.0"].status, states["decode.0"].failures, states["decode.0"].recomputes) == (
            "waiting",
            0,
            0,
        )
        assert names(back) == ([] if how == "handed back" else ["denoise.0"])

    def test_usage_of_a_withdrawn_consumer_counts_as_lost(self, first: Change) -> None:
        change, claim, (reader,) = self.begun(first)
        used = Timings(share_s=2.0, device="cpu")
        running = [msgspec.structs.replace(run, timings=used) for run in self.running(claim, reader)]
        back = lifecycle.fail_stage(change.context, TaskFailed(claim, "transient", "it broke"), "w", WALL, NOW, running)
        state = back.context.stages["decode.0"]
        assert (state.lost_s, back.context.stages["denoise.0"].lost_s) == ({"cpu": 2.0}, {"cpu": 2.0})

        last = TaskStopped(reader, Timings(share_s=2.5, device="cpu"))
        told = lifecycle.account_stopped(back.context, last, "w", WALL)
        assert told
        assert told.context.stages["decode.0"].lost_s == {"cpu": 2.5}
        assert lifecycle.account_stopped(told.context, last, "w", WALL) is None

    def test_consumer_of_an_unreadable_announced_output_waits_uncharged(self, first: Change) -> None:
        """Its maker may be about to be told dead, or the way to it is cut: nobody is charged, and it goes on."""
        change, claim, (reader,) = self.begun(first)
        lost = TaskFailed(reader, "object_lost", "it is gone", object_id="early")
        back = lifecycle.fail_stage(change.context, lost, "v", WALL, NOW, self.running(claim))
        states = back.context.stages
        assert (states["denoise.0"].status, states["decode.0"].status) == ("queued", "waiting")
        assert (states["denoise.0"].recomputes, states["decode.0"].recomputes, back.push) == (0, 0, ())
        whole = lifecycle.complete_stage(back.context, done(claim), "w", WALL)
        assert names(whole) == ["decode.0"]

    @pytest.mark.parametrize("who", ["maker", "reader"])
    def test_withdrawing_a_consumer_withdraws_its_own_consumers(self, who: str) -> None:
        """A row of stages in which two are read while they are written: with the first, the third goes back."""
        chain = Pipeline(
            tuple(
                StageSpec(name, "denoise", ("d",), (value,) if value else (), (made,) if made else ())
                for name, value, made in (("first", "", "x"), ("second", "x", "y"), ("third", "y", ""))
            )
        )
        change = lifecycle.admit(request_for(chain), WALL)
        claims: list[Claim] = []
        for stage in ("first", "second"):
            claims.append(claim_of(change, stage))
            read = lifecycle.announce_output(
                change.context, self.news(claims[-1], stage), "w", WALL, self.running(*claims)
            )
            assert read
            change = read
        claims.append(claim_of(change, "third"))
        blamed = claims[0] if who == "maker" else claims[1]
        failed = TaskFailed(blamed, "transient" if who == "maker" else "object_lost", "it broke", object_id="first")
        back = lifecycle.fail_stage(change.context, failed, "w", WALL, NOW, self.running(*claims))
        states = back.context.stages
        assert [(states[name].status, states[name].output) for name in ("first", "second", "third")] == [
            ("queued", None),
            ("waiting", None),
            ("waiting", None),
        ]
        gone = {key[1] for key in back.close} | {blamed.stage}
        assert gone >= {"second", "third"}

    def test_request_can_complete_before_its_announced_stage_reports(self, first: Change) -> None:
        change, claim, (reader,) = self.begun(first)
        half = finish(
            msgspec.structs.replace(change, push=(*finish(first, "text", "image").push, *change.push)),
            "denoise.1",
            "decode.1",
        )
        over = lifecycle.complete_stage(half.context, done(reader, 0), "w", WALL)
        assert (over.context.status, over.context.stages["denoise.0"].status) == ("completed", "cancelled")
        with pytest.raises(LeaseLost):
            lifecycle.complete_stage(over.context, done(claim), "w", WALL)


class TestCheckpoints:
    """A running stage's state, kept for a later attempt."""

    @staticmethod
    def running(claim: Claim, worker: str = "w") -> RunningStage:
        return RunningStage(claim.stage, claim.attempt, worker, WALL)

    @pytest.fixture
    def denoising(self, first: Change) -> tuple[RequestContext, Claim]:
        ready = finish(first, "text", "image")
        return ready.context, claim_of(ready, "denoise.0")

    def test_checkpoint_is_recorded_without_other_changes(self, denoising: tuple[RequestContext, Claim]) -> None:
        context, claim = denoising
        ref = object_for(claim, "kept")
        change = lifecycle.save_checkpoint(context, CheckpointSaved(claim, ref, 10), "w", [self.running(claim)])
        assert change is not None
        assert (change.claim, change.push, change.close, change.events) == (None, (), (), ())
        state = change.context.stages["denoise.0"]
        assert (state.status, state.checkpoint, state.checkpoint_step) == ("queued", ref, 10)
        assert change.context.version == context.version + 1
        others = change.context.stages | {"denoise.0": context.stages["denoise.0"]}
        assert msgspec.structs.replace(change.context, version=context.version, stages=others) == context

    def test_newest_checkpoint_is_retained_and_a_repeat_is_ignored(
        self, denoising: tuple[RequestContext, Claim]
    ) -> None:
        context, claim = denoising
        for step, recorded in ((10, True), (10, False), (5, False), (20, True)):
            change = lifecycle.save_checkpoint(
                context, CheckpointSaved(claim, object_for(claim, f"at {step}"), step), "w"
            )
            assert (change is not None) == recorded, step
            context = change.context if change else context
        assert context.stages["denoise.0"].checkpoint_step == 20

    def test_checkpoint_of_a_newer_attempt_replaces_a_later_step(self, denoising: tuple[RequestContext, Claim]) -> None:
        """Given a checkpoint that could not be read, when the next attempt has come less far, then its own counts."""
        context, claim = denoising
        change = lifecycle.save_checkpoint(context, CheckpointSaved(claim, object_for(claim, "lost"), 50), "w")
        assert change is not None
        again = msgspec.structs.replace(claim, attempt=2)
        change = lifecycle.save_checkpoint(change.context, CheckpointSaved(again, object_for(again, "kept"), 20), "w")
        assert change is not None
        state = change.context.stages["denoise.0"]
        assert (state.checkpoint, state.checkpoint_step) == (object_for(again, "kept"), 20)

    @pytest.mark.parametrize("wrong", ["worker", "attempt", "over", "object", "done"])
    def test_checkpoint_of_a_stage_that_is_not_running_raises_lease_lost(
        self, wrong: str, denoising: tuple[RequestContext, Claim]
    ) -> None:
        context, claim = denoising
        ref, worker = object_for(claim, "kept"), "other" if wrong == "worker" else "w"
        if wrong == "attempt":
            claim = msgspec.structs.replace(claim, attempt=0)
        elif wrong == "object":
            ref = msgspec.structs.replace(ref, stage="denoise.1")
        elif wrong == "done":
            context = lifecycle.complete_stage(context, done(claim), "w", WALL).context
        elif wrong == "over":
            change = lifecycle.cancel(context, WALL)
            assert change is not None
            context = change.context
        with pytest.raises(LeaseLost):
            lifecycle.save_checkpoint(
                context, CheckpointSaved(claim, ref, 10), worker, [self.running(claim)] if wrong == "worker" else []
            )

    @pytest.mark.parametrize("end", ["transient", "crash", "expired", "done", "cancelled"])
    def test_checkpoint_lasts_until_the_stage_or_request_ends(
        self, end: str, denoising: tuple[RequestContext, Claim]
    ) -> None:
        context, claim = denoising
        change = lifecycle.save_checkpoint(context, CheckpointSaved(claim, object_for(claim, "kept"), 10), "w")
        assert change is not None
        context = change.context
        task = task_of(context.id, "denoise.0", 1, "p", "denoise", "m", {})
        after = {
            "transient": lambda: lifecycle.fail_stage(context, TaskFailed(claim, "transient", "x"), "w", WALL, NOW),
            "crash": lambda: lifecycle.fail_stage(context, TaskFailed(claim, "crash", "x"), "w", WALL, NOW),
            "expired": lambda: lifecycle.expire_lease(context, Lease(task, "w", claim.token, 0.0), WALL),
            "done": lambda: lifecycle.complete_stage(context, done(claim), "w", WALL),
            "cancelled": lambda: lifecycle.cancel(context, WALL),
        }[end]()
        assert after is not None
        kept = after.context.stages["denoise.0"].checkpoint is not None
        assert kept == (end not in ("done", "cancelled"))


@pytest.mark.parametrize("cancel_on_disconnect", [True, False])
def test_client_disconnect_cancels_only_requests_with_cancel_on_disconnect(cancel_on_disconnect: bool) -> None:
    context = lifecycle.admit(request_for(PICTURE, cancel_on_disconnect=cancel_on_disconnect), WALL).context
    change = lifecycle.disconnect_client(context, WALL)
    if not cancel_on_disconnect:
        assert change is None
        return
    assert change is not None
    assert (change.context.status, change.context.is_dead_letter) == ("cancelled", False)
    assert change.context.error == ErrorInfo("cancelled", "its client disconnected")
    assert [event.type for event in change.events] == ["cancelled"]
    assert lifecycle.disconnect_client(change.context, WALL) is None


def _limited(context: RequestContext, seconds: float | None) -> RequestContext:
    request = msgspec.structs.replace(context.request, time_limit_s=seconds)
    return msgspec.structs.replace(context, request=request)
