"""Cancel the work that a load performs on another thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lmx_lab.errors import NotLoadedError


class Cancellation:
    """A cancellation request for work on another thread. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the work. Idempotent."""
        self._cancelled = True

    def check(self) -> None:
        """Check that the work was not cancelled.

        Raises:
            NotLoadedError: it was cancelled.
        """
        if self._cancelled:
            raise NotLoadedError("the load was cancelled")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make this the object that ``check_cancelled`` checks on this thread within the block."""
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
