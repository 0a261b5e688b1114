"""LMX Lab: local language models on MLX and llama.cpp, in a notebook and on the network."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from lmx_lab.errors import LabError
    from lmx_lab.instrument.steering import Steer
    from lmx_lab.notebook.discovery import discover
    from lmx_lab.notebook.lab import Lab, attach
    from lmx_lab.notebook.launcher import current, launch, plan
    from lmx_lab.notebook.reply import Reply
    from lmx_lab.notebook.short_errors import full_tracebacks
    from lmx_lab.settings import Settings

    __version__: str

_MODULES = {
    "Lab": "lmx_lab.notebook.lab",
    "LabError": "lmx_lab.errors",
    "Reply": "lmx_lab.notebook.reply",
    "Settings": "lmx_lab.settings",
    "Steer": "lmx_lab.instrument.steering",
    "attach": "lmx_lab.notebook.lab",
    "current": "lmx_lab.notebook.launcher",
    "discover": "lmx_lab.notebook.discovery",
    "full_tracebacks": "lmx_lab.notebook.short_errors",
    "launch": "lmx_lab.notebook.launcher",
    "plan": "lmx_lab.notebook.launcher",
}
__all__ = [
    "Lab",
    "LabError",
    "Reply",
    "Settings",
    "Steer",
    "attach",
    "current",
    "discover",
    "full_tracebacks",
    "launch",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("lmx-lab")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Lazily: the modules take up to a second to import.
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _shorten_errors() -> None:
    """Install the short display of this package's errors if it is imported in IPython."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        import_module("lmx_lab.notebook.short_errors").install(shell)


_shorten_errors()


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the magics ``%%offload``, ``%lmx`` and ``%%lmx``, for ``%load_ext lmx_lab``."""
    import_module("lmx_lab.notebook.magics").register(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics, for ``%unload_ext lmx_lab``."""
    import_module("lmx_lab.notebook.magics").unregister(shell)
