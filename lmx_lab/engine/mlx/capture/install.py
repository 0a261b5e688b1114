"""Call functions with the inputs and outputs of a model's modules, by replacing the classes of these modules.

The class of a module with hooks is replaced by a subclass with the same parameters that calls the functions. When the
last hook of a module is removed, its class is restored, so hooks do not affect models without them.
Functions that were compiled with ``mx.compile`` before the installation do not call hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

Side = Literal["input", "output"]
HookFunction = Callable[[mx.array], mx.array | None]
"""Called with a value of shape (rows, positions, ...). Returns the value that replaces it, or None to keep it."""
HOOKS = "_lmx_lab_hooks"
"""Attribute of a module: its hooks in calling order."""
HOOKED_CLASS = "_lmx_lab_hooked_class"
"""Attribute of a class: the subclass that calls hooks."""


@dataclass(frozen=True, eq=False)
class HookPoint:
    """A hook point of a model: the first input or the first output of a module."""

    module: Any
    side: Side


@dataclass(frozen=True, eq=False)
class _Hook:
    side: Side
    function: HookFunction
    owner: object
    """Identifies the call of ``install``."""


_only: list[object] = []
"""The owners that were installed with ``alone``. Only the hooks of the last one are called."""


@contextmanager
def install(functions: Mapping[HookPoint, HookFunction], *, alone: bool = False) -> Iterator[None]:
    """Call functions with the values at these points while the ``with`` block runs. Blocks can be nested.

    MLX computes lazily: values that a function replaces are not computed unless other values depend on them.

    Args:
        alone: Whether to call only the hooks of this block while it runs, not those of outer blocks.
    """
    owner = object()
    hooks = [(point.module, _Hook(point.side, function, owner)) for point, function in functions.items()]
    try:
        for module, hook in hooks:
            if (present := module.__dict__.get(HOOKS)) is not None:
                present.append(hook)
                continue
            # Not with ``setattr``, which would add the list to the parameters of the module.
            module.__dict__[HOOKS] = [hook]
            module.__class__ = _hooked_class(type(module))
        if alone:
            _only.append(owner)
        yield
    finally:
        if alone and owner in _only:
            _only.remove(owner)
        for module, hook in hooks:
            present = module.__dict__.get(HOOKS, [])
            if hook in present:
                present.remove(hook)
                if not present:
                    del module.__dict__[HOOKS]
                    module.__class__ = type(module).__base__


def _hooked_class(kind: type[Any]) -> type[Any]:
    """Return the subclass that calls hooks. It is stored in its base class, so that both are freed together."""
    hooked: type[Any] | None = kind.__dict__.get(HOOKED_CLASS)
    if hooked is None:

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            hooks = [hook for hook in self.__dict__[HOOKS] if not _only or hook.owner is _only[-1]]
            for hook in hooks:
                if hook.side != "input":
                    continue
                first = args[0] if args else next(iter(kwargs.values()))
                new = hook.function(first)
                if new is not None and args:
                    args = (new, *args[1:])
                elif new is not None:
                    kwargs = {**kwargs, next(iter(kwargs)): new}
            result = kind.__call__(self, *args, **kwargs)
            for hook in hooks:
                if hook.side != "output":
                    continue
                # Of several results, the first one is the value.
                new = hook.function(result[0] if isinstance(result, tuple) else result)
                if new is not None:
                    result = (new, *result[1:]) if isinstance(result, tuple) else new
            return result

        hooked = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
        setattr(kind, HOOKED_CLASS, hooked)
    return hooked
