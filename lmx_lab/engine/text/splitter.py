"""Convert tokens to text exactly: joined, the streamed pieces are the same wherever text was held back.

Pure code. A ``TextSplitter`` takes token ids one by one and returns the text that can no longer change. It holds back
an incomplete UTF-8 character and the possible beginning of a stop string, and loses neither at the end. Entries that
the caller attaches to tokens, such as log-probabilities, are returned together with the text of their tokens. With a
``ChannelFormat`` it splits the text into reasoning, content and tool calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lmx_lab.engine.text.channels import REASONING, TOOL, ChannelFormat, ChannelOutput, ChannelParser, StopStrings
from lmx_lab.values.outputs import ToolCallDelta

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, and a token at least one: at most this many tokens are missing from a character.
MAX_MISSING = 3
# A broken run of LONG_RUN tokens is cut to its last KEPT_TOKENS. They contain MAX_MISSING characters that are held
# back, and MAX_MISSING more that a cut inside a character can spoil, of 4 bytes each.
LONG_RUN = 32
KEPT_TOKENS = 4 * 2 * MAX_MISSING

Token = int | str
"""A token id, or a text if ``decode`` joins texts."""
Decode = Callable[[Sequence[Any]], str]
E = TypeVar("E")


class Detokenizer:
    """Incremental decoding with the ``decode`` of any tokenizer, at constant cost per token.

    The tokens of the last complete piece are decoded again before the new ones, because a tokenizer may treat the first
    token of a text differently (a leading space).

    For byte-level tokenizers, the joined pieces equal the result of decoding everything at once. Tokenizers with byte
    tokens in addition to others (SentencePiece's byte fallback) replace a whole run of byte tokens if one byte of it is
    invalid. Here the valid characters of such a run are kept, and each other byte becomes one U+FFFD.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[Token] = []
        self._known = ""
        """Text of the context; all of it was returned."""
        self._pending: list[Token] = []
        self._text = ""
        """Text of the pending tokens; its first ``_sent`` characters were returned."""
        self._sent = 0
        self._returned = 0
        self.start = 0
        """Position in the whole text, in characters, where the last token changed the text or began its own."""

    @property
    def length(self) -> int:
        """Length of the whole text in characters if it ended here."""
        return self._returned - self._sent + len(self._text)

    def add(self, token: Token) -> str:
        """Add a token and return the text that it completes, possibly ``""``."""
        self._pending.append(token)
        before, text = self._text, self._decode([*self._context, *self._pending])
        if text.startswith(self._known):
            self._text = text[len(self._known) :]
        else:
            # Byte fallback: an invalid byte has changed the text of the context, which was already returned.
            self._text = self._decode(self._pending)
        self.start = self._returned - self._sent
        if before:
            differs = (at for at, (old, new) in enumerate(zip(before, self._text, strict=False)) if old != new)
            self.start += next(differs, min(len(before), len(self._text)))
        if self._text.endswith(REPLACEMENT):
            return self._return_settled()
        if self._text:
            return self._return_all()
        if self._context or len(self._pending) > KEPT_TOKENS:
            # A special token that is skipped: decoding it again and again would change nothing.
            self._pending.pop()
        return ""

    def finish(self) -> str:
        """Return the text that was held back; incomplete characters become U+FFFD."""
        piece, self._sent = self._text[self._sent :], len(self._text)
        self._returned += len(piece)
        return piece

    def cut(self) -> str:
        """Return the text that was held back, as at the end. Tokens that follow are not decoded as a new text."""
        piece = self.finish()
        if self._pending:
            self._set_context(self._pending, self._decode(self._pending))
        return piece

    def _return_all(self) -> str:
        piece = self._text[self._sent :]
        self._context, self._known = self._pending, self._decode(self._pending)
        self._pending, self._text, self._sent = [], "", 0
        self._returned += len(piece)
        return piece

    def _return_settled(self) -> str:
        """Return the part of a text ending in U+FFFD that no further token can change."""
        invalid = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        for size in range(1, min(invalid, MAX_MISSING + 1) + 1) if invalid > 1 else ():
            valid = self._decode(self._pending[-size:])
            if valid and REPLACEMENT not in valid:
                # Byte fallback: a character after an invalid byte.
                piece = self._text[self._sent : -size] + valid
                self._set_context(self._pending[-size:], valid)
                self._returned += len(piece)
                return piece
        settled = max(self._sent, len(self._text) - min(invalid, MAX_MISSING))
        piece, self._sent = self._text[self._sent : settled], settled
        self._returned += len(piece)
        # A run that cannot be cut: the beginning of a character that was never completed, followed by tokens without
        # text.
        if len(self._pending) >= 2 * LONG_RUN:
            return piece + self._return_all()
        if len(self._pending) >= LONG_RUN:
            # Drop the beginning of a run that stays broken, unless that would change the text of the rest.
            held, text = len(self._text) - self._sent, self._decode(self._pending[-KEPT_TOKENS:])
            if len(text) >= held + MAX_MISSING:
                self._context, self._known, self._pending = [], "", self._pending[-KEPT_TOKENS:]
                self._text, self._sent = text, len(text) - held
        return piece

    def _set_context(self, context: list[Token], known: str) -> None:
        self._context, self._known = context, known
        self._pending, self._text, self._sent = [], "", 0


@dataclass(frozen=True, slots=True)
class SplitText(Generic[E]):
    """Text that can no longer change, and the entries of its tokens."""

    text: str
    stopped: bool
    """Whether the generation ends here: at a stop string, or where it repeats a call."""
    entries: tuple[E, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True)
class _WaitingEntry(Generic[E]):
    """An entry and the position of its token's text, in characters of the whole text."""

    entry: E
    start: int
    end: int


class TextSplitter(Generic[E]):
    """Converts the token ids of one answer to text; with a ``ChannelFormat``, to reasoning, content and tool calls.

    An entry is returned when all the text of its token was returned or dropped. If a stop string cuts the text, the
    last piece has the entries of the tokens that begin before the cut; the others are dropped. The entry of a token
    without text is returned with the text before it.
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str], channels: ChannelFormat | None = None, *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._channels = None if channels is None else ChannelParser(channels, stops)
        self.stops = StopStrings(stops) if self._channels is None else self._channels.stops
        self._missing_tokens = min_tokens
        """Number of tokens until stop strings are searched."""
        self.is_plain = channels is None and not stops
        """Whether the text is only decoded, and not divided or searched."""
        if channels is not None:
            self._literals = channels.literals
            self._literals_in_calls = channels.calls is not None and channels.calls.parse is not None
            """Whether special tokens count as text anywhere in a call, and not only inside a marker."""
            self._markers = [marker for leaving in channels.transitions.values() for marker, _ in leaving]
        self._waiting: deque[_WaitingEntry[E]] = deque()
        self._passed = 0
        """Number of characters that were returned or dropped."""
        self._inserted = 0
        """Number of characters of literals; the detokenizer does not count them."""
        self.reasoning_tokens = 0
        """Number of tokens in the reasoning, including its end marker."""

    @property
    def has_called(self) -> bool:
        """Whether at least the first delta of a tool call was returned."""
        return self._channels is not None and self._channels.has_called

    def add(self, token: Token, entry: E | None = None, *, count: int = 1) -> SplitText[E]:
        """Add a token and return what it completes.

        Args:
            count: Number of tokens that ``token`` stands for.
        """
        self.stops.enabled = self._missing_tokens <= 0
        self._missing_tokens -= count
        if self._channels is None:
            text, stopped = self._detokenizer.add(token), False
            if not self.is_plain:
                text, stopped = self.stops.feed(text)
            if entry is not None:
                self._add_entry(entry, self._detokenizer.start, self._detokenizer.length)
            self._passed += len(text)
            return SplitText(text, stopped, self._take_entries(stopped=stopped) if self._waiting else ())
        before = self._channels.state
        literal = self._literals.get(token, "") if isinstance(token, int) else ""
        if not (self._literals_in_calls and before == TOOL) and not any(literal in it for it in self._markers):
            literal = ""
        text = self._detokenizer.cut() + literal if literal else self._detokenizer.add(token)
        start = self._inserted + (self._detokenizer.length if literal else self._detokenizer.start)
        self._inserted += len(literal)
        if entry is not None:
            self._add_entry(entry, start, self._inserted + self._detokenizer.length)
        output = self._channels.feed(text)
        self._passed = self._channels.passed
        if REASONING in (before, self._channels.state):
            self.reasoning_tokens += count
        return _join([output], self._take_entries(stopped=output.stopped))

    def finish(self) -> SplitText[E]:
        """Return the rest at the end of generation. A stop string can still be completed here."""
        if self._channels is None:
            text, stopped = self._detokenizer.finish(), False
            if not self.is_plain:
                text, stopped = self.stops.feed(text)
                text += "" if stopped else self.stops.finish()
            self._passed += len(text)
            return SplitText(
                text, stopped, self._take_entries(stopped=stopped, ended=not stopped) if self._waiting else ()
            )
        outputs = [self._channels.feed(self._detokenizer.finish())]
        if not outputs[0].stopped:
            outputs.append(self._channels.finish())
        self._passed = self._channels.passed
        stopped = outputs[-1].stopped
        return _join(outputs, self._take_entries(stopped=stopped, ended=not stopped))

    def _add_entry(self, entry: E, start: int, end: int) -> None:
        for earlier in reversed(self._waiting):
            if earlier.end <= end:
                break
            # Bytes of several tokens turned out to be one character.
            earlier.end = end
        self._waiting.append(_WaitingEntry(entry, start, end))

    def _take_entries(self, *, stopped: bool, ended: bool = False) -> tuple[E, ...]:
        """Remove and return the entries whose text was returned or dropped; with ``ended``, all of them."""
        entries, waiting, passed = [], self._waiting, self._passed
        while waiting and (ended or waiting[0].end <= passed or (stopped and waiting[0].start < passed)):
            entries.append(waiting.popleft().entry)
        return tuple(entries)


def _join(outputs: Sequence[ChannelOutput], entries: tuple[E, ...]) -> SplitText[E]:
    return SplitText(
        text="".join(text for output in outputs for text in output.content),
        stopped=outputs[-1].stopped,
        entries=entries,
        reasoning="".join(text for output in outputs for text in output.reasoning),
        calls=tuple(call for output in outputs for call in output.calls),
    )
