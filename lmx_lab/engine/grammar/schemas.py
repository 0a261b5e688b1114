"""Prepare JSON schemas for their translation to a grammar.

Generators of schemas write keywords that restrict nothing, and some that no grammar can enforce.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from lmx_lab.engine.grammar.json_lark import (
    ALL_KEYWORDS,
    COMBINING,
    LOWER,
    UPPER,
    UntranslatableError,
    are_disjoint,
    find,
)
from lmx_lab.errors import InvalidRequestError

DEFINITIONS = ("$defs", "definitions")
SCHEMAS_BY_NAME = (*DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
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
SHORTEST: Mapping[str, int] = {
    **{"date": 10, "time": 9, "date-time": 20, "duration": 3, "email": 6, "uri": 4},
    **{"hostname": 1, "ipv4": 7, "ipv6": 2, "uuid": 36},
}
"""Smallest length of a text with each format."""
LEAST_LENGTH = 16
"""Largest ``minLength`` that is enforced beside a pattern or a format. With a larger one, llguidance often cannot
determine whether any text is long enough."""
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
    *("$dynamicRef", "$recursiveRef"),
)
"""Keywords that a grammar cannot enforce."""
REFUSED_BY_LLGUIDANCE = (*SCHEMAS_BY_NAME, *SCHEMA_LISTS, "minLength", "pattern")
"""Keywords that llguidance refuses if it cannot enforce their values."""
UNENFORCEABLE_PATTERN = re.compile(r"\(\?(?:<?[=!]|[>#])|\\[1-9BCE-OQRTUVXYabeg-moqy]")
"""What a pattern cannot contain: look-around, word boundaries, back-references, and unknown escapes."""
PATTERN_PART = re.compile(
    r"\\c[A-Za-z]|\\[pPux]\{[^}]*\}|\\.|\.|\[\^?(?:\\.|[^\]\\])*\]|\{,(?=[0-9]+\})|\{(?![0-9]+(?:,[0-9]*)?\})",
    re.DOTALL,
)
"""Matches the parts of a pattern that mean something else, or nothing, in the regular expressions of llguidance."""
CLASSES: Mapping[str, str] = {r"\d": "0-9", r"\w": "0-9A-Za-z_", r"\s": r" \t\n\r\f\x0b"}
"""The characters of classes that match in JavaScript and in Python. A negated class excludes those of other scripts."""
REPEATED_CLASS = re.compile(r"\^(\[\^?(?:\\.|[^\]\\\[])+\])([+*])\$")
SIMPLE_PATTERN = re.compile(r"[^(){|*+?]*(?:[*+?][^(){|*+?]*){0,2}")
"""Matches patterns that can be compared with any name in a short time."""
DOT_ALL = re.compile(r"\(\?[a-z]*s")
SAME_PARTS: Mapping[str, str] = {
    **{name: f"[{characters}]" for name, characters in CLASSES.items()},
    ".": r"[^\n\r\u{2028}\u{2029}]",
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
        strict: Whether to refuse keywords that cannot be enforced.

    Raises:
        InvalidRequestError: such a keyword is refused, or no answer could end.
    """
    normal = _normal(schema)
    if (endless := _endless(normal)) is not None:
        raise InvalidRequestError(
            f"{shown_path(endless)} requires a value like itself, so no answer ends; make it optional, or allow null"
        )
    # llguidance enforces the other keywords in many cases, and refuses them otherwise.
    if strict and (names := [name for name in unenforced(normal) if name not in REFUSED_BY_LLGUIDANCE]):
        places = {key: path for path, part in subschemas(normal) if isinstance(part, dict) for key in part}
        shown = ", ".join(shown_path((*places.get(name, ()), name)) for name in names)
        raise InvalidRequestError(f'{shown} cannot be enforced; leave out {", ".join(names)}, or send "strict": false')
    return close_objects(normal if strict else _rewrite(normal, lambda part: _relax(part, normal, [])))


