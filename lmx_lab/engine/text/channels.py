"""The channels of an answer, thoughts, content and tool calls, divided as its text comes. Pure code.

All positions are in characters of the raw text: everything the model wrote, markers included. What is held back is
always the end of it, so ``passed`` is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmx_lab.engine.text.tool_calls import CallFormat, CallReader, Numbering, reader
from lmx_lab.values.generation import ToolCallDelta

CONTENT, REASONING, TOOL = "normal", "reasoning", "tool"
"""States of mlx-lm's ``TextStateMachine``. Text in any other state, such as a header, is not shown."""


@dataclass(frozen=True, kw_only=True)
class AnswerShape:
    initial: str = CONTENT
    """The state in which the answer begins: the prompt may have opened the thoughts."""
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """From each state, the markers that end it and the states after them; the markers are not shown."""
    thoughts_first: bool = False
    """Thoughts begin where no content has come before; later their marker is a text like any other."""
    calls: CallFormat | None = None
    literals: Mapping[int, str] = field(default_factory=dict)
    """Special tokens by id, as text, without those that end an answer. They are text where they are in a marker, or
    inside a call in the model's own format; elsewhere they show nothing."""


class StopStrings:
    """Cuts a stream of text at the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def held(self) -> int:
        """Characters that wait for what follows."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is free to go, and whether a stop string was met (which is not part of the text)."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first, as if the text had come letter by letter.
            self._held = ""
            return text[: min(found)[1]], True
        hold = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def finish(self) -> str:
        """What was held back and turned out to be ordinary text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


@dataclass(slots=True)
class Parts:
    """What some text has set free, in pieces."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    stopped: bool = False


