"""Define what is measured: one case, or a sweep over many cases, and generate the prompts of a case from seeds.

Both sides of a comparison get the same prompts except for the first words, which differ so that no server can take a
prompt from its cache.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.integers import integer

Cache: TypeAlias = Literal["cold", "warm"]
MAX_CASES = 10_000
"""Maximum number of cases of one sweep, repeats included."""
DEFAULT_REQUESTS = 8
BOUNDS: dict[str, tuple[int, int]] = {
    "prompt_tokens": (1, 10_000_000),
    "output_tokens": (1, 1_000_000),
    "concurrency": (1, 4096),
    "requests": (1, 100_000),
    "warm_up": (0, 10_000),
    "seed": (0, 2**63 - 1),
    "repeats": (1, 1000),
}
# Each word is one token in most vocabularies if a space precedes it.
_LINE = (
    "apple river stone cloud garden winter letter market bridge forest silver window morning shadow summer kitchen "
    "music ocean paper mountain bread circle island horse travel doctor picture engine school valley yellow camera "
    "castle dinner farmer glass hammer jungle ladder mirror needle orange pencil rabbit saddle table uncle village"
)
WORDS = tuple(_LINE.split())
UNIQUE_WORDS = 8
"""Number of random words that make a prompt unique: 48⁸ combinations."""
MIN_WORDS = 4
"""Minimum length of a prompt: 48⁴ combinations, five million."""
TASK = "Write a very long story, in many chapters, about all of these words."
"""A task at the end of the prompt, so that models write long answers on servers without ``ignore_eos``."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """Closed loop: each of ``concurrency`` users sends its next request when its previous one has ended."""

    def __str__(self) -> str:
        return "closed"


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Open loop: requests are sent at random times, independent of the answers, at most ``concurrency`` in parallel.

    Raises:
        InvalidRequestError: the rate is not a number above 0 and up to 10,000.
    """

    per_second: float
    """Mean rate, in requests per second."""

    def __post_init__(self) -> None:
        rate = self.per_second
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not (number and 0 < rate <= 10_000):
            raise InvalidRequestError(
                f"per_second is {rate!r}; give a number above 0 and up to 10000", param="per_second"
            )

    def times_s(self, count: int, seed: int) -> tuple[float, ...]:
        """Return the time of each request, in seconds after the first one. It depends only on the arguments."""
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
        InvalidRequestError: a value is not valid, or two values contradict each other.
    """

    prompt_tokens: int
    """Length of each prompt, chat template included. Prompts meet it within a few percent, but have at least 4
    words."""
    output_tokens: int
    """Length of each answer. Servers that do not support ``ignore_eos`` may end an answer earlier."""
    concurrency: int = 1
    requests: int = DEFAULT_REQUESTS
    warm_up: int = 1
    arrival: Arrival = Closed()
    cache: Cache = "cold"
    """``cold``: all prompts begin differently. ``warm``: prompts differ only in their last words, and a warm-up request
    has put the rest into the server's prefix cache."""
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _check(field.name, getattr(self, field.name)))
        if isinstance(self.arrival, Closed) and self.requests < self.concurrency:
            raise InvalidRequestError(
                f"requests is {self.requests} and concurrency is {self.concurrency}, which would never be reached; "
                f"give requests={2 * self.concurrency} or more",
                param="requests",
            )
        if self.cache == "warm" and self.warm_up == 0:
            raise InvalidRequestError(
                "cache is 'warm' and warm_up is 0, so that no request would fill the cache; give warm_up=1 or more",
                param="warm_up",
            )

    @property
    def name(self) -> str:
        """A short name for tables and files. It does not contain ``requests``, ``warm_up`` and ``seed``."""
        sizes = f"p{self.prompt_tokens}-o{self.output_tokens}-c{self.concurrency}-{self.cache}"
        return f"{sizes}-poisson{self.arrival.per_second:g}" if isinstance(self.arrival, Poisson) else sizes

    def __str__(self) -> str:
        return self.name


