"""Cases out of strategies, the same again from the same seed."""

from __future__ import annotations

import random
from typing import TypeVar

from hypothesis.control import BuildContext
from hypothesis.errors import StopTest
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


def drawn(strategy: SearchStrategy[T], name: str, count: int) -> list[T]:
    """So many cases. ``name`` is what they are drawn from: another one draws others.

    Each is drawn by itself, from what is below ``@given``: that keeps near to examples that it has tried, which is good
    for finding the smallest failure of one function, but of its cases here half were the same.
    """
    found: list[T] = []
    attempt = 0
    while len(found) < count:
        data = ConjectureData(random=random.Random(f"{name}/{attempt}"))
        attempt += 1
        try:
            with BuildContext(data, wrapped_test=drawn):
                found.append(data.draw(strategy))
        except StopTest:
            # More than one case may be made of.
            continue
    return found
