"""Request health repeatedly on one connection, in a process of its own: ``python probe.py URL PATH``.

Prints a line for each answer: the time of the request on the machine's monotonic clock, and its duration in seconds,
which is ``inf`` if the status is not 200. Ends when its standard input or the connection is closed.
"""

from __future__ import annotations

import http.client
import select
import sys
import time
from urllib.parse import urlsplit

PROBE_S = 0.005
"""Pause between an answer and the next request."""
TIMEOUT_S = 120.0


def main() -> None:
    url = urlsplit(sys.argv[1])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_S)
    while not select.select([sys.stdin], [], [], PROBE_S)[0]:
        began = time.monotonic()
        connection.request("GET", sys.argv[2])
        answer = connection.getresponse()
        answer.read()
        took_s = time.monotonic() - began if answer.status == 200 else float("inf")
        print(began, took_s, flush=True)


if __name__ == "__main__":
    main()
