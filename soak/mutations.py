"""Load models with one randomly changed file. Each load must end in time, and the server must stay usable.

A mutated model is either refused with an error or loaded; in that case, requests to it must end. After each mutated
model, the valid model that was loaded before must give the same answer as at the start.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
import psutil

from soak.chat_requests import ReferenceChat
from soak.fuzz import COMPLAINT, COMPLAINT_CHARACTERS
from soak.mutated_models import MutatedModels
from soak.programs import SMALL_CACHE, Home, Server, end_and_check
from soak.report import Row, Soak, print_line

COUNT, QUICK_COUNT = 200, 33
ANSWER_S = 30.0
"""Time limit for the answer to a load or to a request."""
MEMORY_BYTES = 4e9
"""Memory limit of the server and its processes. A server that uses more is killed."""
POLL_S = 0.05
SHOWN = 100
LOAD = "/admin/models/load"
TEXTS = ["a cat", "a dog"]
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
    ("/v1/embeddings", {"input": TEXTS}),
    ("/v1/rerank", {"query": "a cat", "documents": TEXTS}),
)
"""A request for each kind of model; models of other kinds refuse it."""


def run(soak: Soak) -> list[Row]:
    count = soak.count if soak.count is not None else QUICK_COUNT if soak.quick else COUNT
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        loads = MutatedLoads(soak, Path(name))
        return loads.run(range(count))


class MutatedLoads:
    """Loads mutated models one after the other in one server. A server that fails is replaced."""

    def __init__(self, soak: Soak, folder: Path) -> None:
        self._seed, self._folder = soak.seed, folder
        self._models = MutatedModels(folder, soak)
        self._rows: dict[str, Row] = {}
        self._outcomes: dict[str, Counter[str]] = {}

    def run(self, numbers: range) -> list[Row]:
        """Load the models of these numbers. Returns a row for each changed part, and one for all of them."""
        left, whole, servers = iter(numbers), Row(part="mutations: all of them"), 0
        number: int | None = next(left)
        while number is not None:
            servers += 1
            with _CheckedServer(Home(self._folder / f"home-{servers}"), self._models.valid) as server:
                while number is not None and server.usable:
                    self._load(server, number)
                    if (number + 1) % SHOWN == 0:
                        problems = sum(len(row.wrong) for row in self._rows.values())
                        print_line(f"{number + 1} of {len(numbers)} models with seed {self._seed}: {problems} problems")
                    number = next(left, None)
                if server.usable:
                    end_and_check(server, whole)
        for name, row in self._rows.items():
            row.notes = _in_words(self._outcomes[name])
            whole.requests += row.requests
            whole.faults += row.faults
        whole.notes = f"{_in_words(sum(self._outcomes.values(), Counter[str]()))}; {servers - 1} servers replaced"
        return [*self._rows.values(), whole]

    def _load(self, server: _CheckedServer, number: int) -> None:
        part, path = self._models.write(number)
        row = self._rows.setdefault(part.name, Row(part=f"mutations: {part.name}"))
        outcomes = self._outcomes.setdefault(part.name, Counter())
        row.faults += 1
        began, problems = server.requests, len(server.problems)
        try:
            outcomes[server.load(path)] += 1
        except _ServerLostError as lost:
            outcomes["server lost"] += 1
            row.hung += lost.hung
            row.lost += not lost.hung
        row.requests += server.requests - began
        row.slowest_s = max(row.slowest_s, server.slowest_s)
        row.wrong += [f"model {number} of seed {self._seed}: {problem}" for problem in server.problems[problems:]]
        shutil.rmtree(self._folder / f"mutated-{number}")


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


class _ServerLostError(Exception):
    """The server has ended, does not answer, or uses too much memory."""

    def __init__(self, problem: str, *, hung: bool) -> None:
        super().__init__(problem)
        self.hung = hung


class _CheckedServer(Server):
    """A server with a valid model, which checks each answer to requests for mutated models."""

    def __init__(self, home: Home, valid: Path) -> None:
        super().__init__(home, valid, *SMALL_CACHE)
        self._valid = valid
        self._http = httpx2.Client(base_url=self.url, timeout=ANSWER_S, trust_env=False)
        self._reference = asyncio.run(ReferenceChat.record(self.url))
        self._searched = len(self.output)
        self.problems: list[str] = []
        self.usable = True
        self.requests = 0
        self.slowest_s = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        super().__exit__(kind, value, trace)

    def load(self, path: Path) -> str:
        """Load a mutated model, use it, and check the valid model afterwards; return the outcome.

        Raises:
            _ServerLostError: another server is needed.
        """
        self.slowest_s = 0.0
        try:
            answer = self._post(LOAD, {"model": str(path)})
            if loaded := answer.status_code == 200:
                for route, body in REQUESTS:
                    self._check(route, self._post(route, {"model": "default", **body}))
                again = self._post(LOAD, {"model": str(self._valid)})
                if again.status_code != 200:
                    self.problems.append(f"the valid model cannot be loaded: {again.text[:300]}")
            else:
                self._check(LOAD, answer)
            self.requests += 1
            reference = asyncio.run(self._reference.repeat(self.url, limit_s=ANSWER_S))
        except _ServerLostError as lost:
            self.usable = False
            self.problems.append(str(lost))
            raise
        if not reference.finished:
            self.problems.append(f"afterwards the valid model answers with {reference.outcome}")
            self.usable = False
        self.problems += self._find_problems()
        return "loaded" if loaded else "refused"

    def _post(self, route: str, body: dict[str, Any]) -> httpx2.Response:
        """Send a request while watching the server's memory."""
        self.requests += 1
        began = time.monotonic()
        with _MemoryWatch(self) as watch:
            try:
                answer = self._http.post(route, json=body)
            except httpx2.TimeoutException as exc:
                raise _ServerLostError(f"{route} was not answered within {ANSWER_S:g} s", hung=True) from exc
            except httpx2.HTTPError as exc:
                status = self.wait(ANSWER_S)
                why = f"was killed at {watch.highest / 1e9:.1f} GB" if watch.exceeded else f"ended with {status}"
                end = self.output[-COMPLAINT_CHARACTERS:] if not watch.exceeded else ""
                raise _ServerLostError(f"{route}: the server {why} {end}", hung=False) from exc
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        return answer

    def _check(self, what: str, answer: httpx2.Response) -> None:
        """Check that an answer is JSON, and that a load has not failed with an internal error.

        Status 500 for a request is allowed: a model with damaged weights computes values that are not finite.
        """
        status = answer.status_code
        try:
            body = json.loads(answer.content, parse_constant=_refuse_constant)
            problem = f"{body['error']['code']}: {body['error']['message'][:300]}" if status >= 400 else ""
        except (ValueError, TypeError, KeyError) as exc:
            self.problems.append(f"{what}: status {status} with {answer.text[:200]!r}: {exc}")
            return
        if what == LOAD and status not in (200, 400, 503):
            self.problems.append(f"{what}: status {status}, {problem}")

    def _find_problems(self) -> Iterator[str]:
        """Yield the new output of the server that must not occur for any model, such as a traceback."""
        output = self.output
        new, self._searched = output[self._searched :], len(output)
        if found := COMPLAINT.search(new):
            yield f"it printed: {new[max(0, found.start() - 200) : found.start() + COMPLAINT_CHARACTERS]}"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class _MemoryWatch:
    """Kills a server that uses too much memory, as a context manager."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.highest = 0.0
        self.exceeded = False

    def __enter__(self) -> _MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        main = psutil.Process(self._server.pid)
        while not self._done.wait(POLL_S):
            try:
                used = sum(each.memory_info().rss for each in (main, *main.children(recursive=True)))
            except psutil.Error:
                continue
            self.highest = max(self.highest, used)
            if used > MEMORY_BYTES:
                self.exceeded = True
                self._server.process.kill()
                return
