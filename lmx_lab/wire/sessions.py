"""Sessions, their messages, turns and permissions in the daemon's ``/v3`` API.

Times are UTC in ISO 8601 with milliseconds, ``2026-11-21T10:00:00.123Z``. Null means unknown or not set.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, JsonValue, StringConstraints
from pydantic.config import JsonDict
from typing_extensions import TypeAliasType

from lmx_lab.values.bodies import MEMBER_LIMIT
from lmx_lab.wire.base import (
    FEW_VALUES,
    LISTED,
    WHOLE,
    Identifier,
    NonEmpty,
    Penalty,
    Probability,
    RequestModel,
    Temperature,
)
from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.tools import check_counts

CONTENT_CHARACTERS = 1_000_000
METADATA_CHARACTERS = 65_536
"""Maximum length of a session's metadata as JSON."""
Title = Annotated[str, StringConstraints(max_length=500)]
Content = Annotated[str, StringConstraints(min_length=1, max_length=CONTENT_CHARACTERS)]
Prompt = Annotated[str, StringConstraints(max_length=CONTENT_CHARACTERS)]
# Named types, because members of a union must be hashable, and FailFast is not.
ToolNames = TypeAliasType(
    "ToolNames",
    Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=200)]],
        FailFast(),
        Field(max_length=256),
    ],
)
Values = TypeAliasType(
    "Values", Annotated[dict[str, JsonValue], FailFast(), Field(max_length=MEMBER_LIMIT), FEW_VALUES]
)
"""JSON values of any shape."""
SessionStatus = Literal["idle", "queued", "running", "waiting"]
"""``waiting`` means that the active turn waits for a permission."""
TurnStatus = Literal["queued", "running", "waiting", "done", "error"]
StopReason = Literal["end", "length", "max_steps", "cancelled"]
ToolStatus = Literal["ok", "error", "denied", "timeout", "cancelled", "interrupted"]


# Messages


class ToolCall(RequestModel):
    """A tool call that a model requested."""

    call_id: NonEmpty
    name: NonEmpty
    arguments: str
    """Text that the model wrote, normally a JSON object."""


class SessionMessage(RequestModel):
    """One message of a session's history."""

    message_id: Identifier | None = None
    """If omitted, the daemon generates one."""
    role: Literal["system", "user", "assistant", "tool"]
    content: Prompt = ""
    reasoning_content: Prompt | None = None
    """Thoughts of an assistant message. They are shown, but not sent to the model again."""
    tool_calls: Annotated[tuple[ToolCall, ...], FailFast(), Field(max_length=128), LISTED] = ()
    """Calls of an assistant message."""
    call_id: str | None = None
    """The call that a tool message answers."""
    turn_id: Identifier | None = None
    """The turn that the message belongs to; null for messages that the session was created with."""


# Sessions


class SessionFields(RequestModel):
    """The fields of a session that clients set."""

    title: Title | None = None
    model: NonEmpty | None = None
    """Name of the model; null for the one that the upstream server has loaded."""
    system_prompt: Prompt | None = None
    tools: ToolNames | None = None
    """Names of the tools that turns may use; ``time__*`` stands for all tools of the server ``time``. Null allows all
    tools, an empty list none."""
    metadata: Values | None = None


class CreateSession(SessionFields):
    session_id: Identifier | None = None
    messages: Annotated[
        tuple[SessionMessage, ...], FailFast(), Field(max_length=4096), LISTED, BeforeValidator(check_counts)
    ] = ()
    """The initial history."""


class ChangeSession(SessionFields):
    """Changes of a session; omitted fields stay unchanged, and null sets a field to null."""

    archived: bool = False
    revision: Annotated[int, Field(ge=1), WHOLE] | None = None
    """The revision that was read; if the session has another one now, the answer is ``revision-conflict``."""


class ForkSession(RequestModel):
    through_turn_id: Identifier | None = None
    """The last turn to include; by default all that have ended."""
    title: Title | None = None


class SessionRecord(BaseModel):
    """A session without its messages."""

    session_id: str
    title: str | None
    model: str | None
    system_prompt: str | None
    tools: list[str] | None
    metadata: dict[str, Any]
    archived: bool
    revision: int
    """Incremented with each change of the fields above; turns do not count."""
    created_at: str
    updated_at: str
    """Time of the last change or turn."""
    status: SessionStatus
    active_turn_id: str | None
    queued_turn_ids: list[str]
    forked_from: str | None = None


