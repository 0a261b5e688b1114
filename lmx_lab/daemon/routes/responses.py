"""Describe the daemon's answers for the OpenAPI document: possible errors, and links to further requests."""

from __future__ import annotations

from lmx_lab.errors import HostingError, InvalidRequestError, LabError, StoppingError, StorageFullError
from lmx_lab.http.openapi import BODY, Responses, failures, link
from lmx_lab.wire.sessions import SessionRecord

DATABASE_ERRORS = (StoppingError, HostingError)
"""Errors of all routes that use the database: it can be closed or damaged."""
_SESSION_LINKS = {
    "read": link("sessions_read", "Read the session.", session_id="$response.body#/session_id"),
    "change": link("sessions_change", "Change the session.", session_id="$response.body#/session_id"),
    "delete": link("sessions_delete", "Delete the session.", session_id="$response.body#/session_id"),
    "fork": link("sessions_fork", "Create a session with its messages.", session_id="$response.body#/session_id"),
    "submit": link("turns_submit", "Submit a turn.", session_id="$response.body#/session_id"),
    "cancel": link("turns_cancel", "Cancel its active turn.", session_id="$response.body#/session_id"),
    "events": link("events_events_of_session", "Read its events.", session_id="$response.body#/session_id"),
}
SESSION_CREATED: Responses = {
    200: {
        "model": SessionRecord,
        "description": "The id exists already; the session is not changed",
        "links": _SESSION_LINKS,
    },
    201: {"links": _SESSION_LINKS},
}
"""Answers with a new session, or with the existing one of the same id."""
_TURN_KEY = {"session_id": "$request.path.session_id", "turn_id": "$response.body#/turn_id"}
TURN_LINKS = {
    "read": link("turns_read", "Read the turn.", **_TURN_KEY),
    "cancel": link("turns_cancel_one", "Cancel the turn.", **_TURN_KEY),
}
SERVER_LINKS = {
    "read": link("mcp_read", "Read the server.", name="$response.body#/name"),
    "change": link("mcp_change", "Change the server.", name="$response.body#/name"),
    "restart": link("mcp_restart", "Restart the server.", name="$response.body#/name"),
    "test": link("mcp_test_named", "Test whether the server starts.", name="$response.body#/name"),
    "tools": link("mcp_tools", "List its tools.", name="$response.body#/name"),
    "remove": link("mcp_remove", "Remove the server.", name="$response.body#/name"),
}


def read_failures(*errors: type[LabError], in_path: bool = False) -> Responses:
    """Return the error answers of a route that reads. ``InvalidRequestError`` is raised for unknown parameters."""
    return failures(InvalidRequestError, *errors, *DATABASE_ERRORS, in_path=in_path)


def write_failures(*errors: type[LabError], in_path: bool = False) -> Responses:
    """Return the error answers of a route that writes."""
    return failures(*BODY, *errors, *DATABASE_ERRORS, StorageFullError, in_path=in_path)
