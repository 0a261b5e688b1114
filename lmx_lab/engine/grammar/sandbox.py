"""Check in a sandboxed process whether grammars can be compiled, before this process compiles them.

Callers write grammars. Some crash the compiler, and others take forever to compile.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.sandbox_process import SandboxDiedError, SandboxProcess, SandboxStartError, SandboxTimeoutError
from lmx_lab.errors import QueueFullError
from lmx_lab.settings import without_secrets

log = logging.getLogger(__name__)
WORKER = Path(__file__).with_name("worker.py")
START_S = 30.0
LIMIT_S = 2.0
"""Time limit for checking a grammar and all its parts."""
SHARE_S = 0.5
"""Time that one grammar may take while others wait."""
TOO_SLOW = f"it takes longer than {LIMIT_S:g} s to compile; simplify it"
TOO_LARGE = "it is too large, or nested too deeply, to be compiled; simplify it"


class GrammarSandbox:
    """Checks grammars in a process that is started at the first check, and again after it had to be ended.

    One thread at a time may check grammars. Any thread may call ``close``.

    Args:
        has_waiting: Whether other grammars wait to be checked.
        compile_s: Limit of the CPU time to compile a grammar. Engines that block during compilation set a lower limit.
    """

    def __init__(self, has_waiting: Callable[[], bool] = lambda: False, *, compile_s: float = LIMIT_S) -> None:
        self._has_waiting = has_waiting
        self._compile_s = compile_s
        self._process = SandboxProcess(WORKER, lambda: without_secrets(os.environ), start_s=START_S)
        self._known: tuple[int, TokenTable] | None = None
        """Number of the process start, and the token table that this process has."""

    def find_problem(
        self, table: TokenTable, grammars: list[str], limit_s: float | None = None
    ) -> tuple[str, int | None]:
        """Check whether the first grammar can be enforced.

        Args:
            grammars: The grammar, followed by each of its parts as a separate grammar.
            limit_s: Remaining time for the check; by default ``LIMIT_S``.

        Returns:
            The reason why it cannot be enforced, empty if it can, and the index of the part that causes it.

        Raises:
            QueueFullError: it takes longer than ``SHARE_S``, and others wait.
        """
        try:
            self._send_table(table)
        except SandboxStartError as exc:
            log.warning("grammars are compiled without a check, because no process could be started: %s", exc)
            return "", None
        except (SandboxTimeoutError, SandboxDiedError):
            return TOO_LARGE, None
        try:
            reply = self._request(grammars, LIMIT_S if limit_s is None else limit_s, while_waiting=self._give_way)
        except SandboxTimeoutError:
            return TOO_SLOW, None
        except SandboxDiedError:
            return TOO_LARGE, None
        if not reply["reason"] and reply["compile_s"] > self._compile_s:
            took_s = reply["compile_s"]
            return f"it takes {took_s:.1f} s to compile; the limit is {self._compile_s:g} s: simplify it", None
        return reply["reason"], reply["part"]

    def close(self) -> None:
        """End the process for good, and with it a running check."""
        self._process.close()

    def _send_table(self, table: TokenTable) -> None:
        self._process.start()
        known = self._process.starts, table
        if self._known is None or self._known[0] != known[0] or self._known[1] is not table:
            self._request((table.tokens, table.special_token_ids, table.eos_tokens), START_S)
            self._known = known

    def _request(
        self, message: Any, limit_s: float, *, while_waiting: Callable[[float], None] | None = None
    ) -> dict[str, Any]:
        reply = self._process.request(pickle.dumps(message), limit_s, while_waiting=while_waiting)
        decoded: dict[str, Any] = json.loads(reply)
        return decoded

    def _give_way(self, waited_s: float) -> None:
        if waited_s > SHARE_S and self._has_waiting():
            raise QueueFullError(
                f"the grammar takes longer than {SHARE_S:g} s to compile, and other requests wait; try again in 1 s, "
                "or simplify it",
                retry_after_s=1,
            )
