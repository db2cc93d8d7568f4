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
    "<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
DEEPSEEK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "{% for call in m.tool_calls or [] %}" + CALLS + CALL + "{{ call.type }}" + SEP + "{{ call.function.name }}\n"
    "```json\n{{ call.function.arguments | tojson }}\n```" + END + "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)  # fmt: skip
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

INTEGER = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "One.", "parameters": INTEGER}},
    {"type": "function", "function": {"name": "g", "description": "Another.", "parameters": {"type": "object"}}},
]
