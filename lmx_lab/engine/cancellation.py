"""Cancel work of a load that runs on another thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lmx_lab.errors import NotLoadedError


class Cancellation:
    """Tells work on another thread that its result is no longer needed. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the work. Idempotent."""
        self._cancelled = True

    def check(self, _: object = None) -> None:
        """Check that the work was not cancelled. The argument is ignored (see ``SandboxProcess.request``).

        Raises:
            NotLoadedError: it was cancelled.
        """
        if self._cancelled:
            raise NotLoadedError("the load was cancelled")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let ``check_cancelled`` check this object on this thread within the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def check_cancelled() -> None:
    """Check that the load that runs on this thread was not cancelled. Called between the tensors of a model.

    Raises:
        NotLoadedError: it was cancelled.
    """
    if (current := _current.get()) is not None:
        current.check()
