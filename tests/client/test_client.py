"""The Python client against a real gateway."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.server.served import BROKEN, EVIDENCE, IDLE, MOVING, POISON, Served, film, picture, serve
from unfuse.client import Client, Request, Result, aconnect, calls, connect
from unfuse.client.calls import error_of
from unfuse.core.errors import (
    ConfigError,
    InvalidParameter,
    KeyUnavailable,
    NotFound,
    Overloaded,
    PermanentError,
    TransientError,
    UnknownModel,
)
from unfuse.queues.base import QueueLimits

MODEL = "test/pictures"


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with connect(served.url) as client:
        yield client


def test_generate_returns_images_with_seed_id_and_timings(client: Client) -> None:
    result = client.generate("a red circle", model=MODEL, seed=5, n=2)
    assert result.data == [picture(5), picture(6)]
    assert [image.size for image in result.images] == [(64, 64), (64, 64)]
    assert result.images[1].getpixel((0, 0)) == (6, 0, 9)
    assert result.seed == 5
    assert result.id.startswith("req_")
    assert result.timings["denoise.0"]["run_s"] == 0.2
    assert set(result.timings["vae_decode.1"]) == {"queued_s", "get_s", "run_s", "put_s"}


def test_submit_returns_before_the_request_completes(served: Served, client: Client) -> None:
    with served.held():
        request = client.submit("a red circle", model=MODEL, seed=5)
        assert request.view["status"] in ("queued", "in_progress")
    names = [event.type for event in request.events()]
    assert (names[0], names[-1]) == ("queued", "completed")
    assert request.result().data == [picture(5)]
    assert client.request(request.id).view["status"] == "completed"


def test_events_resume_after_a_given_sequence_number(client: Client) -> None:
    request = client.submit("a red circle", model=MODEL)
    heard = list(request.events())
    assert list(request.events(after=heard[2].seq)) == heard[3:]
    assert list(request.events(after=heard[-1].seq)) == []


def test_result_of_a_cancelled_request_raises_permanent_error(client: Client) -> None:
    request = client.submit("a red circle", model=IDLE.name)
    assert request.cancel()["status"] == "cancelled"
    with pytest.raises(PermanentError, match="cancelled"):
        request.result()


def test_generate_raises_the_error_of_a_failed_request(client: Client) -> None:
    with pytest.raises(PermanentError, match="the circle is broken"):
        client.generate(BROKEN, model=MODEL)


def test_dead_letter_is_retried_as_a_new_request(served: Served, client: Client) -> None:
    id = client.submit(POISON, model=MODEL, seed=5).id
    served.next_event(id, "failed")
    (newest,) = client.dead(limit=1)
    assert (newest["id"], newest["error"]["evidence"]) == (id, EVIDENCE)
    again = client.retry(id)
    assert (again.view["seed"], again.view["metadata"]) == (5, {"retry_of": id})
    assert list(again.events())[-1].type == "failed"
    assert client.dead(after=again.id) == []
    with pytest.raises(PermanentError, match="is not a dead letter"):
        client.retry(id)
    with pytest.raises(NotFound):
        client.retry("req_nope")


def test_server_errors_are_raised_as_their_exception_types(client: Client) -> None:
    with pytest.raises(InvalidParameter, match="must be 1 to 100, not 0") as caught:
        client.submit("a", model=MODEL, num_inference_steps=0)
    assert caught.value.param == "num_inference_steps"
    with pytest.raises(UnknownModel):
        client.submit("a", model="nope")
    with pytest.raises(NotFound):
        client.request("req_nope")


def test_overload_and_wrong_api_key_raise_different_errors(tmp_path: Path) -> None:
    with serve(tmp_path, keys=["anna key"], limits=QueueLimits(max_active=1)) as served:
        with connect(served.url, "wrong") as stranger, pytest.raises(ConfigError):
            stranger.models()
        with connect(served.url, "key") as anna:
            anna.submit("a", model=IDLE.name)
            with pytest.raises(Overloaded) as caught:
                anna.submit("a", model=MODEL)
            assert caught.value.retry_after >= 1


@pytest.mark.parametrize("key", ["schlüssel", "two words", "a\nb", "\udcff"])
@pytest.mark.parametrize("connect", [connect, aconnect])
def test_non_ascii_api_key_raises_invalid_parameter(connect: Callable[[str, str], object], key: str) -> None:
    with pytest.raises(InvalidParameter, match="printable ASCII") as refused:
        connect("http://127.0.0.1:1", key)
    assert key not in str(refused.value)


def test_api_key_with_trailing_newline_is_accepted(tmp_path: Path) -> None:
    with serve(tmp_path, keys=["anna key"]) as served, connect(served.url, "key\n") as anna:
        assert anna.models()


@pytest.mark.parametrize(("header", "seconds"), [("7", 7), ("1.5", 1.5), ("Wed, 21 Oct 2026 07:28:00 GMT", 1), ("", 1)])
def test_429_of_a_proxy_is_raised_as_overloaded_with_retry_after(header: str, seconds: float) -> None:
    response = httpx2.Response(429, headers={"retry-after": header}, request=httpx2.Request("GET", "http://a/b"))
    error = error_of(response)
    assert isinstance(error, Overloaded)
    assert error.retry_after == seconds


def test_unreachable_server_raises_transient_error_with_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with connect(url) as client, pytest.raises(TransientError, match="unfuse serve"):
        client.models()


def test_client_lists_models_workers_pools_and_requests(client: Client) -> None:
    request = client.submit("a", model=IDLE.name)
    assert [model["id"] for model in client.models()] == [IDLE.name, MODEL]
    assert [worker["id"] for worker in client.workers()] == ["worker-1"]
    assert any(pool["waiting"] for pool in client.pools())
    (newest,) = client.requests(limit=1)
    assert newest["id"] == request.id
    assert client.requests(limit=1, after=request.id) != [newest]
    assert all(view["status"] == "queued" for view in client.requests(status="queued"))


def test_events_continue_without_gaps_over_broken_connections(served: Served, client: Client) -> None:
    with served.held():
        id = client.submit("a red circle", model=MODEL).id
        served.next_event(id, "stage_started")
    with breaking_proxy(served.url, after=700) as (url, connections), Client(url, reconnect_delay=0.0) as far:
        heard = list(Request(far, {"id": id}).events())
    assert [event.seq for event in heard] == list(range(1, len(heard) + 1))
    assert heard[-1].type == "completed"
    assert len(connections) > 2


def test_events_raise_transient_error_when_the_server_is_gone(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        client = Client(served.url, reconnect_delay=0.0)
        request = client.submit("a", model=IDLE.name)
    with client, pytest.raises(TransientError):
        list(request.events())


def test_keyboard_interrupt_ends_a_call_and_the_client_stays_usable(served: Served, client: Client) -> None:
    with served.held():
        request = client.submit("a red circle", model=MODEL)
        events = request.events()
        next(events)
        interrupt = threading.Thread(target=signal.pthread_kill, args=(threading.main_thread().ident, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            list(events)
        interrupt.join()
        assert request.cancel()["status"] == "cancelled"


async def test_stream_dropped_inside_an_event_loop_leaves_no_task_in_that_loop(served: Served, client: Client) -> None:
    with served.held():
        events = client.submit("a red circle", model=MODEL).events()
        next(events)
        del events
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}


def test_save_writes_the_original_bytes_or_converts_the_format(tmp_path: Path) -> None:
    one = Result({"id": "req_1"}, [picture(5)])
    assert one.save(tmp_path / "a.png") == [tmp_path / "a.png"]
    assert (tmp_path / "a.png").read_bytes() == picture(5)
    one.save(tmp_path / "a.jpg")
    assert form_of(tmp_path / "a.jpg") == "JPEG"
    two = Result({"id": "req_1"}, [picture(5), picture(6)])
    assert two.save(str(tmp_path / "b.webp")) == [tmp_path / "b-0.webp", tmp_path / "b-1.webp"]
    assert form_of(tmp_path / "b-1.webp") == "WEBP"
    with pytest.raises(InvalidParameter, match="must end in one of"):
        one.save(tmp_path / "a.txt")


def test_generate_creates_a_video_for_any_video_parameter(client: Client, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"output_format": "mp4"},
        {"num_frames": 17},
        {"seconds": 2},
        {"video": True, "seconds": None},
    ]
    for params in asked:
        result = client.generate("a red circle", model=MODEL, seed=5, metadata={"job": "7"}, **params)
        assert result.id.startswith("video_")
        assert result.data == [film(5)[1]]
        assert result.view["metadata"] == {"job": "7"}
    assert len(result.images) == 17
    assert result.images[0].size == (64, 64)
    assert result.save(tmp_path / "out.mp4") == [tmp_path / "out.mp4"]
    assert (tmp_path / "out.mp4").read_bytes() == film(5)[1]
    with pytest.raises(InvalidParameter, match=r"must end in one of \.mp4"):
        result.save(tmp_path / "out.png")
    assert client.generate("a", model=MODEL, num_frames=1).id.startswith("req_")


def test_video_frames_are_saved_losslessly_as_png(client: Client, tmp_path: Path) -> None:
    result = client.generate("a red circle", model=MODEL, seed=5, num_frames=5, output_format="png")
    paths = result.save(tmp_path / "100%-%04d.png")
    assert [path.name for path in paths] == [f"100%-{index:04d}.png" for index in range(5)]
    frames = np.stack([np.asarray(Image.open(path)) for path in paths])
    assert np.array_equal(frames, film(5, 5)[0])
    with pytest.raises(InvalidParameter, match=r"must end in one of \.png"):
        result.save(tmp_path / "out.mp4")


def test_single_frame_is_numbered_for_a_numbered_file_name(tmp_path: Path) -> None:
    assert Result({"id": "video_1"}, [picture(5)]).save(tmp_path / "a-%02d.png") == [tmp_path / "a-00.png"]


def test_generate_uploads_an_input_image(studio: Served, tmp_path: Path) -> None:
    (tmp_path / "in.png").write_bytes(picture(9))
    with connect(studio.url) as client:
        for image in (picture(9), tmp_path / "in.png", str(tmp_path / "in.png")):
            still = client.generate("a red circle", model=MOVING.name, seed=5, image=image, negative_prompt=None)
            assert still.data == [picture(5)]
        moving = client.generate(
            "a red circle", model=MOVING.name, seed=5, image=picture(9), seconds=2, metadata={"job": "7"}
        )
        assert moving.data == [film(5, first=picture(9))[1]]
        assert moving.view["metadata"] == {"job": "7"}
        with pytest.raises(InvalidParameter, match="not a PNG") as caught:
            client.submit("a red circle", model=MOVING.name, image=b"text")
        assert caught.value.param == "image"


def form_of(path: Path) -> str | None:
    with Image.open(path) as image:
        return image.format


@contextmanager
def breaking_proxy(url: str, after: int) -> Iterator[tuple[str, list[int]]]:
    """A way to `url` whose every connection breaks once `after` bytes of answers went through it."""
    target = urlsplit(url)
    connections: list[int] = []

    def carry(near: socket.socket) -> None:
        with near, socket.create_connection((target.hostname, target.port or 80)) as far, suppress(OSError):
            threading.Thread(target=pump, args=(near, far), daemon=True).start()
            left = after
            while left > 0 and (data := far.recv(min(left, 64))):
                near.sendall(data)
                left -= len(data)
            near.shutdown(socket.SHUT_RDWR)

    def pump(near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(65536):
                far.sendall(data)

    def listen() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                connections.append(near.fileno())
                threading.Thread(target=carry, args=(near,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
        listener.shutdown(socket.SHUT_RDWR)


def test_chat_fails_at_once_if_never_connected_and_reconnects_later() -> None:
    nobody = TransientError("no answer")
    nobody.__cause__ = httpx2.ConnectError("refused")
    with pytest.raises(TransientError):
        calls.ChatStreamState().record_failure(nobody)
    begun, waits = calls.ChatStreamState(), calls.ChatStreamState()
    begun.record_event(calls.ChatChunk("1", "chatcmpl-0", []))
    waits.record_failure(TransientError("the server starts"))
    assert begun.record_failure(nobody) > 0 and waits.record_failure(nobody) > 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with connect(f"http://127.0.0.1:{port}") as client, pytest.raises(TransientError, match="no answer from"):
        next(client.chat("hello"))


def test_chat_replaces_an_unused_idempotency_key_but_not_a_used_one() -> None:
    """Given a part of the server's queue that is away, then a key that nobody has used is replaced, at once; after a
    connection that broke the key stays, because the chat may be there."""
    conversation = calls.ChatStreamState()
    first = conversation.headers["idempotency-key"]
    assert conversation.record_failure(KeyUnavailable("away")) == 0
    second = conversation.headers["idempotency-key"]
    assert (second != first, conversation.headers["unfuse-new-key"]) == (True, "true")

    assert conversation.record_failure(TransientError("the connection broke")) > 0
    assert conversation.record_failure(KeyUnavailable("away")) > 0
    assert conversation.headers == {"idempotency-key": second}

    for _ in range(calls.RECONNECTS - 2):
        conversation.record_failure(KeyUnavailable("away"))
    with pytest.raises(KeyUnavailable):
        conversation.record_failure(KeyUnavailable("away"))
