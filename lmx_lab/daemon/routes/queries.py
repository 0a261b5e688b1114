"""What may stand behind the ``?`` of the daemon's addresses, read strictly: ``int()`` takes " 5 ", "5_0" and more."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Query, Request, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from lmx_lab.daemon.storage.log import EVERYTHING, EventFilter
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.error_bodies import validation_error
from lmx_lab.wire.events import LOG_EVENTS
from lmx_lab.wire.identifiers import Identifier

REPEATABLE = {"session_id", "types"}
NAMES_LIMIT = 256
CONTROL = "stream"
KINDS = LOG_EVENTS
GROUPS = frozenset(f"{kind.partition('.')[0]}.*" for kind in KINDS)
_WHOLE = re.compile(r"[0-9]{1,16}", re.ASCII)
# As JSON writes numbers, which is how programs write them out.
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_SWITCH = {"true": True, "false": False}


def _whole(text: Any) -> Any:
    if isinstance(text, str) and not _WHOLE.fullmatch(text):
        raise ValueError("is no whole number of at most 16 digits")
    return text


def _seconds(text: Any) -> Any:
    if isinstance(text, str) and not _SECONDS.fullmatch(text):
        raise ValueError("is no number of seconds; write it as 5 or 0.5")
    return text


def _switch(text: Any) -> Any:
    if isinstance(text, str) and text not in _SWITCH:
        raise ValueError("is neither true nor false")
    return _SWITCH[text] if isinstance(text, str) else text


def _kinds(values: list[str]) -> list[str]:
    """The names in a list of lists with commas."""
    names = [name for value in values for name in value.split(",")]
    for name in names:
        if name not in KINDS | GROUPS:
            hint = "control frames always come" if name.startswith(f"{CONTROL}.") else f"there are {_listed(KINDS)}"
            raise ValueError(f"names {name!r:.80}, which is no kind of event; {hint}, and {_listed(GROUPS)}")
    if len(names) > NAMES_LIMIT:
        raise ValueError(f"has {len(names)} names, the limit is {NAMES_LIMIT}")
    return names


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# The bounds come first: only so the document has them.
Whole = Annotated[int, Field(ge=0, lt=10**16), BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=1, lt=10**16), BeforeValidator(_whole)]
Switch = Annotated[bool, BeforeValidator(_switch)]
_ONE_KIND = f"(?:{'|'.join(map(re.escape, sorted(KINDS | GROUPS)))})"
Kinds = Annotated[
    list[str],
    AfterValidator(_kinds),
    WithJsonSchema({"type": "array", "items": {"type": "string", "pattern": f"^{_ONE_KIND}(?:,{_ONE_KIND})*$"}}),
]
SessionIds = Annotated[list[Identifier], Field(max_length=NAMES_LIMIT)]

# As parameters of routes; these are not closures because FastAPI looks annotations up in a module.
After = Annotated[
    Whole | None, Query(description="Events after this cursor; 0 for all that is kept, absent for new ones")
]
PageLimit = Annotated[Count | None, Query(description="The most that is answered")]
Wait = Annotated[
    Annotated[float, Field(ge=0), BeforeValidator(_seconds)],
    Query(description="Seconds to wait if there is nothing yet"),
]
Types = Annotated[
    Kinds | None, Query(description="Kinds of events, separated by commas; `turn.*` is all that begin so")
]
OfSessions = Annotated[SessionIds | None, Query(description="Only events of this session; repeatable")]
StreamId = Annotated[str | None, Query(description="Where the cursor is from; of another database it is refused")]
Archived = Annotated[Switch, Query(description="List the archived sessions, in the place of the others")]
Words = Annotated[str | None, Query(description="Part of a title or an id", max_length=500)]
ListCursor = Annotated[str | None, Query(description="`next_cursor` of the page before", max_length=500)]


class StreamQuery(BaseModel):
    """Of the WebSocket."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token: str | None = Field(None, repr=False)
    """For the guard, which has read it."""
    after: Whole | None = None
    stream_id: str | None = None
    session_id: SessionIds = []
    types: Kinds = []

    @classmethod
    def parse(cls, query: bytes) -> StreamQuery:
        """
        Raises:
            InvalidRequestError: the first parameter that is wrong, by name.
        """
        items = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        check_names(items, cls.model_fields)
        values: dict[str, Any] = {name: value for name, value in items if name not in REPEATABLE}
        for name in REPEATABLE:
            values[name] = [value for given, value in items if given == name]
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            raise validation_error(exc) from exc


class StrictQueryRoute(StrictRoute):
    """A route that refuses parameters it does not have, or has once only."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = [field.alias for field in self.dependant.query_params]

        async def checked(request: Request) -> Response:
            check_names(request.query_params.multi_items(), known)
            return await handle(request)

        return checked


def check_names(items: Iterable[tuple[str, str]], known: Iterable[str]) -> None:
    """
    Raises:
        InvalidRequestError: a name that is not known, or a second value where there can be one.
    """
    seen: set[str] = set()
    known = set(known)
    for name, _ in items:
        if name not in known:
            there = _listed(known - {"token"}) or "none"
            raise InvalidRequestError(
                f"{name!r:.80} is no parameter of this address; there are: {there}", param=name[:80]
            )
        if name in seen and name not in REPEATABLE:
            raise InvalidRequestError(f"{name} is there more than once; send one value", param=name)
        seen.add(name)


def limited(limit: int | None, *, default: int, most: int) -> int:
    """
    Raises:
        InvalidRequestError: more than ``most``.
    """
    if limit is not None and limit > most:
        raise InvalidRequestError(f"limit is {limit}, the most is {most}; ask for pages", param="limit")
    return default if limit is None else limit


def waiting_s(wait: float, most_s: float) -> float:
    """
    Raises:
        InvalidRequestError: more than ``most_s``.
    """
    if wait > most_s:
        raise InvalidRequestError(f"wait is {wait:g} s, the most is {most_s:g}; ask again after it", param="wait")
    return wait


def event_filter(session_ids: Iterable[str] | None, types: Iterable[str] | None) -> EventFilter:
    chosen = EventFilter(session_ids=frozenset(session_ids or ()), types=frozenset(types or ()))
    return EVERYTHING if chosen == EVERYTHING else chosen
