"""Build llguidance grammars for answers: the requested format, forced or possible tool calls, and reasoning before.

Pure code. A grammar is a JSON list of Lark and JSON-schema grammars (llguidance's ``docs/syntax.md``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmx_lab.engine.grammar.gbnf import to_lark
from lmx_lab.engine.requests import AnswerFormat, ToolUse
from lmx_lab.engine.text.tool_prompt import END, START

WHITESPACE = r"[ ]|\n[ ]{0,24}"
"""Allowed between the parts of JSON: one space, or one line break with indentation. With more whitespace allowed, a
model may never end its answer."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""Disables fast-forward tokens. llguidance would compute at each step how much of the answer is already determined,
which takes seconds for some grammars, and the result is not used here."""
MAX_CALLS = 16
"""Maximum number of tool calls in a forced answer. Small models would add calls until they have no tokens left."""
Marker = tuple[int | str, ...]
"""A marker as special tokens and texts, or as one text."""


@dataclass(frozen=True, kw_only=True)
class ReasoningSection:
    """The reasoning before the answer itself."""

    start: Marker
    end: Marker
    open: bool
    """Whether the prompt has already opened it. If not, the model may begin it."""


@dataclass(frozen=True)
class _Lark:
    rules: list[str]
    parts: list[dict[str, Any]]
    """Grammars that the rules refer to by name."""


def build_grammar(
    answer_format: AnswerFormat | None,
    tools: ToolUse | None,
    reasoning: ReasoningSection | None,
    *,
    markers: Mapping[str, Marker],
) -> str | None:
    """Build the grammar in llguidance's format; None if any text is allowed.

    Args:
        tools: Tools that may or must be called in the generic format; None if no grammar applies to calls.
        markers: Markers of the generic format, if they are special tokens.
    """
    if answer_format is None and tools is None:
        return None
    lark = _Lark([], [])
    if answer_format is not None:
        match answer_format.kind:
            case "json_schema":
                part = {"json_schema": enforceable_json(json.loads(answer_format.text))}
            case "regex":
                # These characters would end a regular expression in Lark.
                escapes = {"/": r"\/", "\n": r"\n"}
                pattern = re.sub(r"\\.|/|\n", lambda it: escapes.get(it[0], it[0]), answer_format.text, flags=re.DOTALL)
                part = {"lark_grammar": f"start: /{pattern}/"}
            case "lark":
                part = {"lark_grammar": answer_format.text}
            case "gbnf":
                part = {"lark_grammar": to_lark(answer_format.text)}
        lark.parts.append({"name": "answer", **part})
    body = "@answer" if tools is None else _body_with_calls(lark, tools, markers, formatted=answer_format is not None)
    if reasoning is not None:
        _add_until(lark, "reasoning", reasoning.end)
        lark.rules.append(r"gap: /\s{0,4}/")
        section = "reasoning gap" if reasoning.open else f"({_marker_rule(reasoning.start)} reasoning gap)?"
        body = f"{section} {body}"
    lark.rules[:0] = [NO_FORCING, f"start: {body}"]
    main = {"name": "main", "lark_grammar": "\n".join(lark.rules)}
    return json.dumps({"grammars": [main, *lark.parts]}, ensure_ascii=False)


def as_grammar(part: Mapping[str, Any]) -> str:
    """Wrap one part of a grammar as a separate grammar."""
    main = {"name": "main", "lark_grammar": f"{NO_FORCING}\nstart: @{part['name']}"}
    return json.dumps({"grammars": [main, part]}, ensure_ascii=False)


def _body_with_calls(lark: _Lark, tools: ToolUse, markers: Mapping[str, Marker], *, formatted: bool) -> str:
    """Add a rule for each tool that may be called, and return the body of an answer that calls them.

    Args:
        formatted: Whether an answer without calls has the requested format. If not, it is any text.
    """
    start, end = (markers.get(marker, (marker,)) for marker in (START, END))
    names = []
    for at, tool in enumerate(tools.tools):
        if tools.only in (None, tool.name):
            names.append(f"call_{at}")
            begin = f'{{"name": {json.dumps(tool.name)}, "arguments": '
            lark.rules.append(f'call_{at}: {_literal(begin)} @call_{at}_arguments "}}"')
            lark.parts.append(
                {"name": f"call_{at}_arguments", "json_schema": enforceable_json({"type": "object", **tool.parameters})}
            )
    lark.rules.append(f'call: "\\n" ({" | ".join(names)}) "\\n" {_marker_rule(end)}')
    once = tools.only is not None or not tools.parallel
    if not formatted and not tools.forced:
        _add_until(lark, "words", start)
        lark.rules.append(r"text: /(?s:.*)/")
        return "(words call | text)" if once else "(words call)* text"
    more = "" if once else f' ("\\n" {_marker_rule(start)} call){{0,{MAX_CALLS - 1}}}'
    calls = f"{_marker_rule(start)} call{more}"
    return calls if not formatted or tools.forced else f"({calls} | @answer)"


def _add_until(lark: _Lark, name: str, marker: Marker) -> None:
    """Add a rule for any text up to and including the marker. What follows the rule is then not arbitrary text."""
    first = marker[0]
    if isinstance(first, int):
        lark.rules.extend([f"{name}: {name}_text {_marker_rule(marker)}", rf"{name}_text: /(?s:.*)/"])
    else:
        escaped = "".join(character if character.isalnum() else rf"\x{ord(character):02x}" for character in first)
        lark.rules.append(f"{name}[lazy]: /(?s:.*){escaped}/")


def _marker_rule(marker: Marker) -> str:
    return " ".join(f"<[{part}]>" if isinstance(part, int) else _literal(part) for part in marker)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# JSON schemas

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
COMBINING_KEYS = ("anyOf", "oneOf", "$ref", "$dynamicRef")
OPEN_KEYS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "propertyNames")
"""With one of these keys, a schema defines itself which other properties an object has, or requires more than the
named ones."""
IGNORED_FORMATS = ("password", "binary", "byte", "path", "file-path", "directory-path")
"""Values of ``format`` that do not restrict the text; pydantic writes them for secrets, bytes and paths."""


def enforceable_json(schema: Any) -> Any:
    """Return the schema as it is enforced, with our rule for whitespace.

    The schema's own options for llguidance are replaced.
    """
    schema = {} if schema is True else close_objects(schema)
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}} if isinstance(schema, dict) else schema


def close_objects(schema: Any) -> Any:
    """Allow no properties except the named ones in objects, unless the schema specifies otherwise.

    Every answer that satisfies the result satisfies the given schema. With open objects, small models add properties
    until they have no tokens left; other local servers close objects too. A schema with combined parts is returned
    unchanged, because closed parts could exclude each other.
    """
    is_combined = any(
        "allOf" in part or ("properties" in part and any(key in part for key in COMBINING_KEYS))
        for part in _subschemas(schema)
    )
    return _rewrite(schema, close=not is_combined)


def _rewrite(schema: Any, *, close: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    rewritten = dict(schema)
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            rewritten[key] = {name: _rewrite(part, close=close) for name, part in value.items()}
        elif key in SCHEMA_LISTS and isinstance(value, list):
            rewritten[key] = [_rewrite(part, close=close) for part in value]
        elif key in SINGLE_SCHEMAS:
            rewritten[key] = _rewrite(value, close=close)
    if rewritten.get("format") in IGNORED_FORMATS:
        del rewritten["format"]
    if close and _can_be_closed(schema):
        rewritten["additionalProperties"] = False
    return rewritten


def _can_be_closed(schema: dict[str, Any]) -> bool:
    """Whether objects of this schema need no properties except the named ones."""
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or any(key in schema for key in OPEN_KEYS):
        return False
    return isinstance(required, list) and all(isinstance(name, str) and name in named for name in required)


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Iterate over the schema and all schemas in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for key, value in part.items():
            if key in SCHEMAS_BY_NAME and isinstance(value, dict):
                waiting.extend(value.values())
            elif key in SCHEMA_LISTS and isinstance(value, list):
                waiting.extend(value)
            elif key in SINGLE_SCHEMAS:
                waiting.append(value)
