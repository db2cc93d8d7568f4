"""The medium of text: what can be asked of a language model, in the names of the `openai` client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unfuse.core.chat_fields import (
    IGNORED,
    REFUSED,
    SERVERS_OWN,
    TEMPLATE,
    UNBOUNDED,
    check_modalities,
    check_stream_options,
)
from unfuse.core.errors import ContextLengthExceeded, InvalidParameter
from unfuse.core.medium import DELIVERED, MAX_SEED, MIN_SEED, Medium
from unfuse.core.parameters import Parameter, Params, integer, number, text

MAX_STOPS, MAX_STOP = 64, 1000  # the most stop strings, and characters of one

MAX_BIASES, MAX_STOP_IDS, MAX_BAD_WORDS = 1024, 256, 256

MAX_ASKED = (1 << 31) - 1  # the largest accepted number of tokens, above any context length


class PromptTokens(msgspec.Struct, frozen=True):
    """What the model's tokenizer makes of the fields of a chat."""

    #: Number of tokens of the messages, as the chat template writes them.
    count: int
    #: Ids of the stop strings that are special tokens: these never occur in the text.
    special_stops: Sequence[int] = ()
    #: The ways to write each of the `bad_words`, as token ids.
    bad_words: Sequence[Sequence[int]] = ()


class TextLimits(msgspec.Struct, frozen=True):
    """What a language model can be asked for: tokens of messages and answer together, ids of its `vocabulary`."""

    max_tokens: int
    vocabulary: int
    max_n: int = 128
    max_prompt_chars: int = 4_000_000


def _settle(limits: TextLimits, params: Params, read: Mapping[str, Any], tokens: PromptTokens) -> Params:
    check_modalities(read.get("modalities", ["text"]))
    most = _most(limits, params, read, tokens.count)
    if read.get("top_logprobs") and not read.get("logprobs"):
        raise InvalidParameter("top_logprobs says how many logprobs: send logprobs as true too", "top_logprobs")
    if "stream_options" in read:
        check_stream_options(read["stream_options"], stream=bool(read.get("stream")))
    settled: Params = {"max_tokens": most}
    settled["stop"] = json.dumps(_stops(read.get("stop", [])))
    settled["logit_bias"] = json.dumps(_biases(read.get("logit_bias", {}), limits.vocabulary))
    settled["logprobs"] = read.get("top_logprobs", 0) if read.get("logprobs") else None
    return settled | _ending(limits, read, most, tokens)


def _most(limits: TextLimits, params: Params, read: Mapping[str, Any], prompt: int) -> int:
    """Return the most tokens that the answer may have. Raises ContextLengthExceeded if they do not fit."""
    window = limits.max_tokens
    asked, room = read.get("max_completion_tokens", read.get("max_tokens", UNBOUNDED)), window - prompt
    if asked == 0:
        raise InvalidParameter("max_tokens must be at least 1, or -1 for as many as fit", "max_tokens")
    is_window = f"This model's maximum context length is {window} tokens."
    if room < 1:
        however = f"However, your messages resulted in {prompt} tokens, and the answer needs at least one."
        raise ContextLengthExceeded(f"{is_window} {however} Please reduce the length of the messages.", "messages")
    if asked > room:
        however = (
            f"However, you requested {prompt + asked} tokens ({prompt} in the messages, {asked} in the completion)"
        )
        advice = f"Please reduce the length of the messages, or ask for at most {room} tokens."
        raise ContextLengthExceeded(f"{is_window} {however}. {advice}", "messages")
    usual = params.get("max_tokens")
    return int(asked if asked != UNBOUNDED else min(room, usual if isinstance(usual, int) else room))


def _ending(limits: TextLimits, read: Mapping[str, Any], most: int, tokens: PromptTokens) -> Params:
    """Return the further parameters that decide where an answer ends and which texts it must not contain."""
    settled: Params = {name: True for name in ("ignore_eos", "include_stop_str_in_output") if read.get(name)}
    if least := read.get("min_tokens", 0):
        if least > most:
            raise InvalidParameter(f"min_tokens {least} must be at most the {most} tokens of the answer", "min_tokens")
        settled["min_tokens"] = least
    stop_ids = [*tokens.special_stops]
    if "stop_token_ids" in read:
        ids = read["stop_token_ids"]
        if not isinstance(ids, list) or len(ids) > MAX_STOP_IDS:
            message = f"stop_token_ids must be a list of at most {MAX_STOP_IDS} token ids"
            raise InvalidParameter(message, "stop_token_ids")
        stop_ids += [integer("stop_token_ids", id, 0, limits.vocabulary - 1) for id in ids]
    if stop_ids:
        settled["stop_token_ids"] = json.dumps(stop_ids)
    if read.get("skip_special_tokens") is False:
        settled["skip_special_tokens"] = False
    if tokens.bad_words:
        settled["bad_words"] = json.dumps(tokens.bad_words)
    return settled


def read_bad_words(value: object) -> list[str]:
    """Return the checked `bad_words`. Raises InvalidParameter."""
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS:
        raise InvalidParameter(f"bad_words must be a list of at most {MAX_BAD_WORDS} texts", "bad_words")
    return [text("bad_words", word, 1, MAX_STOP) for word in value]


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise InvalidParameter(f"stop must be a text, or a list of at most {MAX_STOPS}", "stop")
    return [text("stop", stop, 1, MAX_STOP) for stop in stops]


