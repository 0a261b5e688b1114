"""Check grammars in a sandboxed process, compile them for one model's vocabulary with llguidance, and cache them.

Callers write grammars, of which some crash the compiler and others take forever to compile. Grammars are checked one
after the other, and those that would wait too long are refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher

from lmx_lab.engine.grammar.build import as_grammar, enforceable_json
from lmx_lab.engine.grammar.worker import TokenTable, build_tokenizer, compile_grammar
from lmx_lab.engine.requests import ToolUse
from lmx_lab.engine.sandbox_process import SandboxDiedError, SandboxProcess, SandboxStartError, SandboxTimeoutError
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.errors import InvalidRequestError, QueueFullError
from lmx_lab.settings import without_secrets

log = logging.getLogger(__name__)
T = TypeVar("T")
WORKER = Path(__file__).with_name("worker.py")
START_S = 30.0
LIMIT_S = 2.0
"""Time limit for checking a grammar and all its parts."""
SHARE_S = 0.5
"""Time that one grammar may take while others wait."""
TOO_SLOW = f"it takes longer than {LIMIT_S:g} s to compile; simplify it"
TOO_LARGE = "it is too large, or nested too deeply, to be compiled; simplify it"
WAIT_S = 10.0
"""Time that a grammar may wait for others: enough for a hundred usual schemas that are sent together. A slow grammar
is refused after ``SHARE_S`` if others wait."""
WAIT_BEHIND_SLOW_S = 1.5
"""Time that a grammar may wait if a slow one is refused while it waits. After each refusal, the sandbox is started
again."""
POLL_S = 0.1
"""Interval at which the time limit of a waiting grammar is checked."""
CACHE_SIZE = 32
MAX_REASON_CHARACTERS = 1000
ANY_OBJECT = enforceable_json({"type": "object"})
STOP_REASONS = {
    "NoExtensionBias": "no text can be a whole answer of this form",
    "ParserTooComplex": "it has become too complex",
    "LexerTooComplex": "it has become too complex",
}
"""llguidance's names for the ways in which a grammar stops, and our words for them."""


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
            self._process.start()
            known = self._process.starts, table
            if self._known is None or self._known[0] != known[0] or self._known[1] is not table:
                self._request((table.tokens, table.special_token_ids, table.eos_tokens), START_S)
                self._known = known
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