def unenforced(schema: Any) -> list[str]:
    """Return the keywords that are left out of a schema that need not be enforced as a whole."""
    normal, names = _normal(schema), list[str]()
    _rewrite(normal, lambda part: _relax(part, normal, names))
    return list(dict.fromkeys(names))


def _normal(schema: Any) -> Any:
    """Return a schema without keywords that restrict nothing. References by an anchor become paths."""
    anchors: dict[str, list[str]] = {}
    for path, part in subschemas(schema):
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(part, dict) and isinstance(name := part.get(key), str):
                steps = ["#", *(step.replace("~", "~0").replace("/", "~1") for step in path)]
                anchors.setdefault(f"#{name}", []).append("/".join(steps))

    def change(part: dict[str, Any]) -> dict[str, Any]:
        kept = dict(part)
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            given = kept.get(key)
            places = ["#"] if given == "#" else anchors.get(given, []) if isinstance(given, str) else []
            # Without schemas from elsewhere, a dynamic reference to the only anchor of its name is an ordinary one.
            if len(places) == 1 and (key == "$ref" or "$ref" not in kept):
                del kept[key]
                kept["$ref"] = places[0]
        return _normalize(kept)

    return _rewrite(schema, change)


def _endless(schema: Any) -> tuple[str, ...] | None:
    """Return the path of a schema whose values can never end, because they contain each other; None if there is none.

    Such a schema is allowed in a definition that is not used.
    """
    places = [(path, part) for path, part in subschemas(schema) if isinstance(part, dict)]
    conditions = {id(part): _conditions(part, schema) for _, part in places}
    users: dict[int, list[int]] = {}
    """For each schema, those to check again when it is known that its values end."""
    for user, groups in conditions.items():
        for part in chain.from_iterable(groups):
            users.setdefault(id(part), []).append(user)
    ending, queue = set[int](), deque(conditions)

    def ends(part: Any) -> bool:
        # References to other places are not followed.
        return id(part) in ending or id(part) not in conditions

    while queue:
        part_id = queue.popleft()
        if part_id not in ending and all(any(map(ends, group)) for group in conditions[part_id]):
            ending.add(part_id)
            queue.extend(users.get(part_id, ()))
    endless = [path for path, part in places if id(part) not in ending]
    is_used = any(not path or path[0] not in DEFINITIONS for path in endless)
    return endless[0] if is_used else None


def _conditions(schema: dict[str, Any], root: Any) -> list[list[Any]]:
    """Return groups of schemas: each value contains, or is, a value of at least one schema of each group."""
    if "const" in schema or "enum" in schema:
        return []
    needed: list[Any] = []
    if "$ref" in schema:
        with suppress(UntranslatableError):
            needed.append(find(schema["$ref"], root))
    needed += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    options = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) and schema[key]]
    types = schema.get("type", "object" if {"properties", "required"} & schema.keys() else "array")
    named, required = schema.get("properties", {}), schema.get("required", [])
    if types in ("object", ["object"]) and isinstance(named, dict) and isinstance(required, list):
        needed += [named[name] for name in required if isinstance(name, str) and name in named]
        patterns = schema.get("patternProperties")
        others = [*(patterns.values() if isinstance(patterns, dict) else []), schema.get("additionalProperties")]
        is_needed = any(isinstance(name, str) and name not in named for name in required)
        is_needed = is_needed or (not named and _is_above(schema.get("minProperties"), 0))
        options += [others] if is_needed else []
    first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
    if types in ("array", ["array"]) and isinstance(first, list) and isinstance(least, int):
        needed += first[:least] if least <= len(first) else [*first, schema.get("items")]
    possible = ([part for part in group if part is not False] for group in options)
    return [*([each] for each in needed), *filter(None, possible)]


def shown_path(path: Sequence[str]) -> str:
    """Return the path of a part of a schema for a message."""
    return ".".join(path)[:200] if path else "the schema"


