"""Read integers of any type, such as those of NumPy. Booleans are not integers here."""

from __future__ import annotations

import operator

from lmx_lab.errors import InvalidRequestError


def integer(value: object) -> int | None:
    """Return an integer of any type, such as a NumPy integer; None for other values, including booleans."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_number(value: object, name: str, *, low: int | None = None) -> int:
    """Return an argument that must be an integer.

    Args:
        name: The argument, for the message.
        low: The smallest value; None for any.

    Raises:
        InvalidRequestError: the value is not an integer, or is too small.
    """
    number = integer(value)
    if number is None or (low is not None and number < low):
        least = "" if low is None else f", {low} or more"
        raise InvalidRequestError(f"{name} is {value!r:.40}; it must be a whole number{least}", param=name)
    return number
