"""Split the text of an answer into channels as it arrives: reasoning, content and tool calls. Pure code.

All positions are in characters of the raw text, which is everything that the model wrote, including markers. Text that
is held back is always the end of the raw text, so a single number (``passed``) describes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lmx_lab.engine.text.tool_calls import (
    CallFormat,
    CallNumbering,
    CallReader,
    EnforcedCallReader,
    ParsedCallReader,
    UnmarkedCalls,
)
from lmx_lab.values.outputs import ToolCallDelta

CONTENT, REASONING, TOOL = "normal", "reasoning", "tool"
"""States of mlx-lm's ``TextStateMachine``. Text in any other state, such as a header, is dropped."""


@dataclass(frozen=True, kw_only=True)
class ChannelFormat:
    """The markers that divide the text of an answer into reasoning, content and tool calls."""

    initial: str = CONTENT
    """The state in which the answer begins. The prompt may have opened the reasoning already."""
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """For each state, the markers that end it and the states that follow. Markers are not part of any channel."""
    reasoning_first: bool = False
    """Whether reasoning can begin only before any content. Later its start marker is ordinary text."""
    calls: CallFormat | None = None
    remember: Callable[[Sequence[tuple[str, str, str]], str, int], object] | None = None
    """Gets the consecutive calls of an answer: see ``CallMemory.add``, from ``calls`` on."""
    literals: Mapping[int, str] = field(default_factory=dict)
    """Special tokens by id, as text, except those that end an answer. They count as text inside a marker and inside a
    call in the model's own format; elsewhere they are dropped."""


class StopStrings:
    """Cuts a text stream at the first stop string, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.enabled = True
        """Whether stop strings are searched. Text that arrives before is never a part of one."""
        self.found: str | None = None
        """The stop string that was found; None if none was."""

    @property
    def held(self) -> int:
        """Number of characters held back."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain, and whether a stop string was found. The stop string is not part of it."""
        if not self._stops or not self.enabled:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first, as if the text had arrived one character at a time.
            _, at, self.found = min(found)
            self._held = ""
            return text[:at], True
        held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        """Return the text that was held back; it turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


@dataclass(slots=True)
class ChannelOutput:
    """The pieces of each channel that some text completed."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    stopped: bool = False
    """Whether the answer ends here: at a stop string, or where it repeats a call."""


