"""The route for chats, in the format of the `openai` client."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from anyio import to_thread
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from unfuse import __version__
from unfuse.core.codec import decode
from unfuse.core.derived_facts import PROMPT, DerivedFacts
from unfuse.core.errors import InvalidParameter, NotFound, TransientError
from unfuse.core.modalities import TEXT
from unfuse.core.model_spec import ModelSpec
from unfuse.core.request import RequestContext, RequestRecord
from unfuse.core.text import (
    CHUNK,
    Answer,
    AnswerParsing,
    CallFormat,
    ReasoningFormat,
    TokenDelta,
    beginnings,
    packed,
    token_name,
)
from unfuse.core.text_parameters import UNBOUNDED, PromptTokens, read_bad_words, template_kwargs
from unfuse.core.vision import MediaItem, places_of
from unfuse.edge.access import ResponseAborted
from unfuse.language.answer_reader import ReasoningReader
from unfuse.language.grammars import pack_grammar
from unfuse.language.structured_outputs import FORMAT, AnswerFormat, answer_format
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.language.tools import Tools, grammar_of, read_tools
from unfuse.models import resolve_source
from unfuse.server.auth import Known
from unfuse.server.body import MAX_SHOWN_BODY, read_json
from unfuse.server.calls import CreatingCall, RequestInputs, answer_call
from unfuse.server.chat_formats import OutputParsers, reading_of, without_special_tokens
from unfuse.server.chat_stream import StreamedMessage, output_stream, whole
from unfuse.server.gateway import Gateway, Served
from unfuse.server.multimodal_messages import read_shown
from unfuse.server.openapi_schemas import CHAT, CHATTED
from unfuse.server.responses import sse_event
from unfuse.stores.results import ResultStore

router = APIRouter(tags=["chat"])

_COUNTS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")

#: The marks by which reasoning is counted, although it is content, if the model's reasoning is not parsed.
USUAL_REASONING = ReasoningFormat("usual")

TOKENIZERS = 8  # how many models' tokenizers a gateway keeps


class StreamUsage(NamedTuple):
    """Whether the last event of a stream has the usage, and whether each event has the usage so far."""

    at_end: bool
    each: bool


@router.post("/chat/completions", openapi_extra=CHAT, responses=CHATTED)
async def complete(request: Request, gateway: Served, asker: Known) -> Response:
    """Answer messages, and wait for that. With `stream`, tokens come as they are made."""
    given = await read_json(request, MAX_SHOWN_BODY)
    read = partial(_prompt, gateway.parsers)
    call = CreatingCall(gateway, request, asker, given, TEXT, waits=True, read=read)
    options = given.get("stream_options")
    wanted = options if isinstance(options, dict) else {}
    usage = StreamUsage(bool(wanted.get("include_usage")), bool(wanted.get("continuous_usage_stats")))
    return await answer_call(
        call,
        lambda record: _events(gateway, record, usage, _told(request, record.context)),
        lambda context, _: _reply(gateway.results, context),
    )


@lru_cache(TOKENIZERS)
def _tokenizer(source: str) -> ChatTokenizer:
    return ChatTokenizer.read(resolve_source(source, components=()))


def _prompt(parsers: OutputParsers, card: ModelSpec, fields: Mapping[str, object]) -> RequestInputs:
    """Return the prompt of a chat: its tokens, its pictures, and the grammars and the parser of the answer."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages must be a list of what was said, the last of it by the user", "messages")
    tokenizer, tools = _tokenizer(card.source), read_tools(fields)
    told, kwargs = tokenizer.told(messages, tools.shown if tools else None), template_kwargs(fields)
    shown, places, uploads = tuple[MediaItem, ...](), list[tuple[int, str]](), dict[str, bytes]()
    if card.vision is None:
        ids = tokenizer.prompt(*told, kwargs)
    else:
        ids, shown, uploads = read_shown(card.vision, tokenizer, *told, kwargs)
        places = places_of(card.vision, ids, shown)
    ids = _truncated(ids, card, fields, shown)
    bad_words = fields.get("bad_words")
    bad_words = [] if bad_words is None else tokenizer.spellings(read_bad_words(bad_words))
    special_stops = _special_stops(tokenizer, fields.get("stop"))
    format = answer_format(fields)
    calls = without_special_tokens(parsers.format_of_calls(tokenizer.calls), tokenizer)
    grammars = _grammars(format, tools, calls, tokenizer)
    reasoning = parsers.format_of_reasoning(tokenizer.reasoning)
    start = partial(tokenizer.start_of_answer, *told, kwargs)
    continues = bool(kwargs.get("continue_final_message") and start())
    reading = reading_of(tools, calls, reasoning, start, format is not None, continues)
    if reading and str(fields.get("include_reasoning")).lower() == "false":
        reading = msgspec.structs.replace(reading, hidden=True)
    return RequestInputs(
        {PROMPT: packed(ids), **uploads},
        begins=beginnings(ids, places),
        derived=DerivedFacts(prompt_tokens=len(ids), shown=shown, continues=continues, reading=reading),
        tokens=PromptTokens(len(ids), special_stops, bad_words),
        grammars=grammars,
        grammar_param="tools" if tools else format.param if format else "",
    )


