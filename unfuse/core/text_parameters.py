"""The text modality: the parameters of language models, with OpenAI's names, and JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unfuse.core.errors import ContextLengthExceeded, InvalidParameter
from unfuse.core.parameters import (
    DELIVERY_PARAMETERS,
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

UNBOUNDED = -1  # max_tokens: as many tokens as fit

MAX_EFFORT = 64  # characters of a reasoning_effort

TEMPLATE = (
    Parameter(
        "chat_template_kwargs",
        "any",
        use="request",
        flag=None,
        description="variables of the model's chat template, as an object, such as enable_thinking",
    ),
    Parameter(
        "enable_thinking",
        "flag",
        use="request",
        flag=None,
        description="whether a reasoning model reasons before it answers; same as in chat_template_kwargs",
    ),
    Parameter(
        "reasoning_effort",
        "text",
        1,
        MAX_EFFORT,
        use="request",
        description="passed to the chat template, which may ignore it",
    ),
    Parameter(
        "add_generation_prompt",
        "flag",
        use="request",
        flag=None,
        description="false: do not append the start of an answer to the prompt",
    ),
    Parameter(
        "continue_final_message",
        "flag",
        use="request",
        flag=None,
        description="the answer continues the text of the last message",
    ),
    Parameter(
        "truncate_prompt_tokens",
        "integer",
        -1,
        (1 << 31) - 1,
        use="request",
        flag=None,
        description="keep only this many tokens at the end of the prompt; -1: as many as fit",
    ),
)
"""Parameters that control how messages become a prompt, with vLLM's names."""

OWN_PARAMETERS = ("messages", "tools", "chat_template", "tokenize", "continue_final_message", "documents")
"""Template variables that the server sets, so `chat_template_kwargs` must not contain them."""

IGNORED = (
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prediction",
    "verbosity",
)
"""Fields of OpenAI's API that have no effect on this server's answers."""

SERVER_PARAMETERS = ("spaces_between_special_tokens", "stream_reasoning", "guided_whitespace_pattern", "cache_prompt")
"""Fields of vLLM, SGLang and llama.cpp that have no effect on this server's answers."""

REFUSED = (
    ("audio", "is not supported: this server generates no speech, so leave it out"),
    ("web_search_options", "is not supported: this server has no web search, so leave it out"),
    ("moderation", "is not supported: this server has no moderation of chats, so leave it out"),
)
"""Fields of OpenAI's API that are refused, because ignoring them would give a wrong answer, and the reason."""


def check_modalities(value: object) -> None:
    """Raise InvalidParameter unless the client requests text only."""
    if value != ["text"]:
        message = f'modalities must be ["text"], since chats return only text, not {printable(value)}'
        raise InvalidParameter(message, "modalities")


def check_stream_options(value: object, *, stream: bool) -> None:
    """Raise InvalidParameter unless the answer is streamed and the value is an object of booleans."""
    if not stream:
        message = "stream_options are only allowed when stream is true: set stream to true, or leave them out"
        raise InvalidParameter(message, "stream_options")
    if not isinstance(value, dict) or not all(isinstance(option, bool | None) for option in value.values()):
        example = '{"include_usage": true}'
        message = f"stream_options must be an object of booleans, such as {example}, not {printable(value)}"
        raise InvalidParameter(message, "stream_options")


