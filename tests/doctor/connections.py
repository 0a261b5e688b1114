"""Wait for other programs to listen."""

from __future__ import annotations

import contextlib
import socket
import threading


def wait_until_listening(port: int) -> None:
    pause = threading.Event()
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        pause.wait(0.02)
