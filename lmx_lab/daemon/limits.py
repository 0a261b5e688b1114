"""Every bound of the daemon, in one place; ``GET /v3/daemon`` shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    # Turns
    running_turns: int = 4
    """At once, of all sessions: they share one model."""
    queued_turns_per_session: int = 64
    queued_turns: int = 1000
    """Of all sessions."""
    max_steps: int = 16
    """Calls of the model in one turn."""
    turn_timeout_s: float = 600.0
    """From its start; waiting for permissions counts."""
    broken_calls: int = 3
    """Calls of one turn that may be unreadable, or of tools that do not exist, before the turn ends."""
    parallel_tools: int = 4
    """Of one turn."""
    tool_result_bytes: int = 65_536
    """What the model is told of a result; the rest is cut."""
    permission_timeout_s: float = 300.0
    cancel_s: float = 10.0
    """After a cancel, the turn has ended, whatever its tools do."""
    batch_s: float = 0.040
    """Tokens that come within it are one event."""
    wait_s: float = 60.0
    """The longest ``wait`` of a request."""

    # Events
    ring_events: int = 8192
    ring_bytes: int = 8 * 2**20
    """Of the newest events, kept encoded in memory for all connections together."""
    page_events: int = 500
    """Read at once, and the most that one poll gets."""
    page_bytes: int = 512 * 2**10
    """The same in bytes, unless one event alone is longer."""
    heartbeat_s: float = 15.0
    blocked_send_s: float = 30.0
    """A client that takes nothing for so long is closed; it can resume."""
    subscribers: int = 1024

    # The log
    fold_after_s: float = 600.0
    """After a turn's end its token events go; after a session's deletion all its events but that one."""
    keep_days: float = 30.0
    keep_events: int = 1_000_000