def template_kwargs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's variables, without messages and tools.

    Raises InvalidParameter.
    """
    values: Params = {
        parameter.name: parameter.read(fields[parameter.name], None)
        for parameter in TEMPLATE
        if fields.get(parameter.name) is not None
    }
    kwargs: Any = values.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        example = '{"enable_thinking": false}'
        message = f"chat_template_kwargs must be an object, such as {example}, not {printable(kwargs)}"
        raise InvalidParameter(message, "chat_template_kwargs")
    if reserved := sorted(kwargs.keys() & {*OWN_PARAMETERS}):
        raise InvalidParameter(f"chat_template_kwargs cannot set {reserved[0]}: leave it out", "chat_template_kwargs")

    continues_message = bool(values.get("continue_final_message"))
    adds_prompt = values.get("add_generation_prompt")
    if continues_message and (adds_prompt or kwargs.get("add_generation_prompt")):
        message = "continue_final_message and add_generation_prompt cannot both be true: leave one of them out"
        raise InvalidParameter(message, "continue_final_message")

    passed_names = ("enable_thinking", "reasoning_effort", "add_generation_prompt")
    variables = {name: values[name] for name in passed_names if name in values} | kwargs
    return variables | ({"continue_final_message": True} if continues_message else {})


MAX_STOPS, MAX_STOP = 64, 1000  # the most stop strings, and characters of one
MAX_BIASES = 1024
MAX_STOP_IDS = 256
MAX_BAD_WORDS = 256
MAX_REQUESTED_TOKENS = (1 << 31) - 1  # the largest accepted number of tokens, above any context length


class PromptTokens(msgspec.Struct, frozen=True):
    """A chat's fields as the model's tokenizer encodes them."""

    #: Number of tokens of the messages, as the chat template writes them.
    count: int
    #: Ids of the stop strings that are special tokens. Their text is never decoded, so their ids are compared.
    special_stops: Sequence[int] = ()
    #: The token ids of each spelling of the `bad_words`, such as with a space before the word.
    bad_words: Sequence[Sequence[int]] = ()


class TextLimits(msgspec.Struct, frozen=True):
    """Limits of a language model."""

    #: Maximum context length: tokens of messages and answer together.
    max_tokens: int
    #: Number of token ids that the model has.
    vocabulary: int
    #: The most answers of one request.
    max_n: int = 128
    #: The most characters of the messages.
    max_prompt_chars: int = 4_000_000


def _complete(limits: TextLimits, params: Params, values: Mapping[str, Any], tokens: PromptTokens) -> Params:
    """Return the further parameters of a chat (`Modality.complete_params`)."""
    check_modalities(values.get("modalities", ["text"]))
    max_tokens = _max_tokens(limits, params, values, tokens.count)
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise InvalidParameter("top_logprobs needs logprobs: set logprobs to true", "top_logprobs")
    if "stream_options" in values:
        check_stream_options(values["stream_options"], stream=bool(values.get("stream")))

    completed: Params = {"max_tokens": max_tokens}
    completed["stop"] = json.dumps(_stops(values.get("stop", [])))
    completed["logit_bias"] = json.dumps(_biases(values.get("logit_bias", {}), limits.vocabulary))
    completed["logprobs"] = values.get("top_logprobs", 0) if values.get("logprobs") else None
    return completed | _stop_conditions(limits, values, max_tokens, tokens)


def _max_tokens(limits: TextLimits, params: Params, values: Mapping[str, Any], prompt_tokens: int) -> int:
    """Return the most tokens of the answer, for a prompt of `prompt_tokens` tokens.

    Raises ContextLengthExceeded if they do not fit.
    """
    context_length = limits.max_tokens
    requested = values.get("max_completion_tokens", values.get("max_tokens", UNBOUNDED))
    room = context_length - prompt_tokens
    if requested == 0:
        raise InvalidParameter("max_tokens must be at least 1, or -1 for as many as fit", "max_tokens")

    # OpenAI's wording, by which clients recognize that they must shorten the conversation
    limit = f"This model's maximum context length is {context_length} tokens."
    if room < 1:
        however = f"However, your messages resulted in {prompt_tokens} tokens, and the answer needs at least one."
        raise ContextLengthExceeded(f"{limit} {however} Please reduce the length of the messages.", "messages")
    if requested > room:
        however = (
            f"However, you requested {prompt_tokens + requested} tokens "
            f"({prompt_tokens} in the messages, {requested} in the completion)"
        )
        advice = f"Please reduce the length of the messages, or request at most {room} tokens."
        raise ContextLengthExceeded(f"{limit} {however}. {advice}", "messages")

    # the model's default is reduced to what fits, while a client's number that does not fit is an error
    default = params.get("max_tokens")
    return int(requested if requested != UNBOUNDED else min(room, default if isinstance(default, int) else room))


def _stop_conditions(limits: TextLimits, values: Mapping[str, Any], max_tokens: int, tokens: PromptTokens) -> Params:
    """Return the parameters that decide where an answer ends, and its `bad_words`."""
    params: Params = {name: True for name in ("ignore_eos", "include_stop_str_in_output") if values.get(name)}
    if min_tokens := values.get("min_tokens", 0):
        if min_tokens > max_tokens:
            raise InvalidParameter(f"min_tokens {min_tokens} exceeds the maximum of {max_tokens} tokens", "min_tokens")
        params["min_tokens"] = min_tokens

    stop_ids = [*tokens.special_stops]
    if "stop_token_ids" in values:
        ids = values["stop_token_ids"]
        if not isinstance(ids, list) or len(ids) > MAX_STOP_IDS:
            message = f"stop_token_ids must be a list of at most {MAX_STOP_IDS} token ids"
            raise InvalidParameter(message, "stop_token_ids")
        stop_ids += [integer("stop_token_ids", id, 0, limits.vocabulary - 1) for id in ids]
    if stop_ids:
        params["stop_token_ids"] = json.dumps(stop_ids)

    if values.get("skip_special_tokens") is False:
        params["skip_special_tokens"] = False
    if tokens.bad_words:
        params["bad_words"] = json.dumps(tokens.bad_words)
    return params


def read_bad_words(value: object) -> list[str]:
    """Return the checked `bad_words`. Raises InvalidParameter."""
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS:
        raise InvalidParameter(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings", "bad_words")
    return [text("bad_words", word, 1, MAX_STOP) for word in value]


def _stops(value: object) -> list[str]:
    """Return the checked stop strings."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise InvalidParameter(f"stop must be a string or a list of at most {MAX_STOPS} strings", "stop")
    return [text("stop", stop, 1, MAX_STOP) for stop in stops]


