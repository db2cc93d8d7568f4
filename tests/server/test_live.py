"""Videos that are read while they are made; the test is the decoder."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import av
import httpx2
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from tests.core.graphs import object_for
from tests.examples import examples
from tests.server.served import WORKER, Served, serve
from tools.cards import PICTURES
from unfuse.core.messages import TaskCompleted, TaskFailed
from unfuse.core.request import Event, RequestContext, Timings, new_request_id
from unfuse.core.task import Lease
from unfuse.edge.access import ResponseAborted
from unfuse.server.gateway import Gateway
from unfuse.server.videos import VideoStream
from unfuse.stages.media import VideoWriter
from unfuse.stores.results import fragment_name, open_results
from unfuse.testing.queue_samples import lease_request

URL = "/v1/videos"
STAGE = "vae_decode.0"
ASKED = {"model": PICTURES.name, "prompt": "a red circle", "num_frames": 17}


def scene(seed: int = 0, frames: int = 17, side: int = 32) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (frames, side, side, 3), np.uint8)


def filmed(frames: NDArray[np.uint8]) -> tuple[list[bytes], bytes]:
    """The parts that a decoder makes of frames, of one frame and then of four each, and the finished file."""
    video = VideoWriter(8)
    parts = [video.add(piece) for piece in np.split(frames, range(1, len(frames), 4))]
    (media,) = video.finish()
    return parts, media.data


PARTS, FILE = filmed(scene())
STREAM = b"".join(PARTS)
OTHERS, OTHER = filmed(scene(seed=1))


def shown(data: bytes) -> NDArray[np.uint8]:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


class Decoder:
    """Has the last stage of a new request, by now at its first attempt."""

    def __init__(self, served: Served, http: httpx2.Client) -> None:
        self._served = served
        self.id = str(http.post(URL, json=ASKED).json()["id"])
        self.lease = self._next()

    def _next(self) -> Lease:
        """Do what comes before the last stage, and take that."""
        queue = self._served.queue
        while True:
            asked = queue.lease(WORKER.id, lease_request(*WORKER.pools), 600.0, wait=20.0)
            (lease,) = self._served.run(asked)
            if lease.task.planned.final:
                return lease
            said = Event("progress", 0.0, lease.claim.stage, 9, WORKER.id, 9, 9)
            self._served.run(queue.progress(lease.claim, [said]))
            output = msgspec.structs.replace(object_for(lease.claim), owner=WORKER.id)
            self._served.run(
                self._served.scheduler.complete(TaskCompleted(lease.claim, output, (), Timings()), WORKER.id)
            )

    def makes(self, step: int, part: bytes, tells: bool = True) -> None:
        claim = self.lease.claim
        self._served.results.attach(self.id, fragment_name(claim.attempt, step), part, durable=False)
        event = Event("progress", 0.0, claim.stage, claim.attempt, WORKER.id, step, 5)
        if tells:
            self._served.run(self._served.queue.progress(claim, [event]))

    def dies(self) -> None:
        """Its compute process does, and it takes the task again."""
        self._served.run(self._served.scheduler.fail(TaskFailed(self.lease.claim, "crash", "killed"), WORKER.id))
        self.lease = self._next()

    def fails(self) -> None:
        self._served.run(self._served.scheduler.fail(TaskFailed(self.lease.claim, "permanent", "torn"), WORKER.id))

    def finishes(self, file: bytes = FILE) -> None:
        result = self._served.results.put(self.id, 0, "video/mp4", file)
        self._served.run(
            self._served.scheduler.complete(TaskCompleted(self.lease.claim, None, (result,), Timings()), WORKER.id)
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("results"), idle=False, works=False) as running:
        running.run(running.queue.register(WORKER, (PICTURES,)))
        yield running


@pytest.fixture
def decoder(served: Served, http: httpx2.Client) -> Decoder:
    return Decoder(served, http)


def live(http: httpx2.Client, id: str) -> Any:
    return http.stream("GET", f"{URL}/{id}/content", params={"stream": "1"})


class Reader:
    """Reads a stream as far as it is told to."""

    def __init__(self, response: httpx2.Response) -> None:
        assert response.status_code == 200
        assert response.headers["content-type"] == "video/mp4"
        self._chunks, self.has = response.iter_raw(), b""

    def up_to(self, count: int) -> bytes:
        """All bytes so far, once there are so many."""
        while len(self.has) < count:
            self.has += next(self._chunks)
        return self.has

    def rest(self) -> bytes:
        for chunk in self._chunks:
            self.has += chunk
        return self.has

    def is_broken_off(self) -> bool:
        with pytest.raises(httpx2.RemoteProtocolError):
            self.rest()
        return True


def attached(served: Served, id: str) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(served.folder / id) if name != "0")
    return []


def let_go(served: Served, id: str) -> bool:
    """Wait until nothing is kept beside the results: it goes right after the last event."""
    while attached(served, id):
        pass
    return True


def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> bool:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_video_fragments_are_streamed_as_they_are_decoded(
    served: Served, http: httpx2.Client, decoder: Decoder
) -> None:
    with live(http, decoder.id) as response:
        reader = Reader(response)
        for step, part in enumerate(PARTS, 1):
            decoder.makes(step, part)
            so_far = b"".join(PARTS[:step])
            assert reader.up_to(len(so_far)) == so_far
            assert np.array_equal(shown(so_far), shown(FILE)[: 4 * step - 3])
        assert attached(served, decoder.id) == [f"attached-part-1-{step}" for step in range(1, 6)]
        decoder.finishes()
        assert reader.rest() == STREAM
    assert let_go(served, decoder.id)


def test_completed_video_has_the_same_stream_and_an_ordinary_file(http: httpx2.Client, decoder: Decoder) -> None:
    decoder.makes(1, PARTS[0])
    decoder.finishes()
    with live(http, decoder.id) as response:
        assert Reader(response).rest() == STREAM
    for _ in range(2):
        whole = http.get(f"{URL}/{decoder.id}/content")
        assert (whole.content, whole.headers["content-length"]) == (FILE, str(len(FILE)))
    assert http.get(f"{URL}/{decoder.id}/content", headers={"range": "bytes=5-9"}).content == FILE[5:10]
    assert http.get(f"{URL}/{decoder.id}/content?stream=0").content == FILE


def test_late_reader_gets_the_stream_from_the_beginning(http: httpx2.Client, decoder: Decoder) -> None:
    for step in (1, 2, 3):
        decoder.makes(step, PARTS[step - 1])
    with live(http, decoder.id) as response:
        reader = Reader(response)
        assert reader.up_to(len(b"".join(PARTS[:3]))) == b"".join(PARTS[:3])
        decoder.finishes()
        assert reader.rest() == STREAM


def test_one_event_announces_all_earlier_fragments(http: httpx2.Client, decoder: Decoder) -> None:
    with live(http, decoder.id) as response:
        reader = Reader(response)
        decoder.makes(1, PARTS[0], tells=False)
        decoder.makes(2, PARTS[1])
        assert reader.up_to(len(PARTS[0] + PARTS[1])) == PARTS[0] + PARTS[1]
        decoder.finishes()
        assert reader.rest() == STREAM


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_stream_continues_in_the_next_attempt_after_a_crash(http: httpx2.Client, decoder: Decoder, sent: int) -> None:
    with live(http, decoder.id) as response:
        reader = Reader(response)
        for step in range(1, sent + 1):
            decoder.makes(step, PARTS[step - 1])
        begun = b"".join(PARTS[:sent])
        assert reader.up_to(len(begun)) == begun
        decoder.dies()
        for step in range(1, 4):
            decoder.makes(step, PARTS[step - 1])
        assert reader.up_to(len(b"".join(PARTS[:3]))) == b"".join(PARTS[:3])
        decoder.finishes()
        assert reader.rest() == STREAM


def test_retry_with_other_bytes_aborts_the_stream_but_not_the_file(
    served: Served, http: httpx2.Client, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    with live(http, decoder.id) as response:
        reader = Reader(response)
        decoder.makes(1, PARTS[0])
        reader.up_to(len(PARTS[0]))
        decoder.dies()
        decoder.makes(1, OTHERS[0])
        assert reader.is_broken_off()
        assert reader.has == PARTS[0]
    assert no_error_is_logged(caplog)
    decoder.finishes(OTHER)
    assert http.get(f"{URL}/{decoder.id}/content").content == OTHER
    with live(http, decoder.id) as response:
        assert Reader(response).rest() == b"".join(OTHERS)
    assert let_go(served, decoder.id)


def test_stream_is_aborted_if_the_file_does_not_start_with_sent_bytes(http: httpx2.Client, decoder: Decoder) -> None:
    with live(http, decoder.id) as response:
        reader = Reader(response)
        decoder.makes(1, PARTS[0])
        reader.up_to(len(PARTS[0]))
        decoder.dies()
        decoder.finishes(OTHER)
        assert reader.is_broken_off()
        assert reader.has == PARTS[0]


def test_stream_is_aborted_if_the_file_is_shorter_than_sent_bytes(http: httpx2.Client, decoder: Decoder) -> None:
    _, short = filmed(scene()[:3])
    with live(http, decoder.id) as response:
        reader = Reader(response)
        decoder.makes(1, PARTS[0])
        decoder.makes(2, PARTS[1])
        reader.up_to(len(PARTS[0] + PARTS[1]))
        decoder.finishes(short)
        assert reader.is_broken_off()


@pytest.mark.parametrize("end", ["cancelled", "failed", "deleted"])
@pytest.mark.parametrize("parts", [0, 2])
def test_unsuccessful_request_aborts_the_stream_and_deletes_fragments(
    served: Served, http: httpx2.Client, decoder: Decoder, end: str, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    with live(http, decoder.id) as response:
        reader = Reader(response)
        for step in range(1, parts + 1):
            decoder.makes(step, PARTS[step - 1])
        reader.up_to(len(b"".join(PARTS[:parts])))
        if end == "cancelled":
            http.post(f"/v1/requests/{decoder.id}/cancel")
        elif end == "failed":
            decoder.fails()
        else:
            http.delete(f"{URL}/{decoder.id}")
        assert reader.is_broken_off()
    assert no_error_is_logged(caplog)
    assert let_go(served, decoder.id)
    answer = http.get(f"{URL}/{decoder.id}/content?stream=1")
    assert answer.status_code == (404 if end == "deleted" else 409)


def test_file_of_a_cancelled_request_is_not_streamed(served: Served, http: httpx2.Client, decoder: Decoder) -> None:
    with live(http, decoder.id) as response:
        reader = Reader(response)
        decoder.makes(1, PARTS[0])
        reader.up_to(len(PARTS[0]))
        served.results.put(decoder.id, 0, "video/mp4", FILE)
        http.post(f"/v1/requests/{decoder.id}/cancel")
        assert reader.is_broken_off()
        assert reader.has == PARTS[0]


def test_fragments_of_a_dead_letter_are_deleted(served: Served, http: httpx2.Client, decoder: Decoder) -> None:
    for _ in range(2):
        decoder.makes(1, PARTS[0])
        failed = TaskFailed(decoder.lease.claim, "crash", "killed")
        served.run(served.scheduler.fail(failed, WORKER.id))
        if http.get(f"/v1/requests/{decoder.id}").json()["status"] == "failed":
            break
        decoder.lease = decoder._next()
    assert http.get(f"/v1/dead/{decoder.id}").status_code == 200
    assert let_go(served, decoder.id)
    http.delete(f"/v1/dead/{decoder.id}")


def test_disconnected_reader_does_not_affect_other_readers(
    served: Served, http: httpx2.Client, decoder: Decoder
) -> None:
    with live(http, decoder.id) as staying:
        reader = Reader(staying)
        with live(http, decoder.id) as leaving:
            decoder.makes(1, PARTS[0])
            Reader(leaving).up_to(1)
        decoder.makes(2, PARTS[1])
        reader.up_to(len(PARTS[0] + PARTS[1]))
        decoder.finishes()
        assert reader.rest() == STREAM
    assert http.get("/health").status_code == 200


def test_slow_reader_blocks_nobody_and_gets_the_rest_from_the_file(
    served: Served, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets hold less than these parts together: some are gone before they are asked for."""
    parts, file = filmed(scene(frames=37, side=512))
    beyond, had = VideoStream._unsent, list[int]()

    def noted(self: VideoStream, path: Path) -> Iterator[bytes]:
        had.append(self._sent_fragments)
        return beyond(self, path)

    monkeypatch.setattr(VideoStream, "_unsent", noted)
    narrow = httpx2.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)])
    with httpx2.Client(base_url=served.url, timeout=600, transport=narrow) as http, live(http, decoder.id) as response:
        reader = Reader(response)
        for step, part in enumerate(parts, 1):
            decoder.makes(step, part)
        decoder.finishes(file)
        assert let_go(served, decoder.id)
        assert reader.rest() == b"".join(parts)
    assert 0 < had[0] < len(parts)


