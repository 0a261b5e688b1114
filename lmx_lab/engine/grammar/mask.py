"""What the next token of one answer may be: a grammar, a budget for thoughts. For one thread at a time."""

from __future__ import annotations

import codecs
import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from lmx_lab.engine.grammar.compile import short_reason
from lmx_lab.errors import InvalidRequestError, LabError

LONGEST_MARKER_BYTES = 64
SLOW_S, PATIENCE_S = 0.02, 1.0
"""Of the engine thread's own time: other answers wait while a grammar that is slow to follow is followed."""


class ThinkingBudget:
    """Ends the model's thoughts after so many tokens, between two characters.

    Args:
        markers: The beginning and the end of the thoughts.
        end: The tokens of the end.
        open: The prompt has begun the thoughts; else the model may.
        bytes_of: A token's bytes in the text.
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
        self._start, self._stop = (marker.encode() for marker in markers)
        self._end = end
        self._thinking = open
        self._over = False
        self._bytes_of = bytes_of
        self._tail = b""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._forcing = 0
        """Tokens of the end that have been forced."""

    @property
    def forced(self) -> int | None:
        """The one token that may come next; None if it is free."""
        if self._over or not self._thinking or (not self._forcing and (self._left > 0 or self._torn)):
            return None
        return self._end[self._forcing]

    @property
    def _torn(self) -> bool:
        return bool(self._characters.getstate()[0])

    def advance(self, token: int) -> None:
        if self._over:
            return
        if self.forced is not None:
            self._forcing += 1
            self._over = self._forcing == len(self._end)
            return
        data = self._bytes_of(token)
        self._characters.decode(data)
        self._tail = (self._tail + data)[-LONGEST_MARKER_BYTES:]
        if not self._thinking:
            begun = self._tail.lstrip()
            self._thinking = begun.startswith(self._start)
            # Later in the answer the marker is a word like any other.
            self._over = not self._thinking and not self._start.startswith(begun)
            self._tail = b"" if self._thinking else self._tail
        elif self._stop in self._tail:
            self._over = True
        else:
            self._left -= 1


class Constraint:
    """Follows one answer token by token."""

    def __init__(self, matcher: LLMatcher | None, budget: ThinkingBudget | None) -> None:
        self._matcher = matcher
        self._budget = budget
        self.tokens = 0
        """How many it has seen."""
        self.complete = False
        """The grammar is satisfied, and nothing but the end can follow."""
        self._slow_s = 0.0
        """Beyond what a token may take."""
        self.failure: LabError | None = None
        """Why nothing is enforced any more: the grammar has become too complex, or too slow."""

    @property
    def forced(self) -> int | None:
        """The one token that the budget allows next."""
        return self._budget.forced if self._budget is not None else None

    def advance(self, token: int) -> None:
        """The answer goes on with this token."""
        self.tokens += 1
        if self._budget is not None:
            self._budget.advance(token)
        if self._matcher is None or self.complete or self.failure:
            return
        with self._timed():
            self._matcher.consume_token(token)
        self._note_failure()
        self.complete = self.failure is None and self._matcher.is_stopped()

    def mask(self, width: int) -> NDArray[np.bool_] | None:
        """Which of the vocabulary's ``width`` tokens may come next; None if all may."""
        if self._matcher is None or self.complete or self.failure:
            return None
        with self._timed():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._note_failure()
        if self.failure:
            return None
        if not bits.any():
            self.failure = InvalidRequestError("no token of this model can go on with the form that was asked for")
            return None
        return np.unpackbits(bits, count=width, bitorder="little").view(np.bool_)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self._slow_s += max(0.0, time.thread_time() - started - SLOW_S)

    def _note_failure(self) -> None:
        if self._matcher is not None and self._matcher.is_error():
            reason = short_reason(self._matcher.get_error())
        elif self._slow_s > PATIENCE_S:
            reason = "its tokens take too long to check, and others wait meanwhile"
        else:
            return
        self.failure = InvalidRequestError(f"the answer's form cannot be enforced any further: {reason}; simplify it")
