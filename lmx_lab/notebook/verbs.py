"""Derive the blocking and the awaitable form of a method from one coroutine function, which is called a verb.

A verb awaits only ``on_loop(...)``, ``in_thread(...)`` and other verbs. Its own code (checks of arguments, progress
bars) runs in the caller's thread in both forms. In the form that ``blocking`` returns, the caller waits in each of
these steps; in the form that ``awaited`` returns, the caller's task is suspended. This is the pattern of httpx's
``Auth.auth_flow``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from lmx_lab.errors import ArgumentError
from lmx_lab.portal import Interrupts, LoopThread, close_result, receive

P = ParamSpec("P")
T = TypeVar("T")
UNPACKED = re.compile(r"Unpack\[(\w+)\]")


class LoopPortal:
    """Runs coroutines on the loop of one thread, for callers on any thread and any loop.

    Args:
        thread: The thread of the loop.
        check: Called before each call; raises ``HostingError`` if the loop is no longer in use.
    """

    def __init__(self, thread: LoopThread, *, check: Callable[[], None]) -> None:
        self._thread = thread
        self._check = check

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result. Ctrl-C cancels it.

        Raises:
            HostingError: as ``check``.
        """
        try:
            self._check_for(work)
            return self._thread.run(work)
        except KeyboardInterrupt:
            # The interrupt may have occurred before the coroutine was started.
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Cancelling the caller cancels it.

        Raises:
            HostingError: as ``check``.
        """
        self._check_for(work)
        on_loop = asyncio.get_running_loop() is self._thread.loop
        return await work if on_loop else await receive(self._thread.submit(work))

    def _check_for(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._check()
        except BaseException:
            work.close()
            raise


class PortalOwner(Protocol):
    """An object whose methods are derived from verbs."""

    @property
    def _portal(self) -> LoopPortal: ...


Owner = TypeVar("Owner", bound=PortalOwner)


class VerbStep(ABC, Generic[T]):
    """An operation that a verb awaits: ``run`` waits for it, ``call`` awaits it."""

    def __await__(self) -> Generator[Any, Any, T]:
        result: T = yield self
        return result

    @abstractmethod
    def run(self, owner: PortalOwner) -> T: ...

    @abstractmethod
    async def call(self, owner: PortalOwner) -> T: ...

    @abstractmethod
    def close(self) -> None:
        """Release the operation, which was not started because the verb was interrupted."""


class _LoopStep(VerbStep[T]):
    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work

    def run(self, owner: PortalOwner) -> T:
        return self._portal(owner).run(self._work)

    async def call(self, owner: PortalOwner) -> T:
        return await self._portal(owner).call(self._work)

    def close(self) -> None:
        self._work.close()

    def _portal(self, owner: PortalOwner) -> LoopPortal:
        try:
            return owner._portal
        except BaseException:
            self._work.close()
            raise


class _ThreadStep(VerbStep[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function

    def run(self, owner: PortalOwner) -> T:
        return self._function()

    async def call(self, owner: PortalOwner) -> T:
        return await asyncio.to_thread(self._function)

    def close(self) -> None:
        pass


class _OtherStep(VerbStep[T]):
    """A step on the portal of another owner."""

    def __init__(self, owner: PortalOwner, step: VerbStep[T]) -> None:
        self._owner, self._step = owner, step

    def run(self, owner: PortalOwner) -> T:
        return self._step.run(self._owner)

    async def call(self, owner: PortalOwner) -> T:
        return await self._step.call(self._owner)

    def close(self) -> None:
        self._step.close()


def on_loop(work: Coroutine[Any, Any, T]) -> VerbStep[T]:
    """Run a coroutine on the loop of the owner's portal."""
    return _LoopStep(work)


def in_thread(function: Callable[[], T]) -> VerbStep[T]:
    """Call a function that may block; the awaited form calls it in another thread."""
    return _ThreadStep(function)


