"""Import what a command needs when it runs.

``--help`` and the Tab key import the modules of all commands. The packages of the client, the lab, the daemon and the
model files take 0.3 to 2 s to import, so the modules of commands name objects of these packages instead of importing
them.
"""

from __future__ import annotations

import pkgutil
from typing import Any


def load(name: str) -> Any:
    """Import and return the object ``package.module:object``, or the module ``package.module:``."""
    return pkgutil.resolve_name(name)