def _biases(value: object, vocabulary: int) -> dict[int, float]:
    """Return the checked `logit_bias`: numbers by token id."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise InvalidParameter(f"logit_bias must be an object of at most {MAX_BIASES} token ids", "logit_bias")
    return {
        integer("logit_bias", token, 0, vocabulary - 1): number("logit_bias", bias, -100, 100)
        for token, bias in value.items()
    }


TEXT = Modality(
    "text",
    plural="texts",
    prefix="chatcmpl-",
    limit_name="max_tokens",
    min_limit=1,
    limits=TextLimits,
    complete_params=_complete,
    parameters=(
        Parameter(
            "messages",
            "any",
            use="request",
            required=True,
            flag=None,
            description="the messages of the conversation, as objects with role and content",
        ),
        *TEMPLATE,
        Parameter(
            "max_completion_tokens",
            "integer",
            UNBOUNDED,
            MAX_REQUESTED_TOKENS,
            use="request",
            description="maximum number of tokens in the answer; -1: as many as fit",
        ),
        Parameter(
            "max_tokens",
            "integer",
            UNBOUNDED,
            MAX_REQUESTED_TOKENS,
            use="request",
            description="same as max_completion_tokens",
        ),
        Parameter(
            "min_tokens",
            "integer",
            0,
            MAX_REQUESTED_TOKENS,
            use="request",
            flag=None,
            description="minimum number of tokens before the answer can end",
        ),
        Parameter("temperature", "number", 0, 2, default=1.0, description="sampling temperature; 0: greedy"),
        Parameter(
            "top_p",
            "number",
            0,
            1,
            default=1.0,
            description="sample from the most likely tokens whose probabilities sum up to this",
        ),
        Parameter(
            "top_k",
            "integer",
            -1,
            1_000_000,
            default=0,
            description="sample from this number of most likely tokens; 0 or -1: from all tokens",
        ),
        Parameter(
            "min_p",
            "number",
            0,
            1,
            default=0.0,
            description="minimum probability of a token, relative to the most likely token",
        ),
        Parameter(
            "frequency_penalty",
            "number",
            -2,
            2,
            default=0.0,
            description="penalty for each earlier occurrence of a token in the answer",
        ),
        Parameter(
            "presence_penalty",
            "number",
            -2,
            2,
            default=0.0,
            description="penalty for tokens that occur in the answer",
        ),
        Parameter(
            "repetition_penalty",
            "number",
            0.01,
            10,
            default=1.0,
            description="penalty for tokens that occur in the prompt or the answer; 1: no penalty",
        ),
        Parameter("logit_bias", "any", use="request", flag=None, description="numbers to add to logits, by token id"),
        Parameter("stop", "any", use="request", flag=None, description="strings before which the answer ends"),
        Parameter("stop_token_ids", "any", use="request", flag=None, description="ids of tokens that end the answer"),
        Parameter(
            "include_stop_str_in_output",
            "flag",
            use="request",
            flag=None,
            description="keep the stop string or stop token in the answer",
        ),
        Parameter(
            "ignore_eos",
            "flag",
            use="request",
            flag=None,
            description="do not stop at the model's end-of-text tokens; no effect with a format",
        ),
        Parameter(
            "skip_special_tokens",
            "flag",
            use="request",
            flag=None,
            description="false: keep special tokens in the answer, except the one that ends it",
        ),
        Parameter(
            "include_reasoning", "flag", use="request", flag=None, description="false: do not return the reasoning"
        ),
        Parameter("bad_words", "any", use="request", flag=None, description="strings that the answer must not contain"),
        Parameter("logprobs", "flag", use="request", flag=None, description="return the logprob of each token"),
        Parameter(
            "top_logprobs",
            "integer",
            0,
            20,
            use="request",
            flag=None,
            description="number of most likely tokens to return at each position; needs logprobs",
        ),
        Parameter(
            "response_format",
            "any",
            use="request",
            flag=None,
            description="format of the answer: type text, json_object, json_schema, regex or grammar",
        ),
        Parameter("tools", "any", use="request", flag=None, description="functions that the model may call"),
        Parameter(
            "tool_choice",
            "any",
            use="request",
            flag=None,
            description="whether the model calls functions: none, auto, required, or an object that names one",
        ),
        Parameter("parallel_tool_calls", "flag", use="request", flag=None, description="false: at most one call"),
        Parameter(
            "structured_outputs",
            "any",
            use="request",
            flag=None,
            description="format of the answer, as in vLLM: one of json, regex, choice, grammar, json_object",
        ),
        Parameter("guided_json", "any", use="request", flag=None, description="a JSON schema, an object or a string"),
        Parameter("guided_regex", "any", use="request", flag=None, description="a regular expression for the answer"),
        Parameter("guided_choice", "any", use="request", flag=None, description="the possible answers"),
        Parameter("guided_grammar", "any", use="request", flag=None, description="a grammar in EBNF or Lark"),
        Parameter("json_schema", "any", use="request", flag=None, description="same as guided_json"),
        Parameter("regex", "any", use="request", flag=None, description="same as guided_regex"),
        Parameter("ebnf", "any", use="request", flag=None, description="a grammar in EBNF"),
        Parameter("guided_decoding_backend", "any", use="nothing", flag=None, description="accepted and ignored"),
        Parameter(
            "seed",
            "integer",
            MIN_SEED,
            MAX_SEED,
            use="request",
            description="seed of the first choice, which the response contains; random by default, or if it is -1",
        ),
        Parameter("n", "integer", 1, "max_n", use="request", default=1, description="number of choices"),
        Parameter("stream", "flag", use="delivery", description="stream the response as server-sent events"),
        Parameter(
            "stream_options",
            "any",
            use="nothing",
            description="include_usage: the last event has the usage; continuous_usage_stats: each event has it",
        ),
        Parameter("modalities", "any", use="nothing", description="only text is supported"),
        *DELIVERY_PARAMETERS,
        *(
            Parameter(name, "any", use="nothing", description="for disaggregated SGLang; accepted and ignored")
            for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        ),
        *(
            Parameter(name, "any", use="nothing", description="accepted and ignored")
            for name in (*IGNORED, *SERVER_PARAMETERS)
        ),
        *(Parameter(name, "any", use="refused", flag=None, description=reason) for name, reason in REFUSED),
    ),
    size=(),
)


GUIDANCE = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{0,16}",
}
"""llguidance's options for JSON: any white space, but at most 16 characters at a time."""

