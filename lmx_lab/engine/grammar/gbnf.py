"""Convert grammars in GBNF, llama.cpp's format, to the Lark grammars of llguidance. Pure code.

The format is described in llama.cpp's ``grammars/README.md``. A rule that refers to no rule, or only to such rules,
becomes a terminal, which matches as much text as it can. llguidance would need too much time for a grammar whose
terminals are single characters.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator

from lmx_lab.errors import InvalidRequestError

TOKEN = re.compile(
    r"""
    (?P<space>[ \t]+|\#[^\r\n]*)
    | (?P<newline>[\r\n]+)
    | (?P<name>[A-Za-z0-9_-]+)
    | (?P<define>::=)
    | (?P<literal>"(?:[^"\\]|\\.)*")
    | (?P<characters>\[\^?(?:[^\]\\]|\\.)+\])
    | (?P<any>\.)
    | (?P<repeat>[*+?]|\{\s*[0-9]{1,9}\s*(?:,\s*(?:[0-9]{1,9})?\s*)?\})
    | (?P<open>\()
    | (?P<close>\))
    | (?P<or>\|)
    """,
    re.VERBOSE | re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
ROOT = "root"
EMPTY = "literal", '""'


@functools.lru_cache(32)
def to_lark(grammar: str) -> str:
    """Return a grammar in llguidance's variant of Lark.

    Raises:
        InvalidRequestError: the grammar is not valid; the message names the line.
    """
    try:
        return "\n".join(_Rules(grammar).lines())
    except ValueError as exc:
        raise InvalidRequestError(f"grammar: {exc}", param="grammar") from None


class _Rules:
    """Reads the tokens of a grammar one after the other, and writes each as Lark."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._at = 0
        self._used: dict[str, int] = {}
        """Positions at which rules are first referred to."""
        self._rules: dict[str, list[tuple[str, str]]] = {}
        """The parts of each rule, as the kind of the token and its text in Lark, or the name of a rule."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the Lark grammar.

        Raises:
            ValueError: the grammar is not valid.
        """
        tokens = self._tokens()
        for kind, text, at in tokens:
            if kind == "newline":
                continue
            if kind != "name" or next(tokens, ("", "", 0))[0] != "define":
                raise ValueError(f"{self._place(at)}: {text[:20]!r} does not begin a rule, such as: name ::= [a-z]+")
            self._rules[text] = list(self._body(tokens))
        for name, at in self._used.items():
            if name not in self._rules:
                raise ValueError(f"{self._place(at)}: the rule {name[:80]!r} is not defined; define it")
        if ROOT not in self._rules:
            raise ValueError("there is no rule named 'root', with which an answer begins; define it")
        names = self._lark_names()
        yield f"start: {names[ROOT]}"
        for name, parts in self._rules.items():
            yield f"{names[name]}: {' '.join(names[text] if kind == 'name' else text for kind, text in parts)}"

    def _lark_names(self) -> dict[str, str]:
        """Return the names of the rules in Lark, which are upper case for terminals."""
        references = {name: {text for kind, text in parts if kind == "name"} for name, parts in self._rules.items()}
        referring: dict[str, list[str]] = {name: [] for name in self._rules}
        for name, referred in references.items():
            for other in referred:
                referring[other].append(name)
        missing = {name: len(referred) for name, referred in references.items()}
        terminals = [name for name, count in missing.items() if not count]
        for name in terminals:
            for other in referring[name]:
                missing[other] -= 1
                if not missing[other]:
                    terminals.append(other)
        written = {name: f"r{at}_{re.sub('[^a-z0-9]', '_', name.lower())}" for at, name in enumerate(self._rules)}
        return written | {name: written[name].upper() for name in terminals}

    def _body(self, tokens: Iterator[tuple[str, str, int]]) -> Iterator[tuple[str, str]]:
        """Yield the parts of a rule up to the end of its last line."""
        depth, before, began = 0, "or", self._at
        for kind, text, at in tokens:
            if kind == "newline":
                # Within parentheses, and after ::= and |, a rule continues on the next line.
                if depth or before == "or":
                    continue
                break
            starts = before in ("or", "open")
            if kind in ("or", "close") and starts:
                yield EMPTY
            if kind == "define" or (kind == "repeat" and starts):
                raise ValueError(f"{self._place(at)}: {text[:20]!r} has nothing before it to which it could apply")
            depth += (kind == "open") - (kind == "close")
            if depth < 0:
                raise ValueError(f"{self._place(at)}: a parenthesis is closed that was not opened")
            before = kind
            if kind == "name":
                self._used.setdefault(text, at)
            match kind:
                case "literal":
                    yield kind, json.dumps("".join(self._characters(text[1:-1], at)), ensure_ascii=False)
                case "characters":
                    yield kind, f"/{self._character_class(text[1:-1], at)}/"
                case _:
                    yield kind, "/(?s:.)/" if kind == "any" else re.sub(r"\s+", "", text)
        if depth:
            raise ValueError(f"{self._place(began)}: a parenthesis of this rule is not closed")
        if before == "or":
            yield EMPTY

    def _character_class(self, text: str, at: int) -> str:
        negated = text.startswith("^")
        characters = list(self._characters(text[negated:], at))
        ranges, position = [], 0
        while position < len(characters):
            first = last = characters[position]
            # A hyphen between two characters; an escaped one is not distinguished from it, as in llama.cpp.
            if characters[position + 1 : position + 2] == ["-"] and position + 2 < len(characters):
                last = characters[position + 2]
                position += 2
            if first > last:
                raise ValueError(f"{self._place(at)}: the range {first}-{last} has no characters")
            ranges.append(_escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}")
            position += 1
        return f"[{'^' if negated else ''}{''.join(ranges)}]"

    def _characters(self, text: str, at: int) -> Iterator[str]:
        for byte, short, long, escaped, plain in ESCAPE.findall(text):
            code = byte or short or long
            if code:
                number = int(code, 16)
                if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                    raise ValueError(f"{self._place(at)}: {code} is not the code of a character")
                yield chr(number)
            elif escaped and escaped not in ESCAPES:
                raise ValueError(f"{self._place(at)}: \\{escaped} is not an escape; write \\\\ for a backslash")
            else:
                yield ESCAPES[escaped] if escaped else plain

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        while self._at < len(self._grammar):
            found = TOKEN.match(self._grammar, self._at)
            if found is None:
                raise ValueError(
                    f"{self._place(self._at)}: {self._grammar[self._at :][:20]!r} is not valid GBNF, "
                    "whose rules have the form: name ::= [a-z]+"
                )
            at, self._at = self._at, found.end()
            if found.lastgroup != "space":
                yield str(found.lastgroup), found[0], at

    def _place(self, at: int) -> str:
        return f"line {self._grammar.count(chr(10), 0, at) + 1}"


def _escaped(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\u{{{ord(character):x}}}"
