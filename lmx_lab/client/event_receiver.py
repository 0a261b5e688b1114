"""Receive the daemon's events over a sequence of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from httpx2.websockets import AsyncWebSocketSession, WebSocketDisconnect

from lmx_lab.client.backoff import CHECK_INTERVAL_S, Backoff, SleepWatch
from lmx_lab.client.credentials import DaemonEndpoint
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.event_position import Delivery, EventPosition, Frame
from lmx_lab.client.streams import EventBuffer, ObservableValue
from lmx_lab.errors import CallerError, ConnectionLostError, LabError, UnauthorizedError, WrongServerError
from lmx_lab.wire.events import HelloFrame, SyncedFrame, daemon_event

EVENTS_PATH = "/v3/events"
OPEN_S = 15.0
"""Maximum time from the start of an attempt to the hello frame."""
SILENT_HEARTBEATS = 2.5
"""A connection without data for this many heartbeat intervals is closed."""
HEARTBEAT_S, MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 15.0, 0.05, 60.0
"""The default heartbeat interval, and the smallest and the largest one that is accepted."""
STABLE_S = 1.0
"""A connection older than this, or one that has delivered an event, resets the backoff."""
MAX_REFUSALS, MIN_REFUSAL_INTERVAL_S = 2, 1.0
"""Number of consecutive refusals, and the minimum time between them, after which a refusal is final, unless the state
file has changed."""
MAX_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class ConnectionState:
    """The state of a subscription's connection to the daemon."""

    state: Literal["connecting", "catching-up", "live", "waiting", "closed"]
    attempts: int = 0
    """Failed attempts to connect since the last working connection."""
    retry_in_s: float | None = None
    """In state ``waiting``, the time in seconds from the start of this state to the next attempt."""
    error: LabError | None = None
    """In state ``waiting``, why the last attempt failed. In state ``closed``, the final error, or None if the reader
    has closed the subscription."""


