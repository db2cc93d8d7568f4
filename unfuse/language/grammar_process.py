"""The program that compiles grammars and says which tokens may follow. Nothing but it knows llguidance.

It reads a tokenizer, and forks a process for each grammar: whatever that does, it harms no other. Such a process has
bounds of its own on computing and memory, and is killed by the kernel at these.
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
from unfuse.core.text import unpacked
from unfuse.language.grammars import AllowedTokens, AllowedTokensQuery, Grammar, GrammarCompiled

TRIAL_S, COMPILE_S, STEP_S = 2.0, 4.0, 1.0
"""Seconds of computing that trying a grammar may take, compiling it for a model's tokens, and one answer."""

MEMORY = 512 * 1024 * 1024  # bytes that the process of a grammar may take, beside what it begins with

MAX_ERROR = 300

LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


class _Bytes:
    """A tokenizer whose tokens are the bytes, for those who only want to know whether a grammar can be compiled."""

    eos_token_id, bos_token_id = 256, None
    tokens: Sequence[bytes] = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids: Sequence[int] = [256]

    def __call__(self, text: str) -> list[int]:
        return [*text.encode()]


class _Model:
    """The tokenizer of a model, as llguidance asks for it."""

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
    """That of a model, or of bytes if there is no model."""
    if not source:
        return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=256)
    model = _Model(Path(source))
    return LLTokenizer(TokenizerWrapper(model), eos_token=model.stops)


def compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """The matcher of a grammar. Raises ValueError for one that is none, or that no text matches."""
    if grammar.kind == "json_schema":
        text = LLMatcher.grammar_from_json_schema(grammar.text)
    elif grammar.kind == "regex":
        text = LLMatcher.grammar_from_regex(grammar.text)
    elif grammar.kind == "ebnf":
        text = LLMatcher.grammar_from_lark(in_lark(grammar.text))
    else:
        text = LLMatcher.grammar_from_lark(grammar.text)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    first = matcher.compute_bitmask()
    if matcher.is_error() or not any(first):
        raise ValueError(matcher.get_error())
    return matcher


def in_lark(text: str) -> str:
    """Translate a grammar from the EBNF of llama.cpp and XGrammar to Lark's notation. Raises ValueError."""
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, IndexError, KeyError, RecursionError) as error:
        raise ValueError(f"no EBNF: {error}") from error


def follow(matcher: LLMatcher, message: AllowedTokensQuery) -> AllowedTokens:
    """What may follow a text that goes on with these ids."""
    ids = unpacked(message.ids)
    length = message.start + len(ids)
    if ids and not matcher.consume_tokens(ids):
        return AllowedTokens(message.text, length, error=shown(matcher.get_error()))
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        return AllowedTokens(message.text, length, error=shown(matcher.get_error()))
    return AllowedTokens(message.text, length, mask)


def shown(error: str) -> str:
    """What llguidance says is wrong, in one line."""
    line = " ".join(error.removesuffix("<non-verbose/>").split())
    nothing = not line or line.startswith("NoExtension")
    return "no text matches it" if nothing else line[:MAX_ERROR]


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """The kernel ends this process when it has computed for so long: nobody else could."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(tokenizer: LLTokenizer, grammar: Grammar, connection: socket.socket, seconds: float) -> None:
    """Compile a grammar within so many seconds, and follow texts until nobody listens any more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    texts = dict[int, LLMatcher]()
    try:
        with _within(seconds):
            matcher = compiled(tokenizer, grammar)
    except ValueError as error:
        connection.sendall(frame(encode(GrammarCompiled(shown(str(error))))))
        return
    connection.sendall(frame(encode(GrammarCompiled())))
    with connection.makefile("rb") as received:
        while True:
            try:
                message: AllowedTokensQuery = decode(
                    read_message(partial(_exactly, received), MAX_BYTES), AllowedTokensQuery
                )
            except EOFError:
                return
            if message.over:
                texts.pop(message.text, None)
                continue
            with _within(STEP_S):
                if message.text not in texts:
                    texts[message.text] = matcher.deep_copy()
                answer = follow(texts[message.text], message)
            connection.sendall(frame(encode(answer)))


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main() -> None:
    """Read a tokenizer, then fork a process for each grammar that comes, until nobody is left who could send one.

    A grammar comes as two descriptors: a file that has it, and the connection of those who follow it.
    """
    control, source = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; who started this one knows when it is over
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = open_tokenizer(source)
    while True:
        said, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not said:
            return
        if os.fork() == 0:
            control.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is wrong with a grammar is told to who asked
            file, connection = descriptors
            _serve_one(tokenizer, file, connection, COMPILE_S if source else TRIAL_S)
        for descriptor in descriptors:
            os.close(descriptor)


def _serve_one(tokenizer: LLTokenizer, file: int, connection: int, seconds: float) -> NoReturn:
    code = 1
    try:
        with os.fdopen(file, "rb") as held, socket.socket(fileno=connection) as connected:
            serve(tokenizer, decode(held.read(), Grammar), connected, seconds)
        code = 0
    except OSError:
        pass  # nobody listens any more
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