def _special_stops(tokenizer: ChatTokenizer, stop: object) -> list[int]:
    """Return the ids of the stop strings that are special tokens."""
    texts = [text for text in (stop if isinstance(stop, list) else [stop]) if isinstance(text, str)]
    return [id for id in tokenizer.mark_ids(texts) if id in tokenizer.specials]


def _grammars(
    format: AnswerFormat | None, tools: Tools | None, calls: CallFormat, tokenizer: ChatTokenizer
) -> tuple[bytes, ...]:
    """Return the packed grammars of the answer, the strictest first; empty if it may be any text."""
    found = [grammar_of(format, tools, calls, relaxed) for relaxed in (False, True)]
    param = "tools" if tools else format.param if format else FORMAT
    packed = [pack_grammar(grammar, param) for grammar in dict.fromkeys(found) if grammar is not None]
    if packed and not tokenizer.stops:
        raise InvalidParameter("this model has no end-of-text token, so it does not support formats", param)
    return tuple(packed)


def _truncated(ids: list[int], card: ModelSpec, fields: Mapping[str, Any], shown: Sequence[MediaItem]) -> list[int]:
    """Return the last `truncate_prompt_tokens` ids. Raises InvalidParameter."""
    most = fields.get("truncate_prompt_tokens")
    if most is None:
        return ids
    if (most := int(most)) == -1:
        limits, answer = TEXT.limits_of(card.limits), fields.get("max_completion_tokens") or fields.get("max_tokens")
        most = limits.max_tokens - (answer if isinstance(answer, int) and answer != UNBOUNDED else 1)
    if most < 1:
        raise InvalidParameter(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit beside the answer",
            "truncate_prompt_tokens",
        )
    if len(ids) > most and shown:
        raise InvalidParameter(
            "truncate_prompt_tokens cannot truncate messages with pictures: leave out older messages",
            "truncate_prompt_tokens",
        )
    return ids[-most:]


async def _events(gateway: Gateway, record: RequestRecord, usage: StreamUsage, told: list[int]) -> AsyncIterator[bytes]:
    """Chunks with what is made of each choice, as it comes; then the usage, if that is asked for.

    Of each choice so many pieces were `told` before. The ids of events say how many are told by then.
    """
    context = record.context
    chunk = partial(_chunk, usage)
    messages = [StreamedMessage(context, index) for index in range(len(told))]
    logprobs = [StreamedLogprobs() for _ in told]
    for index, before in enumerate(told):
        if not before:
            yield chunk(context, told, index, {"role": "assistant", "content": ""})
    looks_back = context.request.params.get("logprobs") is not None or any(message.looks_back for message in messages)
    known, told = told, [0] * len(told) if looks_back else [*told]
    async for index, piece in _pieces(gateway, context, told):
        told[index] += 1
        delta, likely = messages[index].add(piece.text), logprobs[index].add(piece)
        if told[index] > known[index] and (delta or likely):
            yield chunk(context, told, index, delta, logprobs=likely)
    context = await gateway.completed(context.id)
    answers = await to_thread.run_sync(_answers, gateway.results, context)
    for index, answer in enumerate(answers):
        *more, delta = messages[index].finish(answer.finish_reason)
        for one in more:
            yield chunk(context, told, index, one)
        reason = messages[index].reason(answer.finish_reason)
        yield chunk(context, told, index, delta, reason, stop_reason=answer.stop_reason)
    if usage.at_end or usage.each:
        total = _usage(context, sum(len(answer.pieces) for answer in answers), answers)
        yield sse_event({**_head(context, "chat.completion.chunk"), "choices": [], "usage": total})
    yield b"data: [DONE]\n\n"


def _told(request: Request, context: RequestContext) -> list[int]:
    """How many pieces of each choice the client has: the id of the last event that it got, if it says one."""
    number, known = len(_finals(context)), request.headers.get("last-event-id", "")
    told = [int(part) for part in known.split(",")] if _COUNTS.fullmatch(known) else []
    return told if len(told) == number else [0] * number


def _finals(context: RequestContext) -> list[str]:
    """The stages that write the choices, in their order."""
    return [stage.name for stage in context.plan.stages if stage.final]


async def _pieces(gateway: Gateway, context: RequestContext, told: list[int]) -> AsyncIterator[tuple[int, TokenDelta]]:
    """Yield new pieces of each choice with its index, after those that the client already has.

    Raises ResponseAborted while the queue cannot be read: the client continues with the id of the last event.
    """
    stages = _finals(context)
    stream = output_stream(gateway.queue, context.id, dict(zip(stages, told, strict=True)))
    try:
        with suppress(NotFound):  # whoever waits for the end of the request learns why it is gone
            async for stage, data in stream:
                yield stages.index(stage), decode(data, TokenDelta)
    except TransientError as error:
        raise ResponseAborted(str(error)) from error