UNSURE = {
    "pattern",
    "patternProperties",
    "format",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contentMediaType",
    "contentEncoding",
    "contentSchema",
    "multipleOf",
    "$dynamicRef",
}
"""Keywords that llguidance may be unable to enforce."""

TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_SURROGATES = re.compile("[\ud800-\udfff]")

# keywords whose value has further schemas: by name, as one schema, or in a list
BY_NAME = ("properties", "$defs", "definitions")
BELOW = ("items", "additionalProperties", "additionalItems")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def strict_in(fields: Mapping[Any, Any], param: str) -> bool:
    """Return the field `strict` of an object; False if it is missing. Raises InvalidParameter.

    `param` is the name of the object, for the error.
    """
    strict = fields.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{param}: strict must be true or false, not {printable(strict)}", param)
    return bool(strict)


def schema_text(schema: object, strict: bool, param: str, relaxed: bool = False) -> str:
    """Return a JSON schema as text, with llguidance's options.

    Unless it is `strict`, keywords that llguidance does not support are ignored. With `relaxed`, the keywords in UNSURE
    are removed as well, if it is not strict. Raises InvalidParameter, naming `param`.
    """
    if schema is True or schema is False:
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidParameter(f"{param}: a JSON schema must be an object, not {printable(schema)}", param)
    lenient = not strict
    try:
        supported: dict[str, Any] = _relaxed(schema) if lenient and relaxed else schema
        return json.dumps(supported | {"x-guidance": {**GUIDANCE, "lenient": lenient, "coerce_one_of": lenient}})
    except RecursionError as error:
        raise InvalidParameter(f"{param}: the JSON schema is nested too deeply", param) from error


