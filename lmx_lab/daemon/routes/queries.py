"""The query parameters of the daemon's routes.

They are parsed strictly: ``int()`` would also accept texts such as ``" 5 "`` and ``"5_0"``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Query, Request, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from lmx_lab.daemon.storage.event_log import ALL_EVENTS, EventFilter
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import validation_error
from lmx_lab.wire.base import Identifier
from lmx_lab.wire.events import LOG_EVENTS

REPEATABLE = {"session_id", "types"}
NAMES_LIMIT = 256
"""Maximum number of values of a repeatable parameter."""
EVENT_GROUPS = frozenset(f"{name.partition('.')[0]}.*" for name in LOG_EVENTS)
EVENT_NAMES = LOG_EVENTS | EVENT_GROUPS


def _written_as(pattern: str, otherwise: str) -> BeforeValidator:
    """Refuse texts that do not match the pattern; ``otherwise`` is the error."""

    def check(text: Any) -> Any:
        if isinstance(text, str) and not re.fullmatch(pattern, text):
            raise ValueError(otherwise)
        return text

    return BeforeValidator(check)


def _split_types(values: list[str]) -> list[str]:
    """Return the names in values that are separated by commas."""
    names = [name for value in values for name in value.split(",")]
    for name in names:
        if name not in EVENT_NAMES:
            hint = f"use {_listed(LOG_EVENTS)}"
            if name.startswith("stream."):
                hint = "control frames are always sent"
            raise ValueError(f"contains {name!r:.80}, which is not an event; {hint}, or {_listed(EVENT_GROUPS)}")
    if len(names) > NAMES_LIMIT:
        raise ValueError(f"has {len(names)} names, the limit is {NAMES_LIMIT}")
    return names


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# The bounds come first, because only then the JSON schema contains them.
_INTEGER = _written_as("[0-9]{1,16}", "is not an integer of at most 16 digits")
# The notation of JSON, in which programs format numbers.
_SECONDS = _written_as(
    r"[0-9]{1,6}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", "is not a number of seconds, such as 5 or 0.5"
)
Whole = Annotated[int, Field(ge=0, lt=10**16), _INTEGER]
Count = Annotated[int, Field(ge=1, lt=10**16), _INTEGER]
Boolean = Annotated[bool, _written_as("true|false", "is neither true nor false")]
_NAME_PATTERN = f"(?:{'|'.join(map(re.escape, sorted(EVENT_NAMES)))})"
EventNames = Annotated[
    list[str],
    AfterValidator(_split_types),
    WithJsonSchema(
        {"type": "array", "items": {"type": "string", "pattern": f"^{_NAME_PATTERN}(?:,{_NAME_PATTERN})*$"}}
    ),
]
SessionIds = Annotated[list[Identifier], Field(max_length=NAMES_LIMIT)]

# The parameters of routes. They are module-level names because FastAPI evaluates annotations in the module.
After = Annotated[
    Whole | None, Query(description="Events after this cursor; 0 for all that are kept, omitted for new ones only")
]
PageLimit = Annotated[Count | None, Query(description="Maximum number of results")]
Wait = Annotated[
    Annotated[float, Field(ge=0), _SECONDS],
    Query(description="Maximum number of seconds to wait for a result"),
]
Types = Annotated[
    EventNames | None,
    Query(description="Names of events, separated by commas; `turn.*` stands for all names with that prefix"),
]
OfSessions = Annotated[SessionIds | None, Query(description="Only events of this session; repeatable")]
StreamId = Annotated[
    str | None, Query(description="`stream_id` of the database that the cursor belongs to; another one is refused")
]
Archived = Annotated[Boolean, Query(description="List the archived sessions instead of the others")]
Words = Annotated[str | None, Query(description="Part of the title or the id", max_length=500)]
ListCursor = Annotated[str | None, Query(description="`next_cursor` of the previous page", max_length=500)]


class StreamQuery(BaseModel):
    """The query parameters of the WebSocket."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token: str | None = Field(None, repr=False)
    """The token, which the guard has checked before."""
    after: Whole | None = None
    stream_id: str | None = None
    session_id: SessionIds = []
    types: EventNames = []

    @classmethod
    def parse(cls, query: bytes) -> StreamQuery:
        """Parse a query string.

        Raises:
            InvalidRequestError: A parameter is invalid. The message names the first one.
        """
        items = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        check_names(items, cls.model_fields)
        values: dict[str, Any] = {name: value for name, value in items if name not in REPEATABLE}
        for repeatable in REPEATABLE:
            values[repeatable] = [value for name, value in items if name == repeatable]
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            raise validation_error(exc) from exc


class StrictQueryRoute(StrictRoute):
    """A route that refuses unknown query parameters, and a second value of a parameter that is not repeatable."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = [field.alias for field in self.dependant.query_params]

        async def check_and_handle(request: Request) -> Response:
            check_names(request.query_params.multi_items(), known)
            return await handle(request)

        return check_and_handle


def check_names(items: Iterable[tuple[str, str]], known: Iterable[str]) -> None:
    """Check the names of query parameters.

    Raises:
        InvalidRequestError: A name is unknown, or a parameter that is not repeatable has two values.
    """
    seen: set[str] = set()
    known = set(known)
    for name, _ in items:
        if name not in known:
            parameters = _listed(known - {"token"}) or "none"
            raise InvalidRequestError(
                f"{name!r:.80} is not a parameter of this address; the parameters are: {parameters}", param=name[:80]
            )
        if name in seen and name not in REPEATABLE:
            raise InvalidRequestError(f"{name} is given more than once; send one value", param=name)
        seen.add(name)


def check_limit(limit: int | None, *, default: int, maximum: int) -> int:
    """Return the limit of a page.

    Raises:
        InvalidRequestError: The limit is greater than ``maximum``.
    """
    if limit is not None and limit > maximum:
        raise InvalidRequestError(f"limit is {limit}, the maximum is {maximum}; request several pages", param="limit")
    return default if limit is None else limit


def check_wait(wait_s: float, maximum_s: float) -> float:
    """Return the time to wait in seconds.

    Raises:
        InvalidRequestError: The time is longer than ``maximum_s``.
    """
    if wait_s > maximum_s:
        raise InvalidRequestError(
            f"wait is {wait_s:g} s, the maximum is {maximum_s:g} s; repeat the request after that", param="wait"
        )
    return wait_s


def event_filter(session_ids: Iterable[str] | None, types: Iterable[str] | None) -> EventFilter:
    """Return the filter for these sessions and names of events. Without any it is ``ALL_EVENTS`` itself."""
    selected = EventFilter(session_ids=frozenset(session_ids or ()), types=frozenset(types or ()))
    return ALL_EVENTS if selected == ALL_EVENTS else selected
