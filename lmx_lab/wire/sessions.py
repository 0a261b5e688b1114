"""Sessions, their messages, turns and permissions in the daemon's ``/v3`` API.

Times are UTC in ISO 8601 with milliseconds, ``2026-11-21T10:00:00.123Z``. Null means unknown or not set.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints
from pydantic.config import JsonDict

from lmx_lab.wire.errors import ErrorDetail
from lmx_lab.wire.generation import LISTED, WHOLE, NonEmpty, Penalty, Probability, RequestShape, Temperature
from lmx_lab.wire.identifiers import Identifier

CONTENT_CHARACTERS = 1_000_000
TOOL_NAMES = 256
METADATA_CHARACTERS = 65_536
"""Maximum length of a session's metadata as JSON."""
Title = Annotated[str, StringConstraints(max_length=500)]
Content = Annotated[str, StringConstraints(min_length=1, max_length=CONTENT_CHARACTERS)]
Prompt = Annotated[str, StringConstraints(max_length=CONTENT_CHARACTERS)]
ToolNames = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=200)]], Field(max_length=TOOL_NAMES)
]
SessionStatus = Literal["idle", "queued", "running", "waiting"]
"""``waiting``: the turn waits for a permission."""
TurnStatus = Literal["queued", "running", "waiting", "done", "error"]
StopReason = Literal["end", "length", "max_steps", "cancelled"]
ToolStatus = Literal["ok", "error", "denied", "timeout", "cancelled", "interrupted"]


# Messages


class ToolCall(RequestShape):
    """A tool call that a model requested."""

    call_id: NonEmpty
    name: NonEmpty
    arguments: str
    """As the model wrote them: JSON, if all went well."""


class SessionMessage(RequestShape):
    """One message of a session's history."""

    message_id: Identifier | None = None
    """Given by the daemon where it is left out."""
    role: Literal["system", "user", "assistant", "tool"]
    content: Prompt = ""
    reasoning_content: Prompt | None = None
    """Of an assistant: its thoughts, which are shown and not sent to the model again."""
    tool_calls: Annotated[tuple[ToolCall, ...], Field(max_length=128), LISTED] = ()
    """Of an assistant."""
    call_id: str | None = None
    """Of a tool: which call it answers."""
    turn_id: Identifier | None = None
    """The turn it belongs to; null for messages that a session was made with."""


# Sessions


class CreateSession(RequestShape):
    session_id: Identifier | None = None
    title: Title | None = None
    model: NonEmpty | None = None
    """Null: whatever model the upstream server has."""
    system_prompt: Prompt | None = None
    tools: ToolNames | None = None
    """Which tools its turns may use: names, or a server's with an asterisk, ``time__*``. Null is all, [] none."""
    messages: Annotated[tuple[SessionMessage, ...], Field(max_length=4096), LISTED] = ()
    """A history to begin with."""
    metadata: dict[str, JsonValue] | None = None


class ChangeSession(RequestShape):
    """What is left out stays as it is; null sets to null."""

    title: Title | None = None
    model: NonEmpty | None = None
    system_prompt: Prompt | None = None
    tools: ToolNames | None = None
    metadata: dict[str, JsonValue] | None = None
    archived: bool = False
    revision: Annotated[int, Field(ge=1), WHOLE] | None = None
    """The one that was read; another now is refused with ``revision-conflict``."""


class ForkSession(RequestShape):
    through_turn_id: Identifier | None = None
    """The last turn to take along; by default all that have ended."""
    title: Title | None = None


class SessionRecord(BaseModel):
    """What a list shows."""

    session_id: str
    title: str | None
    model: str | None
    system_prompt: str | None
    tools: list[str] | None
    metadata: dict[str, Any]
    archived: bool
    revision: int
    """Grows by one with each change of the fields above; turns do not count."""
    created_at: str
    updated_at: str
    """Of the last change or turn."""
    status: SessionStatus
    active_turn_id: str | None
    queued_turn_ids: list[str]
    forked_from: str | None = None


