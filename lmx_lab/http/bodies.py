"""Read JSON from clients: size, depth and content type are checked before anything else runs. ``http.protocol``
limits how slowly a body may come.

Parsing and validation are one call each, which holds the interpreter's lock, also in a thread. Their time depends on
how many items, members, lists and objects a body has. These are therefore counted first, a piece at a time.
"""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from lmx_lab.errors import BodyTooLargeError, InvalidRequestError, LabError, QueueFullError
from lmx_lab.wire.limits import Structure

NESTING_LIMIT = 64
TOO_DEEP = f"the body is nested deeper than {NESTING_LIMIT} levels; flatten it (a schema can use $defs and $ref)"
# A refused body is still read up to this many times the limit: closing at once would lose the answer on its way.
DRAIN_FACTOR = 8
ROOM_BYTES = 256 * 2**20
"""For the bodies of all requests under way."""
SMALL_BODY_BYTES = 64 * 1024
"""This much of each body does not count, so that large bodies, however slowly they come, do not keep small ones out.
Larger bodies are counted before they are parsed, a piece of this size at a time; smaller ones cannot hold too much."""
TURN_S = 0.005
"""Between two steps of large bodies, which take up to about 50 ms each. Everything else on the loop runs meanwhile."""
WALK_ITEMS = 10_000
"""Checked in about 3 ms."""
ROOM_RETRY_S = 2
CONTAINERS = (dict, list)
Text = bytes | bytearray | str
_PAUSED = threading.Lock()
WITH_BODY = {"POST", "PATCH"}
LONE_SURROGATE = "a lone surrogate (\\ud800 to \\udfff without its other half) is no character"
PLAIN_WORDS = {
    "unexpected end of hex escape": LONE_SURROGATE,
    "lone leading surrogate in hex escape": LONE_SURROGATE,
    "number out of range": "a number has more than 4,300 digits, the most that are read",
}


class Turns:
    """Large bodies take turns, one step of one body at a time, with a pause after each."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Return when the caller may take a step, which it does before it awaits anything."""
        async with self._lock:
            await asyncio.sleep(TURN_S)


def parse_json(text: Text) -> Any:
    """JSON as its standard has it: no NaN, no lone surrogates, nested at most 64 levels.

    Raises:
        InvalidRequestError: says where it went wrong.
    """
    value = _parse(text)
    for _ in _walk(value):
        pass
    return value


async def read_json(text: Text, turns: Turns) -> Any:
    """``parse_json`` in steps between which the loop runs. A large body is counted first. On return, the caller has the
    turn, to validate the value.

    Raises:
        InvalidRequestError: as ``parse_json``.
        BodyTooLargeError: it holds more than ``Structure`` allows.
    """
    if len(text) <= SMALL_BODY_BYTES:
        return parse_json(text)
    structure, start = Structure(), 0
    while start < len(text):
        start = structure.add(text, start, SMALL_BODY_BYTES)
        if structure.excess is not None:
            raise BodyTooLargeError(f"the body has more than {structure.excess}, the limit of this server; send less")
        await asyncio.sleep(0)
    await turns.wait()
    value = _parse(text)
    for _ in _walk(value):
        await asyncio.sleep(0)
    await turns.wait()
    return value


def _parse(text: Text) -> Any:
    if text[:1] == "\ufeff" or text[:3] == b"\xef\xbb\xbf":
        raise InvalidRequestError("the body begins with a byte order mark (U+FEFF); send UTF-8 without one")
    try:
        with _no_collection():
            return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        if "recursion limit" in str(exc):
            raise InvalidRequestError(TOO_DEEP) from exc
        raise InvalidRequestError(f"the body is not valid JSON: {_in_plain_words(str(exc))}") from exc


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the collection of garbage: tracing 50,000 lists repeatedly takes longer than parsing them."""
    # One thread at a time; otherwise one could restore the state that another has set.
    with _PAUSED:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def _in_plain_words(said: str) -> str:
    """The parser's own words where they name its step instead of the mistake; the place stays."""
    what, at, place = said.rpartition(" at line ")
    return f"{PLAIN_WORDS.get(what, what)}{at}{place}"


