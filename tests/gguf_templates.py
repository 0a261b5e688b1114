"""Define chat templates for GGUF files with different features. All use ``<|im_start|>role`` and ``<|im_end|>``."""

from __future__ import annotations

_TOOLS = """\
{%- if tools -%}
<|im_start|>system
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif -%}
"""

_TURNS = """\
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
"""

TOOLS = f"""\
{_TOOLS}{_TURNS}
{{%- if add_generation_prompt -%}}
<|im_start|>assistant
{{% if enable_thinking is defined and not enable_thinking -%}}
<think>

</think>

{{% endif -%}}
{{%- endif -%}}"""
"""Like Qwen3 and Hermes: calls are JSON between ``<tool_call>`` tags; reasoning is optional and can be disabled."""

THINKS_FIRST = f"""\
{_TURNS}
{{%- if add_generation_prompt -%}}
<|im_start|>assistant
<think>
{{% endif -%}}"""
"""Like DeepSeek R1: the prompt ends with the start of the reasoning, in which the answer begins. No tools."""

NO_SYSTEM = """\
{%- for message in messages -%}
{%- if message.role == "system" %}{{ raise_exception("System role not supported") }}{% endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
"""Like Gemma: a system message is an error."""
