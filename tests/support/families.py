"""Provide small versions of model families: their tokens, templates in their style, and an answer with calls."""

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
KIMI = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(",", ":")) }}<|im_end|>{% endif %}
{%- set ns = namespace(count=0, ids=[]) %}
{%- for message in messages -%}
<|im_{{ "system" if message.role == "tool" else message.role }}|>{{ message.get("name") or message.role }}<|im_middle|>
{%- if message.role == "tool" %}## Return of {{ ns.ids.pop(0) }}
{% endif -%}
{{ message.content }}
{%- if message.get("tool_calls") %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}
{%- set id = "functions." ~ call.function.name ~ ":" ~ ns.count %}
{%- set ns.count = ns.count + 1 %}
{%- set _ = ns.ids.append(id) -%}
<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>{% endif -%}
<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
MINIMAX = """\
{%- macro parts(arguments) %}
{%- for name, value in arguments.items() -%}
<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>
{%- endfor %}
{%- endmacro %}
{%- set last = namespace(user=-1, call="") %}
{%- for message in messages %}
{%- if message.role == "user" %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor -%}
]~b]system
{% if messages[0].role == "system" %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- for tool in tools or [] %}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>{% endfor %}[e~[
{% for message in messages %}
{%- if message.role == "tool" %}
{%- if not last.call %}{{ raise_exception("a result without a call") }}{% endif -%}
]~b]tool
<response>{{ message.content }}</response>[e~[
{% else -%}
]~b]{{ {"user": "user", "assistant": "ai"}[message.role] }}
{% if message.reasoning_content and loop.index0 > last.user -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set last.call = call.function.name %}
<minimax:tool_call>
<invoke name="{{ call.function.name }}">{{ parts(call.function.arguments) }}</invoke>
</minimax:tool_call>{% endfor %}[e~[
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""
LFM = """\
{%- set ns = namespace(system=messages[0].content if messages[0].role == "system" else "") %}
{%- if ns.system %}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}
{%- set ns.system = ns.system + ("\n" if ns.system else "") + "List of tools: <|tool_list_start|>[" %}
{%- for tool in tools %}{% set ns.system = ns.system + tool | tojson + ("" if loop.last else ", ") %}{% endfor %}
{%- set ns.system = ns.system + "]<|tool_list_end|>" %}
{%- endif %}
{%- if ns.system %}{{ "<|im_start|>system\n" + ns.system + "<|im_end|>\n" }}{% endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else message.content | tojson %}
{%- for call in message.tool_calls or [] %}
{%- set quoted = namespace(parts=[]) %}
{%- for name, value in call.function.arguments | items %}
{%- set _ = quoted.parts.append(name ~ "=" ~ (value | tojson)) %}
{%- endfor %}
{%- set call = call.function.name ~ "(" ~ quoted.parts | join(", ") ~ ")" %}
{%- set content = content + "<|tool_call_start|>[" + call + "]<|tool_call_end|>" %}
{{- "<|im_start|>assistant\n" + content + "<|im_end|>\n" }}
{%- endfor %}
{%- if message.role == "tool" %}
{%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" %}
{%- endif %}
{%- if not message.tool_calls %}{{ "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
GEMMA4 = """\
{%- macro shown(value) %}
{%- if value is string %}<|"|>{{ value }}<|"|>
{%- elif value is mapping %}{{ "{" }}
{%- for name, inner in value | dictsort %}{{ "," if not loop.first }}{{ name }}:{{ shown(inner) }}{% endfor %}{{ "}" }}
{%- elif value is sequence %}[{% for inner in value %}{{ "," if not loop.first }}{{ shown(inner) }}{% endfor %}]
{%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{%- set system = messages[0].role in ["system", "developer"] %}
{%- if system or tools or enable_thinking %}<|turn>system
{% if enable_thinking %}<|think|>
{% endif %}{{ messages[0].content | trim if system }}
{%- for tool in tools or [] -%}
<|tool>declaration:{{ tool.function.name }}{{ shown(tool.function) }}<tool|>
{%- endfor %}<turn|>
{% endif %}
{%- for message in (messages[1:] if system else messages) %}
{%- if message.role == "tool" -%}
<|tool_response>response:{{ message.name }}{{ shown({"value": message.content}) }}<tool_response|>
{%- else -%}
<|turn>{{ "model" if message.role == "assistant" else message.role }}
{% if message.reasoning_content and message.tool_calls %}<|channel>thought
{{ message.reasoning_content }}
<channel|>{% endif %}{{ message.content | trim }}
{%- for call in message.tool_calls or [] -%}
<|tool_call>call:{{ call.function.name }}{{ shown(call.function.arguments) }}<tool_call|>{% endfor %}<turn|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""
MINICPM = CHATML.replace(
    "CALL",
    '<function name="{{ tool_call.name }}">{% for name, value in tool_call.arguments | items %}'
    '<param name="{{ name }}">{{ value }}</param>{% endfor %}</function>',
)
GRANITE = """\
{%- set ns = namespace(system="You are a helpful assistant.", tools="") %}
{%- if messages[0]["role"] == "system" %}
{%- set ns.system = messages[0]["content"] %}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for tool in tools or [] %}{% set ns.tools = ns.tools ~ "\n" ~ (tool | tojson) %}{% endfor -%}
<|start_of_role|>system<|end_of_role|>{{ ns.system }}{% if ns.tools %} Tools: <tools>{{ ns.tools }}
</tools>{% endif %}<|end_of_text|>
{% for message in messages %}
{%- if message.role == "tool" -%}
<|start_of_role|>user<|end_of_role|><tool_response>{{ message.content }}</tool_response><|end_of_text|>
{% else -%}
<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}
{%- for each in message.tool_calls or [] %}
{%- set used = each.function or each %}
<tool_call>{{ {"name": used.name, "arguments": used.arguments} | tojson }}</tool_call>{% endfor %}<|end_of_text|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]["role"] == "system" %}
{%- set system = messages[0]["content"] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = "" %}{% endif -%}
<|start_header_id|>system<|end_header_id|>

