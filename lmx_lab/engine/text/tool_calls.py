"""Parse tool calls incrementally from the text between their markers. Pure code.

There are two readers. One streams calls whose form a grammar enforces. The other buffers a whole section and passes it
to the parser of the model's own format. A section that contains no valid call is returned as text, with its markers.
``UnmarkedCalls`` recognizes answers that consist of calls without markers.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmx_lab.engine.requests import ToolUse
from lmx_lab.values.outputs import ToolCallDelta

ID_ALPHABET = string.ascii_letters + string.digits
IN_STRING = re.compile(r'["\\]')
SPACE_BETWEEN = re.compile(r'("(?:[^"\\]|\\.)*"?)|\s+', re.DOTALL)
"""Matches white space outside of strings, and whole strings. The last string may be incomplete."""
IN_NESTING = re.compile(r'["{}\[\]]')
AROUND_UNMARKED = re.compile(r"(?:[\s,\[\]]|`+\w*)*")
"""Matches the text that may be around calls without markers: the punctuation of lists, and code blocks."""
MAX_AROUND = 256
"""Maximum number of characters of such a text."""
ParseCalls = Callable[[str], Any]
"""Parses the text between the markers to one call or a list of calls: ``{"name", "arguments"}``, optionally with an
``id``."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes tool calls."""

    start: str
    """The marker before one or several calls."""
    end: str
    """The marker after them; empty if calls extend to the end of the answer (Mistral)."""
    parse: ParseCalls | None = None
    """Parser of the model's own format, which may raise any exception. If None, a grammar ensures that the text between
    the markers is ``{"name": ..., "arguments": {...}}``, in this order, so that it can be streamed."""
    may_repeat: bool = True
    """Whether an answer may repeat a call. If not, the answer ends before the repetition. Only for enforced calls."""
    unmarked: ToolUse | None = None
    """The tools that an answer also calls if it consists of calls without markers; None if markers are required."""


class CallNumbering:
    """Assigns indices and ids to all calls of one answer, and records the enforced ones."""

    def __init__(self) -> None:
        self.count = 0
        self.complete: list[tuple[str, str]] = []
        """Name and arguments, as JSON without spaces, of each complete enforced call."""
        self._ids: set[str] = set()

    def begin(self, name: str, arguments: str = "", id_: str | None = None) -> ToolCallDelta:
        """Return the first delta of the next call. It keeps the model's own id unless another call has the same."""
        while not id_ or id_ in self._ids:
            # Mistral's chat template rejects ids of any other length or alphabet.
            id_ = "".join(secrets.choice(ID_ALPHABET) for _ in range(9))
        self._ids.add(id_)
        self.count += 1
        return ToolCallDelta(index=self.count - 1, id=id_, name=name, arguments=arguments)


class CallReader(ABC):
    """Reads one section, the text between two markers, and buffers it until it is known to contain a valid call."""

    in_string = False
    """Whether the next text is known to be inside a string of the arguments, even if it looks like a marker."""

    def __init__(self, start: str) -> None:
        # Joined only once, because a section can be long and its tokens short.
        self._pieces = [start]
        self.held = len(start)
        """Number of buffered characters, including the start marker, while the section is not accepted."""
        self.accepted = False
        """Whether the section is known to contain a valid call."""
        self.repeats = False
        """Whether the section is a call that the answer already contains, and must not contain again."""

    @property
    def raw(self) -> str:
        """The buffered characters."""
        return "".join(self._pieces)

    @abstractmethod
    def feed(self, text: str) -> list[ToolCallDelta]:
        """Read more text and return the deltas that it completes."""

    @abstractmethod
    def close(self, end: str) -> list[ToolCallDelta]:
        """Read the end marker, or ``""`` at the end of the answer, and return the deltas that it completes.

        If the section is not accepted after this, it contains no valid call, and nothing is returned.
        """

    def _append(self, text: str) -> None:
        self._pieces.append(text)
        self.held += len(text)

    def _accept(self) -> None:
        self._pieces, self.held, self.accepted = [], 0, True


