"""The route for chat completions, in the format of the `openai` client."""

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
    PREFILL_CHUNK_TOKENS,
    Answer,
    AnswerParsing,
    CallFormat,
    ReasoningFormat,
    TokenDelta,
    pack_ids,
    prefix_digests,
    token_name,
)
from unfuse.core.text_parameters import UNBOUNDED, PromptTokens, read_bad_words, template_kwargs
from unfuse.core.vision import MediaItem, media_positions
from unfuse.edge.access import ResponseAborted
from unfuse.language.answer_reader import ReasoningReader
from unfuse.language.grammars import pack_grammar
from unfuse.language.structured_outputs import FORMAT, AnswerFormat, answer_format
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.language.tools import Tools, grammar_of, read_tools
from unfuse.models import resolve_source
from unfuse.server.auth import CallerDep
from unfuse.server.body import MAX_MEDIA_BODY, read_json
from unfuse.server.calls import GenerationCall, RequestInputs, answer_call
from unfuse.server.chat_formats import OutputParsers, parsing_of, without_special_tokens
from unfuse.server.chat_stream import StreamedMessage, output_stream, whole_message
from unfuse.server.gateway import Gateway, GatewayDep
from unfuse.server.multimodal_messages import read_messages
from unfuse.server.openapi_schemas import CHAT, CHAT_RESPONSE
from unfuse.server.responses import sse_event
from unfuse.stores.results import ResultStore

router = APIRouter(tags=["chat"])

_COUNTS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")

#: The marks by which reasoning tokens are counted if the model's reasoning is not parsed, but sent as content.
DEFAULT_REASONING = ReasoningFormat("usual")

#: The number of models whose tokenizers a gateway caches.
TOKENIZERS = 8


class StreamUsage(NamedTuple):
    """The `stream_options` of a chat: which events of a stream have the usage."""

    #: Whether a last event has the usage of the whole answer.
    at_end: bool
    #: Whether each event has the usage so far.
    in_each_event: bool


@router.post("/chat/completions", openapi_extra=CHAT, responses=CHAT_RESPONSE)
async def complete(request: Request, gateway: GatewayDep, asker: CallerDep) -> Response:
    """Create a chat completion. With `stream`, tokens are sent as they are generated."""
    fields = await read_json(request, MAX_MEDIA_BODY)
    read_prompt = partial(_read_prompt, gateway.parsers)
    call = GenerationCall(gateway, request, asker, fields, TEXT, waits_for_result=True, read_prompt=read_prompt)
    stream_options = fields.get("stream_options")
    options = stream_options if isinstance(stream_options, dict) else {}
    usage = StreamUsage(bool(options.get("include_usage")), bool(options.get("continuous_usage_stats")))
    return await answer_call(
        call,
        lambda record: _events(gateway, record, usage, _client_offsets(request, record.context)),
        lambda context, _: _reply(gateway.results, context),
    )


@lru_cache(TOKENIZERS)
def _tokenizer(source: str) -> ChatTokenizer:
    return ChatTokenizer.read(resolve_source(source, components=()))


