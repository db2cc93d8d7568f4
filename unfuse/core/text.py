"""Texts: packed token ids, digests of prompt prefixes, token deltas, and the formats of answers."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PREFILL_CHUNK_TOKENS = 256
"""Chunked prefill: the most tokens that a sequence adds in one step while it is built, or rebuilt after a retraction.

Chunks end at multiples of it. One chunk is one prefix block.
"""

GATHERED_KV_BYTES = 128 << 20
"""The most bytes of one layer's keys and values that several sequences gather for one call of attention on a GPU."""

MAX_PREFIX_BLOCKS = 256  # the most prefix blocks of one text that other requests may reuse


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as 32-bit numbers, least significant byte first."""
    return array("I", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the token ids in the bytes that `pack_ids` returned."""
    return array("I", data).tolist()


def prefix_digests(ids: Sequence[int], media_positions: Sequence[tuple[int, str]] = ()) -> tuple[str, ...]:
    """Return the digests for prefix caching: one per prefix of whole chunks, shortest first.

    Equal digests mean equal tokens, and equal pictures and videos. `media_positions` has the pictures and videos as
    (position of the first token, identity), in order. The last token belongs to no prefix, because decoding starts with
    its keys and values.
    """
    digests: list[str] = []
    digest = b""
    remaining = deque(media_positions)
    for start in range(
        0, min(len(ids) - PREFILL_CHUNK_TOKENS, MAX_PREFIX_BLOCKS * PREFILL_CHUNK_TOKENS), PREFILL_CHUNK_TOKENS
    ):
        # all pictures have the same placeholder tokens, so the digest must cover their identities too
        while remaining and remaining[0][0] < start + PREFILL_CHUNK_TOKENS:
            digest = blake2b(digest + remaining.popleft()[1].encode(), digest_size=16).digest()
        digest = blake2b(digest + pack_ids(ids[start : start + PREFILL_CHUNK_TOKENS]), digest_size=16).digest()
        digests.append(digest.hex())
    return tuple(digests)


class TextStats(msgspec.Struct, frozen=True):
    """The paged KV cache and the waiting texts of one process."""

    #: KV blocks that sequences use.
    used: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    #: Free KV blocks.
    free: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    #: Prompts in prefill.
    prompts: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    #: Texts that wait for their grammar.
    grammars: Annotated[int, Meta(ge=0, le=1 << 60)] = 0

    def __add__(self, other: TextStats) -> TextStats:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return TextStats(*map(sum, zip(mine, theirs, strict=True)))


class TokenBytes(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a token and of its alternatives."""

    #: Bytes of the sampled token, which may be an incomplete character.
    data: bytes
    #: Bytes of the most likely tokens, in the order of `TokenDelta.top`.
    top: tuple[bytes, ...]
    #: Number of the answer's first tokens whose text is final: it was sent, and no stop string can remove it.
    final_tokens: int


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token, and the text that became final with it.

    `logprob`, `top` and `token_bytes` are set only if the client requested log probabilities.
    """

    #: Id of the token.
    id: int
    #: Text that became final. Empty while a character is incomplete, or while a stop string may remove the text.
    text: str = ""
    #: Natural logarithm of the token's probability.
    logprob: float | None = None
    #: The most likely tokens as (id, name, logprob), the likeliest first.
    top: tuple[tuple[int, str, float], ...] = ()
    #: The bytes of the token and of those in `top`.
    token_bytes: TokenBytes | None = None


def token_name(data: bytes) -> str:
    """Return a token as text.

    Bytes that are not UTF-8 on their own are written as `\\xf0`.
    """
    return data.decode(errors="backslashreplace")


class Answer(msgspec.Struct, frozen=True):
    """A whole answer."""

    #: The decoded text.
    text: str
    #: Why it ended: "stop" or "length".
    finish_reason: str
    #: Its tokens.
    pieces: list[TokenDelta]
    #: The stop string, or the id in `stop_token_ids`, that ended it.
    stop_reason: str | int | None = None


Syntax = Literal["json", "tags", "named", "listed", "python"]
"""What follows a start mark: a JSON object; tags; a name and then arguments; a list of objects or a name; Python."""

SEPARATOR = "<｜tool▁sep｜>"
"""The mark between the function's name and its arguments in `named` calls."""


class CallFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool-call format.

    The first group of fields is for parsing, the second for grammars that enforce a call. A grammar writes `open`, then
    calls separated by `between`, then `close`. A call is `head` with NAME replaced, the arguments as JSON, then `tail`.
    """

    #: Name of the format, as in vLLM's tool parsers.
    name: str
    #: Syntax of one call.
    syntax: Syntax
    #: Marks after which a call begins.
    starts: tuple[str, ...] = ()
    #: Marks that may follow a call and are not part of the content.
    ends: tuple[str, ...] = ()
    #: A line that begins with one of these characters may also be a call.
    bare: str = ""
    #: Marks within a call.
    inner: tuple[str, ...] = ()

    #: Text before the first call.
    open: str = ""
    #: Text of a call before its arguments. NAME stands for the function's name.
    head: str = '{"name": "NAME", "arguments": '
    #: Text of a call after its arguments.
    tail: str = "}"
    #: Text between two calls; "": the format allows only one call.
    between: str = ""
    #: Text after the last call.
    close: str = ""
    #: The format that grammars write instead of this one; None: they write this one.
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
    """The marks around the reasoning of an answer."""

    #: Name of vLLM's reasoning parser.
    name: str
    #: The mark before reasoning.
    start_mark: str = "<think>"
    #: The mark after reasoning.
    end_mark: str = "</think>"
    #: Whether an answer without `start_mark` may begin with reasoning.
    always: bool = False


class AnswerParsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an answer is parsed into content, tool calls and reasoning."""

    #: None: tool calls are not parsed.
    calls: CallFormat | None = None
    #: By name of a function that the model may call, the types of its parameters by name.
    functions: dict[str, dict[str, str]] = {}
    #: Whether more than one call is parsed.
    allows_several_calls: bool = True
    #: Whether the answer consists of calls, so that the rest of a truncated call is never content.
    forced: bool = False
    #: None: reasoning is not parsed.
    reasoning: ReasoningFormat | None = None
    #: Whether the prompt ends within reasoning.
    starts_in_reasoning: bool = False
    #: Whether responses leave out the reasoning.
    hides_reasoning: bool = False
    #: Whether the prompt has reasoning of this turn, which has ended.
    has_reasoning: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens of the model.

        Detokenizing must not drop them, since the parser needs them.
        """
        calls = self.calls.marks if self.calls else ()
        reasoning = (self.reasoning.start_mark, self.reasoning.end_mark) if self.reasoning else ()
        return (*calls, *reasoning)
