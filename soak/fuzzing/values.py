"""JSON that is nearly right: odd values, and good bodies with something changed in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

Place = tuple[str | int, ...]
"""Keys and indexes, from the outside in."""


@dataclass(frozen=True)
class Raw:
    """Written as it stands, be it JSON or not."""

    text: str


def _nested(depth: int, opening: str, closing: str) -> Raw:
    # As text: a tree of that depth would be too deep for whoever walks it.
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
"""Lengths that are rare: a batch of them would take the sender's memory, too."""
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


def odd_values() -> SearchStrategy[Any]:
    """What does not belong there, mostly."""
    return st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(WORDS),
        st.sampled_from(EMPTY),
        st.sampled_from(DEEP),
        st.text(max_size=12),
        st.integers(),
        st.floats(),
        st.lists(st.one_of(st.integers(-5, 60_000), st.sampled_from(WORDS)), max_size=6),
        st.dictionaries(st.sampled_from(KEYS), st.sampled_from(NUMBERS), max_size=3),
    )


@st.composite
def changed_bodies(draw: DrawFn, good: Any, others: Sequence[Any]) -> Any:
    """A good body with one to three things changed; ``others`` lend parts of themselves."""
    body = good
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 2, 3)))):
        body = draw(st.sampled_from(CHANGES))(draw, body, others)
    return body


def _replaced(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    return put(body, _place(draw, body), lambda _: draw(odd_values()))


def _removed(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    place = _place(draw, body)
    return put(body, place[:-1], lambda parent: _without(parent, place[-1])) if place else {}


def _added(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    key, value = draw(st.sampled_from(KEYS)), draw(odd_values())

    def more(there: Any) -> Any:
        if isinstance(there, dict):
            return {**there, key: value}
        return [*there, value] if isinstance(there, list) else value

    return put(body, _place(draw, body), more)


def _renamed(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    place, key = _place(draw, body), draw(st.sampled_from(KEYS))

    def named_else(parent: Any) -> Any:
        if not isinstance(parent, dict):
            return parent
        return {key if name == place[-1] else name: value for name, value in parent.items()}

    return put(body, place[:-1], named_else) if place else body


def _repeated(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    """A list with its items several times over, a text with itself."""
    times = draw(st.sampled_from((2, 3, 20, 129, 1100)))

    def again(there: Any) -> Any:
        if isinstance(there, list):
            return there * times
        return there * times if isinstance(there, str) and len(there) * times < LONG[-1] else [there] * min(times, 129)

    return put(body, _place(draw, body), again)


def _stretched(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    word, size = draw(st.sampled_from(("a", "word ", "é", "\0", "<|im_start|>", "\n"))), draw(st.sampled_from(LONG))
    return put(body, _place(draw, body), lambda _: (word * size)[:size])


def _spoken(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    """Text with something odd in the middle of it, or at an end."""
    word, at = draw(st.sampled_from(WORDS)), draw(st.integers(0, 40))
    return put(
        body, _place(draw, body), lambda there: there[:at] + word + there[at:] if isinstance(there, str) else word
    )


def _wrapped(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    depth = draw(st.sampled_from((1, 2, 70)))

    def around(there: Any) -> Any:
        for _ in range(depth):
            there = [there]
        return there

    return put(body, _place(draw, body), around)


def _borrowed(draw: DrawFn, body: Any, others: Sequence[Any]) -> Any:
    """A part of another good body, in the place of one of this."""
    other = draw(st.sampled_from(others))
    return put(body, _place(draw, body), lambda _: at(other, _place(draw, other)))


Change = Callable[[DrawFn, Any, Sequence[Any]], Any]
CHANGES: tuple[Change, ...] = (
    *(_replaced, _replaced, _replaced, _removed, _added, _added, _renamed, _repeated),
    *(_spoken, _spoken, _wrapped, _borrowed, _borrowed, _stretched),
)


def places(body: Any) -> list[Place]:
    """Where there is something in it, the whole first."""
    found: list[Place] = [()]
    for place in found:
        there = at(body, place)
        keys = there if isinstance(there, dict) else range(min(len(there), 8)) if isinstance(there, list) else ()
        found += [(*place, key) for key in keys]
        if len(found) > 200:
            break
    return found


def _place(draw: DrawFn, body: Any) -> Place:
    found = places(body)
    # Rarely the whole: nothing is left of it then.
    return found[draw(st.integers(min(1, len(found) - 1), len(found) - 1))] if draw(st.integers(0, 19)) else ()


def at(body: Any, place: Place) -> Any:
    for key in place:
        body = body[key]
    return body


def put(body: Any, place: Place, change: Callable[[Any], Any]) -> Any:
    """A copy with what is at this place changed; the rest is shared."""
    if not place:
        return change(body)
    key, inner = place[0], place[1:]
    if isinstance(body, dict):
        return {**body, key: put(body[key], inner, change)}
    assert isinstance(key, int)
    return [*body[:key], put(body[key], inner, change), *body[key + 1 :]]


def _without(parent: Any, key: str | int) -> Any:
    if isinstance(parent, dict):
        return {name: value for name, value in parent.items() if name != key}
    return [value for number, value in enumerate(parent) if number != key]


def written(value: Any, *, escaped: bool = True) -> str:
    """As JSON, but for what is ``Raw``; a lone surrogate is an escape, or itself."""
    match value:
        case Raw():
            return value.text
        case dict():
            pairs = (f"{_text(key, escaped)}:{written(each, escaped=escaped)}" for key, each in value.items())
            return f"{{{','.join(pairs)}}}"
        case list():
            return f"[{','.join(written(each, escaped=escaped) for each in value)}]"
        case str():
            return _text(value, escaped)
        case _:
            return json.dumps(value)


def _text(text: str, escaped: bool) -> str:
    return json.dumps(text, ensure_ascii=escaped)
