"""Texts whose keys and values reach a decoder of another place while prefill still computes them."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_nodes import keys, moved, other_host
from tests.netns import SecondHost
from tools.redis_server import RedisServer
from tools.server import Server, computes_of, own_run_folder, serving, until
from tools.tiny_language import TEXT, make_language_model

__all__ = ["keys", "other_host"]

POSITIONS, TOKEN_BYTES = 4096, 16_384
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": f"{TEXT} " * 130}],
    "temperature": 0,
    "max_tokens": 6,
    "logit_bias": {"2": -100, "0": -100},
}
"""A prompt of some thousand tokens: its keys and values are several transfer chunks."""
TOKENS = 100_000
"""Of a very long prompt."""
KV = "--kv", "72MiB", "--threads", "1"
"""Room for one such prompt, and not for two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model") / "tiny"
    return make_language_model(where, positions=POSITIONS, head_dim=128, layers=8)


def asked(server: Server, said: str = "") -> dict[str, Any]:
    """The answer to the long prompt, behind which something is said."""
    (message,) = LONG["messages"]
    body = {**LONG, "messages": [{**message, "content": f"{message['content']}{said}"}]}
    found: dict[str, Any] = server.post("/v1/chat/completions", {"model": "tiny", **body})
    return found


@pytest.fixture(scope="module")
def calm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer of one worker that nobody disturbs."""
    where = tmp_path_factory.mktemp("calm")
    with serving(where, str(folder), "--served-model-name", "tiny", "--workers", "language=1", *KV) as server:
        return asked(server.ready())


@contextmanager
def far_decoder(folder: Path, where: Path, keys: list[str], *more: str, **variables: str) -> Iterator[Server]:
    """A server without workers, and a decoder that maps nobody's memory; `more` of flags is for both."""
    exact = ["--batching", "exact"] if "exact" in more else []
    arena = ["--arena", "16MiB"] if variables.get("UNFUSE_BUFFER__TOKENS") == "512" else []  # too small for it whole
    flags = [*keys, "--served-model-name", "tiny", "--workers", "none", *more]
    with serving(where, str(folder), *flags, at="127.0.0.1", **variables) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        spread = more[more.index("--parallel") :] if "--parallel" in more else ()
        server.worker("decode", *keys, *KV, *exact, *arena, *spread, **own_run_folder("far"), **variables)
        yield server


