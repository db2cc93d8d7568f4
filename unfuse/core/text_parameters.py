"""The medium of text: what can be asked of a language model, in OpenAI's names, and JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unfuse.core.errors import ContextLengthExceeded, InvalidParameter
from unfuse.core.parameters import (
    DELIVERED,
    MAX_SEED,
    MIN_SEED,
    Modality,
    Parameter,
    Params,
    integer,
    number,
    printable,
    text,
)

UNBOUNDED = -1  # as many tokens as fit

MAX_EFFORT = 64  # characters of a reasoning_effort

TEMPLATE = (
    Parameter("chat_template_kwargs", "any", use="request", flag=None,
        description="variables of the model's chat template, as an object, such as enable_thinking"),
    Parameter("enable_thinking", "flag", use="request", flag=None,
        description="same as in chat_template_kwargs: whether a model that can reason does so"),
    Parameter("reasoning_effort", "text", 1, MAX_EFFORT, use="request",
        description="passed to the chat template, which may ignore it"),
    Parameter("add_generation_prompt", "flag", use="request", flag=None,
        description="false: do not append the start of an answer to the prompt"),
    Parameter("continue_final_message", "flag", use="request", flag=None,
        description="the answer continues the text of the last message"),
    Parameter("truncate_prompt_tokens", "integer", -1, (1 << 31) - 1, use="request", flag=None,
        description="keep only this many tokens at the end of the prompt; -1: as many as fit"),
)  # fmt: skip
"""Parameters that control how messages become a prompt, with vLLM's names."""

OWN = ("messages", "tools", "chat_template", "tokenize", "continue_final_message", "documents")
"""Template variables that have another source, so chat_template_kwargs cannot set them."""

IGNORED = (
    "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "verbosity",
)  # fmt: skip
"""Fields of OpenAI's API that have no effect on this server's answers."""

SERVERS_OWN = ("spaces_between_special_tokens", "stream_reasoning", "guided_whitespace_pattern", "cache_prompt")
"""Fields of vLLM, SGLang and llama.cpp that have no effect on this server's answers."""

REFUSED = (
    ("audio", "is not supported: this server generates no speech, so leave it out"),
    ("web_search_options", "is not supported: this server has no web search, so leave it out"),
    ("moderation", "is not supported: this server has no moderation of chats, so leave it out"),
)
"""Fields of OpenAI's API that are refused, because ignoring them would give a wrong answer, and the reason."""


def check_modalities(value: object) -> None:
    """Raise InvalidParameter unless the client asks for text only."""
    if value != ["text"]:
        message = f'modalities must be ["text"], since chats return only text, not {printable(value)}'
        raise InvalidParameter(message, "modalities")


def check_stream_options(value: object, *, stream: bool) -> None:
    """Raise InvalidParameter unless the answer is streamed and the value is an object of booleans."""
    if not stream:
        message = "stream_options are only allowed when stream is true: set stream to true, or leave them out"
        raise InvalidParameter(message, "stream_options")
    if not isinstance(value, dict) or not all(isinstance(one, bool | None) for one in value.values()):
        example = '{"include_usage": true}'
        message = f"stream_options must be an object of booleans, such as {example}, not {printable(value)}"
        raise InvalidParameter(message, "stream_options")


def template_kwargs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's variables beside messages and tools. Raises InvalidParameter."""
    read: Params = {one.name: one.read(fields[one.name], None) for one in TEMPLATE if fields.get(one.name) is not None}
    own: Any = read.get("chat_template_kwargs", {})
    if not isinstance(own, dict):
        example = '{"enable_thinking": false}'
        message = f"chat_template_kwargs must be an object, such as {example}, not {printable(own)}"
        raise InvalidParameter(message, "chat_template_kwargs")
    if taken := sorted(own.keys() & {*OWN}):
        raise InvalidParameter(f"chat_template_kwargs cannot set {taken[0]}: leave it out", "chat_template_kwargs")
    goes_on, opens = bool(read.get("continue_final_message")), read.get("add_generation_prompt")
    if goes_on and (opens or own.get("add_generation_prompt")):
        message = "continue_final_message and add_generation_prompt cannot both be true: leave one of them out"
        raise InvalidParameter(message, "continue_final_message")
    passed = ("enable_thinking", "reasoning_effort", "add_generation_prompt")
    said = {name: read[name] for name in passed if name in read} | own
    return said | ({"continue_final_message": True} if goes_on else {})


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