def _walk(value: Any) -> Iterator[None]:
    """Check the depth and the numbers, with a pause after every few items.

    Raises:
        InvalidRequestError: nested too deeply, or a number that is too large.
    """
    level, walked = [value], 0
    for _ in range(NESTING_LIMIT):
        below: list[Any] = []
        for values in _pieces(level):
            # 1e400 is read as infinity, which no answer could repeat.
            if math.inf in values or -math.inf in values:
                raise InvalidRequestError("a number is beyond what is read, 1.8e308; send a smaller one")
            below += [child for child in values if isinstance(child, CONTAINERS)]
            walked += 1 + len(values)
            if walked > WALK_ITEMS:
                walked = 0
                yield
        if not below:
            return
        level = below
    raise InvalidRequestError(TOO_DEEP)


def _pieces(level: list[Any]) -> Iterator[list[Any]]:
    """The values in each of the level's lists and objects, some at a time."""
    for item in level:
        values = item if isinstance(item, list) else list(item.values()) if isinstance(item, dict) else [item]
        if len(values) <= WALK_ITEMS:
            yield values
        else:
            yield from (values[start : start + WALK_ITEMS] for start in range(0, len(values), WALK_ITEMS))


class BodyRoom:
    """The memory for all bodies under way together; ``taken_bytes`` of it are in use."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.taken_bytes = 0

    def resize(self, size: int, to: int) -> int:
        """A body of ``size`` bytes becomes one of ``to``, which is returned.

        Raises:
            QueueFullError: there is no room for it to grow; it stays as it is.
        """
        taken = self.taken_bytes + max(0, to - SMALL_BODY_BYTES) - max(0, size - SMALL_BODY_BYTES)
        if to > size and taken > self.size_bytes:
            raise QueueFullError(
                f"the bodies of requests under way take {self.taken_bytes} bytes, and there is room for "
                f"{self.size_bytes}; try again in {ROOM_RETRY_S} s",
                retry_after_s=ROOM_RETRY_S,
            )
        self.taken_bytes = taken
        return to


@asynccontextmanager
async def read_body(request: Request, limit_bytes: int, room: BodyRoom) -> AsyncIterator[bytearray]:
    """The whole body, which has its room until the block ends.

    Raises:
        BodyTooLargeError: more than ``limit_bytes``.
        QueueFullError: no room beside the others. Of either, the rest was read and thrown away, up to a bound.
    """
    # One block, which the allocator gives back whole; 128 pieces would stay in its heap.
    body = bytearray()
    size = held = 0
    refusal: LabError | None = None
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit_bytes * DRAIN_FACTOR:
                break
            if refusal is None:
                try:
                    _check_size(size, limit_bytes)
                    held = room.resize(held, size)
                    body += chunk
                except LabError as exc:
                    refusal = exc
                    body.clear()
                    held = room.resize(held, 0)
        _check_size(size, limit_bytes)
        if refusal is not None:
            raise refusal
        yield body
    finally:
        room.resize(held, 0)


def _check_size(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise BodyTooLargeError(f"the body has more than {limit_bytes} bytes, the limit of this server")


class ParsedRequest(Request):
    """A request whose JSON was read strictly."""

    def __init__(self, request: Request, body: bytearray, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body  # type: ignore[assignment]
        self._value = value

    async def json(self) -> Any:
        return self._value


class StrictRoute(APIRoute):
    """A route that reads its JSON body by the rules of this module; routes without a body are as FastAPI has them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            state = request.app.state
            async with read_body(request, state.max_body_bytes, state.body_room) as body:
                value = None
                if body or (self.body_field is not None and self.body_field.field_info.is_required()):
                    _check_content_type(request)
                    value = await read_json(body, state.body_turns)
                return await handle(ParsedRequest(request, body, value))

        return strict if WITH_BODY & set(self.methods or ()) else handle


def _check_content_type(request: Request) -> None:
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise InvalidRequestError(f"Content-Encoding is {encoding[:50]}; send the body as it is, uncompressed")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequestError(f"Content-Type is {kind[:100] or 'missing'}; send application/json")
