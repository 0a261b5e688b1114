"""Decode server-sent events from bytes that arrive in pieces of any size. Does no I/O.

This is the only decoder of the package. The benchmark runs it for each token, so it has to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass

EVENT_STREAM = "text/event-stream"
MAX_EVENT_BYTES = 4_000_000
"""Maximum size of one event."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A comment in the stream: the state of a request that has no output yet, such as ``prompt 512/7000 tokens``."""

    text: str


class EventDecoder:
    """Decodes the data of events, and comments. Event names, ids and retry times are ignored.

    An event is complete when the blank line after it has arrived. Only LF and CRLF end a line: JSON may contain the
    other characters that are line ends elsewhere.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._pending_bytes = 0

    def feed(self, chunk: bytes) -> list[str | Remark]:
        """Add bytes, and return the events and comments that are complete.

        Raises:
            ValueError: an event is larger than ``MAX_EVENT_BYTES``.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found: list[str | Remark] = []
        for line in lines:
            text = line[:-1] if line.endswith(b"\r") else line
            if not text:
                if self._data:
                    found.append(b"\n".join(self._data).decode(errors="replace"))
                    self._data.clear()
                    self._pending_bytes = 0
            elif text.startswith(b"data:"):
                self._add_data(text[6:] if text.startswith(b"data: ") else text[5:])
            elif text.startswith(b":"):
                found.append(Remark(text=text[1:].removeprefix(b" ").decode(errors="replace")))
            elif text == b"data":
                self._add_data(b"")
        if self._pending_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"a server-sent event has more than {MAX_EVENT_BYTES} bytes")
        return found

    def _add_data(self, data: bytes) -> None:
        self._data.append(data)
        # Counting the line end limits the number of empty lines as well.
        self._pending_bytes += len(data) + 1
