"""The channels of an answer, thoughts, content and tool calls, divided as its text comes. Pure code.

All positions are in characters of the raw text: everything the model wrote, markers included. What is held back is
always the end of it, so ``passed`` is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_lm.generate import TextStateMachine

from lmx_lab.engine.calls import CallReader, Numbering, reader
from lmx_lab.engine.requests import ToolCallDelta
from lmx_lab.engine.shape import CONTENT, REASONING, TOOL, AnswerShape
from lmx_lab.engine.stops import StopStrings

Segment = tuple[str, str]
"""A state, and text in it."""


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
        self._machine = TextStateMachine({state: edges.get(state, []) for state in states})
        self._shows_content = CONTENT in states
        # Of markers that begin alike, the machine meets the shortest.
        self._markers = {
            state: sorted((text for text, _ in leaving if text), key=len) for state, leaving in edges.items()
        }
        self._longest = max((len(text) for texts in self._markers.values() for text in texts), default=0)
        self._position = self._machine.make_state(initial=shape.initial)
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
    def state(self) -> str:
        state: str = self._position[0]
        return state

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
        while text:
            raw = self._position[3] + text
            self._position, segments = TextStateMachine.split(self._position, text)
            self._bound(segments)
            text = self._pass(raw, segments)
        return self._given()

    def finish(self) -> Parts:
        """The rest, at the end of generation."""
        self._position, rest, state = TextStateMachine.flush(self._position)
        self._read += len(rest)
        self._take(state, rest)
        if self._call is not None:
            self._close("")
        self._parts.reasoning.append(self._thought_space.take())
        self._end_content()
        return self._given()

    def _given(self) -> Parts:
        given, self._parts = self._parts, Parts()
        return given

    # Segments

    def _bound(self, segments: list[Segment]) -> None:
        """Let go what the machine holds of a run like ``<<<<``: no marker can begin so far back."""
        state, node, states, held = self._position
        if (excess := len(held) - self._longest) > 0:
            segments[-1] = (state, segments[-1][1] + held[:excess])
            self._position = (state, node, states, held[excess:])

    def _pass(self, raw: str, segments: list[Segment]) -> str:
        """Hand on the segments of the raw text; the text that has to be read again."""
        at = 0
        for number, (state, text) in enumerate(segments):
            at += len(text)
            self._read += len(text)
            self._take(state, text)
            if self._cut is not None or number == len(segments) - 1:
                break
            marker = next(marker for marker in self._markers[state] if raw.startswith(marker, at))
            at += len(marker)
            after = segments[number + 1][0]
            if self._is_text(state, after):
                self._read += len(marker)
                self._take(state, marker)
                self._position = self._machine.make_state(initial=state)
                return raw[at:]
            self._change(state, marker, after)
        return ""

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
