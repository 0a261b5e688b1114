"""Tokens to text, exactly: what is streamed, joined, is what decoding everything at once gives, cut at a stop string.

Pure code. A ``TextSplitter`` takes token ids one by one and hands out the text that can no longer change: it holds back
an unfinished UTF-8 character and the possible beginning of a stop string, and loses neither at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Incremental decoding with any tokenizer's ``decode``, at constant cost per token of ordinary text.

    The tokens of the last complete piece are decoded again in front of the new ones, because a tokenizer may treat the
    first token of a text differently (a leading space).
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0
        self._read = 0

    def add(self, token: int) -> str:
        """The text that this token completes, or ``""``."""
        self._tokens.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """What was held back; torn characters come out as U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        known = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(known) or (text.endswith(REPLACEMENT) and not final):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(known) :]


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


class TextSplitter:
    """One request's way from token ids to text."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)

    def add(self, token: int) -> tuple[str, bool]:
        """Text free to go, and whether a stop string ends the generation here."""
        return self._stops.feed(self._detokenizer.add(token))

    def finish(self) -> tuple[str, bool]:
        """The rest, at the end of generation; a stop string can complete even here."""
        text, stopped = self._stops.feed(self._detokenizer.finish())
        return (text, True) if stopped else (text + self._stops.finish(), False)
