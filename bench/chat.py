"""Chats: tokens a second, the time to the first and between the others, beside transformers on the same weights.

`serve` in the normal and in the overlapped loop, over HTTP with streaming, and transformers' `generate_batch` (all
prompts at once, no HTTP) and `generate` (one after the other), in rounds of another order each. Then long prompts that
come while some chats are read: one worker for all, two such workers, and a worker each for prefill and decode. Then the
second turn of chats, with the answer of the first one found and without, and what keeping an answer costs. Texts are
greedy, but for those answers, which are words by chance, so that the template makes the same tokens of them again.
Every process computes with one thread. What a token costs by the length of its context is in bench/kv.py.
`python -m bench.chat [--rounds N] [--model NAME_OR_FOLDER] [--tokens N] [--part rates|long|turns]`
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import quantile, show, table
from tools.server import Server, environment, family_of, serving
from tools.tiny_language import TEXT, make_language_model
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.models import resolve_source

PEER = Path(__file__).parent / "peers" / "with_transformers.py"
CLIENTS = (1, 4, 16)
KV_TOKENS = 32_768
KV = "1536MiB"
READERS, LONG = 4, 6
"""Chats that are read while so many long prompts come, one after the other."""

LOOPS = {f"serve, {loop}": ("--workers", "language=1", "--loop", loop) for loop in ("normal", "overlapped")}
LAYOUTS = "language=1", "language=2", "prefill=1,decode=1"
ANSWERS = (300, 600, 1200)
"""Tokens of the answers of first turns."""


@dataclass
class Read:
    """What a client saw of an answer: when it asked, and when each piece of text came."""

    began: float
    came: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float = 0.0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> float:
        return self.came[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.came, self.came[1:], strict=False)]


class Chats:
    """Prompts of one model: about what, and how long."""

    def __init__(self, model: Path) -> None:
        self._tokenizer, self._chance = ChatTokenizer.read(model), random.Random(0)

    def messages(self, words: int) -> list[dict[str, str]]:
        said = " ".join(self._chance.choice(TEXT.split()) for _ in range(words))
        return [{"role": "user", "content": f"Tell a long story in which these words are said: {said}"}]

    def ids(self, messages: list[dict[str, str]]) -> list[int]:
        return [*self._tokenizer.prompt(messages)]

    @property
    def whole_words(self) -> dict[str, int]:
        """Biases towards words that are a token each, which any text of them is cut into again."""
        spelled = (self._tokenizer.ids(f" {word}") for word in TEXT.split())
        return {str(ids[0]): 100 for ids in spelled if len(ids) == 1}


class Transformers:
    """A process that makes texts by transformers alone."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, str(PEER), str(model), "1", str(KV_TOKENS)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment(Path(tempfile.gettempdir())), **pipes)  # type: ignore[call-overload]
        while self._process.stdout.readline() != b"ready\n":
            pass

    def make(self, how: str, ids: list[list[int]], tokens: int) -> dict[str, float]:
        line = json.dumps({"how": how, "ids": ids, "tokens": tokens}).encode()
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        while not (answer := self._process.stdout.readline()).startswith(b"{"):
            pass
        made: dict[str, float] = json.loads(answer)
        return made

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def read(server: Server, messages: list[dict[str, str]], tokens: int, **more: Any) -> Read:
    """Ask for a chat, and read it as it comes."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True, **more}
    body["stream_options"] = {"include_usage": True}
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    seen = Read(time.perf_counter())
    with urllib.request.urlopen(asked, timeout=600) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                seen.came.append(time.perf_counter())
                seen.text += chunk["choices"][0]["delta"]["content"]
            elif chunk.get("usage"):
                seen.tokens, seen.usage = chunk["usage"]["completion_tokens"], chunk["usage"]
    seen.ended = time.perf_counter()
    return seen


def cpu(server: Server) -> float:
    """CPU seconds of the server and all that it started."""
    return sum(sum(process.cpu_times()[:2]) for process in family_of(server.process.pid))


def served(server: Server, chats: list[list[dict[str, str]]], tokens: int) -> dict[str, Any]:
    """All chats at once: how fast, and what their clients saw."""
    spent, began = cpu(server), time.perf_counter()
    with ThreadPoolExecutor(len(chats)) as pool:
        seen = [*pool.map(lambda messages: read(server, messages, tokens), chats)]
    seconds, made = time.perf_counter() - began, sum(one.tokens for one in seen)
    gaps = [gap for one in seen for gap in one.gaps]
    return {
        "tokens": made,
        "seconds": seconds,
        "cpu": cpu(server) - spent,
        "first": [one.first for one in seen if one.came],
        "gaps": gaps,
    }


def rates(model: str, path: Path, rounds: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Rows by contestant and number of chats at a time."""
    chats, found = Chats(path), defaultdict[tuple[str, int], list[dict[str, Any]]](list)
    with ExitStack() as stack:
        servers = {name: _serving(stack, model, *options) for name, options in LOOPS.items()}
        peer = Transformers(path)
        stack.callback(peer.close)
        for turn in range(rounds + 1):
            for clients in CLIENTS:
                asked = [chats.messages(20) for _ in range(clients)]
                names = [*servers, "generate_batch", *(["generate"] if clients < 16 else [])]
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    one = (
                        served(servers[name], asked, tokens)
                        if name in servers
                        else peer.make(name, [chats.ids(messages) for messages in asked], tokens)
                    )
                    if turn:  # the first round warms up
                        found[name, clients].append(one)
    rows = {}
    for (name, clients), of in sorted(found.items(), key=lambda one: one[0][::-1]):
        beside = {other: found[other, clients] for other in ("generate_batch", "serve, normal")}
        rows[f"{name}, {clients}"] = _row(of, beside)
    return rows


