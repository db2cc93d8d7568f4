"""What becomes of a request whose stage fails, by a server with two workers of a model from elsewhere."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.answers.conftest import Serve
from tests.worker import outside
from tools.server import Server, until

URL = "/v1/images/generations"


@pytest.fixture(scope="module")
def server(served: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    model = outside.model(tmp_path_factory.mktemp("outside") / "outside")
    names = "--served-model-name", "outside"
    server = served(str(model), *names, "--workers", "all=2", PYTHONPATH=str(outside.HERE))
    until(lambda: len(server.get("/v1/workers")["data"]) == 2, "both workers to be there")
    return server


def refused(server: Server, prompt: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The status and the error of a call, and the newest request, which it became."""
    with pytest.raises(HTTPError) as error:
        server.post(URL, {"prompt": prompt})
    told = json.loads(error.value.read())["error"]
    return error.value.code, told, server.get("/v1/requests?limit=1")["data"][0]


def is_dead(server: Server, request: dict[str, Any]) -> bool:
    return request["id"] in {one["id"] for one in server.get("/v1/dead")["data"]}


@pytest.mark.row("P29", "K11")
@pytest.mark.parametrize("prompt", ["raise", "later raise"])
def test_unknown_error_is_retried_once_on_another_worker(server: Server, prompt: str) -> None:
    status, error, request = refused(server, prompt)
    assert (status, error["code"]) == (500, "model_error")
    pattern = rf"{request['id']}: failed twice, on (\S+) and (\S+): LookupError: \W*…/weights.bin is not as expected\W*"
    found = re.fullmatch(pattern, error["message"])
    assert found and found[1] != found[2], error["message"]
    assert {found[1], found[2]} == {worker["id"] for worker in server.get("/v1/workers")["data"]}
    assert (request["attempts"], is_dead(server, request)) == (2, True)


@pytest.mark.row("P29", "K11")
def test_invalid_parameter_in_a_stage_returns_400_without_retry(server: Server) -> None:
    status, error, request = refused(server, "refuse")
    assert (status, error["code"]) == (400, "invalid_parameter")
    assert "choose one for this model" in error["message"]
    assert (request["attempts"], is_dead(server, request)) == (1, False)


def test_failing_request_does_not_affect_others_in_its_batch(server: Server) -> None:
    """Given requests that run side by side, of which one fails in its second step, then the others run once."""
    prompts = [f"good {number}" for number in range(6)]
    with ThreadPoolExecutor(7) as pool:
        bad = pool.submit(server.submit, "later raise")
        good = [pool.submit(server.submit, prompt, num_inference_steps=8) for prompt in prompts]
        ended = [server.finished(one.result()) for one in good]
    assert server.finished(bad.result())["error"]["code"] == "model_error"
    assert [one["status"] for one in ended] == ["completed"] * 6
    assert [server.result(one["id"]).decode() for one in ended] == [prompt[::-1] for prompt in prompts]
    assert {stage["failures"] for one in ended for stage in one["stages"]} == {0}


def test_task_that_makes_two_devices_fail_ends_its_request_only(server: Server) -> None:
    status, error, request = refused(server, "fault")
    assert (status, error["code"]) == (500, "compute_crashed")
    assert "CUDA error: an illegal memory access" in error["message"] and is_dead(server, request)
    found = re.search(r"the task made its device fail 2 times, on cpu of (\S+), then cpu of (\S+): ", error["message"])
    assert found and found[1] != found[2], error["message"]
    assert server.finished(server.submit("good"))["status"] == "completed"
    assert [worker["healthy"] for worker in server.get("/v1/workers")["data"]] == [True, True]


@pytest.mark.nightly
def test_missing_file_error_is_retried_within_the_retry_budget(server: Server) -> None:
    status, error, request = refused(server, "lose")
    assert (status, error["code"], request["attempts"]) == (500, "stage_failed", 4)
    assert error["message"].endswith("(failed 4 times)") and "/srv" not in error["message"]
