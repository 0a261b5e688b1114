"""Generate almost valid JSON: unusual values, and valid bodies with changes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
JsonPath = tuple[str | int, ...]
"""Keys and indexes that lead to a value, outermost first."""


def draw_cases(draw: Callable[[random.Random], T], name: str, count: int) -> list[T]:
    """Draw ``count`` cases. ``name`` is the seed: each name gives other cases.

    Hypothesis does not draw them: it stays close to examples that it has tried. That helps to find the smallest failure
    of one function, but here half of its cases were equal.
    """
    return [draw(random.Random(f"{name}/{number}")) for number in range(count)]


@dataclass(frozen=True)
class Raw:
    """Text that is written unchanged, whether it is valid JSON or not."""

    text: str


def _nested(depth: int, opening: str, closing: str) -> Raw:
    # As text, because recursive functions could not handle a tree of that depth.
    return Raw(opening * depth + "1" + closing * depth)


NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 5, 21, 63, 64, 65, 1000, 49151, 49152, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**70),
    *(-(2**63), -(2**63) - 1, -(2**70), 0.5, 1.5, -0.5, 2.0, 2.1, 1e-3, 5e-324, 1e-400, 1e308),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "-0", "-0.0", "1E2", "1.0", "01", "+1", ".5", "1.")),
    *map(Raw, ("0x10", "1_000", "1e", "--1", "9" * 400, "9" * 5000, "0." + "1" * 2000, "1" + "0" * 308)),
)
WORDS = (
    *("", " ", "\0", "a\0b", "\x1b[31mred\x07", "\x7f\x80\x9f", "\r\n", "\t\n\n\n", "\u2028\u2029", "\ufeff", "\uffff"),
    *(
        "\ud800",
        "\udfff",
        "a\ud83d",
        "\ude00\ud83d",
        "\u202eltr",
        "e" + "\u0301" * 60,
        "😀" * 30,
        "ﬃ",
        "İ",
        "\U0001d518",
    ),
    *("{{ 7*7 }}", "{% for x in range(10**9) %}x{% endfor %}", "{{ messages.__class__.__mro__ }}", "${7*7}", "%s%n"),
    *("<script>alert(1)</script>", "'; DROP TABLE sessions; --", "../../etc/passwd", "/", ".", "..", "~", "/dev/zero"),
    *("C:\\con", "file:///etc/passwd", "\\\\a\\b", "a/b/c/d", "-rf", "null", "true", "0", "[]", "{}", "__proto__"),
    *("default", "tiny", "tiny-two", "tiny-embedder", "tiny-reranker", "model", "TINY", "tiny ", "tiny/"),
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>"),
    *("system", "user", "assistant", "tool", "developer", "text", "json_object", "json_schema", "regex", "grammar"),
    *("string", "number", "array", "object", "$ref", "#/properties/a", "#", "(a+)+$", "[", "(?<=a)", ".{1,100000}"),
    *("a" * 300, "word " * 60, "w" * 4097, "á" * 2000),
)
LONG = (30_000, 100_000)
"""Rarely used lengths; a whole batch of them would use too much of the sender's memory."""
EMPTY: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    {"": None},
    [None],
    ["", ""],
    {"a": {"b": [1, {"c": 2}]}},
)
DEEP = tuple(_nested(depth, *pair) for depth in (5, 60, 64, 65, 200, 5000) for pair in (("[", "]"), ('{"a":', "}")))
KEYS = (
    *("", " ", "model ", "Model", "x", "id", "type", "name", "role", "content", "stream", "n", "schema", "__class__"),
    *("\0", "\ud800", "messages\0", "é", "$ref", "properties", "additionalProperties", "self", "k" * 300, "0", "-1"),
)
CHARACTERS = ((0, 0x7F), (0, 0xFF), (0x100, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
"""Ranges of characters: ASCII, Latin, and the rest of the first and of the other planes, without surrogates."""
ODD: tuple[Callable[[random.Random], Any], ...] = (
    *(lambda chance, values=values: chance.choice(values) for values in (NUMBERS, WORDS, EMPTY, DEEP)),
    lambda chance: "".join(chr(chance.randint(*chance.choice(CHARACTERS))) for _ in range(chance.randint(0, 12))),
    lambda chance: chance.choice((-1, 1)) * chance.getrandbits(chance.choice((3, 8, 16, 32, 64, 128))),
    # Any float, including infinities and NaN.
    lambda chance: struct.unpack("d", chance.randbytes(8))[0],
    lambda chance: [
        chance.choice(WORDS) if chance.random() < 0.5 else chance.randint(-5, 60_000)
        for _ in range(chance.randint(0, 6))
    ],
    lambda chance: {chance.choice(KEYS): chance.choice(NUMBERS) for _ in range(chance.randint(0, 3))},
)


def odd_value(chance: random.Random) -> Any:
    """Return a value that is mostly invalid where it is inserted."""
    return chance.choice(ODD)(chance)


def changed_body(chance: random.Random, good: Any, others: Sequence[Any]) -> Any:
    """Change a valid body in one to three places; parts of ``others`` may be inserted."""
    body = good
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        body = chance.choice(CHANGES)(chance, body, others)
    return body


def _replace(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    return replace_at(body, _draw_path(chance, body), lambda _: odd_value(chance))


def _remove(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    path = _draw_path(chance, body)
    return replace_at(body, path[:-1], lambda parent: _without(parent, path[-1])) if path else {}


def _add(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    key, value = chance.choice(KEYS), odd_value(chance)

    def extended(parent: Any) -> Any:
        if isinstance(parent, dict):
            return {**parent, key: value}
        return [*parent, value] if isinstance(parent, list) else value

    return replace_at(body, _draw_path(chance, body), extended)


def _rename(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    path, key = _draw_path(chance, body), chance.choice(KEYS)

    def renamed(parent: Any) -> Any:
        if not isinstance(parent, dict):
            return parent
        return {key if name == path[-1] else name: value for name, value in parent.items()}

    return replace_at(body, path[:-1], renamed) if path else body


def _repeat(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    """Repeat the items of a list, or a text."""
    times = chance.choice((2, 3, 20, 129, 1100))

    def repeated(value: Any) -> Any:
        if isinstance(value, list):
            return value * times
        return value * times if isinstance(value, str) and len(value) * times < LONG[-1] else [value] * min(times, 129)

    return replace_at(body, _draw_path(chance, body), repeated)


def _stretch(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    word, size = chance.choice(("a", "word ", "é", "\0", "<|im_start|>", "\n")), chance.choice(LONG)
    return replace_at(body, _draw_path(chance, body), lambda _: (word * size)[:size])


def _insert_text(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    """Insert an unusual text into a text."""
    word, at = chance.choice(WORDS), chance.randint(0, 40)
    return replace_at(
        body, _draw_path(chance, body), lambda value: value[:at] + word + value[at:] if isinstance(value, str) else word
    )


def _wrap(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    depth = chance.choice((1, 2, 70))

    def wrapped(value: Any) -> Any:
        for _ in range(depth):
            value = [value]
        return value

    return replace_at(body, _draw_path(chance, body), wrapped)


def _borrow(chance: random.Random, body: Any, others: Sequence[Any]) -> Any:
    """Replace a part by a part of another valid body."""
    other = chance.choice(others)
    return replace_at(body, _draw_path(chance, body), lambda _: at(other, _draw_path(chance, other)))


Change = Callable[[random.Random, Any, Sequence[Any]], Any]
CHANGES: tuple[Change, ...] = (
    *(_replace, _replace, _replace, _remove, _add, _add, _rename, _repeat),
    *(_insert_text, _insert_text, _wrap, _borrow, _borrow, _stretch),
)


def json_paths(body: Any) -> list[JsonPath]:
    """Return the paths of up to about 200 values, the whole body first."""
    found: list[JsonPath] = [()]
    for path in found:
        value = at(body, path)
        keys = value if isinstance(value, dict) else range(min(len(value), 8)) if isinstance(value, list) else ()
        found += [(*path, key) for key in keys]
        if len(found) > 200:
            break
    return found


def _draw_path(chance: random.Random, body: Any) -> JsonPath:
    found = json_paths(body)
    # The whole body only rarely, because nothing of it would be left.
    return found[chance.randint(min(1, len(found) - 1), len(found) - 1)] if chance.randint(0, 19) else ()


def at(body: Any, path: JsonPath) -> Any:
    for key in path:
        body = body[key]
    return body


def replace_at(body: Any, path: JsonPath, change: Callable[[Any], Any]) -> Any:
    """Return a copy with the value at a path changed; other values are shared with the original."""
    if not path:
        return change(body)
    key, inner = path[0], path[1:]
    if isinstance(body, dict):
        return {**body, key: replace_at(body[key], inner, change)}
    assert isinstance(key, int)
    return [*body[:key], replace_at(body[key], inner, change), *body[key + 1 :]]


def _without(parent: Any, key: str | int) -> Any:
    if isinstance(parent, dict):
        return {name: value for name, value in parent.items() if name != key}
    return [value for number, value in enumerate(parent) if number != key]


def to_json(value: Any, *, escaped: bool = True) -> str:
    """Write a value as JSON, except ``Raw`` text. Lone surrogates are escaped unless ``escaped`` is false."""
    match value:
        case Raw():
            return value.text
        case dict():
            pairs = (f"{_text(key, escaped)}:{to_json(each, escaped=escaped)}" for key, each in value.items())
            return f"{{{','.join(pairs)}}}"
        case list():
            return f"[{','.join(to_json(each, escaped=escaped) for each in value)}]"
        case str():
            return _text(value, escaped)
        case _:
            return json.dumps(value)


def _text(text: str, escaped: bool) -> str:
    return json.dumps(text, ensure_ascii=escaped)
