"""Receives the daemon's events over one connection after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from httpx2.websockets import AsyncWebSocketSession, WebSocketDisconnect

from lmx_lab.client.backoff import LOOK_S, Backoff, SleepWatch
from lmx_lab.client.credentials import DaemonEndpoint
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.client.event_position import Delivery, EventPosition, Frame
from lmx_lab.client.streams import EventBuffer, ObservableValue
from lmx_lab.errors import CallerError, ConnectionLostError, LabError, UnauthorizedError, WrongServerError
from lmx_lab.wire.event_stream import HelloFrame, SyncedFrame
from lmx_lab.wire.events import daemon_event

PATH = "/v3/events"
OPEN_S = 15.0
"""Maximum time until the greeting."""
HEARTBEATS = 2.5
"""A connection without data for so many heartbeat intervals is closed."""
HEARTBEAT_S, SHORTEST_S, LONGEST_S = 15.0, 0.05, 60.0
"""The default heartbeat interval, and the smallest and largest that is accepted."""
LIVED_S = 1.0
"""A connection older than this, or one that has delivered an event, resets the backoff."""
REFUSALS, REFUSED_S = 2, 1.0
"""Consecutive refusals, and the time between them, after which a refusal is final if the state file is unchanged."""
SHOWN = 80


@dataclass(frozen=True, kw_only=True)
class ConnectionState:
    """The state of a subscription's connection."""

    state: Literal["connecting", "catching-up", "live", "waiting", "closed"]
    attempts: int = 0
    """Failed attempts since the last working connection."""
    retry_in_s: float | None = None
    """In state ``waiting``: time from the start of this state until the next attempt."""
    error: LabError | None = None
    """In state ``waiting`` the reason; in state ``closed`` the final error, or None if the reader closed it."""


