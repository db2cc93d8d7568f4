"""What clients see: every operation from its start to its end, whatever it took, and what the server says of it later.

A client gives one idempotency key to an operation and repeats the call until it knows how it ended. What it knows is
its outcome: ok (it has read the result), fail (it was told that there will be none), unknown (it gave up before).
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import itertools
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec

from tests.chaos.oracle import expected

Outcome = Literal["ok", "fail", "unknown"]
Mode = Literal["wait", "events", "poll", "once"]
"""How a client learns of the end: by the call itself, by the event stream, by asking; "once" takes a 429 for an end."""

GIVE_UP_S = 240.0
"""How long a client keeps trying to learn how its operation ends."""

TERMINAL = ("completed", "failed", "cancelled", "expired")
LOST_CONNECTION = (OSError, http.client.HTTPException)


class Asked(msgspec.Struct, frozen=True):
    """What an operation asks for. A healthy one has to be completed, with the bytes that the oracle says."""

    prompt: str
    seed: int
    width: int = 16
    height: int = 16
    steps: int = 4
    healthy: bool = True

    @property
    def right(self) -> str:
        """The hash of the only right result."""
        asked = {"width": self.width, "height": self.height, "steps": self.steps}
        return hashlib.sha256(expected(self.prompt, self.seed, **asked)).hexdigest()

    def body(self, key: str) -> bytes:
        body = {
            "prompt": self.prompt,
            "seed": self.seed,
            "size": f"{self.width}x{self.height}",
            "num_inference_steps": self.steps,
            "metadata": {"operation": key},
        }
        return json.dumps(body).encode()


class Operation(msgspec.Struct):
    """One operation of one client. Times are Unix seconds; `ids` are all that the server ever gave it."""

    key: str
    asked: Asked
    mode: Mode
    started: float
    ended: float = 0.0
    outcome: Outcome = "unknown"
    ids: list[str] = []
    hashes: list[str] = []
    refused: int = 0
    """Times it was told 429 before it was accepted."""
    unwell: list[str] = []
    """Refusals that broke the rules: without Retry-After, or after acceptance."""
    lost: int = 0
    """Times a connection was lost, or the answer was 503."""
    error: str = ""

    @property
    def turned_away(self) -> bool:
        """Whether all it was ever told is that there is too much to do."""
        return self.outcome == "fail" and self.refused > 0 and not self.ids


class History:
    """Operations in the order in which they ended; kept in a file too if one is given."""

    def __init__(self, file: Path | None = None) -> None:
        self.operations: list[Operation] = []
        self._file, self._lock = file, threading.Lock()
        if file is not None and file.exists():
            lines = file.read_bytes().splitlines()
            self.operations = [msgspec.json.decode(line, type=Operation) for line in lines if line.endswith(b"}")]

    def add(self, operation: Operation) -> None:
        with self._lock:
            self.operations.append(operation)
            if self._file is not None:
                with self._file.open("ab") as file:
                    file.write(msgspec.json.encode(operation) + b"\n")


class Client:
    """Performs operations one after the other, at whichever of the gateways answers."""

    def __init__(self, ports: Sequence[int], history: History, rng: random.Random, stop: threading.Event) -> None:
        self._ports, self._history, self._rng, self._stop = list(ports), history, rng, stop
        self._rng.shuffle(self._ports)
        self._connection: http.client.HTTPConnection | None = None

    def perform(self, key: str, asked: Asked, mode: Mode) -> Operation:
        """Ask, and go on asking until it is known how it ended."""
        operation = Operation(key, asked, mode, time.time())
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline and not self._stop.is_set():
            try:
                if self._attempt(operation):
                    break
            except LOST_CONNECTION as error:
                operation.lost += 1
                operation.error = repr(error)
                self._turn()
                time.sleep(self._rng.uniform(0.02, 0.2))
        operation.ended = time.time()
        self._history.add(operation)
        return operation

    def close(self) -> None:
        if self._connection:
            self._connection.close()

    def _attempt(self, operation: Operation) -> bool:
        """One try; whether it is known now how the operation ended."""
        headers = {"content-type": "application/json", "idempotency-key": operation.key}
        if operation.mode in ("events", "poll"):
            headers["prefer"] = "respond-async"
        body = operation.asked.body(operation.key)
        status, answered, data = self._call("POST", "/v1/images/generations", body, headers)
        answer = json.loads(data)
        if status in (429, 503):
            return self._put_off(operation, status, answered.get("retry-after"), answer)
        if status == 200:
            _note(operation.ids, answer["id"])
            _note(operation.hashes, _sha(base64.b64decode(answer["data"][0]["b64_json"])))
            operation.outcome = "ok"
            return True
        if status == 202:
            _note(operation.ids, answer["id"])
            return self._follow(operation, answer["id"])
        operation.outcome, operation.error = "fail", f"{status} {answer['error']['message']}"
        if status >= 500 and (found := answer["error"]["message"].partition(":")[0]).startswith("req_"):
            _note(operation.ids, found)
        return True

    def _put_off(self, operation: Operation, status: int, retry_after: str | None, answer: Any) -> bool:
        """Wait as long as one is told to. 429 is the answer to who has not been accepted, and only to them."""
        if retry_after is None or float(retry_after) <= 0:
            operation.unwell.append(f"{status} without Retry-After: {answer}")
        if status == 429:
            operation.refused += 1
            if operation.ids:
                operation.unwell.append(f"429 after {operation.ids[0]} was accepted")
        else:
            operation.lost += 1
            self._turn()
        operation.error = f"{status} {answer['error']['message']}"
        if (status, operation.mode) == (429, "once"):
            time.sleep(self._rng.uniform(0.02, 0.1))
            operation.outcome = "fail"
            return True
        time.sleep(min(float(retry_after or 1), 2.0) * self._rng.uniform(0.5, 1.0))
        return False

    def _follow(self, operation: Operation, request: str) -> bool:
        """Wait for the end of an accepted request, by its events or by asking again and again."""
        last = 0
        while not self._stop.is_set():
            if operation.mode == "events":
                last = self._listen(request, last)
            status, _, data = self._call("GET", f"/v1/requests/{request}")
            if status == 503:
                raise ConnectionError("503")
            view = json.loads(data)
            if status != 200:
                operation.outcome, operation.error = "fail", f"{status} {view['error']['message']}"
                return True
            if view["status"] in TERMINAL:
                return self._read(operation, view)
            time.sleep(self._rng.uniform(0.02, 0.1))
        return False

    def _read(self, operation: Operation, view: dict[str, Any]) -> bool:
        if view["status"] != "completed":
            operation.outcome, operation.error = "fail", f"{view['status']}: {view['error']}"
            return True
        status, _, data = self._call("GET", f"/v1/requests/{view['id']}/result/0")
        if status == 503:
            raise ConnectionError("503")
        _note(operation.hashes, _sha(data) if status == 200 else f"{status} instead of a result")
        operation.outcome = "ok"
        return True

    def _listen(self, request: str, last: int) -> int:
        """Follow the event stream to its end, or to where it breaks; returns the last id that was read."""
        with closing(http.client.HTTPConnection("127.0.0.1", self._ports[0], timeout=20)) as connection:
            connection.request("GET", f"/v1/requests/{request}/events", headers={"last-event-id": str(last)})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ConnectionError(str(answer.status))
            for line in answer:
                if line.startswith(b"id: "):
                    last = int(line[4:])
        return last

    def _call(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._ports[0], timeout=60)
        try:
            self._connection.request(method, path, body, headers or {})
            answer = self._connection.getresponse()
            return answer.status, answer.headers, answer.read()
        except LOST_CONNECTION:
            self._connection.close()
            self._connection = None
            raise

    def _turn(self) -> None:
        """Go to the next gateway."""
        self._ports.append(self._ports.pop(0))
        self.close()
        self._connection = None


def _note(known: list[str], one: str) -> None:
    if one not in known:
        known.append(one)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Load:
    """Several clients at work at once, in the background."""

    def __init__(
        self, ports: Sequence[int], work: Iterable[tuple[str, Asked, Mode]], clients: int, seed: int, history: History
    ) -> None:
        self.history = history
        self._work: Iterator[tuple[str, Asked, Mode]] = iter(work)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._errors: list[BaseException] = []
        drawn = [random.Random(f"{seed} {number}") for number in range(clients)]
        self._clients = [Client(ports, history, rng, self._stop) for rng in drawn]
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in self._clients]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def busy(self) -> bool:
        """Whether a client is still at work."""
        if self._errors:
            raise self._errors[0]
        return any(thread.is_alive() for thread in self._threads)

    def finish(self) -> History:
        """Wait until all is done."""
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self.history

    def _run(self, client: Client) -> None:
        try:
            while not self._stop.is_set() and (work := self._next()):
                client.perform(*work)
        except BaseException as error:
            self._errors.append(error)
        finally:
            client.close()

    def _next(self) -> tuple[str, Asked, Mode] | None:
        with self._lock:
            return next(self._work, None)


def healthy(count: int, name: str, seed: int, modes: Sequence[Mode] = ("wait", "events", "poll")) -> Iterator[Any]:
    """So many operations that have to be completed: no two ask for the same, so that a mix-up shows."""
    rng, mode = random.Random(f"{name} {seed}"), itertools.cycle(modes)
    for number in range(count):
        asked = Asked(f"{name} {number}", rng.randrange(2**31), width=8 * rng.randint(1, 8), steps=rng.randint(1, 4))
        yield f"{name}-{seed}-{number}", asked, next(mode)


class Leaks(msgspec.Struct, frozen=True):
    """What is left when every request is over."""

    bytes: int = 0
    leases: int = 0
    tasks: int = 0
    requests: int = 0
    reported: int = 0
    """Leaks that workers have found themselves, and logged."""

    @property
    def any(self) -> bool:
        return bool(self.bytes or self.leases or self.tasks or self.requests or self.reported)


class Told(msgspec.Struct):
    """What the server tells of one request, once all is over: its object, its events, its bytes at every gateway."""

    view: dict[str, Any]
    events: list[dict[str, Any]]
    hashes: list[str]


class Final(msgspec.Struct):
    """What the server tells of everything. `dead` has the evidence by id."""

    requests: dict[str, Told]
    dead: dict[str, str] = {}
    leaks: Leaks = Leaks()


def observe(urls: Sequence[str], drained: Callable[[], Leaks]) -> Final:
    """Read everything back, once nothing is left to do (or nothing changes any more)."""
    leaks = drained()
    views = {view["id"]: view for view in _pages(urls[0], "/v1/requests")}
    dead = {view["id"]: json.dumps(view) for view in _pages(urls[0], "/v1/dead")}
    requests = {}
    for id, view in views.items():
        hashes = [
            _sha(_get(f"{url}/v1/requests/{id}/result/{index}")) for url in urls for index in range(len(view["result"]))
        ]
        requests[id] = Told(view, events_of(urls[0], id), hashes)
    return Final(requests, dead, leaks)


def events_of(url: str, request: str) -> list[dict[str, Any]]:
    """All the events of a request that is over."""
    lines = _get(f"{url}/v1/requests/{request}/events").splitlines()
    return [json.loads(line[5:]) for line in lines if line.startswith(b"data:")]


def _pages(url: str, path: str) -> Iterator[dict[str, Any]]:
    after = ""
    while True:
        page = json.loads(_get(f"{url}{path}?limit=500{after}"))
        yield from page["data"]
        if not page.get("has_more"):
            return
        after = f"&after={page['last_id']}"


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=600) as answer:
        return bytes(answer.read())
