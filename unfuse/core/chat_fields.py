"""Fields of chats beside those of sampling: for the chat template, and those of OpenAI's API without use here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unfuse.core.errors import InvalidParameter
from unfuse.core.parameters import Parameter, Params, printable

UNBOUNDED = -1  # a number of tokens that clients send for as many as there is room for

MAX_EFFORT = 64  # characters of a reasoning_effort

TEMPLATE = (
    Parameter("chat_template_kwargs", "any", use="request", flag=None,
        description="variables of the model's chat template, as an object, such as enable_thinking"),
    Parameter("enable_thinking", "flag", use="request", flag=None,
        description="as in chat_template_kwargs: whether the model thinks before it answers, where it can"),
    Parameter("reasoning_effort", "text", 1, MAX_EFFORT, use="request",
        description="given to the chat template, which may pass it over"),
    Parameter("add_generation_prompt", "flag", use="request", flag=None,
        description="false: the chat template does not begin an answer"),
    Parameter("continue_final_message", "flag", use="request", flag=None,
        description="the answer goes on where the text of the last message ends"),
    Parameter("truncate_prompt_tokens", "integer", -1, (1 << 31) - 1, use="request", flag=None,
        description="so many of the last tokens of the messages are read; -1: as many as fit"),
)  # fmt: skip
"""Parameters that say how messages become the tokens of a prompt, in vLLM's names."""

OWN = ("messages", "tools", "chat_template", "tokenize", "continue_final_message", "documents")
"""What a template gets from elsewhere, so that chat_template_kwargs cannot have it."""

IGNORED = (
    "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "verbosity",
)  # fmt: skip
"""Fields of OpenAI's API that change nothing about an answer that this server could change."""

SERVERS_OWN = ("spaces_between_special_tokens", "stream_reasoning", "guided_whitespace_pattern", "cache_prompt")
"""Fields of vLLM, SGLang and llama.cpp that change nothing about an answer that this server could change."""

REFUSED = (
    ("audio", "is not made: no model that is served here speaks, so leave it out"),
    ("web_search_options", "cannot be used: this server searches nothing, so leave it out"),
    ("moderation", "cannot be used: this server moderates nothing, so leave it out"),
)
"""Fields of OpenAI's API whose answers would be wrong without them, and why they are refused."""


def check_modalities(value: object) -> None:
    """Raise InvalidParameter unless an answer in text is what the client asks for."""
    if value != ["text"]:
        message = f'modalities must be ["text"], since text is all that chats make here, not {printable(value)}'
        raise InvalidParameter(message, "modalities")


def check_stream_options(value: object, *, stream: bool) -> None:
    """Raise InvalidParameter for options that are no object of flags, or of an answer that is not streamed."""
    if not stream:
        message = "stream_options are only allowed where stream is true: send stream as true too, or leave them out"
        raise InvalidParameter(message, "stream_options")
    if not isinstance(value, dict) or not all(isinstance(one, bool | None) for one in value.values()):
        message = f"stream_options must be an object of true or false, such as include_usage, not {printable(value)}"
        raise InvalidParameter(message, "stream_options")


def template_kwargs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template gets beside messages and tools. Raises InvalidParameter."""
    read: Params = {one.name: one.read(fields[one.name], None) for one in TEMPLATE if fields.get(one.name) is not None}
    own: Any = read.get("chat_template_kwargs", {})
    if not isinstance(own, dict):
        example = '{"enable_thinking": false}'
        message = f"chat_template_kwargs must be an object, such as {example}, not {printable(own)}"
        raise InvalidParameter(message, "chat_template_kwargs")
    if taken := sorted(own.keys() & {*OWN}):
        raise InvalidParameter(f"chat_template_kwargs cannot have {taken[0]}", "chat_template_kwargs")
    goes_on, opens = bool(read.get("continue_final_message")), read.get("add_generation_prompt")
    if goes_on and (opens or own.get("add_generation_prompt")):
        message = "continue_final_message and add_generation_prompt cannot both be true: leave one of them out"
        raise InvalidParameter(message, "continue_final_message")
    passed = ("enable_thinking", "reasoning_effort", "add_generation_prompt")
    said = {name: read[name] for name in passed if name in read} | own
    return said | ({"continue_final_message": True} if goes_on else {})