class TrailingWhitespace:
    """Holds back whitespace until other text follows."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self.held = 0
        """Number of characters held back."""

    def feed(self, text: str) -> str:
        """Return the text up to its trailing whitespace, after whitespace that was held back before."""
        stripped = text.rstrip()
        output = self.take() + stripped if stripped else ""
        if len(stripped) < len(text):
            self._held.append(text[len(stripped) :])
            self.held += len(text) - len(stripped)
        return output

    def take(self) -> str:
        """Return the whitespace that was held back, and forget it."""
        held, self._held, self.held = "".join(self._held), [], 0
        return held


class ChannelParser:
    """Splits the raw text of one answer into its channels.

    Stop strings are searched in the content as the client sees it, without the whitespace that is dropped. The search
    starts again after every marker. A section without a valid call is content, with its markers.
    """

    def __init__(self, format: ChannelFormat, stops: Sequence[str]) -> None:
        transitions = {state: list(leaving) for state, leaving in format.transitions.items()}
        targets = {state for leaving in transitions.values() for _, state in leaving}
        states = {*transitions, *targets, format.initial}
        self._has_content = CONTENT in states
        self._transitions = {state: [edge for edge in transitions.get(state, []) if edge[0]] for state in states}
        self._held = ""
        """Text that may be the beginning of a marker."""
        self.state = format.initial
        self.stops = StopStrings(stops)
        self._call_format = format.calls
        self._numbering = CallNumbering()
        self._call: CallReader | None = None
        unmarked = format.calls.unmarked if format.calls is not None else None
        self._unmarked = UnmarkedCalls(unmarked, self._numbering) if unmarked is not None else None
        self._whitespace = TrailingWhitespace()
        """Trailing whitespace of the content, which is dropped if a call follows."""
        self._reasoning_whitespace = TrailingWhitespace()
        self._drops_leading_whitespace = format.initial == REASONING or format.reasoning_first
        """Whether whitespace that arrives now is at the beginning of the reasoning, or of the content after it."""
        self._may_reason = True
        self._reasoning_first = format.reasoning_first
        self._after_call = False
        """Whether only whitespace has followed the last call."""
        self._read = 0
        self._remember = format.remember
        self._raw: list[str] = []
        """The raw text, if calls are remembered."""
        self._section_begin = self._run_begin = self._run_end = 0
        self._run: list[tuple[str, str, list[str]]] = []
        """The ids, names and arguments of consecutive calls, which are between ``_run_begin`` and ``_run_end``."""
        self._cut: int | None = None
        self._output = ChannelOutput()
        if format.initial == TOOL:
            self._open_call("")

    @property
    def has_called(self) -> bool:
        """Whether at least the first delta of a call was returned."""
        return self._numbering.count > 0

    @property
    def passed(self) -> int:
        """Length of the raw text that was returned or dropped. If the answer was ended, it is the position of the
        end.
        """
        if self._cut is not None:
            return self._cut
        in_call = self._call.held if self._call is not None else 0
        in_call += self._unmarked.held if self._unmarked is not None else 0
        return self._read - in_call - self._whitespace.held - self._reasoning_whitespace.held - self.stops.held

    def feed(self, text: str) -> ChannelOutput:
        """Read more text and return what it completes."""
        self._held += text
        if self._remember is not None:
            self._raw.append(text)
        while self._cut is None:
            edges = self._transitions[self.state]
            found = [(at, marker, after) for marker, after in edges if (at := self._held.find(marker)) >= 0]
            if not found:
                partial = max((overlap(self._held, marker) for marker, _ in edges), default=0)
                self._pass(len(self._held) - partial)
                break
            # The marker that is complete first.
            at, marker, after = min(found, key=lambda it: (it[0] + len(it[1]), it[0]))
            self._pass(at)
            if self._cut is None:
                self._held = self._held[len(marker) :]
                self._read_marker(marker, after)
        return self._take_output()

    def finish(self) -> ChannelOutput:
        """Return the rest at the end of generation."""
        self._pass(len(self._held))
        if self._call is not None:
            self._close_call("")
        self._output.reasoning.append(self._reasoning_whitespace.take())
        self._end_content()
        if self._after_call:
            self._end_run()
        return self._take_output()

    def _take_output(self) -> ChannelOutput:
        output, self._output = self._output, ChannelOutput()
        return output

    # Markers

    def _pass(self, count: int) -> None:
        """Pass the first ``count`` held characters to the current state."""
        text, self._held = self._held[:count], self._held[count:]
        self._read += count
        self._process(self.state, text)

    def _read_marker(self, marker: str, after: str) -> None:
        before = self.state
        in_string = self._call is not None and self._call.in_string
        if in_string or (before == CONTENT and after == REASONING and not self._may_reason):
            # It is ordinary text: an argument can contain the end marker, and content the start marker of reasoning.
            self._read += len(marker)
            self._process(before, marker)
            return
        self.state = after
        if before == CONTENT and after != TOOL:
            self._end_content()
        elif before == CONTENT:
            self._end_unmarked()
        self._read += len(marker)
        if before == TOOL and self._call is not None:
            self._close_call(marker)
            marker = ""
        if before == REASONING:
            space = self._reasoning_whitespace.take()
            self._output.reasoning += [space] if after == REASONING else []
        if REASONING in (before, after) and before != after:
            self._drops_leading_whitespace = True
        if after == TOOL:
            self._open_call(marker)

    def _process(self, state: str, text: str) -> None:
        if not text or self._cut is not None:
            return
        if state == CONTENT:
            self._process_content(text)
        elif state == REASONING:
            self._output.reasoning.append(self._reasoning_whitespace.feed(self._strip_leading(text)))
        elif self._call is not None:
            self._process_call(self._call, self._call.feed(text))

    def _strip_leading(self, text: str) -> str:
        if self._drops_leading_whitespace:
            text = text.lstrip()
            self._drops_leading_whitespace = not text
        return text

    # Content

    def _process_content(self, text: str) -> None:
        text = self._strip_leading(text)
        if self._reasoning_first and text.strip():
            self._may_reason = False
        self._output_content(self._whitespace.feed(text) if self._call_format is not None else text)

    def _output_content(self, text: str) -> None:
        """Output text that is certain to be content. It is followed only by whitespace that is held back."""
        if not text or self._cut is not None:
            return
        if self._after_call:
            self._end_run()
        begin = self._read - self._whitespace.held - len(text) - self.stops.held
        certain, stopped = self.stops.feed(text)
        self._append_content(certain)
        if stopped:
            self._output.stopped = True
            self._cut = begin + len(certain)
            self._end_unmarked()
            self._end_run()

    def _end_content(self) -> None:
        space = self._whitespace.take()
        if not self._after_call:
            self._output_content(space)
        if self._cut is None:
            self._append_content(self.stops.finish())
            self._end_unmarked()

    def _append_content(self, text: str) -> None:
        self._output.content.append(text if self._unmarked is None else self._unmarked.feed(text))

    # Calls

    def _end_unmarked(self) -> None:
        """Decide whether the content that is held back consists of calls."""
        if self._unmarked is not None:
            end = self._read - self._whitespace.held - self.stops.held if self._cut is None else self._cut
            begin, count = end - self._unmarked.held, self._unmarked.count
            text, calls = self._unmarked.finish()
            self._output.content.append(text)
            self._output_calls(calls, begin)
            # A text with more calls than the client gets is not the text of these calls.
            if calls and len(calls) == count:
                self._run_end = end

    def _open_call(self, marker: str) -> None:
        calls = self._call_format
        if calls is None:
            return
        self._section_begin = self._read - len(marker)
        if calls.parse is None:
            self._call = EnforcedCallReader(marker, self._numbering, may_repeat=calls.may_repeat)
        else:
            self._call = ParsedCallReader(calls.parse, marker, self._numbering)

    def _close_call(self, marker: str) -> None:
        call, self._call = self._call, None
        assert call is not None
        if not call.accepted:
            self._process_call(call, call.close(marker))
        if call.accepted:
            self._run_end = self._read
        elif self._has_content:
            self._drops_leading_whitespace = False
            self._process_content(call.raw)

    def _process_call(self, call: CallReader, deltas: list[ToolCallDelta]) -> None:
        if any(delta.id is not None for delta in deltas):
            # The first delta of a call: whitespace before it is dropped, and no stop string can begin before it.
            self._whitespace.take()
            self._append_content(self.stops.finish())
            self._drops_leading_whitespace = False
        self._output_calls(deltas, self._section_begin)
        if call.repeats:
            self._output.stopped = True
            self._cut = self._read - call.held
            self._end_run()

    def _output_calls(self, deltas: Sequence[ToolCallDelta], begin: int) -> None:
        """Output calls of a section, or of calls without markers, that begins at a position of the raw text."""
        self._output.calls += deltas
        for delta in deltas:
            if delta.id is not None:
                if not self._after_call:
                    self._run, self._run_begin, self._after_call = [], begin, True
                self._run.append((delta.id, delta.name or "", []))
            self._run[-1][2].append(delta.arguments)

    def _end_run(self) -> None:
        """Remember the consecutive calls, which nothing but white space has followed."""
        if self._after_call and self._run_end and self._remember is not None:
            calls = [(id_, name, "".join(arguments)) for id_, name, arguments in self._run]
            self._remember(calls, "".join(self._raw)[: self._run_end], self._run_begin)
        self._after_call, self._run_end = False, 0
