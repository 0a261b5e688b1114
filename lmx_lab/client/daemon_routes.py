"""Connect to one daemon, find it again after a restart, and provide a method for each of its routes.

The classes of requests and responses are in ``lmx_lab.wire``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal, TypeVar

import httpx2
from pydantic import BaseModel, RootModel

from lmx_lab.client.connection import (
    LONG_BYTES,
    QUICK_S,
    AsyncClientBase,
    HttpConnection,
    ServerDescription,
    was_sent,
)
from lmx_lab.client.credentials import Credentials, DaemonEndpoint
from lmx_lab.errors import (
    ConnectionLostError,
    InvalidRequestError,
    LabError,
    UnauthorizedError,
    UnreachableError,
    WrongServerError,
)
from lmx_lab.wire.base import ID_PATTERN, new_id
from lmx_lab.wire.daemon import DaemonRecord, Health, Shutdown, ShutdownAnswer
from lmx_lab.wire.errors import Fields, validated
from lmx_lab.wire.events import EventPage
from lmx_lab.wire.mcp import (
    ChangeMcpServer,
    McpServerConfig,
    McpServerList,
    McpServerRecord,
    McpTestFailed,
    McpTestPassed,
    ToolList,
    ToolRecord,
)
from lmx_lab.wire.sessions import (
    CancelAnswer,
    CancelTurns,
    ChangeSession,
    CreateSession,
    Decision,
    ForkSession,
    PermissionList,
    PermissionRecord,
    SessionList,
    SessionRecord,
    SessionSnapshot,
    SubmitTurn,
    TurnAccepted,
    TurnRecord,
)

T = TypeVar("T")
Shape = TypeVar("Shape", bound=BaseModel)
DAEMON = ServerDescription(
    kind="the lab's daemon",
    start="lmx-lab daemon",
    check="check the address; the daemon prints it when it starts",
    key="discover(), which reads the token of this user's daemon, or token=TOKEN",
)
MCP_SERVER_S = 120.0
"""Time limit of requests that wait until an MCP server has stopped, or has finished its current work."""


class DaemonConnection:
    """Sends requests to the daemon that the credentials describe, on one event loop.

    The token is sent to an address from a state file only after the server there has identified itself as the daemon of
    that file. This check is repeated after each lost connection. If the daemon does not answer, or refuses the token,
    the state file is read again, and the request is sent to the new address.
    """

    def __init__(self, credentials: Credentials, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self.credentials = credentials
        self._transport = transport
        self._lock = asyncio.Lock()
        self._connection: HttpConnection | None = None
        self._endpoint: DaemonEndpoint | None = None
        """The daemon to which ``_connection`` leads."""
        self._is_verified = False
        self._closed = False

    @property
    def url(self) -> str:
        """The daemon's address at the time of the last request."""
        return self.credentials.url

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        await self._drop_connection()
        if self._transport is not None:
            await self._transport.aclose()

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        # Closing a connection closes its transport, which the next one may need.
        if connection is not None and self._transport is None:
            await connection.aclose()

    async def connection(self) -> HttpConnection:
        """Check the daemon's identity, and return a connection to it.

        Raises:
            UnreachableError: no daemon answers, or a daemon other than that of the state file.
        """
        self._is_verified = False
        connection, _ = await self._connect()
        return connection

    async def request(
        self,
        method: str,
        path: str,
        shape: type[Shape],
        *,
        body: BaseModel | None = None,
        params: Mapping[str, str | list[str]] | None = None,
        within_s: float = QUICK_S,
        repeatable: bool = False,
    ) -> Shape:
        """Send a request and return the parsed response.

        Args:
            within_s: Time limit up to the last byte of the response.
            repeatable: Whether the request is idempotent, so that it can be sent again after a lost connection.

        Raises:
            LabError: the daemon's error, of the class for its code; UnreachableError if it does not answer.
        """
        return await self._send(
            lambda connection: connection.fetch(
                method, path, shape, content=body, params=params, limit=LONG_BYTES, within_s=within_s
            ),
            repeatable=repeatable,
        )

    async def delete(self, path: str, *, within_s: float = QUICK_S) -> None:
        """Send a request that deletes something. It is idempotent, and its response is empty.

        Raises:
            LabError: as ``request``.
        """

        async def send(connection: HttpConnection) -> None:
            response, body = await connection.request("DELETE", path, limit=LONG_BYTES, within_s=within_s)
            if response.status_code != HTTPStatus.NO_CONTENT:
                raise connection.error_for(response, body)

        await self._send(send, repeatable=True)

    async def _send(self, send: Callable[[HttpConnection], Awaitable[T]], *, repeatable: bool) -> T:
        """Send a request, and send it again if another address is known or a connection that was kept open failed."""
        connection, endpoint = await self._connect()
        try:
            return await send(connection)
        except UnauthorizedError as exc:
            if not self.credentials.has_moved(endpoint):
                raise
            first: LabError = exc
        except UnreachableError as exc:
            self._is_verified = False
            if was_sent(exc) and not repeatable:
                raise
            # The server may close an idle connection at the moment in which it is used again.
            if not (self.credentials.has_moved(endpoint) or (repeatable and isinstance(exc, ConnectionLostError))):
                raise
            first = exc
        try:
            connection, _ = await self._connect()
            return await send(connection)
        except UnreachableError as exc:
            if isinstance(first, UnreachableError) and was_sent(first) and not was_sent(exc):
                # The first request may have been executed, which the second error would hide.
                raise first from None
            raise

    async def health(self) -> Health:
        """Identify the daemon; needs no token."""
        connection, _ = await self._connect()
        return await _health(connection)

    async def _connect(self) -> tuple[HttpConnection, DaemonEndpoint]:
        """Return a connection to the daemon's current address, and that address."""
        async with self._lock:
            endpoint = self.credentials.endpoint
            try:
                return await self._verified_connection(endpoint), endpoint
            except UnreachableError:
                if not self.credentials.has_moved(endpoint):
                    raise
            endpoint = self.credentials.endpoint
            return await self._verified_connection(endpoint), endpoint

    async def _verified_connection(self, endpoint: DaemonEndpoint) -> HttpConnection:
        if self._closed:
            raise InvalidRequestError("this client was closed; create a new one")
        if self._connection is None or self._endpoint != endpoint:
            await self._drop_connection()
            self._is_verified = False
            self._connection = HttpConnection(
                endpoint.url, api_key=endpoint.token, transport=self._transport, server=DAEMON
            )
            self._endpoint = endpoint
        connection = self._connection
        if endpoint.daemon_id is None or self._is_verified:
            return connection
        try:
            found = (await _health(connection)).daemon_id
        except WrongServerError as exc:
            # Retryable: the daemon may be started again at another port.
            raise UnreachableError(
                f"{exc.message}. The token was not sent; start a daemon with {DAEMON.start}"
            ) from exc
        if found != endpoint.daemon_id:
            raise UnreachableError(
                f"the daemon at {connection.url} is {found!r:.80}, but the state file names {endpoint.daemon_id}; the "
                "token was not sent. It may belong to another user or another LMX_LAB_HOME; start your own with "
                f"{DAEMON.start}"
            )
        self._is_verified = True
        return connection


