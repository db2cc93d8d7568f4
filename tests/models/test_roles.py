"""No message is passed over in silence, and what templates refuse is put as they take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.models.tokenizers_of import letters
from unfuse.core.errors import InvalidParameter
from unfuse.language.chat_template import ChatTemplate, Message
from unfuse.language.tokenizer import ChatTokenizer, TokenizerFiles

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LISTED = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content }}{% endif %}{% endfor %}"
)
"""Phi-3's first template passes messages of the system over."""

HEAD = "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}" + LISTED
"""Passes over each message of the system but the first."""

GUARDED = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""As Qwen3.5's."""

TURNS = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""As Gemma 2's."""

USER = {"role": "user", "content": "u"}
SYSTEMS = [
    {"role": "system", "content": "s"},
    {"role": "system", "content": "t"},
    USER,
    {"role": "assistant", "content": "a"},
    {"role": "system", "content": "v"},
    {"role": "user", "content": "w"},
]


@lru_cache(1)
def library() -> str:
    return letters("default").to_str()


def tokenizer(template: str) -> ChatTokenizer:
    return ChatTokenizer(TokenizerFiles(Path("m"), Tokenizer.from_str(library()), {"default": template}, {}, [1]))


def written(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    mine = tokenizer(template)
    return mine.decode(mine.prompt(*mine.simplify(messages, None), kwargs))


@pytest.mark.row("C1", "K2")
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "<system>s<system>t<user>u<assistant>a<system>v<user>w"),
        (LISTED, "<user>s\n\nt\n\nv\n\nu<assistant>a<user>w"),
        (HEAD, "<system>s\n\nt\n\nv<user>u<assistant>a<user>w"),
        (GUARDED, "<system>s\n\nt\n\nv<user>u<assistant>a<user>w"),
        (TURNS, "<user>s\n\nt\n\nv\n\nu<assistant>a<user>w"),
    ],
)
def test_every_system_message_is_rendered_for_each_template(template: str, text: str) -> None:
    assert written(template, SYSTEMS) == text


@pytest.mark.row("C1")
def test_lone_system_message_is_rendered_as_user_message() -> None:
    assert written(LISTED, [{"role": "developer", "content": "s"}]) == "<user>s"


@pytest.mark.row("K2")
def test_tool_result_is_rendered_if_the_template_ignores_tool_messages() -> None:
    """Given a template that knows tools, and passes over the role of their results."""
    said = [USER, {"role": "tool", "tool_call_id": "1", "content": "42"}]
    assert written("{# tools #}" + LISTED, said) == "<user>u<user><tool_response>\n42\n</tool_response>"
    assert written("{# tools #}" + CHATML, said) == "<user>u<tool>42"


@pytest.mark.row("K2")
def test_consecutive_user_messages_are_merged_if_roles_must_alternate() -> None:
    assert written(TURNS, [USER, USER]) == "<user>u\n\nu"
    assert written(CHATML, [USER, USER]) == "<user>u<user>u"


@pytest.mark.row("C1")
def test_role_ignored_by_the_chat_template_is_rejected() -> None:
    said = [USER, {"role": "User", "content": "x"}]
    assert written(CHATML, said) == "<user>u<User>x"
    with pytest.raises(InvalidParameter, match=r"messages\[1\].role is 'User'.*: send one of system, ") as refused:
        written(LISTED, said)
    assert refused.value.param == "messages"


PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
"""As Llama Guard 3's."""


@pytest.mark.row("C1", "K2")
def test_template_that_reads_only_content_parts_receives_parts() -> None:
    assert written(PARTS, SYSTEMS[1:]) == "<system>t<user>u<assistant>a<system>v<user>w"
    assert written(PARTS, [{"role": "user", "content": [{"type": "text", "text": "u"}]}]) == "<user>u"
    assert written(PARTS, [USER, {"role": "assistant", "content": "a "}], continue_final_message=True).endswith("a ")


@pytest.mark.row("K2")
@pytest.mark.parametrize(
    "arguments", ["c.function.arguments", "'' + c.function.arguments + ''", "c.function.arguments ~ ''"]
)
def test_tool_call_arguments_are_json_if_the_template_expects_text(arguments: str) -> None:
    """Given a template that expects arguments as the text that OpenAI's API has."""
    template = (
        "{# tools #}{% for m in messages %}{% for c in m.tool_calls %}{{ " + arguments + " }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":["é",null]}'}}
    said = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert written(template, said) == '{"a": ["é", null]}'


LISTS = "{% for t in tools %}{% for k, v in t.function.parameters.properties.items() %}{{ k }}{% endfor %}{% endfor %}"


@pytest.mark.row("N2")
@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": None}])
def test_tool_without_properties_is_rendered_without_error(parameters: dict[str, Any]) -> None:
    """Given a function without arguments, as MCP servers describe it."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    mine = tokenizer(LISTS + TURNS)
    assert mine.decode(mine.prompt(*mine.simplify([USER], tools))) == "<user>u"
    assert mine.decode(mine.prompt(*mine.simplify(SYSTEMS, tools))).startswith("<user>s\n\nt")


@pytest.mark.row("C5:continue_final_message")
def test_continue_final_message_works_with_merged_messages() -> None:
    said = [SYSTEMS[0], USER, USER, {"role": "assistant", "content": "a "}]
    assert written(TURNS, said, continue_final_message=True) == "<user>s\n\nu\n\nu<assistant>a "


def test_chat_template_timeout_is_not_retried() -> None:
    loops = "{% for m in messages %}" + "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 4
    tried = list[int]()

    class Slow(ChatTemplate):
        def prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
            tried.append(len(messages))
            return super().prompt(messages, variables)

    mine = tokenizer(CHATML)
    mine._templates["default"] = Slow(loops, "m", seconds=0.05)
    with pytest.raises(InvalidParameter, match="takes too long"):
        mine.prompt(SYSTEMS)
    assert tried[-1] == len(SYSTEMS)
