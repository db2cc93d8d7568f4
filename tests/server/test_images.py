"""Pictures over plain HTTP: accepted, waited for, repeated, refused."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import httpx2
import pytest

from tests.server.served import BROKEN, IDLE, Served, picture
from unfuse.queues.base import RequestFilter

URL = "/v1/images/generations"
ASKED = {"model": "test/pictures", "prompt": "a red circle", "seed": 5}


def ids(served: Served) -> set[str]:
    return {record.context.id for record in served.run(served.queue.list(RequestFilter(), limit=10_000))}


def refused(http: httpx2.Client, body: Any, status: int = 400, **headers: str) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(URL, content=content, headers={"content-type": "application/json", **headers})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return dict(error)


def test_image_generation_returns_the_image_as_base64(http: httpx2.Client) -> None:
    reply = http.post(URL, json=ASKED).json()
    assert base64.b64decode(reply["data"][0]["b64_json"]) == picture(5)
    assert (reply["size"], reply["output_format"], reply["data"][0]["seed"]) == ("64x64", "png", 5)
    assert reply["usage"]["total_tokens"] == 0
    assert reply["id"].startswith("req_")


def test_images_of_one_request_use_consecutive_seeds(http: httpx2.Client) -> None:
    reply = http.post(URL, json={**ASKED, "n": 3}).json()
    assert [base64.b64decode(one["b64_json"]) for one in reply["data"]] == [picture(5), picture(6), picture(7)]
    assert [one["seed"] for one in reply["data"]] == [5, 6, 7]


def test_result_url_returns_the_image(http: httpx2.Client) -> None:
    reply = http.post(URL, json={**ASKED, "response_format": "url", "output_format": "webp"}).json()
    answer = http.get(reply["data"][0]["url"])
    assert answer.headers["content-type"] == "image/webp"
    assert answer.content == picture(5, form="webp")


def test_missing_seed_is_random_and_reported(http: httpx2.Client) -> None:
    asked = {"model": "test/pictures", "prompt": "a"}
    seeds = {http.post(URL, json={**asked, "response_format": "url"}).json()["data"][0]["seed"] for _ in range(3)}
    assert len(seeds) > 1


def test_respond_async_returns_202_with_the_request_object(http: httpx2.Client) -> None:
    response = http.post(URL, json={"model": IDLE.name, "prompt": "a", "seed": 3}, headers={"prefer": "respond-async"})
    view = response.json()
    assert response.status_code == 202
    assert response.headers["preference-applied"] == "respond-async"
    assert response.headers["location"].endswith(f"/v1/requests/{view['id']}")
    assert (view["object"], view["status"], view["seed"], view["model"]) == ("request", "queued", 3, IDLE.name)
    assert (view["progress"], view["stage"], view["result"], view["error"]) == (0, None, [], None)
    assert [stage["name"] for stage in view["stages"]] == ["text_encode", "denoise.0", "vae_decode.0"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"model": "nope"}, "model", "one of test/idle, test/pictures"),
        ({"size": "100x100"}, "size", "the nearest is 96x96"),
        ({"num_inference_steps": 0}, "num_inference_steps", "1 to 100, not 0"),
        ({"num_inference_steps": 10**9}, "num_inference_steps", "1 to 100, not 1000000000"),
        ({"num_inference_steps": "many"}, "num_inference_steps", "'many'"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "0 to 100, not nan"),
        ({"guidance_scale": "nan"}, "guidance_scale", "'nan'"),
        ({"prompt": "x" * 1_000_000}, "prompt", "1 to 2000 characters long, not 1000000"),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"\ud800": 1}, "\\ud800", "unknown parameter"),
        ({"n": True}, "n", "true"),
        ({"num_frames": 5}, "num_frames", "must be 1, not 5"),
        ({"stream": "yes"}, "stream", "true, false"),
        ({"partial_images": 2}, "partial_images", "set stream to true"),
        ({"stream": True, "partial_images": 4}, "partial_images", "0 to 3, not 4"),
        ({"stream": True, "partial_images": 1, "preview_every": 1}, "partial_images", "send one of them"),
        ({"preview_every": 5}, "preview_every", "0 to 4, not 5"),
        ({"seconds": 1}, "seconds", "unknown parameter"),
        ({"image": "data:image/png;base64,AAAA"}, "image", "unknown parameter"),
        ({"output_format": "mp4"}, "output_format", "png, jpeg, webp"),
        ({"response_format": "file"}, "response_format", "b64_json, url"),
        ({"stepps": 3}, "stepps", "did you mean"),
    ],
)
def test_invalid_parameters_are_rejected_before_anything_is_queued(
    served: Served, http: httpx2.Client, change: dict[str, Any], param: str, says: str
) -> None:
    before = ids(served)
    error = refused(http, {**ASKED, **change}, 404 if param == "model" else 400)
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert ids(served) == before


def test_unknown_model_returns_404_model_not_found(http: httpx2.Client) -> None:
    for path in (URL, "/v1/videos"):
        response = http.post(path, json={**ASKED, "model": "nope"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    shown = http.get("/v1/models/nope")
    assert (shown.status_code, shown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("quality", ["low", "medium", "standard", "high", "hd"])
def test_response_reports_the_quality_and_background_used(http: httpx2.Client, quality: str) -> None:
    reply = http.post(URL, json={**ASKED, "quality": quality, "background": "opaque"}).json()

    assert (reply["quality"], reply["background"]) == ("auto", "opaque")
    assert base64.b64decode(reply["data"][0]["b64_json"]) == picture(5)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"3", b'{"prompt": "a"', b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"1" * 5000 + b"}"],
    ids=["empty", "cut", "list", "null", "number", "half", "other", "deep", "long"],
)
def test_body_that_is_not_a_json_object_returns_400(http: httpx2.Client, body: bytes) -> None:
    assert refused(http, body)["code"] == "invalid_parameter"


def test_unsupported_content_type_returns_415(http: httpx2.Client) -> None:
    response = http.post(URL, content=json.dumps(ASKED), headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "gzip, br", "identity,GZIP"])
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
def test_compressed_body_returns_415(http: httpx2.Client, kind: str, coding: str) -> None:
    headers = {"content-type": kind, "content-encoding": coding}
    response = http.post("/v1/images/edits", content=gzip.compress(json.dumps(ASKED).encode()), headers=headers)
    assert response.status_code == 415
    assert "without Content-Encoding" in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "identity"


def test_oversized_body_returns_413(http: httpx2.Client) -> None:
    response = http.post(URL, json={**ASKED, "prompt": "x" * (2 * 1024 * 1024)})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_chunked_body_over_the_limit_returns_413(http: httpx2.Client) -> None:
    chunks = (b" " * 65536 for _ in range(33))
    response = http.post(URL, content=chunks, headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_failed_request_returns_the_reason_and_x_should_retry_false(http: httpx2.Client) -> None:
    response = http.post(URL, json={**ASKED, "prompt": BROKEN})
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert "the circle is broken" in response.json()["error"]["message"]


def test_call_that_joins_a_cancelled_request_returns_409(served: Served, http: httpx2.Client) -> None:
    key = {"idempotency-key": "cancelled while waited for"}
    asked = {"model": IDLE.name, "prompt": "a"}
    view = http.post(URL, json=asked, headers={**key, "prefer": "respond-async"}).json()
    http.post(f"/v1/requests/{view['id']}/cancel")
    response = http.post(URL, json=asked, headers=key)
    assert response.status_code == 409
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "cancelled"


def test_client_disconnect_does_not_cancel_the_request(served: Served, http: httpx2.Client) -> None:
    before = ids(served)
    with served.held():
        with pytest.raises(httpx2.ReadTimeout):
            http.post(URL, json=ASKED, timeout=0.3)
        (left,) = ids(served) - before
    served.next_event(left, "completed")
    assert http.get(f"/v1/requests/{left}").json()["status"] == "completed"


def test_same_idempotency_key_and_body_return_the_first_request(served: Served, http: httpx2.Client) -> None:
    key = {"idempotency-key": "join me"}
    asked = {"prompt": "a", "model": "test/pictures"}
    first = http.post(URL, json=asked, headers=key).json()
    before = ids(served)
    again = http.post(URL, json=dict(reversed(asked.items())), headers=key).json()
    assert again == first
    assert ids(served) == before


def test_idempotency_key_with_another_body_returns_409(http: httpx2.Client) -> None:
    key = {"idempotency-key": "two bodies"}
    assert http.post(URL, json=ASKED, headers=key).status_code == 200
    response = http.post(URL, json={**ASKED, "seed": 6}, headers=key)
    assert response.status_code == 409
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "idempotency_conflict"


def test_overlong_idempotency_key_returns_400(http: httpx2.Client) -> None:
    assert refused(http, ASKED, **{"idempotency-key": "x" * 256})["param"] == "Idempotency-Key"


@pytest.mark.row("C2")
@pytest.mark.parametrize("count", ["0", "1", "2"])
def test_same_body_without_idempotency_key_creates_two_requests(http: httpx2.Client, count: str) -> None:
    asked = {"model": "test/pictures", "prompt": "asked for twice"}
    replies = [http.post(URL, json=asked, headers={"x-stainless-retry-count": count}).json() for _ in range(2)]
    assert replies[0]["id"] != replies[1]["id"]
