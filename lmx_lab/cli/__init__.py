"""The command line: arguments, printing, exit statuses. The work is done elsewhere.

``entry`` is the script from its first moment to its exit status, ``commands`` has a module for each command.
"""

from lmx_lab.cli.entry import main

__all__ = ["main"]
