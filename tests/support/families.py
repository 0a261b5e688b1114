"""Provide small versions of model families: their tokens in a real tokenizer, and templates in their style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Templates in the style of the families, reduced to the parts that write reasoning and tool calls.
CHATML = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}
CALL
{%- endfor %}<|im_end|>
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif open %}<think>
{% endif %}{% endif %}"""
HERMES = CHATML.replace(
    "CALL",
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>',
)
CODER = CHATML.replace(
    "CALL",
    "<tool_call>\n<function={{ tool_call.name }}>\n{% for name, value in tool_call.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
GLM = CHATML.replace(
    "CALL",
    "<tool_call>{{ tool_call.name }}{% for name, value in tool_call.arguments | items %}"
    "<arg_key>{{ name }}</arg_key><arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>",
)
MISTRAL = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}
{%- else %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif -%}
[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}</s>
{%- endif %}
{%- endfor %}"""
HARMONY = """\
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("not both") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{%- set json = call.arguments | tojson -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking or message.content }}<|end|>
{{- "<|start|>assistant" }} to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ json }}<|call|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
PLAIN = """\
{%- for message in messages %}
{%- if message.role == "system" %}{{ raise_exception("System role not supported") }}{% endif -%}
<start_of_turn>{{ message.role }}
{{ message.content }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
SEED = PLAIN.replace(
    "{{ message.content }}", "<seed:think>{{ message.reasoning_content }}</seed:think>{{ message.content }}"
)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Family:
    template: str
    tokens: Sequence[str] = ()
    """Tokens that are added without being special, as in the real tokenizers."""
    specials: Sequence[str] = ()
    eos: Sequence[str] = ("<|im_end|>",)


FAMILIES = {
    "hermes": Family(HERMES, MARKERS),
    "coder": Family(CODER, MARKERS),
    "glm": Family(GLM, (*MARKERS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "mistral": Family(MISTRAL, (), ("[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "</s>"), ("</s>",)),
    "harmony": Family(
        HARMONY,
        (),
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        ("<|return|>", "<|call|>"),
    ),
    "plain": Family(PLAIN),
    "seed": Family(SEED, ("<seed:think>",), ("</seed:think>",)),
}
