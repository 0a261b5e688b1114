"""Wait for conditions that have no event."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable

WAIT_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true. The time limit is that of the test."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def interrupt() -> None:
    """Interrupt the main thread, as Ctrl-C does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupt_when(condition: Callable[[], bool]) -> threading.Thread:
    """Start a thread that interrupts the main thread as soon as a condition is true."""

    def wait() -> None:
        until(condition)
        interrupt()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


async def auntil(condition: Callable[[], bool]) -> None:
    """Wait on the event loop until a condition is true, ``WAIT_S`` at most.

    Raises:
        TimeoutError: it was not true in this time.
    """
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def until_listening(port: int) -> None:
    """Wait until a program listens on a port of this machine."""
    pause = threading.Event()
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        pause.wait(0.02)
