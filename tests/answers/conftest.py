"""Fixtures for the rows of public bug reports: servers with defaults plus the flags that a row names, and tiny models.

A test that reproduces a reported row is marked `@pytest.mark.row("P01", "P02")`. Every run ends with a table of the
rows and their results. `pytest tests/answers` runs all of them, also those that are nightly. With ANSWERS_QUEUE=redis
in the environment, the shared servers have their queues in Redis instead of SQLite.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.answers import scripts
from tests.answers.sampled import build
from tests.once import once
from tools import tiny, tiny_whole
from tools.redis_server import RedisServer
from tools.scripted_model import make_scripted_model
from tools.server import Server, serving

MAX_SERVERS = 2
"""Servers that one test process runs at a time. The least recently used one is stopped for the next."""

QUEUE = os.environ.get("ANSWERS_QUEUE", "sqlite")

Serve = Callable[..., Server]
Folder = Callable[[str], Path]


@contextmanager
def queue_of(folder: Path) -> Iterator[list[str]]:
    """Yield the arguments that name a server's queue."""
    if QUEUE != "redis":
        yield []
        return
    redis = RedisServer(folder)
    try:
        yield ["--queue", redis.url]
    finally:
        redis.stop()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Return a ready `unfuse serve` with these arguments and variables. Equal calls share one server.

    It is stopped when MAX_SERVERS others were asked for since: ask for it in each test, or in one module.
    """
    running: OrderedDict[tuple[object, ...], tuple[ExitStack, Server]] = OrderedDict()

    def serve(*arguments: str | Path, **variables: str) -> Server:
        key = (arguments, *sorted(variables.items()))
        if key not in running:
            while len(running) >= MAX_SERVERS:
                running.popitem(last=False)[1][0].close()
            stack = ExitStack()
            folder = tmp_path_factory.mktemp("serve")
            queue = stack.enter_context(queue_of(folder))
            server = stack.enter_context(serving(folder, *map(str, arguments), *queue, **variables))
            running[key] = stack, server.ready()
        running.move_to_end(key)
        return running[key][1]

    yield serve
    for stack, _ in running.values():
        stack.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return the folder of a tiny model of that kind, built once in a test run. Copy it before you change it."""

    def made(kind: str) -> Path:
        make = tiny.build if kind in tiny.KINDS else tiny_whole.build
        return once(f"tiny-{kind}", tmp_path_factory, lambda unfinished: make(kind, unfinished) and None)

    return made


@pytest.fixture(scope="session")
def sampled(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return the folder of a model with another noise scheduler, or a safety checker, by its name in `sampled.py`."""
    return lambda name: build(name, folder, tmp_path_factory)


@pytest.fixture(scope="session")
def scripted_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of the scripted models in `scripts`, in their order."""
    folder = tmp_path_factory.mktemp("scripted")
    return [
        make_scripted_model(
            folder / name,
            texts,
            scripts.TEMPLATES[name],
            specials=scripts.SPECIALS.get(name, ()),
            marks=scripts.MARKS.get(name, ()),
        )
        for name, texts in scripts.SCRIPTS.items()
    ]


@pytest.fixture
def scripted(served: Serve, scripted_models: list[Path]) -> Server:
    """Return a server of the scripted models, each under its name in `scripts`."""
    names = [word for name in scripts.SCRIPTS for word in ("--served-model-name", name)]
    return served(*scripted_models, *names, "--kv", "8MiB", "--workers", "all=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note the rows of each test in its report, where the summary finds them."""
    for item in items:
        for mark in item.iter_markers("row"):
            item.user_properties += [("row", row) for row in mark.args]
