"""Decodes server-sent events from bytes. Pure: the bytes may arrive in pieces of any size.

This is the only decoder of the client and of the benchmark, which runs it for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

EVENT_STREAM = "text/event-stream"
EVENT_LIMIT_BYTES = 4_000_000
"""Maximum size of one event."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A comment in the stream: the state of a request without content yet, such as ``prompt 512/7000 tokens``."""

    text: str


class EventDecoder:
    """Returns the data of each event, and comments. Event names, ids and retry times are ignored.

    An event is complete with the blank line after it. Lines end with LF or CRLF only: JSON may contain the other
    characters that are line ends elsewhere.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, chunk: bytes) -> list[str | Remark]:
        """Add bytes, and return what is complete now.

        Raises:
            ValueError: an event is longer than ``EVENT_LIMIT_BYTES``.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found: list[str | Remark] = []
        for line in lines:
            text = line[:-1] if line.endswith(b"\r") else line
            if not text:
                if self._data:
                    found.append(self._event())
            elif text.startswith(b"data:"):
                self._add(text[6:] if text.startswith(b"data: ") else text[5:])
            elif text.startswith(b":"):
                found.append(Remark(text=text[1:].removeprefix(b" ").decode(errors="replace")))
            elif text == b"data":
                self._add(b"")
        if self._held + len(self._rest) > EVENT_LIMIT_BYTES:
            raise ValueError(f"a server-sent event has more than {EVENT_LIMIT_BYTES} bytes")
        return found

    def _add(self, data: bytes) -> None:
        self._data.append(data)
        # The line end counts, so that empty lines are limited as well.
        self._held += len(data) + 1

    def _event(self) -> str:
        text = b"\n".join(self._data).decode(errors="replace")
        self._data.clear()
        self._held = 0
        return text
