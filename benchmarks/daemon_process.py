"""Child process: a daemon in front of a model server. Its parent can write events to its log.

A question with ``sessions`` creates this number of sessions. One with ``events`` writes this number of events to the
log, ``at_once`` in each transaction, and returns the start times of the transactions. The reply to any other question
is the daemon's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import Reply, child_settings, serve_lines, take_channel
from lmx_lab.daemon.daemon import Daemon
from lmx_lab.daemon.storage import sessions
from lmx_lab.daemon.storage.store import Store, Transaction
from lmx_lab.settings import Settings
from lmx_lab.wire.events import TurnText
from lmx_lab.wire.sessions import CreateSession

TEXT = TurnText(message_id="msg_00000000000000000000000000", text=" about as long as a batch of tokens")


def main() -> None:
    channel = take_channel()
    settings = child_settings()
    home = Settings(home=Path(settings["home"]), daemon_port=0)
    daemon = Daemon(settings=home, upstream_url=settings["upstream"])
    daemon.start()
    try:
        serve_lines(channel, {"url": daemon.url, "token": daemon.token}, lambda question: _answer(daemon, question))
    finally:
        daemon.stop()


def _answer(daemon: Daemon, question: Reply) -> Reply:
    store = daemon.services.store
    if count := question.get("sessions"):
        for first in range(0, count, 500):
            daemon.run(store.write(_session_creator(range(first, min(first + 500, count)))))
    if count := question.get("events"):
        at_once = question["at_once"]
        return {"began": [_write_events(daemon, store, min(at_once, count - at)) for at in range(0, count, at_once)]}
    return {"rss_bytes": psutil.Process().memory_info().rss}


def _write_events(daemon: Daemon, store: Store, count: int) -> float:
    def work(transaction: Transaction) -> None:
        for _ in range(count):
            transaction.append("turn.token", TEXT, session_id="bench", turn_id="turn")

    began = time.monotonic()
    daemon.run(store.write(work))
    return began


def _session_creator(numbers: range) -> Callable[[Transaction], Any]:
    def work(transaction: Transaction) -> None:
        for number in numbers:
            sessions.create(transaction, CreateSession(title=f"number {number}", metadata={"made": "for listing"}))

    return work


if __name__ == "__main__":
    main()