def _row(of: list[dict[str, Any]], beside: dict[str, list[dict[str, Any]]]) -> dict[str, object]:
    """Medians, and medians of what each round had beside others."""

    def rate(one: dict[str, Any], what: str = "seconds") -> float:
        return float(one["tokens"] / one[what])

    row: dict[str, object] = {"tokens/s": round(median(map(rate, of)), 1)}
    for name, theirs in beside.items():
        row[f"÷ {name}"] = round(median(rate(a) / rate(b) for a, b in zip(of, theirs, strict=True)), 2)
    row["CPU ms a token"] = round(median(1e3 / rate(one, "cpu") for one in of), 2)
    first, gaps = ([value for one in of for value in one.get(name, ())] for name in ("first", "gaps"))
    if gaps:
        row |= {"first token, ms": _ms(first, 0.5), "between, p50": _ms(gaps, 0.5), "p99": _ms(gaps, 0.99)}
    return row


def _ms(values: list[float], share: float) -> float:
    return round(1e3 * quantile(values, share), 1)


def with_long(model: str, path: Path, rounds: int, tokens: int, words: int) -> dict[str, dict[str, Any]]:
    """Chats that are read while long prompts come, by layout."""
    chats, found = Chats(path), defaultdict[str, list[dict[str, Any]]](list)
    with ExitStack() as stack:
        servers = {name: _serving(stack, model, "--workers", name) for name in LAYOUTS}
        for turn in range(rounds + 1):
            asked, long = [chats.messages(20) for _ in range(READERS)], [chats.messages(words) for _ in range(LONG)]
            names = [*servers]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                one = _disturbed(servers[name], asked, long, tokens)
                if turn:
                    found[name].append(one)
    rows: dict[str, dict[str, Any]] = {}
    for name, of in found.items():
        gaps, quiet, first = ([v for one in of for v in one[what]] for what in ("gaps", "quiet", "first"))
        rows[name] = {
            "between, quiet: p50": _ms(quiet, 0.5),
            "quiet: p99": _ms(quiet, 0.99),
            "with long prompts: p50": _ms(gaps, 0.5),
            "p99": _ms(gaps, 0.99),
            "longest": _ms(gaps, 1),
            "p99 ÷ split": round(
                median(
                    quantile(a["gaps"], 0.99) / quantile(b["gaps"], 0.99)
                    for a, b in zip(of, found["prefill=1,decode=1"], strict=True)
                ),
                2,
            ),
            "first token of a long one": _ms(first, 0.5),
            "tokens/s": round(median(one["rate"] for one in of), 1),
        }
    return rows