class EventReceiver:
    """Keeps a connection to the daemon open in a task, and puts what it receives into the buffer.

    Args:
        filters: Query parameters that select events; an empty list omits its parameter.
        wall: A clock that continues while the machine sleeps, in seconds.
    """

    def __init__(
        self,
        routes: DaemonRoutes,
        filters: Mapping[str, list[str]],
        position: EventPosition,
        wall: Callable[[], float],
    ) -> None:
        self._routes = routes
        self._credentials = routes.credentials
        self._filters = filters
        self._wall = wall
        self.position = position
        self.buffer: EventBuffer[Delivery] = EventBuffer()
        self.states = ObservableValue(ConnectionState(state="connecting"))
        self.tried = asyncio.Event()
        """Set when the first attempt has succeeded or failed."""
        self.connections = 0
        """Number of connections that were established."""
        self.error: Exception | None = None
        """The error after which the receiver does not reconnect."""
        self.is_closing = False
        self.has_ended = False
        self._backoff = Backoff()
        self._refusals = 0
        self._woken = asyncio.Event()
        self._deadline: asyncio.Timeout | None = None
        self._silence_s = OPEN_S
        self._connected_at: float | None = None
        self._has_delivered = False

    async def run(self) -> None:
        """Connect and reconnect until cancelled, or until an error that another attempt cannot fix."""
        watch = SleepWatch(self._on_wake, wall=self._wall)
        try:
            # A library may swallow the cancellation while it cleans up.
            while not self.is_closing:
                endpoint = self._credentials.endpoint
                self._set_state(ConnectionState(state="connecting", attempts=self._backoff.attempts))
                error = await self._attempt()
                self.tried.set()
                await self._recover(error, endpoint)
        except Exception as exc:
            # Exceptions other than LabError are bugs; the reader gets them.
            self.error = exc
        finally:
            watch.close()
            self.close()

    def close(self) -> None:
        """Mark the end for the reader: set the state, and end the buffer. Idempotent."""
        self.has_ended = True
        self.tried.set()
        error = self.error if isinstance(self.error, LabError) else None
        self._set_state(ConnectionState(state="closed", attempts=self._backoff.attempts, error=error))
        self.states.end()
        self.buffer.end()

    # One connection

    async def _attempt(self) -> LabError:
        """Connect and receive events; return the reason why the connection has ended."""
        self._woken.clear()
        self._connected_at, self._has_delivered, self._silence_s = None, False, OPEN_S
        try:
            async with asyncio.timeout(OPEN_S) as self._deadline:
                connection = await self._routes.connection()
                async with connection.websocket(EVENTS_PATH, {**self.position.begin(), **self._filters}) as socket:
                    ended = await self._read_guarded(socket)
            if not isinstance(ended, LabError):
                raise ended
            return ended
        except LabError as exc:
            return exc
        except TimeoutError:
            return self._lost_error(f"has sent nothing for {self._silence_s:g} s")
        except ExceptionGroup as exc:
            # Raised by the library's own tasks: invalid frames, or a close while it was writing.
            return self._lost_error(f"broke the connection ({_innermost_name(exc)})")
        finally:
            self._deadline = None

    async def _read_guarded(self, socket: AsyncWebSocketSession) -> Exception:
        try:
            return await self._read(socket)
        except Exception as exc:
            # Returned, because outside of the block an exception that is a bug could not be distinguished from a broken
            # connection.
            return exc

    async def _read(self, socket: AsyncWebSocketSession) -> LabError:
        assert self._deadline is not None
        now = asyncio.get_running_loop().time
        while True:
            if not self.buffer.has_room:
                # Time in which the reader processes events does not count as silence of the daemon.
                self._deadline.reschedule(None)
                await self.buffer.room()
            self._deadline.reschedule(now() + self._silence_s)
            try:
                message = await socket.receive()
            except WebSocketDisconnect as exc:
                return self._lost_error(f"closed the stream ({_close_reason(exc)})")
            except Exception as exc:
                return self._lost_error(f"broke the connection ({type(exc).__name__})")
            text = getattr(message, "data", None)
            try:
                frame = daemon_event(text if isinstance(text, str) else "")
                delivery = self.position.process(frame)
            except ValueError:
                return self._lost_error(f"sent {text!r:.{MAX_SHOWN_CHARACTERS}}, which is not an event")
            self._deliver(frame, delivery, len(text or ""))

    def _deliver(self, frame: Frame, delivery: Delivery, characters: int) -> None:
        if delivery.event is not None or delivery.cursor is not None:
            self.buffer.put(delivery, characters)
            self._has_delivered = self._has_delivered or frame.seq is not None
        if isinstance(frame, HelloFrame):
            interval_s = frame.data.heartbeat_s
            is_plausible = MIN_HEARTBEAT_S <= interval_s <= MAX_HEARTBEAT_S
            self._silence_s = SILENT_HEARTBEATS * (interval_s if is_plausible else HEARTBEAT_S)
            self._connected_at = asyncio.get_running_loop().time()
            self.connections += 1
            self.tried.set()
            self._set_state(ConnectionState(state="catching-up", attempts=self._backoff.attempts))
        elif isinstance(frame, SyncedFrame):
            self._set_state(ConnectionState(state="live", attempts=self._backoff.attempts))

    def _lost_error(self, what: str) -> ConnectionLostError:
        return ConnectionLostError(f"{self._credentials.url} {what}; the events continue with the next connection")

    # Between connections

    def _has_moved(self, endpoint: DaemonEndpoint) -> bool:
        # Another task may have refreshed the credentials.
        return self._credentials.refresh() or self._credentials.endpoint != endpoint

    async def _recover(self, error: LabError, endpoint: DaemonEndpoint) -> None:
        """Wait until it is time for the next attempt.

        Raises:
            LabError: another attempt cannot succeed.
        """
        self._reset_backoff()
        if self._has_moved(endpoint):
            self._refusals = 0
            return
        is_refusal = isinstance(error, UnauthorizedError | WrongServerError)
        self._refusals = self._refusals + 1 if is_refusal else 0
        if self._refusals >= MAX_REFUSALS or (isinstance(error, CallerError) and not is_refusal):
            raise error
        # After a refusal the delay has a minimum: a daemon that is starting has not yet written its state file.
        delay_s = max(self._backoff.next_delay_s(error.retry_after_s), MIN_REFUSAL_INTERVAL_S if is_refusal else 0.0)
        self._set_state(
            ConnectionState(state="waiting", attempts=self._backoff.attempts, retry_in_s=delay_s, error=error)
        )
        await self._wait(delay_s, endpoint)

    def _reset_backoff(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._connected_at is not None and (self._has_delivered or now - self._connected_at > STABLE_S):
            self._backoff.reset()

    async def _wait(self, delay_s: float, endpoint: DaemonEndpoint) -> None:
        """Wait for the delay, or until the machine wakes up or the daemon's endpoint changes."""
        now = asyncio.get_running_loop().time
        until = now() + delay_s
        while (left_s := until - now()) > 0 and not self._woken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, CHECK_INTERVAL_S)):
                    await self._woken.wait()
            if self._has_moved(endpoint):
                return

    def _on_wake(self) -> None:
        self._backoff.reset()
        self._woken.set()
        if self._deadline is not None:
            # A connection from before the sleep is probably dead.
            with suppress(RuntimeError):
                self._deadline.reschedule(asyncio.get_running_loop().time())

    def _set_state(self, state: ConnectionState) -> None:
        if state != self.states.value:
            self.states.set(state)


def _close_reason(exc: WebSocketDisconnect) -> str:
    return f"{exc.code} {exc.reason:.{MAX_SHOWN_CHARACTERS}}".rstrip()


def _innermost_name(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return type(error).__name__
