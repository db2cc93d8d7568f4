"""SIGTERM amid requests: what runs is saved at its next step, and goes on there after the next start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.chaos.oracle import expected
from tests.disks import small_disk
from tests.integration.test_restarts import installed, variables_of
from tools.followed import Followed
from tools.redis_server import RedisServer
from tools.server import Server, all_gone, family_of, serving, until

STEPS, BUDGET_S = 60, 20.0
LONG = 500  # steps that take longer than the half of the budget for which callers are waited for
PROMPT = "a circle [sleep=0.05@denoise]"
ENDLESS = "a circle [sleep=0.5@denoise]"


@contextmanager
def stopping(folder: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """A server of the fast model whose worker holds six requests, and steps them one after the other.

    Several of them in one folder, one after the other, serve the same model.
    """
    if not (folder / "model").exists():
        installed(folder)
    model, own = variables_of(folder)
    usual = ("--workers", "all=1", "--arena", "16MiB", "--drain-timeout", f"{BUDGET_S:g}", "--slots", "denoiser=6")
    with serving(folder, model, *usual, *flags, **own, **variables) as server:
        yield server.ready()


def stopped(server: Server, *signals: signal.Signals) -> float:
    """Send signals to a server, and wait until all of it has ended well. Returns the seconds that this took."""
    everyone, began = family_of(server.process.pid), time.monotonic()
    for number in signals or [signal.SIGTERM]:
        server.process.send_signal(number)
        time.sleep(0.05 if len(signals) > 1 else 0)
    assert server.process.wait(600) == 0
    took = time.monotonic() - began
    until(lambda: all_gone(everyone), "the processes of the server to end")
    assert "Traceback" not in server.log()
    return took


def stage(shown: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in shown["stages"] if one["name"] == name)
    return dict(found)


def begun(server: Server, count: int = 6, prompt: str = PROMPT, **parameters: Any) -> list[str]:
    """Requests, of which the first has made some steps."""
    asked = {"num_inference_steps": STEPS, **parameters}
    requests = [server.submit(prompt, **{"seed": seed, **asked}) for seed in range(count)]
    until(lambda: server.get(f"/v1/requests/{requests[0]}")["step"] > 2, "some steps", server.process)
    return requests


def saved(folder: Path) -> list[Path]:
    return [path for path in (folder / "copies").rglob("*") if path.is_file()]


@pytest.mark.parametrize("queue", ["sqlite", "redis"])
def test_six_requests_resume_at_their_step_after_sigterm(queue: str, tmp_path: Path) -> None:
    """Given six requests, when the server gets SIGTERM, then it ends within its budget; after the start each goes on at
    the step at which it was, with what its encoder had made, and says when it began and how often."""
    flags, redis = list[str](), None
    if queue == "redis":
        (folder := tmp_path / "redis").mkdir()
        redis = RedisServer(folder)
        flags = ["--queue", redis.url]
    try:
        with stopping(tmp_path, *flags) as server:
            requests = begun(server)
            before = {request: server.get(f"/v1/requests/{request}") for request in requests}
            followed = Followed(server, requests)

            assert stopped(server) <= BUDGET_S

            made = followed.steps()
            server.killed_and_started_again().ready()
            after = [server.finished(request) for request in requests]
            for seed, shown in enumerate(after):
                request, denoise = shown["id"], stage(shown, "denoise.0")
                assert shown["status"] == "completed", shown["error"]
                assert shown["attempts"] == 2 or not denoise["resumed"]
                assert shown["started_at"] == before[request]["started_at"]
                assert denoise["resumed"] >= made[request] - 1, "more than a step was lost"
                assert denoise["resumed"] + denoise["steps"] == STEPS
                assert stage(shown, "encode")["attempt"] == stage(before[request], "encode")["attempt"]
                assert (denoise["failures"], stage(shown, "encode")["recomputes"]) == (0, 0)
                assert server.result(request) == expected(PROMPT, seed, steps=STEPS)
            assert sum(steps > 0 for steps in made.values()) > 0
    finally:
        if redis:
            redis.stop()


@pytest.mark.nightly
def test_checkpoints_are_deleted_when_their_requests_end(tmp_path: Path) -> None:
    """Given a request that is cancelled after the start and one that completes, then nothing saved is left of both."""
    with stopping(tmp_path) as server:
        requests = begun(server, 2)
        stopped(server)
        assert saved(tmp_path)
        server.killed_and_started_again().ready()
        server.post(f"/v1/requests/{requests[0]}/cancel", {})
        assert server.finished(requests[1])["status"] == "completed"
        until(lambda: not saved(tmp_path), "what was saved to be dropped", server.process)


@pytest.mark.nightly
@pytest.mark.parametrize("amid", ["a step", "the loading of models"])
def test_second_sigterm_exits_immediately_and_uses_no_retry_budget(amid: str, tmp_path: Path) -> None:
    """Given steps of half a second, when SIGTERM comes twice, then the server ends long before the step could be
    saved for all, cleanly, and after the start the requests complete, uncharged."""
    model, own = installed(tmp_path)
    with serving(tmp_path, model, "--arena", "16MiB", "--drain-timeout", "600", **own) as server:
        requests = list[str]()
        until(lambda: server.get("/health"), "the gateway", server.process)
        if amid == "a step":
            server.ready()
            requests = begun(server, 2, ENDLESS, num_inference_steps=8)
        assert stopped(server, signal.SIGTERM, signal.SIGTERM) < 30
        server.killed_and_started_again().ready()
        for request in requests:
            shown = server.finished(request)
            denoise = stage(shown, "denoise.0")
            assert (shown["status"], denoise["failures"], denoise["crashes"]) == ("completed", 0, 0)


def picture(server: Server, steps: int, priority: int = 0) -> Any:
    """The answer to a call that waits for its picture."""
    asked = {"prompt": PROMPT, "seed": 1, "num_inference_steps": steps, "priority": priority}
    return server.post("/v1/images/generations", asked)


def reached(server: Server, step: int, call: Future[Any], steps: int) -> dict[str, Any]:
    """Wait until the request of so many steps has made `step` of them; its call may not have ended before."""

    def found() -> Any:
        assert not call.done(), call.exception() or call.result()
        running = (server.get("/v1/requests?status=in_progress") or {"data": []})["data"]
        return next((one for one in running if one["steps"] == steps and one["step"] >= step), None)

    return dict(until(found, f"step {step} of {steps}", server.process))


@pytest.mark.nightly
def test_sigterm_answers_short_sync_call_and_returns_503_for_long_one(tmp_path: Path) -> None:
    """Given two synchronous calls, when the server gets SIGTERM, then the one that is soon over is answered; the other
    one is told that its request goes on, which it does at its step."""
    with ThreadPoolExecutor(2) as callers, stopping(tmp_path) as server:  # calls end with the server
        picture(server, 20)  # by which it is known how long a step takes
        long = callers.submit(picture, server, LONG)
        before = reached(server, 3, long, LONG)
        short = callers.submit(picture, server, STEPS, 10)  # which goes first
        reached(server, STEPS // 2, short, STEPS)
        assert stopped(server) <= BUDGET_S
        assert b64decode(short.result()["data"][0]["b64_json"]) == expected(PROMPT, 1, steps=STEPS)
        refused = raised(long)
        error = json.loads(refused.read())["error"]
        assert (refused.code, error["code"], before["id"] in error["message"]) == (503, "stopping", True)
        assert int(refused.headers["retry-after"]) > 0
        server.killed_and_started_again().ready()
        shown = server.finished(before["id"])
        assert (shown["status"], shown["attempts"]) == ("completed", 2)
        assert stage(shown, "denoise.0")["resumed"] >= before["step"] >= 3
        assert server.result(before["id"]) == expected(PROMPT, 1, steps=LONG)


def raised(call: Future[Any]) -> HTTPError:
    with pytest.raises(HTTPError) as refused:
        call.result()
    return refused.value


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.nightly
@pytest.mark.parametrize("damage", [cut_short, changed, Path.unlink], ids=["truncated", "changed", "gone"])
def test_request_restarts_from_step_0_when_checkpoint_is_damaged(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    with stopping(tmp_path) as server:
        requests = begun(server, 2)
        stopped(server)
        for path in saved(tmp_path):
            damage(path)
        server.killed_and_started_again().ready()
        for seed, request in enumerate(requests):
            shown = server.finished(request)
            assert (shown["status"], stage(shown, "denoise.0")["resumed"]) == ("completed", 0)
            assert server.result(request) == expected(PROMPT, seed, steps=STEPS)


@pytest.mark.nightly
def test_checkpoint_of_other_numerics_is_not_resumed(tmp_path: Path) -> None:
    """Given a start with other settings, which make other bytes, then the request begins again with them."""
    with stopping(tmp_path) as server:
        (request,) = begun(server, 1)
        stopped(server)
    with stopping(tmp_path, "--batching", "batched") as server:
        shown = server.finished(request)
        assert (shown["status"], stage(shown, "denoise.0")["resumed"]) == ("completed", 0)
        assert server.result(request) == expected(PROMPT, 0, steps=STEPS)


@pytest.mark.nightly
def test_checkpoint_larger_than_disk_is_logged_and_request_restarts(tmp_path: Path) -> None:
    """Given states of 1 MB and less room than that, when the server stops, then it ends in time, without half of
    one; with room again the request completes."""
    size = {"width": 1024, "height": 1024}
    with small_disk(tmp_path, 8192) as disk, stopping(tmp_path, "--results", f"disk:{disk}") as server:
        (request,) = begun(server, 1, size="1024x1024")
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 19)))
        assert stopped(server) <= BUDGET_S
        assert "durable copy not written" in server.log() and not saved(disk)
        (disk / "filler").unlink()
        server.killed_and_started_again().ready()
        shown = server.finished(request)
        assert (shown["status"], stage(shown, "denoise.0")["resumed"]) == ("completed", 0)
        assert server.result(request) == expected(PROMPT, 0, steps=STEPS, **size)


@pytest.mark.nightly
def test_sigterm_without_checkpoints_finishes_running_request(tmp_path: Path) -> None:
    """Given `--checkpoint none`, then a request that is over within the budget is finished, and nothing is saved."""
    with stopping(tmp_path, "--checkpoint", "none") as server:
        (request,) = begun(server, 1)
        assert stopped(server) <= BUDGET_S
        server.killed_and_started_again().ready()
        shown = server.finished(request)
        assert (shown["status"], stage(shown, "denoise.0")["resumed"]) == ("completed", 0)
        assert stage(shown, "denoise.0")["attempt"] == 1


@pytest.mark.nightly
def test_built_in_model_image_is_identical_after_restart(tmp_path: Path) -> None:
    """Given 100 steps of the built-in model, when the server restarts amid them, then it goes on at its step, and the
    bytes are those that an undisturbed server makes."""
    asked = {"seed": 3, "num_inference_steps": 100, "size": "64x64"}
    with serving(tmp_path, "--arena", "64MiB", "--drain-timeout", f"{BUDGET_S:g}") as server:
        server.ready()
        undisturbed = server.submit("a red circle on white", **asked)
        assert server.finished(undisturbed)["status"] == "completed"
        (request,) = begun(server, 1, "a red circle on white", **asked)
        assert stopped(server) <= BUDGET_S
        server.killed_and_started_again().ready()
        shown = server.finished(request)
        assert (shown["status"], stage(shown, "denoise.0")["resumed"] > 0) == ("completed", True)
        assert stage(shown, "text_encode")["attempt"] == 0, "what another request had encoded was not kept for it"
        assert server.result(request) == server.result(undisturbed)


@pytest.mark.nightly
def test_sigterm_exits_within_drain_timeout_when_redis_hangs(tmp_path: Path) -> None:
    """Given a Redis that is stopped amid requests, when the server gets SIGTERM, then it ends within its budget, though
    nothing can be recorded; with the Redis again the requests complete."""
    (folder := tmp_path / "redis").mkdir()
    redis = RedisServer(folder)
    try:
        with stopping(tmp_path, "--queue", redis.url) as server:
            requests = begun(server, 2)
            everyone, began = family_of(server.process.pid), time.monotonic()
            os.kill(redis.pid, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(600)
            assert time.monotonic() - began <= BUDGET_S + 1
            until(lambda: all_gone(everyone), "the processes of the server to end")
            os.kill(redis.pid, signal.SIGCONT)
            server.killed_and_started_again().ready()
            for seed, request in enumerate(requests):
                assert server.finished(request)["status"] == "completed"
                assert server.result(request) == expected(PROMPT, seed, steps=STEPS)
    finally:
        os.kill(redis.pid, signal.SIGCONT)
        redis.stop()
