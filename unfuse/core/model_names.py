"""Names of models: what clients may call one, and what a folder is called without saying where it lies."""

from __future__ import annotations

import re
from pathlib import PurePath

from unfuse.core.redact import without_paths

MAX_NAME = 128  # characters; messages of workers hold no longer ones
PART = r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*"
NAME = rf"{PART}(/{PART})?"
"""What an admin may call a model: as hubs do, with or without an owner. No path fits: not /a, ./a, ../a or a/b/c."""

_COMPONENTS = re.compile(r"#(?=\w+=.)")
UNNAMED = "model"


def is_name(text: str) -> bool:
    """Return whether an admin may call a model so."""
    return len(text) <= MAX_NAME and re.fullmatch(NAME, text) is not None


def is_path(source: str) -> bool:
    """Return whether a source is a path, and not a name of a hub. No disk is read."""
    return source.startswith(("/", ".", "~")) or source.count("/") > 1


def name_of(source: str) -> str:
    """Return what a model is called by default: its hub name, or the last part of its path.

    Sources of single components, as in MODEL#vae=FOLDER, are left out.
    """
    source = _COMPONENTS.split(source, maxsplit=1)[0]
    if not is_path(source):
        return source
    last = PurePath(source).name
    return UNNAMED if last in ("", "..", "~") else last


def without_source(text: str, source: str, name: str) -> str:
    """Return a text with a model's name in place of its path, and without other absolute paths."""
    if not is_path(source):
        return without_paths(text)
    whole = rf"(?<![\w./~-]){re.escape(source)}(?![\w.-])"  # not the dot in a file's name, for the source "."
    return without_paths(re.sub(whole, lambda _: name, text))
