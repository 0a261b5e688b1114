"""MCP servers of the daemon: what is configured, what is known of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, model_validator
from pydantic.config import JsonDict
from typing_extensions import TypeAliasType

from lmx_lab.wire.generation import LISTED, NonEmpty, RequestShape
from lmx_lab.wire.limits import MEMBER_LIMIT

REDACTED = "***"
"""In the place of every value of ``env`` and ``headers``; sent back, it leaves the value as it is."""
# No double underscore: ``server__tool`` names a tool.
ServerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*$", max_length=32)]
# As named types, since a union needs members with a hash, and FailFast has none.
Arguments = TypeAliasType("Arguments", Annotated[tuple[str, ...], FailFast(), Field(max_length=256), LISTED])
Variables = TypeAliasType("Variables", Annotated[dict[str, str], FailFast(), Field(max_length=MEMBER_LIMIT)])
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]
Permission = Literal["ask", "allow", "deny"]
"""For tools that are not marked read-only; those need none unless it is ``deny``."""
ServerState = Literal["disabled", "starting", "ready", "restarting", "failed", "stopping"]
ErrorKind = Literal["command-not-found", "start-timeout", "exited", "unreachable", "protocol", "invalid"]


BY_TRANSPORT: JsonDict = {
    "oneOf": [
        {
            "properties": {
                "transport": {"const": "stdio"},
                "command": {"type": "string"},
                "url": {"type": "null"},
            },
            "required": ["command"],
        },
        {
            "properties": {"transport": {"const": "http"}, "url": {"type": "string"}, "command": {"type": "null"}},
            "required": ["transport", "url"],
        },
    ]
}


class McpServerConfig(RequestShape):
    """``stdio`` has ``command``, ``args``, ``env``, ``cwd``; ``http`` has ``url`` and ``headers``."""

    model_config = ConfigDict(json_schema_extra=BY_TRANSPORT)

    name: ServerName
    transport: Literal["stdio", "http"] = "stdio"
    command: NonEmpty | None = None
    """A program, by name or path; no shell reads it."""
    args: Arguments = ()
    env: Variables = Field(default={}, repr=False)
    """Beside the few variables that every server gets (PATH, HOME, LANG and the like)."""
    cwd: str | None = None
    url: NonEmpty | None = None
    headers: Variables = Field(default={}, repr=False)
    enabled: bool = True
    start_timeout_s: Seconds = 20.0
    tool_timeout_s: Seconds = 60.0
    permission: Permission = "ask"

    @model_validator(mode="after")
    def _fields_fit_the_transport(self) -> Self:
        needed, foreign = ("command", "url") if self.transport == "stdio" else ("url", "command")
        if getattr(self, needed) is None:
            raise ValueError(f"transport is {self.transport!r} and {needed} is missing; give it")
        if getattr(self, foreign) is not None:
            raise ValueError(f"transport is {self.transport!r}, which has no {foreign}; leave it out")
        return self


class ChangeMcpServer(RequestShape):
    """What is left out stays as it is."""

    command: NonEmpty | None = None
    args: Arguments | None = None
    env: Variables | None = Field(default=None, repr=False)
    cwd: str | None = None
    url: NonEmpty | None = None
    headers: Variables | None = Field(default=None, repr=False)
    enabled: bool | None = None
    start_timeout_s: Seconds | None = None
    tool_timeout_s: Seconds | None = None
    permission: Permission | None = None


class McpServerRecord(BaseModel):
    """The configuration, its secrets redacted, and how the server is."""

    name: str
    transport: Literal["stdio", "http"]
    command: str | None
    args: list[str]
    env: dict[str, str]
    cwd: str | None
    url: str | None
    headers: dict[str, str]
    enabled: bool
    start_timeout_s: float
    tool_timeout_s: float
    permission: Permission
    state: ServerState
    tools: int
    restarts: int
    """Since it was last ready for a minute, added, changed or restarted by hand."""
    error: str | None
    error_kind: ErrorKind | None
    stderr_tail: str
    """The last lines that it wrote to stderr."""
    pid: int | None


class McpServerList(BaseModel):
    servers: list[McpServerRecord]


class ToolRecord(BaseModel):
    """A tool, of an MCP server or a Python function."""

    name: str
    """As the model calls it; of an MCP server ``server__tool``."""
    description: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""
    read_only: bool
    """By its own word."""
    permission: Permission


class ToolList(BaseModel):
    tools: list[ToolRecord]


class McpTestPassed(BaseModel):
    ok: Literal[True] = True
    latency_ms: float
    """From the start to the list of tools."""
    tools: list[ToolRecord]


class McpTestFailed(BaseModel):
    ok: Literal[False] = False
    error: str
    error_kind: ErrorKind
    stderr_tail: str
