"""What to measure: one case, or a sweep over many."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from lmx_lab.errors import InvalidRequestError

Cache: TypeAlias = Literal["cold", "warm"]
CASE_LIMIT = 10_000
"""Cases of one sweep, repeats included."""
PER_SECOND_LIMIT = 10_000.0
REQUESTS = 8
BOUNDS: dict[str, tuple[int, int]] = {
    "prompt_tokens": (1, 10_000_000),
    "output_tokens": (1, 1_000_000),
    "concurrency": (1, 4096),
    "requests": (1, 100_000),
    "warm_up": (0, 10_000),
    "seed": (0, 2**63 - 1),
    "repeats": (1, 1000),
}
SINGLE = ("requests", "warm_up", "repeats")
"""Fields of a sweep that have one value: cases that differ in nothing else are one case."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """Each of ``concurrency`` users sends its next request when its last one has ended."""

    def __str__(self) -> str:
        return "closed"


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Requests come at random times, however slow the answers are; at most ``concurrency`` are under way at once.

    Raises:
        InvalidRequestError: a rate that is no number above 0 and up to 10,000.
    """

    per_second: float
    """On average."""

    def __post_init__(self) -> None:
        rate = self.per_second
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not (number and 0 < rate <= PER_SECOND_LIMIT):
            raise InvalidRequestError(
                f"per_second is {rate!r}; give how many requests come each second on average, above 0 and up to "
                f"{PER_SECOND_LIMIT:g}",
                param="per_second",
            )

    def times_s(self, count: int, seed: int) -> tuple[float, ...]:
        """When each request is due, in seconds from the first; the same for the same seed."""
        draw = random.Random(f"arrivals {seed}")
        gaps = (draw.expovariate(self.per_second) for _ in range(count - 1))
        return tuple(itertools.accumulate(gaps, initial=0.0))

    def __str__(self) -> str:
        return f"poisson({self.per_second:g}/s)"


Arrival: TypeAlias = Closed | Poisson


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure: ``requests`` requests of one size, after ``warm_up`` that are not counted.

    Raises:
        InvalidRequestError: a value that is none, or values that do not go together.
    """

    prompt_tokens: int
    """Of each prompt, the chat template's included; met within a few percent, where that leaves it four words."""
    output_tokens: int
    """Of each answer; fewer where a server knows no ``ignore_eos`` and the model has said all."""
    concurrency: int = 1
    requests: int = REQUESTS
    warm_up: int = 1
    arrival: Arrival = Closed()
    cache: Cache = "cold"
    """``cold``: every prompt begins differently. ``warm``: they differ in their last words, and a warm-up request has
    brought the rest into the server's cache."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name in BOUNDS):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        _check_arrival(self.arrival)
        _check_cache(self.cache)
        self._check_together()

    def _check_together(self) -> None:
        if isinstance(self.arrival, Closed) and self.requests < self.concurrency:
            raise InvalidRequestError(
                f"requests is {self.requests} and concurrency {self.concurrency}: so many would never be under way at "
                f"once; give requests={2 * self.concurrency} or more",
                param="requests",
            )
        if self.cache == "warm" and self.warm_up == 0:
            raise InvalidRequestError(
                "cache is 'warm' and warm_up 0: nothing would warm the cache; give warm_up=1 or more", param="warm_up"
            )

    @property
    def name(self) -> str:
        """Short, for tables and file names; cases that differ in requests, warm-up or seed alone share it."""
        sizes = f"p{self.prompt_tokens}-o{self.output_tokens}-c{self.concurrency}-{self.cache}"
        return f"{sizes}-poisson{self.arrival.per_second:g}" if isinstance(self.arrival, Poisson) else sizes

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every combination of what is given; but for ``requests``, ``warm_up`` and ``repeats``, one value or several each.

    Raises:
        InvalidRequestError: a value that is none, none at all where one is needed, or too many cases.
    """

    prompt_tokens: int | Sequence[int]
    output_tokens: int | Sequence[int]
    concurrency: int | Sequence[int] = 1
    requests: int | None = None
    """Of each case; by default 8, and at least two for each user."""
    warm_up: int = 1
    arrival: Arrival | Sequence[Arrival] = Closed()
    cache: Cache | Sequence[Cache] = "cold"
    seed: int | Sequence[int] = 0
    repeats: int = 1
    """How often each combination is measured, at different times: from 3 on intervals know of drift, and a comparison
    can name a winner."""

    def __post_init__(self) -> None:
        for field in fields(self):
            read = _checked if field.name in SINGLE else _several
            object.__setattr__(self, field.name, read(field.name, getattr(self, field.name)))
        count = self.repeats * math.prod(len(values) for values in self._axes().values())
        if count > CASE_LIMIT:
            raise InvalidRequestError(
                f"the sweep has {count:,} cases; at most {CASE_LIMIT:,} fit, so give fewer values or repeats"
            )
        self._combinations()

    def cases(self) -> tuple[Case, ...]:
        """Every combination, then all of them again for the next repeat: what drifts meanwhile hits all alike."""
        return self._combinations() * self.repeats

    def _axes(self) -> dict[str, tuple[Any, ...]]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in SINGLE}

    def _combinations(self) -> tuple[Case, ...]:
        axes = self._axes()
        combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
        return tuple(
            Case(**values, requests=self._requests(values["concurrency"]), warm_up=self.warm_up)
            for values in combinations
        )

    def _requests(self, concurrency: int) -> int:
        return max(REQUESTS, 2 * concurrency) if self.requests is None else self.requests


def planned(cases: Iterable[Case]) -> Iterator[tuple[int, Case]]:
    """Each case with its repeat: how often one of its name and seed was there before, from 0. So no prompt is twice."""
    seen: Counter[tuple[str, int]] = Counter()
    for case in cases:
        yield seen[case.name, case.seed], case
        seen[case.name, case.seed] += 1


def _several(name: str, value: Any) -> tuple[Any, ...]:
    """The values of one axis, each once and checked."""
    if isinstance(value, str | Closed | Poisson) or value is None or not isinstance(value, Iterable):
        value = (value,)
    values = tuple(dict.fromkeys(_checked(name, one) for one in value))
    if not values:
        raise InvalidRequestError(f"{name} is empty; give one value or more", param=name)
    return values


def _checked(name: str, value: Any) -> Any:
    if name == "arrival":
        _check_arrival(value)
    elif name == "cache":
        _check_cache(value)
    elif value is not None or name != "requests":
        return _whole(name, value)
    return value


def _whole(name: str, value: Any) -> int:
    """numpy's whole numbers become Python's, which JSON can write."""
    low, high = BOUNDS[name]
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InvalidRequestError(f"{name} is {value!r}; give a whole number from {low:,} to {high:,}", param=name)
    return number


def _check_arrival(value: Any) -> None:
    if not isinstance(value, Closed | Poisson):
        raise InvalidRequestError(
            f"arrival is {value!r}; it can be Closed() or Poisson(per_second=...)", param="arrival"
        )


def _check_cache(value: Any) -> None:
    if value not in get_args(Cache):
        raise InvalidRequestError(f"cache is {value!r}; it can be {' or '.join(get_args(Cache))}", param="cache")
