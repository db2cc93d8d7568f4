"""The program that compiles grammars and computes the allowed tokens, with llguidance.

It reads a tokenizer and forks a process for each grammar, so that a grammar cannot fail others. Each process has limits
on CPU time and memory; at its limits, it fails or is killed by the kernel. This is the only module that imports
llguidance.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from unfuse.core.codec import MAX_BYTES, decode, encode, frame, read_message
from unfuse.core.text import unpack_ids
from unfuse.language.grammars import AllowedTokens, AllowedTokensQuery, Grammar, GrammarCompiled

#: The most CPU seconds for checking a grammar without a model.
TRIAL_S = 2.0

#: The most CPU seconds for compiling a grammar for a model's tokens.
COMPILE_S = 4.0

#: The most CPU seconds for one answer.
STEP_S = 1.0

#: The most bytes of address space that a grammar process may add to what it starts with.
MEMORY = 512 * 1024 * 1024

#: The longest error message, in characters.
MAX_ERROR = 300

#: llguidance's own limits, besides those of the process.
LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


class _Bytes:
    """A tokenizer whose tokens are the bytes, to check grammars without a model."""

    eos_token_id, bos_token_id = 256, None
    tokens: Sequence[bytes] = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids: Sequence[int] = [256]

    def __call__(self, text: str) -> list[int]:
        return [*text.encode()]


class _Model:
    """A model's tokenizer, with the interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, source: Path) -> None:
        from unfuse.language.tokenizer import ChatTokenizer

        self._tokenizer = tokenizer = ChatTokenizer.read(source)
        self.eos_token_id = min(tokenizer.stops)
        self.tokens = [tokenizer.piece(id) for id in range(tokenizer.size)]
        self.special_token_ids = sorted(tokenizer.specials | tokenizer.stops)
        self.stops = sorted(tokenizer.stops)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.ids(text)


def open_tokenizer(source: str) -> LLTokenizer:
    """Return the tokenizer of the model at this path, or that of bytes for ""."""
    if not source:
        return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=256)
    model = _Model(Path(source))
    return LLTokenizer(TokenizerWrapper(model), eos_token=model.stops)


def compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Return the matcher of a grammar.

    Raises ValueError if the grammar is not valid, or no text matches it.
    """
    if grammar.kind == "json_schema":
        text = LLMatcher.grammar_from_json_schema(grammar.text)
    elif grammar.kind == "regex":
        text = LLMatcher.grammar_from_regex(grammar.text)
    elif grammar.kind == "ebnf":
        text = LLMatcher.grammar_from_lark(to_lark(grammar.text))
    else:
        text = LLMatcher.grammar_from_lark(grammar.text)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(matcher.get_error())

    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise ValueError(matcher.get_error())
    return matcher


def to_lark(text: str) -> str:
    """Translate a grammar from the EBNF of llama.cpp and XGrammar to Lark's notation.

    Raises ValueError if it is not valid.
    """
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, IndexError, KeyError, RecursionError) as error:
        raise ValueError(f"not valid EBNF: {error}") from error


def follow(matcher: LLMatcher, message: AllowedTokensQuery) -> AllowedTokens:
    """Append a query's ids to its text, and return the tokens that may follow."""
    ids = unpack_ids(message.ids)
    length = message.start + len(ids)
    if ids and not matcher.consume_tokens(ids):
        return AllowedTokens(message.text, length, error=one_line(matcher.get_error()))
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        return AllowedTokens(message.text, length, error=one_line(matcher.get_error()))
    return AllowedTokens(message.text, length, mask)


def one_line(error: str) -> str:
    """Return an error message of llguidance as one line, never empty."""
    line = " ".join(error.removesuffix("<non-verbose/>").split())
    is_empty = not line or line.startswith("NoExtension")
    return "no text matches it" if is_empty else line[:MAX_ERROR]


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Let the kernel kill this process after this many seconds of CPU time.

    The calls of llguidance cannot be interrupted otherwise.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(tokenizer: LLTokenizer, grammar: Grammar, connection: socket.socket, seconds: float) -> None:
    """Compile a grammar, and answer queries until the connection is closed.

    `seconds`: the most CPU seconds for compiling.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    max_bytes = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))

    texts = dict[int, LLMatcher]()  # by the number of the text
    try:
        with _cpu_limit(seconds):
            matcher = compiled(tokenizer, grammar)
    except ValueError as error:
        connection.sendall(frame(encode(GrammarCompiled(one_line(str(error))))))
        return
    connection.sendall(frame(encode(GrammarCompiled())))

    with connection.makefile("rb") as received:
        while True:
            try:
                message: AllowedTokensQuery = decode(
                    read_message(partial(_read_exactly, received), MAX_BYTES), AllowedTokensQuery
                )
            except EOFError:
                return
            if message.is_over:
                texts.pop(message.text, None)
                continue
            with _cpu_limit(STEP_S):
                # A copy, because a matcher advances with its text.
                if message.text not in texts:
                    texts[message.text] = matcher.deep_copy()
                answer = follow(texts[message.text], message)
            connection.sendall(frame(encode(answer)))


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    """Return the next `size` bytes of a file. Raises EOFError if it ends before."""
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main() -> None:
    """Read a tokenizer, then fork a process for each grammar.

    Returns when the control socket is closed. A grammar arrives as two descriptors: a file that contains it, and the
    connection for its queries.
    """
    control, source = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the parent decides when to stop
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no wait()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = open_tokenizer(source)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not data:
            return

        if os.fork() == 0:
            control.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # errors are sent over the connection
            file, connection = descriptors
            _serve_and_exit(tokenizer, file, connection, COMPILE_S if source else TRIAL_S)
        for descriptor in descriptors:
            os.close(descriptor)


def _serve_and_exit(tokenizer: LLTokenizer, file: int, connection: int, seconds: float) -> NoReturn:
    """Serve the grammar in this file, in a forked process."""
    code = 1
    try:
        with os.fdopen(file, "rb") as grammar_file, socket.socket(fileno=connection) as connected:
            serve(tokenizer, decode(grammar_file.read(), Grammar), connected, seconds)
        code = 0
    except OSError:
        pass  # the connection was closed
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
