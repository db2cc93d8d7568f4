"""Chats whose workers and gateways are killed: what clients saw, what is kept, and what nobody disturbed."""

from __future__ import annotations

import io
import json
import math
import os
import random
import secrets
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.chaos.cluster import LEASE_S, RUN_DIR, Gateway, Process, Redis, until
from tests.chaos.drill import Record
from tools.server import unfuse
from tools.tiny_language import TEXT, make_language_model
from tools.tiny_vision import KINDS, make_vision_model

SCALE = float(os.environ.get("CHAOS_SCALE", "0.05"))
CHATS, KILLS, CLIENTS = math.ceil(100 * SCALE), math.ceil(30 * SCALE), 6
SEEN, KILLS_OF_SEEN, PICTURES = math.ceil(60 * SCALE), math.ceil(20 * SCALE), 7
"""Chats that show pictures, of which there are a few; and who is killed amid these."""
ROLES = ("prefill", "prefill", "decode", "decode")
MOST_ATTEMPTS = 2
"""Attempts at a stage beyond which its workers are left alone: leases that are lost are counted."""

Told = tuple[str, float]
"""A token's text, and how likely it was."""


class System:
    """Two gateways over one Redis, and workers of these roles, which know both."""

    def __init__(self, folder: Path, batching: str, model: Path, roles: Sequence[str]) -> None:
        clean = {name: value for name, value in os.environ.items() if name == RUN_DIR or not name.startswith("UNFUSE_")}
        own = {"UNFUSE_DATA_DIR": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        around = clean | own | {"UNFUSE_LEASE__TTL_S": str(LEASE_S)}
        self.redis = Redis(folder, around)
        serve = [str(model), "--served-model-name", "tiny", "--workers", "none", "--queue", self.redis.url]
        serve += ["--results", f"disk:{folder}/results", "--batching", batching]
        self.gateways = [Gateway(f"serve-{n}", serve, folder / f"serve-{n}.log", around) for n in range(2)]
        at = [part for gateway in self.gateways for part in ("--scheduler", gateway.control)]
        self.workers = []
        for number, role in enumerate(roles):
            flags = "--role", role, *at, "--arena", "32MiB", "--kv", "8MiB", "--threads", "1", "--batching", batching
            command = unfuse("worker", *flags)
            self.workers.append(Process(role, command, folder / f"{role}-{number}.log", around))

    def ready(self) -> bool:
        """Whether all gateways answer, and all workers are there."""
        for process in (*self.gateways, *self.workers):
            assert process.alive, f"{process.name} ended by itself:\n{process.log()[-3000:]}"
        pids = {worker.pid for worker in self.workers}
        return all(gateway.get("/ready") and pids <= present(gateway) for gateway in self.gateways)

    def may_lose(self) -> bool:
        """Whether no text that runs has lost as many leases as it may."""
        asked = self.gateways[0].get("/v1/requests?status=in_progress&limit=1000")
        stages = [stage for one in (asked or {"data": []})["data"] for stage in one["stages"]]
        return asked is not None and all((stage["attempt"] or 0) <= MOST_ATTEMPTS for stage in stages)

    def close(self) -> None:
        for process in (*self.workers, *self.gateways, self.redis):
            process.close()


def present(gateway: Gateway) -> set[int]:
    workers = (gateway.get("/v1/workers") or {"data": []})["data"]
    return {worker["pid"] for worker in workers if worker["healthy"]}


@contextmanager
def running(folder: Path, batching: str, model: Path, roles: Sequence[str] = ROLES) -> Iterator[System]:
    system = System(folder, batching, model, roles)
    try:
        until(system.ready, "everybody to be there")
        yield system
    except BaseException:
        for process in (*system.gateways, *system.workers):
            print(f"== {process.name}\n{process.log()[-4000:]}")
        raise
    finally:
        system.close()


def asked(number: int) -> dict[str, Any]:
    """One of a mix: prompts of one chunk to several, answers of some ten tokens to some hundred."""
    rng = random.Random(number)
    words = f"{TEXT} " * rng.choice((1, 2, 12))
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": words}],
        "seed": number,
        "temperature": 1,
        "max_tokens": rng.choice((20, 80, 200)),
        "logprobs": True,
        "logit_bias": {"2": -100, "0": -100},
        "stream": True,
    }


