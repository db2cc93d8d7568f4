"""Structured outputs: grammars that constrain decoding, each compiled in a process of its own.

The process returns a bit mask of the tokens that may follow a text. A step of decoding waits for it at most
`patience_s` seconds. A grammar that exhausts or crashes its process fails only the texts that must match this grammar.
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
from unfuse.core.text import AnswerParsing, pack_ids
from unfuse.language.answer_reader import ReasoningReader
from unfuse.language.detokenize import Detokenizer

if TYPE_CHECKING:
    from unfuse.language.tokenizer import ChatTokenizer

#: The longest grammar, in characters.
MAX_CHARS = 256 * 1024

#: The notation of a grammar.
Kind = Literal["json_schema", "regex", "lark", "ebnf"]


class Grammar(msgspec.Struct, frozen=True):
    """The required format of a text, for llguidance.

    A JSON schema (from `schema_text`), a regular expression, or a grammar in Lark's notation or in EBNF: that of
    llama.cpp (GBNF) and XGrammar.
    """

    #: The notation of `text`.
    kind: Kind
    #: The grammar.
    text: str


class GrammarCompiled(msgspec.Struct, frozen=True):
    """The result of compiling a grammar."""

    #: Why the grammar cannot be compiled; "" if it was.
    error: str = ""


class AllowedTokensQuery(msgspec.Struct, frozen=True, array_like=True):
    """Request the tokens that may follow a text, or report that the text is over."""

    #: The number of the text.
    text: int
    #: The position of the first of `ids` in the text.
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: The token ids from `start` on, packed (`core.text.pack_ids`).
    ids: bytes = b""
    #: Whether the text is over. The query then has no answer.
    is_over: bool = False


class AllowedTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that may follow the first `length` tokens of a text."""

    #: The number of the text.
    text: int
    #: The length of the text in tokens.
    length: int
    #: A bit per token id, set if the token may follow.
    mask: bytes = b""
    #: Why no token may follow; "" if one may.
    error: str = ""


def pack_grammar(grammar: Grammar, param: str) -> bytes:
    """Return the encoded grammar, in the form of an upload.

    Raises InvalidParameter, for the parameter `param`, if the grammar is too long or not valid Unicode.
    """
    if len(grammar.text) > MAX_CHARS:
        raise InvalidParameter(f"{param}: the grammar has {len(grammar.text)} of at most {MAX_CHARS} characters", param)
    try:
        return encode(grammar)
    except ProtocolError as error:
        raise InvalidParameter(f"{param} contains an unpaired surrogate, which is not valid Unicode", param) from error


def grammar_digest(packed: bytes) -> str:
    """Return a hash of an encoded grammar."""
    return blake2b(packed, digest_size=16).hexdigest()


#: The most grammar processes, unless texts use more. Beyond it, idle ones are closed, least recently used first.
MAX_IDLE_PROCESSES = 16

#: Seconds that a step waits for the allowed tokens. A text whose mask comes later joins a later step.
PATIENCE_S = 0.03

#: The module that compiles grammars.
PROGRAM = "unfuse.language.grammar_process"

#: The error message for a grammar process that ended without an answer.
TOO_MUCH = "the grammar exceeds the limits of computing time, memory or nesting: simplify it"


class InvalidGrammar(PermanentError):
    """The grammar cannot be compiled, matches no text, or exceeds its limits."""


class _Process:
    """The connection to the process of one grammar, with its latest answers."""

    #: The result of compiling; None before it arrives.
    compiled: GrammarCompiled | None
    #: The latest answer for each text, by number.
    answers: dict[int, AllowedTokens]
    #: The numbers of the texts that use the process.
    texts: set[int]
    #: Whether the process has ended, or the connection is closed.
    dead: bool

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        self.compiled = None
        self.answers = {}
        self.texts = set()
        self.dead = False
        weakref.finalize(self, connection.close)

    def send(self, message: AllowedTokensQuery) -> None:
        """Send a query. If the process has ended, `dead` becomes true."""
        if self.dead:
            return
        try:
            self._connection.settimeout(None)
            self._connection.sendall(frame(encode(message)))
        except OSError:
            self.dead = True

    def receive(self, wait_s: float | None) -> None:
        """Receive what has arrived, at least one message or the end of the process.

        Returns without a message after `wait_s` seconds; None waits without limit.
        """
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
        """Close the connection. The process then ends."""
        self.dead = True
        self._connection.close()


