"""What narrowing an edge of chats saves (`--encode vision_encode=…`, `prefill=…`), and what it does to their texts.

Transfer: embeddings of 3584 values in float32, as an encoder on a CPU makes them, are put narrowed, pulled by tcp into
another arena, and read as float32 again, over loopback and slowed to so many MB/s; the three together against the same
without narrowing, in interleaved rounds. Chats: a narrow random Qwen3-VL whose vision encoder, prefill and decoder pull
from each other as if on three machines; the same pictures each time, bytes and seconds a chat, and greedy texts against
those without narrowing. `python -m bench.narrow [ROUNDS]`
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.pull import Slow
from bench.report import ratio, show, table
from bench.seen import Scene, Shots
from bench.servers import TOLD_S, pulled
from tools.server import serving
from unfuse.arena.arena import Arena
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferOptions
from unfuse.transfer.session import ArenaSink, Transfers
from unfuse.wire.keys import create_keys

K, WIDTH = 1024, 3584
LENGTHS = (1, 4, 16)
"""Thousands of tokens."""
RATES = (0, 1000, 125)
"""MB/s of the network; 0: as fast as it goes."""
ENCODINGS = ("none", "bf16", "fp16", "int4")
EDGES = ("vision_encode", "prefill")
SCENE: Scene = (32, 1, 0, 64)
CHATS, ROUNDS = 8, 7
OPTIONS = TransferOptions(insecure=True)


class Edge:
    """An owner of tensors, and a reader that pulls them into an arena of its own."""

    def __init__(self, folder: str, largest: int) -> None:
        capacity = 1 << max(24, (2 * largest - 1).bit_length())
        self._owner = TensorStore.create("shared_memory", owner="p", capacity=capacity, run_dir=folder)
        assert self._owner.arena
        self.engine = Slow(OPTIONS)
        address = self.engine.serve(self._owner.arena)
        self._arena = Arena(capacity)
        self._transfers = Transfers({"tcp": self.engine}, lambda _: {"tcp": address}, OPTIONS)

    def cross(self, values: torch.Tensor, encoding: str) -> dict[str, float]:
        """Seconds to put, to pull and to read; the bytes that were pulled, and the largest error."""
        began = time.perf_counter()
        ref = self._owner.put({"seen": values}, request="r", stage="s", attempt=1, encoding=encoding)
        put = time.perf_counter()
        self._transfers.fetch(ref, ArenaSink(self._arena, ref)).result(600)
        pulled = time.perf_counter()
        with self._owner.get(ref, as_torch=True) as read:
            done = time.perf_counter()
            error = float((read["seen"] - values).abs().max())
        self._arena.release("r")
        self._owner.release("r")
        return {
            "put": put - began,
            "pull": pulled - put,
            "read": done - pulled,
            "all": done - began,
            "MiB": ref.nbytes / 2**20,
            "error": error,
        }

    def close(self) -> None:
        self._transfers.close()
        self.engine.close()
        self._owner.close()


def transfers(lengths: Sequence[int], rates: Sequence[int], rounds: int, width: int = WIDTH) -> dict[str, Any]:
    """A row for each length, network and encoding."""
    rows = dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        edge = Edge(folder, max(lengths) * K * width * 4)
        for length in lengths:
            values = torch.randn(length * K, width, generator=torch.Generator().manual_seed(length))
            for rate in rates:
                edge.engine.rate = rate
                found = defaultdict[str, list[dict[str, float]]](list)
                for number in range(rounds + 1):
                    for encoding in ENCODINGS:
                        one = edge.cross(values, encoding)
                        if number:
                            found[encoding].append(one)
                plain = [one["all"] for one in found["none"]]
                for encoding, ones in found.items():
                    middle = {name: median(one[name] for one in ones) for name in ones[0]}
                    network = f"{rate} MB/s" if rate else "loopback"
                    rows[f"{length}K, {network}, {encoding}"] = {
                        "MiB": round(middle["MiB"], 1),
                        **{f"{name}, ms": round(middle[name] * 1e3, 1) for name in ("put", "pull", "read", "all")},
                        "all ÷ none": round(ratio([one["all"] for one in ones], plain)["p50"], 2),
                        "largest error": round(middle["error"], 4),
                    }
        edge.close()
    return rows


def answers(shots: Shots, chats: Sequence[dict[str, Any]], encode: str) -> tuple[list[Any], dict[str, float]]:
    """The tokens of each chat with their log probabilities; KiB pulled and seconds a chat, the first not counted."""
    with tempfile.TemporaryDirectory() as folder:
        create_keys(Path(folder, "keys"))
        keys = ("--keys", f"{folder}/keys")
        chosen = ("--encode", encode) if encode else ()
        with serving(Path(folder), str(shots.model), "--workers", "none", *keys, *chosen, at="127.0.0.1") as server:
            for role in ("vision", "prefill", "decode"):
                flags = (*keys, "--threads", "1", "--kv", "64MiB", "--arena", "256MiB")
                server.worker(role, *flags, UNFUSE_RUN_DIR=f"{folder}/{role}")
            server.ready()
            server.post("/v1/chat/completions", shots.chat(SCENE)[0])
            time.sleep(TOLD_S)
            before, began = pulled(server), time.perf_counter()
            made = [server.post("/v1/chat/completions", {**chat, "logprobs": True}) for chat in chats]
            seconds = time.perf_counter() - began
            time.sleep(TOLD_S)
            moved = pulled(server) - before
    told = [[(one["token"], one["logprob"]) for one in each["choices"][0]["logprobs"]["content"]] for each in made]
    return told, {"KiB pulled a chat": round(moved / 1024 / len(chats), 1), "s a chat": round(seconds / len(chats), 3)}


def compared(plain: list[Any], other: list[Any]) -> dict[str, object]:
    """How far answers are from those without narrowing: until the first other token, and how likely tokens are."""
    same, errors = 0, list[float]()
    for first, second in zip(plain, other, strict=True):
        for (token, likely), (another, less) in zip(first, second, strict=False):
            if token != another:
                break
            same += 1
            errors.append(abs(likely - less))
    return {
        "equal texts": f"{sum(map(texts_equal, plain, other))} of {len(plain)}",
        "tokens until another one": f"{same / sum(map(len, plain)):.0%}",
        "mean error of their log probability": round(sum(errors) / len(errors), 4) if errors else "",
    }


def texts_equal(first: list[Any], second: list[Any]) -> bool:
    return [token for token, _ in first] == [token for token, _ in second]


def chats(count: int, edges: Sequence[str] = EDGES, encodings: Sequence[str] = ENCODINGS[1:]) -> dict[str, Any]:
    """A row for each edge and encoding."""
    with tempfile.TemporaryDirectory() as folder:
        shots = Shots(Path(folder))
        asked = [shots.chat(SCENE)[0] for _ in range(count)]
        plain, row = answers(shots, asked, "")
        rows: dict[str, dict[str, object]] = {"none": {**row, **compared(plain, plain)}}
        for encode in (f"{edge}={encoding}" for edge in edges for encoding in encodings):
            found, row = answers(shots, asked, encode)
            rows[encode] = {**row, **compared(plain, found)}
    return rows


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    torch.set_num_threads(1)
    found = {"transfer": transfers(LENGTHS, RATES, rounds), "chats": chats(CHATS)}
    show("narrow", rounds=rounds, width=WIDTH, **found)
    for name, rows in found.items():
        table(name, rows)


if __name__ == "__main__":
    main()
