"""The medium of text: what can be asked of a language model, in the names of the `openai` client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from unfuse.core.errors import InvalidParameter
from unfuse.core.medium import DELIVERED, MAX_SEED, MIN_SEED, Medium
from unfuse.core.parameters import Parameter, Params, integer, number, text
from unfuse.core.vision import SHOWN

MAX_STOPS, MAX_STOP = 4, 1000  # the most stop strings, and characters of one

MAX_BIASES = 1024

EXPECTED = 256  # tokens that an answer is predicted to have at most, since few are as long as they may be


class TextLimits(msgspec.Struct, frozen=True):
    """What a language model can be asked for: tokens of messages and answer together, ids of its `vocabulary`."""

    max_tokens: int
    vocabulary: int
    max_n: int = 16
    max_prompt_chars: int = 4_000_000


def _settle(limits: TextLimits, params: Params, read: Mapping[str, Any]) -> Params:
    prompt = read["prompt_tokens"]
    room, asked = limits.max_tokens - prompt, read.get("max_completion_tokens", read.get("max_tokens"))
    if room < 1:
        long = f"the messages have {prompt} tokens, and the model takes {limits.max_tokens} together with its answer"
        raise InvalidParameter(f"{long}: shorten them", "messages")
    if asked is not None and asked > room:
        name = "max_completion_tokens" if "max_completion_tokens" in read else "max_tokens"
        long = f"{name} {asked} and the {prompt} tokens of the messages are more than the model's {limits.max_tokens}"
        raise InvalidParameter(f"{long}: at most {room} are left", name)
    if "top_logprobs" in read and not read.get("logprobs"):
        raise InvalidParameter("top_logprobs says how many logprobs: send logprobs as true too", "top_logprobs")
    settled: Params = {"prompt_tokens": prompt, "max_tokens": asked or room}
    if shown := read.get(SHOWN):
        settled[SHOWN] = shown
    settled["expected_tokens"] = min(asked or room, EXPECTED)
    settled["stop"] = json.dumps(_stops(read.get("stop", [])))
    settled["logit_bias"] = json.dumps(_biases(read.get("logit_bias", {}), limits.vocabulary))
    settled["logprobs"] = read.get("top_logprobs", 0) if read.get("logprobs") else None
    return settled


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
    "text", plural="texts", prefix="chat_", sign="max_tokens", least=1, limits=TextLimits, settle=_settle,
    parameters=(
        Parameter("messages", "any", use="request", required=True, flag=None,
            description="what was said so far, as objects of role and content"),
        Parameter("max_completion_tokens", "integer", 1, "max_tokens", use="request", description="of the answer"),
        Parameter("max_tokens", "integer", 1, "max_tokens", use="request", description="as max_completion_tokens"),
        Parameter("temperature", "number", 0, 2, default=1.0, description="0: the likeliest token each time"),
        Parameter("top_p", "number", 0, 1, default=1.0, description="of the likeliest tokens that make up so much"),
        Parameter("top_k", "integer", 0, 1_000_000, default=0, description="of so many likeliest tokens; 0: of all"),
        Parameter("min_p", "number", 0, 1, default=0.0, description="of tokens this likely beside the likeliest"),
        Parameter("frequency_penalty", "number", -2, 2, default=0.0, description="against what was often said"),
        Parameter("presence_penalty", "number", -2, 2, default=0.0, description="against what was said"),
        Parameter("repetition_penalty", "number", 0.01, 10, default=1.0,
            description="against tokens of messages and answer; 1: none"),
        Parameter("logit_bias", "any", use="request", flag=None, description="numbers to add, by token"),
        Parameter("stop", "any", use="request", flag=None, description="texts before which the answer ends"),
        Parameter("logprobs", "flag", use="request", flag=None, description="tell how likely each token was"),
        Parameter("top_logprobs", "integer", 0, 20, use="request", flag=None, description="and the likeliest ones"),
        Parameter("response_format", "any", use="request", flag=None,
            description="what the text must be: of type text, json_object, json_schema, regex or grammar"),
        Parameter("tools", "any", use="request", flag=None, description="functions that the model may call"),
        Parameter("tool_choice", "any", use="request", flag=None,
            description="whether it calls any: none, auto, required, or the name of one as an object"),
        Parameter("parallel_tool_calls", "flag", use="request", flag=None, description="false: one call at most"),
        Parameter("structured_outputs", "any", use="request", flag=None,
            description="what the text must be, as vLLM has it: one of json, regex, choice, grammar, json_object"),
        Parameter("guided_json", "any", use="request", flag=None, description="a JSON schema, as an object or a text"),
        Parameter("guided_regex", "any", use="request", flag=None, description="what the text matches"),
        Parameter("guided_choice", "any", use="request", flag=None, description="the texts that it may be"),
        Parameter("guided_grammar", "any", use="request", flag=None, description="a grammar, in EBNF or as Lark's"),
        Parameter("json_schema", "any", use="request", flag=None, description="as guided_json"),
        Parameter("regex", "any", use="request", flag=None, description="as guided_regex"),
        Parameter("ebnf", "any", use="request", flag=None, description="a grammar in EBNF"),
        Parameter("guided_decoding_backend", "any", use="nothing", flag=None, description="accepted and ignored"),
        Parameter("seed", "integer", MIN_SEED, MAX_SEED, use="request",
            description="of the first choice; if left out, or -1, it is drawn, and the answer has it"),
        Parameter("n", "integer", 1, "max_n", use="request", default=1, description="how many choices"),
        Parameter("stream", "flag", use="delivery", description="answer with events"),
        Parameter("stream_options", "any", use="nothing", description="include_usage: a last event has the usage"),
        *DELIVERED,
        *(
            Parameter(name, "any", use="nothing", description="of other servers' disaggregation; accepted and ignored")
            for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        ),
        *(
            Parameter(name, "any", use="nothing", description="accepted and ignored")
            for name in ("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity")
        ),
    ),
    size=(),
)  # fmt: skip