def gauge(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        return float(re.findall(rf"^{name} (.+)$", page.read().decode(), re.MULTILINE)[0])


def stage(server: Server, name: str) -> dict[str, Any]:
    """A stage of the newest request, once there is one."""
    (newest,) = until(lambda: server.get("/v1/requests?limit=1")["data"], "a request to be accepted")
    found: dict[str, Any] = next(one for one in newest["stages"] if one["name"] == name)
    return found


@contextmanager
def amid(server: Server, prefill: subprocess.Popen[bytes]) -> Iterator[psutil.Process]:
    """Its compute process, halted amid a prompt, of whose keys and values some are elsewhere. It goes on afterwards."""
    compute, *_ = computes_of(prefill.pid)
    until(lambda: any(one["progress"] > 20 for one in server.get("/v1/requests")["data"]), "prefill to be amid it")
    compute.send_signal(signal.SIGSTOP)
    try:
        until(lambda: gauge(server, "unfuse_decode_transfer_queue"), "a decoder to wait for keys and values")
        until(lambda: moved(server), "some of them to be there")
        yield compute
    finally:
        with suppress(psutil.NoSuchProcess):
            compute.send_signal(signal.SIGCONT)


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", ["8192", "512"], ids=["at once", "in pieces"])
def test_decoder_pulls_kv_chunks_while_prefill_is_running(
    folder: Path, tmp_path: Path, keys: list[str], calm: dict[str, Any], tokens: str
) -> None:
    """Given a prompt whose keys and values take several chunks, and a receive buffer that has room for them or not,
    when prefill is halted amid it, then the decoder has pulled some of them; when it goes on, the text is that of a
    single worker, and nothing was pulled twice."""
    with far_decoder(folder, tmp_path, keys, UNFUSE_BUFFER__TOKENS=tokens) as server, ThreadPoolExecutor() as pool:
        prefill = server.worker("prefill", *keys, *KV)
        answer = pool.submit(asked, server.ready())
        with amid(server, prefill):
            assert (stage(server, "prefill")["status"], stage(server, "decode.0")["status"]) == ("leased", "leased")
            some = sum(moved(server).values())
        assert answer.result()["choices"] == calm["choices"]
        whole = calm["usage"]["prompt_tokens"] * TOKEN_BYTES
        until(lambda: sum(moved(server).values()) > some, "the rest to be told")
        assert 0 < some < sum(moved(server).values()) <= whole
        until(lambda: not gauge(server, "unfuse_decode_transfer_queue"), "the queue to be told empty")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spread", "tokens"),
    [
        ("prefill=tensor:2", "8192"),
        ("language=tensor:2", "8192"),
        ("language=tensor:2", "512"),
    ],
)
def test_tensor_parallel_ranks_transfer_kv_during_prefill(
    folder: Path, tmp_path: Path, keys: list[str], calm: dict[str, Any], spread: str, tokens: str
) -> None:
    """Given prefill of two ranks, and a decoder of one or of two that maps nobody's memory, also one whose arena is
    smaller than what comes, when prefill is halted amid a prompt, then some of it is there; the text is that of a
    single worker of one."""
    how = "--parallel", spread
    with (
        far_decoder(folder, tmp_path, keys, *how, UNFUSE_BUFFER__TOKENS=tokens) as server,
        ThreadPoolExecutor() as pool,
    ):
        prefill = server.worker("prefill", *keys, *KV, *how)
        answer = pool.submit(asked, server.ready())
        assert len(computes_of(prefill.pid)) == 2
        with amid(server, prefill):
            some = sum(moved(server).values())
        assert answer.result()["choices"] == calm["choices"]
        until(lambda: sum(moved(server).values()) > some > 0, "the rest to be told")


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_decoder_frees_kv_reserved_for_a_dead_prefill_worker(
    folder: Path, tmp_path: Path, keys: list[str], calm: dict[str, Any], how: signal.Signals
) -> None:
    """Given a decoder with room for one prompt, taken by one amid its transfer, when the worker that prefills that
    dies, or stops, and another comes, then both that text and the next are made, nobody is charged on the decoder's
    side, and chunks that had come are not pulled again where they are the same."""
    short = {"UNFUSE_LEASE__TTL_S": "3"}
    with far_decoder(folder, tmp_path, keys, "--batching", "exact", **short) as server, ThreadPoolExecutor() as pool:
        first = server.worker("prefill", *keys, *KV, "--batching", "exact", **short)
        answer = pool.submit(asked, server.ready())
        with amid(server, first) as compute:
            some = sum(moved(server).values())
            first.send_signal(how)
            if how == signal.SIGKILL:
                compute.kill()
            server.worker("prefill", *keys, *KV, "--batching", "exact", **short)
            assert answer.result()["choices"] == calm["choices"]
            decode = stage(server, "decode.0")
            assert decode["attempt"] > 1 and not (decode["failures"] or decode["crashes"] or decode["recomputes"])
            whole = calm["usage"]["prompt_tokens"] * TOKEN_BYTES
            until(lambda: sum(moved(server).values()) > some, "the rest to be told")
            assert sum(moved(server).values()) <= whole
            again = asked(server, "Paris")
            assert again["usage"]["completion_tokens"] == LONG["max_tokens"]
        server.killed(first)


