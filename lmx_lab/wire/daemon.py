"""The daemon itself: health, state, shutdown."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from lmx_lab.wire.generation import RequestShape

API_VERSION = 3


class Health(BaseModel):
    """All that a caller without the token may know."""

    status: Literal["ok", "stopping"]
    name: Literal["lmx-lab-daemon"] = "lmx-lab-daemon"
    api_version: int = API_VERSION
    daemon_id: str
    """New at each start."""


class Upstream(BaseModel):
    """The server of the model."""

    url: str
    reachable: bool | None
    """By the last call or look; null before the first."""
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
    """What the log keeps: the events of the last ``days``, and at most ``events`` of them, the newest."""

    days: float
    events: int
    fold_tokens_after_s: float
    """After a turn's end its ``turn.token`` and ``turn.thinking`` go; ``message.done`` has their text."""


class DaemonRecord(BaseModel):
    daemon_id: str
    stream_id: str
    version: str
    pid: int
    started_at: str
    uptime_s: float
    latest_seq: int
    oldest_seq: int
    """Cursors from the one before it on can be resumed."""
    counts: Counts
    upstream: Upstream
    retention: Retention
    limits: dict[str, int | float]
    features: list[str]


class Shutdown(RequestShape):
    mode: Literal["drain", "now"] = "drain"
    """``drain`` lets running turns end for ``grace_s`` first."""
    grace_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 30.0


class ShutdownAnswer(BaseModel):
    status: Literal["stopping"] = "stopping"


class StateFile(BaseModel):
    """``state.json`` in the daemon's folder: how programs of the same user find it. Readable by that user only."""

    pid: int
    started_at: str
    daemon_id: str
    host: str
    port: int
    token: str = Field(repr=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