class TrailingSpace:
    """Holds back whitespace until something else follows."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self.held = 0
        """Characters."""

    def feed(self, text: str) -> str:
        """The text that is free to go: it does not end in whitespace."""
        kept = text.rstrip()
        free = self.take() + kept if kept else ""
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])
            self.held += len(text) - len(kept)
        return free

    def take(self) -> str:
        """What is held back."""
        held, self._held, self.held = "".join(self._held), [], 0
        return held


class Channels:
    """One answer's way from raw text to its channels.

    Stop strings are looked for in the content as its reader sees it, without the whitespace that is dropped, and anew
    after every marker. A section of calls that is none is content, as if its markers were not.
    """

    def __init__(self, shape: AnswerShape, stops: Sequence[str]) -> None:
        edges = {state: list(edges) for state, edges in shape.transitions.items()}
        after = {state for leaving in edges.values() for _, state in leaving}
        states = {*edges, *after, shape.initial}
        self._shows_content = CONTENT in states
        self._edges = {state: [edge for edge in edges.get(state, []) if edge[0]] for state in states}
        self._held = ""
        """Text that may be the beginning of a marker."""
        self.state = shape.initial
        self._stops = StopStrings(stops)
        self._format = shape.calls
        self._numbering = Numbering()
        self._call: CallReader | None = None
        self._space = TrailingSpace()
        """Of the content: a call may follow."""
        self._thought_space = TrailingSpace()
        self._leading = shape.initial == REASONING or shape.thoughts_first
        """Whitespace that comes now begins the thoughts, or the content after them."""
        self._may_think = True
        self._thoughts_first = shape.thoughts_first
        self._after_call = False
        """Nothing but whitespace since the last call."""
        self._read = 0
        self._cut: int | None = None
        self._parts = Parts()
        if shape.initial == TOOL:
            self._open("")

    @property
    def called(self) -> bool:
        """Whether a call has been given out, its first piece at least."""
        return self._numbering.count > 0

    @property
    def passed(self) -> int:
        """How much of the raw text is not held back: given out or dropped. Where a stop string cuts, up to the cut."""
        if self._cut is not None:
            return self._cut
        waiting = self._call.held if self._call is not None else 0
        return self._read - waiting - self._space.held - self._thought_space.held - self._stops.held

    def feed(self, text: str) -> Parts:
        """What this text sets free."""
        self._held += text
        while self._cut is None and (found := self._next_marker()) is not None:
            at, marker, after = found
            self._pass(at)
            if self._cut is None:
                self._held = self._held[len(marker) :]
                self._meet(marker, after)
        if self._cut is None:
            waiting = max((overlap(self._held, marker) for marker, _ in self._edges[self.state]), default=0)
            self._pass(len(self._held) - waiting)
        return self._given()

    def finish(self) -> Parts:
        """The rest, at the end of generation."""
        self._pass(len(self._held))
        if self._call is not None:
            self._close("")
        self._parts.reasoning.append(self._thought_space.take())
        self._end_content()
        return self._given()

    def _given(self) -> Parts:
        given, self._parts = self._parts, Parts()
        return given

    # Markers

    def _next_marker(self) -> tuple[int, str, str] | None:
        """Where the marker begins that is complete first, itself, and the state after it."""
        found = [(at, marker, to) for marker, to in self._edges[self.state] if (at := self._held.find(marker)) >= 0]
        return min(found, key=lambda it: (it[0] + len(it[1]), it[0]), default=None)

    def _pass(self, count: int) -> None:
        """Hand on so many characters of the present state."""
        text, self._held = self._held[:count], self._held[count:]
        self._read += count
        self._take(self.state, text)

    def _meet(self, marker: str, after: str) -> None:
        before = self.state
        if self._is_text(before, after):
            self._read += len(marker)
            self._take(before, marker)
        else:
            self.state = after
            self._change(before, marker, after)

    def _is_text(self, before: str, after: str) -> bool:
        """Whether what looks like a marker is none: an argument may quote the end marker, content that of thoughts."""
        if self._call is not None and self._call.in_string:
            return True
        return before == CONTENT and after == REASONING and not self._may_think

    def _take(self, state: str, text: str) -> None:
        if not text or self._cut is not None:
            return
        if state == CONTENT:
            self._take_content(text)
        elif state == REASONING:
            self._parts.reasoning.append(self._thought_space.feed(self._without_leading(text)))
        elif self._call is not None:
            self._take_call(self._call, self._call.feed(text))

    def _change(self, before: str, marker: str, after: str) -> None:
        if before == CONTENT and after != TOOL:
            self._end_content()
        self._read += len(marker)
        if before == TOOL and self._call is not None:
            self._close(marker)
            marker = ""
        if before == REASONING:
            space = self._thought_space.take()
            self._parts.reasoning += [space] if after == REASONING else []
        if REASONING in (before, after) and before != after:
            self._leading = True
        if after == TOOL:
            self._open(marker)

    def _without_leading(self, text: str) -> str:
        if self._leading:
            text = text.lstrip()
            self._leading = not text
        return text

    # Content

    def _take_content(self, text: str) -> None:
        text = self._without_leading(text)
        if self._thoughts_first and text.strip():
            self._may_think = False
        self._show(self._space.feed(text) if self._format is not None else text)

    def _show(self, text: str) -> None:
        """Text that is content for certain; what has been read ends with it, but for the space behind it."""
        if not text or self._cut is not None:
            return
        self._after_call = False
        begin = self._read - self._space.held - len(text) - self._stops.held
        free, stopped = self._stops.feed(text)
        self._parts.content.append(free)
        if stopped:
            self._parts.stopped = True
            self._cut = begin + len(free)

    def _end_content(self) -> None:
        space = self._space.take()
        if not self._after_call:
            self._show(space)
        if self._cut is None:
            self._parts.content.append(self._stops.finish())

    # Calls

    def _open(self, marker: str) -> None:
        if self._format is not None:
            self._call = reader(self._format, marker, self._numbering)

    def _close(self, marker: str) -> None:
        call, self._call = self._call, None
        assert call is not None
        if call.accepted:
            return
        self._take_call(call, call.close(marker))
        if not call.accepted and self._shows_content:
            self._leading = False
            self._take_content(call.raw)

    def _take_call(self, call: CallReader, deltas: list[ToolCallDelta]) -> None:
        if any(delta.id is not None for delta in deltas):
            # Its first piece: the space before it goes, and a stop string does not begin before it.
            self._space.take()
            self._parts.content.append(self._stops.finish())
            self._leading, self._after_call = False, True
        self._parts.calls += deltas