async def _health(connection: HttpConnection) -> Health:
    return await connection.fetch("GET", "/v3/health", Health, within_s=10.0, with_key=False)


# Routes


@dataclass(frozen=True, kw_only=True)
class ClientTimes:
    """Delays and time limits of subscriptions and turns, in seconds."""

    min_delay_s: float = 0.25
    """Upper limit of the random delay after the first failure. It doubles with each further one."""
    max_delay_s: float = 10.0
    """Upper limit of the random delay after many failures."""
    refusal_s: float = 1.0
    """Minimum delay after a refusal, because a daemon that is starting has not yet written its state file."""
    watch_s: float = 1.0
    """Interval of the checks whether the machine has slept, and whether the daemon has another address."""
    record_s: float = 15.0
    """Time without an event of the turn after which the turn's record is read."""
    ended_s: float = 1.0
    """The same time if the record shows that the turn has ended: its last event will arrive soon, or is no longer in
    the log."""
    missed_s: float = 20.0
    """Time to wait for missed events after the end of the turn if there is no connection. An attempt to connect takes
    up to 15 s."""
    deciding_s: float = 1.0
    """Time for which a request waits for the turn's end if events are not available and permissions may need a decision
    here, because only another request shows them."""


class _McpTest(RootModel[McpTestPassed | McpTestFailed]):
    pass