def test_decode_task_waits_in_the_queue_while_decoder_kv_is_full(
    folder: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    """Given a decoder of this machine with room for one prompt, when two come, then one waits where every decoder could
    take it, and the page of metrics counts it; both are made."""
    flags = ["--served-model-name", "tiny", "--workers", "prefill=1,decode=1", *KV]
    with serving(tmp_path, str(folder), *flags) as server, ThreadPoolExecutor() as pool:
        workers = server.ready().get("/v1/workers")["data"]
        (compute,) = computes_of(*(one["pid"] for one in workers if one["role"] == "decode"))
        compute.send_signal(signal.SIGSTOP)
        try:
            answers = [pool.submit(asked, server) for _ in range(2)]
            until(lambda: gauge(server, "unfuse_decode_prealloc_queue") == 1, "one to wait for room")
        finally:
            compute.send_signal(signal.SIGCONT)
        assert [one.result()["choices"] for one in answers] == [calm["choices"]] * 2
        until(lambda: not gauge(server, "unfuse_decode_prealloc_queue"), "the queue to be told empty")
        assert not moved(server)


@pytest.mark.nightly
def test_kv_is_recomputed_after_a_decoder_cannot_pull_it(
    folder: Path, tmp_path: Path, keys: list[str], calm: dict[str, Any]
) -> None:
    """Given a worker whose arena holds the keys and values of one prompt, and a decoder that has none of its transfer
    engines, when that has given them up, then they are made again there, and the next decoder makes the text."""
    other = {"UNFUSE_TRANSFER__ENGINE": "unfuse.testing.transfer_faults:FaultyTcp"}
    flags = [*keys, "--served-model-name", "tiny", "--workers", "none"]
    with serving(tmp_path, str(folder), *flags, at="127.0.0.1") as server, ThreadPoolExecutor() as pool:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("prefill", *keys, *KV)  # in an arena of 64 MiB
        vain = server.worker("decode", *keys, *KV, **own_run_folder("vain"), **other)
        answer = pool.submit(asked, server.ready())
        until(lambda: stage(server, "prefill")["recomputes"], "keys and values to be given up")
        server.killed(vain)
        server.worker("decode", *keys, *KV, **own_run_folder("far"))
        until(lambda: stage(server, "prefill")["attempt"] > 1 and moved(server), "them to be made again")
        assert answer.result()["choices"] == calm["choices"]
        assert stage(server, "prefill")["recomputes"]


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", ["8192", "512"], ids=["at once", "in pieces"])
def test_corrupted_kv_transfers_are_retried(
    folder: Path, tmp_path: Path, keys: list[str], calm: dict[str, Any], tokens: str
) -> None:
    """Given a network that flips a bit in every fourth pull, or cuts it, then the text is that of a single worker."""
    faulty = {
        "TRANSFER_FAULTS": "corrupt=0.25,cut=0.1,drop=0.05,seed=3",
        "UNFUSE_TRANSFER__ENGINE": "unfuse.testing.transfer_faults:FaultyTcp",
    }
    with far_decoder(folder, tmp_path, keys, UNFUSE_BUFFER__TOKENS=tokens, **faulty) as server:
        server.worker("prefill", *keys, *KV, "--arena", "128MiB", **faulty)
        assert asked(server.ready())["choices"] == calm["choices"]
        until(lambda: failures(server), "what failed to be told")


def failures(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        found = re.findall(r"^unfuse_transfer_failures_total{.+} (.+)$", page.read().decode(), re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.nightly
def test_decoder_on_another_host_is_leased_before_prefill_completes(
    folder: Path,
    tmp_path: Path,
    other_host: SecondHost,
    keys: list[str],
    redis_server: RedisServer,
    calm: dict[str, Any],
) -> None:
    """Given a queue in Redis, and a decoder on another host, then the text is that of a single worker, and its decoding
    was leased before its prompt was computed."""
    flags = [*keys, "--served-model-name", "tiny", "--queue", redis_server.url, "--workers", "prefill=1", *KV]
    with serving(tmp_path, str(folder), *flags, at=other_host.near) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("decode", *keys, *KV, within=other_host.enter)
        answer = asked(server.ready())
        assert answer["choices"] == calm["choices"]
        told = [(event["type"], event.get("stage", "")) for event in server.events(answer["id"])]
        assert told.index(("stage_started", "decode.0")) < told.index(("stage_completed", "prefill"))
        until(lambda: sum(moved(server).values()) >= calm["usage"]["prompt_tokens"] * TOKEN_BYTES * 0.99, "all of it")


@pytest.mark.nightly
def test_100k_token_kv_passes_through_a_smaller_decoder_arena(tmp_path: Path, keys: list[str]) -> None:
    """Given a narrow model, a prompt of which the usual receive buffer holds a twelfth, and a network that flips bits
    and cuts pulls, then the text is that of a single worker, and no more than the buffer was taken in the arena."""
    token_bytes = 512
    folder = make_language_model(
        tmp_path / "long", positions=TOKENS + 4096, layers=1, heads=1, kept=1, head_dim=token_bytes // 8
    )
    message = {"role": "user", "content": f"{TEXT} " * (TOKENS // 20)}
    body = {"model": "tiny", **LONG, "messages": [message]}
    room = "--kv", str((TOKENS + 8192) * token_bytes), "--threads", "1"
    named = str(folder), "--served-model-name", "tiny"
    (calm := tmp_path / "calm").mkdir()
    with serving(calm, *named, "--workers", "language=1", *room) as server:
        alone = server.ready().post("/v1/chat/completions", body)
    assert alone["usage"]["prompt_tokens"] > TOKENS
    faulty = {
        "TRANSFER_FAULTS": "corrupt=0.2,cut=0.2,drop=0.1,seed=1",
        "UNFUSE_TRANSFER__ENGINE": "unfuse.testing.transfer_faults:FaultyTcp",
    }
    (apart := tmp_path / "apart").mkdir()
    with serving(apart, *named, *keys, "--workers", "none", at="127.0.0.1") as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("prefill", *keys, *room, **faulty)
        server.worker("decode", *keys, *room, "--arena", "8MiB", **own_run_folder("far"), **faulty)
        assert server.ready().post("/v1/chat/completions", body)["choices"] == alone["choices"]
        until(lambda: sum(moved(server).values()) > TOKENS * token_bytes, "all of it to be told")
        assert failures(server)
        assert gauge(server, 'unfuse_arena_high_water{role="decode"}') * (8 << 20) <= 8192 * token_bytes
