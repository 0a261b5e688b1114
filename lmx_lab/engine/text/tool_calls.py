"""Tool calls out of the text between their markers, as it comes. Pure code.

Two readers: one hands on what a grammar has made well-formed while it comes; the other holds the whole section for the
parser of the model's own format. What is no call after all is handed back as text, markers included.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lmx_lab.values.generation import ToolCallDelta

# Mistral's chat template refuses ids of any other length or alphabet.
ID_LENGTH = 9
ID_ALPHABET = string.ascii_letters + string.digits
JSON_SPACE = " \t\n\r"
IN_STRING = re.compile(r'["\\]')
IN_NESTING = re.compile(r'["{}\[\]]')
ParseCalls = Callable[[str], Any]
"""The text between the markers to one call or a list of them: ``{"name", "arguments"}``, perhaps with an ``id``."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    start: str
    """The marker before a call, or before several."""
    end: str
    """The marker after; empty if the calls go on to the end of the answer (Mistral)."""
    parse: ParseCalls | None = None
    """The model's own format; it may raise anything. None: a grammar makes each text between the markers be
    ``{"name": ..., "arguments": {...}}``, in this order, so that it can be handed on while it comes."""


class Numbering:
    """Indices and ids of the calls of one answer, over all its sections."""

    def __init__(self) -> None:
        self.count = 0
        self._ids: set[str] = set()

    def begin(self, name: str, arguments: str = "", id_: str | None = None) -> ToolCallDelta:
        """The first piece of the next call, under the model's own id if that is free."""
        while not id_ or id_ in self._ids:
            id_ = "".join(secrets.choice(ID_ALPHABET) for _ in range(ID_LENGTH))
        self._ids.add(id_)
        self.count += 1
        return ToolCallDelta(index=self.count - 1, id=id_, name=name, arguments=arguments)


class CallReader(Protocol):
    """Reads one section: what is between two markers."""

    @property
    def accepted(self) -> bool:
        """Whether it is a call, or calls, for certain."""

    @property
    def in_string(self) -> bool:
        """Whether what comes is inside a string of the arguments for certain, even if it looks like a marker."""

    @property
    def held(self) -> int:
        """Characters of the section, its start marker included, that wait for ``accepted``."""

    @property
    def raw(self) -> str:
        """Those characters."""

    def feed(self, text: str) -> list[ToolCallDelta]:
        """What this text sets free."""

    def close(self, end: str) -> list[ToolCallDelta]:
        """What the end marker sets free, or with ``""`` the end of the answer; unless ``accepted`` by then, nothing."""


def reader(calls: CallFormat, start: str, numbering: Numbering) -> CallReader:
    if calls.parse is None:
        return EnforcedCall(start, numbering)
    return ParsedCalls(calls.parse, start, numbering)


class _Held:
    """Text in pieces, joined once: a section can be long, and its tokens short."""

    def __init__(self, start: str) -> None:
        self._pieces = [start]
        self.accepted = False
        self.held = len(start)

    @property
    def raw(self) -> str:
        return "".join(self._pieces)

    def _hold(self, text: str) -> None:
        self._pieces.append(text)
        self.held += len(text)

    def _accept(self) -> None:
        self._pieces, self.held, self.accepted = [], 0, True


