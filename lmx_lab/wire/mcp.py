"""MCP servers in the daemon's ``/v3`` API: configurations, states, tools and tests."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, model_validator
from pydantic.config import JsonDict
from typing_extensions import TypeAliasType

from lmx_lab.values.bodies import MEMBER_LIMIT
from lmx_lab.wire.base import LISTED, NonEmpty, RequestModel

REDACTED = "***"
"""Replaces every value of ``env`` and ``headers`` in answers. In a request, it keeps the existing value."""
# Without a double underscore, which separates server and tool in ``server__tool``.
ServerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*$", max_length=32)]
# Named types, because members of a union must be hashable, and FailFast is not.
Arguments = TypeAliasType("Arguments", Annotated[tuple[str, ...], FailFast(), Field(max_length=256), LISTED])
Variables = TypeAliasType("Variables", Annotated[dict[str, str], FailFast(), Field(max_length=MEMBER_LIMIT)])
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]
Permission = Literal["ask", "allow", "deny"]
"""Applies to tools that are not marked read-only. Read-only tools need no permission, but ``deny`` applies to all."""
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


class McpServerConfig(RequestModel):
    """The configuration of a server. The transport ``stdio`` uses ``command``, ``args``, ``env`` and ``cwd``; ``http``
    uses ``url`` and ``headers``."""

    model_config = ConfigDict(json_schema_extra=BY_TRANSPORT)

    name: ServerName
    transport: Literal["stdio", "http"] = "stdio"
    command: NonEmpty | None = None
    """Name or path of a program, which is started without a shell."""
    args: Arguments = ()
    env: Variables = Field(default={}, repr=False)
    """Environment variables, in addition to the few that every server inherits (such as PATH, HOME and LANG)."""
    cwd: str | None = None
    url: NonEmpty | None = None
    headers: Variables = Field(default={}, repr=False)
    enabled: bool = True
    start_timeout_s: Seconds = 20.0
    tool_timeout_s: Seconds = 60.0
    permission: Permission = "ask"

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        required, forbidden = ("command", "url") if self.transport == "stdio" else ("url", "command")
        if getattr(self, required) is None:
            raise ValueError(f"transport is {self.transport!r}, but {required} is missing; add it")
        if getattr(self, forbidden) is not None:
            raise ValueError(f"transport is {self.transport!r}, which does not use {forbidden}; remove it")
        return self


class ChangeMcpServer(RequestModel):
    """Changes of a configuration; omitted fields stay unchanged."""

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


class McpServerRecord(McpServerConfig):
    """The configuration of a server with redacted secrets, and its state."""

    # This is an answer, so the strict rules of requests do not apply to it, and it has all fields.
    model_config = ConfigDict(extra="ignore", strict=False, json_schema_serialization_defaults_required=True)

    state: ServerState
    tools: int
    """Number of tools."""
    restarts: int
    """Number of restarts since the server was ready for a minute, or was added, changed or restarted by a client."""
    error: str | None
    error_kind: ErrorKind | None
    stderr_tail: str
    """The last lines that the server wrote to stderr."""
    pid: int | None


class McpServerList(BaseModel):
    servers: list[McpServerRecord]


class ToolRecord(BaseModel):
    """A tool of an MCP server."""

    name: str
    """Name that models use, ``server__tool``."""
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    read_only: bool
    """Whether the server declares that the tool changes nothing."""
    permission: Permission

    @property
    def needs_permission(self) -> bool:
        """Whether a client has to allow each call."""
        return self.permission == "ask" and not self.read_only


class ToolList(BaseModel):
    tools: list[ToolRecord]


class McpTestPassed(BaseModel):
    ok: Literal[True] = True
    latency_ms: float
    """Time from the start of the server to the list of its tools."""
    tools: list[ToolRecord]


class McpTestFailed(BaseModel):
    ok: Literal[False] = False
    error: str
    error_kind: ErrorKind
    stderr_tail: str
