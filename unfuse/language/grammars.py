"""Grammars, what the text of an answer must be: each lives in a process that says what tokens may follow a text.

Nothing here waits for one longer than it is told to. What a grammar does to its process harms its own texts alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from unfuse.core.codec import MAX_BYTES, decode, encode, frame, split_message
from unfuse.core.errors import InvalidParameter, PermanentError, ProtocolError, TransientError
from unfuse.core.text import AnswerParsing, packed
from unfuse.language.answer_reader import ReasoningReader
from unfuse.language.detokenize import Detokenizer

if TYPE_CHECKING:
    from unfuse.language.tokenizer import ChatTokenizer

MAX_CHARS = 256 * 1024  # the longest grammar, in characters

Kind = Literal["json_schema", "regex", "lark", "ebnf"]


class Grammar(msgspec.Struct, frozen=True):
    """A JSON schema (made by `schema_text`), a regular expression, or a grammar, for llguidance.

    A grammar is in Lark's notation, or in the EBNF of llama.cpp (GBNF) and XGrammar.
    """

    kind: Kind
    text: str


class GrammarCompiled(msgspec.Struct, frozen=True):
    """A grammar is compiled, or cannot be, for this reason."""

    error: str = ""


class AllowedTokensQuery(msgspec.Struct, frozen=True, array_like=True):
    """A text has these ids from number `start` on: say what may follow; or it is `over`."""

    text: int
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    ids: bytes = b""
    over: bool = False


class AllowedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Behind `length` ids of a text, those tokens may follow whose bit is set; none, for this reason."""

    text: int
    length: int
    mask: bytes = b""
    error: str = ""


def pack_grammar(grammar: Grammar, param: str) -> bytes:
    """As an upload has it. Raises InvalidParameter, which names this parameter."""
    if len(grammar.text) > MAX_CHARS:
        raise InvalidParameter(f"{param}: {len(grammar.text)} characters of grammar, of at most {MAX_CHARS}", param)
    try:
        return encode(grammar)
    except ProtocolError as error:
        raise InvalidParameter(f"{param}: half a surrogate pair is no text", param) from error


def grammar_digest(packed: bytes) -> str:
    """A hash of a packed grammar."""
    return blake2b(packed, digest_size=16).hexdigest()


KEPT = 16  # processes of grammars that are kept, those that nobody follows, too
PATIENCE_S = 0.03  # how long a step waits for what may follow; a text whose answer comes later joins a later step

PROGRAM = "unfuse.language.grammar_process"

TOO_MUCH = "the grammar takes too much: more computing, more memory or deeper nesting than is allowed; make it simpler"


class InvalidGrammar(PermanentError):
    """The grammar cannot be compiled, no text matches it, or it takes too much."""


