"""Read JSON bodies of requests. Size, depth and content type are checked before anything else runs.

``http.connections`` limits how slowly a body may arrive.

Parsing and validation are single calls that hold the interpreter's lock, even in a thread. Their time depends on the
number of items, members, lists and objects in a body, so these are counted first, a piece at a time.
"""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from lmx_lab.errors import BodyTooLargeError, InvalidRequestError, LabError, QueueFullError
from lmx_lab.heap import return_freed_memory
from lmx_lab.http.errors import validation_error
from lmx_lab.wire.limits import DIGITS_LIMIT, Structure

T = TypeVar("T")

NESTING_LIMIT = 64
TOO_DEEP = f"the body is nested deeper than {NESTING_LIMIT} levels; flatten it (a schema can use $defs and $ref)"
MEMORY_BYTES = 256 * 2**20
"""Memory for the bodies of all current requests."""
SMALL_BODY_BYTES = 64 * 1024
"""This much of each body is not counted against the memory, so that large bodies, however slow, do not keep small ones
out. The contents of bodies are counted in pieces of this size."""
SHORT_BODY_BYTES = 4096
"""Largest size of a body that is parsed and validated in a single step."""
FEW_VALUES = 2000
"""A body of at most ``SMALL_BODY_BYTES`` with at most this number of values is validated in the event loop, in a few
milliseconds. Others are validated in a thread, so that the loop continues to run, although this takes longer."""
PAUSE_S = 0.015
"""Pause after a step that took longer than ``STEP_S``; steps of large bodies take up to about 50 ms. The pause is long
enough for the several iterations of the loop that another request takes."""
STEP_S = 0.003
WAIT_S = 3.0
"""Time after which a large body is refused if its steps waited for those of other bodies."""
TRIM_S = 5.0
"""Time after the last large body and the last request until freed memory is returned to the operating system."""
WALK_ITEMS = 10_000
"""Number of items that are checked at a time, in about 3 ms."""
RETRY_S = 2
CONTAINERS = (dict, list)
END = object()
Text = bytes | bytearray | str
METHODS_WITH_BODY = {"POST", "PATCH"}
LONE_SURROGATE = "a lone surrogate (\\ud800 to \\udfff without its other half) is not a character"
PARSER_MESSAGES = {
    "unexpected end of hex escape": LONE_SURROGATE,
    "lone leading surrogate in hex escape": LONE_SURROGATE,
    "number out of range": f"a number has more than {DIGITS_LIMIT} digits, which is the limit",
}
"""Replacements for messages of the parser that name its step and not the error."""


class LargeBodyQueue:
    """Processes bodies one step of one body at a time, with a pause after each long step.

    Some time after the last large body and the last request, freed memory is returned to the operating system.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._bodies = 0
        self._next_at = 0.0
        """Time at which the next step may begin."""
        self._trimming: asyncio.TimerHandle | None = None
        self._trim_at = 0.0

    @contextmanager
    def body(self) -> Iterator[Callable[[], None]]:
        """Yield a function that is called between the steps of a body.

        Raises:
            QueueFullError: the steps of other bodies took so long that ``WAIT_S`` have passed. Raised by the function.
        """
        began = time.monotonic()

        def check() -> None:
            if self._bodies > 1 and time.monotonic() - began > WAIT_S:
                raise QueueFullError(
                    f"the body was not read within {WAIT_S:g} s, because other large bodies were read meanwhile; "
                    f"try again in {RETRY_S} s",
                    retry_after_s=RETRY_S,
                )

        self._bodies += 1
        try:
            yield check
        finally:
            self._bodies -= 1

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Wait until the caller may run the block as a step. Garbage collection is paused during the step."""
        async with self._lock:
            # Wait for at least one iteration of the loop, in which other requests are processed.
            await asyncio.sleep(max(0.0, self._next_at - time.monotonic()))
            began = time.monotonic()
            with _GC_PAUSE:
                yield
            ended = time.monotonic()
            self._next_at = ended + PAUSE_S if ended - began > STEP_S else 0.0

    def trim_later(self) -> None:
        """Return freed memory to the operating system ``TRIM_S`` after the last call. Called on the server's loop."""
        self._trim_at = time.monotonic() + TRIM_S
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_S, self._trim)

    def _trim(self) -> None:
        loop, left_s = asyncio.get_running_loop(), self._trim_at - time.monotonic()
        if left_s > 0:
            self._trimming = loop.call_later(left_s, self._trim)
            return
        self._trimming = None
        loop.run_in_executor(None, return_freed_memory)