def shown(number: int) -> dict[str, Any]:
    """The same with one or two of a few pictures."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "the quick brown fox"}]
    for picture in {number % PICTURES, number % 3}:
        file = io.BytesIO()
        Image.new("RGB", (64 + 32 * picture, 64), (30 * picture, 90, 200)).save(file, "PNG")
        url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {**asked(number), "messages": [{"role": "user", "content": parts}]}


def read(gateways: Sequence[Gateway], body: dict[str, Any], key: str) -> tuple[str, list[Told]]:
    """A chat as a client has it that goes to another gateway whenever one breaks off: its request, and its tokens."""
    saw, last, id = list[Told](), "", ""
    for turn in range(10_000):
        headers = {"content-type": "application/json", "idempotency-key": key}
        headers |= {"last-event-id": last} if last else {}
        url = f"{gateways[(body['seed'] + turn) % len(gateways)].url}/v1/chat/completions"
        try:
            call = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(call, timeout=60) as answer:
                for line in answer:
                    if line.startswith(b"id: "):
                        last = line[4:].strip().decode()
                    elif line.strip() == b"data: [DONE]":
                        return id, saw
                    elif line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        id = event["id"]
                        told = event["choices"][0]["logprobs"]
                        content = (told or {"content": []})["content"]
                        saw += [(b64encode(bytes(one["bytes"])).decode(), one["logprob"]) for one in content]
        except urllib.error.HTTPError as error:
            assert error.code in (429, 503), error.read()
        except (OSError, HTTPException):
            pass
        time.sleep(0.1)
    raise AssertionError(f"chat {key} never ended")


def read_all(system: System, bodies: Sequence[dict[str, Any]], run: str) -> list[tuple[str, list[Told]]]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return [*clients.map(lambda one: read(system.gateways, one, f"{run} {one['seed']}"), bodies)]


def kill(system: System, rng: random.Random, kills: int, over: threading.Event) -> int:
    """Kill one after the other, each when all are there; returns how many until everything was `over`."""
    for done in range(kills):
        until(lambda: over.is_set() or (system.ready() and system.may_lose()), "the next one may be killed")
        if over.wait(rng.uniform(0, 0.5)):
            return done
        rng.choice([*system.workers, *system.gateways]).replace()
    return kills


def drilled(system: System, bodies: Sequence[dict[str, Any]], kills: int, seed: int, exact: bool) -> list[Any]:
    """Kill so many amid these chats, said again and again; hold what clients saw to what is kept, and where it is
    `exact` to a quiet run. Returns the requests as the gateway shows them."""
    calm = [told for _, told in read_all(system, bodies, "calm")]
    over, rounds = threading.Event(), list[list[tuple[str, list[Told]]]]()
    with ThreadPoolExecutor(1) as beside:
        killing = beside.submit(kill, system, random.Random(seed), kills, over)
        while not rounds or not killing.done():
            rounds.append(read_all(system, bodies, f"round {len(rounds)}"))
        over.set()
        assert killing.result() == kills
    until(system.ready, "everybody to be there")
    for chats in rounds:
        for (id, saw), quiet in zip(chats, calm, strict=True):
            answer = json.loads(kept_of(system, id))
            assert saw == [(own[0], logprob) for _, _, logprob, _, own in answer["pieces"]]
            assert not exact or saw == quiet
    shown: list[Any] = (system.gateways[0].get("/v1/requests?limit=1000") or {})["data"]
    assert {one["status"] for one in shown} == {"completed"}
    return shown


def kept_of(system: System, id: str) -> bytes:
    with urllib.request.urlopen(f"{system.gateways[0].url}/v1/requests/{id}/result/0", timeout=60) as answer:
        return bytes(answer.read())


@pytest.fixture
def seed(record_property: Record) -> int:
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
    record_property("seed", str(seed))
    return seed


@pytest.mark.parametrize("batching", ["exact", pytest.param("batched", marks=pytest.mark.nightly)])
def test_streamed_chats_lose_no_token_when_processes_are_killed(batching: str, tmp_path: Path, seed: int) -> None:
    """Given chats that are streamed, when prefills, decoders and gateways are killed amid them, then each client has
    every token that is kept, once and in order; in exact pools they are those of a quiet run, to the last bit."""
    model = make_language_model(tmp_path / "tiny", positions=1024)
    with running(tmp_path, batching, model) as system:
        drilled(system, [asked(number) for number in range(CHATS)], KILLS, seed, batching == "exact")


@pytest.mark.nightly
def test_image_chats_lose_no_token_when_processes_are_killed(tmp_path: Path, seed: int) -> None:
    """Given chats that show pictures, when who encodes, prefills and decodes is killed amid them, then the same holds,
    and pictures are encoded again only where that was lost."""
    model = make_vision_model(tmp_path / "sees", KINDS[0])
    with running(tmp_path, "exact", model, ("vision", "vision", *ROLES)) as system:
        requests = drilled(system, [shown(number) for number in range(SEEN)], KILLS_OF_SEEN, seed, True)
    encodes = [stage for one in requests for stage in one["stages"] if stage["name"].startswith("vision_encode")]
    made = sum(stage["attempt"] for stage in encodes if not stage["cached"])
    assert made <= PICTURES * (1 + KILLS_OF_SEEN)
    assert made < len(encodes)
