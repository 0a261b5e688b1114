"""Asks for health again and again on one connection, in a process of its own: ``python probe.py URL PATH``.

A line for each answer: when it was asked, by the machine's monotonic clock, and how many seconds it took; ``inf`` for
an answer other than 200. It ends with its input, or when the connection does.
"""

from __future__ import annotations

import http.client
import select
import sys
import time
from urllib.parse import urlsplit

PROBE_S = 0.005
"""Between an answer and the next request."""
GIVE_UP_S = 120.0


def main() -> None:
    place = urlsplit(sys.argv[1])
    line = http.client.HTTPConnection(place.hostname or "", place.port, timeout=GIVE_UP_S)
    while not select.select([sys.stdin], [], [], PROBE_S)[0]:
        began = time.monotonic()
        line.request("GET", sys.argv[2])
        answer = line.getresponse()
        answer.read()
        took_s = time.monotonic() - began if answer.status == 200 else float("inf")
        print(began, took_s, flush=True)


if __name__ == "__main__":
    main()
