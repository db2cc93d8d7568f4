"""What servers answer, tell and make of a dozen requests, over SQLite, over Redis, and on two hosts."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.comparing import NUMBER, UNORDERED, steady
from tests.integration.renames import RENAMES
from tests.integration.seen import draw, said, shown
from tests.netns import second_host
from tools.redis_server import RedisServer
from tools.server import Server, environment, serving, unfuse, until
from tools.tiny import build
from tools.tiny_language import make_language_model
from tools.tiny_vision import make_vision_model

ROOT = Path(__file__).parents[2]
FLAGS = ("--threads", "1", "--arena", "64MiB", "--kv", "8MiB")
LATER = {"prefer": "respond-async"}
IMAGES, EDITS, VIDEOS, CHATS = "/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/chat/completions"

SHAPE: dict[str, Any] = {"model": "unfuse/shapes", "prompt": "a red circle on white", "seed": 1}
CHAT: dict[str, Any] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "what is the capital of France"}],
    "max_tokens": 8,
    "seed": 3,
    "logit_bias": {"0": -100, "2": -100},
}
FORM = {"prompt": "a red circle", "seed": "3", "size": "32x32"}
POSTED: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "picture": (IMAGES, SHAPE | {"response_format": "b64_json"}, {}),
    "two pictures": (IMAGES, SHAPE | {"n": 2, "seed": 7, "output_format": "webp", "size": "96x64"}, LATER),
    "picture without guidance": (IMAGES, SHAPE | {"guidance_scale": 1.0, "num_inference_steps": 7}, LATER),
    "picture again": (IMAGES, SHAPE, LATER | {"idempotency-key": "again"}),
    "picture once more": (IMAGES, SHAPE, LATER | {"idempotency-key": "again"}),
    "video": (VIDEOS, SHAPE | {"seed": 2, "num_frames": 5}, {}),
    "frames": (VIDEOS, SHAPE | {"seed": 8, "num_frames": 5, "output_format": "png"}, LATER),
    "picture of two encoders": (IMAGES, {"model": "redraw", "prompt": "waves at dusk", "seed": 9}, LATER),
    "chat": (CHATS, CHAT | {"temperature": 0, "logprobs": True, "top_logprobs": 2}, {}),
    "sampled chats": (CHATS, CHAT | {"temperature": 1, "n": 2}, {}),
    "wrong size": (IMAGES, SHAPE | {"size": "33x33"}, {}),
    "unknown parameter": (IMAGES, SHAPE | {"sed": 1}, {}),
    "unknown model": (IMAGES, SHAPE | {"model": "nobody"}, {}),
    "wrong temperature": (CHATS, CHAT | {"temperature": 3}, {}),
    "picture of a chat model": (IMAGES, SHAPE | {"model": "chat"}, {}),
}
"""Where each is sent, its body, its headers."""

STREAMED = {
    "streamed chat": CHAT | {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
    "refused stream": CHAT | {"stream": True, "temperature": 3},
}
READ = ("/health", "/ready", "/v1/models", "/v1/models/redraw", "/v1/requests/req_none", "/v1/nothing")
LISTED = ("/v1/workers", "/v1/pools")
LONG = SHAPE | {"num_inference_steps": 100, "num_frames": 17, "size": "256x256"}
STEPS = ("progress", "appended")
"""Events that tell of steps, in which others may come between."""

EARLY = ("status", "state", "stage", "step", "steps", "progress", "queue_position", "eta_s", "started_at", "cost")
"""What a request that is not over says of how far it is."""

UNSTEADY = {"unfuse_inter_token_seconds"}
"""Metrics that count what comes together."""

UNHEARD = {"date", "content-length", "x-request-id"}
"""Headers that tell of one answer."""


def models(folder: Path) -> list[str]:
    """The arguments of a server of the built-in model and of tiny ones that redraw, edit, talk and see."""
    made = [
        build("flux", folder / "redraw"),
        build("kontext", folder / "edit"),
        make_language_model(folder / "chat"),
        make_vision_model(folder / "seeing"),
    ]
    names = ["unfuse/shapes", *(path.name for path in made)]
    return ["unfuse/shapes", *map(str, made), *(f"--served-model-name={name}" for name in names), *FLAGS]


Gateways = tuple[Server, ...]


@contextmanager
def sqlite(folder: Path, arguments: list[str]) -> Iterator[Gateways]:
    """A server with one worker that has all."""
    with serving(folder, *arguments, "--workers", "all=1") as server:
        yield (server.ready(),)


@contextmanager
def redis_queue(folder: Path) -> Iterator[list[str]]:
    redis = RedisServer(folder)
    try:
        yield ["--queue", redis.url, "--results", f"disk:{folder}/results"]
    finally:
        redis.stop()


@contextmanager
def two_gateways(folder: Path, arguments: list[str]) -> Iterator[Gateways]:
    """A gateway without workers, which is asked, and one with a worker for each role, which is read from."""
    for name in ("one", "other"):
        (folder / name).mkdir()
    with (
        redis_queue(folder) as shared,
        serving(folder / "one", *arguments, *shared, "--workers", "split") as one,
        serving(folder / "other", *arguments, *shared, "--workers", "none") as other,
    ):
        one.ready()
        yield other.ready(), one


@contextmanager
def two_hosts(folder: Path, arguments: list[str]) -> Iterator[Gateways]:
    """A server whose denoiser and decode worker are on another host."""
    keys = ("--keys", f"{folder}/keys")
    subprocess.run(unfuse("keys", "new", keys[1]), env=environment(folder), check=True, capture_output=True)
    here = "encoder=1,decoder=1,vision=1,prefill=1"
    with (
        second_host() as host,
        redis_queue(folder) as shared,
        serving(folder, *arguments, *shared, *keys, "--workers", here, at=host.near) as server,
    ):
        until(lambda: server.get("/health"), "the server to answer", server.process)
        for role in ("denoiser", "decode"):
            server.worker(role, *keys, "--threads", "1", "--kv", "8MiB", within=host.enter)
        yield (server.ready(),)


LAYOUTS: dict[str, Callable[..., Any]] = {"sqlite": sqlite, "redis": two_gateways, "hosts": two_hosts}


def digest(data: bytes) -> dict[str, str]:
    """Digests of a file, and of its pixels where it is a picture."""
    found = {"sha256": hashlib.sha256(data).hexdigest()}
    if not data.startswith((b"\x89PNG", b"RIFF", b"\xff\xd8")):
        return found
    with Image.open(io.BytesIO(data)) as image:
        return found | {"pixels": hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()}


def digested(found: Any) -> Any:
    """The same with digests for the files in it."""
    if isinstance(found, dict):
        return {
            key: {"digest": digest(base64.b64decode(value))} if key == "b64_json" and value else digested(value)
            for key, value in found.items()
        }
    return [digested(one) for one in found] if isinstance(found, list) else found


def body_of(answer: httpx2.Response) -> Any:
    kind = answer.headers.get("content-type", "")
    return digested(answer.json()) if "json" in kind else {"digest": digest(answer.content)}


def recorded_answer(answer: httpx2.Response) -> dict[str, Any]:
    """Its status, what its headers say, and its body."""
    headers = {name: value for name, value in sorted(answer.headers.items()) if name not in UNHEARD}
    body = body_of(answer)
    if isinstance(body, dict) and body.get("status") in ("queued", "in_progress"):
        hide(body, *EARLY)
        body |= {"stages": [{"name": stage["name"]} for stage in body["stages"]]} if "stages" in body else {}
    return {"status": answer.status_code, "headers": headers, "body": body}


def told_of(events: list[dict[str, Any]], broken_off: bool) -> dict[str, Any]:
    """Events by stage, since stages may run at one time; what is told of steps comes last, as one event of a type.

    An event that is told twice, as after a call whose answer was lost, is one.
    """
    stages = dict[str, list[dict[str, Any]]]()
    for event in events:
        of = stages.setdefault(event["stage"], [])
        if event["type"] not in STEPS and not (of and steady(of[-1], {}) == steady(event, {})):
            of.append(event)
    for stage, of in stages.items():
        for kind in STEPS:
            told = [event for event in events if event["stage"] == stage and event["type"] == kind]
            if kind == "progress" and told and told[-1]["steps"] == 1:  # it may come too late to be told
                continue
            of += [told[-1] | {"step": steps_in(told, broken_off)}] if told else []
    return dict(sorted(stages.items()))


def steps_in(events: list[dict[str, Any]], broken_off: bool) -> object:
    """Which steps these tell of; the last ones may come too late to be told."""
    steps = [event["step"] for event in events]
    if broken_off:
        return NUMBER
    if events[0]["type"] == "appended":
        return f"to {steps[-1]}"
    return "each from 1" if steps == [*range(1, steps[-1] + 1)] else steps


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chunks of a streamed chat; texts that follow each other are one, since tokens may come together."""
    found = list[dict[str, Any]]()
    for chunk in chunks:
        if found and _text_alone(chunk) and _text_alone(found[-1]):
            found[-1]["choices"][0]["delta"]["content"] += chunk["choices"][0]["delta"]["content"]
        else:
            found.append(chunk)
    return found


