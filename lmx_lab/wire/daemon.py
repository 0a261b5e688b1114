"""Health, state and shutdown of the daemon in its ``/v3`` API, and its state file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from lmx_lab.wire.base import RequestModel

API_VERSION = 3


class Health(BaseModel):
    """The only information that needs no token."""

    status: Literal["ok", "stopping"]
    name: Literal["lmx-lab-daemon"] = "lmx-lab-daemon"
    api_version: int = API_VERSION
    daemon_id: str
    """Id of the running daemon, new at each start."""


class Upstream(BaseModel):
    """The server that runs the model, as of the last call."""

    url: str
    reachable: bool | None
    """Whether the last call reached the server; null before the first call."""
    model: str | None
    error: str | None


class Counts(BaseModel):
    sessions: int
    turns: int
    running_turns: int
    queued_turns: int
    permissions: int
    subscribers: int
    mcp_servers: int
    tools: int


class Retention(BaseModel):
    """Which events the log keeps: those of the last ``days`` days, and at most the newest ``events``."""

    days: float
    events: int
    fold_tokens_after_s: float
    """Time after which the events ``turn.token`` and ``turn.thinking`` of a turn that has ended are deleted;
    ``message.done`` contains their text."""


class DaemonRecord(BaseModel):
    daemon_id: str
    stream_id: str
    version: str
    pid: int
    started_at: str
    uptime_s: float
    latest_seq: int
    oldest_seq: int
    """The lowest ``seq`` that is kept. Cursors from the one before it can be resumed."""
    counts: Counts
    upstream: Upstream
    retention: Retention
    limits: dict[str, int | float]
    features: list[str]


class Shutdown(RequestModel):
    mode: Literal["drain", "now"] = "drain"
    """``drain`` gives running turns ``grace_s`` seconds to end; ``now`` ends them immediately."""
    grace_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 30.0


class ShutdownAnswer(BaseModel):
    status: Literal["stopping"] = "stopping"


class StateFile(BaseModel):
    """``state.json`` in the daemon's folder, with which programs of the same user find the daemon. Only that user can
    read it."""

    pid: int
    started_at: str
    daemon_id: str
    host: str
    port: int
    token: str = Field(repr=False)

    @property
    def url(self) -> str:
        """Address of the daemon."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