Today Date: {{ date_string }}

{{ system }}<|eot_id|>
{%- for message in messages %}
{%- if not (message.role == "ipython" or message.role == "tool" or "tool_calls" in message) -%}
<|start_header_id|>{{ message["role"] }}<|end_header_id|>

{{ message["content"] | trim }}<|eot_id|>
{%- elif "tool_calls" in message %}
{%- if not message.tool_calls | length == 1 %}{{ raise_exception("only one call") }}{% endif %}
{%- set call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else -%}
<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson if message.content is mapping else message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
DEEPSEEK = """\
{%- if not thinking is defined %}{% set thinking = enable_thinking | default(false) %}{% endif %}
{%- set ns = namespace(system="", is_first=true) %}
{%- for message in messages if message["role"] == "system" %}
{%- set ns.system = message["content"] if ns.is_first else ns.system + "\n\n" + message["content"] %}
{%- set ns.is_first = false %}
{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message["role"] == "user" %}{{ "<\uff5cUser\uff5c>" + message["content"] }}
{%- elif message["role"] == "assistant" %}
{%- set content = message["content"] %}
{%- if "</think>" in content %}{% set content = content.split("</think>", 1)[1] %}{% endif %}
{{- "<\uff5cAssistant\uff5c></think>" + content + "<\uff5cend▁of▁sentence\uff5c>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<\uff5cAssistant\uff5c>" + ("<think>" if thinking else "</think>") }}{% endif %}"""
COMMAND = """\
{{- bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>
{%- if messages and messages[0]["role"] | lower == "system" %}{{ messages[0]["content"] }}{% endif %}
{%- if documents %} The documents: {{ documents | tojson }}{% endif %}<|END_OF_TURN_TOKEN|>
{%- for message in messages -%}
{%- if message.role | lower == "user" -%}
<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ message.content | replace("\n\n", "\n") }}<|END_OF_TURN_TOKEN|>
{%- elif message.role | lower == "assistant" -%}
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>
{%- endif %}
{%- endfor -%}
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if enable_thinking %}<|START_THINKING|>{% endif %}"""
MINISTRAL = """\
{%- macro shown(content) %}
{%- if content is string %}{{ content }}
{%- else %}
{%- for block in content %}
{%- if block['type'] == 'text' %}{{ block['text'] }}
{%- else %}[THINK]{{ block['thinking'] }}[/THINK]{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- if messages[0].role == "system" %}[SYSTEM_PROMPT]{{ shown(messages[0].content) }}[/SYSTEM_PROMPT]
{%- set messages = messages[1:] %}{% endif %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content | string }}[/TOOL_RESULTS]
{%- else %}{{ shown(message.content) }}
{%- for call in message.tool_calls or [] -%}
[TOOL_CALLS]{{ call["function"]["name"] }}[ARGS]{{ call["function"]["arguments"] | tojson }}
{%- endfor %}</s>
{%- endif %}
{%- endfor %}"""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HEAD = "<think>\nHm.\n</think>\n\nLook.\n"
GENERIC_CALLS = """\
<tool_call>
{"name": "weather", "arguments": {"city": "Zürich 🏔", "days": 2}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>"""
CODER_CALLS = """\
<tool_call>
<function=weather>
<parameter=city>
Zürich 🏔
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>
<tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>"""
GLM_CALLS = """\
<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich 🏔</arg_value>\
<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>\
<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"""
MISTRAL_CALLS = """\
[TOOL_CALLS]weather[CALL_ID]abcdefg00[ARGS]{"city": "Zürich 🏔", "days": 2}[TOOL_CALLS]add[ARGS]{"a": 1}"""
HARMONY_CALL = """\
<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>\
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>\
{"city": "Zürich 🏔", "days": 2}"""
KIMI_CALLS = """\
Look.<|tool_calls_section_begin|>\
<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Zürich 🏔", "days": 2}<|tool_call_end|>\
<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>\
<|tool_calls_section_end|>"""
MINIMAX_CALLS = """\
<minimax:tool_call>
<invoke name="weather"><parameter name="city">Zürich 🏔</parameter><parameter name="days">2</parameter></invoke>
<invoke name="add"><parameter name="a">1</parameter></invoke>
</minimax:tool_call>"""
LFM_CALLS = """\
Look.<|tool_call_start|>[weather(city="Zürich 🏔", days=2), add(a=1)]<|tool_call_end|>"""
GEMMA4_CALLS = """\
<|channel>thought
Hm.
<channel|>Look.<|tool_call>call:weather{city:<|"|>Zürich 🏔<|"|>,days:2}<tool_call|>\
<|tool_call>call:add{a:1}<tool_call|>"""
MINICPM_CALLS = """\
<function name="weather"><param name="city">Zürich 🏔</param><param name="days">2</param></function>\
<function name="add"><param name="a">1</param></function>"""


