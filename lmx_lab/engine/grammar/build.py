"""Build llguidance grammars for answers: the requested format, forced or possible tool calls, and reasoning before.

Pure code. A grammar is a JSON list of Lark and JSON-schema grammars (llguidance's ``docs/syntax.md``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmx_lab.engine.grammar import json_lark
from lmx_lab.engine.grammar.gbnf import to_lark
from lmx_lab.engine.grammar.schemas import enforceable, portable
from lmx_lab.engine.requests import AnswerFormat, ToolUse
from lmx_lab.engine.text.tool_prompt import END, START
from lmx_lab.errors import InvalidRequestError

WHITESPACE = r"[ ]|\n[ ]{0,24}"
"""Allowed between the parts of JSON: one space, or one line break with indentation. With more whitespace allowed, a
model may never end its answer."""
ONE_LINE: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FLEXIBLE = json_lark.Spacing(
    comma=",",
    colon=":",
    preamble=f'%llguidance {{"ignore_once": true}}\n%ignore /{WHITESPACE}/',
    options={"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True},
    any_escape=True,
)
CALL_SPACING = replace(
    FLEXIBLE,
    comma=", ",
    colon=": ",
    preamble="",
    options={**ONE_LINE, "json_allow_general_unicode_escapes": True},
)
"""Calls are written as templates write them in the next turn, whose prompt then has the same tokens."""
FORCING = "%llguidance {}"
"""What the grammar determines is written in the tokens that the tokenizer gives for it."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""The model chooses the tokens of what the grammar determines. Otherwise, llguidance tokenizes all of it at each step,
which takes 10 ms for a constant of 20,000 characters."""
MAX_CALLS = 16
"""Maximum number of tool calls in a forced answer. Small models would add calls until they have no tokens left."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
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
) -> str:
    """Build the grammar in llguidance's format, for a requested format, for tools, or for both.

    Args:
        tools: Tools that may or must be called in the generic format; None if no grammar applies to calls.
        markers: Markers of the generic format, if they are special tokens.
    """
    lark = _Lark([], [])
    if answer_format is not None:
        match answer_format.kind:
            case "json_schema":
                schema = json.loads(answer_format.text)
                part = {
                    "json_schema": _enforceable(schema, "this format", "response_format", strict=answer_format.strict)
                }
            case "regex":
                # These characters would end a regular expression in Lark.
                escapes = {"/": r"\/", "\n": r"\n"}
                pattern = portable(answer_format.text)
                pattern = re.sub(r"\\.|/|\n", lambda it: escapes.get(it[0], it[0]), pattern, flags=re.DOTALL)
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
    lark.rules[:0] = [FORCING, f"start: {body}"]
    main = {"name": "main", "lark_grammar": "\n".join(lark.rules)}
    return json.dumps({"grammars": [main, *lark.parts]}, ensure_ascii=False)


def _enforceable(schema: Any, what: str, param: str, *, strict: bool) -> Any:
    """Return the schema as it is enforced.

    Raises:
        InvalidRequestError: it cannot be.
    """
    try:
        return enforceable(schema, strict=strict)
    except InvalidRequestError as exc:
        raise InvalidRequestError(f"{what} cannot be enforced: {exc.message}", param=param) from exc


def with_json_rules(grammar: str) -> str:
    """Return the grammar as the installed llguidance compiles it: parts that are JSON schemas are written in Lark."""
    whole = json.loads(grammar)
    for part in whole["grammars"]:
        if "json_schema" in part:
            schema, spacing = part.pop("json_schema"), FLEXIBLE if part["name"] == "answer" else CALL_SPACING
            if (lark := json_lark.to_lark(schema, spacing)) is not None:
                part["lark_grammar"] = lark
            else:
                part["json_schema"] = json_lark.with_options(schema, spacing)
    return json.dumps(whole, ensure_ascii=False)


def without_forcing(grammar: str) -> str:
    """Return the grammar with ``NO_FORCING``."""
    whole = json.loads(grammar)
    main = whole["grammars"][0]
    main["lark_grammar"] = main["lark_grammar"].replace(FORCING, NO_FORCING, 1)
    return json.dumps(whole, ensure_ascii=False)


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
            lark.rules.append(f'call_{at}: {json_lark.literal(begin)} @call_{at}_arguments "}}"')
            schema, what = {"type": "object", **tool.parameters}, f"the parameters of the tool {tool.name!r}"
            try:
                schema = _enforceable(schema, what, f"tools.{at}.function.parameters", strict=tool.strict)
            except InvalidRequestError:
                if tools.forced:
                    raise
                schema = dict(ANY_OBJECT)
            lark.parts.append({"name": f"call_{at}_arguments", "json_schema": schema})
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
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json_lark.literal(part) for part in marker)