def _chunk(
    usage: StreamUsage,
    context: RequestContext,
    told: list[int],
    index: int,
    delta: dict[str, Any],
    ended: str | None = None,
    logprobs: Any = None,
    stop_reason: str | int | None = None,
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": ended}
    choice |= {"stop_reason": stop_reason} if ended else {}
    event = {**_head(context, "chat.completion.chunk"), "choices": [choice]}
    if usage.at_end or usage.each:
        event["usage"] = _usage(context, sum(told)) if usage.each else None
    return sse_event(event, id=",".join(map(str, told)))


def _head(context: RequestContext, kind: str) -> dict[str, Any]:
    """Return the fields of every answer. A hash of the pools identifies weights and numerics."""
    pools = sorted({stage.pool for stage in context.plan.stages if stage.final})
    digest = blake2b("\n".join([__version__, *pools]).encode(), digest_size=6).hexdigest()
    return {
        "id": context.id,
        "object": kind,
        "created": int(context.created_at),
        "model": context.request.requested_model,
        "system_fingerprint": f"fp_{digest}",
    }


def _answers(results: ResultStore, context: RequestContext) -> list[Answer]:
    return [msgspec.json.decode(results.read(context.id, file.index), type=Answer) for file in context.result]


def _reply(results: ResultStore, context: RequestContext) -> bytes:
    answers = _answers(results, context)
    choices = []
    for index, answer in enumerate(answers):
        message, reason = whole(context, index, answer)
        about = {"index": index, "logprobs": logprobs_of(answer.pieces), "finish_reason": reason}
        about["stop_reason"] = answer.stop_reason
        choices.append({**about, "message": {"role": "assistant", "refusal": None, **message}})
    usage = _usage(context, sum(len(answer.pieces) for answer in answers), answers)
    told = {"choices": choices, "usage": usage, "seed": context.request.params["seed"]}
    return msgspec.json.encode({**_head(context, "chat.completion"), **told})


def _usage(context: RequestContext, made: int, answers: Sequence[Answer] = ()) -> dict[str, Any]:
    """Return the usage of a chat with `made` tokens. With the complete `answers` it has reasoning_tokens too."""
    prompt = context.request.derived.prompt_tokens
    details = {"cached_tokens": CHUNK * context.spared}
    if shown := context.request.derived.shown:
        details["image_tokens"] = sum(one.tokens for one in shown if not one.images)
        details["video_tokens"] = sum(one.tokens for one in shown if one.images)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": details,
    }
    if answers:
        reading = context.request.derived.reading or AnswerParsing()
        reasoned = sum(reasoning_tokens(answer, reading) for answer in answers)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoned}
    return usage


def reasoning_tokens(answer: Answer, reading: AnswerParsing) -> int:
    """Return the number of tokens of the reasoning in an answer, with its marks; `<think>` if none is parsed."""
    reader = ReasoningReader(reading.reasoning or USUAL_REASONING, reading.opened)
    for count, piece in enumerate(answer.pieces, 1):
        before = reader.state
        reader.feed(piece.text)
        if reader.state in ("behind", "content"):
            return 0 if (before, reader.state) == ("start", "content") else count
    return len(answer.pieces) if reader.state != "start" else 0


class StreamedLogprobs:
    """Returns the entries of one streamed choice, each as soon as the text of its token is final."""

    def __init__(self) -> None:
        self._pieces = list[TokenDelta]()
        self._sent = 0

    def add(self, piece: TokenDelta) -> dict[str, Any] | None:
        """Add a token. Returns the entries that became final; None if there are none."""
        if piece.own is None:
            return None
        self._pieces.append(piece)
        certain = self._pieces[self._sent : piece.own.certain]
        self._sent += len(certain)
        return _entries(certain) if certain else None


def logprobs_of(pieces: Sequence[TokenDelta]) -> dict[str, Any] | None:
    """Return the entries of a complete choice; None if they were not requested.

    As in OpenAI's API, the token that ended the answer, and the tokens of a stop string, have no entry.
    """
    last = pieces[-1].own if pieces else None
    return None if last is None else _entries(pieces[: last.certain])


def _entries(pieces: Sequence[TokenDelta]) -> dict[str, Any]:
    return {"content": [_entry(piece) for piece in pieces], "refusal": None}


def _entry(piece: TokenDelta) -> dict[str, Any]:
    assert piece.own
    likely = zip(piece.top, piece.own.top, strict=True)
    top = [_token(data, logprob) for (_, _, logprob), data in likely]
    return {**_token(piece.own.data, piece.logprob), "top_logprobs": top}


def _token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}
