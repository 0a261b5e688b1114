"""Prepare JSON schemas for their translation to a grammar.

Generators of schemas write keywords that restrict nothing, and some that no grammar can enforce.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmx_lab.engine.grammar.json_lark import ALL_KEYWORDS, COMBINING, LOWER, UPPER, UntranslatableError, are_disjoint

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
COMBINING_KEYS = ("anyOf", "oneOf", "$ref", "$dynamicRef")
OPEN_KEYS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "propertyNames")
"""With one of these keys, a schema defines itself which other properties an object has, or requires more than the
named ones."""

TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
CLOCK = "(?:{n}H(?:{n}M(?:{n}S)?)?|{n}M(?:{n}S)?|{n}S)".replace("{n}", "[0-9]{1,4}")
DAYS = "(?:{n}Y(?:{n}M(?:{n}D)?)?|{n}M(?:{n}D)?|{n}D)".replace("{n}", "[0-9]{1,4}")
HOST = "[A-Za-z0-9]{1,40}(?:[.-][A-Za-z0-9]{1,40}){0,6}"
PATH = "[A-Za-z0-9._~!$&'()*+,;=:@/?-]{0,300}"
FORMATS: Mapping[str, str] = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P(?:{DAYS}(?:T{CLOCK})?|T{CLOCK}|[0-9]{{1,4}}W)",
    "email": r"[A-Za-z0-9_+-]{1,30}(?:\.[A-Za-z0-9_+-]{1,30}){0,3}@(?:[A-Za-z0-9]{1,30}\.){1,3}[A-Za-z]{2,10}",
    "uri": f"(?:[a-z][a-z0-9+.-]{{0,14}}://{HOST}(?::[1-9][0-9]{{0,3}})?(?:[/?]{PATH})?|(?:mailto|urn|file):{PATH})",
}
"""Patterns of the formats that llguidance does not know, or whose length it does not limit."""
OTHER_NAMES = {"iri": "uri", "uri-reference": "uri", "iri-reference": "uri", "idn-email": "email"}
KNOWN_FORMATS = ("hostname", "ipv4", "ipv6", "uuid")
"""Formats that llguidance enforces. Those without an entry in ``FORMATS`` or ``INTEGERS`` are annotations."""
PATTERN_LENGTH = 64
"""Largest length of a number or time with a pattern, or of a text with one of these formats and a pattern."""
INTEGERS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
"""Bounds of the formats of integers."""

ANY: tuple[Any, ...] = (True, {})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minProperties": (0,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "patternProperties": ({},),
    "propertyNames": (*ANY, {"type": "string"}),
    "unevaluatedItems": ANY,
    "unevaluatedProperties": ANY,
    "not": (False,),
    "allOf": ([],),
}
"""Values of keywords that restrict nothing."""
UNENFORCEABLE = (
    *("uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords that a grammar cannot enforce."""
UNENFORCEABLE_PATTERN = re.compile(r"\(\?(?:<?[=!]|[>#])|\\[1-9bBGhkKQERX]")
"""What a pattern cannot contain, such as look-around, boundaries of words and references to groups."""
PATTERN_PART = re.compile(
    r"\\c[A-Za-z]|\\[pPux]\{[^}]*\}|\\.|\[\^?(?:\\.|[^\]\\])*\]|\{,(?=[0-9]+\})|\{(?![0-9]+(?:,[0-9]*)?\})", re.DOTALL
)
"""Matches the parts of a pattern that mean something else, or nothing, in the regular expressions of llguidance."""
SAME_PARTS: Mapping[str, str] = {
    **{r"\A": "^", r"\Z": "$", r"\z": "$"},
    **{r"\<": "<", r"\>": ">", r"\0": r"\x00"},
    **{"{,": "{0,", "{": r"\{"},
}
LARGEST = 1e40
"""Bounds of numbers above it, such as the largest float64, exclude no number that an answer contains."""
SMALLEST = 1e-12
"""Smallest number above 0 that an answer contains."""
NUMERIC = re.compile(r"(?:[-^$()?:|0-9\[\]+*{},eE]|\\[d.])*")
"""Matches patterns of numbers and times."""
REPLACEMENTS: Mapping[str, str] = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": FORMATS[
        "email"
    ],
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": FORMATS[
        "duration"
    ],
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"[+-]?[0-9]{1,18}(?:\.[0-9]{1,12})?",
}
"""Patterns with look-around that Zod and Pydantic write, and patterns without it whose texts they match."""


