"""Data frames, for which pandas is imported when somebody asks: it takes half a second, and not everybody has it."""

from __future__ import annotations

import importlib
from typing import Any


def pandas_for(name: str) -> Any:
    """pandas, for what has this name.

    Raises:
        ImportError: it is not installed; the message says how it is.
    """
    try:
        return importlib.import_module("pandas")
    except ImportError as exc:
        raise ImportError(f"{name} needs pandas, which is not installed: pip install 'lmx-lab[lab]'") from exc
