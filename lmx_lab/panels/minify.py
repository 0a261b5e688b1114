"""JavaScript made smaller, for the plain code of this folder only: comments and space go, local names become short.

It knows words, marks, texts and brackets, not the language. So it renames only what can be nothing but a variable, and
the code keeps to a few rules: statements end with a semicolon; a template literal has no other one inside; a pattern
(``/.../``) stands after a bracket, a comma or an operator; no variable has the name of a global that the code uses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, product
from string import ascii_letters

_TOKEN = re.compile(
    r"""
    (?P<space> (?: \s | //[^\n]* | /\*[\s\S]*?\*/ )+ )
    | (?P<text> "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' | `(?:[^`\\]|\\.)*` )
    | (?P<word> [\w$]+ )
    | (?P<mark> \.\.\. | => | \?\. | [\s\S] )
    """,
    re.VERBOSE,
)
_PATTERN = re.compile(r"/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/\w*")
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
# Where a line break cannot end a statement: the line before goes on, or the one after goes on with it.
_OPEN = frozenset("{[(,;:?&|=<>!*%~^")
_CLOSE = frozenset(")]},;:?&|=<>.*%^")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_KEPT = frozenset({"as", "do", "if", "in", "is", "of", "document", "navigator", "window", "fetch", "location", "uPlot"})


def minified(text: str) -> str:
    """The same module, smaller."""
    return "".join(_renamed(_tightened(text))).strip()


def _tightened(text: str) -> list[str]:
    """The tokens without comments, and without the space that nobody needs."""
    parts: list[str] = []
    at = 0
    while at < len(text):
        last = parts[-1][-1] if parts else ";"
        token = _PATTERN.match(text, at) if text[at] == "/" and (last in _OPEN or last in "}+-") else None
        # A comment begins like a pattern.
        if token is None or text[at + 1] in "/*":
            token = _TOKEN.match(text, at)
            assert token is not None
        at = token.end()
        if token.lastgroup != "space":
            parts.append(token[0])
            continue
        after = text[at : at + 1]
        if last == "," and after in {")", "}"}:
            parts.pop()
        elif space := _space(last, token[0], after):
            parts.append(space)
    return parts


def _space(before: str, space: str, after: str) -> str:
    """What must remain of some space."""
    if "\n" in space:
        return "" if before in _OPEN or after in _CLOSE else "\n"
    needed = (_in_word(before) and _in_word(after)) or (before == after and before in "+-")
    return " " if needed else ""


def _in_word(character: str) -> bool:
    return character.isalnum() or character in {"_", "$"}


def _renamed(parts: Sequence[str]) -> list[str]:
    """Variables under short names; each name has one new name in the whole module, so that scopes need not be known."""
    words = [part for part in parts if part.strip()]
    counts = Counter(words)
    names = [name for name in _declared(words) - _fixed(words) - _KEPT if len(name) > 2]
    names.sort(key=lambda name: (-counts[name] * len(name), name))
    taken = set(words) | _KEPT
    free = (
        name
        for name in map("".join, chain(product(ascii_letters), product(ascii_letters, repeat=2)))
        if name not in taken
    )
    short = dict(zip(names, free, strict=False))
    # After a point the same word is a property; then _fixed has it, and it is no key here.
    return [short.get(part, part) for part in parts]


def _declared(words: Sequence[str]) -> set[str]:
    """What stands where a variable is made: after const or let, and as a parameter of an arrow function."""
    found: set[str] = set()
    for at, word in enumerate(words):
        if word in {"const", "let"}:
            end = words.index("]", at) if words[at + 1] == "[" else at + 2
            found.update(_bare(words[at:end]))
        elif word == "=>" and words[at - 1] == ")":
            found.update(_bare(words[_opening(words, at - 1) : at]))
    return found


def _bare(words: Sequence[str]) -> Iterator[str]:
    """Names in a list of variables; neither keys of what is taken apart nor defaults."""
    for before, word in pairwise(words):
        if before in {"const", "let", "(", "[", ",", "..."} and _WORD.fullmatch(word):
            yield word


def _opening(words: Sequence[str], at: int) -> int:
    """Where the bracket was opened that is closed here."""
    depth = 0
    while True:
        depth += (words[at] in _PAIRS) - (words[at] in _PAIRS.values())
        if not depth:
            return at
        at -= 1


def _fixed(words: Sequence[str]) -> set[str]:
    """What is the name of a property somewhere, or may be: after a point, before a colon, in braces between commas."""
    found: set[str] = set()
    inside: list[str] = []
    for before, word, after in _with_neighbours(words):
        if word in _PAIRS.values():
            inside.append(word)
        elif word in _PAIRS:
            inside.pop()
        elif word[0] == "`":
            found.update(_WORD.findall(word))
        elif (
            before in {".", "?."}
            or after == ":"
            or (inside[-1:] == ["{"] and before in {"{", ",", "async"} and after in {",", "}", "=", "("})
        ):
            found.add(word)
    return found


def _with_neighbours(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    return zip(["", *words], words, [*words[1:], ""], strict=False)
