"""Pictures that start from a picture, and pictures as a stream of events."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.served import BROKEN, MOVING, Served, picture, preview, serve
from unfuse.queues.base import QueueLimits

EDITS, GENERATIONS = "/v1/images/edits", "/v1/images/generations"
ASKED = {"model": MOVING.name, "prompt": "a red circle", "seed": "5"}


def pictures(response: httpx2.Response) -> list[bytes]:
    assert response.status_code == 200, response.text
    return [base64.b64decode(one["b64_json"]) for one in response.json()["data"]]


def refused(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_edit_accepts_the_image_as_form_file_or_data_url(film_set: httpx2.Client) -> None:
    url = "data:image/png;base64," + base64.b64encode(picture(9)).decode()
    for response in (
        film_set.post(EDITS, data=ASKED, files={"image": picture(9)}),
        film_set.post(EDITS, data=ASKED, files={"image[]": picture(9)}),
        film_set.post(EDITS, json={**ASKED, "image": url}),
    ):
        assert pictures(response) == [picture(5)]
    several = film_set.post(EDITS, data={**ASKED, "n": "2", "output_format": "webp"}, files={"image": picture(9)})
    assert pictures(several) == [picture(5, form="webp"), picture(6, form="webp")]


def test_input_image_is_part_of_the_request_fingerprint(studio: Served, film_set: httpx2.Client) -> None:
    ids = [
        film_set.post(EDITS, data=ASKED, files={"image": sent}, headers={"prefer": "respond-async"}).json()["id"]
        for sent in (picture(8), picture(8), picture(9))
    ]
    first, same, other = (studio.run(studio.queue.load(id)).context for id in ids)
    pictures = [context.request.derived.image_hashes["image"] for context in (first, same, other)]
    fingerprints = [context.caller.fingerprint for context in (first, same, other)]
    for each in (pictures, fingerprints):
        assert each[0] == each[1] != each[2]


def test_several_images_a_mask_or_no_image_return_400(film_set: httpx2.Client) -> None:
    two = [("image[]", ("a.png", picture(1))), ("image[]", ("b.png", picture(2)))]
    assert "cannot start from 2 pictures" in refused(film_set.post(EDITS, data=ASKED, files=two))["message"]
    masked = film_set.post(EDITS, data=ASKED, files={"image": picture(1), "mask": picture(2)})
    assert refused(masked)["param"] == "mask"
    assert "image is missing" in refused(film_set.post(EDITS, json=ASKED))["message"]


def test_model_without_image_input_returns_400_naming_others(film_set: httpx2.Client, http: httpx2.Client) -> None:
    asked = {"model": "test/pictures", "prompt": "a red circle"}
    for url, field in ((EDITS, "image"), ("/v1/videos", "input_reference")):
        error = refused(film_set.post(url, data=asked, files={field: picture(9)}))
        assert (error["param"], error["message"]) == (
            field,
            "model test/pictures cannot start from a picture; test/moving can",
        )
        error = refused(http.post(url, data=asked, files={field: picture(9)}))
        assert "no served model can" in error["message"]


def test_model_that_needs_an_image_returns_400_naming_the_endpoints(film_set: httpx2.Client) -> None:
    error = refused(film_set.post(GENERATIONS, json=ASKED))
    assert error["param"] == "model"
    assert "image to /v1/images/edits, or as input_reference to /v1/videos" in error["message"]


def test_models_endpoint_reports_takes_image_and_makes_video(film_set: httpx2.Client) -> None:
    models = {one["id"]: (one["takes_image"], one["makes_video"]) for one in film_set.get("/v1/models").json()["data"]}
    assert models["test/pictures"] == (False, True)
    assert models["test/moving"] == (True, True)
    assert models["test/still"] == (False, False)


@pytest.mark.parametrize(("url", "kind"), [(GENERATIONS, "image_generation"), (EDITS, "image_edit")])
def test_image_stream_sends_partial_images_then_the_result(
    studio: Served, film_set: httpx2.Client, url: str, kind: str
) -> None:
    asked = {**ASKED, "stream": True, "partial_images": 3, "num_inference_steps": 8}
    if url == EDITS:
        sent: dict[str, Any] = {"data": {**asked, "stream": "true"}, "files": {"image": picture(9)}}
    else:
        sent = {"json": {**asked, "model": "test/pictures"}}
    with studio.held(after_steps=True), film_set.stream("POST", url, **sent) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        told = events(response.iter_lines())
        partial = [next(told) for _ in range(3)]
        assert [one["type"] for one in partial] == [f"{kind}.partial_image"] * 3
        assert [one["partial_image_index"] for one in partial] == [0, 1, 2]
        assert [base64.b64decode(one["b64_json"]) for one in partial] == [preview(2), preview(4), preview(6)]
        assert {one["output_format"] for one in partial} == {"jpeg"}
        studio.let_go()
        (completed,) = told
    assert (completed["type"], completed["output_format"], completed["size"]) == (f"{kind}.completed", "png", "64x64")
    assert base64.b64decode(completed["b64_json"]) == picture(5)
    assert completed["usage"]["total_tokens"] == 0


def test_image_stream_sends_one_completed_event_per_image(http: httpx2.Client) -> None:
    asked = {"model": "test/pictures", "prompt": "a red circle", "seed": 5, "n": 3, "stream": True}
    with http.stream("POST", GENERATIONS, json=asked) as response:
        told = list(events(response.iter_lines()))
    assert [one["type"] for one in told] == ["image_generation.completed"] * 3
    assert [base64.b64decode(one["b64_json"]) for one in told] == [picture(5), picture(6), picture(7)]
    assert [one["seed"] for one in told] == [5, 6, 7]


def test_failure_is_sent_as_an_error_event_in_the_stream(http: httpx2.Client) -> None:
    asked = {"model": "test/pictures", "prompt": BROKEN, "stream": True}
    with http.stream("POST", GENERATIONS, json=asked) as response:
        (told,) = events(response.iter_lines())
    assert response.status_code == 200
    assert "the circle is broken" in told["error"]["message"]
    assert told["error"]["code"] == "stage_failed"


def test_invalid_streaming_request_returns_400(http: httpx2.Client) -> None:
    response = http.post(GENERATIONS, json={"model": "test/pictures", "prompt": "a", "stream": True, "size": "1x1"})
    assert refused(response)["param"] == "size"


def test_previews_are_deleted_when_the_request_completes(studio: Served, film_set: httpx2.Client) -> None:
    asked = {"model": "test/pictures", "prompt": "a red circle", "preview_every": 1}
    id = film_set.post(GENERATIONS, json=asked, headers={"prefer": "respond-async"}).json()["id"]
    studio.next_event(id, "completed")
    while film_set.get(f"/v1/requests/{id}/preview/0/1").status_code != 404:
        pass  # they go right after the last event
    assert film_set.get(f"/v1/requests/{id}/result/0").status_code == 200


def test_upload_of_a_request_rejected_with_429_is_not_stored(tmp_path: Path) -> None:
    with (
        serve(tmp_path, cards=(MOVING,), limits=QueueLimits(max_active=1)) as served,
        httpx2.Client(base_url=served.url, trust_env=False) as http,
        served.held(),
    ):
        answers = [http.post("/v1/videos", data=ASKED, files={"input_reference": picture(9)}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert [folder.name for folder in tmp_path.iterdir()] == [answers[0].json()["id"]]


def test_unwritable_result_store_returns_503_without_its_path(studio: Served, film_set: httpx2.Client) -> None:
    folder = studio.folder
    mode = folder.stat().st_mode
    blocked = folder.rename(folder.with_name("moved"))
    folder.write_text("not a folder")
    try:
        answer = film_set.post(EDITS, data=ASKED, files={"image": picture(9)})
    finally:
        folder.unlink()
        blocked.rename(folder)
    assert folder.stat().st_mode == mode
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_room")
    assert answer.headers["retry-after"]
    assert str(folder) not in answer.text
