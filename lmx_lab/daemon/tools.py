"""Define the names and results of tools, register Python functions as tools, from any thread, and call them in separate
threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import inspect
import itertools
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from lmx_lab.errors import InvalidRequestError
from lmx_lab.sanitize import finite
from lmx_lab.wire.function_schema import ArgumentsError, FunctionSchema, function_schema, name_of
from lmx_lab.wire.mcp import Permission, ToolRecord
from lmx_lab.wire.sessions import ToolStatus

SEPARATOR = "__"
"""Separates the server from the tool in ``server__tool``. Neither the name of a server nor that of a Python function
contains it, so the first one in a name is the separator."""
THREADS = 8
"""Maximum number of calls that run at the same time, including abandoned calls whose thread has not ended."""
RESULT_CHARACTERS = 2**20
ITEMS = 1000
"""Maximum number of items taken from an iterator, which may be infinite. Arrays may have a hundred times as many."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of one call."""

    status: ToolStatus
    """``ok``, ``error`` or ``timeout``. Only the runner of the turn uses the other values."""
    text: str
    """For the model: the result, or what failed and what the model can do about it."""


def mcp_tool_name(server: str, own_name: str) -> str:
    """Return the name under which models call a server's tool: 64 letters, digits, ``_`` and ``-`` at most.

    A name that is too long or has other characters is changed, and ends in a hash of the server's own name, so that it
    does not depend on which other tools the server has.
    """
    # The maximum length that all model servers accept.
    prefix, limit = f"{server}{SEPARATOR}", 64
    cleaned = re.sub(r"[^A-Za-z0-9_-]", "_", own_name)
    if cleaned != own_name or len(prefix) + len(own_name) > limit:
        digest = hashlib.sha256(own_name.encode("utf-8", "replace")).hexdigest()[:6]
        cleaned = f"{cleaned[: limit - len(prefix) - 7]}_{digest}"
    return f"{prefix}{cleaned}"


@dataclass(frozen=True, kw_only=True)
class _Registration:
    tool: ToolRecord
    function: Callable[..., Any]
    schema: FunctionSchema
    timeout_s: float
    context: contextvars.Context
    """Context of the registration. In a notebook, output of the function appears under the cell that registered it."""

    @property
    def origin(self) -> tuple[str, str]:
        """The module and the qualified name of the function."""
        function = inspect.unwrap(getattr(self.function, "func", self.function))
        named = function if hasattr(function, "__qualname__") else type(function)
        return named.__module__, named.__qualname__


