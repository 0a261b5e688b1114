"""Prints events as text on a terminal, or as lines of JSON for programs."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass

from lmx_lab.cli.app import note
from lmx_lab.cli.terminal import line
from lmx_lab.client import DaemonClient
from lmx_lab.wire.event_stream import Envelope, ResetFrame, SnapshotFrame
from lmx_lab.wire.events import daemon_event

FIRST_LOOK = 1000
"""Number of the newest events that are searched first; then all are."""


@dataclass(frozen=True, kw_only=True)
class EventSelection:
    """Which events are printed, and how."""

    session_ids: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    as_json: bool = False


def newest_events(client: DaemonClient, selection: EventSelection, *, after: int | None, tail: int) -> int:
    """Print the events of the log after the cursor, or the newest; returns the cursor after them."""
    if after is not None:
        return _printed_pages(client, selection, after)
    latest = client.state().latest_seq
    for begin in (max(0, latest - FIRST_LOOK), 0):
        found, cursor = _collected(client, selection, begin, tail)
        if len(found) == tail or begin == 0:
            break
    for event in found:
        _print(event, selection)
    return cursor


def _printed_pages(client: DaemonClient, selection: EventSelection, cursor: int) -> int:
    while True:
        page = client.page(after=cursor, session_ids=selection.session_ids, types=selection.types)
        for event in page.events:
            _print(event, selection)
        cursor = page.cursor
        if not page.more:
            return cursor


def _collected(client: DaemonClient, selection: EventSelection, cursor: int, tail: int) -> tuple[deque[Envelope], int]:
    found: deque[Envelope] = deque(maxlen=tail)
    while True:
        page = client.page(after=cursor, session_ids=selection.session_ids, types=selection.types)
        found += page.events
        cursor = page.cursor
        if not page.more:
            return found, cursor


def follow_events(client: DaemonClient, selection: EventSelection, *, after: int) -> None:
    """Print new events until interrupted; reconnects are reported on standard error."""
    with client.events(after=after, session_ids=selection.session_ids, types=selection.types) as subscription:
        reconnects = 0
        for event in subscription:
            if subscription.reconnects > reconnects:
                reconnects = subscription.reconnects
                note(f"connected again ({reconnects})")
            if isinstance(event, ResetFrame):
                note(f"events are missing here: {event.data.reason}")
            elif not isinstance(event, SnapshotFrame):
                _print(Envelope.model_validate(event.model_dump()), selection)


def _print(event: Envelope, selection: EventSelection) -> None:
    sys.stdout.write(f"{as_json(event) if selection.as_json else as_text(event)}\n")
    sys.stdout.flush()


def as_json(event: Envelope) -> str:
    """The event as JSON in ASCII, which every encoding has and which cannot control a terminal."""
    return json.dumps(event.model_dump(mode="json", exclude_none=True), separators=(",", ":"))


def as_text(event: Envelope) -> str:
    """The event as one line of text."""
    where = " ".join(part for part in (event.session_id, event.turn_id) if part)
    time = event.at.partition("T")[2] or event.at
    text = daemon_event(event.model_dump_json()).display_text()
    return line(f"{event.seq} {time} {event.event} {where} {text}".rstrip(), most=200)
