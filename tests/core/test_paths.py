"""Paths as people write them, and texts without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from unfuse.core.paths import expand_path, without_paths


def test_expand_path_replaces_tilde_except_of_an_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert expand_path("~/models") == Path("/home/ada/models")
    assert expand_path(Path("~nobody-of-that-name/models")) == Path("~nobody-of-that-name/models")
    assert expand_path("/models/~") == Path("/models/~")


PARTS = st.lists(st.text("abcXYZ019_-@+=.~", min_size=1).filter(lambda part: part.strip(".")), min_size=2, max_size=6)
AROUND = st.text("ab c:'\"(),=\n", max_size=12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[Errno 2] No such file or directory: '/srv/models/wan/vae/a.json'", "'…/a.json'"),
        ("there is no '/home/ada/my models/a b.bin' here", "'…/a b.bin'"),
        ('  File "/usr/lib/python3.11/site.py", line 3, in run', 'File "…/site.py", line 3'),
        ("make room under /var/lib/unfuse; then", "make room under …/unfuse; then"),
        ("the queue at disk:/data/copies is full", "disk:…/copies is full"),
        ("see file:///etc/unfuse/x.toml.", "x.toml."),
        ("under ~/.local/share/unfuse", "…/unfuse"),
        ("read /srv/a/b/ first", "read …/b first"),
    ],
)
def test_without_paths_shortens_each_path_to_its_last_part(text: str, says: str) -> None:
    found = without_paths(text)
    assert says in found
    assert not any(part in found for part in ("srv", "home", "usr", "var", "/data", "etc", "local"))
    assert without_paths(found) == found


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:8000/v1/requests/req_1", "image/png", "3/4 of it", "1 / 2", "tcp://h:1", "a and/or b"]
)
def test_without_paths_leaves_other_text_unchanged(text: str) -> None:
    assert without_paths(text) == text


@given(PARTS, AROUND, AROUND)
def test_without_paths_removes_every_folder_name(parts: list[str], before: str, after: str) -> None:
    secret = [f"secret{number}{part}" for number, part in enumerate(parts[:-1])]
    path = "/" + "/".join([*secret, parts[-1]])
    assert "secret" not in without_paths(f"{before} {path} {after}")
