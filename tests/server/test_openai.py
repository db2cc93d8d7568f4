"""The unmodified `openai` client gets what it expects."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.server.served import BROKEN, IDLE, MOVING, Served, film, picture, preview, serve
from unfuse.queues.base import QueueLimits, RequestFilter

MODEL = "test/pictures"


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="anything") as client:
        yield client


def decoded(reply: openai.types.ImagesResponse) -> list[bytes]:
    return [base64.b64decode(one.b64_json or "") for one in reply.data or []]


@pytest.mark.slow
def test_openai_client_gets_images_as_base64(client: openai.OpenAI) -> None:
    reply = client.images.generate(model=MODEL, prompt="a red circle", n=2, size="64x64", extra_body={"seed": 5})
    assert decoded(reply) == [picture(5), picture(6)]
    assert reply.usage is not None
    assert (reply.output_format, reply.size, reply.usage.total_tokens) == ("png", "64x64", 0)


def test_openai_client_gets_image_urls(served: Served, client: openai.OpenAI) -> None:
    reply = client.images.generate(model=MODEL, prompt="a red circle", response_format="url", extra_body={"seed": 5})
    assert reply.data is not None
    assert str(reply.data[0].url).startswith(f"{served.url}/v1/requests/req_")


def test_all_image_parameters_of_the_openai_client_are_accepted(client: openai.OpenAI) -> None:
    reply = client.images.generate(
        model=MODEL,
        prompt="a red circle",
        background="opaque",
        moderation="low",
        n=1,
        output_compression=80,
        output_format="jpeg",
        partial_images=0,
        quality="hd",
        response_format="b64_json",
        size="auto",
        stream=False,
        style="vivid",
        user="me",
        extra_body={"seed": 5, "num_inference_steps": 3, "guidance_scale": 1.5, "negative_prompt": "blue"},
    )
    assert decoded(reply) == [picture(5, form="jpeg")]


def test_eight_concurrent_requests_get_their_own_images(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[bytes]:
        return decoded(client.images.generate(model=MODEL, prompt="a red circle", extra_body={"seed": seed}))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [[picture(seed)] for seed in range(8)]


def test_bad_request_error_names_the_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(model=MODEL, prompt="a red circle", extra_body={"num_inference_steps": 10**9})
    error = caught.value
    assert (error.param, error.code) == ("num_inference_steps", "invalid_parameter")
    assert error.type == "invalid_request_error"
    assert "must be 1 to 100, not 1000000000" in error.message
    assert error.request_id


def test_unknown_model_raises_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model="nope", prompt="a red circle")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_openai_client_lists_and_retrieves_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [IDLE.name, MODEL]
    assert client.models.retrieve(MODEL).owned_by == "unfuse"


def test_openai_client_does_not_retry_a_failed_request(served: Served, client: openai.OpenAI) -> None:
    before = len(served.run(served.queue.list(RequestFilter(), limit=1000)))
    with pytest.raises(openai.InternalServerError, match="the circle is broken"):
        client.images.generate(model=MODEL, prompt=BROKEN)
    assert len(served.run(served.queue.list(RequestFilter(), limit=1000))) == before + 1


def test_idempotency_key_with_another_body_raises_conflict_error(client: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": "one"}
    first = client.images.generate(model=MODEL, prompt="a red circle", extra_headers=headers)
    assert client.images.generate(model=MODEL, prompt="a red circle", extra_headers=headers) == first
    with pytest.raises(openai.ConflictError):
        client.images.generate(model=MODEL, prompt="a blue circle", extra_headers=headers)


@pytest.mark.parametrize(("headers", "requests"), [({"idempotency-key": "patience"}, 1), ({}, 2)])
def test_retry_after_a_timeout_joins_the_request_only_with_a_key(
    served: Served, headers: dict[str, str], requests: int
) -> None:
    """Given a client that times out and repeats itself while the picture is made, with a key it is one request."""
    before = len(served.run(served.queue.list(RequestFilter(), limit=1000)))
    with served.held(), openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", timeout=0.3, max_retries=1) as client:
        with pytest.raises(openai.APITimeoutError):
            client.images.generate(model=MODEL, prompt="a patient circle", extra_headers=headers)
        assert len(served.run(served.queue.list(RequestFilter(), limit=1000))) == before + requests


def test_authentication_and_rate_limit_errors_raise_openai_classes(tmp_path: Path) -> None:
    with serve(tmp_path, keys=["anna key"], limits=QueueLimits(max_active=1)) as served:
        with (
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="key", max_retries=0) as client:
            client.images.generate(model=IDLE.name, prompt="a", extra_headers={"prefer": "respond-async"})
            with pytest.raises(openai.RateLimitError) as caught:
                client.images.generate(model=MODEL, prompt="a")
            assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.fixture
def video_client(studio: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{studio.url}/v1", api_key="anything") as client:
        yield client


SORA = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
"""What the newer client says of every call about videos: of OpenAI's own service, not of the protocol."""