def _disturbed(
    server: Server, asked: list[list[dict[str, str]]], long: Sequence[list[dict[str, str]]], tokens: int
) -> dict[str, Any]:
    """What readers see: undisturbed, then while long prompts come as long as they read."""
    quiet = served(server, asked, tokens)
    over, first = threading.Event(), list[float]()

    def disturb() -> None:
        for messages in long:
            if not over.is_set():
                first.append(read(server, messages, 2).first)

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(disturb)
        made = served(server, asked, tokens)
        over.set()
        coming.result()
    return {
        "quiet": quiet["gaps"],
        "gaps": made["gaps"],
        "first": first,
        "rate": made["tokens"] / made["seconds"],
    }


def second_turns(model: str, path: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Rows by layout and tokens of the first answer: the second turn, in pairs, and the end of the first one."""
    chats, found = Chats(path), defaultdict[tuple[str, int], list[dict[str, float]]](list)
    with ExitStack() as stack:
        servers = {name: _serving(stack, model, "--workers", name) for name in (LAYOUTS[0], LAYOUTS[2])}
        for turn in range(rounds + 1):
            for name, server in servers.items():
                for tokens in ANSWERS:
                    one = _two_turns(server, chats, tokens, first=bool(turn % 2))
                    if turn:
                        found[name, tokens].append(one)
    rows: dict[str, dict[str, Any]] = {}
    for (name, tokens), of in found.items():
        rows[f"{name}, {tokens}"] = {
            "prompt": of[0]["prompt"],
            "found": of[0]["found"],
            "first token without, ms": _ms([one["without"] for one in of], 0.5),
            "ratio": round(median(one["with"] / one["without"] for one in of), 2),
            "first turn ÷ one that keeps nothing": round(median(one["kept"] / one["not kept"] for one in of), 3),
        }
    return rows


def _two_turns(server: Server, chats: Chats, tokens: int, *, first: bool) -> dict[str, float]:
    """A chat of two turns: its first one also without a cache, its second one with it and without, which is `first`."""
    messages, words = chats.messages(20), chats.whole_words
    answers = {}
    for cache in (first, not first):
        answers[cache] = read(server, messages, tokens, temperature=1, seed=1, logit_bias=words, cache=cache)
    said = {"role": "assistant", "content": answers[True].text}
    talk = [*messages, said, {"role": "user", "content": "And then?"}]
    seen = {cache: read(server, talk, 4, cache=cache) for cache in (first, not first)}
    if len({one.text for one in seen.values()}) > 1 or answers[True].text != answers[False].text:
        raise SystemExit("texts differ with and without the cache")
    usage = seen[True].usage
    return {
        "prompt": usage["prompt_tokens"],
        "found": usage["prompt_tokens_details"]["cached_tokens"],
        "with": seen[True].first,
        "without": seen[False].first,
        "kept": answers[True].ended - answers[True].began,
        "not kept": answers[False].ended - answers[False].began,
    }


def _serving(stack: ExitStack, model: str, *options: str) -> Server:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    own = "--kv", KV, "--arena", "256MiB", "--threads", "1"
    return stack.enter_context(serving(Path(folder), model, *own, *options)).ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="", help="smollm2, or a model folder; default: a small random model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=400, help="words of a long prompt")
    parser.add_argument("--part", choices=["rates", "long", "turns"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or str(make_language_model(Path(folder) / "narrow", positions=4096, width=256, layers=4))
        path = resolve_source(model)
        if asked.part in (None, "rates"):
            rows = rates(model, path, asked.rounds, asked.tokens)
            table("chats", rows)
            show("chat", model=asked.model or "narrow", rounds=asked.rounds, tokens=asked.tokens, rates=rows)
        if asked.part in (None, "long"):
            rows = with_long(model, path, asked.rounds, 3 * asked.tokens, asked.words)
            table("layout", rows)
            show("chat", model=asked.model or "narrow", rounds=asked.rounds, words=asked.words, long=rows)
        if asked.part in (None, "turns"):
            rows = second_turns(model, path, asked.rounds)
            table("second turn", rows)
            show("chat", model=asked.model or "narrow", rounds=asked.rounds, turns=rows)


if __name__ == "__main__":
    main()