class Grammars:
    """The grammar processes of one model, one per grammar.

    `refusal` is thread-safe. `open`, and all constraints that it returns, must be used by one thread only.

    `source`: the path of the model; "": its tokens are bytes, to check grammars that no text follows.
    `patience_s`: seconds that a step waits for the allowed tokens. None: without limit.
    """

    def __init__(self, source: str = "", patience_s: float | None = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._source = source
        self._numbers = count()
        self._lock = Lock()
        self._processes = OrderedDict[bytes, _Process]()
        self._control: socket.socket | None = None  # the connection to the program
        self._stop_program: weakref.finalize[[socket.socket, subprocess.Popen[bytes]], Grammars] | None = None

    def open(self, grammar: bytes) -> GrammarConstraint:
        """Return the constraint of a new text by this encoded grammar."""
        return GrammarConstraint(self, grammar, next(self._numbers))

    def refusal(self, grammar: bytes) -> str:
        """Return why an encoded grammar cannot be compiled; "" if it can.

        Blocks until that is known. Raises TransientError if the program that compiles grammars has ended.
        """
        process = self.start(grammar)
        while process.compiled is None and not process.dead:
            process.receive(None)
        process.close()
        if process.compiled is not None:
            return process.compiled.error
        if not self.running:
            raise TransientError("the program that compiles grammars has exited: the log has its error message")
        return TOO_MUCH

    @property
    def running(self) -> bool:
        """Whether the program that compiles grammars runs."""
        # The program's end of the socket is closed when it ends, before its exit status can be read.
        control = self._control  # another thread may start a new program meanwhile
        try:
            return control is not None and control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError as error:
            return isinstance(error, BlockingIOError)

    def process(self, grammar: bytes) -> _Process:
        """Return the process that the texts of this grammar share.

        Starts it if needed, and closes idle processes beyond MAX_IDLE_PROCESSES.
        """
        process = self._processes.get(grammar)
        if process is None or process.dead:
            process = self._processes[grammar] = self.start(grammar)
        self._processes.move_to_end(grammar)

        idle = [key for key, other in self._processes.items() if not other.texts and other is not process]
        for key in idle[: max(0, len(self._processes) - MAX_IDLE_PROCESSES)]:
            self._processes.pop(key).close()
        return process

    def start(self, grammar: bytes) -> _Process:
        """Start a new process for a grammar, and return it."""
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
        """Send the descriptors of a grammar and its connection to the program.

        Starts the program if it does not run.
        """
        try:
            socket.send_fds(self._control or self._start_program(), [b"g"], [file, connection])
        except OSError:  # the program was killed
            socket.send_fds(self._start_program(), [b"g"], [file, connection])

    def _start_program(self) -> socket.socket:
        """Start the program that compiles grammars, and return the connection to it.

        The program may take a second until it answers.
        """
        self.close()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", PROGRAM, str(theirs.fileno()), self._source]
        # The tokenizers library must start no threads, which a fork would not copy.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            program = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        self._control = ours
        self._stop_program = weakref.finalize(self, _kill_program, ours, program)
        return ours

    def close(self) -> None:
        """End the program. A grammar process ends when its connection is closed."""
        if self._stop_program is not None:
            self._stop_program()
            self._control = None


def _kill_program(control: socket.socket, program: subprocess.Popen[bytes]) -> None:
    control.close()
    program.kill()
    program.wait()


class GrammarConstraint:
    """The constraint of one text by a grammar: which tokens may follow it.

    Each call has all token ids of the text so far. They must extend the ids of the previous call.
    """

    def __init__(self, grammars: Grammars, grammar: bytes, number: int) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._number = number  # of the text

        self._process = grammars.process(grammar)
        self._process.texts.add(number)
        self._private = False  # whether no other text shares the process

        self._queried = -1  # the number of ids that were sent; -1 before the first query
        self._late = True  # whether the answer is overdue

    @property
    def compiling(self) -> bool:
        """Whether its grammar is not compiled yet."""
        return self._process.compiled is None

    def query(self, ids: Sequence[int]) -> None:
        """Query the tokens that may follow these ids, unless already queried.

        They are computed in the background.
        """
        if self._queried < len(ids):
            start = max(0, self._queried)
            self._process.send(AllowedTokensQuery(self._number, start, pack_ids(ids[start:])))
            self._queried = len(ids)

    def waits(self, wait_s: float = 0.0) -> bool:
        """Return whether the answer is still overdue after waiting up to `wait_s` seconds.

        A step should then continue without this text. A new text is overdue until its grammar is compiled.
        """
        self._late = self._late and self._grammars.patience_s is not None and not self._is_answered(wait_s)
        return self._late

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        """Return a bit per token, set if it may follow these ids; None if overdue.

        Raises InvalidGrammar if the grammar cannot be used, or no token may follow.
        """
        self.query(ids)
        self._late = not self._is_answered(self._grammars.patience_s)
        answer = self._process.answers.get(self._number)
        compiled = self._process.compiled
        if self._late:
            return None

        if compiled and compiled.error:
            raise InvalidGrammar(f"the grammar cannot be used: {compiled.error}")
        if answer and answer.error:
            raise InvalidGrammar(f"the text cannot continue by its grammar: {answer.error}")
        if answer and answer.length == len(ids):
            return answer.mask

        # The process has ended without an answer. This text is to blame if it was alone, or while compiling.
        if self._private or (compiled is None and self._grammars.running):
            raise InvalidGrammar(TOO_MUCH)
        self._restart_in_private_process()
        return None if self._late else self.allowed(ids)

    def close(self) -> None:
        """End the text, and release its state in the grammar process."""
        self._process.texts.discard(self._number)
        self._process.answers.pop(self._number, None)
        if self._private:
            self._process.close()
        else:
            self._process.send(AllowedTokensQuery(self._number, is_over=True))

    def _restart_in_private_process(self) -> None:
        """Continue in a new process, which no other text shares.

        The shared process has ended, because of this text or of another one.
        """
        self.close()
        self._process = self._grammars.start(self._grammar)
        self._private = True
        self._process.texts.add(self._number)

        self._queried = -1
        self._late = self._grammars.patience_s is not None

    def _is_answered(self, wait_s: float | None) -> bool:
        """Return whether the query is answered, after waiting up to `wait_s` seconds.

        Also true if there will never be an answer.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while not self._has_answer():
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._process.receive(remaining_s)
            if remaining_s == 0.0:
                return self._has_answer()
        return True

    def _has_answer(self) -> bool:
        """Return whether the last query is answered.

        Also true if there will never be an answer.
        """
        process = self._process
        answer = process.answers.get(self._number)
        if process.dead or (process.compiled and process.compiled.error):
            return True
        if self._queried < 0:
            return process.compiled is not None
        return answer is not None and (answer.length == self._queried or bool(answer.error))


class ConstraintAfterReasoning:
    """Applies a grammar constraint to the tokens after the reasoning.

    Within the reasoning every token is allowed. An answer without reasoning is constrained from its first token; only
    the mark that starts reasoning is allowed too.
    """

    def __init__(self, constraint: GrammarConstraint, parsing: AnswerParsing, tokenizer: ChatTokenizer) -> None:
        format = parsing.reasoning
        assert format
        self._constraint = constraint
        self._reader = ReasoningReader(format, parsing.starts_in_reasoning)
        self._detokenizer = Detokenizer(tokenizer, tokenizer.mark_ids(parsing.marks))
        self._all_tokens = b"\xff" * (-(-tokenizer.size // 8))
        self._start_marks = tokenizer.mark_ids([format.start_mark]) if not parsing.starts_in_reasoning else {}
        self._read_tokens = 0  # how many tokens were read
        self._reasoning_tokens = 0  # how many of them belong to the reasoning

    @property
    def compiling(self) -> bool:
        """Whether its grammar is not compiled yet."""
        return self._constraint.compiling

    def query(self, ids: Sequence[int]) -> None:
        """Query the tokens that may follow these ids, if the reasoning is over.

        They are computed in the background.
        """
        if self._is_constrained(ids):
            self._constraint.query(ids[self._reasoning_tokens :])

    def waits(self, wait_s: float = 0.0) -> bool:
        """Return whether the answer is still overdue after waiting up to `wait_s` seconds.

        It never is within reasoning.
        """
        return not self._is_reasoning and self._constraint.waits(wait_s)

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        """Return a bit per token, set if it may follow these ids; None if overdue.

        Raises InvalidGrammar if the grammar cannot be used, or no token may follow.
        """
        if not self._is_constrained(ids):
            return self._all_tokens
        mask = self._constraint.allowed(ids[self._reasoning_tokens :])
        if ids or mask is None:
            return mask

        bits = bytearray(mask)
        for id in self._start_marks:
            if id // 8 < len(bits):
                bits[id // 8] |= 1 << id % 8
        return bytes(bits)

    def close(self) -> None:
        """Release the constraint at the end of the text."""
        self._constraint.close()

    @property
    def _is_reasoning(self) -> bool:
        """Whether the last token read is within the reasoning."""
        return self._reader.state in ("opened", "inside")

    def _is_constrained(self, ids: Sequence[int]) -> bool:
        """Return whether the grammar applies after these ids.

        They must extend the ids of the previous call.
        """
        for id in ids[self._read_tokens :]:
            is_reasoning = self._is_reasoning or id in self._start_marks
            self._reader.feed(self._detokenizer.add(id))
            self._read_tokens += 1
            if is_reasoning:
                self._reasoning_tokens = self._read_tokens
        return not self._is_reasoning


#: The constraint of a text, which returns the tokens that may follow it.
GrammarMatcher = GrammarConstraint | ConstraintAfterReasoning
