"""The grammar of an answer, for llguidance: the format that is asked for, forced or possible calls, thoughts before.

Pure. What comes out is a JSON list of Lark and JSON-schema grammars (llguidance's ``docs/syntax.md``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmx_lab.engine.grammar.schemas import enforceable
from lmx_lab.engine.requests import AnswerFormat, ToolUse
from lmx_lab.engine.templates.tool_prompt import END, START

WHITESPACE = r"[ ]|\n[ ]{0,24}"
"""Between the parts of JSON: one space, or one new line and its indentation. With more a model may go on for ever."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""llguidance would work out at each step how long the answer is determined: seconds for some, and of no use here."""
MOST_CALLS = 16
"""In a forced answer: small models would call until they have no tokens left."""
Marker = tuple[int | str, ...]
"""Special tokens and texts, or one text."""


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """What comes before the answer itself."""

    start: Marker
    end: Marker
    open: bool
    """They have begun in the prompt; else they may begin."""


@dataclass(frozen=True)
class _Lark:
    rules: list[str]
    parts: list[dict[str, Any]]
    """Grammars that the rules name."""


def grammar(
    answer_format: AnswerFormat | None,
    tools: ToolUse | None,
    thoughts: Thoughts | None,
    *,
    markers: Mapping[str, Marker],
) -> str | None:
    """The grammar in llguidance's form; None if any text will do.

    Args:
        tools: Those that may or must be called in the generic format; None where calls are not a grammar's concern.
        markers: The generic format's, where they are special tokens.
    """
    if answer_format is None and tools is None:
        return None
    lark = _Lark([], [])
    body = _body(lark, answer_format, tools, [markers.get(marker, (marker,)) for marker in (START, END)])
    if thoughts is not None:
        body = f"{_thoughts(lark, thoughts)} {body}"
    lark.rules[:0] = [NO_FORCING, f"start: {body}"]
    main = {"name": "main", "lark_grammar": "\n".join(lark.rules)}
    return json.dumps({"grammars": [main, *lark.parts]}, ensure_ascii=False)


def alone(part: Mapping[str, Any]) -> str:
    """One of a grammar's parts as a grammar."""
    main = {"name": "main", "lark_grammar": f"{NO_FORCING}\nstart: @{part['name']}"}
    return json.dumps({"grammars": [main, part]}, ensure_ascii=False)


def _body(lark: _Lark, answer_format: AnswerFormat | None, tools: ToolUse | None, markers: list[Marker]) -> str:
    formatted = _format(lark, answer_format) if answer_format is not None else None
    if tools is None:
        assert formatted is not None
        return formatted
    start, end = markers
    lark.rules.append(f'call: "\\n" ({_each(lark, tools)}) "\\n" {_written(end)}')
    once = tools.only is not None or not tools.parallel
    if formatted is None and not tools.forced:
        _until(lark, "words", start)
        lark.rules.append(r"text: /(?s:.*)/")
        return "(words call | text)" if once else "(words call)* text"
    more = "" if once else f' ("\\n" {_written(start)} call){{0,{MOST_CALLS - 1}}}'
    calls = f"{_written(start)} call{more}"
    return calls if formatted is None or tools.forced else f"({calls} | {formatted})"


def _each(lark: _Lark, tools: ToolUse) -> str:
    """The alternatives, one for each tool that may be called."""
    names = []
    for at, tool in enumerate(tools.tools):
        if tools.only in (None, tool.name):
            names.append(f"call_{at}")
            begin = f'{{"name": {json.dumps(tool.name)}, "arguments": '
            lark.rules.append(f'call_{at}: {_literal(begin)} @call_{at}_arguments "}}"')
            lark.parts.append(
                {"name": f"call_{at}_arguments", "json_schema": enforceable_json({"type": "object", **tool.parameters})}
            )
    return " | ".join(names)


def _format(lark: _Lark, answer_format: AnswerFormat) -> str:
    match answer_format.kind:
        case "json_schema":
            lark.parts.append({"name": "answer", "json_schema": enforceable_json(json.loads(answer_format.text))})
        case "regex":
            lark.parts.append({"name": "answer", "lark_grammar": f"start: /{_in_slashes(answer_format.text)}/"})
        case "lark":
            lark.parts.append({"name": "answer", "lark_grammar": answer_format.text})
    return "@answer"


def enforceable_json(schema: Any) -> Any:
    """With our rule about whitespace; a schema may bring options of its own for llguidance, which are dropped."""
    schema = {} if schema is True else enforceable(schema)
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}} if isinstance(schema, dict) else schema


def _thoughts(lark: _Lark, thoughts: Thoughts) -> str:
    _until(lark, "thoughts", thoughts.end)
    lark.rules.append(r"gap: /\s{0,4}/")
    return "thoughts gap" if thoughts.open else f"({_written(thoughts.start)} thoughts gap)?"


def _until(lark: _Lark, name: str, marker: Marker) -> None:
    """A rule for any text up to the marker, which is part of it. What follows is then no more any text."""
    first = marker[0]
    if isinstance(first, int):
        lark.rules.extend([f"{name}: {name}_text {_written(marker)}", rf"{name}_text: /(?s:.*)/"])
    else:
        lark.rules.append(f"{name}[lazy]: /(?s:.*){_escaped(first)}/")


def _written(marker: Marker) -> str:
    return " ".join(f"<[{part}]>" if isinstance(part, int) else _literal(part) for part in marker)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_slashes(pattern: str) -> str:
    """Escapes what would end Lark's literal."""
    escapes = {"/": r"\/", "\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda found: escapes.get(found[0], found[0]), pattern, flags=re.DOTALL)


def _escaped(marker: str) -> str:
    return "".join(rf"\x{ord(character):02x}" if not character.isalnum() else character for character in marker)
