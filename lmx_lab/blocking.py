"""Make blocking methods and streams from coroutine functions and async generator functions.

A ``Portal`` runs the coroutines on the loop of one thread.

``both`` derives a blocking and an awaitable method from one coroutine function. Its own code, such as checks of
arguments, progress bars and functions of the user, runs in the caller's thread in both forms. It awaits only
``on_loop(...)``, ``in_thread(...)`` and other such functions: the blocking form waits in each of these steps, and the
awaitable form suspends the caller's task. This is the pattern of httpx's ``Auth.auth_flow``. ``both_of`` does the same
for a function of an attribute of the object, and ``Stream`` for an iterator.

``twin`` and ``twin_stream`` derive the methods of a blocking class from those of an async class, with their types,
signatures and docstrings. The whole coroutine runs on the portal's loop, and only callbacks in the caller's thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from enum import Enum, auto
from types import FunctionType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, cast, overload

from lmx_lab.errors import ArgumentError, HostingError
from lmx_lab.portal import Interrupts, LoopThread, close_result, receive

P = ParamSpec("P")
T = TypeVar("T")
Made = TypeVar("Made")
Item = TypeVar("Item")
Owner = TypeVar("Owner")
Async = TypeVar("Async")
Function = TypeVar("Function", bound=Callable[..., Any])
Async_co = TypeVar("Async_co", covariant=True)
Call = Callable[[], object]
END_S = 5.0
"""Maximum wait for the end of a cancelled coroutine, such as that of a turn, which the daemon has to cancel."""
MAX_PENDING_CALLS = 10_000
"""Maximum number of pending callbacks."""
UNPACKED = re.compile(r"(?:typing\.)?Unpack\[(\w+)\]")
BLOCKING_WORDS = (
    ("async with", "with"),
    ("async for", "for"),
    ("on this loop", "in this thread"),
    ("Cancelling this", "An interrupt (Ctrl-C)"),
)
"""Replacements in the docstring of a coroutine function, for its blocking form."""


class Portal:
    """Runs coroutines on the loop of one thread, for callers on any thread and any loop.

    Args:
        thread: Returns the thread of the loop; raises ``HostingError`` if the loop is not in use.
    """

    def __init__(self, thread: Callable[[], LoopThread]) -> None:
        self._thread = thread

    @property
    def thread(self) -> LoopThread:
        """The thread of the loop.

        Raises:
            HostingError: the loop is not in use.
        """
        return self._thread()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and wait for its result. An interrupt (Ctrl-C) cancels it, and is raised when it has ended.

        Raises:
            HostingError: as ``thread``, or the caller runs on this loop.
            TimeoutError: there was no result after ``timeout_s``; the coroutine was cancelled.
        """
        try:
            return self._thread_for(work).run(work, timeout_s)
        except KeyboardInterrupt:
            # The interrupt may have occurred before the coroutine was started.
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Cancelling the caller cancels it.

        Raises:
            HostingError: as ``thread``.
        """
        thread = self._thread_for(work)
        on_loop = asyncio.get_running_loop() is thread.loop
        return await work if on_loop else await receive(thread.submit(work))

    def _thread_for(self, work: Coroutine[Any, Any, Any]) -> LoopThread:
        try:
            return self.thread
        except BaseException:
            work.close()
            raise


# Both forms of a coroutine function

_waiting_task: contextvars.ContextVar[asyncio.Task[Any] | Literal[False] | None] = contextvars.ContextVar(
    "waiting_task", default=False
)
"""While ``run_steps`` runs code of a coroutine: the task that calls it, or None if it is not called in a task."""


def _current_task() -> asyncio.Task[Any] | None:
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


class Step(Generic[T]):
    """An operation that a coroutine awaits. ``run_steps`` calls ``run``; everywhere else, ``call()`` is awaited.

    Args:
        close: Releases the operation if it is not started, because the coroutine was interrupted.
    """

    def __init__(
        self, run: Callable[[], T], call: Callable[[], Coroutine[Any, Any, T]], close: Callable[[], None]
    ) -> None:
        self.run, self.call, self.close = run, call, close

    def __await__(self) -> Generator[Any, Any, T]:
        # A task that code of the coroutine creates has a copy of the context, but is another task.
        if _waiting_task.get() is _current_task():
            result: T = yield self
            return result
        return (yield from self.call().__await__())


def on_loop(portal: Portal, work: Coroutine[Any, Any, T]) -> Step[T]:
    """Run a coroutine on the loop of a portal."""
    return Step(lambda: portal.run(work), lambda: portal.call(work), work.close)


def in_thread(function: Callable[[], T]) -> Step[T]:
    """Call a function that may block; the awaitable form calls it in another thread."""
    return Step(function, lambda: asyncio.to_thread(function), lambda: None)


def run_steps(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in this thread, and wait in each of its steps.

    An interrupt (Ctrl-C) cancels the running step and is raised in the coroutine, between two steps instead of the next
    step. A second one is raised immediately.
    """
    # IPython omits frames with this variable from tracebacks.
    __tracebackhide__ = True
    result: list[T] = []
    try:
        with Interrupts() as interrupts:
            result.append(_run_steps(work, interrupts))
    except KeyboardInterrupt:
        close_result(result)
        raise
    return result[0]


