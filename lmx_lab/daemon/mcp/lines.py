"""Bytes from a process that nobody trusts: whole lines out of pieces, and the last of what it wrote; both bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator

LINE_BYTES = 8 * 2**20
"""Of one message; longer ones are thrown away as they come."""
TAIL_BYTES = 16_384
TAIL_LINES = 50
_TAIL_SLACK = 4096
"""More than is shown, so that a secret that is cut in half at the front can be left out."""
_LINE_CHARACTERS = 2000
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


class LineTooLongError(ValueError):
    """A line had more bytes than it may."""


class LineSplitter:
    """Cuts a stream at its line feeds."""

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """The lines that end in these bytes, without their line feeds; None as soon as one is too long."""
        *whole, rest = data.split(b"\n")
        for piece in whole:
            if not self._keep(piece):
                yield None
            if not self._skipping:
                yield b"".join(self._pieces)
            self._skipping = False
            self._clear()
        if not self._keep(rest):
            yield None

    def _keep(self, piece: bytes) -> bool:
        """Whether the line has its length still, or had lost it before."""
        if self._skipping:
            return True
        if self._size + len(piece) > self._limit:
            self._skipping = True
            self._clear()
            return False
        self._pieces.append(piece)
        self._size += len(piece)
        return True

    def _clear(self) -> None:
        self._pieces.clear()
        self._size = 0


class OutputTail:
    """The last bytes of a stream."""

    def __init__(self, keep_bytes: int = TAIL_BYTES + _TAIL_SLACK) -> None:
        self._keep = keep_bytes
        self._bytes = b""

    def feed(self, data: bytes) -> None:
        keep = self._keep
        self._bytes = data[-keep:] if len(data) >= keep else (self._bytes + data)[-keep:]

    def text(self) -> str:
        """What is kept, with more than is to be shown at its front; ``shown`` cuts it."""
        return self._bytes.decode("utf-8", "replace")


def shown(text: str) -> str:
    """The last lines of a text, at most 50 and 16 KB, harmless in a terminal: no control characters, no long lines."""
    text = _printable(text)[-TAIL_BYTES:]
    lines = [line[:_LINE_CHARACTERS] for line in text.split("\n") if line.strip()]
    kept = "\n".join(lines[-TAIL_LINES:])
    # Characters may be longer than a byte.
    return kept.encode()[-TAIL_BYTES:].decode("utf-8", "ignore")


def one_line(text: str, limit: int = 300) -> str:
    """A text from outside as part of a sentence."""
    return " ".join(_printable(text[: 4 * limit]).split())[:limit]


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
