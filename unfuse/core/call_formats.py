"""How models write calls of tools."""

from __future__ import annotations

from typing import Literal

import msgspec

Syntax = Literal["json", "tags", "named", "listed", "python"]
"""What is behind a mark: an object, tags, a name and then arguments, a list of objects or a name, Python calls."""

SEPARATOR = "<｜tool▁sep｜>"
"""The mark of `named` calls between what is called and its arguments."""


class CallFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One format. The first group of fields is for reading calls, the second for the grammar that makes a model call.

    `starts` are marks behind which a call begins. Where `bare` is not empty, a line that begins with one of its
    characters may be a call, too. `ends` are marks that may follow a call, and are not part of the content. `inner`
    are marks within a call.

    A grammar writes `open`, calls with `between` them, `close`. A call is `head`, with NAME replaced, arguments as
    JSON, `tail`. What has another format as `written` is written in that one by grammars.
    """

    name: str
    syntax: Syntax
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: str = ""
    inner: tuple[str, ...] = ()

    open: str = ""
    head: str = '{"name": "NAME", "arguments": '
    tail: str = "}"
    between: str = ""
    close: str = ""
    written: CallFormat | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that may be special tokens of a model, and are no content."""
        return (*self.starts, *self.ends, *self.inner)

    @property
    def as_written(self) -> CallFormat:
        """The format in which a grammar makes the model call."""
        return self.written or self
