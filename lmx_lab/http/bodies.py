"""Read JSON bodies of requests. Size, depth and content type are checked before anything else runs.

Parsing and validation are single calls that hold the interpreter's lock, even in a thread. Their time depends on the
number of items, members, lists and objects in a body, so these are counted first, a piece at a time.
"""

from __future__ import annotations

import asyncio
import gc
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from lmx_lab.errors import BodyTooLargeError, InvalidRequestError, QueueFullError, SlowRequestError
from lmx_lab.http import SMALL_BYTES, Limits
from lmx_lab.http.errors import validation_error
from lmx_lab.wire.base import DIGITS_LIMIT, Structure

T = TypeVar("T")

MODEL = "lmx_lab.model"
"""Key of a request's scope: the name of the model in the path, which replaces that in the body; None without one."""
NESTING_LIMIT = 64
SURROGATES = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
"""Matches the escapes of a pair of surrogates, whose second half is group 2, or of a lone one."""
SURROGATE_BYTES, SURROGATE_LIMIT = 2**20, 20_000
"""Maximum size of a body in which lone surrogates are replaced, and maximum number of its surrogates. This takes 50 ms
at most."""
HEX_ERRORS = ("unexpected end of hex escape", "lone leading surrogate in hex escape")
"""The beginnings of the parser's messages about a lone surrogate."""
TYPES_OF_PROGRAMS = ("", "application/x-www-form-urlencoded")
"""Content types that programs send with JSON in addition to its own: none, and that of ``curl -d``."""
OF_A_PAGE = frozenset({"origin", "referer", "sec-fetch-site", "sec-fetch-mode"})
"""Headers of which browsers send at least one with a POST request of a page."""
RETRY_S = 2
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="lmx-large-bodies")
"""Reads the large bodies of all servers of this process, one after the other. The thread starts with the first one and
belongs to no server, so that it remains when a server ends."""


async def read_json(text: bytes | bytearray | str, validate: Callable[[Any], T], *, wait_s: float = 3.0) -> T:
    """Parse JSON as defined by its standard: without NaN, and at most 64 levels deep. Lone surrogates become U+FFFD.

    A body of up to ``SMALL_BYTES`` with few values is read on the event loop, in a few milliseconds. Others are read on
    a thread, so that the loop continues to run, although this takes longer.

    Args:
        validate: Returns the result, made of the parsed value. Called on the same thread.
        wait_s: Time after which a large body is refused if the thread still reads others.

    Raises:
        InvalidRequestError: the text is invalid; the message names the place.
        BodyTooLargeError: it contains more than ``Structure`` allows.
        QueueFullError: it waited for other large bodies for ``wait_s``.
    """
    data = text.encode() if isinstance(text, str) else text
    # Commas and brackets, in strings or not.
    if len(data) <= SMALL_BYTES and sum(map(data.count, b",[{")) <= 2000:
        return _read(data, validate)
    reading = _THREAD.submit(_read_with_pauses, data, validate)
    waiting = asyncio.wrap_future(reading)
    try:
        await asyncio.wait({waiting}, timeout=wait_s)
        if reading.cancel():
            raise QueueFullError(
                f"the body was not read within {wait_s:g} s, because other large bodies were read meanwhile; "
                f"try again in {RETRY_S} s",
                retry_after_s=RETRY_S,
            )
        return await waiting
    finally:
        waiting.cancel()
        # Without these references, the memory of an invalid body is released together with its error.
        del reading, waiting


def _read_with_pauses(data: bytes | bytearray, validate: Callable[[Any], T]) -> T:
    began, has_gc = time.thread_time(), gc.isenabled()
    # Tracing 50,000 lists repeatedly takes longer than parsing them.
    gc.disable()
    try:
        return _read(data, validate, began)
    finally:
        if has_gc:
            gc.enable()
        _pause(began)


def _read(data: bytes | bytearray, validate: Callable[[Any], T], began: float = math.inf) -> T:
    """Check, parse and validate a body.

    Args:
        began: When the first step began, on a thread that pauses between the steps.
    """
    structure, start = Structure(), 0
    while start < len(data):
        start = structure.add(data, start, SMALL_BYTES)
        if structure.excess is not None:
            raise BodyTooLargeError(f"the body has more than {structure.excess}, the limit of this server; send less")
        if structure.has_long_number:
            raise InvalidRequestError(f"a number in the body has more than {DIGITS_LIMIT} digits; send a shorter one")
        if structure.depth > NESTING_LIMIT:
            raise InvalidRequestError(
                f"the body is nested deeper than {NESTING_LIMIT} levels; flatten it (a schema can use $defs and $ref)"
            )
        began = _pause(began)
    if data[:3] == b"\xef\xbb\xbf":
        raise InvalidRequestError("the body begins with a byte order mark (U+FEFF); send UTF-8 without one")
    try:
        value = _parse(data)
    except ValueError as exc:
        what, at, place = str(exc).rpartition(" at line ")
        if what in HEX_ERRORS:
            what = "a lone surrogate (\\ud800 to \\udfff without its other half) is not a character"
        raise InvalidRequestError(f"the body is not valid JSON: {what}{at}{place}") from exc
    began = _pause(began)
    if structure.may_have_infinity:
        _check_numbers(value, began)
    return validate(value)


def _parse(data: bytes | bytearray) -> Any:
    try:
        return pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as exc:
        # Programs that cut texts after a number of UTF-16 units, such as results of tools, send lone surrogates. Each
        # later request of the conversation contains them too.
        if len(data) > SURROGATE_BYTES or not str(exc).startswith(HEX_ERRORS):
            raise
    whole = SURROGATES.sub(lambda found: found[0] if found[2] else found[1] + rb"\ufffd", data, count=SURROGATE_LIMIT)
    return pydantic_core.from_json(whole, allow_inf_nan=False)