@dataclass(frozen=True)
class Family:
    template: str
    tokens: Sequence[str] = ()
    """Tokens that are added without being special, as in the real tokenizers."""
    specials: Sequence[str] = ()
    eos: Sequence[str] = ("<|im_end|>",)
    answer: str = ""
    """An answer that reasons, where the family does, says "Look.", and calls two tools (gpt-oss one)."""


FAMILIES = {
    "hermes": Family(HERMES, MARKERS, answer=HEAD + GENERIC_CALLS),
    "coder": Family(CODER, MARKERS, answer=HEAD + CODER_CALLS),
    "glm": Family(
        GLM,
        (*MARKERS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        answer="<think>Hm.</think>Look." + GLM_CALLS,
    ),
    "mistral": Family(
        MISTRAL,
        (),
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "</s>"),
        ("</s>",),
        answer="Look." + MISTRAL_CALLS,
    ),
    "harmony": Family(
        HARMONY,
        (),
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        ("<|return|>", "<|call|>"),
        answer=HARMONY_CALL,
    ),
    "plain": Family(PLAIN, answer="Look.\n" + GENERIC_CALLS),
    "seed": Family(
        SEED, ("<seed:think>",), ("</seed:think>",), answer="<seed:think>Hm.</seed:think>Look.\n" + GENERIC_CALLS
    ),
}
MORE_FAMILIES = {
    "kimi": Family(
        KIMI,
        (),
        (
            *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        answer=KIMI_CALLS,
    ),
    "minimax": Family(
        MINIMAX,
        ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        ("]~b]", "[e~["),
        ("[e~[",),
        answer="Hm.\n</think>\n\nLook.\n" + MINIMAX_CALLS,
    ),
    "lfm": Family(
        LFM,
        (),
        (
            *("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
            *("<|tool_response_start|>", "<|tool_response_end|>"),
        ),
        answer=LFM_CALLS,
    ),
    "gemma4": Family(
        GEMMA4,
        ('<|"|>',),
        (
            *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
            *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        ),
        ("<turn|>",),
        answer=GEMMA4_CALLS,
    ),
    "minicpm": Family(MINICPM, ("<think>", "</think>"), answer=HEAD + MINICPM_CALLS),
    "granite": Family(
        GRANITE,
        ("<tool_call>", "</tool_call>"),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        ("<|end_of_text|>",),
        answer="Look.\n" + GENERIC_CALLS,
    ),
    "llama3": Family(
        LLAMA3,
        (),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>",),
        answer="Look.\n" + GENERIC_CALLS,
    ),
    "deepseek": Family(
        DEEPSEEK,
        ("<think>", "</think>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
        ("<\uff5cend▁of▁sentence\uff5c>",),
        ("<\uff5cend▁of▁sentence\uff5c>",),
        answer="Hm.</think>Look.\n" + GENERIC_CALLS,
    ),
    "command": Family(
        COMMAND,
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|END_OF_TURN_TOKEN|>",),
        answer="Hm.<|END_THINKING|>Look.\n" + GENERIC_CALLS,
    ),
    "ministral": Family(
        MINISTRAL,
        (),
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[SYSTEM_PROMPT]", "</s>"),
        ("</s>",),
        answer='[THINK]Hm.[/THINK]Look.[TOOL_CALLS]weather[ARGS]{"city": "Zürich 🏔", "days": 2}[TOOL_CALLS]add[ARGS]'
        '{"a": 1}',
    ),
}
"""Families whose templates have nothing in common with the others but the language. Tested on llama.cpp."""
