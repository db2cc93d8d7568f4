"""Texts: what decoding adds to one, how an answer is parsed, and what a process has of them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

CHUNK = 256  # Tokens that a sequence which is (re)built adds in one step, at most. Chunks end at multiples of it.
MOST_SHARED = 256  # how many chunks of a prompt may be found by others


def packed(ids: Sequence[int]) -> bytes:
    """Ids as 32-bit numbers, least byte first."""
    return array("I", ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    """The ids in what `packed` made."""
    return array("I", data).tolist()


def beginnings(ids: Sequence[int], shown: Sequence[tuple[int, str]] = ()) -> tuple[str, ...]:
    """A digest of each beginning of a prompt that ends with a chunk, the shortest first.

    Equal ones are of equal tokens, and equal in what is `shown` there: (place of its first token, what it is), in
    order. The last token is in none: its keys and values are those that decoding begins with.
    """
    found, digest, left = list[str](), b"", deque(shown)
    for start in range(0, min(len(ids) - CHUNK, MOST_SHARED * CHUNK), CHUNK):
        while left and left[0][0] < start + CHUNK:
            digest = blake2b(digest + left.popleft()[1].encode(), digest_size=16).digest()
        digest = blake2b(digest + packed(ids[start : start + CHUNK]), digest_size=16).digest()
        found.append(digest.hex())
    return tuple(found)


class TextStats(msgspec.Struct, frozen=True):
    """What a process has of texts now: blocks of keys and values that sequences have, those that nobody has, prompts
    that it computes those of, and texts that wait for their grammar.
    """

    used: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    free: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    prompts: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    grammars: Annotated[int, Meta(ge=0, le=1 << 60)] = 0

    def __add__(self, other: TextStats) -> TextStats:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return TextStats(*map(sum, zip(mine, theirs, strict=True)))


class TokenBytes(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a token, and of the `top` tokens in their order.

    The bytes may be a part of a character. `certain` counts the answer's first tokens whose text is final: it was sent,
    and no stop string can remove it.
    """

    data: bytes
    top: tuple[bytes, ...]
    certain: int


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """A token that was drawn, and the text that became certain with it: none while a character is incomplete.

    `logprob` is the natural logarithm of its probability; `top` has (id, name, logprob) of the most likely tokens, the
    likeliest first; `own` has the bytes of all these. All three are there only if they were asked for.
    """

    id: int
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, str, float], ...] = ()
    own: TokenBytes | None = None


def token_name(data: bytes) -> str:
    """Return a token as text. Bytes that are not UTF-8 on their own are written as `\\xf0`."""
    return data.decode(errors="backslashreplace")


class Answer(msgspec.Struct, frozen=True):
    """A whole answer: its text, why it ended ("stop" or "length"), and its tokens.

    `stop_reason` is the stop string, or the id in `stop_token_ids`, that ended it.
    """

    text: str
    finish_reason: str
    pieces: list[TokenDelta]
    stop_reason: str | int | None = None


Syntax = Literal["json", "tags", "named", "listed", "python"]
"""What follows a start mark: a JSON object; tags; a name and then arguments; a list of objects or a name; Python."""

SEPARATOR = "<｜tool▁sep｜>"
"""The mark between the function's name and its arguments in `named` calls."""


class CallFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool-call format. The first group of fields is for parsing, the second for grammars that enforce a call.

    A call begins after one of the marks `starts`. A line that begins with one of the characters in `bare` may also be
    a call. `ends` are marks that may follow a call and are not part of the content. `inner` are marks within a call.

    A grammar writes `open`, then calls separated by `between`, then `close`. A call is `head` with NAME replaced, the
    arguments as JSON, then `tail`. If `written` is set, grammars use that format instead.
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
        """All marks. They may be special tokens of the model, and are never content."""
        return (*self.starts, *self.ends, *self.inner)

    @property
    def as_written(self) -> CallFormat:
        """The format that grammars write."""
        return self.written or self


class ReasoningFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The marks around reasoning. `name` is that of vLLM's parser. `always`: reasoning may start without `begin`."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False


class AnswerParsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to parse an answer.

    `calls` and `reasoning` are formats (None: not parsed). `functions` maps each offered function to the types of its
    parameters by name. `several` and `forced` are as in CallReader. `opened`: the prompt ends within reasoning.
    `reasoned`: it has reasoning of this turn, which is over. With `hidden`, reasoning is not sent to clients.
    """

    calls: CallFormat | None = None
    functions: dict[str, dict[str, str]] = {}
    several: bool = True
    forced: bool = False
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    hidden: bool = False
    reasoned: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens of the model. They must be kept in the text, so that it can be parsed."""
        calls = self.calls.marks if self.calls else ()
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()
        return (*calls, *reasoning)
