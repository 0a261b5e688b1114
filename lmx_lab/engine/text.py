"""Tokens to text, exactly: what is streamed, joined, does not depend on where it was held back.

Pure code. A ``TextSplitter`` takes token ids one by one and hands out the text that can no longer change: it holds back
an unfinished UTF-8 character and the possible beginning of a stop string, and loses neither at the end. With the text
go the entries of its tokens, whatever the caller keeps for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, and a token at least one: so many can be missing its end.
OPEN = 3
# A broken run of LONG tokens is cut to the last KEPT. These have OPEN characters to hold, OPEN that a cut inside a
# character can spoil, and 4 bytes a character at most.
LONG = 32
KEPT = 4 * 2 * OPEN
# A run that cannot be cut: nothing but tokens without text after the beginning of a character, which is none then.
HOPELESS = 2 * LONG

Decode = Callable[[Sequence[int]], str]
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
        self._context: list[int] = []
        self._known = ""
        """The text of the context, all of it out."""
        self._unread: list[int] = []
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

    def add(self, token: int) -> str:
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

    def _move(self, context: list[int], known: str) -> None:
        self._context, self._known = context, known
        self._unread, self._text, self._sent = [], "", 0

    def _give(self, piece: str) -> str:
        self._given += len(piece)
        return piece


def _first_difference(before: str, after: str) -> int:
    changed = (at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    return next(changed, min(len(before), len(after)))


class StopStrings:
    """Cuts a stream of text at the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

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
        hold = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def finish(self) -> str:
        """What was held back and turned out to be ordinary text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


@dataclass(frozen=True, slots=True)
class Piece(Generic[E]):
    """Text that is free to go, and the entries of the tokens that are out with it."""

    text: str
    stopped: bool
    """A stop string ends the generation here."""
    entries: tuple[E, ...] = ()


@dataclass(slots=True)
class _Waiting(Generic[E]):
    """An entry and the place of its token's text, in characters of the whole text."""

    entry: E
    start: int
    end: int


class TextSplitter(Generic[E]):
    """One request's way from token ids to text.

    An entry goes out once all the text of its token is out. Where a stop string cuts, the last piece has the entries of
    the tokens that begin before the cut; the others are dropped. Tokens that show nothing go with what is before them.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._waiting: deque[_Waiting[E]] = deque()
        self._out = 0
        """Characters out so far."""

    def add(self, token: int, entry: E | None = None) -> Piece[E]:
        """What this token sets free."""
        text, stopped = self._stops.feed(self._detokenizer.add(token))
        if entry is not None:
            self._wait(entry)
        return self._piece(text, stopped=stopped)

    def finish(self) -> Piece[E]:
        """The rest, at the end of generation; a stop string can complete even here."""
        text, stopped = self._stops.feed(self._detokenizer.finish())
        if stopped:
            return self._piece(text, stopped=True)
        entries = tuple(waiting.entry for waiting in self._waiting)
        self._waiting.clear()
        return Piece(text + self._stops.finish(), False, entries)

    def _wait(self, entry: E) -> None:
        start, end = self._detokenizer.start, self._detokenizer.length
        for earlier in reversed(self._waiting):
            if earlier.end <= end:
                break
            # Bytes that turned out to be one character together.
            earlier.end = end
        self._waiting.append(_Waiting(entry, start, end))

    def _piece(self, text: str, *, stopped: bool) -> Piece[E]:
        self._out += len(text)
        if not self._waiting:
            return Piece(text, stopped)
        free = []
        while self._waiting and self._is_free(self._waiting[0], stopped=stopped):
            free.append(self._waiting.popleft().entry)
        return Piece(text, stopped, tuple(free))

    def _is_free(self, waiting: _Waiting[E], *, stopped: bool) -> bool:
        return waiting.end <= self._out or (stopped and waiting.start < self._out)