class GrammarQueue:
    """A thread for the grammars of an engine, and the sandbox in which it checks them. Thread-safe.

    Args:
        thread_name: Name of the thread.
        compile_s: See ``GrammarSandbox``.
    """

    def __init__(self, thread_name: str, *, compile_s: float = LIMIT_S) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._unfinished = 0
        self._counting = threading.Lock()
        self._refused_at = 0.0
        """Time at which a slow grammar was last refused."""
        self.sandbox = GrammarSandbox(lambda: self._unfinished > 1, compile_s=compile_s)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on the thread, and return its result. Cancelling the caller removes work that has not started.

        Raises:
            QueueFullError: the work has not started within ``WAIT_S``, or within ``WAIT_BEHIND_SLOW_S`` if slow work
                was refused.
        """
        self._count(1)
        try:
            future = self._executor.submit(self._work, work)
            done = asyncio.wrap_future(future)
            try:
                await self._wait_for_start(future, done)
                return await done
            finally:
                done.cancel()
        finally:
            self._count(-1)

    async def _wait_for_start(self, future: Future[T], done: asyncio.Future[T]) -> None:
        """Wait until the thread has started the work.

        Args:
            done: The future of the event loop that completes with ``future``.

        Raises:
            QueueFullError: it has not started within the time limit, and was removed.
        """
        began = time.monotonic()
        while not done.done() and not future.running():
            await asyncio.wait([done], timeout=POLL_S)
            limit_s = WAIT_BEHIND_SLOW_S if self._refused_at > began else WAIT_S
            # Only work that has not started can be cancelled.
            if time.monotonic() - began >= limit_s and not done.done() and future.cancel():
                raise QueueFullError(
                    f"the check of the grammar did not start within {limit_s:g} s, because other grammars and "
                    "schemas were checked first; try again in 1 s",
                    retry_after_s=1,
                )

    def close(self) -> None:
        """Stop the running work and cancel the queued work, without waiting for either to end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()

    def _work(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except QueueFullError:
            self._refused_at = time.monotonic()
            raise

    def _count(self, change: int) -> None:
        with self._counting:
            self._unfinished += change


def read_token_table(tokenizer: Any, *, width: int, markers: Set[int]) -> TokenTable:
    """Read the bytes and the special tokens of a vocabulary.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``.
        width: Number of logits, which may exceed the tokenizer's size.
        markers: Tokens that the text of an answer may not contain, in addition to the special ones.

    Raises:
        InvalidRequestError: the model has no token that ends an answer.
    """
    vocabulary = Vocabulary(tokenizer)
    ends = sorted(int(token) for token in tokenizer.eos_token_ids if token < width)
    if not ends:
        raise InvalidRequestError("this model has no token that ends an answer, so no answer format can be enforced")
    return TokenTable(
        [vocabulary.bytes_of(token) for token in range(width)],
        [id_ for id_ in range(width) if vocabulary.is_special(id_) or id_ in markers or id_ in ends],
        ends,
    )


class GrammarCompiler:
    """Compiles grammars and caches the results, including errors. Use it on one thread at a time, except for
    ``known_matchers``.

    The matchers that it returns are independent copies, which any one thread can use.
    """

    def __init__(self, table: TokenTable, sandbox: GrammarSandbox) -> None:
        self._table = table
        self._sandbox = sandbox
        self._tokenizer = build_tokenizer(table)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._checked: OrderedDict[str, str] = OrderedDict()
        self._refused: OrderedDict[str, InvalidRequestError] = OrderedDict()

    def known_matchers(self, grammar: str, count: int) -> list[LLMatcher] | None:
        """Return matchers of a grammar that was compiled before; None if it is not known. May be called from any
        thread.

        Raises:
            InvalidRequestError: the grammar was refused before.
        """
        if (refused := self._refused.get(grammar)) is not None:
            raise InvalidRequestError(refused.message, param=refused.param)
        matcher = self._compiled.get(grammar)
        return None if matcher is None else [matcher.deep_copy() for _ in range(count)]

    def matchers(self, grammar: str, count: int, tools: ToolUse | None = None) -> list[LLMatcher]:
        """Return ``count`` matchers at the beginning of the grammar.

        Args:
            tools: The tools that the grammar contains, so that an error can name the one with invalid parameters.

        Raises:
            InvalidRequestError: the grammar cannot be compiled; the message contains llguidance's reason.
            QueueFullError: it takes long to compile, and others wait.
        """
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = compile_grammar(self._tokenizer, self.check(grammar, tools))
        _put(self._compiled, grammar, matcher)
        return [matcher.deep_copy() for _ in range(count)]

    def check(self, grammar: str, tools: ToolUse | None = None) -> str:
        """Return the grammar in the form in which it can be compiled.

        Parameters that cannot be enforced are replaced by any object if the tool may be called but need not be: a
        client that offers many tools has often not written all of them itself.

        Raises:
            InvalidRequestError, QueueFullError: as ``matchers``.
        """
        if (refused := self._refused.get(grammar)) is not None:
            raise InvalidRequestError(refused.message, param=refused.param)
        enforced = self._checked.pop(grammar, None) or self._check_in_sandbox(grammar, tools)
        _put(self._checked, grammar, enforced)
        return enforced

    def _check_in_sandbox(self, grammar: str, tools: ToolUse | None) -> str:
        whole = json.loads(grammar)
        parts = whole["grammars"][1:]
        until = time.monotonic() + LIMIT_S
        while True:
            text = json.dumps(whole, ensure_ascii=False)
            left_s = max(0.0, until - time.monotonic())
            reason, at = self._sandbox.find_problem(self._table, [text, *map(as_grammar, parts)], left_s)
            if not reason:
                return text
            # ``at`` is the index of the part that is invalid on its own, if there is one.
            what, param = ("the format of the answer", None) if at is None else ("this format", "response_format")
            call = re.fullmatch(r"call_(\d+)_arguments", parts[at]["name"]) if at is not None else None
            if at is not None and call is not None and tools is not None:
                if not tools.forced and parts[at]["json_schema"] != ANY_OBJECT:
                    parts[at]["json_schema"] = ANY_OBJECT
                    continue
                what = f"the parameters of the tool {tools.tools[int(call[1])].name!r}"
                param = f"tools.{call[1]}.function.parameters"
            message = f"{what} cannot be enforced: {shorten_reason(reason)}"
            # Not cached if the process ended: the grammar may not have been the cause.
            if reason != TOO_LARGE:
                _put(self._refused, grammar, InvalidRequestError(message, param=param))
            raise InvalidRequestError(message, param=param)


def _put(cache: OrderedDict[str, T], grammar: str, value: T) -> None:
    cache[grammar] = value
    cache.move_to_end(grammar)
    if len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


def shorten_reason(reason: str) -> str:
    """Shorten an error message of llguidance, and remove the part about its internal state."""
    reason = reason.partition("<state>")[0].strip()
    reason = STOP_REASONS.get(reason, reason)
    if len(reason) <= MAX_REASON_CHARACTERS:
        return reason
    # The beginning names the place and the end the error; the caller's own grammar is between them.
    return f"{reason[: MAX_REASON_CHARACTERS // 2]} ... {reason[-MAX_REASON_CHARACTERS // 2 :]}"