class SessionSnapshot(SessionRecord):
    """A session as it was after the event ``cursor``: events from there on continue it without a gap."""

    messages: list[SessionMessage]
    """What the model would be sent in the next turn; an active turn's own come as they are done."""
    partial_text: str = ""
    """Of the active turn's message that is being written, by the last batch in the log."""
    permissions: list[PermissionRecord]
    """Those that wait."""
    cursor: int


class SessionList(BaseModel):
    sessions: list[SessionRecord]
    """The last updated first."""
    next_cursor: str | None
    """For ``cursor`` of the next page; null on the last."""


# Turns


class TurnOverrides(RequestShape):
    """For this turn only, in the place of the session's or the server's."""

    model: NonEmpty | None = None
    tools: ToolNames | None = None
    tool_choice: Literal["auto", "none", "required"] | NonEmpty | None = None
    """Of the first step; later ones are ``auto``, since a model that must call never answers. A tool's name forces its
    call."""
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Of one step."""
    max_steps: Annotated[int, Field(ge=1, le=1000), WHOLE] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None
    extra: dict[str, JsonValue] | None = None
    """Further fields of the upstream's chat request, sent as they are."""


class SubmitTurn(RequestShape):
    model_config = ConfigDict(json_schema_extra={"examples": [{"content": "Say hello."}]})

    turn_id: Identifier | None = None
    """Chosen by the client, it makes a submit that can be repeated safely."""
    content: Content
    when_busy: Literal["enqueue", "reject", "interrupt"] = "enqueue"
    overrides: TurnOverrides | None = None


class TurnAccepted(BaseModel):
    turn_id: str
    status: TurnStatus
    cursor: int
    """Events of the turn come after it."""


class TurnStats(BaseModel):
    """Also ``envelope.stats`` of ``turn.done``."""

    tokens: int
    """Completion tokens of all steps, as the specification names them."""
    prompt_tokens: int
    completion_tokens: int
    tool_calls: int
    steps: int
    elapsed_s: float
    """From the start of the turn; waiting in the queue does not count."""
    tokens_per_second: float
    """Completion tokens by the time in which the model wrote, without prefill, tools and permissions."""
    ttft_ms: float | None
    """From the start of the turn to the first token, thoughts included; null if none came."""


class TurnRecord(BaseModel):
    turn_id: str
    session_id: str
    status: TurnStatus
    content: str
    overrides: TurnOverrides | None
    stop_reason: StopReason | None
    text: str
    """The last message's, or what of it there was at the end; empty before the end."""
    error: ErrorDetail | None
    stats: TurnStats | None
    queued_at: str
    started_at: str | None
    ended_at: str | None


class CancelTurns(RequestShape):
    turn_id: Identifier | None = None
    """Null: the active turn."""
    queued: bool = False
    """The queued ones, too."""


class CancelAnswer(BaseModel):
    cancelled: int
    """Turns that end by this: 0 if they had ended, or were cancelled before."""
    turn_ids: list[str]


# Permissions


# Nothing remembers a denial for later calls.
NO_LASTING_DENIAL: JsonDict = {
    "not": {
        "properties": {"decision": {"const": "deny"}, "scope": {"const": "session"}},
        "required": ["decision", "scope"],
    }
}


class Decision(RequestShape):
    model_config = ConfigDict(json_schema_extra=NO_LASTING_DENIAL)

    decision: Literal["allow", "deny"]
    scope: Literal["once", "session"] = "once"
    """``session``: also later calls of this tool in this session, whatever their arguments."""


class PermissionRecord(BaseModel):
    permission_id: str
    session_id: str
    turn_id: str
    call_id: str
    tool: str
    arguments: dict[str, Any]
    """What the decision is about: the call runs with these or not at all."""
    requested_at: str
    expires_at: str
    """No decision until then is a denial."""
    decision: Literal["allow", "deny"] | None = None
    scope: Literal["once", "session"] | None = None
    resolved_by: Literal["client", "expiry", "cancel"] | None = None


class PermissionList(BaseModel):
    permissions: list[PermissionRecord]


SessionSnapshot.model_rebuild()