class EnforcedCallReader(CallReader):
    """Streams ``{"name": "...", "arguments": {...}}``, whose form a grammar enforces.

    Until the name is complete, the section may turn out not to be a call. After the arguments, text is dropped.

    Args:
        may_repeat: Whether the call may equal an earlier one. If not, the call is held back as long as it may turn out
            to be equal.
    """

    def __init__(self, start: str, numbering: CallNumbering, *, may_repeat: bool = True) -> None:
        super().__init__(start)
        self._numbering = numbering
        self._earlier = () if may_repeat else tuple(numbering.complete)
        self._index = 0
        self._before_name = _SymbolScanner("{", '"name"', ":", '"')
        self._name = _ValueScanner(in_string=True)
        self._name_text = ['"']
        self._called: str | None = None
        """The name, once it is complete."""
        self._before_arguments = _SymbolScanner(",", '"arguments"', ":", "{")
        self._arguments = _ValueScanner(depth=1)
        self._arguments_text: list[str] = []

    @property
    def in_string(self) -> bool:  # type: ignore[override]
        return self._arguments.in_string

    def feed(self, text: str) -> list[ToolCallDelta]:
        if not self.accepted:
            self._append(text)
        at = 0
        if self._called is None:
            at = self._before_name.feed(text, 0)
            if not self._before_name.done or self._name.done:
                return []
            begin, at = at, self._name.feed(text, at)
            self._name_text.append(text[begin:at])
            if self._name.done:
                with suppress(ValueError):
                    name = json.loads("".join(self._name_text))
                    self._called = name if _is_sendable_text(name) else None
        if self._called is None or self.repeats:
            return []
        if self._before_arguments.done:
            arguments = text[at : self._arguments.feed(text, at)]
        else:
            at = self._before_arguments.feed(text, at)
            # The opening brace belongs to the arguments.
            arguments = text[at - 1 : self._arguments.feed(text, at)] if self._before_arguments.done else ""
        self._arguments_text += [arguments] if arguments else []
        compact = ""
        if self._earlier or self._arguments.done:
            compact = SPACE_BETWEEN.sub(lambda found: found[1] or "", "".join(self._arguments_text))
        deltas = []
        if not self.accepted:
            if any(name == self._called and earlier.startswith(compact) for name, earlier in self._earlier):
                self.repeats = self._arguments.done
                return []
            arguments = "".join(self._arguments_text)
            self._accept()
            deltas.append(self._numbering.begin(self._called))
            self._index = deltas[0].index
        if arguments:
            deltas.append(ToolCallDelta(index=self._index, arguments=arguments))
            if self._arguments.done:
                self._numbering.complete.append((self._called, compact))
        return deltas

    def close(self, end: str) -> list[ToolCallDelta]:
        if not self.accepted:
            self._append(end)
        return []


class _SymbolScanner:
    """Expects a sequence of JSON symbols, with optional whitespace before each, and stops at anything else."""

    def __init__(self, *symbols: str) -> None:
        self._symbols = symbols
        self._index = 0
        self._matched = 0
        self._failed = False

    @property
    def done(self) -> bool:
        return self._index == len(self._symbols)

    def feed(self, text: str, at: int) -> int:
        """Return the position where reading stopped: the end of the text, or after the last symbol."""
        while at < len(text) and not self.done and not self._failed:
            symbol, character = self._symbols[self._index], text[at]
            if character == symbol[self._matched]:
                self._matched += 1
                if self._matched == len(symbol):
                    self._index, self._matched = self._index + 1, 0
            elif self._matched or character not in " \t\n\r":
                self._failed = True
            at += 1
        return at


