"""What is behind the daemon's routes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.storage.event_log import EventLog
from lmx_lab.daemon.storage.store import Store
from lmx_lab.daemon.subscribers import Subscribers
from lmx_lab.daemon.tools.tool import Toolbox
from lmx_lab.daemon.turns.model_client import ModelClient
from lmx_lab.daemon.turns.runner import TurnRunner
from lmx_lab.wire.daemon import Shutdown


@dataclass(frozen=True, kw_only=True)
class Services:
    """All on the daemon's loop."""

    daemon_id: str
    started_at: str
    limits: Limits
    store: Store
    log: EventLog
    turns: TurnRunner
    servers: McpServers
    toolbox: Toolbox
    upstream: ModelClient
    subscribers: Subscribers
    status: Callable[[], Literal["ok", "stopping"]] = field(repr=False)
    shut_down: Callable[[Shutdown], None] = field(repr=False)
    """Begins it, and returns at once."""
    begun_s: float = field(default_factory=time.monotonic)
    """As ``started_at``, on the clock that nobody sets."""
