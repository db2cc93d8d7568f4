"""A video as a stream, from a real server: while the decoder works, is killed, or is cancelled, and in a browser."""

from __future__ import annotations

import http.client
import io
import json
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.integration.test_video import page_of
from tools.server import Server, computes_of, family_of, serving, until
from tools.tiny import SERVING, build

LONG = {"prompt": "a red circle", "num_frames": 41, "size": "128x128", "num_inference_steps": 2, "seed": 5}
"""Decoded in 21 steps, long enough to be stopped in the middle."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stream")
    model = build("wan", folder / "wan")
    (model / "serving.json").write_text(json.dumps({"defaults": SERVING | {"num_frames": LONG["num_frames"]}}))
    with serving(folder, str(model), "--workers", "all=1", UNFUSE_LEASE__TTL_S="2") as server:
        yield server.ready()


def film(server: Server, **more: Any) -> str:
    return str(server.post("/v1/videos", LONG | more)["id"])


def content(server: Server, id: str, query: str = "") -> Any:
    return urllib.request.urlopen(f"{server.url}/v1/videos/{id}/content{query}", timeout=600)


def whole(server: Server, id: str, query: str = "") -> bytes:
    with content(server, id, query) as answer:
        return bytes(answer.read())


def begun(answer: Any) -> bytes:
    """The first bytes of a stream, with at least one whole frame."""
    data: bytes = answer.read1(1 << 20)
    while b"mdat" not in playable(data):
        data += (more := answer.read1(1 << 20))
        assert more
    return data


def playable(data: bytes) -> bytes:
    """The boxes of a stream that have come as a whole."""
    end = 0
    while end + 4 <= len(data) and (after := end + int.from_bytes(data[end : end + 4], "big")) <= len(data):
        end = after
    return data[:end]


def frames(data: bytes) -> NDArray[np.uint8]:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def status(server: Server, id: str) -> str:
    return str(server.get(f"/v1/videos/{id}")["status"])


def decoder_of(server: Server, id: str) -> psutil.Process:
    return server.compute_of(id, "vae_decode.0")


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> bytes:
    """The stream of LONG, as it comes when nothing happens."""
    return whole(server, film(server), "?stream=1")


def test_frames_are_streamed_before_video_completes_and_match_file(server: Server) -> None:
    id = film(server, seed=6)
    with content(server, id, "?stream=1") as answer:
        data = begun(answer)
        with stopped(decoder_of(server, id)):
            assert status(server, id) == "in_progress"
            first = frames(playable(data))
            assert first.shape[1:] == (128, 128, 3)
        data += answer.read()
    file = whole(server, id)

    assert status(server, id) == "completed"
    assert np.array_equal(frames(data), frames(file))
    assert np.array_equal(frames(file)[: len(first)], first)
    assert len(frames(file)) == LONG["num_frames"]
    assert data == whole(server, id, "?stream=1")
    assert b"moof" not in file
    until(lambda: kept(server, id) == ["0"], "parts to be deleted")


def kept(server: Server, id: str) -> list[str]:
    """The files that are there of a request, whose folder may go while it is read."""
    return sorted(Path(name).name for name in glob(f"{server.folder}/**/{id}/*", recursive=True, include_hidden=True))


def with_compute(worker: int) -> list[psutil.Process]:
    """A worker and all of its processes, which need not be its children."""
    return [*family_of(worker), *computes_of(worker)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "whom",
    [pytest.param(computes_of, id="compute"), pytest.param(with_compute, id="worker", marks=pytest.mark.nightly)],
)
def test_video_stream_continues_with_same_bytes_after_decoder_kill(
    server: Server, undisturbed: bytes, whom: Callable[[int], list[psutil.Process]]
) -> None:
    """Given a decoder that is killed alone, or with its worker, which the latents go with."""
    id = film(server)
    with content(server, id, "?stream=1") as answer:
        data = begun(answer)
        decoder = decoder_of(server, id)
        decoder.send_signal(signal.SIGSTOP)
        (name,) = (one["worker"] for one in server.get(f"/v1/requests/{id}")["stages"] if one["name"] == "vae_decode.0")
        (pid,) = (worker["pid"] for worker in server.get("/v1/workers")["data"] if worker["id"] == name)
        for process in whom(pid):
            process.send_signal(signal.SIGKILL)
        data += answer.read()

    assert data == undisturbed
    assert np.array_equal(frames(whole(server, id)), frames(data))
    attempts = {one["name"]: one["attempt"] for one in server.get(f"/v1/requests/{id}")["stages"]}
    assert attempts["vae_decode.0"] > 1
    server.ready()


def test_cancel_aborts_video_stream_and_deletes_fragments(server: Server) -> None:
    id = film(server)
    with content(server, id, "?stream=1") as answer:
        begun(answer)
        decoder = decoder_of(server, id)
        with stopped(decoder):
            assert any(name.startswith("attached-part-") for name in kept(server, id))
            server.post(f"/v1/requests/{id}/cancel", {})
            with pytest.raises(http.client.IncompleteRead):
                answer.read()
    until(lambda: kept(server, id) == [], "parts to be deleted, also of the step that was under way")
    until(lambda: not any(worker["leased"] for worker in server.get("/v1/workers")["data"]), "the worker to be free")
    assert "Traceback" not in server.log()


def test_slow_or_disconnected_stream_readers_do_not_block_video(server: Server, undisturbed: bytes) -> None:
    id = film(server)
    host, port = server.url.removeprefix("http://").split(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect((host, int(port)))
    slow.sendall(f"GET /v1/videos/{id}/content?stream=1 HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    with content(server, id, "?stream=1") as leaves:
        begun(leaves)

    assert server.finished(id)["status"] == "completed"

    data = b""
    while more := slow.recv(65536):
        data += more
    slow.close()
    assert data.partition(b"\r\n\r\n")[2] == undisturbed


SEEN = 12
"""How many frames are compared in a browser, which decodes each from the beginning."""

PLAYS = """async url => {
    const video = document.createElement("video");
    document.body.append(video);
    const source = new MediaSource();
    video.src = URL.createObjectURL(source);
    await new Promise(opened => source.onsourceopen = opened);
    const buffer = source.addSourceBuffer('video/mp4; codecs="avc1.64000b"');
    const reader = (await fetch(url + "?stream=1")).body.getReader();
    window.first = new Promise((shown, failed) => {
        video.onloadeddata = shown;
        video.onerror = () => failed(new Error(video.error.message));
    });
    window.all = (async () => {
        for (let read = await reader.read(); !read.done; read = await reader.read()) {
            buffer.appendBuffer(read.value);
            await new Promise(taken => buffer.onupdateend = taken);
        }
        source.endOfStream();
    })();
    window.video = video;
}"""
PIXELS = """async ([url, count, rate]) => {
    const drawn = async video => {
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
        const context = canvas.getContext("2d", {willReadFrequently: true}), found = [];
        for (let step = 1; step <= count; step++) {
            const frame = step % count;
            const shown = new Promise(shown => {
                const look = (_, about) => Math.round(about.mediaTime * rate) === frame
                    ? shown() : video.requestVideoFrameCallback(look);
                video.requestVideoFrameCallback(look);
            });
            const there = new Promise(there => video.onseeked = there);
            video.currentTime = (frame + 0.5) / rate;
            await Promise.all([there, shown]);
            context.drawImage(video, 0, 0);
            const bytes = context.getImageData(0, 0, canvas.width, canvas.height).data;
            const digest = await crypto.subtle.digest("SHA-256", bytes);
            found.push(Array.from(new Uint8Array(digest)).join());
        }
        return found;
    };
    const file = document.createElement("video");
    document.body.append(file);
    file.src = URL.createObjectURL(await (await fetch(url)).blob());
    await new Promise(loaded => file.onloadeddata = loaded);
    return [await drawn(window.video), await drawn(file)];
}"""
FOLLOWS = """url => new Promise((ended, failed) => {
    const video = document.createElement("video");
    video.muted = true;
    video.playbackRate = 4;
    video.onended = () => ended([video.videoWidth, video.currentTime]);
    video.onerror = () => failed(new Error(video.error.message));
    video.src = url;
    document.body.append(video);
    video.play();
})"""


@pytest.mark.nightly
def test_browser_plays_stream_during_decode_with_frames_of_file(server: Server) -> None:
    with page_of(server) as page:
        id = film(server, seed=7)
        url = f"/v1/videos/{id}/content"
        page.evaluate(PLAYS, url)
        with content(server, id, "?stream=1") as answer:
            begun(answer)  # readers have been told of a frame
        with stopped(decoder_of(server, id)):
            assert status(server, id) == "in_progress"
            page.evaluate("() => window.first")
        page.evaluate("() => window.all")
        live, file = page.evaluate(PIXELS, [url, SEEN, 16])
        assert status(server, id) == "completed"
        other = film(server, seed=8, num_frames=17)
        width, end = page.evaluate(FOLLOWS, f"/v1/videos/{other}/content?stream=1")
    assert live == file
    assert len(set(file)) > SEEN / 2
    assert (width, end) == (128, pytest.approx(17 / 16, abs=0.01))
