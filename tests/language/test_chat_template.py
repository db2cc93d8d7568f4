"""Templates that fail or would never end, and messages that are none."""

import pytest

from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.language.chat_template import ChatTemplate, plain

HI = [{"role": "user", "content": "hi"}]
BIG = "{% set big = range(100000) | list %}"


def rendered(template: str, characters: int = 1000, seconds: float = 0.2) -> str:
    return ChatTemplate(template, "a model", characters, seconds).prompt(HI, {"tools": None})


@pytest.mark.parametrize(
    "template",
    [
        BIG + "{% for a in big %}{% for b in big %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% if a and b %}{% endif %}{% endfor %}{% endfor %}",
        BIG + "{% macro m() %}{% for a in big %}{% for b in big %}x{% endfor %}{% endfor %}{% endmacro %}{{ m() }}",
        BIG + "{% set kept %}{% for a in big %}{% for b in big %}{% continue %}{% endfor %}{% endfor %}{% endset %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in [[[]]] recursive %}{% for b in range(100000) %}{{ loop.index and '' }}"
        "{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_template_without_output_times_out(template: str) -> None:
    with pytest.raises(InvalidParameter, match="rendering takes too long") as raised:
        rendered(template)
    assert raised.value.param == "messages"


def test_template_output_is_limited_in_length() -> None:
    with pytest.raises(InvalidParameter, match="more than 1000 characters"):
        rendered("{% for a in range(100000) %}{% for b in range(100000) %}word {% endfor %}{% endfor %}", seconds=1e9)
    assert rendered("{{ 'x' * 1000 }}") == "x" * 1000


def test_template_time_limit_applies_per_prompt() -> None:
    template = ChatTemplate("{% for a in range(1000) %}{% endfor %}ok", "a model", seconds=0.05)
    assert {template.prompt(HI, {}) for _ in range(200)} == {"ok"}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only users talk') }}", "only users talk"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ range(10 ** 9) }}", "too big"),
        ("{{ lipsum(n=5) }}", "undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{% include 'secret' %}", "no loader"),
    ],
)
def test_template_failure_raises_invalid_parameter_with_reason(template: str, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=f"the model's chat template cannot render them: .*{reason}") as raised:
        rendered(template)
    assert raised.value.param == "messages"


@pytest.mark.parametrize("template", ["{% for %}", "{{", "{% nothing %}", "{{ x | nofilter }}"])
def test_invalid_template_raises_config_error_on_load(template: str) -> None:
    with pytest.raises(ConfigError, match="the chat template of a model is not valid"):
        ChatTemplate(template, "a model")


def test_generation_block_has_its_own_scope() -> None:
    inside = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}\n{% endgeneration %}{{ x }}"
    assert rendered(inside) == "2\n1"


def test_tojson_does_not_escape_html_and_honours_its_options() -> None:
    assert rendered("{{ {'é': '<&>', 'a': [1, none]} | tojson }}") == '{"é": "<&>", "a": [1, null]}'
    assert rendered("{{ {'b': 1, 'a': 'é'} | tojson(True, sort_keys=true) }}") == '{"a": "\\u00e9", "b": 1}'
    assert rendered("{{ [1, 2] | tojson(separators=('.', ':'), indent=1) }}") == "[\n 1.\n 2\n]"


def test_text_parts_are_joined_and_null_fields_are_omitted() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    said = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "name": None, "tool_calls": []}]
    assert plain(said) == [{"role": "user", "content": "a b"}, {"role": "assistant", "tool_calls": []}]
    assert said[0]["content"] is parts, "the caller's messages stay as they are"
    assert plain([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        (["hi"], r"messages\[0\] must be an object with a role"),
        ([*HI, {"content": "hi"}], r"messages\[1\] must be an object with a role"),
        ([{"role": 1}], r"messages\[0\] must be an object"),
        ([*HI, {"role": "user"}], r"messages\[1\] of role user needs a content"),
        ([{"role": "system", "content": None}], r"messages\[0\] of role system needs a content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a text or a list"),
        ([{"role": "user", "content": {"type": "text"}}], "a text or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "parts of type image_url are not supported",
        ),
        ([{"role": "user", "content": ["hi"]}], "parts of type hi are not supported"),
        ([{"role": "user", "content": [{"type": "x" * 99}]}], f"type {'x' * 40} are"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a text"),
    ],
)
def test_malformed_messages_are_rejected(messages: list[dict[str, object]], says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as raised:
        plain(messages)
    assert raised.value.param == "messages"
