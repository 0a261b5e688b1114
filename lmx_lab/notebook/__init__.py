"""Labs for notebooks and programs: launch one, attach to one, and use it through ``Lab``.

``Lab`` sends its requests through a ``lmx_lab.backend.Backend``: the one in ``local`` calls the server of this process,
the one in ``remote`` uses HTTP. The two modules also start and stop the server or the connection. ``launcher`` decides
which lab ``launch()`` starts, returns or replaces.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmx_lab.notebook.lab import Lab, attach
    from lmx_lab.notebook.launcher import current, launch

__all__ = ["Lab", "attach", "current", "launch"]
_MODULES = {"Lab": "lab", "attach": "lab", "current": "launcher", "launch": "launcher"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Lazily: launching imports the engine and the server, which attaching does not need.
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
