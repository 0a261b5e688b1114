"""How a GGUF model writes thoughts and calls, by its template and what llama.cpp says of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmx_lab.engine.grammar.build import Marker
from lmx_lab.engine.templates.tool_prompt import END, START
from lmx_lab.engine.text.chat_format_detection import HARMONY, HARMONY_TOKENS, MORE_REASONING_MARKERS, ChatFormat

ALL_MARKERS = (*(marker for pair in MORE_REASONING_MARKERS for marker in pair), START, END)


def detect_chat_format(template: str, caps: Mapping[str, Any], markers: Mapping[str, Marker]) -> ChatFormat:
    """
    Args:
        caps: ``chat_template_caps`` of llama.cpp's ``/props``.
        markers: Those of ``ALL_MARKERS`` that are one token of this model.
    """
    # Prompts begin thoughts, so the end need not be in the template.
    thoughts = next((pair for pair in MORE_REASONING_MARKERS if pair[0] in template), None)
    harmony = all(token in template for token in HARMONY_TOKENS[1:])
    return ChatFormat(
        reasoning_markers=None if harmony else thoughts,
        supports_tools=bool(caps.get("supports_tools")),
        supports_system=bool(caps.get("supports_system_role", True)),
        transitions=HARMONY if harmony else {},
        markers={name: markers.get(name, (name,)) for name in (*(thoughts or ()), START, END)},
    )