def _pause(began: float) -> float:
    """Pause if this thread has computed for more than 3 ms since ``began``, and return the beginning of its next step.

    Steps of large bodies take up to about 50 ms. The pause is long enough for the several iterations of the event loop
    that another request takes.

    Args:
        began: When the last step began; infinite for no pauses.
    """
    if time.thread_time() - began > 0.003:
        time.sleep(0.015)
        return time.thread_time()
    return began


def _check_numbers(value: Any, began: float) -> None:
    """Refuse a number that is too large: 1e400 is parsed as infinity, which no answer could contain."""
    waiting = [[value]]
    while waiting:
        values = waiting.pop()
        if math.inf in values or -math.inf in values:
            raise InvalidRequestError("a number exceeds the limit of 1.8e308; send a smaller one")
        for child in values:
            if isinstance(child, dict):
                waiting.append(list(child.values()))
            elif isinstance(child, list):
                waiting.append(child)
        began = _pause(began)


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
        used = self.used_bytes + max(0, to - SMALL_BYTES) - max(0, size - SMALL_BYTES)
        if to > size and used > self.size_bytes:
            raise QueueFullError(
                f"the bodies of current requests take {self.used_bytes} bytes, and the limit for all together is "
                f"{self.size_bytes}; try again in {RETRY_S} s",
                retry_after_s=RETRY_S,
            )
        self.used_bytes = used
        return to


@asynccontextmanager
async def read_body(request: Request, limit_bytes: int, memory: BodyMemory, limits: Limits) -> AsyncIterator[bytearray]:
    """Read the whole body, and keep its memory reserved within the block.

    In case of an error, the rest of the body is read and dropped, up to a limit.

    Raises:
        BodyTooLargeError: the body has more than ``limit_bytes``.
        QueueFullError: there is not enough memory for it.
        SlowRequestError: less than ``limits.body_bytes`` arrived in ``limits.body_s``.
        ClientDisconnect: the client disconnected before the end.
    """
    loop = asyncio.get_running_loop()
    # A single block, which the allocator returns completely; 128 chunks would remain in its heap.
    body = bytearray()
    size = counted = reserved = 0
    refusal: QueueFullError | None = None
    due = loop.time() + limits.body_s
    has_more = True
    try:
        # Up to this size, a refused body is still read: if the connection were closed immediately, the client could
        # lose the answer.
        while has_more and size <= limit_bytes * 8:
            try:
                async with asyncio.timeout_at(due):
                    message = await request.receive()
            except TimeoutError:
                if loop.time() - due <= limits.late_s:
                    raise SlowRequestError(
                        f"less than {limits.body_bytes} bytes of the body arrived in {limits.body_s:g} s; "
                        "send it faster"
                    ) from None
                due, counted = loop.time() + limits.body_s, size
                continue
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, has_more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size - counted >= limits.body_bytes:
                due, counted = loop.time() + limits.body_s, size
            if refusal is None and size <= limit_bytes:
                try:
                    reserved = memory.resize(reserved, size)
                    body += chunk
                    continue
                except QueueFullError as exc:
                    refusal = exc
            body.clear()
            reserved = memory.resize(reserved, 0)
        if size > limit_bytes:
            raise BodyTooLargeError(f"the body has more than {limit_bytes} bytes, the limit of this server; send less")
        if refusal is not None:
            raise refusal
        yield body
    finally:
        memory.resize(reserved, 0)


class StrictRoute(APIRoute):
    """A route that reads its JSON body as defined in this module. Routes without a body are FastAPI's own."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            state = request.app.state
            async with read_body(request, state.max_body_bytes, state.body_memory, state.limits) as body:
                value = None
                if body or (self.body_field is not None and self.body_field.field_info.is_required()):
                    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
                        raise InvalidRequestError(f"Content-Encoding is {encoding[:50]}; send the body uncompressed")
                    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                    if kind != "application/json":
                        # Programs such as LiteLLM send no type, and ``curl -d`` sends that of a form.
                        if kind not in TYPES_OF_PROGRAMS or not OF_A_PAGE.isdisjoint(request.headers):
                            message = f"Content-Type is {kind[:100] or 'missing'}; send application/json"
                            raise InvalidRequestError(message)
                        # FastAPI reads a body of another type as bytes.
                        others = (each for each in request.scope["headers"] if each[0] != b"content-type")
                        request.scope["headers"] = [*others, (b"content-type", b"application/json")]
                    value = await read_json(body, partial(self._validate, model=request.scope.get(MODEL)))
                # Not the same request, which exists until the end of the response and would keep the body in memory.
                # FastAPI accepts the valid object as it is, in place of a parsed body.
                parsed = Request(request.scope, request.receive)
                parsed._body, parsed._json = body, value  # type: ignore[assignment]
                return await handle(parsed)

        return strict if {"POST", "PATCH"} & set(self.methods or ()) else handle

    def _validate(self, value: Any, *, model: str | None = None) -> Any:
        """Return the object that FastAPI would create from the body. FastAPI would block the event loop meanwhile.

        Args:
            model: The name of the model in the path.
        """
        if self.body_field is None or value is None:
            return value
        if model is not None and isinstance(value, dict):
            value["model"] = model
        valid, errors = self.body_field.validate(value, loc=("body",))
        if errors:
            error = validation_error(RequestValidationError(errors))
            # The entries contain the body, and tracebacks whose frames refer to the list, so the body would stay in
            # memory until the next garbage collection.
            errors.clear()
            raise error
        return valid
