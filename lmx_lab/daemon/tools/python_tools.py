"""Python functions as tools: registered from any thread, run in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from lmx_lab.daemon.mcp.names import SEPARATOR
from lmx_lab.daemon.tools.function_schema import ArgumentsError, FunctionSchema, function_schema
from lmx_lab.daemon.tools.tool import DaemonTool, ToolResult
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.mcp import Permission

THREADS = 8
"""Calls that run at once, those that were given up and have not ended included."""
RESULT_CHARACTERS = 2**20
ERROR_CHARACTERS = 2000
ITEMS = 1000
"""Taken of an iterator, which may never end; of an array no more than a hundred times as many."""
CANCEL_S = 1.0
"""How long an async function may take to end when it is cancelled."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class _Registered:
    tool: DaemonTool
    function: Callable[..., Any]
    schema: FunctionSchema
    timeout_s: float
    context: contextvars.Context
    """Of the registration: in a notebook, what the function prints shows under the cell that registered it."""

    @property
    def origin(self) -> tuple[str, str]:
        function = inspect.unwrap(getattr(self.function, "func", self.function))
        of = function if hasattr(function, "__qualname__") else type(function)
        return of.__module__, of.__qualname__


class PythonTools:
    """The functions that a turn may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registered: dict[str, _Registered] = {}
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
    ) -> DaemonTool:
        """Make a function a tool, from any thread: its signature becomes the schema, its docstring the description.

        Registering a function of the same name from the same place again replaces it, as a re-run cell does. A plain
        function runs in a thread, an async one on a loop of its own in a thread. A call that takes too long ends with
        the status ``timeout``; its thread cannot be stopped, and counts among the 8 that run at once until it ends.

        Args:
            name: By default the function's own.
            description: By default the docstring, without its sections.
            read_only: It changes nothing, so nobody is asked for permission.
            timeout_s: Seconds for one call.

        Raises:
            InvalidRequestError: it cannot be a tool, or the name is taken; says what to change.
        """
        if not callable(function) or inspect.isclass(function):
            raise InvalidRequestError(f"{function!r:.100} is no function; give a def", param="function")
        if permission not in ("ask", "allow", "deny"):
            raise InvalidRequestError(f"permission is {permission!r}; it is ask, allow or deny", param="permission")
        if not 0 < timeout_s <= 86_400:
            raise InvalidRequestError(f"timeout_s is {timeout_s!r}; from above 0 to 86400", param="timeout_s")
        name = _checked_name(name if name is not None else getattr(function, "__name__", type(function).__name__))
        schema = function_schema(function)
        tool = DaemonTool(
            name=name,
            description=description if description is not None else schema.description,
            parameters=schema.parameters,
            read_only=read_only,
            permission=permission,
        )
        self._keep(
            _Registered(
                tool=tool, function=function, schema=schema, timeout_s=timeout_s, context=contextvars.copy_context()
            )
        )
        return tool

    def remove(self, name: str) -> None:
        """Forget a tool, from any thread; calls that run go on. Without effect if there is none of the name."""
        with self._lock:
            self._registered.pop(name, None)

    def tools(self) -> list[DaemonTool]:
        with self._lock:
            return [self._registered[name].tool for name in sorted(self._registered)]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult | None:
        """Call a function once; None if there is none of the name, or it is denied. Never raises but when cancelled."""
        with self._lock:
            registered = self._registered.get(name)
            if registered is None or registered.tool.permission == "deny":
                return None
            full = self._running >= THREADS
            self._running += not full
        if full:
            text = f"{THREADS} Python tools run already, or hang; the function was not called. Try again later."
            return ToolResult(status="error", text=text)
        call = _Call(registered, arguments, self._ended)
        return await call.result()

    def _keep(self, new: _Registered) -> None:
        with self._lock:
            old = self._registered.get(new.tool.name)
            if old is not None and old.origin != new.origin:
                raise InvalidRequestError(
                    f"the tool {new.tool.name!r} is {'.'.join(old.origin)} already; give another name, "
                    "or remove it first",
                    param="name",
                )
            self._registered[new.tool.name] = new

    def _ended(self) -> None:
        with self._lock:
            self._running -= 1


class _Call:
    """One call, in a thread that may outlive it."""

    def __init__(self, registered: _Registered, arguments: dict[str, Any], ended: Callable[[], None]) -> None:
        self._registered = registered
        self._arguments = arguments
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[ToolResult] = self._loop.create_future()
        self._lock = threading.Lock()
        self._given_up = False
        self._cancel: Callable[[], object] | None = None
        # A daemon thread: one that hangs must not keep the process from ending.
        threading.Thread(target=self._work, name=f"tool {registered.tool.name}", daemon=True).start()

    async def result(self) -> ToolResult:
        limit = self._registered.timeout_s
        try:
            await asyncio.wait({self._answer}, timeout=limit)
        except asyncio.CancelledError:
            await self._give_up()
            raise
        if self._answer.done():
            return self._answer.result()
        await self._give_up()
        return ToolResult(
            status="timeout",
            text=f"The function did not end within {limit:g} s. It may go on for a while; its result is lost.",
        )

    async def _give_up(self) -> None:
        """An async function is cancelled; a plain one goes on, since no thread can be stopped."""
        with self._lock:
            self._given_up = True
            cancel = self._cancel
        if cancel is not None:
            cancel()
            await asyncio.wait({self._answer}, timeout=CANCEL_S)

    def _work(self) -> None:
        try:
            result = self._registered.context.copy().run(self._called)
        finally:
            self._ended()
        with contextlib.suppress(RuntimeError):  # the daemon's loop has ended
            self._loop.call_soon_threadsafe(self._deliver, result)

    def _deliver(self, result: ToolResult) -> None:
        if not self._answer.done():
            self._answer.set_result(result)

    def _called(self) -> ToolResult:
        try:
            given = self._registered.schema.read(self._arguments)
        except ArgumentsError as exc:
            return ToolResult(status="error", text=f"The arguments do not fit, so the function was not called.\n{exc}")
        try:
            value = self._registered.function(**given)
            if inspect.isawaitable(value):
                value = self._awaited(value)
            return ToolResult(status="ok", text=text_of(value)[:RESULT_CHARACTERS])
        except BaseException as exc:  # a tool that calls exit() ends itself only
            return ToolResult(status="error", text=_in_words(exc))

    def _awaited(self, value: Awaitable[Any]) -> Any:
        async def main() -> Any:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None
            with self._lock:
                self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
                given_up = self._given_up
            if given_up:
                task.cancel()
            try:
                return await value
            finally:
                with self._lock:
                    self._cancel = None

        with asyncio.Runner() as runner:
            return runner.run(main())


def text_of(value: Any) -> str:
    """What a function returned, for a model: a text as it is, else JSON; tables and arrays as they print."""
    if isinstance(value, Iterator):
        value = list(itertools.islice(value, ITEMS))
    try:
        plain = to_jsonable_python(value, fallback=_plain, inf_nan_mode="strings")
    except Exception:
        return repr(value)
    # Also what JSON has as a text, such as a date: quotes around it would tell nothing.
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """For what pydantic does not know: numpy's numbers and small arrays as numbers, the rest as it prints."""
    if hasattr(value, "tolist") and getattr(value, "size", 0) <= 100 * ITEMS and not hasattr(value, "index"):
        return value.tolist()
    return str(value)[:RESULT_CHARACTERS]


def _in_words(exc: BaseException) -> str:
    try:
        message = str(exc)[:ERROR_CHARACTERS]
    except Exception:
        message = ""
    return f"{type(exc).__name__}: {message}" if message else type(exc).__name__


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"a tool's name is 1 to 64 of the characters A-Z a-z 0-9 _ -; it is {name!r:.100}; give name=", param="name"
        )
    if SEPARATOR in name.strip("_"):
        raise InvalidRequestError(
            f"the name {name!r} has two underscores in it, which part an MCP server from its tool; give name=",
            param="name",
        )
    return name