def enforceable(schema: Any, *, strict: bool) -> Any:
    """Return the schema as it is enforced.

    Args:
        strict: Whether to keep keywords that cannot be enforced, so that the schema is refused.
    """
    normal = _rewrite(schema, _normalize)
    return close_objects(normal if strict else _rewrite(normal, lambda part: _relax(part, normal, [])))


def unenforced(schema: Any) -> list[str]:
    """Return the keywords that are left out of a schema that need not be enforced as a whole."""
    normal, names = _rewrite(schema, _normalize), list[str]()
    _rewrite(normal, lambda part: _relax(part, normal, names))
    return list(dict.fromkeys(names))


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
    if is_combined:
        return schema
    return _rewrite(schema, lambda part: {**part, "additionalProperties": False} if _can_be_closed(part) else part)


def _rewrite(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Change the schema and all schemas in it, the inner ones first."""
    if not isinstance(schema, dict):
        return schema
    rewritten = dict(schema)
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            rewritten[key] = {name: _rewrite(part, change) for name, part in value.items()}
        elif key in (*SCHEMA_LISTS, "items") and isinstance(value, list):
            rewritten[key] = [_rewrite(part, change) for part in value]
        elif key in SINGLE_SCHEMAS:
            rewritten[key] = _rewrite(value, change)
    return change(rewritten)


def _normalize(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove what restricts nothing, and write older keywords in their present form."""
    kept = {
        key: value
        for key, value in schema.items()
        if (value is not None or key not in ALL_KEYWORDS or key == "const")
        and not any(_restricting(value) == neutral for neutral in NEUTRAL.get(key, ()))
    }
    if isinstance(kept.get("items"), list):
        kept |= {"prefixItems": kept["items"], "items": kept.pop("additionalItems", True)}
    for key, other in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(kept.get(key), bool) and kept.pop(key) and other in kept:
            kept[key] = kept.pop(other)
    if "contains" not in kept:
        kept = {key: value for key, value in kept.items() if key not in ("minContains", "maxContains")}
    elif "maxContains" not in kept and _restricting(kept["contains"]) in ANY:
        count = kept.pop("minContains", 1)
        del kept["contains"]
        kept["minItems"] = max(count, kept.get("minItems", 0))
    if "if" not in kept or not {"then", "else"} & kept.keys():
        kept = {key: value for key, value in kept.items() if key not in ("if", "then", "else")}
    for key, closing in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if kept.get(key) is False and not COMBINING & kept.keys():
            kept.setdefault(closing, kept.pop(key))
    if isinstance(named := kept.get("patternProperties"), dict):
        kept["patternProperties"] = {_portable(pattern): value for pattern, value in named.items()}
    if not isinstance(kept.get("format", ""), str):
        del kept["format"]
    return _normalize_text(_normalize_bounds(_named_properties(kept)))


def _normalize_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove bounds that no number of an answer reaches."""
    kept = dict(schema)
    for key in LOWER | UPPER:
        bound = schema.get(key)
        if not isinstance(bound, int | float):
            continue
        if (bound if key in UPPER else -bound) >= LARGEST:
            del kept[key]
        elif key in LOWER and 0 < bound < SMALLEST:
            kept |= {"exclusiveMinimum": 0}
            kept.pop("minimum", None)
    return kept


def _named_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Write names of properties that are listed, or have a pattern, as other keywords that can be enforced."""
    names, kept = schema.get("propertyNames"), dict(schema)
    if not isinstance(names, dict) or {"properties", "patternProperties"} & schema.keys():
        return schema
    others = schema.get("additionalProperties", True)
    listed, pattern = names.get("enum", [names["const"]] if "const" in names else None), names.get("pattern")
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        kept["properties"] = dict.fromkeys(listed, others)
    elif isinstance(pattern, str) and names.keys() & ALL_KEYWORDS <= {"type", "pattern"} and not schema.get("required"):
        kept["patternProperties"] = {pattern: others}
    else:
        return schema
    del kept["propertyNames"]
    return {**kept, "additionalProperties": False}


def _restricting(value: Any) -> Any:
    """Return a keyword's value without annotations, if it is a schema."""
    if isinstance(value, dict) and value:
        return {key: part for key, part in value.items() if key in ALL_KEYWORDS} if "type" in value else value
    return value


def _normalize_text(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a format by a pattern or bounds, and limit the length. A format that is not known is an annotation."""
    kept, pattern = dict(schema), schema.get("pattern")
    name: str = OTHER_NAMES.get(schema.get("format", ""), schema.get("format", ""))
    if name and (name not in KNOWN_FORMATS or pattern is not None):
        del kept["format"]
    if isinstance(pattern, str) and (name in FORMATS or NUMERIC.fullmatch(pattern) or pattern in REPLACEMENTS):
        kept.setdefault("maxLength", PATTERN_LENGTH)
        kept["pattern"] = f"^{REPLACEMENTS[pattern]}$" if pattern in REPLACEMENTS else _portable(pattern)
    elif isinstance(pattern, str):
        kept["pattern"] = _portable(pattern)
    elif name in FORMATS and pattern is None:
        kept["pattern"] = f"^{FORMATS[name]}$"
    types = kept.get("type")
    if name in INTEGERS and (types == "integer" or (isinstance(types, list) and "integer" in types)):
        low, high = INTEGERS[name]
        kept |= {} if LOWER & kept.keys() else {"minimum": low}
        kept |= {} if UPPER & kept.keys() else {"maximum": high}
    return kept


def _portable(pattern: str) -> str:
    """Return a pattern of JavaScript or Python as one of llguidance with the same meaning."""

    def portable(found: re.Match[str]) -> str:
        part = found[0]
        if part[0] == "[" and not part.startswith(("[:", "[^:"), 1):
            # In llguidance, a class may contain classes, and the operators && and ~~ of sets.
            return part[0] + re.sub(r"\\.|[\[&~]", lambda it: it[0] if len(it[0]) > 1 else f"\\{it[0]}", part[1:])
        if part[:2] == r"\c" and len(part) == 3:
            return rf"\x{ord(part[2]) % 32:02x}"
        return SAME_PARTS.get(part, part)

    return PATTERN_PART.sub(portable, pattern)


def _relax(schema: dict[str, Any], root: Any, names: list[str]) -> dict[str, Any]:
    """Remove keywords that cannot be enforced, and add them to ``names``."""
    kept = {key: value for key, value in schema.items() if key not in UNENFORCEABLE}
    removed = [key for key in schema if key not in kept]
    if "contains" in schema and schema.get("minContains", 1) != 0:
        kept["minItems"] = max(1, kept.get("minItems", 0))
    if isinstance(pattern := kept.get("pattern"), str) and UNENFORCEABLE_PATTERN.search(pattern.replace(r"\\", "")):
        removed.append("pattern")
        del kept["pattern"]
    if isinstance(options := kept.get("oneOf"), list) and "anyOf" not in kept and not _is_choice(options, root):
        removed.append("oneOf")
        kept["anyOf"] = kept.pop("oneOf")
    named, required = kept.get("properties"), kept.get("required", [])
    if isinstance(named, dict) and any(name not in required for name in named):
        for key in ("minProperties", "maxProperties"):
            if key in kept:
                removed.append(key)
                del kept[key]
    names.extend(removed)
    return kept


def _is_choice(options: list[Any], root: Any) -> bool:
    try:
        return are_disjoint(options, root)
    except UntranslatableError:
        return False


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
