"""Inject an error at a given call of a function, because no real model fails on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class Fault:
    """Raises an exception at one call, and forwards all other calls."""

    def __init__(self, exc: BaseException, *, at_call: int) -> None:
        self._exc = exc
        self._left = at_call

    @property
    def happened(self) -> bool:
        return self._left <= 0

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise self._exc
            return real(*args, **options)

        return faulty


def inject(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], exc: BaseException, *, at_call: int) -> Fault:
    """Wrap a function; ``place`` is a module or class and the name of the function in it."""
    fault = Fault(exc, at_call=at_call)
    monkeypatch.setattr(*place, fault.around(getattr(*place)))
    return fault