class PythonTools:
    """The Python functions that turns can call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registrations: dict[str, _Registration] = {}
        self._running = 0

    def register(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        read_only: bool = False,
        permission: Permission = "ask",
        timeout_s: float = 60.0,
    ) -> ToolRecord:
        """Register a function as a tool. Its signature becomes the schema, its docstring the description.

        Registering a function of the same name and module again replaces it, for instance when a cell is run again. A
        plain function runs in a thread, an async function on a separate event loop in a thread. A call that takes
        too long ends with the status ``timeout``. Its thread cannot be stopped, and counts towards the limit of 8
        concurrent calls until it ends. This method can be called from any thread.

        Args:
            name: Name of the tool; the function's own by default.
            description: Description for the model; the docstring without its sections by default.
            read_only: Whether the function changes nothing, so that calls need no permission.
            permission: ``ask``, ``allow`` or ``deny``, for calls of a function that is not read-only.
            timeout_s: Time limit of one call in seconds.

        Raises:
            InvalidRequestError: The function cannot be a tool, or the name is taken. The message contains the remedy.
        """
        if not callable(function) or inspect.isclass(function):
            raise InvalidRequestError(f"{function!r:.100} is not a function; pass a function", param="function")
        if permission not in ("ask", "allow", "deny"):
            raise InvalidRequestError(f"permission is {permission!r}; use ask, allow or deny", param="permission")
        if not 0 < timeout_s <= 86_400:
            raise InvalidRequestError(
                f"timeout_s is {timeout_s!r}; it must be greater than 0 and at most 86400", param="timeout_s"
            )
        name = name if name is not None else name_of(function)
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"the tool name is {name!r:.100}; it must have 1 to 64 of the characters A-Z a-z 0-9 _ -; set name=",
                param="name",
            )
        if SEPARATOR in name.strip("_"):
            raise InvalidRequestError(
                f"the tool name {name!r} contains two underscores in a row, which separate an MCP server from its "
                "tool; set name=",
                param="name",
            )
        schema = function_schema(function)
        tool = ToolRecord(
            name=name,
            description=description if description is not None else schema.description,
            parameters=schema.parameters,
            read_only=read_only,
            permission=permission,
        )
        new = _Registration(
            tool=tool, function=function, schema=schema, timeout_s=timeout_s, context=contextvars.copy_context()
        )
        with self._lock:
            old = self._registrations.get(name)
            if old is not None and old.origin != new.origin:
                raise InvalidRequestError(
                    f"the tool name {name!r} is used by {'.'.join(old.origin)}; use another name, or remove that tool "
                    "first",
                    param="name",
                )
            self._registrations[name] = new
        return tool

    def remove(self, name: str) -> None:
        """Remove a tool, from any thread. Calls that run continue. Does nothing if there is no such tool."""
        with self._lock:
            self._registrations.pop(name, None)

    def list_tools(self) -> list[ToolRecord]:
        """Return all registered tools, sorted by name."""
        with self._lock:
            return [self._registrations[name].tool for name in sorted(self._registrations)]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult | None:
        """Call a function once. Errors become results; only ``CancelledError`` is raised.

        Returns:
            The result, or None if there is no such tool or its permission is ``deny``.
        """
        with self._lock:
            registration = self._registrations.get(name)
            if registration is None or registration.tool.permission == "deny":
                return None
            is_full = self._running >= THREADS
            self._running += not is_full
        if is_full:
            text = f"{THREADS} Python tools are running already, so the function was not called. Try again later."
            return ToolResult(status="error", text=text)

        def on_end() -> None:
            with self._lock:
                self._running -= 1

        return await _PythonCall(registration, arguments, on_end).result()


class _PythonCall:
    """One call of a function, in a thread that may outlive it."""

    def __init__(self, registration: _Registration, arguments: dict[str, Any], on_end: Callable[[], None]) -> None:
        self._registration = registration
        self._arguments = arguments
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[ToolResult] = self._loop.create_future()
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._cancel: Callable[[], object] | None = None
        # A daemon thread, so that a function that hangs does not keep the process from exiting.
        threading.Thread(target=self._run, name=f"tool {registration.tool.name}", daemon=True).start()

    async def result(self) -> ToolResult:
        """Wait for the result, at most until the time limit."""
        timeout_s = self._registration.timeout_s
        try:
            await asyncio.wait({self._result}, timeout=timeout_s)
        except asyncio.CancelledError:
            await self._abandon()
            raise
        if self._result.done():
            return self._result.result()
        await self._abandon()
        return ToolResult(
            status="timeout",
            text=f"The function did not end within {timeout_s:g} s. It may still be running; its result is lost.",
        )

    async def _abandon(self) -> None:
        """Cancel an async function. A plain function continues, since a thread cannot be stopped."""
        with self._lock:
            self._is_abandoned = True
            cancel = self._cancel
        if cancel is not None:
            cancel()
            await asyncio.wait({self._result}, timeout=1.0)

    def _run(self) -> None:
        try:
            result = self._registration.context.copy().run(self._call_function)
        finally:
            self._on_end()

        def deliver() -> None:
            if not self._result.done():
                self._result.set_result(result)

        with contextlib.suppress(RuntimeError):  # The daemon's event loop is closed.
            self._loop.call_soon_threadsafe(deliver)

    def _call_function(self) -> ToolResult:
        try:
            values = self._registration.schema.parse(self._arguments)
        except ArgumentsError as exc:
            return ToolResult(status="error", text=f"The arguments are invalid, so the function was not called.\n{exc}")
        try:
            value = self._registration.function(**values)
            if isinstance(value, AsyncIterator):
                value = _first_items(value)
            if inspect.isawaitable(value):
                value = self._run_awaitable(value)
            return ToolResult(status="ok", text=result_text(value)[:RESULT_CHARACTERS])
        except BaseException as exc:  # A function that calls exit() must not end anything but itself.
            try:
                message = str(exc)[:2000]
            except Exception:
                message = ""
            name = type(exc).__name__
            return ToolResult(status="error", text=f"{name}: {message}" if message else name)

    def _run_awaitable(self, value: Awaitable[Any]) -> Any:
        async def main() -> Any:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None
            with self._lock:
                self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
                is_abandoned = self._is_abandoned
            if is_abandoned:
                task.cancel()
            try:
                return await value
            finally:
                with self._lock:
                    self._cancel = None

        with asyncio.Runner() as runner:
            return runner.run(main())


async def _first_items(values: AsyncIterator[Any]) -> list[Any]:
    """Return the items of an iterator, which may be infinite."""
    found = []
    async for value in values:
        found.append(value)
        if len(found) == ITEMS:
            break
    return found


def result_text(value: Any) -> str:
    """Convert the return value of a function to text for the model.

    A string is used as it is, other values become JSON, and tables and large arrays are formatted as by ``str``.
    """
    if isinstance(value, Iterator):
        value = list(itertools.islice(value, ITEMS))
    try:
        plain = finite(to_jsonable_python(value, fallback=_to_plain))
    except Exception:
        return repr(value)
    # A value that JSON represents as a string, such as a date, needs no quotes either.
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _to_plain(value: Any) -> Any:
    """Convert a value that pydantic does not know: numbers and small arrays of numpy to numbers, others to text."""
    if hasattr(value, "tolist") and getattr(value, "size", 0) <= 100 * ITEMS and not hasattr(value, "index"):
        return value.tolist()
    return str(value)[:RESULT_CHARACTERS]