def _run_steps(work: Coroutine[Any, Any, T], interrupts: Interrupts) -> T:
    __tracebackhide__ = True
    task = _current_task()
    resume: Callable[[Any], Step[Any]] = work.send
    value: Any = None
    try:
        while True:
            # Not in the copies of the context that tasks on the portal's loop get.
            token = _waiting_task.set(task)
            try:
                step = resume(value)
            finally:
                _waiting_task.reset(token)
            try:
                try:
                    interrupts.check()
                except KeyboardInterrupt:
                    step.close()
                    raise
                resume, value = work.send, step.run()
            except BaseException as exc:
                resume, value = work.throw, exc
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        # An exception refers to this frame, which must not refer to it.
        del resume, value


def blocking(function: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Owner, P], T]:
    """Return the blocking form of a coroutine function. Ctrl-C cancels its running step, which raises
    ``KeyboardInterrupt``."""

    def invoke(owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        __tracebackhide__ = True
        return run_steps(_begin(form, function, owner, *args, **kwargs))

    form: Callable[Concatenate[Owner, P], T] = _form(function, invoke, function.__name__.lstrip("_"))
    return form


def awaited(
    function: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]]:
    """Return the awaitable form of a coroutine function, for any event loop. Cancelling it cancels its running step."""

    @functools.wraps(function)
    async def call(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        return await _begin(call, function, owner, *args, **kwargs)

    call.__name__ = name = f"a{function.__name__.lstrip('_')}"
    call.__qualname__ = f"{function.__qualname__.rpartition('.')[0]}.{name}"
    call.__signature__ = with_keywords(function)  # type: ignore[attr-defined]
    return call


def both(
    function: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
) -> tuple[Callable[Concatenate[Owner, P], T], Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]]]:
    """Return the blocking and the awaitable form of a coroutine function: ``load, aload = both(_load)``."""
    return blocking(function), awaited(function)