class _ValueScanner:
    """Finds the end of a JSON string or object whose first character was read before."""

    def __init__(self, *, depth: int = 0, in_string: bool = False) -> None:
        self.in_string = in_string
        self.done = False
        self._depth = depth
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Return the position after the value, or the end of the text."""
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (IN_STRING if self.in_string else IN_NESTING).search(text, at)
            if found is None:
                return len(text)
            if found[0] == "\\":
                self._escaped = True
            elif found[0] == '"':
                self.in_string = not self.in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
            self.done = not self.in_string and self._depth == 0
            at = found.end()
        return at


class ParsedCallReader(CallReader):
    """Buffers a section in the model's own format until it is complete, and parses it."""

    def __init__(self, parse: ParseCalls, start: str, numbering: CallNumbering) -> None:
        super().__init__(start)
        self._parse = parse
        self._start = start
        self._numbering = numbering

    def feed(self, text: str) -> list[ToolCallDelta]:
        self._append(text)
        return []

    def close(self, end: str) -> list[ToolCallDelta]:
        try:
            parsed = self._parse(self.raw[len(self._start) :])
            calls = [_check_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:
            # A parser of model text can raise any exception, including RecursionError.
            calls = []
        if not calls:
            self._append(end)
            return []
        self._accept()
        return [self._numbering.begin(name, arguments, id_) for name, arguments, id_ in calls]


class UnmarkedCalls:
    """Recognizes the calls of an answer that consists of calls without markers, as many models write them.

    Such an answer is one or several objects ``{"name": ..., "arguments": {...}}`` that name a given tool: one after the
    other, in a list, or in code blocks. Any other answer is text, even if a part of it looks like a call, because text
    often explains a call that it does not make. Text is held back as long as it may be calls.
    """

    def __init__(self, tools: ToolUse, numbering: CallNumbering) -> None:
        self._names = {tool.name for tool in tools.tools}
        self._parallel = tools.parallel
        self._numbering = numbering
        names = ("".join(json.dumps(name, ensure_ascii=False).split()) for name in self._names)
        self._beginnings = (
            *(f'{{"name":{name}' for name in names),
            '{"arguments":',
            '{"parameters":',
            '{"type":"function',
        )
        """How a call begins, without white space."""
        self._is_text = False
        self._begin()

    def _begin(self) -> None:
        self._pieces: list[str] = []
        self.held = 0
        """Number of characters that are held back."""
        self._calls: list[tuple[str, str, str | None]] = []
        self._around = ""
        """What was read since the last object."""
        self._object: list[str] = []
        """The pieces of an object that is not complete."""
        self._scanner = _ValueScanner()
        self._has_begun = False
        """Whether the object has begun as a call does."""

    @property
    def count(self) -> int:
        """Number of calls that were read completely since the last end."""
        return len(self._calls)

    def feed(self, text: str) -> str:
        """Read more text, and return the text that is not part of a call."""
        if self._is_text or not text:
            return text
        self._pieces.append(text)
        self.held += len(text)
        return "" if self._may_be_calls(text) else self._release()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Return the text that was held back if it is not a call, and otherwise the calls. Calls may follow again."""
        if self._object or not self._calls:
            return self._release() if self.held else "", []
        calls = self._calls if self._parallel else self._calls[:1]
        self._begin()
        return "", [self._numbering.begin(name, arguments, id_) for name, arguments, id_ in calls]

    def _release(self) -> str:
        text = "".join(self._pieces)
        self._begin()
        self._is_text = bool(text.strip())
        return text

    def _may_be_calls(self, text: str) -> bool:
        at = 0
        while at < len(text):
            if not self._object:
                start = text.find("{", at)
                end = len(text) if start < 0 else start
                self._around += text[at:end]
                if len(self._around) > MAX_AROUND or not AROUND_UNMARKED.fullmatch(self._around):
                    return False
                if start < 0:
                    return True
                self._around, self._scanner, self._has_begun, at = "", _ValueScanner(), False, start
            end = self._scanner.feed(text, at)
            self._object.append(text[at:end])
            at = end
            if not self._has_begun:
                beginning = "".join("".join(self._object).split())
                self._has_begun = beginning.startswith(self._beginnings)
                if not self._has_begun and not any(each.startswith(beginning) for each in self._beginnings):
                    return False
            if self._scanner.done:
                try:
                    call = json.loads("".join(self._object))
                    call = call.get("function", call)
                    self._calls.append(_check_call({"arguments": call.get("parameters"), **call}))
                except Exception:
                    # Model text can raise any exception, including RecursionError.
                    return False
                self._object = []
                if self._calls[-1][0] not in self._names:
                    return False
        return True


def _check_call(call: Any) -> tuple[str, str, str | None]:
    """Return the name of a call, its arguments as JSON, and the id that the model gave it, or None.

    Raises:
        ValueError, TypeError, KeyError: it is not a valid call.
    """
    name, arguments, id_ = call["name"], call["arguments"], call.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not _is_sendable_text(name) or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not _is_sendable_text(text):
        raise ValueError("the arguments contain a lone surrogate")
    return name, text, id_ if _is_sendable_text(id_) else None


def _is_sendable_text(value: Any) -> bool:
    """Whether the value is a non-empty string that UTF-8 can encode; JSON escapes can produce lone surrogates."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