class EnforcedCall(_Held):
    """``{"name": "...", "arguments": {...}}``, made so by a grammar, handed on while it comes.

    Up to the name it may still turn out to be something else; behind the name, what does not fit is left out.
    """

    def __init__(self, start: str, numbering: Numbering) -> None:
        super().__init__(start)
        self._numbering = numbering
        self._index = 0
        self._to_name = _Symbols("{", '"name"', ":", '"')
        self._name = _Value(in_string=True)
        self._name_text = ['"']
        self._to_arguments = _Symbols(",", '"arguments"', ":", "{")
        self._arguments = _Value(depth=1)

    @property
    def in_string(self) -> bool:
        return self._arguments.in_string

    def feed(self, text: str) -> list[ToolCallDelta]:
        if self.accepted:
            return self._read_arguments(text, 0)
        self._hold(text)
        at = self._read_name(text)
        name = _decoded_name("".join(self._name_text)) if at is not None else None
        if at is None or name is None:
            return []
        self._accept()
        begun = self._numbering.begin(name)
        self._index = begun.index
        return [begun, *self._read_arguments(text, at)]

    def close(self, end: str) -> list[ToolCallDelta]:
        if not self.accepted:
            self._hold(end)
        return []

    def _read_name(self, text: str) -> int | None:
        """Where the text goes on behind the name that it completes."""
        at = self._to_name.feed(text, 0)
        if not self._to_name.done or self._name.done:
            return None
        end = self._name.feed(text, at)
        self._name_text.append(text[at:end])
        return end if self._name.done else None

    def _read_arguments(self, text: str, at: int) -> list[ToolCallDelta]:
        if not self._to_arguments.done:
            at = self._to_arguments.feed(text, at)
            if not self._to_arguments.done:
                return []
            # The brace belongs to the arguments.
            return self._piece(text[at - 1 : self._arguments.feed(text, at)])
        return self._piece(text[at : self._arguments.feed(text, at)])

    def _piece(self, text: str) -> list[ToolCallDelta]:
        return [ToolCallDelta(index=self._index, arguments=text)] if text else []


class _Symbols:
    """Expects these symbols of JSON, with whitespace before each; stands still at anything else."""

    def __init__(self, *symbols: str) -> None:
        self._symbols = symbols
        self._index = 0
        self._matched = 0
        self._failed = False

    @property
    def done(self) -> bool:
        return self._index == len(self._symbols)

    def feed(self, text: str, at: int) -> int:
        """Where in the text it stopped reading: at its end, or behind the last symbol."""
        while at < len(text) and not self.done and not self._failed:
            self._take(text[at])
            at += 1
        return at

    def _take(self, character: str) -> None:
        symbol = self._symbols[self._index]
        if character == symbol[self._matched]:
            self._matched += 1
            if self._matched == len(symbol):
                self._index, self._matched = self._index + 1, 0
        elif self._matched or character not in JSON_SPACE:
            self._failed = True


class _Value:
    """Finds the end of a JSON string or object whose first character has been read."""

    def __init__(self, *, depth: int = 0, in_string: bool = False) -> None:
        self.in_string = in_string
        self.done = False
        self._depth = depth
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Where in the text the value ends, or the text."""
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (IN_STRING if self.in_string else IN_NESTING).search(text, at)
            if found is None:
                return len(text)
            self._take(found[0])
            at = found.end()
        return at

    def _take(self, character: str) -> None:
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self.in_string = not self.in_string
        else:
            self._depth += 1 if character in "{[" else -1
        self.done = not self.in_string and self._depth == 0


class ParsedCalls(_Held):
    """A section in the model's own format, held until it is complete."""

    in_string = False

    def __init__(self, parse: ParseCalls, start: str, numbering: Numbering) -> None:
        super().__init__(start)
        self._parse = parse
        self._start = start
        self._numbering = numbering

    def feed(self, text: str) -> list[ToolCallDelta]:
        self._hold(text)
        return []

    def close(self, end: str) -> list[ToolCallDelta]:
        try:
            calls = _checked(self._parse(self.raw[len(self._start) :]))
        except Exception:
            # Parsers of model text raise whatever their first wrong guess leads to, RecursionError included.
            calls = []
        if not calls:
            self._hold(end)
            return []
        self._accept()
        return [self._numbering.begin(name, arguments, id_) for name, arguments, id_ in calls]


def _checked(parsed: Any) -> list[tuple[str, str, str | None]]:
    """Name, arguments and own id of each call.

    Raises:
        ValueError, TypeError, KeyError: It is no call, or one of them is none.
    """
    return [_checked_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]


def _checked_call(call: Any) -> tuple[str, str, str | None]:
    name, arguments, id_ = call["name"], call["arguments"], call.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not _is_text(name) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not _is_text(text):
        raise ValueError("half a surrogate pair is no text")
    return name, text, id_ if _is_text(id_) else None


def _decoded_name(literal: str) -> str | None:
    try:
        name = json.loads(literal)
    except ValueError:
        return None
    return name if _is_text(name) else None


def _is_text(value: Any) -> bool:
    """Whether it is a string with something in it that can be sent: JSON's escapes can make lone surrogates."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
