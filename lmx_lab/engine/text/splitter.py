"""Tokens to text, exactly: what is streamed, joined, does not depend on where it was held back.

Pure code. A ``TextSplitter`` takes token ids one by one and hands out the text that can no longer change: it holds back
an unfinished UTF-8 character and the possible beginning of a stop string, and loses neither at the end. With the text
go the entries of its tokens, whatever the caller keeps for each. Given the answer's shape, it divides the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lmx_lab.engine.text.channels import REASONING, TOOL, AnswerShape, Channels, Parts, StopStrings
from lmx_lab.values.generation import ToolCallDelta

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, and a token at least one: so many can be missing its end.
OPEN = 3
# A broken run of LONG tokens is cut to the last KEPT. These have OPEN characters to hold, OPEN that a cut inside a
# character can spoil, and 4 bytes a character at most.
LONG = 32
KEPT = 4 * 2 * OPEN
# A run that cannot be cut: nothing but tokens without text after the beginning of a character, which is none then.
HOPELESS = 2 * LONG

Token = int | str
"""An id; or a text by itself, where ``decode`` joins texts."""
Decode = Callable[[Sequence[Any]], str]
E = TypeVar("E")


class Detokenizer:
    """Incremental decoding with any tokenizer's ``decode``, at constant cost per token.

    The tokens of the last complete piece are decoded again in front of the new ones, because a tokenizer may treat the
    first token of a text differently (a leading space).

    For byte-level tokenizers the pieces, joined, are what decoding everything at once gives. Tokenizers with byte
    tokens beside others (SentencePiece's byte fallback) give up on all of a run of them that has one wrong byte; here
    the valid characters of such a run are kept, and each other byte is one U+FFFD.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[Token] = []
        self._known = ""
        """The text of the context, all of it out."""
        self._unread: list[Token] = []
        self._text = ""
        """The text of the unread tokens, its first ``_sent`` characters out already."""
        self._sent = 0
        self._given = 0
        self.start = 0
        """Where the last token has changed the text, or begun its own, in characters of the whole text."""

    @property
    def length(self) -> int:
        """Characters of the whole text, if it ended here."""
        return self._given - self._sent + len(self._text)

    def add(self, token: Token) -> str:
        """The text that this token completes, or ``""``."""
        self._unread.append(token)
        before, self._text = self._text, self._read()
        self.start = self._given - self._sent
        if before:
            self.start += _first_difference(before, self._text)
        if self._text.endswith(REPLACEMENT):
            return self._give_settled()
        if self._text:
            return self._give_all()
        if self._context or len(self._unread) > KEPT:
            # A skipped special token: decoding it again and again would change nothing.
            self._unread.pop()
        return ""

    def finish(self) -> str:
        """What was held back; torn characters come out as U+FFFD."""
        piece, self._sent = self._text[self._sent :], len(self._text)
        return self._give(piece)

    def cut(self) -> str:
        """What was held back, as at the end; what follows is read as not being the beginning of a text."""
        piece = self.finish()
        if self._unread:
            self._move(self._unread, self._decode(self._unread))
        return piece

    def _read(self) -> str:
        text = self._decode([*self._context, *self._unread])
        if text.startswith(self._known):
            return text[len(self._known) :]
        # Byte fallback: a wrong byte has spoilt the context, whose text is out.
        return self._decode(self._unread)

    def _give_all(self) -> str:
        piece = self._text[self._sent :]
        self._move(self._unread, self._decode(self._unread))
        return self._give(piece)

    def _give_settled(self) -> str:
        """Of a text that ends in U+FFFD, what no further token can change."""
        wrong = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        for size in range(1, min(wrong, OPEN + 1) + 1) if wrong > 1 else ():
            valid = self._decode(self._unread[-size:])
            if valid and REPLACEMENT not in valid:
                # Byte fallback: a character behind a wrong byte.
                piece = self._text[self._sent : -size] + valid
                self._move(self._unread[-size:], valid)
                return self._give(piece)
        settled = max(self._sent, len(self._text) - min(wrong, OPEN))
        piece = self._give(self._text[self._sent : settled])
        self._sent = settled
        if len(self._unread) >= HOPELESS:
            return piece + self._give_all()
        if len(self._unread) >= LONG:
            self._shorten()
        return piece

    def _shorten(self) -> None:
        """Forget the beginning of a run that stays broken; its held end, and what follows, are read the same."""
        held = len(self._text) - self._sent
        text = self._decode(self._unread[-KEPT:])
        if len(text) >= held + OPEN:
            self._context, self._known, self._unread = [], "", self._unread[-KEPT:]
            self._text, self._sent = text, len(text) - held

    def _move(self, context: list[Token], known: str) -> None:
        self._context, self._known = context, known
        self._unread, self._text, self._sent = [], "", 0

    def _give(self, piece: str) -> str:
        self._given += len(piece)
        return piece


def _first_difference(before: str, after: str) -> int:
    changed = (at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    return next(changed, min(len(before), len(after)))


@dataclass(frozen=True, slots=True)
class Piece(Generic[E]):
    """Text that is free to go, and the entries of the tokens that are out with it."""

    text: str
    stopped: bool
    """A stop string ends the generation here."""
    entries: tuple[E, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True)
class _Waiting(Generic[E]):
    """An entry and the place of its token's text, in characters of the whole text."""

    entry: E
    start: int
    end: int


class TextSplitter(Generic[E]):
    """One request's way from token ids to text; with a shape, to thoughts, content and tool calls.

    An entry goes out once all the text of its token is out, or dropped. Where a stop string cuts, the last piece has
    the entries of the tokens that begin before the cut; the others are dropped. Tokens that show nothing go with what
    is before them.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], shape: AnswerShape | None = None) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._channels = None if shape is None else Channels(shape, stops)
        self._literals = _Literals(shape)
        self._waiting: deque[_Waiting[E]] = deque()
        self._out = 0
        """Characters out so far."""
        self._inserted = 0
        """Characters of literals, which the detokenizer has not seen."""
        self.reasoning_tokens = 0
        """Tokens that belong to the thoughts, or to the marker that ends them."""

    @property
    def called(self) -> bool:
        """Whether a tool call has been given out, its first piece at least."""
        return self._channels is not None and self._channels.called

    def add(self, token: Token, entry: E | None = None, *, count: int = 1) -> Piece[E]:
        """What this token sets free; ``count`` is how many it stands for."""
        if self._channels is not None:
            return self._divide(self._channels, token, entry, count)
        text, stopped = self._stops.feed(self._detokenizer.add(token))
        if entry is not None:
            self._wait(entry, self._detokenizer.start, self._detokenizer.length)
        self._out += len(text)
        return Piece(text, stopped, self._free(stopped=stopped))

    def finish(self) -> Piece[E]:
        """The rest, at the end of generation; a stop string can complete even here."""
        if self._channels is not None:
            return self._divide_rest(self._channels)
        text, stopped = self._stops.feed(self._detokenizer.finish())
        if stopped:
            self._out += len(text)
            return Piece(text, True, self._free(stopped=True))
        return Piece(text + self._stops.finish(), False, self._rest())

    def _divide(self, channels: Channels, token: Token, entry: E | None, count: int) -> Piece[E]:
        before = channels.state
        literal = self._literals.get(token, before)
        text = self._detokenizer.cut() + literal if literal else self._detokenizer.add(token)
        start = self._inserted + (self._detokenizer.length if literal else self._detokenizer.start)
        self._inserted += len(literal)
        if entry is not None:
            self._wait(entry, start, self._inserted + self._detokenizer.length)
        parts = channels.feed(text)
        self._out = channels.passed
        if REASONING in (before, channels.state):
            self.reasoning_tokens += count
        return _joined([parts], self._free(stopped=parts.stopped))

    def _divide_rest(self, channels: Channels) -> Piece[E]:
        parts = [channels.feed(self._detokenizer.finish())]
        if not parts[0].stopped:
            parts.append(channels.finish())
        self._out = channels.passed
        stopped = parts[-1].stopped
        return _joined(parts, self._free(stopped=True) if stopped else self._rest())

    def _wait(self, entry: E, start: int, end: int) -> None:
        for earlier in reversed(self._waiting):
            if earlier.end <= end:
                break
            # Bytes that turned out to be one character together.
            earlier.end = end
        self._waiting.append(_Waiting(entry, start, end))

    def _free(self, *, stopped: bool) -> tuple[E, ...]:
        if not self._waiting:
            return ()
        free = []
        while self._waiting and self._is_free(self._waiting[0], stopped=stopped):
            free.append(self._waiting.popleft().entry)
        return tuple(free)

    def _is_free(self, waiting: _Waiting[E], *, stopped: bool) -> bool:
        return waiting.end <= self._out or (stopped and waiting.start < self._out)

    def _rest(self) -> tuple[E, ...]:
        entries = tuple(waiting.entry for waiting in self._waiting)
        self._waiting.clear()
        return entries


class _Literals:
    """Which special tokens are text, and where."""

    def __init__(self, shape: AnswerShape | None) -> None:
        self._literals: Mapping[int, str] = shape.literals if shape is not None else {}
        edges = shape.transitions.values() if shape is not None else ()
        self._markers = [marker for leaving in edges for marker, _ in leaving]
        self._in_calls = shape is not None and shape.calls is not None and shape.calls.parse is not None

    def get(self, token: Token, state: str) -> str:
        """Its text, or ``""`` if it shows nothing in that state or is no special token."""
        literal = self._literals.get(token, "") if isinstance(token, int) else ""
        if not literal or (self._in_calls and state == TOOL):
            return literal
        return literal if any(literal in marker for marker in self._markers) else ""


def _joined(parts: Sequence[Parts], entries: tuple[E, ...]) -> Piece[E]:
    return Piece(
        text="".join(text for part in parts for text in part.content),
        stopped=parts[-1].stopped,
        entries=entries,
        reasoning="".join(text for part in parts for text in part.reasoning),
        calls=tuple(call for part in parts for call in part.calls),
    )
