"""Draw cases from strategies, repeatably."""

from __future__ import annotations

import random
from typing import TypeVar

from hypothesis.control import BuildContext
from hypothesis.errors import StopTest
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


def draw_cases(strategy: SearchStrategy[T], name: str, count: int) -> list[T]:
    """Draw ``count`` cases. ``name`` is the seed: each name gives other cases.

    Each case is drawn separately with hypothesis' internals, because ``@given`` stays close to examples that it has
    tried. That helps to find the smallest failure of one function, but here half of its cases were equal.
    """
    cases: list[T] = []
    attempt = 0
    while len(cases) < count:
        data = ConjectureData(random=random.Random(f"{name}/{attempt}"))
        attempt += 1
        try:
            with BuildContext(data, wrapped_test=draw_cases):
                cases.append(data.draw(strategy))
        except StopTest:
            # The case has become larger than hypothesis allows.
            continue
    return cases
