"""Requests, tasks, cards, errors and clocks: what holds for all of them."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing

import msgspec
import pytest

import unfuse.core
from unfuse.core import errors
from unfuse.core.modalities import VIDEO
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import ExecutionPlan, Pipeline, PlannedStage, StageSelector, StageSpec
from unfuse.core.request import (
    REQUEST_MOVES,
    TERMINAL,
    TERMINAL_EVENTS,
    Caller,
    Delivery,
    EventType,
    GenerationRequest,
    RequestContext,
    RequestStatus,
    StageState,
    new_request_id,
)
from unfuse.core.task import TASK_MOVES, Claim, Lease, TaskStatus
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import request_context, task_of

MODULES = [importlib.import_module(f"unfuse.core.{found.name}") for found in pkgutil.iter_modules(unfuse.core.__path__)]
BACKGROUND = {f"unfuse.core.{name}" for name in ("observers", "own_thread", "supervisor", "time_budget")}
"""Tasks and threads in the background, which need an event loop."""
STRUCTS = {
    found
    for module in MODULES
    for found in vars(module).values()
    if inspect.isclass(found) and issubclass(found, msgspec.Struct) and found is not msgspec.Struct
}
ERRORS = [found for found in vars(errors).values() if inspect.isclass(found)]


@pytest.mark.slow
def test_core_modules_import_neither_torch_nor_asyncio_nor_servers() -> None:
    """A process that imports the nouns and rules has neither torch nor asyncio nor a server."""
    names = ", ".join(module.__name__ for module in MODULES if module.__name__ not in BACKGROUND)
    code = f"import sys, {names}; print({{'torch', 'asyncio', 'socket', 'zmq', 'fastapi', 'numpy'}} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert shown == "set()\n"


@pytest.mark.parametrize("kind", sorted(STRUCTS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_core_struct_is_frozen(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


def test_request_context_does_not_duplicate_fields_of_its_parts() -> None:
    """What was asked for, by whom and how it is delivered are structs of their own; no fact has two homes."""
    own = {*RequestContext.__struct_fields__}
    assert len(own) <= 18
    assert {"request", "caller", "delivery", "plan", "stages", "version"} <= own
    assert own.isdisjoint({*GenerationRequest.__struct_fields__, *Caller.__struct_fields__})
    assert own & {*Delivery.__struct_fields__} == {"webhook"}  # the address; and how far its call has come
    assert {*StageState.__struct_fields__}.isdisjoint(PlannedStage.__struct_fields__)


@pytest.mark.parametrize("status", typing.get_args(RequestStatus))
def test_request_is_over_exactly_in_terminal_statuses(status: RequestStatus) -> None:
    context = request_context(GenerationRequest("r", "m", {}), ExecutionPlan(()), status=status)
    assert context.is_over == (status in TERMINAL) == (not REQUEST_MOVES[status])


@pytest.mark.parametrize(
    "moves, statuses", [(REQUEST_MOVES, typing.get_args(RequestStatus)), (TASK_MOVES, typing.get_args(TaskStatus))]
)
def test_status_transition_tables_cover_every_status(
    moves: dict[str, frozenset[str]], statuses: tuple[str, ...]
) -> None:
    assert tuple(moves) == statuses
    assert frozenset().union(*moves.values()) <= set(statuses)


def test_terminal_events_are_event_types() -> None:
    assert set(typing.get_args(EventType)) > TERMINAL_EVENTS


def test_request_ids_are_unique_and_prefixed_by_modality() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(name.startswith("req_") and len(name) == 4 + 32 for name in ids)
    assert new_request_id(VIDEO).startswith("video_")


def test_claim_of_a_lease_has_its_attempt_and_token() -> None:
    task = task_of("r", "s", 3, "p", "k", "m", {})
    lease = Lease(task, "w", b"token", 9.0)
    assert lease.claim == Claim("r", "s", 3, b"token")
    assert lease.claim.key == task.key == ("r", "s")


def test_model_spec_returns_the_pools_of_selected_stages() -> None:
    stages = (
        StageSpec("text", "text_encode", ("t",), (), ("e",), role="encoder"),
        StageSpec("decode", "vae_decode", ("v",), ("e",), role="decoder"),
    )
    weights, dtypes = {"t": "a" * 64, "v": "b" * 64}, {"t": "bfloat16", "v": "float32"}
    card = ModelSpec("m", "/m", "f", Pipeline(stages), {}, {}, weights, dtypes, classes={"t": "T5"})
    assert card.pools() == {
        "text": f"text_encode:T5:{'a' * 12}:bfloat16",
        "decode": f"vae_decode::{'b' * 12}:float32",
    }
    assert list(card.pools(StageSelector(frozenset({"decoder"})))) == ["decode"]
    assert list(card.pools(StageSelector(components=("t",)))) == ["text"]
    assert list(card.pools(StageSelector(frozenset({"decoder"}), ("t",)))) == []


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_class_derives_from_unfuse_error_with_a_docstring(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.UnfuseError)
    assert kind.__doc__


def test_only_listed_error_types_are_transient() -> None:
    again = {kind for kind in ERRORS if issubclass(kind, errors.TransientError)}
    assert again == {
        errors.TransientError,
        errors.ObjectLost,
        errors.ArenaFull,
        errors.ResultsUnavailable,
        errors.KeyUnavailable,
    }
    assert not issubclass(errors.PermanentError, errors.TransientError)


def test_errors_have_machine_readable_attributes() -> None:
    assert errors.InvalidParameter("n is 0", "n").param == "n"
    assert errors.UnknownModel("no", "model").param == "model"
    assert errors.Overloaded("full", 7.0).retry_after == 7.0
    assert errors.ObjectLost("gone", "id").object_id == "id"
    full = errors.ArenaFull(10, 5, 100)
    assert (full.needed, full.free, full.capacity) == (10, 5, 100)
    assert "10 bytes (5 of 100 free)" in str(full)


class TestManualClock:
    def test_manual_clock_moves_only_on_advance(self) -> None:
        clock = ManualClock(now=5.0, wall=100.0)
        assert (clock.now(), clock.wall()) == (5.0, 100.0) == (clock.now(), clock.wall())
        clock.advance(2.5)
        assert (clock.now(), clock.wall()) == (7.5, 102.5)

    def test_manual_clock_alarms_fire_in_order_at_their_time(self) -> None:
        clock, rung = ManualClock(now=0.0), []
        clock.call_at(3.0, lambda: rung.append(("c", clock.now())))
        clock.call_at(1.0, lambda: rung.append(("a", clock.now())))
        clock.call_at(1.0, lambda: rung.append(("b", clock.now())))
        clock.advance(2.0)
        assert rung == [("a", 1.0), ("b", 1.0)]
        clock.advance(1.0)
        assert rung[2:] == [("c", 3.0)]

    def test_manual_clock_alarm_can_set_another_or_be_cancelled(self) -> None:
        clock, rung = ManualClock(now=0.0), []
        take_back = clock.call_at(1.0, lambda: rung.append("never"))
        clock.call_at(1.0, lambda: clock.call_at(2.0, lambda: rung.append("second")))
        take_back()
        clock.advance(2.0)
        assert rung == ["second"]
        take_back()
