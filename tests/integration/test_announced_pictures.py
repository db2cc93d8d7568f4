"""Pictures of a chat that reach who reads them while others of it are still encoded."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.seen import draw, said, shown
from tests.integration.test_announced_kv import failures
from tests.integration.test_nodes import keys, moved
from tools.server import Server, computes_of, own_run_folder, serving, until
from tools.tiny_vision import KINDS, make_vision_model

__all__ = ["keys"]

SMALL, LARGE = (64, 96), (1440, 1440)
"""Pixels of pictures that take hardly any time, and of one that takes some of a second and several transfer chunks."""
LARGE_BYTES = 45 * 45 * 3 * 256 * 4
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logit_bias": {"2": -100}}
KV = "--kv", "32MiB", "--threads", "1", "--batching", "exact"
PROMPTS = {"the last": (SMALL, LARGE), "the third": (SMALL, SMALL, LARGE), "several": (SMALL, LARGE, LARGE, LARGE)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model") / "tiny"
    return make_vision_model(where, KINDS[1], positions=16_384, width=256, most=2048)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Chats by name. No two of their pictures are equal."""
    where, found = tmp_path_factory.mktemp("pictures"), dict[str, list[dict[str, Any]]]()
    for seed, (name, sizes) in enumerate(PROMPTS.items()):
        files = [draw(where / f"{seed}{number}.png", *size, 10 * seed + number) for number, size in enumerate(sizes)]
        found[name] = [{"role": "user", "content": [*map(shown, files), said("what is the lazy dog")]}]
    return found


def asked(server: Server, messages: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = server.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **GREEDY})
    return found


@pytest.fixture(scope="module")
def calm(
    folder: Path, prompts: dict[str, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one worker answers that nobody disturbs."""
    named = str(folder), "--served-model-name", "tiny", "--workers", "all=1", *KV
    with serving(tmp_path_factory.mktemp("calm"), *named) as server:
        server.ready()
        return {name: asked(server, messages)["choices"] for name, messages in prompts.items()}


@contextmanager
def far_reader(folder: Path, where: Path, keys: list[str], **variables: str) -> Iterator[Server]:
    """A server, and a worker for texts that maps nobody's memory; who encodes comes later."""
    arena = (
        ["--arena", "16MiB"] if variables.get("UNFUSE_BUFFER__TOKENS") == "512" else []
    )  # too small for several pictures
    flags = [*keys, "--served-model-name", "tiny", "--workers", "none", "--batching", "exact"]
    with serving(where, str(folder), *flags, at="127.0.0.1", **variables) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("language", *keys, *KV, *arena, **own_run_folder("far"), **variables)
        yield server


def stages(server: Server) -> dict[str, dict[str, Any]]:
    """Those of the newest request."""
    found = (server.get("/v1/requests?limit=1") or {"data": []})["data"]
    return {stage["name"]: stage for stage in found[0]["stages"]} if found else {}


def status(server: Server, *names: str) -> list[str]:
    found = stages(server)
    return [found[name]["status"] if name in found else "" for name in names]


@contextmanager
def amid(server: Server, encoder: subprocess.Popen[bytes], done: int) -> Iterator[psutil.Process]:
    """Its compute process, halted while it encodes the picture behind so many. It goes on afterwards."""
    (compute,) = computes_of(encoder.pid)
    wanted = ["done"] * done + ["leased"]
    names = [f"vision_encode.{number}" for number in range(done + 1)]
    until(lambda: status(server, *names) == wanted, "it to be amid a picture", encoder)
    compute.send_signal(signal.SIGSTOP)
    try:
        assert status(server, f"vision_encode.{done}") == ["leased"]
        yield compute
    finally:
        with suppress(psutil.NoSuchProcess):
            compute.send_signal(signal.SIGCONT)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "tokens"), [("the last", ""), ("several", "512")])
def test_encoded_image_is_pulled_while_the_next_one_is_encoded(
    folder: Path,
    tmp_path: Path,
    keys: list[str],
    prompts: dict[str, list[dict[str, Any]]],
    calm: dict[str, Any],
    name: str,
    tokens: str,
) -> None:
    """Given a chat with pictures, an encoder, and who reads them on another node, whose receive buffer and arena have
    room for all of them or not, when the encoder is halted amid the second one, then the first is pulled; when it goes
    on, the answer is that of a single worker, and nothing was pulled twice; what passes through a buffer that has no
    room for it is pulled by prefill, and by decode once more."""
    own = {"UNFUSE_BUFFER__TOKENS": tokens} if tokens else {}
    with far_reader(folder, tmp_path, keys, **own) as server, ThreadPoolExecutor() as pool:
        encoder = server.worker("vision", *keys, *KV)
        answer = pool.submit(asked, server.ready(), prompts[name])
        assert all(one["engines"]["tcp"] and one["healthy"] for one in server.get("/v1/workers")["data"])
        with amid(server, encoder, 1):
            until(lambda: moved(server), "the first to be pulled")
            assert status(server, "vision_encode.0", "vision_encode.1", "prefill") == ["done", "leased", "leased"]
            some = sum(moved(server).values())
        assert answer.result()["choices"] == calm[name]
        large = LARGE_BYTES * PROMPTS[name].count(LARGE)
        assert 0 < some < LARGE_BYTES
        pulled = (large + some) * (2 if tokens else 1)
        until(lambda: sum(moved(server).values()) >= pulled, "the rest to be told")
        assert sum(moved(server).values()) == pulled
        assert [one["attempt"] for one in stages(server).values()] == [1] * (len(PROMPTS[name]) + 2)


