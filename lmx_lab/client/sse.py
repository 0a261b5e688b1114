"""Server-sent events out of bytes. Pure: fed with what comes, in whatever pieces it comes."""

from __future__ import annotations

from dataclasses import dataclass

EVENT_STREAM = "text/event-stream"
EVENT_LIMIT_BYTES = 4_000_000
"""Of one event that is not complete yet."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A comment: where a request stands that has nothing to show yet, such as ``prompt 512/7000 tokens``."""

    text: str


class EventDecoder:
    """Gives the data of each event, and comments. Names, ids and retry times, which the lab does not send, are skipped.

    An event counts when the blank line after it has come. Lines end with LF or CRLF and with nothing else: JSON may
    hold every other character that is a line's end somewhere.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, chunk: bytes) -> list[str | Remark]:
        """What is complete now.

        Raises:
            ValueError: an event longer than ``EVENT_LIMIT_BYTES``.
        """
        self._rest += chunk
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        found = [item for line in lines if (item := self._line(bytes(line.removesuffix(b"\r")))) is not None]
        if self._held + len(self._rest) > EVENT_LIMIT_BYTES:
            raise ValueError(f"a server-sent event has more than {EVENT_LIMIT_BYTES} bytes")
        return found

    def _line(self, line: bytes) -> str | Remark | None:
        if not line:
            return self._event()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not name:
            return Remark(text=value.decode(errors="replace"))
        if name == b"data":
            self._data.append(value)
            # With its line's end: lines without anything in them add up, too.
            self._held += len(value) + 1
        return None

    def _event(self) -> str | None:
        if not self._data:
            return None
        text = b"\n".join(self._data).decode(errors="replace")
        self._data.clear()
        self._held = 0
        return text
