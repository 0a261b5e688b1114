"""Print events as text on a terminal, or as lines of JSON for programs."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator

from lmx_lab.cli.terminal import print_note
from lmx_lab.client import DaemonClient
from lmx_lab.sanitize import single_line
from lmx_lab.wire.events import Envelope, EventPage, ResetFrame, SnapshotFrame, daemon_event

PIECES = ("turn.token", "turn.thinking")
"""Types of events that contain a piece of a message. ``message.done`` contains the complete message."""


class EventPrinter:
    """Prints events of the daemon to standard output.

    Args:
        session_ids: Print events of these sessions only; empty for all.
        types: Print events of these types only; empty for all.
        as_json: Print JSON instead of text.
    """

    def __init__(
        self, client: DaemonClient, *, session_ids: tuple[str, ...], types: tuple[str, ...], as_json: bool
    ) -> None:
        self._client = client
        self._session_ids = session_ids
        self._types = types
        self._as_json = as_json
        self._message: tuple[str, object] | None = None
        """Type of the last event and id of its message, if it was a piece of one."""

    def print_after(self, cursor: int) -> int:
        """Print the events in the log after a cursor; return the cursor after them."""
        for page in self._pages(cursor):
            for event in page.events:
                self._print(event)
            cursor = page.cursor
        return cursor

    def print_newest(self, count: int) -> int:
        """Print the newest events in the log; return the cursor after them."""
        latest = self._client.state().latest_seq
        # If too few of the newest 1,000 events match, the complete log is searched.
        for start in (max(0, latest - 1000), 0):
            cursor, newest = start, deque[Envelope](maxlen=count)
            for page in self._pages(start):
                newest += page.events
                cursor = page.cursor
            if len(newest) == count or start == 0:
                break
        for event in newest:
            self._print(event)
        return cursor

    def follow(self, cursor: int) -> None:
        """Print new events until interrupted. Reconnects are reported on standard error."""
        with self._client.events(after=cursor, session_ids=self._session_ids, types=self._types) as subscription:
            reconnects = 0
            for event in subscription:
                if subscription.reconnects > reconnects:
                    reconnects = subscription.reconnects
                    print_note(f"connected again ({reconnects})")
                if isinstance(event, ResetFrame):
                    print_note(f"events are missing here: {event.data.reason}")
                elif not isinstance(event, SnapshotFrame):
                    self._print(Envelope.model_validate(event.model_dump()))

    def _pages(self, cursor: int) -> Iterator[EventPage]:
        while True:
            page = self._client.page(after=cursor, session_ids=self._session_ids, types=self._types)
            yield page
            if not page.more:
                return
            cursor = page.cursor

    def _print(self, event: Envelope) -> None:
        if not self._as_json:
            # Only the first piece of a message is printed, because the events panel also shows one row for a message.
            message = self._message
            self._message = (event.event, event.data.get("message_id")) if event.event in PIECES else None
            if message is not None and message == self._message:
                return
        sys.stdout.write(f"{as_line_of_json(event) if self._as_json else as_text(event)}\n")
        sys.stdout.flush()


def as_line_of_json(event: Envelope) -> str:
    """Return the event as JSON in ASCII, which every encoding supports and which cannot control a terminal."""
    return json.dumps(event.model_dump(mode="json", exclude_none=True), separators=(",", ":"))


def as_text(event: Envelope) -> str:
    """Return the event as one line of text: its cursor, time, type, abbreviated session id, and content."""
    time = (event.at.partition("T")[2] or event.at)[: len("12:34:56")]
    # --session requires the complete id, which --json prints.
    session = (event.session_id or "")[:12]
    text = daemon_event(event.model_dump_json()).display_text()
    return single_line(f"{event.seq} {time} {event.event} {session} {text}".rstrip(), most=200)