TEXT = Modality(
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


GUIDANCE = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{0,16}",
}
"""llguidance's options for JSON: any white space, but at most 16 characters at a time."""

UNSURE = {
    "pattern", "patternProperties", "format", "propertyNames", "not", "if", "then", "else", "contains", "minContains",
    "maxContains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "unevaluatedItems", "contentMediaType", "contentEncoding", "contentSchema", "multipleOf", "$dynamicRef",
}  # fmt: skip
"""Keywords that llguidance may be unable to enforce."""

TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_SURROGATES = re.compile("[\ud800-\udfff]")

BY_NAME = ("properties", "$defs", "definitions")
BELOW = ("items", "additionalProperties", "additionalItems")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def strict_in(about: Mapping[Any, Any], param: str) -> bool:
    """Return the field `strict` of an object, by default false. Raises InvalidParameter."""
    strict = about.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{param}: strict must be true or false, not {printable(strict)}", param)
    return bool(strict)


def schema_text(schema: object, strict: bool, param: str, relaxed: bool = False) -> str:
    """Return a JSON schema with llguidance's options.

    Unless it is `strict`, keywords that llguidance does not support are ignored. With `relaxed`, the keywords in UNSURE
    are removed as well, if it is not strict. Raises InvalidParameter, naming `param`.
    """
    if schema is True or schema is False:
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidParameter(f"{param}: a JSON schema must be an object, not {printable(schema)}", param)
    lenient = not strict
    try:
        kept: dict[str, Any] = _relaxed(schema) if lenient and relaxed else schema
        return json.dumps(kept | {"x-guidance": {**GUIDANCE, "lenient": lenient, "coerce_one_of": lenient}})
    except RecursionError as error:
        raise InvalidParameter(f"{param}: the JSON schema is nested too deeply", param) from error


def _relaxed(schema: Any) -> Any:
    """Return the schema without the keywords in UNSURE, nulls, unknown types and references to other documents."""
    if not isinstance(schema, dict):
        return schema
    if not str(schema.get("$ref", "#")).startswith("#"):
        return {}
    found = {key: value for key, value in schema.items() if key not in UNSURE and (value is not None or key == "const")}
    if "type" in found:
        types = _known_types(found.pop("type"))
        found |= {"type": types} if types else {}
    for key in found.keys() & set(BY_NAME):
        if isinstance(found[key], dict):
            found[key] = {name: _relaxed(one) for name, one in found[key].items()}
    for key in found.keys() & {*BELOW, *LISTS}:
        value = found[key]
        found[key] = [_relaxed(one) for one in value] if isinstance(value, list) else _relaxed(value)
    return found


def _known_types(said: object) -> str | list[str]:
    """Return the type or types of a schema in lower case; empty if one of them is unknown."""
    types = [str(one).lower() for one in (said if isinstance(said, list) else [said])]
    known = types if {*types} <= {*TYPES} else []
    return known if isinstance(said, list) or not known else known[0]


def types_of(schema: object) -> dict[str, str]:
    """Return the type of each property of an object schema, several separated by |; "" if it gives none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: "|".join(sorted(_types(about))) for name, about in properties.items() if not _SURROGATES.search(name)}


def _types(schema: object, depth: int = 4) -> set[str]:
    if not isinstance(schema, dict) or depth == 0:
        return set()
    said = schema.get("type")
    found = {one for one in TYPES if one in (said if isinstance(said, list) else [said])}
    if isinstance(values := schema.get("enum"), list) and not found:
        found |= {"string"} if all(isinstance(value, str) for value in values) else set()
    for key in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(key), list):
            found |= set().union(*(_types(one, depth - 1) for one in several))
    return found