class EventReceiver:
    """Keeps a connection open in a task, and puts what it receives into the buffer.

    Args:
        events: The filter; an empty list omits its parameter.
    """

    def __init__(
        self,
        routes: DaemonRoutes,
        events: Mapping[str, list[str]],
        position: EventPosition,
        wall: Callable[[], float],
    ) -> None:
        self._routes = routes
        self._credentials = routes.credentials
        self._events = events
        self._wall = wall
        self.position = position
        self.buffer: EventBuffer[Delivery] = EventBuffer()
        self.states = ObservableValue(ConnectionState(state="connecting"))
        self.tried = asyncio.Event()
        """Set when the first attempt has succeeded or failed."""
        self.greetings = 0
        self.error: Exception | None = None
        """The final error."""
        self.is_closing = False
        self.has_ended = False
        self._backoff = Backoff()
        self._refusals = 0
        self._woken = asyncio.Event()
        self._deadline: asyncio.Timeout | None = None
        self._silence_s = OPEN_S
        self._greeted_at: float | None = None
        self._has_delivered = False

    async def run(self) -> None:
        """Connect and reconnect until cancelled, or until an attempt fails finally."""
        watch = SleepWatch(self._wake, wall=self._wall)
        try:
            # A cancellation may be swallowed while a library cleans up.
            while not self.is_closing:
                endpoint = self._credentials.endpoint
                self._tell(ConnectionState(state="connecting", attempts=self._backoff.attempts))
                error = await self._attempt()
                self.tried.set()
                await self._recover(error, endpoint)
        except Exception as exc:
            # Other exceptions than LabError are bugs; they are passed to the reader.
            self.error = exc
        finally:
            watch.close()
            self.close()

    def close(self) -> None:
        self.has_ended = True
        self.tried.set()
        error = self.error if isinstance(self.error, LabError) else None
        self._tell(ConnectionState(state="closed", attempts=self._backoff.attempts, error=error))
        self.states.end()
        self.buffer.end()

    # One connection

    async def _attempt(self) -> LabError:
        """Run one connection; returns why it has ended."""
        self._woken.clear()
        self._greeted_at, self._has_delivered, self._silence_s = None, False, OPEN_S
        try:
            async with asyncio.timeout(OPEN_S) as self._deadline:
                connection = await self._routes.connection()
                async with connection.websocket(PATH, {**self.position.begin(), **self._events}) as socket:
                    ended = await self._read_guarded(socket)
            if not isinstance(ended, LabError):
                raise ended
            return ended
        except LabError as exc:
            return exc
        except TimeoutError:
            return self._lost(f"has said nothing for {self._silence_s:g} s")
        except ExceptionGroup as exc:
            # From the library's own tasks: invalid frames, or a close while it was writing.
            return self._lost(f"broke the connection ({_innermost(exc)})")
        finally:
            self._deadline = None

    async def _read_guarded(self, socket: AsyncWebSocketSession) -> Exception:
        try:
            return await self._read(socket)
        except Exception as exc:
            # A bug here must not look like a broken connection outside of the block.
            return exc

    async def _read(self, socket: AsyncWebSocketSession) -> LabError:
        assert self._deadline is not None
        now = asyncio.get_running_loop().time
        while True:
            if not self.buffer.has_room:
                # Time that the reader takes does not count as silence of the daemon.
                self._deadline.reschedule(None)
                await self.buffer.room()
            self._deadline.reschedule(now() + self._silence_s)
            try:
                message = await socket.receive()
            except WebSocketDisconnect as exc:
                return self._lost(f"closed the stream ({exc.code} {exc.reason:.{SHOWN}})".replace(" )", ")"))
            except Exception as exc:
                return self._lost(f"broke the connection ({type(exc).__name__})")
            text = getattr(message, "data", None)
            try:
                frame = daemon_event(text if isinstance(text, str) else "")
                taken = self.position.take(frame)
            except ValueError:
                return self._lost(f"sent {text!r:.{SHOWN}}, which is no event")
            self._deliver(frame, taken, len(text or ""))

    def _deliver(self, frame: Frame, taken: Delivery, characters: int) -> None:
        if taken.event is not None or taken.cursor is not None:
            self.buffer.put(taken, characters)
            self._has_delivered = self._has_delivered or frame.seq is not None
        if isinstance(frame, HelloFrame):
            told_s = frame.data.heartbeat_s
            self._silence_s = HEARTBEATS * (told_s if SHORTEST_S <= told_s <= LONGEST_S else HEARTBEAT_S)
            self._greeted_at = asyncio.get_running_loop().time()
            self.greetings += 1
            self.tried.set()
            self._tell(ConnectionState(state="catching-up", attempts=self._backoff.attempts))
        elif isinstance(frame, SyncedFrame):
            self._tell(ConnectionState(state="live", attempts=self._backoff.attempts))

    def _lost(self, what: str) -> ConnectionLostError:
        return ConnectionLostError(f"{self._credentials.url} {what}; the events continue with the next connection")

    # Between connections

    def _has_moved(self, endpoint: DaemonEndpoint) -> bool:
        # Another task may have refreshed the credentials.
        return self._credentials.refresh() or self._credentials.endpoint != endpoint

    async def _recover(self, error: LabError, endpoint: DaemonEndpoint) -> None:
        """Wait until the next attempt.

        Raises:
            LabError: another attempt cannot succeed.
        """
        self._reset_backoff()
        if self._has_moved(endpoint):
            self._refusals = 0
            return
        is_refusal = isinstance(error, UnauthorizedError | WrongServerError)
        self._refusals = self._refusals + 1 if is_refusal else 0
        if self._refusals >= REFUSALS or (isinstance(error, CallerError) and not is_refusal):
            raise error
        # The daemon may be starting, before it writes its state file.
        delay_s = max(self._backoff.failed(error.retry_after_s), REFUSED_S if is_refusal else 0.0)
        self._tell(ConnectionState(state="waiting", attempts=self._backoff.attempts, retry_in_s=delay_s, error=error))
        await self._rest(delay_s, endpoint)

    def _reset_backoff(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._greeted_at is not None and (self._has_delivered or now - self._greeted_at > LIVED_S):
            self._backoff.reset()

    async def _rest(self, delay_s: float, endpoint: DaemonEndpoint) -> None:
        """Wait for the delay, or until the machine wakes or the daemon's endpoint changes."""
        now = asyncio.get_running_loop().time
        until = now() + delay_s
        while (left_s := until - now()) > 0 and not self._woken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_S)):
                    await self._woken.wait()
            if self._has_moved(endpoint):
                return

    def _wake(self) -> None:
        self._backoff.reset()
        self._woken.set()
        if self._deadline is not None:
            # A connection from before the sleep is probably dead.
            with suppress(RuntimeError):
                self._deadline.reschedule(asyncio.get_running_loop().time())

    def _tell(self, state: ConnectionState) -> None:
        if state != self.states.value:
            self.states.set(state)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return type(error).__name__
