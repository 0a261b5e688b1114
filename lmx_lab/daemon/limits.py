"""Define the daemon's limits, which ``GET /v3/daemon`` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one daemon. The names of the fields are part of the API."""

    # Turns
    running_turns: int = 4
    """Maximum number of turns that run at the same time, in all sessions together, because they share one model."""
    queued_turns_per_session: int = 64
    """Maximum number of turns that wait in the queue of one session."""
    queued_turns: int = 1000
    """Maximum number of turns that wait in the queues of all sessions together."""
    max_steps: int = 16
    """Maximum number of model calls in one turn."""
    turn_timeout_s: float = 600.0
    """Maximum duration of a turn from its start. The time it waits for permissions counts."""
    broken_calls: int = 3
    """Maximum number of calls in one turn with invalid arguments or of unknown tools. The next one ends the turn."""
    parallel_tools: int = 4
    """Maximum number of tools that one turn runs at the same time."""
    tool_result_bytes: int = 65_536
    """Maximum size of a tool's result that the model receives. The rest is cut off."""
    permission_timeout_s: float = 300.0
    """Time after which a permission without a decision is denied."""
    cancel_s: float = 10.0
    """Time within which a cancelled turn has ended, whether or not its tools react."""
    batch_s: float = 0.040
    """Length of the interval whose tokens become one event."""
    wait_s: float = 60.0
    """Maximum value of the query parameter ``wait``."""

    # Events
    ring_events: int = 8192
    """Number of recent events that are kept encoded in memory. All connections share them."""
    ring_bytes: int = 8 * 2**20
    """Maximum size of the recent events that are kept in memory."""
    page_events: int = 500
    """Maximum number of events that are read at once, and that one poll returns."""
    page_bytes: int = 512 * 2**10
    """Maximum size of the events that are read at once. A single event may be larger."""
    heartbeat_s: float = 15.0
    """Time without events after which a connection receives a heartbeat."""
    blocked_send_s: float = 30.0
    """Time after which a client that does not receive is disconnected. It can resume from its cursor."""
    subscribers: int = 1024
    """Maximum number of WebSocket connections that receive events."""

    # Retention
    fold_after_s: float = 600.0
    """Time after which the token events of a turn that has ended are deleted, and all events of a deleted session
    except ``session.deleted``."""
    keep_days: float = 30.0
    """Age in days at which events are deleted."""
    keep_events: int = 1_000_000
    """Maximum number of events in the log. The oldest ones are deleted."""