async def on_other(owner: PortalOwner, steps: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine of a verb of another owner within this one."""
    value: Any = None
    resume: Callable[[Any], VerbStep[Any]] = steps.send
    try:
        while True:
            step = _OtherStep(owner, resume(value))
            try:
                resume, value = steps.send, await step
            except BaseException as exc:
                resume, value = steps.throw, exc
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        del resume, value


def blocking(verb: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Owner, P], T]:
    """Return the blocking form of a verb. Ctrl-C cancels its running step, which raises ``KeyboardInterrupt``."""

    @functools.wraps(verb)
    def call(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # IPython omits frames with this variable from tracebacks.
        __tracebackhide__ = True
        return run_verb(owner, _begin(call, verb, owner, *args, **kwargs))

    return _describe_form(call, verb, verb.__name__.lstrip("_"))


def awaited(
    verb: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]]:
    """Return the awaitable form of a verb, for any event loop. Cancelling it cancels its running step."""

    @functools.wraps(verb)
    async def call(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        steps = _begin(call, verb, owner, *args, **kwargs)
        resume: Callable[[Any], VerbStep[Any]] = steps.send
        value: Any = None
        try:
            while True:
                step = resume(value)
                try:
                    resume, value = steps.send, await step.call(owner)
                except BaseException as exc:
                    resume, value = steps.throw, exc
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            # An exception refers to this frame, which must not refer to it.
            del resume, value

    return _describe_form(call, verb, f"a{verb.__name__.lstrip('_')}")


def _begin(
    form: Callable[..., Any],
    verb: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
    owner: Owner,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Coroutine[Any, Any, T]:
    """Return the coroutine of a verb that was called in one of its forms.

    Raises:
        ArgumentError: the arguments do not fit the signature.
    """
    __tracebackhide__ = True
    try:
        return verb(owner, *args, **kwargs)
    except TypeError as exc:  # This is an error in the arguments: the body has not started.
        parameters = inspect.signature(form).parameters
        names = [name for name in parameters if name != "self"]
        if (unknown := kwargs.keys() - names) and all(it.kind != it.VAR_KEYWORD for it in parameters.values()):
            raise ArgumentError.unknown(form.__name__, min(unknown), names) from None
        raise ArgumentError(str(exc).replace(verb.__qualname__, form.__name__)) from None


def run_verb(owner: PortalOwner, steps: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine of a verb, and wait in each of its steps.

    An interrupt between two steps is kept and raised in the verb instead of the next step.
    """
    __tracebackhide__ = True
    result: list[T] = []
    try:
        with Interrupts() as interrupts:
            result.append(_run_steps(owner, steps, interrupts))
    except KeyboardInterrupt:
        close_result(result)
        raise
    return result[0]


def _run_steps(owner: PortalOwner, steps: Coroutine[Any, Any, T], interrupts: Interrupts) -> T:
    __tracebackhide__ = True
    resume: Callable[[Any], VerbStep[Any]] = steps.send
    value: Any = None
    try:
        while True:
            step = resume(value)
            try:
                resume, value = steps.send, _run_step(step, owner, interrupts)
            except BaseException as exc:
                resume, value = steps.throw, exc
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        del resume, value


def _run_step(step: VerbStep[T], owner: PortalOwner, interrupts: Interrupts) -> T:
    __tracebackhide__ = True
    try:
        interrupts.check()
    except KeyboardInterrupt:
        step.close()
        raise
    return step.run(owner)


Function = TypeVar("Function", bound=Callable[..., Any])


def _describe_form(function: Function, verb: Callable[..., Any], name: str) -> Function:
    """Give a form of a verb its name, and the verb's signature with the keywords of ``**options`` written out.

    Editors and IPython complete only keywords that a signature names.
    """
    function.__name__ = name
    function.__qualname__ = f"{function.__qualname__.rpartition('.')[0]}.{name}"
    signature = inspect.signature(verb)
    parameters = [each for it in signature.parameters.values() for each in _expand_keywords(it, verb)]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _expand_keywords(parameter: inspect.Parameter, verb: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the keywords that ``**options: Unpack[SomeTypedDict]`` stands for; of another parameter, itself."""
    options = UNPACKED.fullmatch(str(parameter.annotation))
    if options is None:
        return [parameter]
    keywords: dict[str, Any] = verb.__globals__[options[1]].__annotations__
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=getattr(it, "__forward_arg__", it)
        )
        for name, it in keywords.items()
    ]