class _GcPause:
    """Pauses garbage collection within a block: tracing 50,000 lists repeatedly takes longer than parsing them.

    Several threads may be in such a block at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._blocks += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks and self._was_enabled:
                gc.enable()


_GC_PAUSE = _GcPause()


def parse_json(text: Text) -> Any:
    """Parse JSON as defined by its standard: without NaN and lone surrogates, and at most 64 levels deep.

    Raises:
        InvalidRequestError: the text is invalid; the message names the place.
    """
    value = _parse(text)
    for _ in _walk(value):
        pass
    return value


async def read_json(text: Text, queue: LargeBodyQueue, validate: Callable[[Any], T]) -> T:
    """Parse JSON as ``parse_json`` does, and return what ``validate`` makes of the value.

    A short body is processed immediately. Longer bodies are counted first, and the loop runs between the steps.

    Raises:
        InvalidRequestError: as ``parse_json``.
        BodyTooLargeError: it contains more than ``Structure`` allows.
        QueueFullError: it waited for ``WAIT_S`` for other large bodies.
    """
    if len(text) <= SHORT_BODY_BYTES:
        return validate(parse_json(text))
    with queue.body() as check_time:
        return await _read_in_steps(text, queue, validate, check_time)


async def _read_in_steps(
    text: Text, queue: LargeBodyQueue, validate: Callable[[Any], T], check_time: Callable[[], None]
) -> T:
    structure, start = Structure(), 0
    while start < len(text):
        async with queue.step():
            start = structure.add(text, start, SMALL_BODY_BYTES)
        check_time()
        if structure.excess is not None:
            raise BodyTooLargeError(f"the body has more than {structure.excess}, the limit of this server; send less")
        if structure.has_long_number:
            raise InvalidRequestError(f"a number in the body has more than {DIGITS_LIMIT} digits; send a shorter one")
        if structure.depth > NESTING_LIMIT:
            raise InvalidRequestError(TOO_DEEP)
    is_small = len(text) <= SMALL_BODY_BYTES and structure.items + structure.containers <= FEW_VALUES
    if not is_small:
        queue.trim_later()
    async with queue.step():
        check_time()
        value = _parse(text)
    if structure.may_have_infinity:
        walk = _walk(value)
        has_more = True
        while has_more:
            async with queue.step():
                has_more = next(walk, END) is not END
    async with queue.step():
        if is_small:
            return validate(value)
        return await asyncio.to_thread(validate, value)


def _parse(text: Text) -> Any:
    if text[:1] == "\ufeff" or text[:3] == b"\xef\xbb\xbf":
        raise InvalidRequestError("the body begins with a byte order mark (U+FEFF); send UTF-8 without one")
    try:
        with _GC_PAUSE:
            return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        if "recursion limit" in str(exc):
            raise InvalidRequestError(TOO_DEEP) from exc
        what, at, place = str(exc).rpartition(" at line ")
        raise InvalidRequestError(f"the body is not valid JSON: {PARSER_MESSAGES.get(what, what)}{at}{place}") from exc


def _walk(value: Any) -> Iterator[None]:
    """Check depth and numbers, and yield after every few items.

    Raises:
        InvalidRequestError: the value is nested too deeply, or contains a number that is too large.
    """
    level, walked = [value], 0
    for _ in range(NESTING_LIMIT):
        below: list[Any] = []
        for values in _pieces(level):
            # 1e400 is parsed as infinity, which no answer could contain.
            if math.inf in values or -math.inf in values:
                raise InvalidRequestError("a number exceeds the limit of 1.8e308; send a smaller one")
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
    """Iterate over the values of the lists and objects in a level, a limited number at a time."""
    for item in level:
        values = item if isinstance(item, list) else list(item.values()) if isinstance(item, dict) else [item]
        if len(values) <= WALK_ITEMS:
            yield values
        else:
            yield from (values[start : start + WALK_ITEMS] for start in range(0, len(values), WALK_ITEMS))


class BodyMemory:
    """The memory that the bodies of all current requests share."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0

    def resize(self, size: int, to: int) -> int:
        """Change the size of a body from ``size`` to ``to`` bytes, and return ``to``.

        Raises:
            QueueFullError: there is not enough memory; nothing was changed.
        """
        used = self.used_bytes + max(0, to - SMALL_BODY_BYTES) - max(0, size - SMALL_BODY_BYTES)
        if to > size and used > self.size_bytes:
            raise QueueFullError(
                f"the bodies of current requests take {self.used_bytes} bytes, and the limit for all together is "
                f"{self.size_bytes}; try again in {RETRY_S} s",
                retry_after_s=RETRY_S,
            )
        self.used_bytes = used
        return to