def Sweep(
    *,
    prompt_tokens: int | Iterable[int],
    output_tokens: int | Iterable[int],
    concurrency: int | Iterable[int] = 1,
    requests: int | None = None,
    warm_up: int = 1,
    arrival: Arrival | Iterable[Arrival] = Closed(),
    cache: Cache | Iterable[Cache] = "cold",
    seed: int | Iterable[int] = 0,
    repeats: int = 1,
) -> tuple[Case, ...]:
    """Return the cases of all combinations of the given values, once for each repeat, so that drift of the machine
    affects all combinations alike. The fields are those of ``Case``; equal values are measured once.

    Args:
        requests: Number of requests of each case; by default 8, or twice the concurrency if that is more.
        repeats: How often each combination is measured. With 3 or more repeats, intervals include the drift of the
            machine, and a comparison can decide which side is better.

    Raises:
        InvalidRequestError: a value is not valid, a field is empty, or there are too many cases.
    """
    repeats = _check("repeats", repeats)
    axes: dict[str, tuple[Any, ...]] = {}
    for name, given in {
        **{"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "concurrency": concurrency},
        **{"arrival": arrival, "cache": cache, "seed": seed},
    }.items():
        values: Any = given
        if isinstance(values, str) or not isinstance(values, Iterable):
            values = (values,)
        axes[name] = tuple(dict.fromkeys(_check(name, value) for value in values))
        if not axes[name]:
            raise InvalidRequestError(f"{name} is empty; give one value or more", param=name)
    count = repeats * math.prod(map(len, axes.values()))
    if count > MAX_CASES:
        raise InvalidRequestError(
            f"the sweep has {count:,} cases; the limit is {MAX_CASES:,}, so give fewer values or repeats"
        )
    combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    cases = [
        Case(
            **each,
            requests=max(DEFAULT_REQUESTS, 2 * each["concurrency"]) if requests is None else requests,
            warm_up=warm_up,
        )
        for each in combinations
    ]
    return tuple(cases) * repeats


def number_repeats(cases: Iterable[Case]) -> Iterator[tuple[int, Case]]:
    """Yield each case with its repeat, the number of earlier cases with the same name and seed.

    Prompts depend on the repeat, so no prompt is sent twice.
    """
    seen: Counter[tuple[str, int]] = Counter()
    for case in cases:
        yield seen[case.name, case.seed], case
        seen[case.name, case.seed] += 1


def _check(name: str, value: Any) -> Any:
    """Check the value of a field. Numpy integers become Python integers, which can be written as JSON."""
    if name == "arrival":
        if not isinstance(value, Closed | Poisson):
            raise InvalidRequestError(
                f"arrival is {value!r}; it can be Closed() or Poisson(per_second=...)", param="arrival"
            )
        return value
    if name == "cache":
        if value not in get_args(Cache):
            raise InvalidRequestError(f"cache is {value!r}; it can be {' or '.join(get_args(Cache))}", param="cache")
        return value
    low, high = BOUNDS[name]
    number = integer(value)
    if number is None or not low <= number <= high:
        raise InvalidRequestError(f"{name} is {value!r}; give a whole number from {low:,} to {high:,}", param=name)
    return number


def words(seed: int, request: int, tokens: int, tokens_per_word: float = 1.0) -> str:
    """Return random words of about ``tokens`` tokens, at least one word. They depend only on the arguments."""
    count = max(1, round(tokens / tokens_per_word))
    return " ".join(_random_words(f"body {seed} {request}", count))


def prompt(
    case: Case,
    *,
    repeat: int,
    request: int,
    warm_up: bool = False,
    run: str = "",
    tokens: int | None = None,
    tokens_per_word: float = 1.0,
) -> str:
    """Return the prompt of one request.

    If the case's cache is cold, the first words depend on the run, case, repeat and request, so that no cache contains
    more of the prompt than the start of the chat template. If it is warm, all prompts of a run and case are equal
    except for their last words. The words after the first eight are the same in all runs.

    Args:
        run: A text that is unique for the run and the target.
        tokens: Length of the prompt without the chat template; by default ``case.prompt_tokens``.
        tokens_per_word: Mean number of tokens of a word in the vocabulary of the target.
    """
    count = max(MIN_WORDS, round((case.prompt_tokens if tokens is None else tokens) / tokens_per_word))
    task = TASK.split()
    # In a shorter prompt, the task would be most of the text.
    if count < 2 * len(task):
        task = []
    count -= len(task)
    if case.cache == "cold":
        own = min(UNIQUE_WORDS, count)
        first = _random_words(f"first {run} {case.name} {case.seed} {repeat} {request} {warm_up}", own)
        return " ".join([*first, *_random_words(f"body {case.seed} {request}", count - own), *task])
    last = _random_words(f"last {case.seed} {repeat} {request} {warm_up}", min(UNIQUE_WORDS, count // 4))
    own = min(UNIQUE_WORDS, count - len(last))
    first = _random_words(f"first {run} {case.name} {case.seed}", own)
    return " ".join([*first, *_random_words(f"body {case.seed}", count - own - len(last)), *last, *task])


def prompt_hash(text: str) -> str:
    """Hash the text after the first eight words, to check that two targets got the same prompt.

    Returns:
        The first 16 hexadecimal digits of the SHA-256 hash.
    """
    common = " ".join(text.split(" ")[UNIQUE_WORDS:])
    return hashlib.sha256(common.encode()).hexdigest()[:16]


def _random_words(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)