def close_objects(schema: Any) -> Any:
    """Allow no properties except the named ones in objects, unless the schema specifies otherwise.

    Every answer that satisfies the result satisfies the given schema. With open objects, small models add properties
    until they have no tokens left; other local servers close objects too. A schema with combined parts is returned
    unchanged, because closed parts could exclude each other.
    """
    is_combined = any(
        isinstance(part, dict)
        and ("allOf" in part or ("properties" in part and any(key in part for key in COMBINING_KEYS)))
        for _, part in subschemas(schema)
    )
    if is_combined:
        return schema

    def close(part: dict[str, Any]) -> dict[str, Any]:
        named, required = part.get("properties"), part.get("required", [])
        if not isinstance(named, dict) or not isinstance(required, list) or any(key in part for key in OPEN_KEYS):
            return part
        # An object that needs other properties stays open.
        is_whole = all(isinstance(name, str) and name in named for name in required)
        return {**part, "additionalProperties": False} if is_whole else part

    return _rewrite(schema, close)


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
    # PHP writes empty objects as lists.
    kept |= {key: {} for key in SCHEMAS_BY_NAME if kept.get(key) == []}
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
        kept["patternProperties"] = {portable(pattern): value for pattern, value in named.items()}
        if isinstance(listed := kept.get("properties"), dict):
            kept["properties"] = {name: _with_patterns(name, part, named) for name, part in listed.items()}
    if not isinstance(kept.get("format", ""), str):
        del kept["format"]
    return _normalize_text(_normalize_bounds(_named_properties(kept)))


def _with_patterns(name: str, schema: Any, patterns: Mapping[str, Any]) -> Any:
    """Return the schema of a listed property with those of the patterns that match its name, which llama.cpp does not
    apply to it."""
    others = []
    for pattern, other in patterns.items():
        with suppress(re.error):
            if SIMPLE_PATTERN.fullmatch(pattern) and re.search(pattern, name):
                others.append(other)
    return {"allOf": [schema, *others]} if others and schema is not None else schema


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
        kept.setdefault("maxLength", max(PATTERN_LENGTH, schema.get("minLength", 0)))
        kept["pattern"] = f"^{REPLACEMENTS[pattern]}$" if pattern in REPLACEMENTS else portable(pattern)
    elif isinstance(pattern, str):
        kept["pattern"] = portable(pattern)
    elif name in FORMATS and pattern is None:
        kept["pattern"] = f"^{FORMATS[name]}$"
    least, most = kept.get("minLength"), kept.get("maxLength")
    if pattern is None and isinstance(least, int) and 0 <= least <= SHORTEST.get(name, 0):
        del kept["minLength"]
    repeated = REPEATED_CLASS.fullmatch(kept["pattern"]) if isinstance(pattern, str) else None
    if repeated is not None and isinstance(least, int) and (most is None or isinstance(most, int)):
        low = max(least, 1 if repeated[2] == "+" else 0)
        kept = {key: value for key, value in kept.items() if key not in ("minLength", "maxLength")}
        kept["pattern"] = f"^{repeated[1]}{{{low},{'' if most is None else most}}}$"
    types = kept.get("type")
    if name in INTEGERS and (types == "integer" or (isinstance(types, list) and "integer" in types)):
        low, high = INTEGERS[name]
        kept |= {} if LOWER & kept.keys() else {"minimum": low}
        kept |= {} if UPPER & kept.keys() else {"maximum": high}
    return kept


def portable(pattern: str) -> str:
    """Convert a pattern of JavaScript or Python to one of llguidance, which matches only texts that match in both."""
    dot_all = DOT_ALL.search(pattern) is not None

    def in_class(found: re.Match[str], *, negated: bool) -> str:
        part, dash = found[0][:2], found[0][2:]
        characters = part if negated or part not in CLASSES else f"[{CLASSES[part]}]"
        # In llguidance, a class may contain classes, and the operators && and ~~ of sets.
        return f"\\{part}" if part in "[&~" else characters + (f"\\{dash}" if dash else "")

    def change(found: re.Match[str]) -> str:
        part = found[0]
        if part[0] == "[" and not part.startswith(("[:", "[^:"), 1):
            inner = partial(in_class, negated=part.startswith("[^"))
            return part[0] + re.sub(r"\\[dwsDWS]-(?!\])|\\.|[\[&~]", inner, part[1:], flags=re.DOTALL)
        if part == "." and dot_all:
            return part
        if part[:2] == r"\c" and len(part) == 3:
            return rf"\x{ord(part[2]) % 32:02x}"
        return SAME_PARTS.get(part, part)

    return PATTERN_PART.sub(change, pattern)


