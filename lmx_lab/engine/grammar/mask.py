"""Restrict the next token of one answer, by a grammar and by a budget for reasoning tokens."""

from __future__ import annotations

import codecs
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from lmx_lab.engine.grammar.compile import shorten_reason
from lmx_lab.errors import InvalidRequestError, LabError

MAX_MARKER_BYTES = 64
SLOW_S, PATIENCE_S = 0.02, 1.0
"""The engine thread evaluates grammars, so other answers wait meanwhile. Time beyond ``SLOW_S`` per token adds up; an
answer whose sum exceeds ``PATIENCE_S`` fails."""


class ThinkingBudget:
    """Ends the reasoning of a model after a number of tokens, between two characters.

    Use it on one thread at a time.

    Args:
        tokens: Number of reasoning tokens before the end is forced.
        markers: Start and end marker of the reasoning, as text.
        end: Tokens of the end marker.
        open: Whether the prompt has opened the reasoning. If not, the model may begin it.
        bytes_of: Returns the bytes that a token adds to the text.
    """

    def __init__(
        self,
        tokens: int,
        *,
        markers: tuple[str, str],
        end: tuple[int, ...],
        open: bool,
        bytes_of: Callable[[int], bytes],
    ) -> None:
        self._left = tokens
        self._start_marker, self._end_marker = (marker.encode() for marker in markers)
        self._end = end
        self._thinking = open
        self._over = False
        self._bytes_of = bytes_of
        self._tail = b""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._forced_count = 0
        """Number of tokens of the end marker that have been forced."""

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None if it is free."""
        is_inside_character = bool(self._characters.getstate()[0])
        is_over_budget = self._left <= 0 and not is_inside_character
        if self._over or not self._thinking or not (self._forced_count or is_over_budget):
            return None
        return self._end[self._forced_count]

    def advance(self, token: int) -> None:
        """Record the next token of the answer."""
        if self._over:
            return
        if self.forced is not None:
            self._forced_count += 1
            self._over = self._forced_count == len(self._end)
            return
        data = self._bytes_of(token)
        self._characters.decode(data)
        self._tail = (self._tail + data)[-MAX_MARKER_BYTES:]
        if not self._thinking:
            beginning = self._tail.lstrip()
            self._thinking = beginning.startswith(self._start_marker)
            # Later in the answer, the marker is ordinary text.
            self._over = not self._thinking and not self._start_marker.startswith(beginning)
            self._tail = b"" if self._thinking else self._tail
        elif self._end_marker in self._tail:
            self._over = True
        else:
            self._left -= 1


class Constraint:
    """The grammar and the budget of one answer, advanced token by token. Use it on one thread at a time."""

    def __init__(self, matcher: LLMatcher | None, budget: ThinkingBudget | None) -> None:
        self._matcher = matcher
        self._budget = budget
        self.tokens = 0
        """Number of tokens so far."""
        self.complete = False
        """Whether the grammar is satisfied and only the end of the answer can follow."""
        self._slow_s = 0.0
        """Time spent beyond ``SLOW_S`` per token."""
        self.failure: LabError | None = None
        """The reason why nothing is enforced any more: the grammar has become too complex or too slow."""

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher is None or self.complete or self._matcher.is_accepting()

    @property
    def forced(self) -> int | None:
        """The only token that the budget allows next; None if it allows any."""
        return self._budget.forced if self._budget is not None else None

    def begin(self, tokens: Sequence[int]) -> None:
        """Record the tokens with which the answer begins, which are not generated and not counted.

        Raises:
            InvalidRequestError: the format does not allow them.
        """
        for at, token in enumerate(tokens):
            self.advance(token)
            if self.failure is not None:
                raise InvalidRequestError(
                    f"the format of the answer does not allow the token {token} at position {at}; choose another one",
                    param="token",
                )
        self.tokens = 0

    def advance(self, token: int) -> None:
        """Record the next token of the answer."""
        self.tokens += 1
        if self._budget is not None:
            self._budget.advance(token)
        if self._matcher is None or self.complete or self.failure:
            return
        with self._measure_time():
            self._matcher.consume_token(token)
        self._record_failure()
        self.complete = self.failure is None and self._matcher.is_stopped()

    def mask(self, width: int) -> NDArray[np.bool_] | None:
        """Return which of the ``width`` tokens of the vocabulary may come next, as a vector; None if all may."""
        if self._matcher is None or self.complete or self.failure:
            return None
        with self._measure_time():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._record_failure()
        if self.failure:
            return None
        if not bits.any():
            self.failure = InvalidRequestError("no token of this model can continue an answer in the requested format")
            return None
        return np.unpackbits(bits, count=width, bitorder="little").view(np.bool_)

    @contextlib.contextmanager
    def _measure_time(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self._slow_s += max(0.0, time.thread_time() - started - SLOW_S)

    def _record_failure(self) -> None:
        if self._matcher is not None and self._matcher.is_error():
            reason = shorten_reason(self._matcher.get_error())
        elif self._slow_s > PATIENCE_S:
            reason = "its tokens take too long to check, and other requests wait meanwhile"
        else:
            return
        self.failure = InvalidRequestError(
            f"the format of the answer cannot be enforced any further: {reason}; simplify it"
        )