@pytest.mark.nightly
@pytest.mark.parametrize("whole", [False, True])
def test_encoder_crash_reencodes_only_the_unfinished_image(
    folder: Path,
    tmp_path: Path,
    keys: list[str],
    prompts: dict[str, list[dict[str, Any]]],
    calm: dict[str, Any],
    whole: bool,
) -> None:
    """Given a chat with three pictures, of which the third is being encoded, when the process that computes that dies,
    or the whole worker and another one comes, then the third alone is encoded again, since the others are there, or
    have been pulled, and the answer is that of a single worker."""
    short = {"UNFUSE_LEASE__TTL_S": "3"}
    with far_reader(folder, tmp_path, keys, **short) as server, ThreadPoolExecutor() as pool:
        encoder = server.worker("vision", *keys, *KV, **short)
        answer = pool.submit(asked, server.ready(), prompts["the third"])
        with amid(server, encoder, 2) as compute:
            until(lambda: moved(server), "what is there to be pulled")
            if whole:
                encoder.kill()
            compute.kill()
            if whole:
                server.worker("vision", *keys, *KV, **short)
            assert answer.result()["choices"] == calm["the third"]
        encodes = [one for name, one in stages(server).items() if name.startswith("vision_encode")]
        assert [(one["attempt"], one["recomputes"]) for one in encodes] == [(1, 0), (1, 0), (2, 0)]
        if whole:
            server.killed(encoder)


@pytest.mark.nightly
def test_cached_image_is_reencoded_if_its_worker_dies_before_a_read(
    folder: Path, tmp_path: Path, prompts: dict[str, list[dict[str, Any]]], calm: dict[str, Any]
) -> None:
    """Given a chat whose pictures are found in the cache, when their owner dies before anybody has read them, then they
    are encoded again, and the answer is the same."""
    flags = [str(folder), "--served-model-name", "tiny", "--workers", "none", "--batching", "exact"]
    with serving(tmp_path, *flags, UNFUSE_LEASE__TTL_S="3") as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        encoder, reader = server.worker("vision", *KV), server.worker("language", *KV)
        assert asked(server.ready(), prompts["the third"])["choices"] == calm["the third"]
        server.killed(reader)
        body = {"model": "tiny", "messages": prompts["the third"], **GREEDY}
        id = server.post("/v1/chat/completions", body, prefer="respond-async")["id"]
        names = [f"vision_encode.{number}" for number in range(3)]
        assert [stages(server)[name]["cached"] for name in names] == [True] * 3
        server.killed(encoder)
        for role in ("vision", "language"):
            server.worker(role, *KV)
        assert server.finished(id)["status"] == "completed"
        # Leases last 3 s, so a busy machine may need a second attempt.
        assert [one["cached"] for one in map(stages(server).get, names) if one] == [False] * 3
        assert json.loads(server.result(id))["text"] == calm["the third"][0]["message"]["content"]


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", ["8192", "512"], ids=["at once", "in pieces"])
def test_corrupted_image_embedding_transfers_are_retried(
    folder: Path,
    tmp_path: Path,
    keys: list[str],
    prompts: dict[str, list[dict[str, Any]]],
    calm: dict[str, Any],
    tokens: str,
) -> None:
    """Given a network that flips a bit in every fourth pull, or cuts it, then answers are those of a single worker."""
    faulty = {
        "TRANSFER_FAULTS": "corrupt=0.25,cut=0.1,drop=0.05,seed=3",
        "UNFUSE_TRANSFER__ENGINE": "unfuse.testing.transfer_faults:FaultyTcp",
    }
    with far_reader(folder, tmp_path, keys, UNFUSE_BUFFER__TOKENS=tokens, **faulty) as server:
        server.worker("vision", *keys, *KV, **faulty)
        for _ in range(4):
            assert asked(server.ready(), prompts["several"])["choices"] == calm["several"]
        until(lambda: failures(server), "what failed to be told")