class _Process:
    """The process of one grammar: answers of texts, by their numbers, as they come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._received = connection, bytearray()
        self.compiled: GrammarCompiled | None = None
        self.answers = dict[int, AllowedTokens]()
        self.texts, self.dead = set[int](), False
        weakref.finalize(self, connection.close)

    def send(self, message: AllowedTokensQuery) -> None:
        """Say it. A process that died meanwhile is `dead`."""
        if self.dead:
            return
        try:
            self._connection.settimeout(None)
            self._connection.sendall(frame(encode(message)))
        except OSError:
            self.dead = True

    def hear(self, wait_s: float | None) -> None:
        """Take what comes within so many seconds (None: until something comes); one message, or the end, is enough."""
        if self.dead:
            return
        try:
            self._connection.settimeout(wait_s)
            data = self._connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            data = b""
        self.dead = not data
        self._received += data
        while (message := split_message(self._received, MAX_BYTES)) is not None:
            if self.compiled is None:
                self.compiled = decode(message, GrammarCompiled)
            else:
                answer: AllowedTokens = decode(message, AllowedTokens)
                self.answers |= {answer.text: answer} if answer.text in self.texts else {}

    def close(self) -> None:
        """Nobody needs it any more: it ends by itself."""
        self.dead = True
        self._connection.close()


class Grammars:
    """The grammars of one model, by its `source`; without one they can be compiled, and nothing be followed.

    A step waits for what may follow for `patience_s` seconds (None: until it is known). Of many threads, each may call
    `open` and `refusal`; a Constraint belongs to one.
    """

    def __init__(self, source: str = "", patience_s: float | None = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._source, self._numbers, self._lock = source, count(), Lock()
        self._processes = OrderedDict[bytes, _Process]()
        self._control: socket.socket | None = None
        self._ended: weakref.finalize[[socket.socket, subprocess.Popen[bytes]], Grammars] | None = None

    def open(self, grammar: bytes) -> GrammarConstraint:
        """A new text, which has to match this packed grammar."""
        return GrammarConstraint(self, grammar, next(self._numbers))

    def refusal(self, grammar: bytes) -> str:
        """Why a packed grammar cannot be compiled, "" if it can. Waits. Raises TransientError where none can be now."""
        process = self.start(grammar)
        while process.compiled is None and not process.dead:
            process.hear(None)
        process.close()
        if process.compiled is not None:
            return process.compiled.error
        if not self.running:
            raise TransientError("the program that compiles grammars has ended: what it said of that is in the log")
        return TOO_MUCH

    @property
    def running(self) -> bool:
        """Whether the program runs: it closes its end when it ends, before it can be waited for."""
        try:
            return self._control is not None and self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError as error:
            return isinstance(error, BlockingIOError)

    def process(self, grammar: bytes) -> _Process:
        """The process that texts of this grammar share."""
        found = self._processes.get(grammar)
        if found is None or found.dead:
            found = self._processes[grammar] = self.start(grammar)
        self._processes.move_to_end(grammar)
        idle = [key for key, process in self._processes.items() if not process.texts and process is not found]
        for key in idle[: max(0, len(self._processes) - KEPT)]:
            self._processes.pop(key).close()
        return found

    def start(self, grammar: bytes) -> _Process:
        """A process of its own for a grammar."""
        ours, theirs = socket.socketpair()
        file = os.memfd_create("grammar")
        try:
            os.write(file, grammar)
            os.lseek(file, 0, os.SEEK_SET)
            with self._lock:
                self._send(file, theirs.fileno())
        finally:
            os.close(file)
            theirs.close()
        return _Process(ours)

    def _send(self, file: int, connection: int) -> None:
        try:
            socket.send_fds(self._control or self._begin(), [b"g"], [file, connection])
        except OSError:  # the program was killed
            socket.send_fds(self._begin(), [b"g"], [file, connection])

    def _begin(self) -> socket.socket:
        """Start the program; it may take a second until it answers."""
        self.close()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", PROGRAM, str(theirs.fileno()), self._source]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            program = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        self._control = ours
        self._ended = weakref.finalize(self, _end, ours, program)
        return ours

    def close(self) -> None:
        """End the program. Processes of grammars end when nobody follows them."""
        if self._ended is not None:
            self._ended()
            self._control = None


def _end(control: socket.socket, program: subprocess.Popen[bytes]) -> None:
    control.close()
    program.kill()
    program.wait()


class GrammarConstraint:
    """A text that has to match a grammar. What it has so far is told with each call, and only grows."""

    def __init__(self, grammars: Grammars, grammar: bytes, number: int) -> None:
        self._grammars, self._grammar, self._number = grammars, grammar, number
        self._process, self._private = grammars.process(grammar), False
        self._process.texts.add(number)
        self._told, self._late = -1, True

    @property
    def compiling(self) -> bool:
        """Whether its grammar is not compiled yet."""
        return self._process.compiled is None

    def begin(self, ids: Sequence[int]) -> None:
        """Ask what may follow these ids, if nobody has asked yet. The answer is made meanwhile."""
        if self._told < len(ids):
            start = max(0, self._told)
            self._process.send(AllowedTokensQuery(self._number, start, packed(ids[start:])))
            self._told = len(ids)

    def waits(self, wait_s: float = 0.0) -> bool:
        """Whether what may follow is overdue, also after so many seconds: a step should go on without this text.

        It is from the first, until its grammar is compiled.
        """
        self._late = self._late and self._grammars.patience_s is not None and not self._heard(wait_s)
        return self._late

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        """A bit per token, set if it may follow these ids; None if a step cannot wait for it. Raises InvalidGrammar."""
        self.begin(ids)
        self._late = not self._heard(self._grammars.patience_s)
        answer, compiled = self._process.answers.get(self._number), self._process.compiled
        if self._late:
            return None
        if compiled and compiled.error:
            raise InvalidGrammar(f"the grammar cannot be used: {compiled.error}")
        if answer and answer.error:
            raise InvalidGrammar(f"the text cannot go on by its grammar: {answer.error}")
        if answer and answer.length == len(ids):
            return answer.mask
        if self._private or (compiled is None and self._grammars.running):
            raise InvalidGrammar(TOO_MUCH)
        self._go_on_alone()
        return None if self._late else self.allowed(ids)

    def close(self) -> None:
        """The text is over."""
        self._process.texts.discard(self._number)
        self._process.answers.pop(self._number, None)
        if self._private:
            self._process.close()
        else:
            self._process.send(AllowedTokensQuery(self._number, over=True))

    def _go_on_alone(self) -> None:
        """The process died, of this text or of another: follow it in one of its own, where it harms no other."""
        self.close()
        self._process, self._private = self._grammars.start(self._grammar), True
        self._process.texts.add(self._number)
        self._told, self._late = -1, self._grammars.patience_s is not None

    def _heard(self, wait_s: float | None) -> bool:
        """Whether there is an answer, or will never be one, within so many seconds."""
        until = None if wait_s is None else time.monotonic() + wait_s
        while not self._settled():
            left = None if until is None else max(0.0, until - time.monotonic())
            self._process.hear(left)
            if left == 0.0:
                return self._settled()
        return True

    def _settled(self) -> bool:
        process, answer = self._process, self._process.answers.get(self._number)
        if process.dead or (process.compiled and process.compiled.error):
            return True
        if self._told < 0:
            return process.compiled is not None
        return answer is not None and (answer.length == self._told or bool(answer.error))


class ConstraintAfterReasoning:
    """Applies a constraint to the tokens after the reasoning. Within the reasoning every token is allowed.

    An answer without reasoning is constrained from its first token; only the mark that begins reasoning is allowed too.
    """

    def __init__(self, constraint: GrammarConstraint, reading: AnswerParsing, tokenizer: ChatTokenizer) -> None:
        format = reading.reasoning
        assert format
        self._constraint = constraint
        self._reader = ReasoningReader(format, reading.opened)
        self._detokenizer = Detokenizer(tokenizer, tokenizer.mark_ids(reading.marks))
        self._any = b"\xff" * (-(-tokenizer.size // 8))
        self._begin = tokenizer.mark_ids([format.begin]) if not reading.opened else {}
        self._read, self._reasoned = 0, 0

    @property
    def compiling(self) -> bool:
        """Whether its grammar is not compiled yet."""
        return self._constraint.compiling

    def begin(self, ids: Sequence[int]) -> None:
        """Start computing the tokens allowed after these ids in the background, if the reasoning is over."""
        if self._behind(ids):
            self._constraint.begin(ids[self._reasoned :])

    def waits(self, wait_s: float = 0.0) -> bool:
        """Whether that computation is overdue, after waiting up to `wait_s` seconds. Never within reasoning."""
        return not self._reasons and self._constraint.waits(wait_s)

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        """Return a bit mask of the tokens allowed after these ids; None if overdue. Raises PermanentError."""
        if not self._behind(ids):
            return self._any
        mask = self._constraint.allowed(ids[self._reasoned :])
        if ids or mask is None:
            return mask
        bits = bytearray(mask)
        for id in self._begin:
            if id // 8 < len(bits):
                bits[id // 8] |= 1 << id % 8
        return bytes(bits)

    def close(self) -> None:
        """Release the constraint at the end of the text."""
        self._constraint.close()

    @property
    def _reasons(self) -> bool:
        return self._reader.state in ("opened", "inside")

    def _behind(self, ids: Sequence[int]) -> bool:
        """Whether the grammar applies after these ids. They must extend the ids of the previous call."""
        for id in ids[self._read :]:
            reasoned = self._reasons or id in self._begin
            self._reader.feed(self._detokenizer.add(id))
            self._read += 1
            if reasoned:
                self._reasoned = self._read
        return not self._reasons


GrammarMatcher = GrammarConstraint | ConstraintAfterReasoning
"""What follows a text that has to match a grammar."""
