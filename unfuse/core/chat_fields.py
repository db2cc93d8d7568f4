"""Chat fields for the chat template, and fields of OpenAI's API that are ignored or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unfuse.core.errors import InvalidParameter
from unfuse.core.parameters import Parameter, Params, printable

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