def _relaxed(schema: Any) -> Any:
    """Return the schema without the parts that llguidance may be unable to enforce.

    These are the keywords in UNSURE, nulls, unknown types and references to other documents.
    """
    if not isinstance(schema, dict):
        return schema
    # the server fetches no other document
    if not str(schema.get("$ref", "#")).startswith("#"):
        return {}
    relaxed = {
        key: value for key, value in schema.items() if key not in UNSURE and (value is not None or key == "const")
    }
    if "type" in relaxed:
        types = _known_types(relaxed.pop("type"))
        relaxed |= {"type": types} if types else {}
    for key in relaxed.keys() & set(BY_NAME):
        if isinstance(relaxed[key], dict):
            relaxed[key] = {name: _relaxed(subschema) for name, subschema in relaxed[key].items()}
    for key in relaxed.keys() & {*BELOW, *LISTS}:
        value = relaxed[key]
        relaxed[key] = [_relaxed(subschema) for subschema in value] if isinstance(value, list) else _relaxed(value)
    return relaxed


def _known_types(value: object) -> str | list[str]:
    """Return a schema's type or types in lower case; empty if one is unknown."""
    types = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    known = types if {*types} <= {*TYPES} else []
    return known if isinstance(value, list) or not known else known[0]


def types_of(schema: object) -> dict[str, str]:
    """Return the type of each property of an object schema.

    Several types are joined by "|". A property without a type has "".
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: "|".join(sorted(_types(value))) for name, value in properties.items() if not _SURROGATES.search(name)}


def _types(schema: object, depth: int = 4) -> set[str]:
    """Return the types that a schema allows, down to `depth` levels of anyOf and oneOf."""
    if not isinstance(schema, dict) or depth == 0:
        return set()
    type_field = schema.get("type")
    types = {name for name in TYPES if name in (type_field if isinstance(type_field, list) else [type_field])}
    if isinstance(values := schema.get("enum"), list) and not types:
        types |= {"string"} if all(isinstance(value, str) for value in values) else set()
    for key in ("anyOf", "oneOf"):
        if isinstance(alternatives := schema.get(key), list):
            types |= set().union(*(_types(alternative, depth - 1) for alternative in alternatives))
    return types
