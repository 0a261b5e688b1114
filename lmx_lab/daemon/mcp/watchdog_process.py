"""The watchdog's process: wait until the daemon has died, then end the processes that its MCP servers have started.

``python -P -S watchdog_process.py PID PROGRAM``. Standard input carries the running servers of the daemon PID, one JSON
list a line, of which the last complete one counts. At the end of the input this program becomes PROGRAM, with that list
as its argument. It imports little, because it runs as long as the daemon.
"""

from __future__ import annotations

import os
import select
import signal
import sys

NO_SERVERS = b"[]"


def wait_for_death(daemon_pid: int) -> bytes:
    """Wait until the daemon has died or has closed the pipe, and return its last list of servers."""
    servers, rest = NO_SERVERS, b""
    while True:
        # The parent is checked every second: a fork of the daemon can hold the pipe open after the daemon has died.
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable:
            if not (data := os.read(0, 65_536)):
                return servers
            complete, separator, rest = (rest + data).rpartition(b"\n")
            if separator:
                servers = complete.rpartition(b"\n")[2]
        elif os.getppid() != daemon_pid:
            return servers


def main() -> None:
    # Only the daemon's end ends this process. The daemon's own signals do not reach its session.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    servers = wait_for_death(int(sys.argv[1]))
    if servers != NO_SERVERS:
        os.execv(sys.executable, [sys.executable, "-P", sys.argv[2], os.fsdecode(servers)])


if __name__ == "__main__":
    main()
