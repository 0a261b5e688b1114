"""Remember how a model wrote its tool calls, so that the next prompts contain the same text. Pure code.

A client sends calls back as parsed JSON, and a chat template writes them with other white space, escapes and order of
keys. The prompt would then differ from the cached prefix, and be computed again from the call on.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

MAX_ENTRIES = 512
"""Maximum number of texts that are remembered, two for each answer."""
MAX_CHARACTERS = 100_000
"""Maximum length of such a text."""
BEFORE = 8
"""Number of characters before the calls that must be the same, so that the white space between is changed too."""


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """The consecutive calls of an answer as the model wrote them."""

    calls: str
    """Their names and arguments, as ``calls_key`` writes them."""
    text: str
    """Their text, from the first marker to the last one."""
    before: str
    """The end of the text before them; empty if the answer begins with them."""
    space: str
    """The white space between."""


class CallMemory:
    """The calls that one model wrote last. May be used on any thread."""

    def __init__(self) -> None:
        self._written: OrderedDict[tuple[str, ...], WrittenCalls] = OrderedDict()
        self._lock = Lock()

    def add(self, scope: str, header: str, calls: Sequence[tuple[str, str, str]], raw: str, begin: int) -> None:
        """Remember the calls at the end of an answer.

        Args:
            scope: ``Caller.scope``. A caller never gets the text of another one.
            header: Text directly before the calls that belongs to them.
            calls: The id, the name and the arguments, as JSON, of each.
            raw: The text of the answer up to the end of the calls.
            begin: Where they begin in it.
        """
        before = raw[:begin].rstrip()
        if before.endswith(header):
            begin = len(before) - len(header) if header else begin
            before = raw[:begin].rstrip()
        text = raw[begin:].lstrip()
        space = raw[len(before) : len(raw) - len(text)]
        # Arguments that a limit has cut off are not JSON.
        with suppress(ValueError, RecursionError):
            key = calls_key([(name, json.loads(arguments)) for _, name, arguments in calls])
            if key and len(text) <= MAX_CHARACTERS:
                written = WrittenCalls(key, text, before[-BEFORE:], space)
                with self._lock:
                    # Some clients of Ollama's format send no ids back.
                    for entry in ((scope, calls[0][0], key), (scope, key)):
                        self._written[entry] = written
                        self._written.move_to_end(entry)
                    while len(self._written) > MAX_ENTRIES:
                        self._written.popitem(last=False)

    def find(self, scope: str, message: Mapping[str, Any]) -> WrittenCalls | None:
        """Return how the model wrote the calls of a message of the history; None if they are not known, or changed."""
        if not self._written or not (calls := message.get("tool_calls")):
            return None
        key = calls_key([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        with self._lock:
            for entry in ((scope, calls[0]["id"], key), (scope, key)):
                if entry in self._written:
                    self._written.move_to_end(entry)
                    return self._written[entry]
        return None


def calls_key(calls: Sequence[tuple[str, Any]]) -> str:
    """Return a text that is the same for calls with the same names and the same arguments as JSON; empty if they are
    nested too deeply, or are not JSON.
    """
    try:
        return json.dumps(calls, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""


@dataclass(frozen=True, kw_only=True)
class CallSections:
    """How a chat template writes calls."""

    start: str
    end: str
    """See ``CallFormat``."""
    parse: Callable[[str], Any]
    """Returns one call or several; may raise any exception."""
    message_ends: Collection[str]
    """The texts of tokens that end a message. They are not part of a section."""

    def restore(self, text: str, written: Sequence[WrittenCalls], contents: Sequence[str]) -> str:
        """Return the text of a chat with calls as the model wrote them.

        Args:
            written: The known calls, in the order of the messages.
            contents: The contents of the messages. A call that one of them quotes is not changed.
        """
        keys = [each.calls for each in written]
        longest = 1000 + 8 * max(len(each.text) for each in written)
        quoted = [content for content in contents if self.start in content]
        pieces, at, known = [], 0, 0
        for begin, end, calls in self._runs(text, longest):
            run = text[begin:end]
            if (key := calls_key(calls)) not in keys[known:] or any(run in content for content in quoted):
                continue
            found = keys.index(key, known)
            before = text[at:begin]
            if written[found].before and (stripped := before.rstrip()).endswith(written[found].before):
                before = stripped + written[found].space
            pieces += [before, written[found].text]
            at, known = end, found + 1
        return "".join([*pieces, text[at:]])

    def _runs(self, text: str, longest: int) -> Iterator[tuple[int, int, list[tuple[str, Any]]]]:
        """Yield the beginning, the end and the calls of sections between which there is only white space."""
        run: tuple[int, int, list[tuple[str, Any]]] | None = None
        at = 0
        while (begin := text.find(self.start, at)) >= 0:
            at = begin + len(self.start)
            ends = (self.end,) if self.end else (self.start, *self.message_ends)
            if (close := min((to for mark in ends if (to := text.find(mark, at)) >= 0), default=-1)) < 0:
                break
            # A marker without its end, in the text of a user.
            begin = text.rfind(self.start, begin, close)
            at = begin + len(self.start)
            calls: list[tuple[str, Any]] = []
            # A parser can raise any exception, and text of users can look like a section.
            with suppress(Exception):
                if close - at <= longest:
                    parsed = self.parse(text[at:close])
                    for call in parsed if isinstance(parsed, list) else [parsed]:
                        arguments = call["arguments"]
                        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                        calls.append((call["name"], arguments))
            if not calls:
                continue
            end = close + (0 if not self.end or self.end in self.message_ends else len(self.end))
            if run is not None and not text[run[1] : begin].strip():
                run = run[0], end, run[2] + calls
            else:
                if run is not None:
                    yield run
                run = begin, end, calls
            at = end
        if run is not None:
            yield run
