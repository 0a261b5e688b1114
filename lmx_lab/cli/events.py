"""``lmx-lab events``: prints the daemon's log and its new events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from lmx_lab.cli.app import app, epilog
from lmx_lab.cli.completion import complete_session
from lmx_lab.cli.parsing import Command
from lmx_lab.cli.reach import NEEDS, Token, Url, daemon_client
from lmx_lab.errors import InvalidRequestError, SessionNotFoundError

if TYPE_CHECKING:
    from lmx_lab.client import DaemonClient


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab events --follow",
        "lmx-lab events --after 0 --types 'turn.*' --session letters",
        "lmx-lab events --follow --json | jq .event",
        needs=NEEDS,
        status="0, also after Ctrl-C, which ends --follow; 1 if it failed, or if its output was closed; 2 if an "
        "argument is not valid",
    ),
)
def events(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new events until Ctrl-C.")] = False,
    after: Annotated[
        int | None, typer.Option(help="Print the events after this cursor; 0 is all that are kept.")
    ] = None,
    tail: Annotated[int, typer.Option(help="Number of the newest events to print, without --after.")] = 20,
    session: Annotated[
        list[str] | None,
        typer.Option(help="Print only events of this session. Repeatable.", autocompletion=complete_session),
    ] = None,
    types: Annotated[
        list[str] | None, typer.Option(help="Print only events of this kind, or turn.* for a group. Repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Print the daemon's events. Following them continues after lost connections and restarts of the daemon."""
    if tail < 0:
        raise InvalidRequestError(f"--tail is {tail}; give 0 or more", param="tail")
    if after is not None and after < 0:
        raise InvalidRequestError(f"--after is {after}; give 0, for all that are kept, or more", param="after")
    # The client takes most of a second to import, which --help and completion should not wait for.
    from lmx_lab.cli.event_printer import EventSelection, follow_events, newest_events

    selection = EventSelection(session_ids=tuple(session or ()), types=tuple(types or ()), as_json=json)
    with daemon_client(url, token) as client, contextlib.suppress(KeyboardInterrupt):
        _check_sessions(client, selection.session_ids)
        cursor = newest_events(client, selection, after=after, tail=tail)
        if follow:
            follow_events(client, selection, after=cursor)


def _check_sessions(client: DaemonClient, session_ids: Iterable[str]) -> None:
    """Check that the sessions exist, or have events in the log.

    Raises:
        SessionNotFoundError: there is no such session, so that no event would ever be printed.
    """
    for session_id in session_ids:
        try:
            client.read_session(session_id)
        except SessionNotFoundError:
            # The log may still have events of a deleted session.
            if not client.page(after=0, session_ids=[session_id], limit=1).events:
                raise
