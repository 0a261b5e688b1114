"""The process in which grammars are tried before this one compiles them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lmx_lab.engine import sandbox_process
from lmx_lab.engine.grammar import sandbox
from lmx_lab.engine.grammar.sandbox import Words
from lmx_lab.errors import QueueFullError
from lmx_lab.settings import without_secrets

log = logging.getLogger(__name__)
SCRIPT = Path(sandbox.__file__)
START_S = 30.0
SLICE_S = 0.05
LIMIT_S = 5.0
SHARE_S = 0.5
"""What one may take while others wait."""
TOO_LONG = f"it takes longer than {LIMIT_S:g} s to compile; simplify it"
TOO_LARGE = "it is too large, or nested too deeply, to be compiled; simplify it"


class Trials:
    """Starts the process when it is first needed, and again when it had to be ended.

    Used by one thread at a time; ``end`` comes from any, and ends what is being tried.
    """

    def __init__(self, waiting: Callable[[], bool] = lambda: False) -> None:
        """
        Args:
            waiting: Whether other grammars wait to be tried.
        """
        self._waiting = waiting
        self._starting = threading.Lock()
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._words: Words | None = None

    def reason(self, words: Words, grammars: list[str]) -> tuple[str, int | None]:
        """Why the first of the grammars cannot be enforced, "" if it can, and which of the others is to blame.

        Raises:
            QueueFullError: it takes long, and others wait.
        """
        try:
            channel = self._ready(words)
        except OSError as exc:
            log.warning("grammars are compiled without being tried: no process could be started: %s", exc)
            return "", None
        if channel is None:
            return TOO_LARGE, None
        try:
            reply = self._ask(channel, grammars, LIMIT_S, hurried=self._waiting)
        except TimeoutError:
            self._stop()
            return TOO_LONG, None
        except QueueFullError:
            self._stop()
            raise
        except (EOFError, OSError):
            self._stop()
            return TOO_LARGE, None
        return reply["reason"], reply["part"]

    def end(self) -> None:
        """End the process, for good."""
        with self._starting:
            self._ended = True
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        channel, self._channel, self._words = self._channel, None, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()

    def _ready(self, words: Words) -> Connection | None:
        """The channel to a process that knows the vocabulary; None if it failed over that.

        Raises:
            OSError: none could be started.
        """
        with self._starting:
            if self._ended:
                return None
            channel = self._channel or self._start()
        if self._words is words:
            return channel
        try:
            self._ask(channel, (words.tokens, words.special_token_ids, words.eos_tokens), START_S)
        except (TimeoutError, EOFError, OSError):
            self._stop()
            return None
        self._words = words
        return channel

    def _start(self) -> Connection:
        self._stop()
        self._process, self._channel = sandbox_process.start(SCRIPT, without_secrets(os.environ))
        return self._channel

    def _ask(
        self, channel: Connection, message: Any, limit_s: float, *, hurried: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        channel.send(message)
        asked_at = time.monotonic()
        while not channel.poll(SLICE_S):
            took = time.monotonic() - asked_at
            if took > limit_s:
                raise TimeoutError
            if took > SHARE_S and hurried():
                raise QueueFullError(
                    f"the form takes longer than {SHARE_S:g} s to compile, and others wait; try again in 1 s, or "
                    "simplify it",
                    retry_after_s=1,
                )
        reply: dict[str, Any] = json.loads(channel.recv_bytes())
        return reply