def _text_alone(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices") or [{}]
    return [*choices[0].get("delta", {})] == ["content"] and not choices[0].get("finish_reason")


def recorded_stream(lines: list[str]) -> dict[str, Any]:
    """What a server-sent stream says, and by which fields."""
    said = [line for line in lines if line and not line.startswith(":")]
    data = [line.partition(": ")[2] for line in said if line.startswith("data")]
    chunks = [json.loads(one) for one in data if one.startswith("{")]
    return {
        "lines": sorted({line.partition(":")[0] for line in said}),
        "chunks": joined(chunks),
        "other": [one for one in data if not one.startswith("{")],
    }


def recorded_metrics(text: str) -> dict[str, Any]:
    """Names, labels and their values; and what was counted, but for seconds and bytes."""
    found, unsteady = dict[str, Any](), {RENAMES.metrics.get(name, name) for name in UNSTEADY}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        name = family.name + "_total" * (family.type == "counter")
        labels, counts = dict[str, set[str]](), dict[str, float]()
        for sample in family.samples:
            own = {key: str(steady(value, {})) for key, value in sample.labels.items() if key != "le"}
            for key, value in own.items():
                labels.setdefault(key, set()).add(value)
            measured = name in unsteady or re.search("_(bytes|seconds|money)_total$", name)
            if sample.name.endswith(("_total", "_count")) and not measured:
                counts[json.dumps(own)] = counts.get(json.dumps(own), 0) + sample.value
        totals = [{"labels": json.loads(own), "total": int(total)} for own, total in counts.items()]
        found[name] = {
            "type": family.type,
            "help": family.documentation,
            "labels": {key: {UNORDERED: sorted(values)} for key, values in labels.items()},
            **({"totals": {UNORDERED: totals}} if totals else {}),
        }
    return {"metrics": dict(sorted(found.items()))}


class Recorder:
    """Asks one gateway, and reads what becomes of it from the last."""

    def __init__(self, gateways: Gateways, folder: Path) -> None:
        self._gateways, self._folder = gateways, folder
        self._ask, self._read = (httpx2.Client(base_url=one.url, timeout=600) for one in (gateways[0], gateways[-1]))

    def close(self) -> None:
        self._ask.close()
        self._read.close()

    def record(self) -> dict[str, Any]:
        """All requests, one after the other, then what the gateways tell of themselves."""
        requests = {name: self._posted(*case) for name, case in POSTED.items()}
        requests |= {name: self._form(**case) for name, case in self._forms().items()}
        requests |= {name: self._streamed(body) for name, body in STREAMED.items()}
        requests |= {"chat with a picture": self._posted(CHATS, self._seeing(), {}), "cancelled": self._cancelled()}
        self._beaten()
        found = {"requests": requests, "gateways": [self._told(gateway) for gateway in self._gateways]}
        return dict(steady(found, RENAMES.fields, str(self._folder)))

    def _posted(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        return self._followed(self._ask.post(path, json=body, headers=headers))

    def _followed(self, answer: httpx2.Response) -> dict[str, Any]:
        """An answer, and what becomes of the request."""
        request = answer.json().get("id") if answer.is_success else None
        return {"answer": recorded_answer(answer)} | (self._made(request) if request else {})

    def _made(self, request: str, broken_off: bool = False) -> dict[str, Any]:
        path = f"/v1/requests/{request}"
        lines = self._read.get(f"{path}/events").text.splitlines()
        if not any(line.startswith("data:") for line in lines):
            return {"view": recorded_answer(self._read.get(path)), "lines": lines}
        events = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
        view = self._read.get(path).json()
        files = [self._read.get(f"{path}/result/{number}") for number in range(len(view.get("result") or ()))]
        return {
            "lines": sorted({line.partition(":")[0] for line in lines if line}),
            "events": told_of(events, broken_off),
            "view": view,
            "results": [recorded_answer(file) for file in files],
        }

    def _forms(self) -> dict[str, dict[str, Any]]:
        picture, hole = self._folder / "picture.png", self._folder / "hole.png"
        draw(picture, 40, 36)
        mask = Image.new("RGBA", (40, 36), (0, 0, 0, 255))
        mask.paste((0, 0, 0, 0), (8, 6, 30, 20))
        mask.save(hole)
        return {
            "edit": {"fields": FORM | {"model": "edit"}, "image": picture},
            "redrawn": {"fields": FORM | {"model": "redraw", "strength": "0.6"}, "image": picture},
            "redrawn in a mask": {"fields": FORM | {"model": "redraw"}, "image": picture, "mask": hole},
            "edit of no picture": {"fields": FORM | {"model": "edit"}, "image": Path(__file__)},
        }

    def _form(self, fields: dict[str, str], **files: Path) -> dict[str, Any]:
        sent = {name: ("a.png", path.read_bytes()) for name, path in files.items()}
        return self._followed(self._ask.post(EDITS, data=fields, files=sent))

    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._ask.post(CHATS, json=body)
        if not answer.is_success:
            return {"answer": recorded_answer(answer)}
        headers = {name: value for name, value in sorted(answer.headers.items()) if name not in UNHEARD}
        return {"status": answer.status_code, "headers": headers, "stream": recorded_stream(answer.text.splitlines())}

    def _seeing(self) -> dict[str, Any]:
        parts = [said("what is "), shown(draw(self._folder / "seen.png", 90, 130, 1))]
        return CHAT | {"model": "seeing", "temperature": 0, "messages": [{"role": "user", "content": parts}]}

    def _cancelled(self) -> dict[str, Any]:
        """A video that is cancelled at a step of its denoiser."""
        request = self._ask.post(VIDEOS, json=LONG, headers=LATER).json()["id"]
        next(one for one in self._gateways[-1].events(request) if one["type"] == "progress" and one["step"] > 1)
        said = self._ask.post(f"/v1/requests/{request}/cancel")
        until(self._idle, "the workers to let go")
        made = self._made(request, broken_off=True)
        for view in (made["view"], said.json()):
            assert view["status"] == "cancelled"
        hide(made["view"], "step", "progress", "queue_position", "steps")
        return {"status": said.status_code, **made}

    def _workers(self) -> list[dict[str, Any]]:
        return list(self._read.get("/v1/workers").json()["data"])

    def _idle(self) -> bool:
        return not any(pool["leased"] or pool["waiting"] for pool in self._read.get("/v1/pools").json()["data"])

    def _beaten(self) -> None:
        """Wait until each worker has told twice how it is."""
        until(self._idle, "the workers to be idle")
        seen, beats = dict[str, float](), dict[str, int]()

        def twice() -> bool:
            for worker in self._workers():
                last, seen[worker["id"]] = seen.get(worker["id"], 0.0), worker["seen_s"]
                beats[worker["id"]] = beats.get(worker["id"], 0) + (worker["seen_s"] < last)
            return min(beats.values()) >= 2

        until(twice, "two heartbeats of every worker")

    def _told(self, gateway: Server) -> dict[str, Any]:
        with httpx2.Client(base_url=gateway.url, timeout=60) as client:
            found: dict[str, Any] = {path: recorded_answer(client.get(path)) for path in READ}
            for path in LISTED:
                found[path] = recorded_answer(client.get(path))
                found[path]["body"]["data"] = {UNORDERED: found[path]["body"]["data"]}
            return found | recorded_metrics(client.get("/metrics").text)


def hide(view: dict[str, Any], *names: str) -> None:
    """Have placeholders for what depends on when it was looked at."""
    for found in (view, *view.get("stages", ())):
        found |= {new: NUMBER for new in (RENAMES.fields.get(name, name) for name in names) if new in found}


def surface() -> dict[str, Any]:
    """The flags of every command, as its help has them, and the settings of docs/reference/settings.md."""
    flags, asked = dict[str, Any](), [""]
    while asked:
        helps = helps_of(asked)
        asked = [f"{group} {name}".strip() for group, text in helps.items() for name in commands_in(text)]
        flags |= {command: {UNORDERED: flags_of(text)} for command, text in helps.items()}
    settings = re.findall(
        r"^\| `(UNFUSE_\w+)`", (ROOT / "docs" / "reference" / "settings.md").read_text(), re.MULTILINE
    )
    return {"flags": flags, "settings": {UNORDERED: sorted(settings)}}


HELPS = """
import contextlib, io, json, runpy, sys
helps = {}
for command in json.loads(sys.argv[1]):
    for flag in "--help", "--help-all":
        sys.argv[1:] = [*command.split(), flag]
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            runpy.run_module("unfuse", run_name="__main__")
        helps[command] = said.getvalue() or helps[command]
        if "--help-all" not in helps[command]:
            break
print(json.dumps(helps))
"""
"""One process for all commands, whose imports take a second."""


def helps_of(commands: list[str]) -> dict[str, str]:
    command = [sys.executable, "-c", HELPS, json.dumps(commands)]
    said = subprocess.run(command, env=environment(ROOT), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    helps: dict[str, str] = json.loads(said)
    assert all("--help" in text for text in helps.values()), helps
    return helps


def commands_in(text: str) -> list[str]:
    """The verbs of a group, which its help has under several headings between its options and its example."""
    usage, _, rest = text.partition("\n")
    verbs = rest.partition("\n  -h, --help")[2].partition("\nExample:\n")[0]
    return re.findall(r"^  ([a-z]\S*) ", verbs, re.MULTILINE) if "COMMAND" in usage else []


def flags_of(text: str) -> list[str]:
    lines = re.findall(r"^  (?:-\w, )?(--[a-z].*)", text, re.MULTILINE)
    return sorted({flag for line in lines for flag in re.findall(r"(?:^|/ |, )(--[a-z][a-z0-9-]*)", line)})


def record(folder: Path, layouts: list[str]) -> dict[str, Any]:
    """A recording of those layouts, made in an empty folder."""
    (folder / "models").mkdir()
    arguments, found = models(folder / "models"), dict[str, Any]()
    for name in layouts:
        place = folder / name
        place.mkdir()
        with LAYOUTS[name](place, arguments) as gateways:
            recorder = Recorder(gateways, folder)
            try:
                found[name] = recorder.record()
            finally:
                recorder.close()
    return found
