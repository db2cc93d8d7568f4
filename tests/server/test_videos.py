"""Videos over plain HTTP: created by JSON or form, polled, listed, read, deleted."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import av
import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.server.served import BROKEN, MOVING, Served, film, picture, preview, serve
from unfuse.core.errors import NotFound
from unfuse.queues.base import RequestFilter

URL = "/v1/videos"
ASKED = {"model": "test/pictures", "prompt": "a red circle", "seed": 5}
IDLE = {"model": "test/idle", "prompt": "a red circle"}


def create(http: httpx2.Client, **asked: Any) -> dict[str, Any]:
    response = http.post(URL, json={**ASKED, **asked})
    assert response.status_code == 200, response.text
    return dict(response.json())


def finished(served: Served, http: httpx2.Client, **asked: Any) -> dict[str, Any]:
    id = create(http, **asked)["id"]
    served.next_event(id, "completed")
    return dict(http.get(f"{URL}/{id}").json())


def refused(response: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def frames_of(data: bytes) -> list[np.ndarray[Any, Any]]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_videos_generations_endpoint_creates_the_same_video(served: Served, http: httpx2.Client) -> None:
    """By JSON and by a form, as `POST /v1/videos` does."""
    made = [
        http.post("/v1/videos", json={**ASKED, "seconds": "1"}),
        http.post("/v1/videos/generations", json={**ASKED, "seconds": "1"}),
        http.post(
            "/v1/videos/generations",
            files={name: (None, str(value)) for name, value in ASKED.items()} | {"seconds": (None, "1")},
        ),
    ]
    assert [answer.status_code for answer in made] == [200] * 3
    ids = [answer.json()["id"] for answer in made]
    for id in ids:
        served.next_event(id, "completed")

    first, *others = [http.get(f"/v1/videos/{id}/content").content for id in ids]
    assert first and others == [first, first]
    assert refused(http.post("/v1/videos/generations", json={"model": "test/pictures"}))["param"] == "prompt"


def test_created_video_object_describes_the_video_until_completed(served: Served, http: httpx2.Client) -> None:
    with served.held():
        response = http.post(URL, json={**ASKED, "seconds": "1", "metadata": {"job": "7"}})
        view = response.json()
        assert (view["object"], view["status"], view["progress"]) == ("video", "queued", 0)
        assert (view["seconds"], view["num_frames"], view["fps"], view["size"]) == ("1.125", 9, 8, "64x64")
        assert (view["prompt"], view["model"], view["seed"]) == ("a red circle", "test/pictures", 5)
        assert (view["metadata"], view["error"], view["completed_at"]) == ({"job": "7"}, None, None)
        assert view["id"].startswith("video_")
        assert view["created_at"] > 1.7e9
        assert int(response.headers["openai-poll-after-ms"]) > 0
    served.next_event(view["id"], "completed")
    response = http.get(f"{URL}/{view['id']}")
    assert (response.json()["status"], response.json()["progress"]) == ("completed", 100)
    assert response.json()["completed_at"] >= view["created_at"]
    assert "openai-poll-after-ms" not in response.headers


def test_video_progress_follows_the_denoising_steps(served: Served, http: httpx2.Client) -> None:
    with served.held(after_steps=True):
        id = create(http, num_inference_steps=8)["id"]
        while http.get(f"{URL}/{id}").json()["progress"] == 0:
            served.next_event(id, "progress")
        view = http.get(f"{URL}/{id}").json()
        assert view["status"] == "in_progress" and 0 < view["progress"] < 100


def test_video_is_also_a_request_with_the_same_id(served: Served, http: httpx2.Client) -> None:
    id = finished(served, http)["id"]
    view = http.get(f"/v1/requests/{id}").json()
    assert (view["id"], view["status"], view["object"]) == (id, "completed", "request")
    assert view["result"][0]["content_type"] == "video/mp4"
    assert http.get(view["result"][0]["url"]).content == film(5)[1]


def test_respond_async_returns_202_with_the_request_object(http: httpx2.Client) -> None:
    response = http.post(URL, json=IDLE, headers={"prefer": "respond-async"})
    assert (response.status_code, response.json()["object"]) == (202, "request")
    assert response.headers["location"].endswith(f"/v1/requests/{response.json()['id']}")
    assert response.json()["id"].startswith("video_")


def test_every_parameter_is_accepted_as_a_form_field(served: Served, http: httpx2.Client) -> None:
    fields = {
        "model": "test/pictures",
        "prompt": "a red circle",
        "seconds": "0.5",
        "fps": "16",
        "size": "96x64",
        "seed": "7",
        "num_inference_steps": "3",
        "guidance_scale": "1.5",
        "negative_prompt": "blue",
        "priority": "2",
        "timeout": "60",
        "metadata[job]": "7",
        "metadata[of]": "mine",
        "preview_every": "1",
        "n": "1",
        "output_format": "mp4",
    }
    view = http.post(URL, files={name: (None, value) for name, value in fields.items()}).json()
    assert (view["num_frames"], view["fps"], view["seconds"], view["size"]) == (9, 16, "0.5625", "96x64")
    assert (view["seed"], view["metadata"]) == (7, {"job": "7", "of": "mine"})
    context = served.run(served.queue.load(view["id"])).context
    sent = {"num_inference_steps": 3, "guidance_scale": 1.5, "negative_prompt": "blue", "preview_every": 1}
    assert sent.items() <= context.request.params.items()
    assert context.delivery.priority == 2
    assert context.deadline is not None


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"seconds": "4"}, "seconds", "at most 17 frames, 2.125 seconds at 8 fps"),
        ({"num_frames": 18}, "num_frames", "at most 17 frames, 2.125 seconds"),
        ({"num_frames": 12}, "num_frames", "the nearest below is 9"),
        ({"size": "720x1280"}, "size", "the nearest is 128x128"),
        ({"num_inference_steps": 101}, "num_inference_steps", "1 to 100, not 101"),
        ({"model": "test/still"}, "model", "does not generate videos"),
        ({"model": "test/moving"}, "input_reference", "needs a picture to start from: send one as input_reference"),
        ({"n": 2}, "n", "must be 1"),
        ({"stream": True}, "stream", "unknown parameter"),
        ({"image": "x"}, "image", "unknown parameter"),
        ({"output_format": "png8"}, "output_format", "mp4, png"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"metadata": "x"}, "metadata", "must be an object"),
    ],
)
def test_invalid_video_request_is_rejected_before_anything_is_queued(
    studio: Served, film_set: httpx2.Client, change: dict[str, Any], param: str, says: str
) -> None:
    before = studio.run(studio.queue.list(RequestFilter(), limit=1000))
    error = refused(film_set.post(URL, json={**ASKED, **change}))
    assert error["param"] == param
    assert says in error["message"]
    assert studio.run(studio.queue.list(RequestFilter(), limit=1000)) == before


def test_video_content_is_returned_whole_or_by_range(served: Served, http: httpx2.Client) -> None:
    url = f"{URL}/{finished(served, http)['id']}/content"
    whole = http.get(url)
    assert (whole.headers["content-type"], whole.headers["accept-ranges"]) == ("video/mp4", "bytes")
    assert whole.content == film(5)[1]
    assert len(frames_of(whole.content)) == 17
    part = http.get(url, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole.content[10:20])


def test_the_thumbnail_is_the_first_frame(served: Served, http: httpx2.Client) -> None:
    id = finished(served, http, seed=200)["id"]
    answer = http.get(f"{URL}/{id}/content", params={"variant": "thumbnail"})
    assert answer.headers["content-type"] == "image/webp"
    with Image.open(io.BytesIO(answer.content)) as image:
        assert (image.format, image.size) == ("WEBP", (64, 64))
        red, green, blue = image.convert("RGB").getpixel((32, 32))
    assert (abs(red - 200) < 12, green < 12, blue < 20) == (True, True, True)


def test_unsupported_content_variant_returns_400(served: Served, http: httpx2.Client) -> None:
    id = finished(served, http)["id"]
    assert "spritesheets" in refused(http.get(f"{URL}/{id}/content?variant=spritesheet"))["message"]
    assert refused(http.get(f"{URL}/{id}/content?variant=sound"))["param"] == "variant"


def test_png_output_returns_each_frame_as_a_result(served: Served, http: httpx2.Client) -> None:
    id = finished(served, http, output_format="png", num_frames=5)["id"]
    files = http.get(f"/v1/requests/{id}").json()["result"]
    assert [file["content_type"] for file in files] == ["image/png"] * 5
    for file, frame in zip(files, film(5, 5)[0], strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(http.get(file["url"]).content))), frame)
    assert f"/v1/requests/{id}/result/0 to /4" in refused(http.get(f"{URL}/{id}/content"))["message"]
    assert http.get(f"{URL}/{id}/content?variant=thumbnail").status_code == 200


def test_content_of_an_uncompleted_video_returns_409(http: httpx2.Client) -> None:
    id = http.post(URL, json=IDLE).json()["id"]
    response = http.get(f"{URL}/{id}/content")
    assert "it is queued" in refused(response, 409)["message"]
    assert response.headers["x-should-retry"] == "false"
    http.post(f"/v1/requests/{id}/cancel")
    assert "it is cancelled" in refused(http.get(f"{URL}/{id}/content"), 409)["message"]


def test_failed_cancelled_or_expired_video_has_status_failed(served: Served, http: httpx2.Client) -> None:
    broken = create(http, prompt=BROKEN)["id"]
    served.next_event(broken, "failed")
    cancelled = create(http, **IDLE)["id"]
    http.post(f"/v1/requests/{cancelled}/cancel")
    expired = create(http, **IDLE, timeout=0.001)["id"]
    served.next_event(expired, "failed")
    views = [http.get(f"{URL}/{id}").json() for id in (broken, cancelled, expired)]
    assert [view["status"] for view in views] == ["failed"] * 3
    assert [view["error"]["code"] for view in views] == ["stage_failed", "cancelled", "expired"]
    assert "the circle is broken" in views[0]["error"]["message"]
    assert http.get(f"/v1/requests/{cancelled}").json()["status"] == "cancelled"


def test_image_request_returns_404_at_the_videos_endpoint(http: httpx2.Client) -> None:
    id = http.post("/v1/images/generations", json=IDLE, headers={"prefer": "respond-async"}).json()["id"]
    assert f"/v1/requests/{id}" in refused(http.get(f"{URL}/{id}"), 404)["message"]
    assert refused(http.delete(f"{URL}/{id}"), 404)
    assert http.get(f"/v1/requests/{id}").json()["status"] == "queued"


def test_video_list_is_paginated_in_both_orders_without_images(tmp_path: Path) -> None:
    with serve(tmp_path) as served, httpx2.Client(base_url=served.url, trust_env=False) as http:
        ids = [create(http, **IDLE)["id"] for _ in range(5)]
        http.post("/v1/images/generations", json=IDLE, headers={"prefer": "respond-async"})
        http.delete(f"{URL}/{ids.pop(2)}")

        for order, expected in (("desc", ids[::-1]), ("asc", ids)):
            first = http.get(URL, params={"limit": 3, "order": order}).json()
            assert [one["id"] for one in first["data"]] == expected[:3]
            assert (first["object"], first["has_more"], first["last_id"]) == ("list", True, expected[2])
            rest = http.get(URL, params={"after": first["last_id"], "order": order}).json()
            assert [one["id"] for one in rest["data"]] == expected[3:]
            assert rest["has_more"] is False
            assert http.get(URL, params={"after": "video_nope", "order": order}).status_code == 404
        assert refused(http.get(URL, params={"limit": 101}))["param"] == "limit"


def test_deleted_video_returns_404_and_its_file_is_removed(served: Served, http: httpx2.Client) -> None:
    id = finished(served, http)["id"]
    assert http.delete(f"{URL}/{id}").json() == {"id": id, "object": "video.deleted", "deleted": True}
    for path in (f"{URL}/{id}", f"{URL}/{id}/content", f"/v1/requests/{id}", f"/v1/requests/{id}/result/0"):
        assert refused(http.get(path), 404)
    assert refused(http.delete(f"{URL}/{id}"), 404)
    assert id not in [one["id"] for one in http.get("/v1/requests", params={"limit": 1000}).json()["data"]]
    with pytest.raises(NotFound):
        served.results.read(id, 0)


def test_deleting_a_running_video_cancels_and_removes_it(served: Served, http: httpx2.Client) -> None:
    with served.held():
        id = create(http)["id"]
        served.next_event(id, "stage_started")
        assert http.delete(f"{URL}/{id}").status_code == 200
    assert http.get(f"{URL}/{id}").status_code == 404
    with pytest.raises(NotFound):
        served.run(served.queue.load(id))


def test_videos_of_another_tenant_return_404(tmp_path: Path) -> None:
    with serve(tmp_path, keys=["anna key-a", "bert key-b"]) as served:
        clients = [
            httpx2.Client(base_url=served.url, headers={"authorization": f"Bearer {key}"}) for key in ("key-a", "key-b")
        ]
        with clients[0] as anna, clients[1] as bert:
            id = create(anna, **IDLE)["id"]
            assert bert.get(URL).json()["data"] == []
            assert [bert.request(method, f"{URL}/{id}").status_code for method in ("GET", "DELETE")] == [404, 404]
            assert anna.get(f"{URL}/{id}").json()["status"] == "queued"


@pytest.mark.parametrize("path", ["video_1/remix", "edits", "extensions", "characters"])
def test_unsupported_openai_video_endpoints_return_404(http: httpx2.Client, path: str) -> None:
    error = refused(http.post(f"{URL}/{path}", json={"prompt": "a"}), 404)
    assert "POST /v1/videos" in error["message"]


def test_idempotency_key_covers_the_uploaded_image_of_a_video(studio: Served, film_set: httpx2.Client) -> None:
    asked = {"data": {"model": MOVING.name, "prompt": "once"}, "files": {"input_reference": picture(9)}}
    key = {"idempotency-key": "one film"}
    first, again = (film_set.post(URL, **asked, headers=key).json()["id"] for _ in range(2))
    assert first == again
    unsaid = {"x-stainless-retry-count": "1"}
    assert film_set.post(URL, **asked, headers=unsaid).json()["id"] != first
    other = {**asked, "files": {"input_reference": picture(8)}}
    assert film_set.post(URL, **other, headers=key).status_code == 409


def test_video_starts_with_the_input_reference_image(studio: Served, film_set: httpx2.Client) -> None:
    blue = io.BytesIO()
    Image.new("RGB", (40, 30), (10, 20, 250)).save(blue, "png")
    url = "data:image/png;base64," + base64.b64encode(blue.getvalue()).decode()
    fields = {"model": MOVING.name, "prompt": "a red circle", "seed": "5"}
    for response in (
        film_set.post(URL, data=fields, files={"input_reference": ("blue.png", blue.getvalue(), "image/png")}),
        film_set.post(
            URL, files={name: (None, value) for name, value in {**fields, "input_reference[image_url]": url}.items()}
        ),
        film_set.post(URL, json={**fields, "input_reference": url}),
        film_set.post(URL, json={**fields, "input_reference": {"image_url": url}}),
    ):
        assert response.status_code == 200, response.text
        id = response.json()["id"]
        studio.next_event(id, "completed")
        frames = frames_of(film_set.get(f"{URL}/{id}/content").content)
        assert abs(frames[0].mean((0, 1)) - (10, 20, 250)).max() < 12
        assert abs(frames[-1].mean((0, 1)) - (5, 160, 9)).max() < 12


def test_uploaded_image_is_deleted_when_the_request_ends(studio: Served, film_set: httpx2.Client) -> None:
    for prompt in ("a red circle", BROKEN):
        with studio.held():
            asked = {"model": MOVING.name, "prompt": prompt}
            id = film_set.post(URL, data=asked, files={"input_reference": picture(9)}).json()["id"]
            assert studio.results.attached(id, "image") == picture(9)
        film_set.get(f"/v1/requests/{id}/events")
        with pytest.raises(NotFound):
            while True:  # it goes right after the last event
                studio.results.attached(id, "image")


def test_previews_are_available_while_a_video_is_generated(served: Served, http: httpx2.Client) -> None:
    with served.held(after_steps=True):
        id = create(http, preview_every=2, num_inference_steps=5)["id"]
        while served.next_event(id, "preview").step != 2:
            pass
        answer = http.get(f"/v1/requests/{id}/preview/0/2")
        assert (answer.headers["content-type"], answer.content) == ("image/jpeg", preview(2))
        for other in ("0/3", "1/2", "0/99999999999999999999"):
            assert http.get(f"/v1/requests/{id}/preview/{other}").status_code == 404
    served.next_event(id, "completed")
