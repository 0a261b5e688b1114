"""Provide ``lmx-lab events``: print the daemon's log and its new events."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from lmx_lab.cli.completion import complete_session
from lmx_lab.cli.options import NEEDS_DAEMON, Command, DaemonToken, DaemonUrl, daemon_client, epilog
from lmx_lab.errors import InvalidRequestError, SessionNotFoundError

app = typer.Typer()


@app.command(
    cls=Command,
    epilog=epilog(
        "lmx-lab events --follow",
        "lmx-lab events --after 0 --types 'turn.*' --session letters",
        "lmx-lab events --follow --json | jq .event",
        needs=NEEDS_DAEMON,
        status="0, also after Ctrl-C, which ends --follow; 1 on failure, or if the output was closed; 2 if an argument "
        "is not valid",
    ),
)
def events(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new events until Ctrl-C.")] = False,
    after: Annotated[
        int | None, typer.Option(help="Print the events after this cursor; 0 for all events in the log.")
    ] = None,
    tail: Annotated[int, typer.Option(help="Number of the newest events to print, without --after.")] = 20,
    session: Annotated[
        list[str] | None,
        typer.Option(help="Print only events of this session. Repeatable.", autocompletion=complete_session),
    ] = None,
    types: Annotated[
        list[str] | None, typer.Option(help="Print only events of this type, or turn.* for a group. Repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
    url: DaemonUrl = None,
    token: DaemonToken = None,
) -> None:
    """Print the daemon's events. --follow continues after lost connections and restarts of the daemon."""
    if tail < 0:
        raise InvalidRequestError(f"--tail is {tail}; give 0 or more", param="tail")
    if after is not None and after < 0:
        raise InvalidRequestError(f"--after is {after}; give 0 for all events in the log, or more", param="after")
    from lmx_lab.cli.event_printer import EventPrinter

    with daemon_client(url, token) as client, contextlib.suppress(KeyboardInterrupt):
        sessions = tuple(session or ())
        for each in sessions:
            try:
                client.read_session(each)
            except SessionNotFoundError:
                # The log may still have events of a deleted session. If not, no event would ever be printed.
                if not client.page(after=0, session_ids=[each], limit=1).events:
                    raise
        printer = EventPrinter(client, session_ids=sessions, types=tuple(types or ()), as_json=json)
        cursor = printer.print_newest(tail) if after is None else printer.print_after(after)
        if follow:
            printer.follow(cursor)
