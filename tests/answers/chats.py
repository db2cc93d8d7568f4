"""A tiny language model beside the built-in one, as the tests of chats and pictures over HTTP serve them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.once import once
from tools.tiny_language import make_language_model

NAMES = ("zeta", "alpha")
"""The names under which the language model and the built-in model are served, not in alphabetical order."""

ENDLESS = {"max_tokens": 1500, "logit_bias": {"2": -100, "0": -100}}
"""Parameters of a chat that never ends by itself: no token that ends a text can be drawn."""

HELLO = [{"role": "user", "content": "what is the capital of France"}]


def serve_arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the arguments of a server of both models, with one worker each of one thread."""

    def build(unfinished: Path) -> None:
        make_language_model(unfinished, positions=2048)

    folder = once("tiny-chat-2048", tmp_path_factory, build)
    names = tuple(part for name in NAMES for part in ("--served-model-name", name))
    return str(folder), "unfuse/shapes", *names, "--threads", "1"