def both_of(attribute: str, function: Callable[..., Coroutine[Any, Any, Any]]) -> tuple[Any, Any]:
    """Return both forms of a coroutine function whose first argument is an attribute of the object with the methods:
    ``trace, atrace = both_of("backend", trace)``. Each form takes the name to which the class assigns it.
    """

    @functools.wraps(function)
    def of_owner(owner: Any, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        return function(getattr(owner, attribute), *args, **kwargs)

    forms: list[Any] = [*both(of_owner)]
    for form in forms:
        first, *others = form.__signature__.parameters.values()
        form.__annotations__.pop(first.name, None)
        first = first.replace(name="self", annotation=inspect.Parameter.empty)
        form.__signature__ = form.__signature__.replace(parameters=[first, *others])
    return _NamedMethod(forms[0]), _NamedMethod(forms[1])


class _NamedMethod:
    """A function that takes the name to which the body of a class assigns it."""

    def __init__(self, form: Any) -> None:
        self._form = form

    def __set_name__(self, owner: type, name: str) -> None:
        self._form.__module__, self._form.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        self._form.__name__ = name
        setattr(owner, name, self._form)


def _begin(
    form: Callable[..., Any],
    function: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
    owner: Owner,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Coroutine[Any, Any, T]:
    """Return the coroutine of a function that was called in one of its forms.

    Raises:
        ArgumentError: the arguments do not fit the signature.
    """
    __tracebackhide__ = True
    try:
        return function(owner, *args, **kwargs)
    except TypeError as exc:  # This is an error in the arguments: the body has not started.
        parameters = inspect.signature(form).parameters
        names = [*parameters][1:]
        if (unknown := kwargs.keys() - names) and all(it.kind != it.VAR_KEYWORD for it in parameters.values()):
            raise ArgumentError.unknown(form.__name__, min(unknown), names) from None
        raise ArgumentError(str(exc).replace(function.__qualname__, form.__name__)) from None


def _form(
    function: Callable[..., Any], invoke: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any], name: str
) -> Any:
    """Return a function that calls ``invoke``, with the signature, the docstring and the type hints of a coroutine
    function.

    It has no ``__wrapped__``, because of which frameworks would take it for a coroutine function. Instead, it has the
    globals of the coroutine function, in which its type hints are evaluated.
    """

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return invoke(self, args, kwargs)

    form = FunctionType(call.__code__, _globals_of(function), name, None, call.__closure__)
    form.__module__, form.__doc__ = function.__module__, function.__doc__
    form.__qualname__ = f"{function.__qualname__.rpartition('.')[0]}.{name}"
    form.__annotations__ = dict(function.__annotations__)
    form.__signature__ = with_keywords(function)  # type: ignore[attr-defined]
    return form


def _globals_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the globals in which the type hints of a function are evaluated."""
    globals_: dict[str, Any] = inspect.unwrap(function).__globals__
    return globals_


# Callbacks


class CallbackQueue:
    """Passes callbacks from the portal's loop to the waiting thread, in order."""

    def __init__(self) -> None:
        self._pending: deque[Call] = deque()
        self._woken = asyncio.Event()

    def schedule(self, function: Call) -> None:
        """Have the function called in the waiting thread.

        Raises:
            HostingError: too many calls are pending.
        """
        if len(self._pending) >= MAX_PENDING_CALLS:
            raise HostingError(
                f"{MAX_PENDING_CALLS:,} calls of callbacks are pending; make the callbacks return sooner"
            )
        self._pending.append(function)
        self._woken.set()

    async def call(self, function: Callable[[], T]) -> T:
        """Call the function in the waiting thread and return its result. If it raises, the coroutine is cancelled."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def set_result(value: T) -> None:
            if not result.done():
                result.set_result(value)

        def call() -> None:
            # The coroutine may have been cancelled.
            if not result.cancelled():
                loop.call_soon_threadsafe(set_result, function())

        self.schedule(call)
        return await result

    def notifier(self, function: Any) -> Any:
        """Return a function that has the callback called in the waiting thread, without waiting for it."""

        def notify(value: Any) -> None:
            self.schedule(functools.partial(function, value))

        return notify if callable(function) else function

    def decider(self, function: Any) -> Any:
        """Return a coroutine function that calls the callback in the waiting thread, and waits for its result. A
        coroutine that the callback returns is awaited on the loop. Another value is returned unchanged.
        """

        async def decide(value: Any) -> Any:
            decision = await self.call(lambda: function(value))
            return await decision if inspect.isawaitable(decision) else decision

        return decide if callable(function) else function

    def wake(self, *_: object) -> None:
        """Let ``calls_before`` check its futures again."""
        self._woken.set()

    async def calls_before(self, *futures: asyncio.Future[Any]) -> list[Call]:
        """Wait for pending calls, and return them. The list is empty if one of the futures is done first."""
        while not self._pending and not any(future.done() for future in futures):
            self._woken.clear()
            await self._woken.wait()
        calls = list(self._pending)
        self._pending.clear()
        return calls


# Streams

Source = Callable[[CallbackQueue], AbstractAsyncContextManager[AsyncIterator[Item]]]


class End(Enum):
    END = auto()


END = End.END
"""Returned instead of an item at the end of a stream."""


class _PulledIterator(Generic[Item]):
    """An async iterator on a portal's loop, whose next item is requested only when the caller needs it.

    One task runs the source from start to end, as cancel scopes require.
    """

    def __init__(self, thread: LoopThread, source: Source[Item]) -> None:
        self._thread = thread
        self._source = source
        self._callbacks = CallbackQueue()
        self._requests: asyncio.Queue[asyncio.Future[Item] | None] = asyncio.Queue()
        """Futures for the next items; None ends the iteration."""
        self._next_item: asyncio.Future[Item] | None = None
        """The requested item, which may not have arrived before an interrupt."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        async def create_task() -> None:
            self._task = asyncio.create_task(self._serve(), name="lmx-lab work for a blocking caller")
            # If nothing retrieved the exception, asyncio would log it.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._task.add_done_callback(self._callbacks.wake)

        self._thread.run(create_task())

    async def _serve(self) -> None:
        async with self._source(self._callbacks) as items:
            while (request := await self._requests.get()) is not None:
                item = await anext(items, END)
                if item is END:
                    return
                request.set_result(item)

    async def pull(self) -> Item | list[Call] | End:
        """Return the next item, or callbacks to call before it arrives, or ``END``."""
        task, item = self._task, self._next_item
        if task is None:
            return END
        if item is None:
            item = self._next_item = asyncio.get_running_loop().create_future()
            item.add_done_callback(self._callbacks.wake)
            self._requests.put_nowait(item)
        if calls := await self._callbacks.calls_before(item, task):
            return calls
        if not item.done():
            if not task.cancelled():
                task.result()
            return END
        self._next_item = None
        return item.result()

    def finish(self) -> None:
        """Leave the source like a ``with`` block that ends without an error, and wait until it is left."""
        self._wait(lambda: self._requests.put_nowait(None))

    def cancel(self) -> None:
        """Cancel the task, and wait until it has ended, for at most ``END_S``."""
        self._wait(self._cancel)

    def cancel_later(self) -> None:
        """Cancel the task without waiting; can be called on any thread and in finalizers."""
        with suppress(RuntimeError):  # The loop is closed, and the task has ended.
            self._thread.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _wait(self, begin: Callable[[], None]) -> None:
        async def end() -> None:
            begin()
            if self._task is not None:
                await asyncio.wait({self._task})

        with suppress(TimeoutError, HostingError):
            self._thread.run(end(), END_S)


class Stream(ABC, Generic[Item]):
    """An iterator for ``for`` and ``async for``. An error or an interrupt closes it, and so does deleting it.

    It is not an async generator, because deleting one starts a task that nothing awaits.
    """

    @abstractmethod
    async def _next(self) -> Item | End:
        """Return the next item; ``END`` after the last one. Has steps."""

    @abstractmethod
    def close(self) -> None:
        """End the stream and its work. Returns immediately; can be called from any thread. Idempotent."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        try:
            item = run_steps(self._next())
        except BaseException:
            self.close()
            raise
        if item is END:
            self.close()
            raise StopIteration
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        try:
            item = await self._next()
        except BaseException:
            self.close()
            raise
        if item is END:
            self.close()
            raise StopAsyncIteration
        return item

    def __del__(self) -> None:
        self.close()


class BlockingStream(Generic[Item]):
    """A stream for a ``for`` loop, optionally in ``with … as items``. It starts when the first item is requested.

    Closing or deleting it, or an interrupt (Ctrl-C), ends the stream and the server's work for it.
    """

    def __init__(self, portal: Portal, source: Source[Item]) -> None:
        self._portal = portal
        self._source = source
        self._iterator: _PulledIterator[Item] | None = None
        self._reading = threading.Lock()
        self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("two threads read the same stream; create one for each thread")
        try:
            item = END if self._has_ended else self._next()
        except BaseException:
            self.close()
            raise
        finally:
            self._reading.release()
        if item is END:
            self._has_ended = True
            raise StopIteration
        return item

    def _next(self) -> Item | End:
        while isinstance(result := self._portal.run(self._started().pull()), list):
            for call in result:
                call()
        return result

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._has_ended = True
        if self._iterator is not None:
            self._iterator.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None and self._iterator is not None and not self._has_ended:
            self._iterator.finish()
        self.close()

    def _started(self) -> _PulledIterator[Item]:
        if self._iterator is None:
            if self._has_ended:
                raise HostingError("this stream was closed; create a new one")
            self._iterator = _PulledIterator(self._portal.thread, self._source)
            weakref.finalize(self, self._iterator.cancel_later).atexit = False
            self._iterator.start()
        return self._iterator


def run_with_callbacks(portal: Portal, work: Callable[[CallbackQueue], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the background, and call its callbacks in this thread, which waits for it.

    An interrupt, or an exception of a callback, cancels the coroutine, and is raised when the coroutine has ended.
    """

    async def once(callbacks: CallbackQueue) -> AsyncGenerator[T, None]:
        yield await work(callbacks)

    with BlockingStream(portal, lambda callbacks: aclosing(once(callbacks))) as results:
        for result in results:
            return result
    raise HostingError("this call was cancelled before it started")


# Blocking classes

CALLBACKS: dict[str, Callable[[CallbackQueue, Any], Any]] = {
    "progress": CallbackQueue.notifier,
    "on_event": CallbackQueue.notifier,
    "on_permission": CallbackQueue.decider,
}
"""Parameters with callbacks, and how these are called in the waiting thread."""


class Twin(Protocol[Async_co]):
    """An object with the blocking forms of the methods of ``_async``."""

    @property
    def _async(self) -> Async_co: ...
    @property
    def _portal(self) -> Portal: ...


@overload
def twin(
    method: Callable[Concatenate[Async, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Twin[Async], P], T]: ...
@overload
def twin(
    method: Callable[Concatenate[Async, P], Coroutine[Any, Any, T]], wrap: Callable[[Any, T], Made]
) -> Callable[Concatenate[Twin[Async], P], Made]: ...
def twin(method: Callable[..., Any], wrap: Callable[[Any, Any], Any] | None = None) -> Any:
    """Return the method that waits for a coroutine function. An interrupt (Ctrl-C) cancels the coroutine.

    Args:
        wrap: Returns the result of the method, given the object and the result of the coroutine.
    """

    def run(owner: Twin[Any], work: Coroutine[Any, Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        if any(kwargs.get(name) is not None for name in CALLBACKS):
            work.close()
            again = functools.partial(_with_callbacks, method, owner._async, args, kwargs)
            result = run_with_callbacks(owner._portal, again)
        else:
            result = owner._portal.run(work)
        return result if wrap is None else wrap(owner, result)

    return _TwinMethod(method, run)


def twin_stream(
    method: Callable[Concatenate[Async, P], AsyncGenerator[Item, None]],
) -> Callable[Concatenate[Twin[Async], P], BlockingStream[Item]]:
    """Return the method that iterates over an async generator function with ``for``."""

    def run(owner: Twin[Any], work: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockingStream[Item]:
        return BlockingStream(
            owner._portal, lambda calls: aclosing(_with_callbacks(method, owner._async, args, kwargs, calls))
        )

    made: Callable[Concatenate[Twin[Async], P], BlockingStream[Item]] = cast("Any", _TwinMethod(method, run))
    return made


class _TwinMethod(_NamedMethod):
    """A method in the body of a blocking class, which becomes a function of this class."""

    def __init__(self, method: Callable[..., Any], run: Callable[..., Any]) -> None:
        self._method = method
        self._run = run
        form = _form(method, self._invoke, method.__name__)
        super().__init__(form)
        documented_as(method)(form)
        # The name of the returned class, whose async form has another one.
        returned = str(method.__annotations__["return"]).replace("AsyncSession", "Session")
        items = re.fullmatch(r"AsyncGenerator\[(.*), None\]", returned)
        form.__annotations__["return"] = returned if items is None else f"BlockingStream[{items[1]}]"
        form.__signature__ = form.__signature__.replace(return_annotation=form.__annotations__["return"])

    def _invoke(self, owner: Twin[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        try:
            work = self._method(owner._async, *args, **kwargs)
        except TypeError as exc:  # This is an error in the arguments: the body has not started.
            message = str(exc).replace(self._method.__qualname__, self._form.__qualname__)
            raise TypeError(message) from None
        return self._run(owner, work, args, kwargs)


def _with_callbacks(
    method: Callable[..., T], owner: object, args: Any, kwargs: dict[str, Any], calls: CallbackQueue
) -> T:
    wrapped = {name: CALLBACKS[name](calls, value) if name in CALLBACKS else value for name, value in kwargs.items()}
    return method(owner, *args, **wrapped)


def documented_as(method: Callable[..., Any]) -> Callable[[Function], Function]:
    """Give a function the docstring of its async form, in the words of the blocking form."""

    def describe(function: Function) -> Function:
        doc = method.__doc__ or ""
        for word, replacement in BLOCKING_WORDS:
            doc = doc.replace(word, replacement)
        function.__doc__ = doc
        return function

    return describe


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = _NotGiven()
"""Shown by ``help`` as the default of a keyword whose omission is different from all of its values."""


def with_keywords(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, with the keywords that ``**options: Unpack[SomeTypedDict]`` stands for.

    Editors and IPython complete only keywords that a signature names. Their defaults are the values of the attribute
    ``defaults_of`` of the TypedDict, or ``NOT_GIVEN``.
    """
    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        options = UNPACKED.fullmatch(str(parameter.annotation))
        if options is None:
            parameters.append(parameter)
            continue
        keywords: Any = _globals_of(function)[options[1]]
        defaults = getattr(keywords, "defaults_of", None)
        for name, it in keywords.__annotations__.items():
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=getattr(defaults, name, NOT_GIVEN),
                    annotation=getattr(it, "__forward_arg__", it),
                )
            )
    return signature.replace(parameters=parameters)