@asynccontextmanager
async def read_body(request: Request, limit_bytes: int, memory: BodyMemory) -> AsyncIterator[bytearray]:
    """Read the whole body, and keep its memory reserved within the block.

    In case of an error, the rest of the body is read and dropped, up to a limit.

    Raises:
        BodyTooLargeError: the body has more than ``limit_bytes``.
        QueueFullError: there is not enough memory for it.
    """
    # A single block, which the allocator returns completely; 128 chunks would remain in its heap.
    body = bytearray()
    size = reserved = 0
    refusal: LabError | None = None
    try:
        async for chunk in request.stream():
            size += len(chunk)
            # Up to this size, a refused body is still read: if the connection were closed immediately, the client could
            # lose the answer.
            if size > limit_bytes * 8:
                break
            if refusal is None:
                try:
                    _check_size(size, limit_bytes)
                    reserved = memory.resize(reserved, size)
                    body += chunk
                except LabError as exc:
                    refusal = exc
                    body.clear()
                    reserved = memory.resize(reserved, 0)
        _check_size(size, limit_bytes)
        if refusal is not None:
            raise refusal
        yield body
    finally:
        memory.resize(reserved, 0)


def _check_size(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise BodyTooLargeError(f"the body has more than {limit_bytes} bytes, the limit of this server; send less")


class ParsedRequest(Request):
    """A request whose JSON body was already parsed and validated. FastAPI accepts the valid object as it is."""

    def __init__(self, request: Request, body: bytearray, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body  # type: ignore[assignment]
        self._value = value

    async def json(self) -> Any:
        return self._value


class StrictRoute(APIRoute):
    """A route that reads its JSON body as defined in this module. Routes without a body are FastAPI's own."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            state = request.app.state
            async with read_body(request, state.max_body_bytes, state.body_memory) as body:
                value = None
                if body or (self.body_field is not None and self.body_field.field_info.is_required()):
                    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
                        raise InvalidRequestError(f"Content-Encoding is {encoding[:50]}; send the body uncompressed")
                    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                    if kind != "application/json":
                        raise InvalidRequestError(f"Content-Type is {kind[:100] or 'missing'}; send application/json")
                    value = await read_json(body, state.large_body_queue, self._validate)
                return await handle(ParsedRequest(request, body, value))

        return strict if METHODS_WITH_BODY & set(self.methods or ()) else handle

    def _validate(self, value: Any) -> Any:
        """Return the object that FastAPI would create from the body. FastAPI would block the event loop meanwhile."""
        if self.body_field is None or value is None:
            return value
        valid, errors = self.body_field.validate(value, loc=("body",))
        if errors:
            error = validation_error(RequestValidationError(errors))
            # The entries contain the body, and tracebacks whose frames refer to the list, so the body would stay in
            # memory until the next garbage collection.
            errors.clear()
            raise error
        return valid
