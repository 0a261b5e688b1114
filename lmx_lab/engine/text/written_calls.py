"""Remember how a model wrote its tool calls, so that the next prompts contain the same text. Pure code.

A client sends calls back as parsed JSON, and a chat template writes them with other white space, escapes and order of
keys. The prompt would then differ from the cached prefix, and be computed again from the call on.

Whatever a template writes around calls, their text is found in the rendered chat by marks that are rendered in place of
their arguments. A search for the calls themselves would also find text of users that quotes one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any

MAX_ENTRIES = 512
"""Maximum number of texts that are remembered, two for each answer."""
MAX_CHARACTERS = 100_000
"""Maximum length of such a text."""
BEFORE = 8
"""Number of characters before the calls that must be the same, so that the white space between is changed too."""
AROUND = 1000
"""Maximum number of characters that a template writes between the arguments of a call and the marker before or after
it.
"""


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """The consecutive calls of an answer as the model wrote them."""

    text: str
    """Their text, from the first marker to the last one."""
    before: str
    """The end of the text before them; empty if the answer begins with them."""
    space: str
    """The white space between."""


class CallMemory:
    """The calls that one model wrote last. May be used on any thread."""

    def __init__(self) -> None:
        self._written: OrderedDict[tuple[str, str | None, bytes], WrittenCalls] = OrderedDict()
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
        if len(text) > MAX_CHARACTERS:
            return
        written = WrittenCalls(text, before[-BEFORE:], raw[len(before) : len(raw) - len(text)])
        # Arguments that a limit has cut off are not JSON.
        with suppress(ValueError, RecursionError):
            key = calls_key([(name, json.loads(arguments)) for _, name, arguments in calls])
            with self._lock:
                # Some clients of Ollama's format send no ids back.
                for entry in ((scope, calls[0][0], key), (scope, None, key)):
                    self._written[entry] = written
                    self._written.move_to_end(entry)
                while len(self._written) > MAX_ENTRIES:
                    self._written.popitem(last=False)

    def find(self, scope: str, message: Mapping[str, Any]) -> WrittenCalls | None:
        """Return how the model wrote the calls of a message of the history; None if they are not known, or changed."""
        if not self._written or not (calls := message.get("tool_calls")):
            return None
        try:
            key = calls_key([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        except (TypeError, ValueError, RecursionError):
            return None
        with self._lock:
            for entry in ((scope, calls[0].get("id"), key), (scope, None, key)):
                if entry in self._written:
                    self._written.move_to_end(entry)
                    return self._written[entry]
        return None


def calls_key(calls: Sequence[tuple[str, Any]]) -> bytes:
    """Return bytes that are the same for calls with the same names and the same arguments as JSON.

    Raises:
        TypeError, ValueError, RecursionError: the arguments are not JSON, or nested too deeply.
    """
    return blake2b(json.dumps(calls, sort_keys=True).encode(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class CallMarkers:
    """What a chat template writes around calls."""

    start: str
    end: str
    """See ``CallFormat``."""
    message_ends: Collection[str]
    """The texts of tokens that end a message. They are not part of a section."""


class MarkedChat:
    """The messages of a chat in which calls have marks instead of their arguments.

    Args:
        written: The calls to mark, by the indices of their messages.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], written: Mapping[int, WrittenCalls]) -> None:
        self.messages = list(messages)
        self._written = written
        self._marks: dict[int, list[str]] = {}
        # No text of a user contains it.
        self._mark = f"mark{secrets.token_hex(8)}n"
        for at in written:
            message = messages[at]
            self._marks[at] = [f"{at}n{number}" for number in range(len(message["tool_calls"]))]
            calls = [
                {**call, "function": {**call["function"], "arguments": {"mark": f"{self._mark}{mark}e"}}}
                for call, mark in zip(message["tool_calls"], self._marks[at], strict=True)
            ]
            self.messages[at] = {**message, "tool_calls": calls}

    def restore(self, text: str, markers: CallMarkers) -> tuple[str, set[int]]:
        """Replace the marked calls in the rendered text of the chat with those that the model wrote.

        Returns:
            The text, and the indices of the messages whose marked calls could not be replaced.
        """
        places = defaultdict[str, list[int]](list)
        for found in re.finditer(rf"{self._mark}(\d+n\d+)e", text):
            places[found[1]].append(found.start())
        pieces, end, left = list[str](), 0, set[int]()
        for at, written in self._written.items():
            marks = [place for mark in self._marks[at] for place in places[mark]]
            section = _section(text, end, marks, markers) if len(marks) == len(self._marks[at]) else None
            if section is None:
                left.add(at)
                continue
            before = text[end : section[0]]
            if written.before and (stripped := before.rstrip()).endswith(written.before):
                before = stripped + written.space
            pieces += [before, written.text]
            end = section[1]
        return "".join([*pieces, text[end:]]), left


def _section(text: str, after: int, marks: Sequence[int], markers: CallMarkers) -> tuple[int, int] | None:
    """Return the beginning and the end of the calls with these marks; None if there is other text between them."""
    stops = (markers.end or markers.start, *markers.message_ends)
    begin = opened = text.rfind(markers.start, max(after, marks[0] - AROUND), marks[0])
    end = after
    for number, mark in enumerate(marks, 1):
        if opened < 0 or any(text.find(stop, opened + len(markers.start), mark) >= 0 for stop in stops):
            return None
        if number < len(marks):
            opened = text.find(markers.start, mark, marks[number])
            if opened < 0:
                # The next call is in the same section.
                opened = mark - len(markers.start)
                continue
        close = min((to for stop in stops if (to := text.find(stop, mark, mark + AROUND)) >= 0), default=-1)
        if close < 0 or not text.startswith(markers.end, close):
            return None
        end = close + (0 if markers.end in markers.message_ends else len(markers.end))
        if number < len(marks) and text[end:opened].strip():
            return None
    return begin, end
