"""The composition root: ``launch()`` builds engine, server and host, wires them, and hands out a ``Lab``.

The server runs on the kernel's own loop or on a thread of its own, in this process either way. ``launching`` decides
what to start or to keep, ``running`` is the lab itself, ``addresses`` how it is reached. ``attached`` is a lab over a
server elsewhere, ``verbs`` what both can do.
"""

from lmx_lab.notebook.lab import Lab
from lmx_lab.notebook.launcher import current, launch
from lmx_lab.notebook.remote_server import AttachedLab, attach

__all__ = ["AttachedLab", "Lab", "attach", "current", "launch"]
