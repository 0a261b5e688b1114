"""Where a server is told to listen."""

from __future__ import annotations

import re

from lmx_lab.errors import InvalidRequestError


def check_host(host: str | None) -> None:
    """
    Raises:
        InvalidRequestError: a whole URL, or an address with its port. The system would look for a machine of this name,
            and say that there is none.
    """
    if host is not None and (re.search(r"[\s/]", host) or host.count(":") == 1):
        raise InvalidRequestError(
            f"--host is {host!r:.80}; give an address of this machine alone, such as 127.0.0.1 or 0.0.0.0, and "
            "the port as --port",
            param="host",
        )