def _relax(schema: dict[str, Any], root: Any, names: list[str]) -> dict[str, Any]:
    """Remove keywords that cannot be enforced, and add them to ``names``."""
    kept = {key: value for key, value in schema.items() if key not in UNENFORCEABLE}
    removed = [key for key in schema if key not in kept]
    if "contains" in schema and schema.get("minContains", 1) != 0:
        kept["minItems"] = max(1, kept.get("minItems", 0))
    if isinstance(pattern := kept.get("pattern"), str) and UNENFORCEABLE_PATTERN.search(pattern.replace(r"\\", "")):
        removed.append("pattern")
        del kept["pattern"]
    if isinstance(options := kept.get("oneOf"), list) and "anyOf" not in kept and not are_disjoint(options, root):
        removed.append("oneOf")
        kept["anyOf"] = kept.pop("oneOf")
    if ("pattern" in kept or kept.get("format") in KNOWN_FORMATS) and _is_above(kept.get("minLength"), LEAST_LENGTH):
        removed.append("minLength")
        kept["minLength"] = LEAST_LENGTH
    for key in (*SCHEMAS_BY_NAME, *SCHEMA_LISTS):
        parts = kept.get(key)
        if isinstance(parts, dict) and None in parts.values():
            kept[key] = {name: True if part is None else part for name, part in parts.items()}
            removed.append(key)
        elif isinstance(parts, list) and None in parts:
            kept[key] = [True if part is None else part for part in parts]
            removed.append(key)
    named, required = kept.get("properties"), kept.get("required", [])
    patterns = kept.get("patternProperties")
    if isinstance(patterns, dict) and _overlap([*patterns]):
        removed.append("patternProperties")
        kept["patternProperties"] = {"|".join(f"(?:{each})" for each in patterns): {"anyOf": [*patterns.values()]}}
    if isinstance(named, dict) and any(name not in required for name in named):
        for key in ("minProperties", "maxProperties"):
            if key in kept:
                removed.append(key)
                del kept[key]
    elif _is_above(kept.get("minProperties"), 1) and (kept.get("additionalProperties") is not False or patterns):
        # Names that are not listed can be repeated.
        removed.append("minProperties")
    names.extend(removed)
    return kept


def _is_above(value: Any, limit: int) -> bool:
    return isinstance(value, int | float) and value > limit


def _overlap(patterns: Sequence[str]) -> bool:
    """Whether some name obviously matches several patterns. llguidance refuses the rest of those that overlap."""
    if len(patterns) < 2:
        return False
    beginnings = [each[1:] for each in patterns if re.fullmatch(r"\^[A-Za-z0-9_-]*", each)]
    return any(
        not each.startswith("^") or re.fullmatch(r"\^(\.|\[\^\\n[^]]*\])[*+]\$?", each) for each in patterns
    ) or any(
        other[1:].startswith(beginning) for beginning in beginnings for other in patterns if other[1:] != beginning
    )


def subschemas(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Iterate over the schemas in a schema with their paths, and then the schema itself."""
    if isinstance(schema, dict):
        for key in (*SCHEMAS_BY_NAME, *SCHEMA_LISTS, *SINGLE_SCHEMAS):
            given = schema.get(key)
            if key in SCHEMAS_BY_NAME and isinstance(given, dict):
                for name, part in given.items():
                    yield from subschemas(part, (*path, key, name))
            elif isinstance(given, list) and key in (*SCHEMA_LISTS, "items"):
                for at, part in enumerate(given):
                    yield from subschemas(part, (*path, key, str(at)))
            elif key in SINGLE_SCHEMAS and given is not None:
                yield from subschemas(given, (*path, key))
    yield path, schema
