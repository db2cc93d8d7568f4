"""A prompt of 100K tokens through `unfuse serve`, prefill and decode in pools of their own, in one go.

A narrow random model (one layer, one head of 64: 512 bytes a token), whose keys and values go by tcp to a
decoder that maps nobody's memory: into room for all in its arena, through the usual receive buffer of 8K tokens, and
through it over a network at fault. The decoder is there from the beginning, or comes when prefill is done. Texts are
compared with that of one worker for both. `python -m bench.long [TOKENS]`
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.report import show, table
from tools.server import RUN_DIR, Server, own_run_folder, serving, unfuse, until
from tools.tiny_language import TEXT, make_language_model

TOKENS, BUFFER, TOKEN_BYTES = 100_000, 8192, 512
FAULTS = "drop=0.1,cut=0.2,corrupt=0.2,seed=1"
"""Of every pull, which is one refill of the buffer or a part of it."""
MIB = 1 << 20
FAULTY = {"UNFUSE_TRANSFER__ENGINE": "unfuse.testing.transfer_faults:FaultyTcp", "TRANSFER_FAULTS": FAULTS}
WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "8K buffer, faults": (8, FAULTY),
    "8K buffer": (8, {}),
    "room for all": (128, {"UNFUSE_BUFFER__TOKENS": "0"}),
}
"""The arena of the decoder in MiB, and its environment."""


LATE = "late, "
"""Of a decoder that comes when prefill is done."""


def told(server: Server, pattern: str) -> float:
    """The sum of a metric's values."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        return sum(float(value) for value in re.findall(rf"^{pattern} (.+)$", page.read().decode(), re.MULTILINE))


def asked(server: Server, tokens: int) -> dict[str, Any]:
    """The answer to a prompt of about so many tokens."""
    message = {"role": "user", "content": f"{TEXT} " * (tokens // 20)}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logit_bias": {"2": -100, "0": -100}, "cache": False}
    made: dict[str, Any] = server.post("/v1/chat/completions", {"model": "long", "messages": [message], **greedy})
    return made


def stages(server: Server) -> dict[str, dict[str, Any]]:
    """Those of the newest request; none before there is one."""
    newest = server.get("/v1/requests?limit=1")["data"]
    return {stage["name"]: stage for one in newest for stage in one["stages"]}


def took(server: Server, request: str) -> tuple[float, float]:
    """Seconds of prefill, and until the whole text since that was done and a decoder was there."""
    told = [*server.events(request)]
    computed = [event["at"] for event in told if event.get("stage") == "prefill"]
    (began, *_, done) = [event["at"] for event in told if event.get("stage") == "decode.0"]
    return computed[-1] - computed[0], max(0.0, done - max(computed[-1], began))


def measure(where: Path, folder: Path, keys: Path, tokens: int, way: str, late: bool) -> tuple[dict[str, Any], str]:
    """A row, and the text."""
    arena, variables = WAYS[way]
    room = "--kv", f"{(tokens + 8192) * TOKEN_BYTES}", "--threads", "1", "--keys", str(keys)
    named = str(folder), "--served-model-name", "long", "--keys", str(keys)
    (run := where / f"{late}{way}".replace(" ", "")).mkdir()
    with serving(run, *named, "--workers", "none", at="127.0.0.1") as server, ThreadPoolExecutor() as pool:
        until(lambda: server.get("/health"), "the server to answer", server.process)

        def decoder() -> None:
            server.worker("decode", *room, "--arena", f"{arena}MiB", **own_run_folder("far"), **variables)
            server.ready()

        server.worker("prefill", *room, "--arena", f"{2 * tokens * TOKEN_BYTES // MIB}MiB", **variables)
        if not late:
            decoder()
        answer = pool.submit(asked, server, tokens)
        if late:
            until(lambda: stages(server).get("prefill", {}).get("status") == "done", "prefill to be done")
            decoder()
        made = answer.result()
        until(lambda: told(server, "unfuse_transfer_bytes_total{.+}") > 0.9 * tokens * TOKEN_BYTES, "bytes to be told")
        peak = told(server, 'unfuse_arena_high_water{role="decode"}') * arena
        used, (prefill, behind) = made["usage"]["prompt_tokens"], took(server, made["id"])
        row = {
            "tokens": used,
            "prefill, s": round(prefill, 1),
            "to the whole text behind it, s": round(behind, 2),
            "of which decoding": round(stages(server)["decode.0"]["run_s"], 2),
            "resumes": 0 if way == "room for all" else -(-used // BUFFER) - 1,
            "faults": int(told(server, "unfuse_transfer_failures_total{.+}")),
            "MiB moved": round(told(server, "unfuse_transfer_bytes_total{.+}") / MIB, 1),
            "peak of the decoder's arena, MiB": round(peak, 1),
        }
        return row, str(made["choices"])


def main() -> None:
    tokens = int(sys.argv[1]) if sys.argv[1:] else TOKENS
    with tempfile.TemporaryDirectory() as place:
        where = Path(place)
        os.environ[RUN_DIR] = str(where / "run")
        folder = make_language_model(where / "long", positions=tokens + 4096, layers=1, heads=1, kept=1, head_dim=64)
        subprocess.run(unfuse("keys", "new", str(where / "keys")), check=True, capture_output=True)
        rows, texts = dict[str, dict[str, Any]](), dict[str, str]()
        for way in WAYS:
            for late in (False, True):
                name = LATE * late + way
                rows[name], texts[name] = measure(where, folder, where / "keys", tokens, way, late)
                print(name, rows[name], file=sys.stderr, flush=True)
        named = str(folder), "--served-model-name", "long", "--threads", "1"
        with serving(where, *named, "--workers", "language=1", "--kv", f"{(tokens + 8192) * TOKEN_BYTES}") as server:
            alone = str(asked(server.ready(), tokens)["choices"])
            rows["one worker"] = {"prefill, s": round(stages(server)["prefill"]["run_s"], 1)}
        for name, text in texts.items():
            rows[name]["the same text"] = text == alone
    show("long", token_bytes=TOKEN_BYTES, buffer=BUFFER, faults=FAULTS, rows=rows)
    table("a long prompt", rows)


if __name__ == "__main__":
    main()