def _read_prompt(parsers: OutputParsers, spec: ModelSpec, fields: Mapping[str, object]) -> RequestInputs:
    """Return the inputs of a chat: tokens, pictures, grammars and parser of the answer.

    Raises InvalidParameter.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages must be a list of at least one chat message", "messages")
    tokenizer = _tokenizer(spec.source)
    tools = read_tools(fields)
    template_inputs = tokenizer.simplify(messages, tools.template_functions if tools else None)
    kwargs = template_kwargs(fields)

    # The prompt: its token ids, and the pictures and videos in it.
    media = tuple[MediaItem, ...]()
    media_places = list[tuple[int, str]]()
    uploads = dict[str, bytes]()
    if spec.vision is None:
        ids = tokenizer.prompt(*template_inputs, kwargs)
    else:
        ids, media, uploads = read_messages(spec.vision, tokenizer, *template_inputs, kwargs)
        media_places = media_positions(spec.vision, ids, media)
    ids = _truncated(ids, spec, fields, media)

    # What may be generated.
    bad_words = fields.get("bad_words")
    bad_words = [] if bad_words is None else tokenizer.spellings(read_bad_words(bad_words))
    special_stops = _special_stops(tokenizer, fields.get("stop"))
    format = answer_format(fields)
    call_format = without_special_tokens(parsers.format_of_calls(tokenizer.calls), tokenizer)
    grammars = _grammars(format, tools, call_format, tokenizer)

    # How the answer is parsed.
    reasoning_format = parsers.format_of_reasoning(tokenizer.reasoning)
    start_of_answer = partial(tokenizer.start_of_answer, *template_inputs, kwargs)
    continues = bool(kwargs.get("continue_final_message") and start_of_answer())
    parsing = parsing_of(tools, call_format, reasoning_format, start_of_answer, format is not None, continues)
    if parsing and str(fields.get("include_reasoning")).lower() == "false":
        parsing = msgspec.structs.replace(parsing, hides_reasoning=True)

    return RequestInputs(
        {PROMPT: pack_ids(ids), **uploads},
        prefix_digests=prefix_digests(ids, media_places),
        derived=DerivedFacts(prompt_tokens=len(ids), media=media, continues=continues, parsing=parsing),
        tokens=PromptTokens(len(ids), special_stops, bad_words),
        grammars=grammars,
        grammar_param="tools" if tools else format.param if format else "",
    )


def _special_stops(tokenizer: ChatTokenizer, stop: object) -> list[int]:
    """Return the ids of the stop strings that are special tokens.

    Answers do not contain the text of special tokens, so these stop strings are compared by id.
    """
    texts = [text for text in (stop if isinstance(stop, list) else [stop]) if isinstance(text, str)]
    return [id for id in tokenizer.mark_ids(texts) if id in tokenizer.specials]


def _grammars(
    format: AnswerFormat | None, tools: Tools | None, call_format: CallFormat, tokenizer: ChatTokenizer
) -> tuple[bytes, ...]:
    """Return the packed grammars of the answer, the strictest first.

    It is empty if the answer may be any text.
    """
    grammars = [grammar_of(format, tools, call_format, relaxed) for relaxed in (False, True)]
    param = "tools" if tools else format.param if format else FORMAT
    # `fromkeys` removes the relaxed grammar if it equals the strict one.
    packed_grammars = [pack_grammar(grammar, param) for grammar in dict.fromkeys(grammars) if grammar is not None]
    if packed_grammars and not tokenizer.stops:
        raise InvalidParameter("this model has no end-of-text token, so it does not support structured outputs", param)
    return tuple(packed_grammars)


def _truncated(ids: list[int], spec: ModelSpec, fields: Mapping[str, Any], media: Sequence[MediaItem]) -> list[int]:
    """Return the last `truncate_prompt_tokens` ids. Raises InvalidParameter.

    With -1, the prompt leaves room for `max_completion_tokens`, or for one token if that is not set.
    """
    max_prompt_tokens = fields.get("truncate_prompt_tokens")
    if max_prompt_tokens is None:
        return ids
    if (max_prompt_tokens := int(max_prompt_tokens)) == -1:
        limits = TEXT.limits_of(spec.limits)
        answer_tokens = fields.get("max_completion_tokens") or fields.get("max_tokens")
        is_bounded = isinstance(answer_tokens, int) and answer_tokens != UNBOUNDED
        max_prompt_tokens = limits.max_tokens - (answer_tokens if is_bounded else 1)

    if max_prompt_tokens < 1:
        raise InvalidParameter(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as leave room for the answer",
            "truncate_prompt_tokens",
        )
    if len(ids) > max_prompt_tokens and media:
        raise InvalidParameter(
            "truncate_prompt_tokens cannot truncate messages with pictures: leave out older messages",
            "truncate_prompt_tokens",
        )
    return ids[-max_prompt_tokens:]


async def _events(
    gateway: Gateway, record: RequestRecord, usage: StreamUsage, offsets: list[int]
) -> AsyncIterator[bytes]:
    """Yield the chunks of each choice as its tokens come, then the usage if requested.

    offsets: the number of token deltas of each choice that the client already has.

    The id of an event is the number of deltas of each choice that are sent by then, for `Last-Event-ID`.
    """
    context = record.context
    chunk = partial(_chunk, usage)
    messages = [StreamedMessage(context, index) for index in range(len(offsets))]
    logprobs = [StreamedLogprobs() for _ in offsets]
    for index, offset in enumerate(offsets):
        if not offset:
            yield chunk(context, offsets, index, {"role": "assistant", "content": ""})

    # Parsers and logprobs need an answer from its beginning: then deltas that the client has are read, but not sent.
    reads_from_start = context.request.params.get("logprobs") is not None or any(
        message.is_parsed for message in messages
    )
    counts = [0] * len(offsets) if reads_from_start else [*offsets]
    async for index, token in _token_deltas(gateway, context, counts):
        counts[index] += 1
        delta, token_logprobs = messages[index].add(token.text), logprobs[index].add(token)
        if counts[index] > offsets[index] and (delta or token_logprobs):
            yield chunk(context, counts, index, delta, logprobs=token_logprobs)

    context = await gateway.completed(context.id)
    answers = await to_thread.run_sync(_answers, gateway.results, context)
    for index, answer in enumerate(answers):
        *earlier_deltas, last_delta = messages[index].finish(answer.finish_reason)
        for delta in earlier_deltas:
            yield chunk(context, counts, index, delta)
        reason = messages[index].finish_reason(answer.finish_reason)
        yield chunk(context, counts, index, last_delta, reason, stop_reason=answer.stop_reason)

    if usage.at_end or usage.in_each_event:
        answer_usage = _usage(context, sum(len(answer.pieces) for answer in answers), answers)
        yield sse_event({**_common_fields(context, "chat.completion.chunk"), "choices": [], "usage": answer_usage})
    yield b"data: [DONE]\n\n"


def _client_offsets(request: Request, context: RequestContext) -> list[int]:
    """Return the number of token deltas of each choice that the client already has.

    They are the id of the last event that it received, in the header Last-Event-ID; zeros without a valid one.
    """
    choice_count = len(_final_stages(context))
    last_id = request.headers.get("last-event-id", "")
    offsets = [int(part) for part in last_id.split(",")] if _COUNTS.fullmatch(last_id) else []
    return offsets if len(offsets) == choice_count else [0] * choice_count


def _final_stages(context: RequestContext) -> list[str]:
    """Return the names of the stages that write the choices, in their order."""
    return [stage.name for stage in context.plan.stages if stage.final]


async def _token_deltas(
    gateway: Gateway, context: RequestContext, offsets: list[int]
) -> AsyncIterator[tuple[int, TokenDelta]]:
    """Yield token deltas as (choice index, delta), from the offset of each choice on.

    Raises ResponseAborted while the queue cannot be read: the client resumes with the id of the last event.
    """
    stages = _final_stages(context)
    stream = output_stream(gateway.queue, context.id, dict(zip(stages, offsets, strict=True)))
    try:
        with suppress(NotFound):  # `Gateway.completed`, which is called next, raises the reason
            async for stage, data in stream:
                yield stages.index(stage), decode(data, TokenDelta)
    except TransientError as error:
        raise ResponseAborted(str(error)) from error


def _chunk(
    usage: StreamUsage,
    context: RequestContext,
    counts: list[int],
    index: int,
    delta: dict[str, Any],
    finish_reason: str | None = None,
    logprobs: Any = None,
    stop_reason: str | int | None = None,
) -> bytes:
    """Return one server-sent event with a delta of one choice.

    counts: the number of token deltas of each choice sent so far, including this one.
    """
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    choice |= {"stop_reason": stop_reason} if finish_reason else {}
    event = {**_common_fields(context, "chat.completion.chunk"), "choices": [choice]}
    if usage.at_end or usage.in_each_event:
        event["usage"] = _usage(context, sum(counts)) if usage.in_each_event else None
    return sse_event(event, id=",".join(map(str, counts)))


def _common_fields(context: RequestContext, kind: str) -> dict[str, Any]:
    """Return the fields that every response has.

    `system_fingerprint` is a hash of the version and of the pools, whose names identify weights and numerics.
    """
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
    """Return the answers of all choices of a completed request. Reads files."""
    return [msgspec.json.decode(results.read(context.id, file.index), type=Answer) for file in context.result]


def _reply(results: ResultStore, context: RequestContext) -> bytes:
    """Return the chat completion of a completed request, as JSON. Reads files."""
    answers = _answers(results, context)
    choices = []
    for index, answer in enumerate(answers):
        message, reason = whole_message(context, index, answer)
        choice = {"index": index, "logprobs": logprobs_of(answer.pieces), "finish_reason": reason}
        choice["stop_reason"] = answer.stop_reason
        choices.append({**choice, "message": {"role": "assistant", "refusal": None, **message}})
    usage = _usage(context, sum(len(answer.pieces) for answer in answers), answers)
    body = {"choices": choices, "usage": usage, "seed": context.request.params["seed"]}
    return msgspec.json.encode({**_common_fields(context, "chat.completion"), **body})


def _usage(context: RequestContext, completion_tokens: int, answers: Sequence[Answer] = ()) -> dict[str, Any]:
    """Return the `usage` object of a chat. With the complete `answers` it has reasoning_tokens too.

    `cached_tokens` is the number of prompt tokens whose KV was in the prefix cache.
    """
    prompt_tokens = context.request.derived.prompt_tokens
    details = {"cached_tokens": PREFILL_CHUNK_TOKENS * context.cached_prefix_blocks}
    if media := context.request.derived.media:
        details["image_tokens"] = sum(item.tokens for item in media if not item.images)
        details["video_tokens"] = sum(item.tokens for item in media if item.images)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }
    if answers:
        parsing = context.request.derived.parsing or AnswerParsing()
        reasoning_count = sum(reasoning_tokens(answer, parsing) for answer in answers)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_count}
    return usage


def reasoning_tokens(answer: Answer, parsing: AnswerParsing) -> int:
    """Return the number of reasoning tokens in an answer, including those of its marks.

    If the reasoning of the model is not parsed, the marks are those of DEFAULT_REASONING, such as `<think>`.
    """
    reader = ReasoningReader(parsing.reasoning or DEFAULT_REASONING, parsing.starts_in_reasoning)
    for count, token in enumerate(answer.pieces, 1):
        state_before = reader.state
        reader.feed(token.text)
        if reader.state in ("behind", "content"):
            # An answer that goes from "start" to "content" has no reasoning.
            return 0 if (state_before, reader.state) == ("start", "content") else count
    return len(answer.pieces) if reader.state != "start" else 0


class StreamedLogprobs:
    """Returns the logprobs entries of one streamed choice.

    An entry is returned as soon as the text of its token is final.
    """

    def __init__(self) -> None:
        self._tokens = list[TokenDelta]()
        self._sent = 0  # the number of tokens whose entries were returned

    def add(self, token: TokenDelta) -> dict[str, Any] | None:
        """Add a token. Returns the entries that became final, or None if there are none."""
        if token.token_bytes is None:
            return None
        self._tokens.append(token)
        final_tokens = self._tokens[self._sent : token.token_bytes.final_tokens]
        self._sent += len(final_tokens)
        return _entries(final_tokens) if final_tokens else None


def logprobs_of(pieces: Sequence[TokenDelta]) -> dict[str, Any] | None:
    """Return the logprobs entries of a complete choice, or None if they were not requested.

    As in OpenAI's API, the token that ended the answer, and the tokens of a stop string, have no entry.
    """
    last_token_bytes = pieces[-1].token_bytes if pieces else None
    return None if last_token_bytes is None else _entries(pieces[: last_token_bytes.final_tokens])


def _entries(tokens: Sequence[TokenDelta]) -> dict[str, Any]:
    return {"content": [_entry(token) for token in tokens], "refusal": None}


def _entry(token: TokenDelta) -> dict[str, Any]:
    assert token.token_bytes
    top_tokens = zip(token.top, token.token_bytes.top, strict=True)
    top = [_token(data, logprob) for (_, _, logprob), data in top_tokens]
    return {**_token(token.token_bytes.data, token.logprob), "top_logprobs": top}


def _token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}