def _biases(value: object, vocabulary: int) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise InvalidParameter(f"logit_bias must be an object of at most {MAX_BIASES} numbers by token", "logit_bias")
    return {
        integer("logit_bias", token, 0, vocabulary - 1): number("logit_bias", bias, -100, 100)
        for token, bias in value.items()
    }


TEXT = Medium(
    "text", plural="texts", prefix="chatcmpl-", sign="max_tokens", least=1, limits=TextLimits,
    settle=_settle,
    parameters=(
        Parameter("messages", "any", use="request", required=True, flag=None,
            description="what was said so far, as objects of role and content"),
        *TEMPLATE,
        Parameter("max_completion_tokens", "integer", UNBOUNDED, MAX_ASKED, use="request",
            description="maximum number of tokens in the answer; -1: as many as fit"),
        Parameter("max_tokens", "integer", UNBOUNDED, MAX_ASKED, use="request",
            description="same as max_completion_tokens"),
        Parameter("min_tokens", "integer", 0, MAX_ASKED, use="request", flag=None,
            description="minimum number of tokens before the answer can end"),
        Parameter("temperature", "number", 0, 2, default=1.0, description="0: the likeliest token each time"),
        Parameter("top_p", "number", 0, 1, default=1.0, description="of the likeliest tokens that make up so much"),
        Parameter("top_k", "integer", -1, 1_000_000, default=0,
            description="sample from this many likeliest tokens; 0 or -1: from all"),
        Parameter("min_p", "number", 0, 1, default=0.0, description="of tokens this likely beside the likeliest"),
        Parameter("frequency_penalty", "number", -2, 2, default=0.0, description="against what was often said"),
        Parameter("presence_penalty", "number", -2, 2, default=0.0, description="against what was said"),
        Parameter("repetition_penalty", "number", 0.01, 10, default=1.0,
            description="against tokens of messages and answer; 1: none"),
        Parameter("logit_bias", "any", use="request", flag=None, description="numbers to add, by token"),
        Parameter("stop", "any", use="request", flag=None, description="texts before which the answer ends"),
        Parameter("stop_token_ids", "any", use="request", flag=None, description="tokens that end the answer"),
        Parameter("include_stop_str_in_output", "flag", use="request", flag=None,
            description="keep the stop string or stop token in the answer"),
        Parameter("ignore_eos", "flag", use="request", flag=None,
            description="do not stop at the model's end-of-text tokens; no effect with a format"),
        Parameter("skip_special_tokens", "flag", use="request", flag=None,
            description="false: keep special tokens in the answer, except the one that ends it"),
        Parameter("include_reasoning", "flag", use="request", flag=None,
            description="false: do not return the reasoning"),
        Parameter("bad_words", "any", use="request", flag=None, description="texts that the answer must not contain"),
        Parameter("logprobs", "flag", use="request", flag=None, description="tell how likely each token was"),
        Parameter("top_logprobs", "integer", 0, 20, use="request", flag=None, description="and the likeliest ones"),
        Parameter("response_format", "any", use="request", flag=None,
            description="what the text must be: of type text, json_object, json_schema, regex or grammar"),
        Parameter("tools", "any", use="request", flag=None, description="functions that the model may call"),
        Parameter("tool_choice", "any", use="request", flag=None,
            description="whether it calls any: none, auto, required, or the name of one as an object"),
        Parameter("parallel_tool_calls", "flag", use="request", flag=None, description="false: one call at most"),
        Parameter("structured_outputs", "any", use="request", flag=None,
            description="format of the answer, as in vLLM: one of json, regex, choice, grammar, json_object"),
        Parameter("guided_json", "any", use="request", flag=None, description="a JSON schema, an object or a string"),
        Parameter("guided_regex", "any", use="request", flag=None, description="a regular expression for the answer"),
        Parameter("guided_choice", "any", use="request", flag=None, description="the possible answers"),
        Parameter("guided_grammar", "any", use="request", flag=None, description="a grammar in EBNF or Lark"),
        Parameter("json_schema", "any", use="request", flag=None, description="same as guided_json"),
        Parameter("regex", "any", use="request", flag=None, description="same as guided_regex"),
        Parameter("ebnf", "any", use="request", flag=None, description="a grammar in EBNF"),
        Parameter("guided_decoding_backend", "any", use="nothing", flag=None, description="accepted and ignored"),
        Parameter("seed", "integer", MIN_SEED, MAX_SEED, use="request",
            description="seed of the first choice; without it, or with -1, random; the answer contains it"),
        Parameter("n", "integer", 1, "max_n", use="request", default=1, description="how many choices"),
        Parameter("stream", "flag", use="delivery", description="answer with events"),
        Parameter("stream_options", "any", use="nothing",
            description="include_usage: the last event has the usage; continuous_usage_stats: each event has it"),
        Parameter("modalities", "any", use="nothing", description="only text is supported"),
        *DELIVERED,
        *(
            Parameter(name, "any", use="nothing", description="for disaggregated SGLang; accepted and ignored")
            for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        ),
        *(
            Parameter(name, "any", use="nothing", description="accepted and ignored")
            for name in (*IGNORED, *SERVERS_OWN)
        ),
        *(Parameter(name, "any", use="refused", flag=None, description=why) for name, why in REFUSED),
    ),
    size=(),
)  # fmt: skip