class DaemonRoutes(AsyncClientBase[DaemonConnection]):
    """Requests to one daemon, on one event loop.

    Every failure raises a ``LabError``: the class for the daemon's error code, or ``UnreachableError`` if no daemon
    answers. Idempotent requests are repeated once after a lost connection. Other requests then raise
    ``ConnectionLostError``, and may or may not have been executed.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        times: ClientTimes | None = None,
    ) -> None:
        super().__init__(DaemonConnection(credentials, transport=transport))
        self.times = times or ClientTimes()
        """Delays and time limits of the subscriptions and turns of this client."""

    @property
    def credentials(self) -> Credentials:
        """The daemon's address and token."""
        return self._connection.credentials

    async def connection(self) -> HttpConnection:
        """Check the daemon's identity without sending the token, and return a connection for a WebSocket.

        Raises:
            UnreachableError: no daemon answers, or a daemon other than that of the state file.
        """
        return await self._connection.connection()

    # The daemon

    async def health(self) -> Health:
        """Identify the daemon that answers. Needs no token."""
        return await self._connection.health()

    async def state(self) -> DaemonRecord:
        """Return the daemon's state: its ids, counts, limits and model server."""
        return await self._get("/v3/daemon", DaemonRecord)

    async def shut_down(self, *, mode: Literal["drain", "now"] = "drain", grace_s: float = 30.0) -> None:
        """Stop the daemon. Returns when the daemon has started to stop.

        Running turns have ``grace_s`` seconds to end; with mode ``now`` they are cancelled immediately. Queued turns
        run after the next start.
        """
        body = validated(Shutdown, {"mode": mode, "grace_s": grace_s})
        await self._connection.request("POST", "/v3/daemon/shutdown", ShutdownAnswer, body=body, repeatable=True)

    # Sessions

    async def create_session(self, body: CreateSession | Fields) -> SessionRecord:
        """Create a session. A session of this id that exists is returned unchanged."""
        body = validated(CreateSession, body)
        if body.session_id is None:
            # With an id the request is idempotent.
            body = body.model_copy(update={"session_id": new_id("ses")})
        return await self._connection.request("POST", "/v3/sessions", SessionRecord, body=body, repeatable=True)

    async def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, archived: bool = False, q: str | None = None
    ) -> SessionList:
        """List the sessions in pages, the last used ones first.

        Args:
            limit: Maximum number of sessions in a page.
            cursor: ``next_cursor`` of the previous page.
            archived: List the archived sessions instead of the others.
            q: List sessions whose title or id contains this text.
        """
        return await self._get("/v3/sessions", SessionList, limit=limit, cursor=cursor, archived=archived or None, q=q)

    async def read_session(self, session_id: str) -> SessionSnapshot:
        """Read a session: its messages, turns, pending permissions, and the cursor from which its events continue."""
        return await self._get(_session_path(session_id), SessionSnapshot)

    async def change_session(self, session_id: str, change: ChangeSession | Fields) -> SessionRecord:
        """Change the fields of a session that are set in ``change``.

        Raises:
            RevisionConflictError: another client has changed the session since that revision.
        """
        body = validated(ChangeSession, change)
        return await self._connection.request("PATCH", _session_path(session_id), SessionRecord, body=body)

    async def delete_session(self, session_id: str) -> None:
        """Delete a session, and cancel its turns. Idempotent."""
        await self._connection.delete(_session_path(session_id))

    async def fork_session(self, session_id: str, fork: ForkSession | Fields) -> SessionRecord:
        """Create a session with the messages of another one: all of them, or those up to a turn."""
        body, path = validated(ForkSession, fork), f"{_session_path(session_id)}/fork"
        return await self._connection.request("POST", path, SessionRecord, body=body)

    # Turns

    async def submit_turn(self, session_id: str, turn: SubmitTurn | Fields) -> TurnAccepted:
        """Submit a turn. Returns when the daemon has accepted it.

        Raises:
            TurnInProgressError: another turn is running, and ``when_busy`` is ``reject``.
            QueueFullError: too many turns are waiting.
            IdempotencyConflictError: a turn of this id exists with another body.
        """
        turn = validated(SubmitTurn, turn)
        if turn.turn_id is None:
            turn = turn.model_copy(update={"turn_id": new_id("trn")})
        path = f"{_session_path(session_id)}/turns"
        return await self._connection.request("POST", path, TurnAccepted, body=turn, repeatable=True)

    async def read_turn(self, session_id: str, turn_id: str, wait_s: float = 0.0) -> TurnRecord:
        """Read a turn.

        Args:
            wait_s: Wait until the turn has ended, but at most for this time in seconds, up to 60.
        """
        path = f"{_session_path(session_id)}/turns/{_path_segment('turn_id', turn_id)}"
        return await self._get(path, TurnRecord, wait_s=wait_s)

    async def cancel_turns(self, session_id: str, cancel: CancelTurns | Fields) -> CancelAnswer:
        """Cancel the active turn, the turn of an id, or also the queued turns. Turns that have ended stay unchanged."""
        cancel = validated(CancelTurns, cancel)
        # Without an id, a repeated request could cancel another turn.
        repeatable = cancel.turn_id is not None and not cancel.queued
        path = f"{_session_path(session_id)}/cancel"
        return await self._connection.request("POST", path, CancelAnswer, body=cancel, repeatable=repeatable)

    # Permissions

    async def permissions(self) -> list[PermissionRecord]:
        """List the permissions of all sessions that wait for a decision."""
        return (await self._get("/v3/permissions", PermissionList)).permissions

    async def decide(
        self, permission_id: str, decision: Literal["allow", "deny"], *, scope: Literal["once", "session"] = "once"
    ) -> PermissionRecord:
        """Allow or deny a tool call.

        Args:
            scope: ``once``: this call with exactly its arguments. ``session``: all calls of the tool in this session.

        Raises:
            AlreadyResolvedError: another client has decided; the message has its decision.
            PermissionExpiredError: the time for a decision is over, or the turn has ended.
        """
        body = validated(Decision, {"decision": decision, "scope": scope})
        path = f"/v3/permissions/{_path_segment('permission_id', permission_id)}"
        return await self._connection.request("POST", path, PermissionRecord, body=body)

    # MCP servers

    async def mcp_servers(self) -> list[McpServerRecord]:
        """List the MCP servers with their states."""
        return (await self._get("/v3/mcp/servers", McpServerList)).servers

    async def add_mcp_server(self, config: McpServerConfig | Fields) -> McpServerRecord:
        """Add an MCP server and start it. ``mcp.status`` events report its state.

        Raises:
            McpServerExistsError: an MCP server of this name exists.
        """
        body = validated(McpServerConfig, config)
        return await self._connection.request(
            "POST", "/v3/mcp/servers", McpServerRecord, body=body, within_s=MCP_SERVER_S
        )

    async def mcp_server(self, name: str) -> McpServerRecord:
        """Read one MCP server, with the last lines of its standard error."""
        return await self._get(_server_path(name), McpServerRecord)

    async def change_mcp_server(self, name: str, change: ChangeMcpServer | Fields) -> McpServerRecord:
        """Change the fields that are set in ``change``, and restart the server. ``***`` leaves a secret unchanged."""
        body = validated(ChangeMcpServer, change)
        return await self._connection.request(
            "PATCH", _server_path(name), McpServerRecord, body=body, within_s=MCP_SERVER_S
        )

    async def remove_mcp_server(self, name: str) -> None:
        """Stop and remove an MCP server. Idempotent."""
        await self._connection.delete(_server_path(name), within_s=MCP_SERVER_S)

    async def restart_mcp_server(self, name: str) -> McpServerRecord:
        """Restart an MCP server, even if it has failed so often that the daemon no longer restarts it."""
        path = f"{_server_path(name)}/restart"
        return await self._connection.request("POST", path, McpServerRecord, within_s=MCP_SERVER_S)

    async def test_mcp_server(self, server: str | McpServerConfig | Fields) -> McpTestPassed | McpTestFailed:
        """Start an MCP server, list its tools and stop it. Running servers are not affected, and nothing is stored.

        Args:
            server: The name of a configured server, or a configuration.
        """
        if isinstance(server, str):
            path, body = f"{_server_path(server)}/test", None
            start_s = (await self.mcp_server(server)).start_timeout_s
        else:
            path, body = "/v3/mcp/test", validated(McpServerConfig, server)
            start_s = body.start_timeout_s
        within_s = start_s + MCP_SERVER_S
        return (await self._connection.request("POST", path, _McpTest, body=body, within_s=within_s)).root

    async def mcp_tools(self, name: str) -> list[ToolRecord]:
        """List the tools of an MCP server as they are given to the model."""
        return (await self._get(f"{_server_path(name)}/tools", ToolList)).tools

    # Events

    async def page(
        self,
        *,
        after: int | None = None,
        stream_id: str | None = None,
        limit: int | None = None,
        wait_s: float = 0.0,
        session_ids: Sequence[str] = (),
        types: Sequence[str] = (),
    ) -> EventPage:
        """Read a page of events, oldest first. Polling needs more requests than ``events()``.

        Args:
            after: The cursor of the previous page; 0 for all events in the log. By default only new events.
            stream_id: Id of the log that the cursor is from.
            limit: Maximum number of events in the page.
            wait_s: Maximum time to wait for an event, in seconds, up to 60.
            session_ids: Read events of these sessions only.
            types: Read events of these types only, such as ``turn.done`` or ``tool.*``; by default all types.

        Raises:
            CursorExpiredError: events after the cursor are not available; ``reason`` contains the cause.
        """
        return await self._get(
            "/v3/events",
            EventPage,
            after=after,
            stream_id=stream_id,
            limit=limit,
            session_id=list(session_ids) or None,
            types=",".join(types) or None,
            wait_s=wait_s,
        )

    async def _get(
        self, path: str, shape: type[Shape], *, wait_s: float = 0.0, **params: str | int | bool | list[str] | None
    ) -> Shape:
        """Send a GET request with the parameters that are not None."""
        query = {
            name: value if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in params.items()
            if value is not None
        }
        if wait_s:
            # str() would write small numbers as 1e-05.
            query["wait"] = f"{wait_s:.3f}"
        within_s = QUICK_S + max(0.0, wait_s)
        return await self._connection.request("GET", path, shape, params=query, within_s=within_s, repeatable=True)


def _session_path(session_id: str) -> str:
    return f"/v3/sessions/{_path_segment('session_id', session_id)}"


def _server_path(name: str) -> str:
    return f"/v3/mcp/servers/{_path_segment('name', name)}"


def _path_segment(name: str, value: str) -> str:
    """Check an id, and return it as one segment of a path.

    Raises:
        InvalidRequestError: the id is not valid.
    """
    if not re.fullmatch(ID_PATTERN, value, re.ASCII):
        raise InvalidRequestError(
            f"{name} is {value!r:.80}; it must have 1 to 64 letters, digits, '-' and '_'", param=name
        )
    return value
