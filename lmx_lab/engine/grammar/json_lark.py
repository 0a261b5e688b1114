"""Write JSON schemas as grammars in llguidance's variant of Lark.

llguidance's own compiler for schemas allows only some escapes in strings, so a model that begins another one is forced
to write a wrong character. It rounds the bounds of integers to 53 bits, and does not limit the number of digits. The
grammars of this module allow all escapes, have exact bounds and limit the digits. Parts of a schema that this module
does not translate are left to llguidance, as ``%json``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""The keywords that are translated, by the type that they restrict."""
OTHER_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset({"pattern", "format"}),
    "number": frozenset({"multipleOf"}),
    "array": frozenset({"contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"}),
    "object": frozenset(
        {"patternProperties", "minProperties", "maxProperties", "propertyNames", "unevaluatedProperties"}
        | {"dependentRequired", "dependentSchemas", "dependencies"}
    ),
}
"""The keywords that are not translated, by the type that they restrict."""
LOWER, UPPER = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
COMBINING = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "const", "enum"})
ALL_KEYWORDS = COMBINING.union({"type"}, *KEYWORDS.values(), *OTHER_KEYWORDS.values())
"""All other members of a schema are annotations."""

CHARACTER = (
    r'[^"\\\x00-\x1f\x7f]|\\["\\\/bfnrt]|\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""A character in a string: itself, or an escape. Two surrogates are one character."""
INTEGER_DIGITS, FRACTION_DIGITS = 19, 12
"""Largest number of digits without a bound in the schema. Without a limit, small models write digits until they have no
tokens left."""
MAX_OPTIONS = 1000
"""Number of values above which an ``enum`` is one pattern, because llama.cpp allows 2,000 rules at a time. Tokens are
rarely forced in such a pattern."""
MAX_COMPARED = 64
"""Largest number of options that are compared in pairs; 2,000 take 0.8 s."""
NO_CONTROL = r"^[^\x00-\x1f\x7f]*$"
"""Added to patterns, because llguidance allows the escapes of control characters only up to U+001F in them."""


class UntranslatableError(ValueError):
    """The schema has a reference that is valid only in the whole schema."""


@dataclass(frozen=True, kw_only=True)
class Spacing:
    """The whitespace between the parts of JSON."""

    comma: str
    colon: str
    preamble: str
    """The beginning of the grammar."""
    options: Mapping[str, Any]
    """llguidance's options with the same meaning."""
    any_escape: bool
    """Whether llguidance allows all escapes in strings with these options."""


def to_lark(schema: Any, spacing: Spacing) -> str | None:
    """Return the grammar of a schema; None if llguidance can only compile it as a whole."""
    translation = _Translation(schema, spacing)
    try:
        start = translation.value(schema)
    except (UntranslatableError, RecursionError):
        return None
    head = [f"comma: {literal(spacing.comma)}", f"colon: {literal(spacing.colon)}", f"start: {start}"]
    return "\n".join(filter(None, [spacing.preamble, *head, *translation.rules]))


class _Translation:
    def __init__(self, root: Any, spacing: Spacing) -> None:
        self._root = root
        self._spacing = spacing
        self._names: dict[str, str] = {}
        """Names of the rules, by their text or reference."""
        self.rules: list[str] = []

    def value(self, schema: Any) -> str:
        """Return the expression of a schema."""
        if schema is True or (isinstance(schema, dict) and not ALL_KEYWORDS & schema.keys()):
            if "any" not in self._names:
                self._names["any"] = "any"
                text, number = self.value({"type": "string"}), self.value({"type": "number"})
                lists, objects = self.value({"type": "array"}), self.value({"type": "object"})
                self.rules.append(f'any: "null" | "true" | "false" | {number} | {text} | {lists} | {objects}')
            return "any"
        if not isinstance(schema, dict):
            return self._leaf(schema)
        keys, types = ALL_KEYWORDS & schema.keys(), _types(schema)
        options: list[str] = []
        if keys == {"$ref"}:
            reference = f"$ref {schema['$ref']}"
            if reference not in self._names:
                self._names[reference] = name = f"r{len(self._names)}"
                self.rules.append(f"{name}: {self.value(find(schema['$ref'], self._root))}")
            options = [self._names[reference]]
        elif keys in ({"anyOf"}, {"oneOf"}, {"allOf"}):
            ((key, given),) = ((key, schema[key]) for key in keys)
            # All parts of an allOf with several apply; they are left to llguidance.
            is_choice = isinstance(given, list) and (
                len(given) == 1 if key == "allOf" else key == "anyOf" or are_disjoint(given, self._root)
            )
            options = [self.value(option) for option in given if option is not False] if is_choice else []
        elif keys <= {"const", "enum", "type"} and len(keys & {"const", "enum"}) == 1 and types is not None:
            values = [schema["const"]] if "const" in keys else schema["enum"]
            if isinstance(values, list):
                values = [value for value in values if not types or _types_of(value) & set(types)]
                if len(values) > MAX_OPTIONS and not any(isinstance(value, list | dict) for value in values):
                    texts = (_escaped(json.dumps(value, ensure_ascii=False)) for value in values)
                    options = [self._rule(f"/{'|'.join(texts)}/")]
                else:
                    options = [self._constant(value) for value in values]
        elif types and not keys & COMBINING:
            options = [self._typed(kind, schema) for kind in types]
        if not options:
            return self._leaf(schema)
        return options[0] if len(options) == 1 else self._rule(" | ".join(options))

    def _typed(self, kind: str, schema: dict[str, Any]) -> str:
        """Return the expression of the values of one type."""
        numeric = "number" if kind == "integer" else kind
        expression = None
        if others := OTHER_KEYWORDS.get(numeric, frozenset()) & schema.keys():
            schema = {key: value for key, value in schema.items() if key in KEYWORDS[kind] | others}
        elif kind == "string":
            low, high = schema.get("minLength", 0), schema.get("maxLength")
            if _is_count(low) and (high is None or (_is_count(high) and low <= high)):
                characters = _repeated(f"(?:{CHARACTER})", int(low), None if high is None else int(high))
                expression = self._rule(f'/"{characters}"/')
        elif numeric == "number":
            pattern = number_pattern(schema, whole=kind == "integer")
            expression = None if pattern is None else self._rule(f"/{pattern}/")
        elif kind == "array":
            expression = self._array(schema)
        elif kind == "object":
            expression = self._object(schema)
        else:
            expression = '"null"' if kind == "null" else '("true" | "false")'
        return self._leaf({**schema, "type": kind}) if expression is None else expression

    def _array(self, schema: dict[str, Any]) -> str:
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if not (isinstance(first, list) and _is_count(low) and (high is None or _is_count(high))):
            return self._leaf(schema)
        first = first if high is None else first[: int(high)]
        left = None if high is None else int(high) - len(first)
        needed = max(0, int(low) - len(first))
        if (items is False and needed) or (left is not None and left < needed):
            return self._leaf(schema)
        tail = ""
        if items is not False and left != 0:
            item = self.value(items)
            if first:
                tail = _repeated(f"(comma {item})", needed, left)
            else:
                rest = None if left is None else left - 1
                tail = f"{item} {_repeated(f'(comma {item})', max(0, needed - 1), rest)}"
                tail = tail if needed else f"({tail})?"
        for at in reversed(range(len(first))):
            tail = f"{'comma ' if at else ''}{self.value(first[at])} {tail}"
            tail = tail if at < low else f"({tail})?"
        return self._rule(f'"[" {tail} "]"')

    def _object(self, schema: dict[str, Any]) -> str:
        named, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not (isinstance(named, dict) and isinstance(required, list)):
            return self._leaf(schema)
        if any(not isinstance(name, str) or named.get(name, others) is False for name in required):
            return self._leaf(schema)
        parts = {**named, **{name: others for name in required if name not in named}}
        known = {name: part for name, part in parts.items() if part is not False}
        # Written from the end: what follows a property, and what follows if there is no property yet.
        after, begin = "", ""
        if others is not False:
            key = self._rule(rf'/"(?:{CHARACTER})*"/')
            if parts:
                taken = "|".join(_escaped(json.dumps(name, ensure_ascii=False)) for name in parts)
                # Without escapes, so that no name can be written in two ways.
                key = self._rule(rf'/"[^"\\\x00-\x1f\x7f]*"/ & ~/{taken}/')
            pair = self._rule(f"{key} colon {self.value(others)}")
            after, begin = f"(comma {pair})*", f"({pair} (comma {pair})*)?"
        for name, part in reversed(known.items()):
            item = f"{literal(json.dumps(name, ensure_ascii=False))} colon {self.value(part)}"
            if name in required:
                after, begin = f"comma {item} {after}", f"{item} {after}"
                continue
            item = self._rule(item)
            after = self._rule(after) if after else ""
            begin = self._rule(f"{item} {after} | {begin}" if begin else f"({item} {after})?")
            after = f"(comma {item})? {after}"
        return self._rule(f'"{{" {begin} "}}"')

    def _constant(self, value: Any) -> str:
        if isinstance(value, list):
            return self._array(
                {"prefixItems": [{"const": item} for item in value], "items": False, "minItems": len(value)}
            )
        if isinstance(value, dict):
            named = {name: {"const": part} for name, part in value.items()}
            return self._object({"properties": named, "required": [*value], "additionalProperties": False})
        return literal(json.dumps(value, ensure_ascii=False))

    def _leaf(self, schema: Any) -> str:
        """Leave a part of the schema to llguidance."""
        text = json.dumps(schema)
        if '"$ref"' in text:
            if '"$ref": "#"' in text or text.count('"$ref"') != text.count('"$ref": "#/$defs/') + text.count(
                '"$ref": "#/definitions/'
            ):
                raise UntranslatableError
            root = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            schema = {**schema, **root}
        return self._rule(f"%json {json.dumps(with_options(schema, self._spacing))}")

    def _rule(self, text: str) -> str:
        if (name := self._names.get(text)) is None:
            letter = "T" if text.startswith("/") else "v"
            name = self._names[text] = f"{letter}{len(self._names)}"
            self.rules.append(f"{name}: {text}")
        return name


def _escaped(text: str) -> str:
    """Return the regular expression of a text."""
    return re.sub("[^A-Za-z0-9]", lambda found: f"\\u{{{ord(found[0]):x}}}", text)


def find(reference: Any, root: Any) -> Any:
    """Return the schema to which a reference refers.

    Raises:
        UntranslatableError: it is not the path of a part of ``root``.
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")) or "%" in reference:
        raise UntranslatableError
    found = root
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise UntranslatableError
        found = found[name]
    return found


def are_disjoint(options: Sequence[Any], root: Any) -> bool:
    """Whether no value can match two of the options, because of their types or of a property that both require."""
    marks = [_mark(option, root) for option in options]
    for name in marks[0][1] if marks else ():
        values = [required.get(name, set()) for _, required in marks]
        if all(values) and len(set().union(*values)) == sum(map(len, values)):
            return True
    return len(marks) <= MAX_COMPARED and all(
        kinds.isdisjoint(others)
        or any(values.isdisjoint(other_values.get(name, values)) for name, values in required.items())
        for at, (kinds, required) in enumerate(marks)
        for others, other_values in marks[at + 1 :]
    )


def _mark(option: Any, root: Any) -> tuple[set[str], dict[str, set[str]]]:
    """Return the types of an option, and the possible values of the properties that it requires."""
    for _ in range(8):
        if isinstance(option, dict) and ALL_KEYWORDS & option.keys() == {"$ref"}:
            try:
                option = find(option["$ref"], root)
            except UntranslatableError:
                return set(KEYWORDS), {}
    types = _types(option) if isinstance(option, dict) else None
    if not types:
        return set(KEYWORDS), {}
    named, required = option.get("properties"), option.get("required")
    values: dict[str, set[str]] = {}
    for name in required if isinstance(named, dict) and isinstance(required, list) else ():
        part = named.get(name) if isinstance(name, str) else None
        if isinstance(part, dict) and ("const" in part or isinstance(part.get("enum"), list)):
            values[name] = {json.dumps(value) for value in ([part["const"]] if "const" in part else part["enum"])}
    return {"integer" if kind == "number" else kind for kind in types}, values


def with_options(schema: Any, spacing: Spacing) -> Any:
    """Return a schema with llguidance's options for this whitespace, in which no unsupported escape can begin."""
    if not isinstance(schema, dict):
        return schema
    return {**_without_control(schema, plain=not spacing.any_escape), "x-guidance": dict(spacing.options)}


def _without_control(schema: Any, *, plain: bool) -> Any:
    """Exclude control characters from strings with a pattern; with ``plain``, from all strings."""
    if isinstance(schema, list):
        return [_without_control(part, plain=plain) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {
        key: value if key in ("const", "enum", "required") else _without_control(value, plain=plain)
        for key, value in schema.items()
    }
    is_text = "string" in (_types(schema) or ()) and not COMBINING & schema.keys()
    if is_text and ("pattern" in schema or (plain and "format" not in schema)):
        changed["allOf"] = [{"pattern": NO_CONTROL}]
    return changed


def number_pattern(schema: Mapping[str, Any], *, whole: bool) -> str | None:
    """Return the regular expression of the numbers between the bounds of a schema; None if llguidance has to
    enforce the bounds."""
    given = {key: schema[key] for key in KEYWORDS["number"] & schema.keys()}
    if any(not _is_number(bound) or not (whole or bound == int(bound)) for bound in given.values()):
        return None
    if not given and not whole:
        digits = rf"(?:0|[1-9][0-9]{{0,{INTEGER_DIGITS - 1}}})"
        return rf"-?{digits}(?:\.[0-9]{{1,{FRACTION_DIGITS}}})?(?:[eE][-+]?[0-9]{{1,2}})?"
    # Each bound is an integer, with whether it is excluded. The stricter one of two counts.
    lows = [(math.ceil(value), key != "minimum" and value % 1 == 0) for key, value in given.items() if key in LOWER]
    highs = [(-math.floor(value), key != "maximum" and value % 1 == 0) for key, value in given.items() if key in UPPER]
    limit = 10**INTEGER_DIGITS - 1
    least = max(lows) if lows else (min(-limit, -max(highs)[0] - 1 if highs else 0), False)
    most = (-max(highs)[0], max(highs)[1]) if highs else (max(limit, least[0] + 1), False)
    if whole:
        first, last = least[0] + least[1], most[0] - most[1]
        return integer_pattern(first, last) if first <= last else None
    if least[0] >= most[0]:
        return None
    parts = []
    if most[0] > 0:
        start = least if least[0] >= 0 else (0, False)
        parts.append(_decimals(start, most))
    elif most == (0, False):
        parts.append("0")
    if least[0] < 0:
        end = most if most[0] <= 0 else (0, True)
        parts.append(f"-(?:{_decimals((-end[0], end[1]), (-least[0], least[1]))})")
    return "|".join(parts)


def _decimals(low: tuple[int, bool], high: tuple[int, bool]) -> str:
    """Return the regular expression of the numbers without a sign between two bounds. Each bound may be excluded."""
    parts = []
    fraction = rf"\.[0-9]{{1,{FRACTION_DIGITS}}}"
    parts.append(rf"{low[0]}\.[0-9]{{0,{FRACTION_DIGITS - 1}}}[1-9]" if low[1] else f"{low[0]}(?:{fraction})?")
    if low[0] + 1 < high[0]:
        parts.append(f"(?:{integer_pattern(low[0] + 1, high[0] - 1)})(?:{fraction})?")
    if not high[1]:
        parts.append(rf"{high[0]}(?:\.0)?")
    return "|".join(parts)


def integer_pattern(low: int, high: int) -> str:
    """Return the regular expression of the integers from ``low`` to ``high``."""
    parts = []
    if low < 0:
        parts.append(f"-(?:{_naturals(max(1, -high), -low)})")
    if high >= 0:
        parts.append(_naturals(max(0, low), high))
    return "|".join(parts)


def _naturals(low: int, high: int) -> str:
    shortest, longest = len(str(low)), len(str(high))
    return "|".join(
        _same_length(
            str(low) if size == shortest else str(10 ** (size - 1)), str(high) if size == longest else "9" * size
        )
        for size in range(shortest, longest + 1)
    )


def _same_length(low: str, high: str) -> str:
    """Return the regular expression of the digits from ``low`` to ``high``, which have the same length."""
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"[{low[0]}-{high[0]}]" + (f"[0-9]{{{rest}}}" if rest else "")
    if low[0] == high[0]:
        return f"{low[0]}(?:{_same_length(low[1:], high[1:])})"
    first, last = int(low[0]) + 1, int(high[0]) - 1
    parts = [f"{low[0]}(?:{_same_length(low[1:], '9' * rest)})"]
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{rest}}}")
    return "|".join([*parts, f"{high[0]}(?:{_same_length('0' * rest, high[1:])})"])


def _types(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the types of a schema: an empty list if it names none, None if they are invalid."""
    given = schema.get("type")
    if given is None:
        return [kind for kind in ("array", "object") if KEYWORDS[kind] & schema.keys()][:1]
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not types or any(kind not in KEYWORDS for kind in types):
        return None
    return types


def _types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"number", "integer"} if value == int(value) else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and int(value) == value


def _repeated(text: str, low: int, high: int | None) -> str:
    if high is None:
        return f"{text}*" if low == 0 else f"{text}{{{low},}}"
    return f"{text}{{{low},{high}}}" if high else ""


def literal(text: str) -> str:
    """Return a text as Lark and JSON write it. Lark's strings cannot contain U+007F itself."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
