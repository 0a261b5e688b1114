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
"""Fields of a sweep with a single value."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """Each of ``concurrency`` users sends its next request when its previous one has ended."""

    def __str__(self) -> str:
        return "closed"


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Requests are sent at random times, independent of the answers; at most ``concurrency`` run at the same time.

    Raises:
        InvalidRequestError: the rate is not a number above 0 and up to 10,000.
    """

    per_second: float
    """Mean rate of requests."""

    def __post_init__(self) -> None:
        rate = self.per_second
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not (number and 0 < rate <= PER_SECOND_LIMIT):
            raise InvalidRequestError(
                f"per_second is {rate!r}; give a mean number of requests above 0 and up to {PER_SECOND_LIMIT:g}",
                param="per_second",
            )

    def times_s(self, count: int, seed: int) -> tuple[float, ...]:
        """The time of each request in seconds after the first one. It depends only on the arguments."""
        draw = random.Random(f"arrivals {seed}")
        gaps = (draw.expovariate(self.per_second) for _ in range(count - 1))
        return tuple(itertools.accumulate(gaps, initial=0.0))

    def __str__(self) -> str:
        return f"poisson({self.per_second:g}/s)"


Arrival: TypeAlias = Closed | Poisson


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case: ``requests`` requests of the same size, after ``warm_up`` requests that are not counted.

    Raises:
        InvalidRequestError: a value is invalid, or two values contradict each other.
    """

    prompt_tokens: int
    """Length of each prompt, chat template included. It is met within a few percent, but is at least four words."""
    output_tokens: int
    """Length of each answer. Servers without ``ignore_eos`` may end an answer earlier."""
    concurrency: int = 1
    requests: int = REQUESTS
    warm_up: int = 1
    arrival: Arrival = Closed()
    cache: Cache = "cold"
    """``cold``: all prompts begin differently. ``warm``: they differ only in their last words, and a warm-up request
    has put the rest into the server's cache."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name in BOUNDS):
            object.__setattr__(self, name, _check_integer(name, getattr(self, name)))
        _check_arrival(self.arrival)
        _check_cache(self.cache)
        self._check_combination()

    def _check_combination(self) -> None:
        if isinstance(self.arrival, Closed) and self.requests < self.concurrency:
            raise InvalidRequestError(
                f"requests is {self.requests} and concurrency is {self.concurrency}, which would never be reached; "
                f"give requests={2 * self.concurrency} or more",
                param="requests",
            )
        if self.cache == "warm" and self.warm_up == 0:
            raise InvalidRequestError(
                "cache is 'warm' and warm_up is 0, so nothing would fill the cache; give warm_up=1 or more",
                param="warm_up",
            )

    @property
    def name(self) -> str:
        """A short name for tables and file names. It does not contain ``requests``, ``warm_up`` and ``seed``."""
        sizes = f"p{self.prompt_tokens}-o{self.output_tokens}-c{self.concurrency}-{self.cache}"
        return f"{sizes}-poisson{self.arrival.per_second:g}" if isinstance(self.arrival, Poisson) else sizes

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All combinations of the given values. ``requests``, ``warm_up`` and ``repeats`` take a single value.

    Raises:
        InvalidRequestError: a value is invalid, a field is empty, or there are too many cases.
    """

    prompt_tokens: int | Sequence[int]
    output_tokens: int | Sequence[int]
    concurrency: int | Sequence[int] = 1
    requests: int | None = None
    """Requests of each case; by default 8, or twice its concurrency if that is more."""
    warm_up: int = 1
    arrival: Arrival | Sequence[Arrival] = Closed()
    cache: Cache | Sequence[Cache] = "cold"
    seed: int | Sequence[int] = 0
    repeats: int = 1
    """How often each combination is measured, at different times. With 3 or more, intervals include drift, and a
    comparison can decide which side is better."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check = _check if field.name in SINGLE else _check_several
            object.__setattr__(self, field.name, check(field.name, getattr(self, field.name)))
        count = self.repeats * math.prod(len(values) for values in self._axes().values())
        if count > CASE_LIMIT:
            raise InvalidRequestError(
                f"the sweep has {count:,} cases; the limit is {CASE_LIMIT:,}, so give fewer values or repeats"
            )
        self._combinations()

    def cases(self) -> tuple[Case, ...]:
        """All combinations, once for each repeat. Drift of the machine thus affects all combinations alike."""
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


def number_repeats(cases: Iterable[Case]) -> Iterator[tuple[int, Case]]:
    """Yield each case with its repeat: the number of earlier cases with its name and seed. So no prompt is repeated."""
    seen: Counter[tuple[str, int]] = Counter()
    for case in cases:
        yield seen[case.name, case.seed], case
        seen[case.name, case.seed] += 1


def _check_several(name: str, value: Any) -> tuple[Any, ...]:
    """The distinct, checked values of one axis."""
    if isinstance(value, str | Closed | Poisson) or value is None or not isinstance(value, Iterable):
        value = (value,)
    values = tuple(dict.fromkeys(_check(name, one) for one in value))
    if not values:
        raise InvalidRequestError(f"{name} is empty; give one value or more", param=name)
    return values


def _check(name: str, value: Any) -> Any:
    if name == "arrival":
        _check_arrival(value)
    elif name == "cache":
        _check_cache(value)
    elif value is not None or name != "requests":
        return _check_integer(name, value)
    return value


def _check_integer(name: str, value: Any) -> int:
    """Convert numpy integers to Python integers, which JSON can represent."""
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
