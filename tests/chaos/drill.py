"""One drill: work for a cluster, faults beside it, and what everybody says of it in the end."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from threading import Event
from typing import Any

import msgspec

from tests.chaos.checker import Verdict, check
from tests.chaos.cluster import Cluster
from tests.chaos.history import Final, History, Load, healthy, observe
from tests.chaos.monkey import Monkey, drained

Record = Callable[[str, object], None]

CLIENTS = 12


def unhurried(count: int, name: str, seed: int) -> Iterator[Any]:
    """Healthy operations that take their time at some of their stages: whoever is killed then holds something.

    One in eight takes a second of many steps, so that kills find checkpoints on a slow machine too.
    """
    rng = random.Random(f"pace {name} {seed}")
    pauses = {"text_encode": (0, 0.05, 0.1), "denoise": (0, 0.01, 0.03), "vae_decode": (0, 0.05, 0.1)}
    for number, (key, asked, mode) in enumerate(healthy(count, name, seed)):
        seconds = {stage: rng.choice(choices) for stage, choices in pauses.items()}
        if number % 8 == 0:
            seconds["denoise"], asked = 0.05, msgspec.structs.replace(asked, steps=20)
        orders = " ".join(f"[sleep={pause}@{stage}]" for stage, pause in seconds.items())
        yield key, msgspec.structs.replace(asked, prompt=f"{asked.prompt} {orders}"), mode


def drill(name: str, cluster: Cluster, requests: int, seed: int, *phases: Mapping[str, int]) -> Verdict:
    """At least so many requests while faults are made, one phase of them after the other; then check what all say."""
    monkey, at_it = Monkey(cluster, seed), Event()
    at_it.set()

    def work() -> Iterator[Any]:
        for number, one in enumerate(unhurried(sys.maxsize, name, seed)):
            if number >= requests and not at_it.is_set():
                return
            yield one

    with Load([gateway.port for gateway in cluster.gateways], work(), CLIENTS, seed, History()) as load:
        for faults in phases:
            monkey.rampage(faults, lambda: load.busy)
        at_it.clear()
        history = load.finish()
    return check(f"{name} (seed {seed})", history.operations, observed(cluster), monkey.faults)


def observed(cluster: Cluster) -> Final:
    """What every gateway says, once nothing is left to do."""
    return observe([gateway.url for gateway in cluster.gateways], lambda: drained(cluster))


def say(verdict: Verdict, record: Record) -> None:
    """Have the table in the summary, whatever is wrong; then require that nothing is."""
    record("chaos", msgspec.json.encode(verdict).decode())
    verdict.require_nothing_wrong()
