"""Call functions with the inputs and outputs of a model's modules, by replacing the classes of these modules.

A module with hooks gets a subclass of its class, which has the same parameters and calls the functions. After the last
hook of a module was removed, the module has its own class again, so models without hooks compute as if this file did
not exist. Functions that were compiled with ``mx.compile`` before do not call hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

Side = Literal["input", "output"]
HookFunction = Callable[[mx.array], mx.array | None]
"""Called with a value of shape (rows, positions, ...). Returns the value to use instead; None leaves it unchanged."""
HOOKS = "_lmx_lab_hooks"
"""Attribute of a module with hooks: the hooks, in the order in which they are called."""
HOOKED_CLASS = "_lmx_lab_hooked_class"
"""Attribute of a class: its subclass that calls hooks."""


@dataclass(frozen=True, eq=False)
class HookPoint:
    """A place in a model: the first input of a module, or its first output."""

    module: Any
    side: Side


@dataclass(frozen=True, eq=False)
class _Hook:
    side: Side
    function: HookFunction
    owner: object
    """Identifies the call of ``install``."""


_only: list[object] = []
"""The owners that were installed with ``alone``; hooks of others than the last one are not called."""


@contextmanager
def install(functions: Mapping[HookPoint, HookFunction], *, alone: bool = False) -> Iterator[None]:
    """Call functions with the values at these points while the block runs. Blocks may be nested.

    MLX computes lazily: values that a function replaces are never computed unless something else needs them.

    Args:
        alone: Whether hooks of other blocks are not called while this block runs.
    """
    owner = object()
    hooks = [(point.module, _Hook(point.side, function, owner)) for point, function in functions.items()]
    try:
        for module, hook in hooks:
            _add(module, hook)
        if alone:
            _only.append(owner)
        yield
    finally:
        if alone and owner in _only:
            _only.remove(owner)
        for module, hook in hooks:
            _remove(module, hook)


def _add(module: Any, hook: _Hook) -> None:
    present = module.__dict__.get(HOOKS)
    if present is None:
        # Not with ``setattr``, which adds lists to the parameters of the module.
        module.__dict__[HOOKS] = [hook]
        module.__class__ = _hooked_class(type(module))
    else:
        present.append(hook)


def _remove(module: Any, hook: _Hook) -> None:
    present = module.__dict__.get(HOOKS, [])
    if hook not in present:
        return
    present.remove(hook)
    if not present:
        del module.__dict__[HOOKS]
        module.__class__ = type(module).__base__


def _hooked_class(kind: type[Any]) -> type[Any]:
    """Return the subclass that calls hooks. It is an attribute of its base class, so that both are freed together."""
    hooked: type[Any] | None = kind.__dict__.get(HOOKED_CLASS)
    if hooked is None:

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _call(kind, self, args, kwargs)

        hooked = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
        setattr(kind, HOOKED_CLASS, hooked)
    return hooked


def _call(kind: type[Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hooks = [hook for hook in module.__dict__[HOOKS] if not _only or hook.owner is _only[-1]]
    for hook in hooks:
        if hook.side == "input":
            args, kwargs = _with_input(hook.function, args, kwargs)
    result = kind.__call__(module, *args, **kwargs)
    for hook in hooks:
        if hook.side == "output":
            result = _with_output(hook.function, result)
    return result


def _with_input(
    function: HookFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments after a function was called with the first one."""
    if args:
        new = function(args[0])
        return (args if new is None else (new, *args[1:])), kwargs
    name = next(iter(kwargs))
    new = function(kwargs[name])
    return args, kwargs if new is None else {**kwargs, name: new}


def _with_output(function: HookFunction, result: Any) -> Any:
    """Return the result after a function was called with it, or with its first item if it is a tuple."""
    if isinstance(result, tuple):
        new = function(result[0])
        return result if new is None else (new, *result[1:])
    new = function(result)
    return result if new is None else new
