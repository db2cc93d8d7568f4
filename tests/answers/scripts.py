"""Templates like those of real models, and what models of them write when they call tools."""

from __future__ import annotations

from typing import Any

HERMES = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n"
    "{{ tool.function.name }}: {{ tool.function.description.strip() }} {{ tool.function.parameters.type }}"
    "{{ tool | tojson }}{% endfor %}\n</tools>\nFor each function call, return a json object within <tool_call>"
    "</tool_call> tags.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% if tools %}<|im_start|>system\nRespond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\n{{ tools | tojson }}'
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CODER = HERMES.replace("<tool_call></tool_call> tags", "<tool_call>\n<function=example>\n<parameter=a>\n tags")
SEP, CALLS, CALL, END, ENDS = (
    "<｜tool▁sep｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "{% for call in m.tool_calls or [] %}" + CALLS + CALL + "{{ call.type }}" + SEP + "{{ call.function.name }}\n"
    "```json\n{{ call.function.arguments | tojson }}\n```" + END + "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MISTRAL = LLAMA.replace("Respond in the format", "[TOOL_CALLS]").replace('"parameters"', "arguments")
PYTHONIC = LLAMA.replace("Respond in the format", "[func_name1(params_name1=params_value1, ...), func_name2()]")
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

F = '{"name": "f", "arguments": {"a": 1}}'
TAGGED = f"<tool_call>\n{F}\n</tool_call>"
BARE = '{"name": "f", "parameters": {"a": 1}}'
ANSWER = '{"name": "Bob", "parameters": {"x": 9}}'
CODED = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
DEEP = (
    f'{CALLS}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{END}\n{CALL}function{SEP}g\n```json\n{{}}\n```{END}{ENDS}'
)

SCRIPTS = {
    "pq": {
        "one": TAGGED,
        "two": f'{TAGGED}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>',
        "mark in text": '<tool_call>{"name":"f","arguments":{"a":"x</tool_call>y"}}</tool_call>',
        "text": '<tool_call>\n{"id": "x", "name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
        "unknown": '<tool_call>{"name": "h", "arguments": {}}</tool_call> is how',
        "said": f"Let me see.\n{TAGGED}",
    },
    "pl": {
        "typed": '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        "two": f'{BARE}; {{"name": "g", "parameters": {{}}}}',
        "tag": f"<|python_tag|>{BARE}",
        "answer": ANSWER,
    },
    "coder": {"one": CODED, "two": f"Well.\n{CODED}\n<tool_call>\n<function=g>\n</function>\n</tool_call>"},
    "deep": {"answer": "So it is.\n</think>\nSix.", "two": f"I have to call.\n</think>\n\n{DEEP}"},
    "mistral": {
        "two": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "named": '[TOOL_CALLS]f{"a": 1}',
    },
    "py": {"two": "[f(a=1), g()]", "list": "[1, 2, 3]"},
    "think": {
        "answer": "<think>\nLet me see.\n\nYes.\n</think>\n\nIt is 4.",
        "plain": "It is 5.",
        "call": f"<think>\nI call f.\n</think>\n\n{TAGGED}",
        "endless": "<think>\nFirst this, then that,",
    },
}
TEMPLATES = {
    "pq": HERMES,
    "pl": LLAMA,
    "coder": CODER,
    "deep": DEEPSEEK,
    "mistral": MISTRAL,
    "py": PYTHONIC,
    "think": QWEN3,
}
MARKS = {"think": ["<think>", "</think>"]}
SPECIALS = {
    "pl": ["<|python_tag|>"],
    "deep": [CALLS, CALL, SEP, END, ENDS, "<think>", "</think>"],
    "mistral": ["[TOOL_CALLS]"],
}

INTEGER = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "One.", "parameters": INTEGER}},
    {"type": "function", "function": {"name": "g", "description": "Another.", "parameters": {"type": "object"}}},
]