@SORA
def test_video_is_created_polled_downloaded_and_deleted(video_client: openai.OpenAI, tmp_path: Path) -> None:
    asked = {"seed": 5, "num_inference_steps": 3, "metadata": {"job": "7"}, "guidance_scale": 1.5}
    video = video_client.videos.create_and_poll(
        model=MODEL, prompt="a red circle", seconds="2", size="64x64", extra_body=asked
    )
    assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "2.125", "64x64")
    assert (video.model, video.prompt, video.error) == (MODEL, "a red circle", None)
    video_client.videos.download_content(video.id).write_to_file(tmp_path / "out.mp4")
    assert (tmp_path / "out.mp4").read_bytes() == film(5)[1]
    assert video_client.videos.download_content(video.id, variant="thumbnail").read()[8:12] == b"WEBP"
    assert video_client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        video_client.videos.retrieve(video.id)


@SORA
def test_video_starts_from_an_input_reference_image(video_client: openai.OpenAI) -> None:
    for reference in (("a.png", picture(9)), io.BytesIO(picture(9))):
        video = video_client.videos.create_and_poll(
            model=MOVING.name, prompt="a red circle", seconds="1", input_reference=reference, extra_body={"seed": 5}
        )
        assert video.status == "completed"
        assert video_client.videos.download_content(video.id).read() == film(5, 9, picture(9))[1]


@SORA
def test_polling_ends_when_a_video_fails_or_is_cancelled(studio: Served, video_client: openai.OpenAI) -> None:
    broken = video_client.videos.create_and_poll(model=MODEL, prompt=BROKEN, poll_interval_ms=10)
    assert broken.status == "failed"
    assert broken.error is not None
    assert "the circle is broken" in broken.error.message
    with studio.held():
        waiting = video_client.videos.create(model=MODEL, prompt="a red circle")
        with pytest.raises(openai.ConflictError, match="when it is completed"):
            video_client.videos.download_content(waiting.id)
        studio.run(studio.scheduler.cancel(waiting.id))
        ended = video_client.videos.poll(waiting.id, poll_interval_ms=10)
    assert (ended.status, ended.error and ended.error.code) == ("failed", "cancelled")


@SORA
def test_invalid_video_request_names_the_parameter(video_client: openai.OpenAI) -> None:
    for asked, param in (({"seconds": "12"}, "seconds"), ({"size": "1280x720"}, "size"), ({}, "input_reference")):
        model = MOVING.name if param == "input_reference" else MODEL
        with pytest.raises(openai.BadRequestError) as caught:
            video_client.videos.create(model=model, prompt="a red circle", **asked)
        assert caught.value.param == param
    address = {"input_reference": {"image_url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError, match="not fetched"):
        video_client.videos.create(model=MOVING.name, prompt="a red circle", extra_body=address)
    with pytest.raises(openai.NotFoundError):
        video_client.videos.remix("video_1", prompt="a blue circle")


@SORA
def test_openai_client_lists_all_pages_of_videos(tmp_path: Path) -> None:
    with serve(tmp_path) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        ids = [client.videos.create(model=IDLE.name, prompt="a red circle").id for _ in range(5)]
        assert [video.id for video in client.videos.list(limit=2)] == ids[::-1]
        assert [video.id for video in client.videos.list(limit=2, order="asc")] == ids


def test_openai_client_edits_an_image(video_client: openai.OpenAI) -> None:
    for image in (("a.png", picture(9)), [("a.png", picture(9))]):
        reply = video_client.images.edit(
            model=MOVING.name, prompt="a red circle", image=image, input_fidelity="high", extra_body={"seed": 5}
        )
        assert decoded(reply) == [picture(5)]
    with pytest.raises(openai.BadRequestError) as caught:
        video_client.images.edit(model=MODEL, prompt="a red circle", image=("a.png", picture(9)))
    assert caught.value.param == "image"


def test_openai_client_streams_partial_and_completed_images(studio: Served, video_client: openai.OpenAI) -> None:
    common = {"prompt": "a red circle", "stream": True, "partial_images": 1, "extra_body": {"seed": 5}}
    for kind in ("image_generation", "image_edit"):
        with studio.held(after_steps=True):
            if kind == "image_edit":
                stream = video_client.images.edit(model=MOVING.name, image=("a.png", picture(9)), **common)
            else:
                stream = video_client.images.generate(model=MODEL, **common)
            partial = next(stream)
            assert (partial.type, partial.partial_image_index) == (f"{kind}.partial_image", 0)
            assert base64.b64decode(partial.b64_json) == preview(2)
            studio.let_go()
            (completed,) = stream
        assert completed.type == f"{kind}.completed"
        assert base64.b64decode(completed.b64_json) == picture(5)
        assert completed.usage.total_tokens == 0


def test_failure_in_an_image_stream_raises_api_error(video_client: openai.OpenAI) -> None:
    stream = video_client.images.generate(model=MODEL, prompt=BROKEN, stream=True)
    with pytest.raises(openai.APIError, match="the circle is broken"):
        next(stream)