def test_missing_fragment_is_replaced_by_bytes_of_the_finished_file(
    served: Served, http: httpx2.Client, decoder: Decoder
) -> None:
    with live(http, decoder.id) as response:
        reader = Reader(response)
        decoder.makes(1, PARTS[0])
        reader.up_to(len(PARTS[0]))
        decoder.makes(3, PARTS[2])
        decoder.makes(4, PARTS[3])
        decoder.finishes()
        assert reader.rest() == STREAM


def test_stream_of_a_result_that_is_no_video_returns_400(http: httpx2.Client, decoder: Decoder) -> None:
    frames = http.post(URL, json={**ASKED, "output_format": "png"}).json()["id"]
    for id, query in ((frames, "stream=1"), (decoder.id, "stream=1&variant=thumbnail"), (decoder.id, "stream=maybe")):
        answer = http.get(f"{URL}/{id}/content?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    assert http.get(f"{URL}/{decoder.id}/content").status_code == 409
    for id in (frames, decoder.id):
        http.post(f"/v1/requests/{id}/cancel")


def test_server_shutdown_aborts_video_streams(tmp_path: Path) -> None:
    with serve(tmp_path, idle=False, works=False) as served:
        served.run(served.queue.register(WORKER, (PICTURES,)))
        with httpx2.Client(base_url=served.url, timeout=600, trust_env=False) as http:
            decoder = Decoder(served, http)
            with live(http, decoder.id) as response:
                reader = Reader(response)
                decoder.makes(1, PARTS[0])
                reader.up_to(len(PARTS[0]))
                served.run(served.queue.close())
                assert reader.is_broken_off()


class Course:
    """What happens to a request, move by move: a gateway that sees it in this order. Attempts in `strays` differ."""

    def __init__(self, folder: Path, moves: Sequence[str], ends: bool, strays: set[int]) -> None:
        self.results, self.id = open_results(f"disk:{folder}?fsync=no"), new_request_id()
        self.queue, self.request = self, SimpleNamespace(params={"fps": 8})
        self.plan = SimpleNamespace(
            stages=[SimpleNamespace(name="denoise.0", final=False)] + [SimpleNamespace(name=STAGE, final=True)]
        )
        self._moves, self._ends, self._strays = moves, ends, strays
        self._attempt, self._made = 1, 0

    @property
    def parts(self) -> list[bytes]:
        """Those of the current attempt."""
        return OTHERS if self._attempt in self._strays else PARTS

    async def watch(self, request: str) -> AsyncIterator[Event]:
        late = Event("progress", stage=STAGE, attempt=1)
        for move in self._moves:
            now = Event("progress", stage=STAGE, attempt=self._attempt, step=self._made)
            if move.startswith("tells"):
                yield late if move == "tells late" else now
            late = now
            self._make(move)
        if self._ends:
            self.results.detach(self.id)
            self.results.put(self.id, 0, "video/mp4", OTHER if self.parts is OTHERS else FILE)

    def _make(self, move: str) -> None:
        if move == "makes" and self._made < len(PARTS):
            self._made += 1
            data = self.parts[self._made - 1]
            self.results.attach(self.id, fragment_name(self._attempt, self._made), data, durable=False)
        elif move == "dies":
            self._attempt, self._made = self._attempt + 1, 0
        elif move == "loses":
            self.results.detach(self.id)

    async def load(self, request: str) -> Any:
        return SimpleNamespace(context=SimpleNamespace(status="completed" if self._ends else "failed"), status="failed")


MOVES = st.sampled_from(["makes", "makes", "tells", "tells late", "loses", "dies"])


@given(moves=st.lists(MOVES, max_size=25), ends=st.booleans(), strays=st.sets(st.integers(1, 4), max_size=1))
@settings(max_examples=examples(100), deadline=None)
def test_stream_is_complete_or_aborted_under_any_sequence_of_events(
    moves: Sequence[str], ends: bool, strays: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Given attempts that die, parts that are lost, events that come late or never, and attempts that make others."""
    course = Course(tmp_path_factory.mktemp("moves"), moves, ends, strays)

    got, whole = asyncio.run(_read(VideoStream(cast("Gateway", course), cast("RequestContext", course))))

    assert STREAM.startswith(got) or b"".join(OTHERS).startswith(got)
    assert whole == (ends and got == b"".join(course.parts))
    if ends and not strays:
        assert got == STREAM


async def _read(live: VideoStream) -> tuple[bytes, bool]:
    """What a client gets, and whether that is all."""
    got = b""
    try:
        async for data in live.content():
            got += data
    except ResponseAborted:
        return got, False
    return got, True
