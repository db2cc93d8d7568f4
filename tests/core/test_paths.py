"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unfuse.core.paths import expanded


def test_a_tilde_is_the_home_folder_and_of_an_unknown_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert expanded("~/models") == Path("/home/ada/models")
    assert expanded(Path("~nobody-of-that-name/models")) == Path("~nobody-of-that-name/models")
    assert expanded("/models/~") == Path("/models/~")
