"""How the daemon's routes may fail, and which requests their answers make possible."""

from __future__ import annotations

from lmx_lab.errors import HostingError, InvalidRequestError, LabError, StoppingError, StorageFullError
from lmx_lab.http.openapi import BODY, Responses, failures, link
from lmx_lab.wire.sessions import SessionRecord

STORED = (StoppingError, HostingError)
"""Whatever looks into the database may find that it is closed, or damaged."""
_SESSION = {
    "read": link("sessions_read", "The session.", session_id="$response.body#/session_id"),
    "change": link("sessions_change", "Change it.", session_id="$response.body#/session_id"),
    "delete": link("sessions_delete", "Delete it.", session_id="$response.body#/session_id"),
    "fork": link("sessions_fork", "Make another of it.", session_id="$response.body#/session_id"),
    "submit": link("turns_submit", "Let the model answer in it.", session_id="$response.body#/session_id"),
    "cancel": link("turns_cancel", "End its active turn.", session_id="$response.body#/session_id"),
    "events": link("events_events_of_session", "What happens in it.", session_id="$response.body#/session_id"),
}
MADE: Responses = {
    200: {"model": SessionRecord, "description": "The id was there, and is as it was", "links": _SESSION},
    201: {"links": _SESSION},
}
"""Of a new session, or the one that had the id."""
_TURN = {"session_id": "$request.path.session_id", "turn_id": "$response.body#/turn_id"}
TURN = {
    "read": link("turns_read", "The turn.", **_TURN),
    "cancel": link("turns_cancel_one", "End it.", **_TURN),
}
SERVER = {
    "read": link("mcp_read", "The server.", name="$response.body#/name"),
    "change": link("mcp_change", "Change it.", name="$response.body#/name"),
    "restart": link("mcp_restart", "Start it anew.", name="$response.body#/name"),
    "test": link("mcp_test_named", "See whether it starts.", name="$response.body#/name"),
    "tools": link("mcp_tools", "Its tools.", name="$response.body#/name"),
    "remove": link("mcp_remove", "Remove it.", name="$response.body#/name"),
}


def reading(*errors: type[LabError], in_path: bool = False) -> Responses:
    """Of a route that looks something up. Parameters that it does not have are refused."""
    return failures(InvalidRequestError, *errors, *STORED, in_path=in_path)


def writing(*errors: type[LabError], in_path: bool = False) -> Responses:
    """Of a route that keeps something."""
    return failures(*BODY, *errors, *STORED, StorageFullError, in_path=in_path)