class SessionSnapshot(SessionRecord):
    """A session after the event ``cursor``; later events continue it without a gap."""

    messages: list[SessionMessage]
    """The messages that the next turn sends to the model; messages of the active turn are added when complete."""
    partial_text: str = ""
    """The active turn's message that is being written, up to the last batch in the log."""
    permissions: list[PermissionRecord]
    """The pending permissions."""
    cursor: int


class SessionList(BaseModel):
    sessions: list[SessionRecord]
    """Sessions in descending order of ``updated_at``."""
    next_cursor: str | None
    """Value of ``cursor`` for the next page; null on the last page."""


# Turns


class TurnOverrides(RequestModel):
    """Settings for this turn only, instead of those of the session or the server."""

    model: NonEmpty | None = None
    tools: ToolNames | None = None
    tool_choice: Literal["auto", "none", "required"] | NonEmpty | None = None
    """For the first step; later steps use ``auto``, because a model that must call tools never answers. A tool's name
    forces its call."""
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Maximum number of tokens in one step."""
    max_steps: Annotated[int, Field(ge=1, le=1000), WHOLE] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None
    extra: Values | None = None
    """Further fields of the chat request, sent to the upstream server unchanged."""


class SubmitTurn(RequestModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"content": "Say hello."}]})

    turn_id: Identifier | None = None
    """An id chosen by the client makes the request idempotent."""
    content: Content
    when_busy: Literal["enqueue", "reject", "interrupt"] = "enqueue"
    overrides: TurnOverrides | None = None


class TurnAccepted(BaseModel):
    turn_id: str
    status: TurnStatus
    cursor: int
    """The events of the turn follow this cursor."""


class TurnStats(BaseModel):
    """Statistics of a turn, also the field ``stats`` of the envelope of ``turn.done``."""

    tokens: int
    """Completion tokens of all steps, the same as ``completion_tokens``."""
    prompt_tokens: int
    completion_tokens: int
    tool_calls: int
    steps: int
    elapsed_s: float
    """Time from the start of the turn, without the time in the queue."""
    tokens_per_second: float
    """Completion tokens per second of generation, without prefill, tools and permissions."""
    ttft_ms: float | None
    """Time from the start of the turn to the first token, including thoughts; null without tokens."""


class TurnRecord(BaseModel):
    turn_id: str
    session_id: str
    status: TurnStatus
    content: str
    overrides: TurnOverrides | None
    stop_reason: StopReason | None
    text: str
    """The text of the last message, which may be incomplete; empty before the end."""
    error: ErrorDetail | None
    stats: TurnStats | None
    queued_at: str
    started_at: str | None
    ended_at: str | None


class CancelTurns(RequestModel):
    turn_id: Identifier | None = None
    """The turn to cancel; null for the active turn."""
    queued: bool = False
    """Whether to also cancel the queued turns."""


class CancelAnswer(BaseModel):
    cancelled: int
    """Number of turns that this request ended; 0 if they had ended or were cancelled before."""
    turn_ids: list[str]


# Permissions


# A denial applies to one call only.
NO_LASTING_DENIAL: JsonDict = {
    "not": {
        "properties": {"decision": {"const": "deny"}, "scope": {"const": "session"}},
        "required": ["decision", "scope"],
    }
}


class Decision(RequestModel):
    model_config = ConfigDict(json_schema_extra=NO_LASTING_DENIAL)

    decision: Literal["allow", "deny"]
    scope: Literal["once", "session"] = "once"
    """``session`` also allows later calls of this tool in this session, with any arguments."""


class PermissionRecord(BaseModel):
    permission_id: str
    session_id: str
    turn_id: str
    call_id: str
    tool: str
    arguments: dict[str, Any]
    """The call runs with exactly these arguments, or not at all."""
    requested_at: str
    expires_at: str
    """Without a decision until then, the call is denied."""
    decision: Literal["allow", "deny"] | None = None
    scope: Literal["once", "session"] | None = None
    resolved_by: Literal["client", "expiry", "cancel"] | None = None


class PermissionList(BaseModel):
    permissions: list[PermissionRecord]


SessionSnapshot.model_rebuild()
