"""Import pandas on demand: it is optional, and its import takes half a second."""

from __future__ import annotations

import importlib
from typing import Any


def pandas_for(name: str) -> Any:
    """Return the module pandas.

    Args:
        name: The attribute or function that needs it, for the error message.

    Raises:
        ImportError: pandas is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module("pandas")
    except ImportError as exc:
        raise ImportError(f"{name} needs pandas, which is not installed: pip install 'lmx-lab[lab]'") from exc
