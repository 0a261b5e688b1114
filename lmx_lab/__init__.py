"""LMX Lab: local language models on MLX and llama.cpp, in a notebook and on the network. Importing starts nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from lmx_lab.errors import LabError
    from lmx_lab.notebook import Lab, attach, current, launch
    from lmx_lab.notebook.reply import Reply
    from lmx_lab.settings import Settings

    __version__: str

_HOME = {
    "Lab": "lmx_lab.notebook",
    "LabError": "lmx_lab.errors",
    "Reply": "lmx_lab.notebook.reply",
    "Settings": "lmx_lab.settings",
    "attach": "lmx_lab.notebook",
    "current": "lmx_lab.notebook",
    "launch": "lmx_lab.notebook",
}
__all__ = ["Lab", "LabError", "Reply", "Settings", "attach", "current", "launch"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lmx-lab")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Lazily: MLX and FastAPI take over a second to import.
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext lmx_lab``: adds ``%%offload``, ``%lmx`` and ``%%lmx``."""
    from lmx_lab.notebook.magics import register

    register(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """``%unload_ext lmx_lab``."""
    from lmx_lab.notebook.magics import unregister

    unregister(shell)
