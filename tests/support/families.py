"""Provide small versions of model families: their tokens in a real tokenizer, and templates in their style."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lmx_lab.engine import AnswerFormat, ChatPrompt, GenerationRequest, ToolUse
from lmx_lab.engine.mlx.model import AnswerText
from lmx_lab.engine.text.chat_format_detection import ChatFormat, ReasoningState
from lmx_lab.engine.text.splitter import TextSplitter
from tests.support.engines import merge

USER = {"role": "user", "content": "Hi"}

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


@dataclass(frozen=True)
class Known:
    tokenizer: Any
    chat_format: ChatFormat

    def tokens(self, text: str, *, whole: bool = True) -> list[int]:
        """Return the tokens of a text. Without ``whole``, characters outside added tokens are encoded one by one."""
        encode = cast("Callable[..., list[int]]", self.tokenizer.encode)
        if whole:
            return encode(text, add_special_tokens=False)
        added = self.tokenizer.added_tokens_decoder
        found: list[int] = []
        for token in encode(text, add_special_tokens=False):
            characters = self.tokenizer.decode([token]) if token not in added else ""
            single = len(characters) > 1 and "\ufffd" not in characters
            found += (
                [part for one in characters for part in encode(one, add_special_tokens=False)] if single else [token]
            )
        return found


def write_tokenizer(folder: Path, source: Path, family: Family) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    last = len(tokenizer["model"]["vocab"])
    for at, text in enumerate((*family.tokens, *family.specials)):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = text in family.specials
        tokenizer["added_tokens"].append({"id": last + at, "content": text, "special": special, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config = {**config, "chat_template": family.template, "eos_token": family.eos[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def asked(tools: ToolUse | None = None, answer_format: AnswerFormat | None = None, **changes: Any) -> GenerationRequest:
    prompt = ChatPrompt(
        messages=changes.pop("messages", (USER,)), tools=tools, template_options=changes.pop("options", {})
    )
    return replace(GenerationRequest(prompt=prompt, answer_format=answer_format), **changes)


def rendered(known: Known, request: GenerationRequest, *, prompt: bool = True) -> str:
    assert isinstance(request.prompt, ChatPrompt)
    given = known.chat_format.template_input(request, request.prompt)
    made = known.tokenizer.apply_chat_template(
        given.pop("messages"), add_generation_prompt=prompt, tokenize=False, **given, **request.prompt.template_options
    )
    return cast("str", made)


def said(*calls: tuple[str, dict[str, Any]], content: str = "", thoughts: str = "") -> dict[str, Any]:
    made = [
        {"id": f"abcdefg{at:02}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": thoughts}
    return {**message, "tool_calls": made} if made else message


def divided(
    known: Known, raw: str, request: GenerationRequest, thinking: ReasoningState, *, whole: bool
) -> tuple[str, str, list[tuple[str, Any]]]:
    splitter: TextSplitter[None] = TextSplitter(
        AnswerText(known.tokenizer).decode, (), known.chat_format.channel_format(request, thinking)
    )
    pieces = [splitter.add(token) for token in known.tokens(raw, whole=whole)]
    pieces.append(splitter.finish())
    calls, _ = merge(call for piece in pieces for call in piece.calls)
    text, reasoning = ("".join(getattr(piece, kind) for piece in pieces) for kind in ("text", "reasoning"))
    return text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]
